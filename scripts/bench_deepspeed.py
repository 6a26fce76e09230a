"""From SIGKILL of a rank to the next finished step: this package against Universal Checkpoint.

Both train the same model at ZeRO-3 on 4 CPU ranks under DeepSpeed's launcher, one of which is
killed, and go on with 3.  Here from the snapshot in node memory.  There the launcher ends the job,
`ds_to_universal` converts the newest checkpoint, which was written every step to /dev/shm, and the
launcher starts 3 ranks that load it.  Each part of that is measured; the launcher's wait for ranks
that do not answer (up to 30 s each) is left out of the ratio.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench_recovery import fresh, spread
from demo import ROOT, Tail
from rich.console import Console

console = Console(stderr=True, highlight=False)
WORK = Path(f"/dev/shm/tenplex-bench-deepspeed-{os.getuid()}")
LIMIT_S = 300
BATCH, WIDTH, LAYERS = 12, 512, 8
WORKER = Path(__file__).with_name("deepspeed_worker.py")
POLICY = "{framework: deepspeed, device: cpu, snapshot: {every_steps: 1}}"
CONFIG: dict[str, Any] = {
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
    "steps_per_print": 1000000,
}
LAUNCHER = [str(Path(sys.executable).parent / "deepspeed"), "--no_local_rank"]
PORT = 29615
PARTS = ("end", "convert", "restart")


def main() -> int:
    """Measure both, alternating, and print the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  .venv/bin/python scripts/bench_deepspeed.py --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one kill each instead of three")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    given = parser.parse_args()
    ours: list[float] = []
    theirs: list[dict[str, float]] = []
    for number in range(1 if given.quick else 3):
        with fresh(WORK):
            ours.append(resume_elastic())
        console.print(f"{number + 1}: tenplex {ours[-1]:.2f} s")
        with fresh(WORK):
            theirs.append(resume_universal())
        parts = ", ".join(f"{name} {theirs[-1][name]:.1f} s" for name in PARTS)
        console.print(f"{number + 1}: universal checkpoint: {parts}")
    universal = [parts["convert"] + parts["restart"] for parts in theirs]
    ours_s, universal_s = statistics.median(ours), statistics.median(universal)
    result = {
        "ours_s": ours_s,
        "universal_s": universal_s,
        "ratio": universal_s / ours_s,
        "spread_s": {"ours": spread(ours), "universal": spread(universal)}
        | {name: spread([one[name] for one in theirs]) for name in PARTS},
        "parameters": LAYERS * WIDTH * (WIDTH + 1),
    }
    if given.json:
        print(json.dumps(result))
    else:
        print(
            f"SIGKILL to the end of the first resumed step, median of {len(ours)}: tenplex "
            f"{ours_s:.2f} s ({min(ours):.2f} to {max(ours):.2f}), Universal Checkpoint "
            f"{universal_s:.1f} s ({min(universal):.1f} to {max(universal):.1f}) without the "
            f"launcher's end, ratio {universal_s / ours_s:.1f}"
        )
    return 0


def resume_elastic() -> float:
    """Kill a rank of an elastic job; seconds to the end of its first step after that."""
    (WORK / "policy.yaml").write_text(POLICY)
    command = ["tenplex_megatron.run", f"--run-dir={WORK / 'run'}", "--redirects=3"]
    command += [f"--store-dir={WORK / 'store'}", str(WORKER), "--worker=elastic"]
    command.append(f"--elastic-policy={WORK / 'policy.yaml'}")
    marks = Tail(WORK / "marks.jsonl")
    seen: list[dict[str, Any]] = []

    def read() -> list[dict[str, Any]]:
        seen.extend(marks.read())
        return seen

    with launched(4, "--module", *command) as process:
        wait_for(process, lambda: len(read()) >= 3)
        killed = kill(seen[-1]["pid"])
        wait_for(process, lambda: any(mark["world"] == 3 for mark in read()))
    first = next(mark for mark in seen if mark["world"] == 3)
    return float(first["time"]) - killed


def resume_universal() -> dict[str, float]:
    """The same with a checkpoint that is converted; seconds of each part."""
    marks = Tail(WORK / "marks.jsonl")
    seen: list[dict[str, Any]] = []

    def read() -> list[dict[str, Any]]:
        seen.extend(marks.read())
        return seen

    with launched(4, str(WORKER), "--worker=universal") as process:
        wait_for(process, lambda: len(read()) >= 3)
        killed = kill(seen[-1]["pid"])
        process.wait(LIMIT_S)
    ended = time.time()
    newest = (WORK / "checkpoint/latest").read_text()
    convert = [
        *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"),
        *("--input_folder", str(WORK / "checkpoint" / newest)),
        *("--output_folder", str(WORK / "checkpoint" / f"{newest}_universal")),
        *("--num_extract_workers=1", "--num_merge_workers=1"),
    ]
    with (WORK / "log").open("a") as log:
        subprocess.run(convert, check=True, stdout=log, stderr=log, env=environment())
    converted = time.time()
    with launched(3, str(WORKER), "--worker=universal", f"--load={newest}_universal") as run:
        wait_for(run, lambda: any(mark["world"] == 3 for mark in read()))
    first = next(mark for mark in seen if mark["world"] == 3)
    return {
        "end": ended - killed,
        "convert": converted - ended,
        "restart": float(first["time"]) - converted,
    }


def environment() -> dict[str, str]:
    """That of both jobs."""
    found = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    found |= {"DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    found["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    return found


@contextmanager
def launched(ranks: int, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A job under DeepSpeed's launcher, ended when the block is left."""
    (WORK / "ds.json").write_text(json.dumps(CONFIG))
    words = [*LAUNCHER, f"--num_accelerators={ranks}", f"--master_port={PORT}", *command]
    words += [f"--deepspeed_config={WORK / 'ds.json'}", f"--width={WIDTH}", f"--layers={LAYERS}"]
    with (WORK / "log").open("a") as log:
        process = subprocess.Popen(
            words, stdout=log, stderr=log, env=environment(), start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def kill(pid: int) -> float:
    """SIGKILL to a process; the time of it."""
    os.kill(pid, signal.SIGKILL)
    return time.time()


def wait_for(process: subprocess.Popen[bytes], is_there: Callable[[], bool]) -> None:
    """Poll until something is there."""
    deadline = time.monotonic() + LIMIT_S
    while not is_there():
        if process.poll() is not None or time.monotonic() > deadline:
            kept = ROOT / "out/bench_deepspeed.log"
            kept.parent.mkdir(exist_ok=True)
            shutil.copy(WORK / "log", kept)
            raise SystemExit(f"the job ended with {process.poll()} or was too slow; see {kept}")
        time.sleep(0.005)


if __name__ == "__main__":
    sys.exit(main())
