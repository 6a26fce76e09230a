"""From SIGKILL of a rank to the end of the first resumed step: this package against torchrun.

Both train the demo model on 4 CPU ranks, one of which is killed.  Here the job goes on with 3 ranks
in another layout, from the snapshot in node memory.  torchrun restarts all 4 and Megatron loads its
own checkpoint, written every step to /dev/shm.  That load fails without Apex or Transformer Engine:
it asserts on Adam's `step` (so the optimizer's state is created before it), and copies into fp32
masters that require a gradient (so it runs under `no_grad`).  Neither costs torchrun anything.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from demo import ROOT, SCRIPTS, Tail, prepare_data, tenplex
from demo_model import model_flags
from rich.console import Console

console = Console(stderr=True, highlight=False)
WORK = Path(f"/dev/shm/tenplex-bench-{os.getuid()}")
LIMIT_S = 240
POLICY = """
device: cpu
snapshot: {every_steps: 1}
layouts: ["TP1,PP4,DP1", "TP1,PP1,DP3"]
"""


def main() -> int:
    """Measure both, alternating, and print the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  .venv/bin/python scripts/bench_recovery.py --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one kill each instead of three")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    given = parser.parse_args()
    data = prepare_data(ROOT / "out/data/stdlib")
    ours, theirs = [], []
    for number in range(1 if given.quick else 3):
        with fresh(WORK):
            ours.append(measure(*our_job(data)))
        console.print(f"{number + 1}: tenplex {ours[-1]:.2f} s")
        with fresh(WORK):
            theirs.append(measure(*torchrun_job(data)))
        console.print(f"{number + 1}: torchrun {theirs[-1]:.2f} s")
    result = {
        "ours_s": spread(ours),
        "torchrun_s": spread(theirs),
        "ratio": statistics.median(theirs) / statistics.median(ours),
    }
    if given.json:
        print(json.dumps(result))
    else:
        print(
            f"SIGKILL to the end of the first resumed step, median of {len(ours)}: tenplex "
            f"{result['ours_s']['median']:.2f} s, torchrun with Megatron's checkpoint "
            f"{result['torchrun_s']['median']:.2f} s, ratio {result['ratio']:.1f}"
        )
    return 0


def spread(values: list[float]) -> dict[str, float]:
    """Median and extremes."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


@contextmanager
def fresh(folder: Path) -> Iterator[None]:
    """An empty private folder, gone afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def our_job(data: Path) -> tuple[list[str], Callable[[], list[tuple[int, float, int]]]]:
    """The command, and what its ranks have reported: (generation, time, pid of a rank to kill)."""
    policy = WORK / "policy.yaml"
    policy.write_text(POLICY)
    command = tenplex(
        "run",
        f"--elastic-policy={policy}",
        "--job=bench",
        f"--run-dir={WORK / 'run'}",
        f"--store-dir={WORK / 'store'}",
        "--standalone",
        "--nproc-per-node=4",
        "--redirects=3",
        str(SCRIPTS / "pretrain_gpt.py"),
        *model_flags(data, steps=1000),
    )
    events, losses = Tail(WORK / "run/events.jsonl"), Tail(WORK / "run/losses.jsonl")
    pids: dict[int, int] = {}
    seen: list[tuple[int, float, int]] = []

    def steps() -> list[tuple[int, float, int]]:
        for event in events.read():
            if event["kind"] == "started":
                pids[event["generation"]] = max(event["pids"].values())
            if event["kind"] == "first_step":
                seen.append((event["generation"], event["time"], 0))
        seen.extend((row["generation"], 0.0, pids[row["generation"]]) for row in losses.read())
        return seen

    return command, steps


def torchrun_job(data: Path) -> tuple[list[str], Callable[[], list[tuple[int, float, int]]]]:
    """The same job under torchrun with Megatron's own checkpoints."""
    marks = Tail(WORK / "marks.jsonl")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"),
        *("--max-restarts=3", "--monitor-interval=0.1", str(Path(__file__)), "--worker"),
        *model_flags(data, steps=1000),
        *("--pipeline-model-parallel-size=4", "--ckpt-format=torch_dist", "--save-interval=1"),
        *(f"--save={WORK / 'checkpoint'}", f"--load={WORK / 'checkpoint'}"),
    ]
    seen: list[tuple[int, float, int]] = []

    def steps() -> list[tuple[int, float, int]]:
        seen.extend((row["restart"], row["time"], row["pid"]) for row in marks.read())
        return seen

    return command, steps


def measure(command: list[str], steps: Callable[[], list[tuple[int, float, int]]]) -> float:
    """Seconds from SIGKILL to the end of the first step after it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # Without it a gloo restart under torchrun may meet the dead ranks' keys and hang.
    environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    run = environment["TENPLEX_BENCH"] = str(uuid.uuid4())
    log = (WORK / "log").open("w")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        first = wait_for(process, lambda: [mark for mark in steps() if mark[2]][1:])
        generation, _, pid = first[-1]
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        resumed = wait_for(
            process, lambda: [m for m in steps() if m[0] > generation and m[1] > killed]
        )
        return resumed[0][1] - killed
    finally:
        process.terminate()
        process.wait(30)
        end_leftovers(run)


def end_leftovers(run: str) -> None:
    """Processes that Megatron's checkpoints start outlive the ranks that are killed."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if run.encode() in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)


def wait_for(process: subprocess.Popen[bytes], found: Callable[[], list[Any]]) -> list[Any]:
    """Poll until something is found."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if rows := found():
            return rows
        if process.poll() is not None:
            raise SystemExit(f"the job ended with {process.returncode}; see {keep_log()}")
        time.sleep(0.01)
    raise SystemExit(f"nothing happened for {LIMIT_S} s; see {keep_log()}")


def keep_log() -> Path:
    """Where the log of the job that failed now lies."""
    kept = ROOT / "out/bench_recovery.log"
    shutil.copy(WORK / "log", kept)
    return kept


def worker() -> None:
    """A rank under torchrun: the stand-in, the workaround, and a mark after every step."""
    from tenplex_megatron import cpu

    cpu.install()
    import torch
    from megatron.training import checkpointing, training

    from tenplex_megatron.adapters.megatron.arguments import MegatronArguments
    from tenplex_megatron.adapters.megatron.optimizer import prepare_state

    load, finish = training.load_checkpoint, training.checkpoint_and_decide_exit

    def load_prepared(model: Any, optimizer: Any, *rest: Any, **options: Any) -> Any:
        if checkpointing.checkpoint_exists(str(WORK / "checkpoint")):
            prepare_state(optimizer)
        with torch.no_grad():
            return load(model, optimizer, *rest, **options)

    def finish_marked(*args: Any, **options: Any) -> Any:
        if os.environ["RANK"] == "3":
            restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            row = {"restart": restart, "time": time.time(), "pid": os.getpid()}
            with (WORK / "marks.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        return finish(*args, **options)

    training.load_checkpoint = load_prepared
    training.checkpoint_and_decide_exit = finish_marked
    script = SCRIPTS / "pretrain_gpt.py"
    sys.argv = [str(script), *sys.argv[2:], *MegatronArguments().device_arguments("cpu")]
    # Not by runpy: Megatron's save spawns processes, which would import the whole script again.
    exec(compile(script.read_text(), script, "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker()
    else:
        sys.exit(main())
