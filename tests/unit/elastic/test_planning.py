"""What of a policy and a script's flags becomes the rules of a job."""

from pathlib import Path
from typing import Any

import pytest

from tenplex_megatron.adapters.megatron.arguments import MegatronArguments
from tenplex_megatron.config import known_clusters, load_policy
from tenplex_megatron.elastic.membership import Rules
from tenplex_megatron.elastic.planning import rules_of
from tenplex_megatron.errors import ConfigError

FLAGS = [
    *("--num-layers=8", "--num-attention-heads=16", "--global-batch-size=32"),
    *("--micro-batch-size=2", "--hidden-size=64", "--seq-length=32", "--use-distributed-optimizer"),
]


def made(folder: Path, text: str) -> Rules:
    path = folder / "p.yaml"
    path.write_text(text)
    policy = load_policy(path)
    return rules_of(policy, path, MegatronArguments(), FLAGS, devices_per_node=3)


def test_flags_and_policy_make_the_rules(tmp_path: Path) -> None:
    rules = made(tmp_path, "device: cpu\nlayouts: [TP2]\nplanner: {memory_gb: 2}\n")
    assert (rules.cluster.name, rules.cluster.devices_per_node) == ("cpu", 3)
    assert rules.cluster.memory_bytes == 2e9
    assert (rules.job.layouts, rules.job.base.zero_stage) == (("TP2",), 1)


@pytest.mark.parametrize("name", known_clusters())
def test_every_known_cluster_can_be_named(tmp_path: Path, name: str) -> None:
    rules = made(tmp_path, f"planner: {{cluster: {name}}}\n")
    assert rules.cluster.name.partition("_")[0].lower() in name


def test_a_file_is_seen_from_the_policy(tmp_path: Path) -> None:
    text = known_clusters()["h100"].read_text().replace("name: h100", "name: mine")
    (tmp_path / "mine.yaml").write_text(text)
    assert made(tmp_path, "planner: {cluster: mine.yaml}\n").cluster.name == "mine"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "planner:\n  cluster: v100\n",
            (
                r"planner.cluster \(.*p.yaml, line 2\): cluster 'v100': expected a file, or one of "
                r"a100_selene, .*; for other devices copy .*a100_selene.yaml, write their numbers"
            ),
        ),
        (
            "planner:\n  cluster: h100\n  memory_gb: 100\n",
            (
                r"planner.memory_gb \(.*p.yaml, line 3\): expected at most the .* GB that "
                r"memory_bytes in .*h100.yaml says, got 100; correct one"
            ),
        ),
        (
            "max_failures: 3\nplanner: {}\n",
            (
                r"planner \(.*p.yaml, line 2\): no profile of the GPU 'none' is known, only of "
                r"a100_selene, .*; set planner.cluster to one of these"
            ),
        ),
    ],
)
def test_what_is_wrong_has_a_place_and_a_remedy(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(tmp_path, text)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cluster", ""),
        ("cluster", 3),
        ("memory_gb", 0),
        ("memory_gb", True),
        ("next_change_s", -1),
        ("least_gain", 1),
        ("least_gain", False),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, key: str, value: Any) -> None:  # noqa: ANN401
    path = tmp_path / "p.yaml"
    path.write_text(f"planner: {{{key}: {str(value).lower() or repr('')}}}\n")
    with pytest.raises(ConfigError, match=rf"planner\.{key}: expected "):
        load_policy(path)
