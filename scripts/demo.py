"""The main job: a Megatron GPT changes TP, PP and DP while it trains, and loses a rank on the way.

Two agents on this machine play two nodes with four CPU ranks each.  After a while the job goes to
four ranks by schedule, then one of them is killed, then it grows back.  The same job without any
change runs first; both must have the same losses on the same samples.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_model import model_flags
from rich.console import Console

from tenplex_megatron.elastic.requests import post_request

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
PORTS = {1: 29517, 2: 29518}
"""By number of nodes: both jobs exist at the same time."""
TIMEOUT_S = 400
STORE = Path(f"/dev/shm/tenplex-demo-{os.getuid()}")
console = Console(highlight=False)


@dataclass(frozen=True)
class Course:
    """After which steps what happens."""

    shrink: int
    kill: int
    grow: int
    steps: int


FULL = Course(shrink=8, kill=16, grow=24, steps=32)
QUICK = Course(shrink=3, kill=6, grow=9, steps=12)


def main() -> int:
    """Run both jobs and print what every change cost."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  scripts/demo.sh --quick",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--out", type=Path, default=ROOT / "out/demo", help="results go here")
    parser.add_argument(
        "--script",
        type=Path,
        default=SCRIPTS / "pretrain_gpt.py",
        help="a Megatron training script",
    )
    given = parser.parse_args()
    begun = time.monotonic()
    course = QUICK if given.quick else FULL
    out = given.out.resolve()
    for name in ("uninterrupted", "elastic"):
        shutil.rmtree(out / name, ignore_errors=True)
    shutil.rmtree(STORE, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    data = prepare_data(ROOT / "out/data/stdlib")
    plain, elastic = out / "uninterrupted", out / "elastic"
    policy = write_policy(out / "policy.yaml", course)
    calm = write_policy(out / "calm.yaml", None)
    flags = {"script": given.script, "data": data, "steps": course.steps}
    solo = agent(calm, plain, "solo", nodes=1, **flags)
    nodes = [agent(policy, elastic, node, nodes=2, **flags) for node in "ab"]
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, STORE, ignore_errors=True)
        # Most of an agent's start is importing on one core: the nodes do it meanwhile.
        agents = [cleanup.enter_context(started(nodes[0], elastic))]

        def start_second(fresh: list[dict[str, Any]]) -> None:
            if len(agents) == 1 and any(event["kind"] == "started" for event in fresh):
                agents.append(cleanup.enter_context(started(nodes[1], elastic)))

        say(f"1/3 {course.steps} steps without a change, 8 ranks, TP2 PP2 DP2")
        with started(solo, plain) as process:
            watch(plain, [process], start_second)
        say("2/3 the same job on two nodes of 4 ranks, with changes")
        watch(elastic, agents, Disturbance(elastic, course))
    say("3/3 what it cost")
    report = ["report", str(elastic), "--baseline", str(plain), "--out", str(out)]
    code = subprocess.run(tenplex(*report), check=False).returncode
    say(f"finished in {time.monotonic() - begun:.0f} s")
    return code or verdict(out / "report.json")


def say(text: str) -> None:
    """One line for the person who watches."""
    console.print(f"[bold]{text}[/bold]")


def tenplex(*arguments: str) -> list[str]:
    """A `tenplex` command line."""
    return [sys.executable, "-m", "tenplex_megatron.cli.main", *arguments]


def prepare_data(prefix: Path) -> Path:
    """The dataset, made from the standard library's sources unless it is there."""
    if not prefix.with_suffix(".idx").exists():
        command = [sys.executable, str(SCRIPTS / "prepare_data.py"), "--output", str(prefix)]
        subprocess.run([*command, "--max-megabytes", "4"], check=True)
    return prefix


def write_policy(path: Path, course: Course | None) -> Path:
    """The demo's policy with the course's schedule; without one, nothing ever changes.

    Comments stay behind: they explain the schedule of the file, not of the course.
    """
    text = (ROOT / "configs/elastic/demo.yaml").read_text()
    schedule = "schedule: {}" if course is None else f"schedule: {{{course.shrink}: 4}}"
    lines = [
        schedule if line.startswith("schedule:") else line
        for line in text.splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def agent(
    policy: Path, run: Path, node: str, *, script: Path, data: Path, steps: int, nodes: int
) -> list[str]:
    """The command line of one node's agent."""
    return tenplex(
        "run",
        f"--elastic-policy={policy}",
        f"--job=demo-{run.name}",
        f"--node-name={node}",
        f"--run-dir={run}",
        f"--store-dir={STORE}",
        f"--nnodes={nodes}",
        f"--nproc-per-node={8 // nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{PORTS[nodes]}",
        "--redirects=3",
        str(script),
        *model_flags(data, steps=steps),
    )


@contextlib.contextmanager
def started(command: list[str], run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An agent, whose log lies beside its run; ended, if need be, when the block is left."""
    run.mkdir(mode=0o700, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    number = len(list(run.glob("agent-*.log")))
    with (run / f"agent-{number}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        yield process
        if code := process.wait(30):
            raise SystemExit(f"an agent ended with {code}; see {run}/agent-{number}.log")
    finally:
        process.terminate()
        process.wait(30)


def watch(
    run: Path,
    agents: list[subprocess.Popen[bytes]],
    disturb: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Print steps and changes as they happen; returns when the job has ended."""
    deadline = time.monotonic() + TIMEOUT_S
    events, losses = Tail(run / "events.jsonl"), Tail(run / "losses.jsonl")
    layout = ""
    while time.monotonic() < deadline and not any(agent.poll() for agent in agents):
        fresh = events.read()
        for event in fresh:
            if event["kind"] == "decided" and event["layout"] != layout:
                layout = event["layout"]
                console.print(f"  [cyan]{layout}[/cyan]: {event['cause']}")
                console.print(f"    {event['reason']}", style="dim", highlight=False)
            if event["kind"] == "finished":
                return
        for row in losses.read():
            loss = next(iter(row["losses"].values()))
            console.print(f"  step {row['step']:>3}  loss {loss:.5f}  {layout}")
        disturb(fresh)
        time.sleep(0.02)
    raise SystemExit(f"the job failed or took over {TIMEOUT_S} s; see {run}/agent-*.log")


class Tail:
    """New lines of a file that others append to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self) -> list[dict[str, Any]]:
        """The complete lines since the last call."""
        if not self._path.exists():
            return []
        with self._path.open() as file:
            file.seek(self._position)
            text = file.read()
        whole = text.rpartition("\n")[0]
        self._position += len(whole) + 1 if whole else 0
        return [json.loads(line) for line in whole.splitlines()]


class Disturbance:
    """Kills a rank and asks for all devices again, at the steps of the course."""

    def __init__(self, run: Path, course: Course) -> None:
        self._run = run
        self._course = course
        self._losses = Tail(run / "losses.jsonl")
        self._pids: dict[int, int] = {}
        self._generation = 0
        self._killed = self._grown = False

    def __call__(self, fresh: list[dict[str, Any]]) -> None:
        """Look at what happened and act."""
        for event in fresh:
            if event["kind"] == "started":
                if event["generation"] != self._generation:
                    self._generation, self._pids = event["generation"], {}
                self._pids |= {int(rank): pid for rank, pid in event["pids"].items()}
        for row in self._losses.read():
            if row["step"] >= self._course.kill and not self._killed:
                self._kill()
            if row["step"] >= self._course.grow and not self._grown:
                # What `tenplex resize --gpus 8` does, without waiting for Python to start.
                self._grown = True
                post_request(self._run, 8)

    def _kill(self) -> None:
        self._killed = True
        rank = max(self._pids)
        note = {"time": time.time(), "generation": self._generation, "kind": "killed", "rank": rank}
        os.kill(self._pids[rank], signal.SIGKILL)
        with (self._run / "events.jsonl").open("a") as file:
            file.write(json.dumps({**note, "node": "demo"}) + "\n")
        console.print(f"  [red]SIGKILL to rank {rank} (process {self._pids[rank]})[/red]")


def verdict(path: Path) -> int:
    """0 when the elastic run is the uninterrupted one in other layouts."""
    report = json.loads(path.read_text())
    exact = report["max_abs_loss_difference"] <= 2e-5 and report["sample_order_equal"]
    return 0 if exact and report["state_bit_equal"] and len(report["changes"]) == 3 else 1


if __name__ == "__main__":
    sys.exit(main())
