from pathlib import Path

import pytest

from tenplex_megatron.cli.run import parse_options
from tenplex_megatron.config import ElasticPolicy
from tenplex_megatron.elastic import launch
from tenplex_megatron.errors import ConfigError

BASE = ["--elastic-policy", "p.yaml", "--nproc-per-node", "2"]


def config(tmp_path: Path, *flags: str):  # noqa: ANN201 - torch's own type
    log_dir = str(tmp_path / "logs")
    options, torchrun = parse_options([*BASE, "--log-dir", log_dir, *flags, "train.py", "--lr=1"])
    return launch._launch_config(torchrun, ElasticPolicy(), options), options, torchrun


def test_options_of_torchrun_keep_their_meaning(tmp_path: Path) -> None:
    made, options, torchrun = config(
        tmp_path, "--nnodes=2:4", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "--rdzv-id=gpt"
    )
    assert (made.min_nodes, made.max_nodes, made.nproc_per_node) == (2, 4, 2)
    assert (made.rdzv_backend, made.rdzv_endpoint, made.run_id) == ("c10d", "h:1", "gpt")
    assert options.job == "gpt"
    assert torchrun.training_script_args == ["--lr=1"]


def test_names_come_from_the_script_and_the_host_unless_given(tmp_path: Path) -> None:
    _, options, _ = config(tmp_path)
    assert options.job == "train"
    assert options.node
    _, options, _ = config(tmp_path, "--job=j", "--node-name=n")
    assert (options.job, options.node) == ("j", "n")


def test_a_fork_server_and_quick_polls_are_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, _ = config(tmp_path)
    assert (made.start_method, made.monitor_interval) == ("forkserver", 0.02)
    monkeypatch.setenv("PET_MONITOR_INTERVAL", "0.5")
    made, _, _ = config(tmp_path)
    assert float(made.monitor_interval) == 0.5


def test_keep_alives_are_long_enough_and_given_values_win(tmp_path: Path) -> None:
    made, _, _ = config(tmp_path)
    kept = made.rdzv_configs
    assert kept["keep_alive_interval"] * kept["keep_alive_max_attempt"] >= 6
    made, _, _ = config(tmp_path, "--rdzv-conf=join_timeout=7,keep_alive_interval=9")
    assert made.rdzv_configs["join_timeout"] == "7"
    assert made.rdzv_configs["keep_alive_interval"] == "9"


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--no-python", "--no-python is not supported"),
        ("--start-method=fork", "expected forkserver or spawn"),
        ("--nnodes=0", "min_nodes"),
    ],
)
def test_what_an_elastic_job_can_not_do_is_refused(tmp_path: Path, flag: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(tmp_path, flag)


def test_max_restarts_overrides_the_policy(tmp_path: Path) -> None:
    made, _, _ = config(tmp_path, "--max-restarts=3")
    assert launch._with_failures(ElasticPolicy(), made).max_failures == 3
    made, _, _ = config(tmp_path)
    assert launch._with_failures(ElasticPolicy(), made).max_failures == 16


def test_a_node_name_runs_once_per_folder(tmp_path: Path) -> None:
    with launch._claimed(tmp_path, "a"):
        with launch._claimed(tmp_path, "b"):
            pass
        with (
            pytest.raises(ConfigError, match="node a of this job runs already"),
            launch._claimed(tmp_path, "a"),
        ):
            pass
    with launch._claimed(tmp_path, "a"):
        pass
