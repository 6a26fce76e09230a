from pathlib import Path

import pytest

from tenplex_megatron.config import ElasticPolicy, load_policy, parse_policy
from tenplex_megatron.errors import ConfigError

POLICIES = sorted(Path(__file__).parents[2].glob("configs/elastic/*.yaml"))


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.name)
def test_every_policy_of_the_repository_loads(path: Path) -> None:
    assert isinstance(load_policy(path), ElasticPolicy)


def test_the_documented_policy_holds_the_defaults() -> None:
    assert load_policy(next(p for p in POLICIES if p.name == "default.yaml")) == ElasticPolicy()
    assert parse_policy("") == ElasticPolicy()


def test_every_value_of_the_file_arrives() -> None:
    policy = parse_policy(
        """
        device: cpu
        snapshot: {every_steps: 3, directory: /dev/shm/x}
        layouts: ["TP2,PP2", "TP1,PP1,DP3"]
        schedule: {6: 4, 18: 8}
        failed_device: reuse
        max_failures: 2
        preload: [numpy.linalg, json]
        audit: {samples: true}
        timeouts: {stop_s: 1.5}
        """
    )
    assert policy.snapshot.every_steps == 3
    assert policy.snapshot.directory == "/dev/shm/x"
    assert policy.layouts == ("TP2,PP2", "TP1,PP1,DP3")
    assert policy.schedule == {6: 4, 18: 8}
    assert policy.preload == ("numpy.linalg", "json")
    assert (policy.device, policy.failed_device, policy.max_failures) == ("cpu", "reuse", 2)
    assert policy.audit.samples
    assert (policy.timeouts.stop_s, policy.timeouts.rendezvous_s) == (1.5, 60.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("snapshots: 1", "p.yaml: snapshots: unknown key; the closest key is 'snapshot'"),
        ("snapshot: {every: 3}", "p.yaml: snapshot.every: unknown key; the closest key is 'every_"),
        ("snapshot: {every_steps: x}", "p.yaml: snapshot.every_steps: expected a count from 1"),
        ("snapshot: {every_steps: true}", "p.yaml: snapshot.every_steps: expected a count from 1"),
        ("snapshot: {directory: 1}", "p.yaml: snapshot.directory: expected a folder or null"),
        ("snapshot: 4", "p.yaml: snapshot: expected keys and values, got 4"),
        ("layouts: [TP2x]", "p.yaml: layouts: expected axes with sizes"),
        ("layouts: ['TP2,TP4']", "p.yaml: layouts: expected axes with sizes"),
        ("layouts: [TP2,PP2]", 'p.yaml: layouts: expected layouts such as "TP2,PP2" in quotes'),
        ("layouts: 3", "p.yaml: layouts: expected auto or a list, got 3"),
        ("layouts: []", "p.yaml: layouts: expected auto or a list"),
        ("schedule: [1]", "p.yaml: schedule: expected step: devices pairs"),
        ("schedule: {a: 1}", "p.yaml: schedule: expected step numbers as keys, got 'a'"),
        ("schedule: {6: 0}", "p.yaml: schedule.6: expected a count of devices, got 0"),
        ("device: tpu", "p.yaml: device: expected cuda or cpu, got 'tpu'"),
        ("failed_device: fix", "p.yaml: failed_device: expected drop or reuse, got 'fix'"),
        ("preload: torch", "p.yaml: preload: expected a list of modules, got 'torch'"),
        ("preload: [a/b.py]", "p.yaml: preload: expected names of modules such as"),
        ("preload: [1]", "p.yaml: preload: expected names of modules such as"),
        ("max_failures: -1", "p.yaml: max_failures: expected a count from 0, got -1"),
        ("audit: {samples: 1}", "p.yaml: audit.samples: expected true or false, got 1"),
        ("timeouts: {stop_s: 0}", "p.yaml: timeouts.stop_s: expected seconds above 0, got 0"),
        ("framework: ''", "p.yaml: framework: expected an adapter's name"),
        ("[1]", "p.yaml: expected keys and values, got [1]"),
        ("a: [", "elastic policy p.yaml is not valid YAML"),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_policy(text, "p.yaml")
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        load_policy(tmp_path / "none.yaml")
