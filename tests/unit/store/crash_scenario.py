"""Kills a writing process again and again; afterwards a complete version must still be readable.

Run as a script. `points`: before every operation on files, inside every write to one, and between
the writes into a view. `random SECONDS`: a real SIGKILL from outside at random times. Prints one
JSON object.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Self

from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.store import SnapshotStore, WorldVersion, select_version

RANKS = (0, 1)
SPECS = {
    "weight": TensorSpec("weight", (8, 40), "float32"),
    "half": TensorSpec("half", (100,), "bfloat16"),
}
OPERATIONS = (
    "open", "mkdir", "chmod", "link", "unlink", "rename", "ftruncate", "posix_fallocate", "rmdir",
)  # fmt: skip
LAST = 340
Point = Callable[[], None]


def boxes_of(rank: int) -> list[Box]:
    return [
        Box("weight", Region((4 * rank, 0), (4 * rank + 4, 40))),
        Box("half", Region((0,), (100,))),
    ]


def content(version: int, rank: int, box_index: int, nbytes: int) -> bytes:
    seed = version * 13 + rank * 5 + box_index
    return bytes((seed + at) % 253 for at in range(nbytes))


def train(
    directory: Path, point: Point, say: Callable[[str], object], first_generation: int = 1
) -> None:
    """Two ranks, two generations; every finished and committed version is announced."""
    store = SnapshotStore(directory, "job", "model").create()
    version = 100 * first_generation
    for generation in (first_generation, first_generation + 1):
        writers = [
            store.writer(
                rank, 2, generation=generation, layout={}, specs=SPECS, boxes=boxes_of(rank)
            )
            for rank in RANKS
        ]
        for _ in range(3 if generation == first_generation else 1):
            version += 10
            for rank, writer in zip(RANKS, writers, strict=True):
                for box_index, view in enumerate(writer.begin(version)):
                    data = content(version, rank, box_index, len(view))
                    for start in range(0, len(view), 400):
                        point()
                        view[start : start + 400] = data[start : start + 400]
                point()
                writer.finish(version, {"step": version, "even": version % 20 == 0})
            store.commit(version, generation=generation, ranks=RANKS)
            say(f"{version} ")
            store.prune(generation)
        for writer in writers:
            writer.close()


def install(point: Point) -> None:
    """Call `point` before every operation on files, and in the middle of writes."""

    def wrapped[**P, T](function: Callable[P, T]) -> Callable[P, T]:
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            point()
            return function(*args, **kwargs)

        return call

    for name in OPERATIONS:
        setattr(os, name, wrapped(getattr(os, name)))
    fdopen = os.fdopen

    def torn_fdopen(descriptor: int, mode: str) -> object:
        file = fdopen(descriptor, mode)
        if mode != "wb":
            return file
        return _TornFile(file, point)

    os.fdopen = torn_fdopen  # type: ignore[assignment]


class _TornFile:
    def __init__(self, file: IO[bytes], point: Point) -> None:
        self.file, self.point = file, point

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, data: bytes) -> None:
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            self.file.write(part)
            self.file.flush()
            self.point()


def run_child(
    directory: Path,
    kill_at: int | None = None,
    kill_after_s: float | None = None,
    first_generation: int = 1,
) -> tuple[bool, int]:
    """Whether the child lived to the end, and the newest version it announced as committed."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(reading)
            reached = 0

            def point() -> None:
                nonlocal reached
                if reached == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                reached += 1

            if kill_at is not None:
                install(point)
            train(directory, point, lambda text: os.write(writing, text.encode()), first_generation)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reading) as pipe:
        announced = pipe.read().split()
    _, status = os.waitpid(child, 0)
    if status not in (0, signal.SIGKILL):
        raise SystemExit(f"the child failed with status {status} at point {kill_at}")
    return status == 0, int(announced[-1]) if announced else 0


def problems(directory: Path, committed: int) -> list[str]:
    """What is wrong after a kill: nothing is, if the newest committed version is there."""
    if not committed and not (directory / "job.json").exists():
        return []
    store = SnapshotStore(directory, "job", "model").open_existing()

    def check(candidate: WorldVersion) -> tuple[str, ...]:
        reader = store.reader(candidate.version, generation=candidate.generation)
        return reader.problems()

    inventory = store.examine()
    found = [f"damaged: {damaged.reason}" for damaged in inventory.damaged]
    for generation, version in {(s.generation, s.version) for s in inventory.snapshots}:
        found += store.reader(version, generation=generation).problems()
    selection = select_version({"node": inventory.snapshots}, check)
    found += [f"rejected: {r.reasons}" for r in selection.rejected if "no node holds" not in str(r)]
    chosen = selection.chosen
    if chosen is None:
        return [*found, f"nothing to start from, {committed} was committed"] if committed else found
    if chosen.version < committed:
        found.append(f"chose {chosen.version}, {committed} was committed")
    reader = store.reader(chosen.version, generation=chosen.generation)
    for rank in RANKS:
        if reader.progress(rank)["step"] != chosen.version:
            found.append(f"progress of {reader.progress(rank)}")
        for box_index, box in enumerate(reader.boxes(rank)):
            expected = content(chosen.version, rank, box_index, box.nbytes)
            if reader.view(rank, box_index) != expected:
                found.append(f"rank {rank} box {box_index} is not of version {chosen.version}")
    return found


def main(mode: str, seconds: float) -> None:
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    base = Path(tempfile.mkdtemp(prefix="tenplex-test-", dir=root))
    failures: list[str] = []
    runs = survived = 0
    newest: set[int] = set()
    chance = random.Random(7)
    end = time.monotonic() + seconds
    try:
        while (mode == "points" and not survived) or (mode == "random" and time.monotonic() < end):
            directory = base / f"run{runs}" / "job" / "node"
            kill_after_s = chance.uniform(0, 0.06) if mode == "random" else None
            lived, committed = run_child(
                directory, runs if mode == "points" else None, kill_after_s
            )
            survived += lived
            newest.add(committed)
            failures += [f"run {runs}: {text}" for text in problems(directory, committed)]
            if not lived and runs % 8 == 0:  # the next generations go on in the same place
                lived, committed = run_child(directory, first_generation=3)
                failures += [] if lived and committed == LAST else [f"run {runs}: can't go on"]
                failures += [f"run {runs} later: {text}" for text in problems(directory, LAST)]
            shutil.rmtree(base / f"run{runs}", ignore_errors=True)
            runs += 1
    finally:
        shutil.rmtree(base, ignore_errors=True)
    print(json.dumps({"runs": runs, "failures": failures, "committed": sorted(newest)}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
