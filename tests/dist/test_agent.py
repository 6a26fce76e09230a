"""Two agents with four toy workers each on this machine: what a job survives, and what it says."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tenplex_megatron.cli.main import main as tenplex

HERE = Path(__file__).parent
POLICY = """
device: cpu
snapshot: {{every_steps: 2}}
layouts: ["TP2,PP2", "TP1,PP1,DP3", "TP1,PP1,DP2", "TP1,PP1,DP1"]
timeouts: {{rendezvous_s: 60, stop_s: 5}}
{more}
"""
WAIT_S = 240.0

pytestmark = pytest.mark.timeout(600)


class Job:
    """Two agents of one job, and what they wrote."""

    def __init__(self, folder: Path, more: str = "", *, static: bool = False) -> None:
        self.static = static
        self.script = HERE / "toy_worker.py"
        self.folder = folder
        self.run_dir = folder / "run"
        self.port = free_port()
        self.agents: dict[str, subprocess.Popen[str]] = {}
        self.policy = folder / "policy.yaml"
        self.policy.write_text(POLICY.format(more=more))

    def start(
        self,
        *arguments: str,
        nodes: str = "ab",
        per_node: int = 4,
        at_least: int = 0,
        flags: tuple[str, ...] = (),
    ) -> "Job":
        for index, node in enumerate(nodes):
            command = [
                sys.executable,
                str(HERE / "toy_agent.py"),
                f"--elastic-policy={self.policy}",
                f"--nnodes={at_least or len(nodes)}:{len(nodes)}",
                f"--nproc-per-node={per_node}",
                *self.meet(index),
                "--job=toy",
                f"--node-name={node}",
                f"--run-dir={self.run_dir}",
                f"--store-dir={self.folder / 'store'}",
                *flags,
                str(self.script),
                *arguments,
            ]
            with (self.folder / f"agent-{node}.log").open("w") as log:
                self.agents[node] = subprocess.Popen(
                    command, stdout=log, stderr=log, text=True, env=os.environ | ENVIRONMENT
                )
        return self

    def meet(self, index: int) -> list[str]:
        if self.static:
            address = ["--master-addr=localhost", f"--master-port={self.port}"]
            return [*address, f"--node-rank={index}"]
        host = f"--rdzv-conf=is_host={index == 0}"
        return ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{self.port}", host]

    def events(self, kind: str, **wanted: object) -> list[dict[str, Any]]:
        found = [*lines(self.run_dir / "events.jsonl"), *lines(self.run_dir / "steps.jsonl")]
        return [
            line
            for line in found
            if line["kind"] == kind and all(line[name] == value for name, value in wanted.items())
        ]

    def wait_for(self, kind: str, **wanted: object) -> dict[str, Any]:
        return wait_until(lambda: next(iter(self.events(kind, **wanted)), None), self)

    def pids(self, generation: int) -> dict[int, int]:
        started = wait_until(
            lambda: (
                found
                if len(found := self.events("started", generation=generation)) == len(self.agents)
                else None
            ),
            self,
        )
        return {int(rank): pid for line in started for rank, pid in line["pids"].items()}

    def devices(self, generation: int) -> dict[str, list[int]]:
        self.pids(generation)
        return {
            line["node"]: list(line["devices"].values())
            for line in self.events("started", generation=generation)
        }

    def codes(self) -> dict[str, int]:
        return {node: agent.wait(WAIT_S) for node, agent in self.agents.items()}

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("agent-*.log")))

    def end(self) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.kill()
                agent.wait()


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}


def lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_until[T](look: Callable[[], T | None], job: Job, seconds: float = WAIT_S) -> T:
    deadline = time.monotonic() + seconds
    while (found := look()) is None:
        assert time.monotonic() < deadline, f"waited {seconds} s\n{job.log()}"
        assert any(agent.poll() is None for agent in job.agents.values()), job.log()
        time.sleep(0.01)
    return found


def gone_soon(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"still running: {[p for p in pids if alive(p)]}"
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def make_job(folder: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(more: str = "", *, static: bool = False) -> Job:
        jobs.append(Job(folder, more, static=static))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


def test_a_job_shrinks_loses_a_device_and_grows_back(make_job: Callable[..., Job]) -> None:
    job = make_job("schedule: {3: 4}").start("60", "0.1", "train")
    shrunk = job.wait_for("step", generation=2)
    assert (shrunk["step"], shrunk["world"], shrunk["layout"]) == (4, 4, "TP2,PP2,DP1")
    assert job.devices(2) == {"a": [0, 1], "b": [0, 1]}

    job.wait_for("step", generation=2, step=9)
    killed = time.time()
    os.kill(job.pids(2)[1], signal.SIGKILL)
    went_on = job.wait_for("step", generation=3)
    print_phases(job, 3, killed, went_on["time"])
    assert (went_on["world"], went_on["layout"]) == (3, "TP1,PP1,DP3")
    assert went_on["step"] in (9, 11), "one interval of snapshots is lost at most"
    assert job.devices(3) == {"a": [0], "b": [0, 1]}

    assert tenplex(["resize", "--gpus", "9", "--run-dir", str(job.run_dir)]) == 2
    assert tenplex(["resize", "--gpus", "8", "--run-dir", str(job.run_dir)]) == 0
    grown = job.wait_for("step", generation=4)
    assert (grown["world"], grown["layout"]) == (8, "TP2,PP2,DP2")
    planned = job.wait_for("decided", generation=4)
    print_phases(job, 4, job.events("detected", change="planned")[-1]["time"], grown["time"])
    assert planned["version"] == grown["step"] - 1, "a planned change loses no step"

    assert job.codes() == {"a": 0, "b": 0}
    steps = [line["step"] for line in job.events("step")]
    assert steps[-1] == 60
    assert sorted(set(steps)) == list(range(1, 61))
    assert not list((job.folder / "store").glob("toy/*")), "a finished job leaves no snapshots"


def print_phases(job: Job, generation: int, begin: float, end: float) -> None:
    """Where the time went, for a person who runs this test with -s."""
    for kind in ("event", "detected", "stopped", "decided", "started", "entered", "joined"):
        for line in job.events(kind):
            if begin <= line["time"] <= end:
                sys.stdout.write(f"  {line['node']} {kind} +{line['time'] - begin:.3f}\n")
    sys.stdout.write(f"  first all_reduce of generation {generation} +{end - begin:.3f}\n")


def test_a_killed_agent_takes_its_workers_along_and_the_job_ends(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(static=True).start("1000", "0.05", "train", per_node=2)
    job.wait_for("step", generation=1, step=3)
    workers = job.pids(1)
    servers = {rank: parent(pid) for rank, pid in workers.items()}
    job.agents["b"].kill()
    wait_until(lambda: not alive(workers[2]) or None, job)
    wait_until(lambda: not (alive(workers[3]) or alive(servers[3])) or None, job)
    assert job.codes()["a"] == 1
    assert "1 nodes are left of at least 2 (--nnodes)" in job.log()
    gone_soon([*workers.values(), *servers.values()])
    assert list((job.folder / "store").glob("toy/*")), "snapshots are kept"


def test_a_job_goes_on_without_a_lost_node_where_its_parts_are_not_needed(
    make_job: Callable[..., Job],
) -> None:
    job = make_job().start("30", "0.1", "train", per_node=1, at_least=1)
    job.wait_for("step", generation=1, step=1)
    job.agents["b"].kill()
    went_on = job.wait_for("step", generation=2)
    assert went_on["world"] == 1
    assert job.agents["a"].wait(WAIT_S) == 0
    assert "lost b; first seen: rank 0" in job.log()


def test_the_end_of_the_node_that_hosts_the_store_ends_the_others(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(static=True).start("1000", "0.05", "train", per_node=1)
    job.wait_for("step", generation=1, step=1)
    workers = job.pids(1)
    job.agents["a"].kill()
    assert job.codes()["b"] == 1
    assert f"the job's store at localhost:{job.port} is gone" in job.log()
    gone_soon(list(workers.values()))


def test_a_terminated_node_ends_the_job_quickly_and_keeps_the_snapshots(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(static=True).start("1000", "0.05", "train", per_node=1)
    job.wait_for("step", generation=1, step=3)
    workers = job.pids(1)
    begun = time.monotonic()
    job.agents["b"].terminate()
    assert job.codes() == {"a": 1, "b": 1}
    assert time.monotonic() - begun < 20
    assert not any(map(alive, workers.values()))
    assert "stopped by SIGTERM; snapshots are kept" in job.log()
    assert list((job.folder / "store").glob("toy/*"))

    job.start("8", "0.01", "train", per_node=1)
    again = job.wait_for("step", generation=2)
    assert again["step"] > 1, "a job that is started again goes on from its snapshots"
    assert job.codes() == {"a": 0, "b": 0}


def test_a_failure_that_repeats_ends_the_job_with_its_reason(make_job: Callable[..., Job]) -> None:
    job = make_job("failed_device: reuse").start("9", "0", "crash", nodes="a", per_node=2)
    assert job.codes() == {"a": 1}
    assert "2 generations failed before the first snapshot with exit code 1" in job.log()
    assert "ValueError: device 1 is broken" in job.log()
    assert len(job.events("started")) == 2


def test_wrong_input_is_one_sentence_and_exit_code_2(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.script = job.folder / "none.py"
    job.start(nodes="a", per_node=1)
    assert job.codes() == {"a": 2}
    assert "none.py does not exist" in job.log()
    assert "Traceback" not in job.log()


def test_a_port_in_use_is_one_sentence_and_exit_code_2(make_job: Callable[..., Job]) -> None:
    job = make_job(static=True)
    with socket.socket() as busy:
        busy.bind(("", job.port))
        busy.listen()
        job.start("1", "0", "train", nodes="a", per_node=1)
        assert job.codes() == {"a": 2}
    assert f"no rendezvous at localhost:{job.port}" in job.log()
    assert "Traceback" not in job.log()


def test_workers_start_cold_where_there_is_no_fork_server(make_job: Callable[..., Job]) -> None:
    job = make_job().start(
        "3", "0", "train", nodes="a", per_node=1, flags=("--start-method", "spawn")
    )
    assert job.codes() == {"a": 0}


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_worker_says_why_it_starts_colder_than_it_should(make_job: Callable[..., Job]) -> None:
    job = make_job("preload: [no_such_module]")
    job.start("3", "0", "train", nodes="a", per_node=1)
    assert job.codes() == {"a": 0}
    assert "could not preload no_such_module (ModuleNotFoundError: No module named" in job.log()


def test_workers_start_cold_where_the_fork_server_has_touched_cuda(
    make_job: Callable[..., Job],
) -> None:
    job = make_job()
    job.start("3", "0", "touch_cuda", nodes="a", per_node=1)
    assert job.codes() == {"a": 0}, job.log()
    assert "a module it imported has initialised CUDA" in job.log()
    assert "workers start cold from now on" in job.log()
