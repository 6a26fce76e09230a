"""How does a new generation get its state from the snapshots of the one before?

Every node says what its store holds of the chosen version, every rank says what it needs; all ranks
compute the same plan from that, check the digests of what they read, and carry out their share.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import xxhash

from tenplex_megatron.adapters.base import Progress, TrainingState
from tenplex_megatron.core.codec import (
    canonical,
    collection_from_json,
    collection_to_json,
    encode,
)
from tenplex_megatron.core.collection import TensorCollection, join_names, merge_specs
from tenplex_megatron.core.plan import ReshardPlan, Topology, plan_reshard
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import LayoutError, StoreError
from tenplex_megatron.execution.boxes import Sources
from tenplex_megatron.execution.executor import Movement, Target, execute_plan
from tenplex_megatron.execution.verify import gather_collection
from tenplex_megatron.store.base import TensorReader
from tenplex_megatron.store.values import decode_value, encode_value
from tenplex_megatron.transport.base import Transport

__all__ = ["DamagedSnapshotError", "Restored", "Site", "restore_state"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Site:
    """Where one rank of the new generation runs and what lies there.

    `nodes` names the node of every new rank, `source_nodes` that of every old rank's snapshot.
    """

    rank: int
    nodes: tuple[str, ...]
    source_nodes: Mapping[int, str]

    @property
    def node(self) -> str:
        """The node of this rank."""
        return self.nodes[self.rank]

    @property
    def speaks_for_node(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.nodes.index(self.node) == self.rank


@dataclass(frozen=True, slots=True)
class Restored:
    """What an import did on this rank, and over all ranks."""

    step: int
    plan: ReshardPlan
    movement: Movement
    seconds: Mapping[str, float]


def restore_state(
    state: TrainingState,
    site: Site,
    *,
    reader: TensorReader | None,
    transport: Transport,
    timeout_s: float,
) -> Restored:
    """Fill the live state from the snapshots; collective over all ranks of the generation.

    Args:
        state: the freshly built state of this rank.
        site: where ranks run and snapshots lie.
        reader: the chosen version on this node; None when the node holds none of it.
        transport: between the ranks of the generation.
        timeout_s: seconds until a silent peer counts as lost.

    Raises:
        LayoutError: source and target contradict each other, or a box has no holder.
        DamagedSnapshotError: on every rank, when any rank read a box that does not match its
            digest.
        TransportError: a peer is gone or silent.
    """
    clock = _Clock()
    specs, holdings, progress = _gather_source(site, reader, transport, timeout_s)
    pieces = state.pieces(specs)
    target = gather_collection(
        {piece.spec.name: piece.spec for piece in pieces},
        [piece.box for piece in pieces],
        transport,
        timeout_s=timeout_s,
    )
    clock.mark("describe")
    source = TensorCollection(specs, holdings)
    topology = Topology(site.source_nodes, dict(enumerate(site.nodes)))
    plan = plan_reshard(source, target, topology)
    _check_equal(plan, transport, timeout_s)
    clock.mark("plan")
    damaged = () if reader is None else _damaged_ranks(plan, site, reader)
    (spread,) = transport.agree((len(damaged),), timeout_s=timeout_s)
    if spread:
        raise DamagedSnapshotError(reader.version if reader else -1, damaged)
    clock.mark("verify")
    movement = execute_plan(
        plan,
        site.rank,
        reader=reader,
        targets=[Target(piece.box, piece.flat) for piece in pieces],
        transport=transport,
        timeout_s=timeout_s,
    )
    _report_created(plan.created_for(site.rank))
    clock.mark("move")
    step = state.load_progress(progress)
    state.finish_import()
    clock.mark("finish")
    return Restored(step, plan, movement, clock.seconds)


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def mark(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase], self._last = now - self._last, now


type _Holdings = dict[int, tuple[Box, ...]]


def _gather_source(
    site: Site, reader: TensorReader | None, transport: Transport, timeout_s: float
) -> tuple[dict[str, TensorSpec], _Holdings, list[Progress]]:
    """What the stores of all nodes hold: specs, boxes by old rank, progress in rank order."""
    mine: Progress = {}
    if reader is not None and site.speaks_for_node:
        ranks = [rank for rank in reader.ranks if site.source_nodes.get(rank) == site.node]
        held = {rank: tuple(stored.box for stored in reader.boxes(rank)) for rank in ranks}
        mine = {
            "digests": {
                str(rank): {str(stored.box): stored.digest for stored in reader.boxes(rank)}
                for rank in ranks
            },
            "collection": collection_to_json(TensorCollection(reader.specs, held)),
            "progress": {str(rank): encode_value(reader.progress(rank)) for rank in ranks},
        }
    specs: dict[str, TensorSpec] = {}
    holdings: _Holdings = {}
    progress: dict[int, Progress] = {}
    digests: dict[str, dict[str, str]] = {}
    for row in transport.gather(canonical(mine).encode(), timeout_s=timeout_s):
        entry = json.loads(row)
        if not entry:
            continue
        part = collection_from_json(entry["collection"])
        digests.update(entry["digests"])
        merge_specs(specs, part.tensors)
        holdings.update(part.holdings)
        for rank, values in entry["progress"].items():
            progress[int(rank)] = cast(Progress, decode_value(values))
    if not holdings:
        raise LayoutError("no node of this generation holds any part of the chosen snapshot")
    if site.rank == 0:
        _report_divergence(digests)
    return specs, holdings, [progress[rank] for rank in sorted(progress)]


def _report_divergence(digests: Mapping[str, Mapping[str, str]]) -> None:
    """Copies of one box should be equal; where training let them drift apart, one of them wins."""
    first: dict[str, tuple[str, str]] = {}
    different: list[str] = []
    for rank in sorted(digests, key=int):
        for box, digest in digests[rank].items():
            holder, expected = first.setdefault(box, (rank, digest))
            if digest != expected:
                different.append(f"{box} (ranks {holder} and {rank})")
    if different:
        logger.warning(
            "replicas differ before the change, so training itself let them drift apart; one copy "
            "of each is used from now on: %s",
            join_names(different),
        )


def _check_equal(plan: ReshardPlan, transport: Transport, timeout_s: float) -> None:
    """All ranks must obey one plan; 48 bits of its digest travel as a number."""
    digest = int(xxhash.xxh3_64_hexdigest(encode(plan).encode())[:12], 16)
    largest, smallest = transport.agree((digest, -digest), timeout_s=timeout_s)
    if largest != -smallest:
        raise LayoutError(
            "ranks computed different plans from the same descriptions; they must run the same "
            "version of this package"
        )


class DamagedSnapshotError(StoreError):
    """Some rank read a box that does not match its digest; nothing live was touched yet.

    `ranks` are the old ranks whose files are damaged, as far as this rank has read them.
    """

    def __init__(self, version: int, ranks: tuple[int, ...]) -> None:
        super().__init__(f"snapshot of step {version} is damaged (files of ranks {list(ranks)})")
        self.ranks = ranks


def _damaged_ranks(plan: ReshardPlan, site: Site, reader: TensorReader) -> tuple[int, ...]:
    """The old ranks whose files are damaged; the ranks of a node share the boxes it reads."""
    sources = Sources(reader, plan.tensors)
    wanted = {
        (transfer.source_rank, sources.number(transfer))
        for transfer in plan.transfers
        if site.nodes[transfer.sender_rank] == site.node
    }
    # The largest first, and in turn to the ranks, so that all end at about the same time.
    by_size = sorted(wanted, key=lambda box: (-reader.boxes(box[0])[box[1]].nbytes, box))
    ranks = [rank for rank, node in enumerate(site.nodes) if node == site.node]
    mine = by_size[ranks.index(site.rank) :: len(ranks)]
    damaged = reader.damaged(mine)
    for problem in damaged.values():
        logger.warning("%s", problem)
    return tuple(sorted({rank for rank, _ in damaged}))


def _report_created(created: Sequence[Box]) -> None:
    """Padding no snapshot holds needs no write: built state has fresh masters and zero moments."""
    if created:
        logger.warning(
            "%d elements of padding in %d boxes are new; they start as the framework built them",
            sum(box.region.numel for box in created),
            len(created),
        )
