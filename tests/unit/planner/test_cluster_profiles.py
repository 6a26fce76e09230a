from dataclasses import fields
from pathlib import Path

import pytest

from tenplex_megatron.config import load_profile
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.profile import ModelProfile

PROFILES = sorted(Path(__file__).parents[3].glob("configs/cluster/*.yaml"))
NEEDED = """
name: tiny
devices_per_node: 8
memory_bytes: 80e9
peak_flops: 312e12
memory_bandwidth: 2.0e12
node_bandwidth: 300e9
network_bandwidth: 25e9
"""


def load(tmp_path: Path, text: str) -> ClusterProfile:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return load_profile(ClusterProfile, path)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_profile_of_the_repository_loads_and_comments_every_key(path: Path) -> None:
    assert load_profile(ClusterProfile, path).name == path.stem
    lines = path.read_text().splitlines()
    written = [(number, line) for number, line in enumerate(lines) if line and line[0] != "#"]
    keys = {line.partition(":")[0]: number for number, line in written}
    assert set(keys) == {field.name for field in fields(ClusterProfile)}
    assert all(lines[number - 1].startswith("# ") for number in keys.values())


def test_numbers_may_be_written_as_people_write_them(tmp_path: Path) -> None:
    found = load(tmp_path, NEEDED)
    assert found.peak_flops == 312e12
    assert type(found.memory_bytes) is float
    assert found.devices_per_node == 8


def test_a_model_loads_too(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(
        "{num_layers: 2, hidden_size: 64, num_heads: 4, num_query_groups: 4, head_size: 16, "
        "ffn_size: 256, seq_length: 32, vocab_size: 128, is_gated: true}"
    )
    assert load_profile(ModelProfile, path).is_gated


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f"{NEEDED}peak_flop: 1",
            "c.yaml: peak_flop: unknown key; the closest key is 'peak_fl",
        ),
        (NEEDED.replace("name: tiny", ""), "c.yaml: name: expected a value, got none"),
        (f"{NEEDED}overlap: much", "c.yaml: overlap: expected a number, got 'much'"),
        (f"{NEEDED}overlap: true", "c.yaml: overlap: expected a number, got True"),
        (NEEDED.replace("8\n", "8.5\n", 1), "devices_per_node: expected a whole number, got 8.5"),
        (f"{NEEDED}scatters_sends: 1", "scatters_sends: expected true or false, got 1"),
        (f"{NEEDED}overlap: -1", "c.yaml: overlap: expected a number at least 0, got -1"),
        ("[1]", r"c.yaml: expected keys and values, got \[1\]"),
        ("{", "is not valid YAML"),
    ],
)
def test_a_mistake_names_file_key_and_what_was_expected(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"profile .*none.yaml can't be read"):
        load_profile(ClusterProfile, tmp_path / "none.yaml")
