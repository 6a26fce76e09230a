"""How much host memory does an import need besides what it fills?

Measured per rank: the growth of anonymous resident memory (RssAnon, sampled every millisecond)
while `execute_plan` runs, over the moment before it.  The memory of the target shard is reserved
but untouched then, so the growth contains the whole shard; pages of snapshots on tmpfs do not
count, they are RssShmem.
"""

import gc
import threading
import time
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import torch

from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.plan import Topology, plan_reshard
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.slicing import flat_range, split_even
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.execution.executor import Target, execute_plan
from tenplex_megatron.store.shared import SnapshotStore
from tenplex_megatron.testing.generate import nodes_of
from tenplex_megatron.testing.spawn import run_ranks
from tenplex_megatron.transport.process_group import ProcessGroupTransport

RANKS = 4
# Column slices leave rows scattered, row slices lie together.
SPECS = tuple(TensorSpec(f"weight{number}", (2048, 4096), "float32") for number in range(8))
MOST = 1.25


class PeakMemory:
    """Samples the anonymous memory of this process on a thread."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.start_bytes = self.peak_bytes = resident_bytes()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def growth_bytes(self) -> int:
        return self.peak_bytes - self.start_bytes

    def _run(self) -> None:
        while not self._stop.is_set():
            self.peak_bytes = max(self.peak_bytes, resident_bytes())
            time.sleep(0.001)


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon in /proc/self/status")


def sliced(parts: int) -> TensorCollection:
    """Tensor-parallel: even tensors by rows, odd ones by columns."""
    return TensorCollection.build(
        SPECS,
        [
            (rank, Box(spec.name, split_even(spec.region, number % 2, parts)[rank]))
            for number, spec in enumerate(SPECS)
            for rank in range(parts)
        ],
    )


def flat(parts: int) -> TensorCollection:
    """Data-parallel: every rank has one flat range of all tensors, laid one after the other."""
    total = sum(spec.numel for spec in SPECS)
    share = total // parts + 1001  # ranges begin in the middle of rows
    holdings = []
    for rank in range(parts):
        position = 0
        for spec in SPECS:
            low = max(rank * share - position, 0)
            high = min((rank + 1) * share - position, spec.numel)
            if low < high:
                holdings += [
                    (rank, Box(spec.name, part)) for part in flat_range(spec.region, low, high)
                ]
            position += spec.numel
    return TensorCollection.build(SPECS, holdings)


def values(spec: TensorSpec, region: Region) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Element (i, j) is i * columns + j, counted from the tensor's number; exact in fp32."""
    rows = np.arange(region.start[0], region.stop[0], dtype=np.float32)[:, None]
    columns = np.arange(region.start[1], region.stop[1], dtype=np.float32)[None, :]
    return (rows * spec.shape[1] + columns + SPECS.index(spec)).astype(np.float32)


def change(rank: int, folder: Path, num_nodes: int) -> tuple[int, int, int]:
    """Shard bytes, bytes received and the peak growth of one rank."""
    transport = ProcessGroupTransport.open(120)
    source, target, nodes = sliced(RANKS), flat(RANKS), nodes_of(RANKS, num_nodes)
    store = SnapshotStore(folder / nodes[rank], "job", "model").create()
    boxes = source.partition(rank)
    writer = store.writer(rank, RANKS, generation=1, layout={}, specs=source.tensors, boxes=boxes)
    for box, view in zip(boxes, writer.begin(1), strict=True):
        content = values(source.tensors[box.tensor], box.region)
        np.frombuffer(view, dtype=np.float32)[:] = content.reshape(-1)
    writer.finish(1, {})
    writer.close()
    del content, view
    plan = plan_reshard(source, target, Topology(nodes, nodes))
    targets = [Target(box, torch.empty(box.region.numel)) for box in target.partition(rank)]
    transport.gather(b"all have written", timeout_s=120)
    reader = store.reader(1)
    gc.collect()
    with PeakMemory() as memory:
        moved = execute_plan(
            plan, rank, reader=reader, targets=targets, transport=transport, timeout_s=120
        )
    for one in targets:
        expected = values(target.tensors[one.box.tensor], one.box.region)
        assert np.array_equal(one.flat.numpy(), expected.reshape(-1)), one.box
    return target.nbytes(rank), moved.received_bytes, memory.growth_bytes


@pytest.mark.parametrize(("num_nodes", "remote"), [(2, 0.5), (4, 0.75)])
def test_an_import_needs_at_most_a_quarter_more_than_the_shard_it_fills(
    store_directory: Path, num_nodes: int, remote: float
) -> None:
    rows = run_ranks(change, RANKS, 120.0, store_directory, num_nodes)
    for rank, (shard, received, growth) in enumerate(rows):
        assert shard > 60 << 20
        assert received == pytest.approx(remote * shard, rel=0.01)
        # Below the shard, the measurement would not have seen what it fills.
        assert 0.9 * shard < growth <= MOST * shard, (
            f"rank {rank}: grew by {growth} bytes for a shard of {shard}, {growth / shard:.3f}"
        )
