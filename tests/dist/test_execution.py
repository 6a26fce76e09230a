"""Four gloo processes carry out plans between any two layouts, from real snapshots on tmpfs."""

import itertools
from pathlib import Path

import pytest

from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.core.plan import Topology, plan_reshard
from tenplex_megatron.execution.executor import Target, execute_plan
from tenplex_megatron.execution.verify import fingerprint_state
from tenplex_megatron.store.shared import SnapshotStore
from tenplex_megatron.testing.fakes import blank_targets, box_bytes, first_wrong
from tenplex_megatron.testing.generate import ModelShape, megatron_collection, nodes_of
from tenplex_megatron.testing.spawn import run_ranks
from tenplex_megatron.transport.process_group import ProcessGroupTransport

MODEL = ModelShape(num_layers=4)
LAYOUTS = ("TP4", "TP2,PP2", "TP2,DP2", "PP4", "PP2,DP2", "DP4")
RANKS = 4

type Row = tuple[str | None, int, int, int, dict[str, int]]


def write_snapshots(
    store: SnapshotStore, collection: TensorCollection, generation: int, rank: int
) -> None:
    writer = store.writer(
        rank,
        RANKS,
        generation=generation,
        layout={},
        specs=collection.tensors,
        boxes=collection.partition(rank),
    )
    for box, view in zip(collection.partition(rank), writer.begin(1), strict=True):
        view[:] = box_bytes(collection.tensors[box.tensor], box).data
    writer.finish(1, {})
    writer.close()


def change_layouts(rank: int, folder: Path, pairs: list[tuple[str, str]], nodes: int) -> list[Row]:
    """Every pair in turn; each is a generation of its own in the node's store."""
    transport = ProcessGroupTransport.open(60)
    place = nodes_of(RANKS, nodes)
    store = SnapshotStore(folder / place[rank], "job", "model").create()
    rows: list[Row] = []
    for generation, (old, new) in enumerate(pairs):
        source, target = (megatron_collection(MODEL, ParallelLayout.parse(t)) for t in (old, new))
        write_snapshots(store, source, generation, rank)
        transport.gather(b"", timeout_s=60)
        plan = plan_reshard(source, target, Topology(place, place))
        targets = blank_targets(target, rank)
        reader = store.reader(1, generation=generation)
        moved = execute_plan(
            plan, rank, reader=reader, targets=targets, transport=transport, timeout_s=60
        )
        reader.close()
        assert moved.sent_bytes == plan.sent_by_rank[rank]
        assert moved.received_bytes == plan.received_by_rank[rank]
        assert plan.bytes_moved == plan.bytes_lower_bound
        total = sum(map(plan.nbytes, plan.transfers_for(rank)))
        rows.append(
            (
                first_wrong(target, targets, plan.created_for(rank)),
                moved.local_bytes + moved.received_bytes - total,
                moved.received_bytes,
                plan.bytes_moved,
                fingerprints(target, rank, targets, transport),
            )
        )
    return rows


def fingerprints(
    target: TensorCollection, rank: int, targets: list[Target], transport: ProcessGroupTransport
) -> dict[str, int]:
    return fingerprint_state(target, rank, targets, transport, timeout_s=60)


@pytest.mark.parametrize("nodes", [2, 4])
def test_all_changes_of_four_ranks_fill_every_byte_and_move_the_least(
    store_directory: Path, nodes: int
) -> None:
    pairs = list(itertools.permutations(LAYOUTS, 2))
    by_rank = run_ranks(change_layouts, RANKS, 120.0, store_directory, pairs, nodes)
    first = by_rank[0][0][-1]
    assert len(first) > 20
    for pair, *rows in zip(pairs, *by_rank, strict=True):
        assert [row[0] for row in rows] == [None] * RANKS, pair
        assert [row[1] for row in rows] == [0] * RANKS, pair
        assert sum(row[2] for row in rows) == rows[0][3], pair
        assert all(row[4] == first for row in rows), pair
