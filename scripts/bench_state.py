"""What do a snapshot and an import of a real Megatron GPT cost, next to a plain memcpy?

One CPU rank trains a GPT through Megatron's own `pretrain`, with blocks of steps that take a
snapshot each and blocks that take none.  After the last step the same live state is copied out and
back in, each round next to one memcpy of as many bytes in the same process, so that a busy machine
slows both alike.
"""

import argparse
import io
import itertools
import json
import logging
import os
import runpy
import shutil
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from demo_model import model_flags

from tenplex_megatron import cpu
from tenplex_megatron.adapters.base import Piece, TrainingState
from tenplex_megatron.adapters.megatron.arguments import MegatronArguments
from tenplex_megatron.adapters.megatron.hooks import MegatronAdapter
from tenplex_megatron.config import ElasticPolicy, SnapshotPolicy, load_policy
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.slicing import flat_range
from tenplex_megatron.core.tensors import Box
from tenplex_megatron.elastic.generation import GenerationSpec
from tenplex_megatron.elastic.restore import Site, restore_state
from tenplex_megatron.elastic.session import ElasticSession
from tenplex_megatron.elastic.snapshot import Snapshotter
from tenplex_megatron.store.shared import SnapshotStore
from tenplex_megatron.transport.process_group import ProcessGroupTransport

SCRIPTS = Path(__file__).resolve().parent
NEVER = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is trained and how often things are repeated."""

    hidden: int
    layers: int
    vocab: int
    block: int
    blocks: int
    rounds: int

    @property
    def steps(self) -> int:
        """One step to warm up, then blocks without and with snapshots in turn."""
        return 1 + 2 * self.block * self.blocks


FULL = Size(hidden=768, layers=12, vocab=32_000, block=4, blocks=8, rounds=7)
QUICK = Size(hidden=256, layers=8, vocab=16_000, block=4, blocks=4, rounds=7)


def flags(size: Size, data: Path) -> list[str]:
    """Megatron's flags: the demo's model, made larger; one micro-batch of one short sample."""
    heads = size.hidden // 64
    larger = {
        "num-layers": size.layers,
        "hidden-size": size.hidden,
        "ffn-hidden-size": size.hidden * 8 // 3 // 64 * 64,
        "num-attention-heads": heads,
        "num-query-groups": heads // 2,
        "seq-length": 64,
        "max-position-embeddings": 64,
        "global-batch-size": 1,
        "micro-batch-size": 1,
        "vocab-size": size.vocab,
    }
    # Of a flag given twice Megatron takes the last; the mock data needs no data path.
    kept = [flag for flag in model_flags(data, steps=size.steps) if "data-path" not in flag]
    return [*kept, *(f"--{name}={value}" for name, value in larger.items()), "--mock-data"]


def say(text: str) -> None:
    """One line of progress, apart from the result."""
    print(text, file=sys.stderr, flush=True)


def spread(values: Sequence[float]) -> dict[str, float]:
    """The three numbers every measurement is reported with."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


class Memcpy:
    """libc's memcpy between two pieces of warm memory of the kind that tensors live in."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # numpy's own memory would have huge pages, which neither tensors nor tmpfs have.
        self._source = torch.ones(nbytes, dtype=torch.uint8).numpy()
        self._target = torch.full((nbytes,), 2, dtype=torch.uint8).numpy()

    def seconds(self) -> float:
        """How long one copy of everything takes now."""
        started = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - started

    def seconds_in_parts(self, sizes: Sequence[int]) -> float:
        """The same bytes with one call for each part."""
        started = time.perf_counter()
        position = 0
        for size in sizes:
            part = slice(position, position + size)
            np.copyto(self._target[part], self._source[part])
            position += size
        return time.perf_counter() - started


class TimedSession(ElasticSession):
    """The session of a real job, whose policy alternates; it measures before training ends."""

    def __init__(self, spec: GenerationSpec, policy: ElasticPolicy, size: Size) -> None:
        super().__init__(spec, 0, policy, None)
        self._size = size
        self._state: TrainingState | None = None
        self._last = 0.0
        self._copying = False
        self.steps: list[tuple[bool, float]] = []  # takes a snapshot, seconds
        self.copy_s: list[float] = []
        self.result: dict[str, Any] = {}

    def on_built(self, state: TrainingState) -> None:
        """Keeps the state to measure with."""
        super().on_built(state)
        self._state = state

    def on_step(
        self, step: int, losses: Mapping[str, float] | None, *, is_last: bool = False
    ) -> bool:
        """A step lasts from here to here, with all that a snapshot adds to it."""
        now = time.perf_counter()
        assert self._snapshots is not None
        if step > 1:
            self.steps.append((self._copying, now - self._last))
        if self._copying:
            self.copy_s.append(self._snapshots.copy_seconds)
        self._copying = bool((step - 1) // self._size.block % 2) and step < self._size.steps
        every = 1 if self._copying else NEVER
        self._policy = replace(self._policy, snapshot=SnapshotPolicy(every_steps=every))
        if step % self._size.block == 1:
            say(f"step {step} of {self._size.steps}, snapshots {'on' if self._copying else 'off'}")
        self._last = time.perf_counter()
        leaves = super().on_step(step, losses, is_last=is_last)
        if step == self._size.steps:
            self._snapshots.wait()
            self._measure(step)
        return leaves

    def _measure(self, step: int) -> None:
        assert self._state is not None
        assert self._snapshots is not None
        assert self._transport is not None
        pieces = self._state.pieces()
        memcpy = Memcpy(sum(piece.nbytes for piece in pieces))
        self.result = {
            "model_bytes": memcpy.nbytes,
            "boxes": len(pieces),
            **overhead(self.steps, self.copy_s, memcpy.nbytes),
            **measure_export(
                self._snapshots, memcpy, self._size, [piece.nbytes for piece in pieces], step
            ),
        }
        store = SnapshotStore(self._spec.store, self._spec.job, self._spec.identity)
        importing = Importing(self._state, self._transport, store, memcpy, self._size.rounds)
        version = self._snapshots.finished_version
        self.result["import"] = importing.run(version, self._spec.generation)
        self.result["import_fraction_of_memcpy"] = self.result["import"]["fraction_of_memcpy"]
        write_cut_in_two(store, pieces, version, self._spec.generation)
        self.result["import_resharded"] = importing.run(version, self._spec.generation + 1)


def overhead(
    steps: Sequence[tuple[bool, float]], copy_s: Sequence[float], nbytes: int
) -> dict[str, Any]:
    """How much longer steps with a snapshot took than their neighbours, next to the copies.

    Each block of steps with snapshots is compared with the blocks before and after it, so that a
    machine that slows down slows both.
    """
    blocks = [
        statistics.median(seconds for _, seconds in block)
        for _, block in itertools.groupby(steps, key=lambda step: step[0])
    ]
    differences = [
        block - statistics.mean(blocks[max(number - 1, 0) : number + 2 : 2])
        for number, block in enumerate(blocks)
        if number % 2
    ]
    difference, copy = statistics.median(differences), spread(copy_s)
    # Of a median of n values: 1.25 standard deviations of one over the root of n.
    error = 1.25 * statistics.stdev(differences) / len(differences) ** 0.5
    return {
        "snapshot_step_overhead": {
            "without_s": spread([seconds for copies, seconds in steps if not copies]),
            "with_s": spread([seconds for copies, seconds in steps if copies]),
            "difference_s": difference,
            "standard_error_s": error,
            "differences_s": differences,
            "copy_s": copy,
            "within_copy": difference <= copy["median"],
            # An error as large as a copy says nothing about it.
            "is_resolved": 2 * error < copy["median"],
        },
        "copy_while_training_gb_per_s": spread([nbytes / seconds / 1e9 for seconds in copy_s]),
    }


def measure_export(
    snapshots: Snapshotter, memcpy: Memcpy, size: Size, sizes: Sequence[int], step: int
) -> dict[str, Any]:
    """Copies of the live state into the store, each between two copies of plain memory."""
    copies, plain, parts, sealed = [], [], [], []
    for number in range(size.rounds + 2):
        before = memcpy.seconds()
        snapshots.start(step + 1 + number, None)
        snapshots.fence()
        copied = time.perf_counter()
        snapshots.wait()
        finished = time.perf_counter()
        if number > 1:  # both slots have been written once
            sealed.append(finished - copied)
            copies.append(snapshots.copy_seconds)
            plain.append((before + memcpy.seconds()) / 2)
            parts.append(memcpy.seconds_in_parts(sizes))
        say(f"export round {number + 1}: {snapshots.copy_seconds:.3f} s, memcpy {before:.3f} s")

    def speeds(seconds: Sequence[float]) -> dict[str, float]:
        return spread([snapshots.nbytes / one / 1e9 for one in seconds])

    return {
        "export_gb_per_s": speeds(copies),
        "memcpy_gb_per_s": speeds(plain),
        "memcpy_box_by_box_gb_per_s": speeds(parts),
        "seal_gb_per_s": speeds(sealed),
        "export_fraction_of_memcpy": spread(
            [own / other for own, other in zip(plain, copies, strict=True)]
        ),
    }


class Importing:
    """Imports into the live state, the way a new generation does, each next to a memcpy."""

    def __init__(
        self,
        state: TrainingState,
        transport: ProcessGroupTransport,
        store: SnapshotStore,
        memcpy: Memcpy,
        rounds: int,
    ) -> None:
        self._state, self._transport, self._store = state, transport, store
        self._memcpy, self._rounds = memcpy, rounds

    def run(self, version: int, generation: int) -> dict[str, Any]:
        """Every round opens the store afresh, so that its pages are entered anew."""
        fractions, moves, plain, verifies, totals = [], [], [], [], []
        expected = self._digest()
        for number in range(self._rounds):
            before = self._memcpy.seconds()
            started = time.perf_counter()
            reader = self._store.reader(version, generation=generation)
            site = Site(0, ("node",), dict.fromkeys(reader.ranks, "node"))
            restored = restore_state(
                self._state, site, reader=reader, transport=self._transport, timeout_s=60
            )
            totals.append(time.perf_counter() - started)
            reader.close()
            plain.append((before + self._memcpy.seconds()) / 2)
            moves.append(restored.movement.local_bytes / restored.seconds["move"] / 1e9)
            verifies.append(restored.movement.local_bytes / restored.seconds["verify"] / 1e9)
            bandwidth = self._memcpy.nbytes / plain[-1] / 1e9
            fractions.append(moves[-1] / bandwidth)
            say(f"import round {number + 1}: {moves[-1]:.1f} GB/s, memcpy {bandwidth:.1f} GB/s")
        assert self._digest() == expected, "the state is not what it was before the import"
        return {
            "move_gb_per_s": spread(moves),
            "memcpy_gb_per_s": spread([self._memcpy.nbytes / s / 1e9 for s in plain]),
            "fraction_of_memcpy": spread(fractions),
            "verify_gb_per_s": spread(verifies),
            "seconds_with_everything": spread(totals),
            "transfers": len(restored.plan.transfers),
            "bytes": restored.movement.local_bytes,
        }

    def _digest(self) -> int:
        """A sum over all bytes of the state, to see that an import changed nothing."""
        return sum(int(piece.as_bytes().sum()) for piece in self._state.pieces())


def half(region: Region, rank: int) -> tuple[Region, ...]:
    """The boxes of one half of a box's elements, counted in its row-major order."""
    middle = region.numel // 2 + min(region.numel // 2, 5)  # not at the end of a row
    low, high = ((0, middle), (middle, region.numel))[rank]
    return flat_range(region, low, high) if low < high else ()


def write_cut_in_two(
    store: SnapshotStore, pieces: Sequence[Piece], version: int, generation: int
) -> None:
    """The same version as two data-parallel ranks would have left it: flat halves of every box."""
    source = store.reader(version, generation=generation)
    for rank in range(2):
        say(f"writing flat halves of {len(pieces)} boxes as rank {rank} of 2")
        cut = [(piece, region) for piece in pieces for region in half(piece.box.region, rank)]
        writer = store.writer(
            rank,
            2,
            generation=generation + 1,
            layout={**ParallelLayout(dp=2).to_json()},
            specs={piece.spec.name: piece.spec for piece in pieces},
            boxes=[Box(piece.spec.name, region) for piece, region in cut],
        )
        for (piece, region), view in zip(cut, writer.begin(version), strict=True):
            part = piece.as_box()[region.relative_to(piece.box.region).slices()].contiguous()
            view[:] = part.view(-1).view(torch.uint8).numpy().data
        writer.finish(version, source.progress(0))
        writer.close()
    source.close()


def run(size: Size, folder: Path) -> dict[str, Any]:
    """Train in this process and return what the session measured."""
    policy = folder / "policy.yaml"
    policy.write_text("device: cpu\nsnapshot: {every_steps: 1}\nlayouts: [TP1]\n")
    spec = GenerationSpec(
        job="bench",
        identity="bench",
        generation=1,
        cause="start",
        layout=ParallelLayout(),
        gpus=1,
        node="node",
        nodes=("node",),
        store=folder / "bench" / "node",
        policy=policy,
        rundir=folder,
        control=folder,
        source=None,
    )
    torch.set_num_threads(1)  # as on a node whose ranks share its cores
    cpu.install()
    session = TimedSession(spec, load_policy(policy), size)
    MegatronAdapter().install(session, spec.layout)
    sys.argv = [
        "pretrain_gpt.py",
        *flags(size, folder / "none"),
        *MegatronArguments().device_arguments("cpu"),
    ]
    with redirect_stdout(sys.stderr if os.environ.get("BENCH_VERBOSE") else io.StringIO()):
        runpy.run_path(str(SCRIPTS / "pretrain_gpt.py"), run_name="bench")["main"]()
    if dist.is_initialized():
        dist.destroy_process_group()
    return session.result


def wait_for_quiet(seconds: float) -> float:
    """Give other work on the machine a moment to end; returns the load when it was quiet enough."""
    give_up = time.monotonic() + seconds
    while os.getloadavg()[0] > 1.5 and time.monotonic() < give_up:
        time.sleep(2)
    return os.getloadavg()[0]


def main() -> int:
    """Measure in an own folder on tmpfs, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  scripts/bench_state.py --quick",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="about 10M parameters, not 100M")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    given = parser.parse_args()
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="localhost"
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["MASTER_PORT"] = str(free_port())
    load = wait_for_quiet(0 if given.quick else 60)
    say(f"load {load:.1f} on {os.cpu_count()} cores")
    folder = Path(tempfile.mkdtemp(prefix="tenplex-bench-", dir="/dev/shm"))
    try:
        result = run(QUICK if given.quick else FULL, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result["load_average"] = {"before": load, "after": os.getloadavg()[0]}
    print(json.dumps(rounded(result), indent=None if given.json else 2))
    return 0


def free_port() -> int:
    """A port nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def rounded(value: Any) -> Any:
    """The same with four significant digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
