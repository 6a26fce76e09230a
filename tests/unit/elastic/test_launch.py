from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

from tenplex_megatron.adapters.arguments import ArgumentAdapter
from tenplex_megatron.cli.run import parse_options
from tenplex_megatron.config import ElasticPolicy, TimeoutPolicy
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.elastic import launch
from tenplex_megatron.errors import ConfigError, StoreError, TransportError
from tenplex_megatron.store import shared
from tenplex_megatron.store.shared import SnapshotStore

BASE = ["--elastic-policy", "p.yaml", "--nproc-per-node", "2"]


def config(  # noqa: ANN201 - torch's own type
    tmp_path: Path, *flags: str, policy: ElasticPolicy | None = None
):
    log_dir = str(tmp_path / "logs")
    options, torchrun = parse_options([*BASE, "--log-dir", log_dir, *flags, "train.py", "--lr=1"])
    return launch._launch_config(torchrun, policy or ElasticPolicy(), options), options, torchrun


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


def test_one_node_needs_no_endpoint_and_several_are_told_which_option_names_it(
    tmp_path: Path,
) -> None:
    made, _, _ = config(tmp_path)
    assert (made.rdzv_backend, made.rdzv_endpoint) == ("c10d", "localhost:0")
    with pytest.raises(ConfigError, match=r"--nnodes 2: .*--rdzv-endpoint .*--standalone"):
        config(tmp_path, "--nnodes=2")
    made, _, _ = config(tmp_path, "--nnodes=2", "--master-addr=node0", "--node-rank=1")
    assert (made.rdzv_backend, made.rdzv_endpoint) == ("static", "node0:29500")
    made, _, _ = config(tmp_path, "--nnodes=2", "--master-port=7")
    assert made.rdzv_endpoint == "127.0.0.1:7"


@pytest.mark.parametrize("wait_s", [1, 10, 60, 600])
def test_enough_nodes_stop_waiting_for_more_before_their_time_is_over(
    tmp_path: Path, wait_s: int
) -> None:
    policy = ElasticPolicy(timeouts=TimeoutPolicy(rendezvous_s=wait_s))
    made, _, _ = config(tmp_path, "--nnodes=1:2", "--rdzv-endpoint=h:1", policy=policy)
    kept = made.rdzv_configs
    assert kept["last_call_timeout"] <= min(30, kept["join_timeout"])


def test_a_missing_script_is_named_before_the_flags_of_the_model(tmp_path: Path) -> None:
    script = tmp_path / "none.py"
    with pytest.raises(ConfigError, match=f"{script} does not exist"):
        run(tmp_path, "device: cpu", str(script))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (0, "expected cuda devices, found 0; set device: cpu to try"),
        (1, r"expected 2 cuda devices \(--nproc-per-node\), found 1; .* at most 1"),
    ],
)
def test_too_few_gpus_are_counted_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: int, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    with pytest.raises(ConfigError, match=f"{tmp_path / 'p.yaml'}: device: {said}"):
        run(tmp_path, "device: cuda", __file__)


@pytest.mark.parametrize(("found", "policy"), [(2, "device: cuda"), (0, "device: cpu")])
@pytest.mark.parametrize("script", [(__file__,), ("--module", "no.file")])
def test_enough_gpus_or_the_stand_in_and_a_module_are_let_through(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    found: int,
    policy: str,
    script: tuple[str, ...],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    with pytest.raises(ConfigError, match="no adapter in this test"):
        run(tmp_path, policy, *script)


def run(tmp_path: Path, policy: str, *script: str) -> int:
    path = tmp_path / "p.yaml"
    path.write_text(policy)
    options, torchrun = parse_options(
        [f"--elastic-policy={path}", "--nproc-per-node=2", f"--log-dir={tmp_path}", *script]
    )

    def no_adapter(_: str) -> ArgumentAdapter:
        raise ConfigError("no adapter in this test")

    return launch.run_node(options, torchrun, no_adapter)


class Holder:
    """As torch's: a state that `sync` brings up to date."""

    def __init__(self, *counts: int, is_complete: bool = False) -> None:
        self.counts = list(counts)
        self.is_complete = is_complete
        self.state = SimpleNamespace(participants={}, complete=False)

    def sync(self) -> bool:
        participants = dict.fromkeys(range(self.counts.pop(0)))
        self.state = SimpleNamespace(participants=participants, complete=self.is_complete)
        return True


def attendance(*counts: int, is_complete: bool = False) -> launch._Attendance:
    holder = Holder(*counts, is_complete=is_complete)
    made = launch._Attendance(SimpleNamespace(_state_holder=holder))
    assert all(holder.sync() for _ in counts)
    return made


def no_meeting(
    tmp_path: Path, error: Exception, seen: launch._Attendance, *flags: str
) -> ConfigError | TransportError:
    policy = ElasticPolicy(timeouts=TimeoutPolicy(rendezvous_s=10))
    made, _, _ = config(tmp_path, *(flags or ("--rdzv-backend=c10d",)), *MEET, policy=policy)
    return launch._no_meeting(made, policy, seen, error)


MEET = ("--nnodes=3", "--rdzv-endpoint=h:1")


def test_nodes_that_are_missing_are_counted(tmp_path: Path) -> None:
    # Nodes leave one by one when their time is over.
    said = no_meeting(tmp_path, RendezvousTimeoutError(), attendance(1, 2, 1, 0))
    assert isinstance(said, TransportError)
    assert str(said) == (
        "2 of 3 nodes came to h:1 within 10 s; start tenplex run with the same --rdzv-endpoint and "
        "--job on the others, or raise timeouts.rendezvous_s"
    )
    flags = ("--rdzv-backend=c10d", "--rdzv-conf=join_timeout=7")
    said = no_meeting(tmp_path, RendezvousTimeoutError(), attendance(1), *flags)
    assert "1 of 3 nodes came to h:1 within 7 s" in str(said)
    assert str(said).endswith("or raise join_timeout of --rdzv-conf")


def test_a_rendezvous_that_is_not_torchs_own_is_not_counted(tmp_path: Path) -> None:
    seen = launch._Attendance(SimpleNamespace())
    said = str(no_meeting(tmp_path, RendezvousTimeoutError(), seen))
    assert said.startswith("not all of 3 nodes came to h:1 within 10 s")


def test_a_static_rendezvous_counts_in_its_message(tmp_path: Path) -> None:
    error = DistStoreError("Timed out after 11 seconds waiting for clients. 2/3 clients joined.")
    seen = launch._Attendance(SimpleNamespace())
    said = no_meeting(tmp_path, error, seen, "--rdzv-backend=static")
    assert isinstance(said, TransportError)
    assert str(said).startswith("2 of 3 nodes came to h:1 within 10 s; start tenplex run with the")
    assert "--master-addr and --master-port" in str(said)


def test_a_job_that_is_full_or_over_is_not_taken_for_one_that_lacks_nodes(tmp_path: Path) -> None:
    full = attendance(3, is_complete=True)
    said = no_meeting(tmp_path, RendezvousTimeoutError(), full)
    assert "the job at h:1 runs with 3 nodes already" in str(said)
    said = no_meeting(tmp_path, RendezvousClosedError(), attendance(1))
    assert "the job at h:1 has ended" in str(said)


def test_an_error_without_a_text_is_named_by_its_kind(tmp_path: Path) -> None:
    said = no_meeting(tmp_path, RendezvousError(), attendance(1))
    assert isinstance(said, ConfigError)
    assert "no rendezvous at h:1 (c10d): RendezvousError; check" in str(said)


def test_a_store_without_a_version_goes_with_its_empty_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    monkeypatch.setattr(shared, "default_root", lambda: root)
    store = SnapshotStore(root / "job" / "a", "job", "same")

    def fail() -> None:
        with launch._store_in_place(store):
            assert (store.directory / "job.json").exists()
            raise ConfigError("no layout")

    with pytest.raises(ConfigError, match="no layout"):
        fail()
    assert not root.exists()


def test_a_store_that_was_there_before_or_holds_a_version_stays(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "job" / "a", "job", "same")
    with launch._store_in_place(store):
        finish_a_version(store)
    assert [held.version for held in store.examine().snapshots] == [3]
    other = SnapshotStore(tmp_path / "job" / "b", "job", "same").create()
    with launch._store_in_place(other):
        pass
    assert (other.directory / "job.json").exists()


def test_a_finished_job_leaves_no_folder(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "root" / "job" / "a", "job", "same")
    with launch._store_in_place(store):
        finish_a_version(store)
        store.remove()
    assert not list((tmp_path / "root").iterdir()), "a root that somebody chose stays"


def finish_a_version(store: SnapshotStore) -> None:
    box = Box("w", Region((0,), (4,)))
    specs = {"w": TensorSpec("w", (4,), "uint8")}
    writer = store.writer(0, 1, generation=1, layout={}, specs=specs, boxes=[box])
    writer.begin(3)
    writer.finish(3, {})


def test_folders_that_another_job_takes_away_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = shared.make_private_directory
    lost = iter([True, True])

    def make(path: Path) -> None:
        if next(lost, False):
            raise StoreError("can't create") from FileNotFoundError()
        made(path)

    monkeypatch.setattr(shared, "make_private_directory", make)
    store = SnapshotStore(tmp_path / "job" / "a", "job", "same").create()
    assert (store.directory / "job.json").exists()
    lost = iter([True] * 5)
    with pytest.raises(StoreError, match="can't create"):
        store.create()
