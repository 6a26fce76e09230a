"""Which bytes go from where to where when the state changes layout.

A plan is a value: sorted, the same on every rank, and readable as JSON. It fills every element
that the target holds exactly once per rank, takes from the target's own node whatever that node
has, and spreads the rest over the nodes that hold a copy so that the busiest one sends least.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tenplex_megatron.core.balance import Group, balance, spread
from tenplex_megatron.core.collection import TensorCollection, join_names
from tenplex_megatron.core.geometry import Holders, RemotePiece, TensorRoutes, find_routes
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.slicing import cut_after
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import LayoutError

__all__ = ["ReshardPlan", "Topology", "Transfer", "plan_reshard"]

_CUT_SHARE = 40
"""A cut may miss its place by one part in so many of the busiest node's bytes, over all cuts."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The node of every old rank whose store survives, and of every new rank."""

    source_nodes: Mapping[int, str]
    target_nodes: Mapping[int, str]

    def __post_init__(self) -> None:
        for name in ("source_nodes", "target_nodes"):
            table: Mapping[int, str] = getattr(self, name)
            object.__setattr__(self, name, {rank: table[rank] for rank in sorted(table)})

    def target_ranks(self, node: str) -> tuple[int, ...]:
        """The new ranks on a node, sorted."""
        return tuple(rank for rank, name in self.target_nodes.items() if name == node)


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """One box of one tensor on its way to a new rank.

    The bytes lie in the snapshot of old rank `source_rank`. When `sender_rank` is `target_rank`,
    that snapshot is on the target's own node; otherwise new rank `sender_rank`, which is on the
    snapshot's node, reads and sends them.
    """

    target_rank: int
    tensor: str
    region: Region
    source_rank: int
    sender_rank: int

    @property
    def is_local(self) -> bool:
        """Whether the bytes stay on the node."""
        return self.sender_rank == self.target_rank


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """All transfers, sorted, and the padding that targets make up because no source has it."""

    tensors: Mapping[str, TensorSpec]
    topology: Topology
    transfers: tuple[Transfer, ...]
    created: tuple[tuple[int, Box], ...] = ()
    bytes_lower_bound: int = 0
    """Bytes that new ranks need and their nodes do not hold, each counted per rank."""
    unused: tuple[str, ...] = field(default=())
    """Source tensors that no target asks for."""

    def __post_init__(self) -> None:
        tensors = {name: self.tensors[name] for name in sorted(self.tensors)}
        object.__setattr__(self, "tensors", tensors)

    def nbytes(self, transfer: Transfer) -> int:
        """Bytes of one transfer."""
        return transfer.region.numel * self.tensors[transfer.tensor].itemsize

    @property
    def bytes_total(self) -> int:
        """Bytes that all new ranks take from snapshots, local ones included."""
        return sum(map(self.nbytes, self.transfers))

    @property
    def bytes_moved(self) -> int:
        """Bytes that pass between nodes."""
        return sum(map(self.nbytes, self.remote()))

    @property
    def sent_by_node(self) -> dict[str, int]:
        """Bytes every node with new ranks sends to others."""
        sent = dict.fromkeys(sorted(set(self.topology.target_nodes.values())), 0)
        for rank, nbytes in self.sent_by_rank.items():
            sent[self.topology.target_nodes[rank]] += nbytes
        return sent

    @property
    def sent_by_rank(self) -> dict[int, int]:
        """Bytes every new rank sends to other nodes."""
        sent = dict.fromkeys(self.topology.target_nodes, 0)
        for transfer in self.remote():
            sent[transfer.sender_rank] += self.nbytes(transfer)
        return sent

    @property
    def received_by_rank(self) -> dict[int, int]:
        """Bytes every new rank gets from other nodes."""
        received = dict.fromkeys(self.topology.target_nodes, 0)
        for transfer in self.remote():
            received[transfer.target_rank] += self.nbytes(transfer)
        return received

    def remote(self) -> Iterable[Transfer]:
        """The transfers that pass between nodes, in the plan's order."""
        return (transfer for transfer in self.transfers if not transfer.is_local)

    def transfers_for(self, rank: int) -> tuple[Transfer, ...]:
        """What new rank `rank` is filled from, in the plan's order."""
        return tuple(found for found in self.transfers if found.target_rank == rank)

    def local_for(self, rank: int) -> tuple[Transfer, ...]:
        """What new rank `rank` copies from its own node."""
        return tuple(found for found in self.transfers_for(rank) if found.is_local)

    def receives_for(self, rank: int) -> tuple[Transfer, ...]:
        """What new rank `rank` gets from other new ranks, in the plan's order."""
        return tuple(found for found in self.transfers_for(rank) if not found.is_local)

    def sends_for(self, rank: int) -> tuple[Transfer, ...]:
        """What new rank `rank` reads from its node and sends, in the plan's order."""
        return tuple(found for found in self.remote() if found.sender_rank == rank)

    def created_for(self, rank: int) -> tuple[Box, ...]:
        """Padding that new rank `rank` makes up itself."""
        return tuple(box for holder, box in self.created if holder == rank)


def plan_reshard(
    source: TensorCollection, target: TensorCollection, topology: Topology
) -> ReshardPlan:
    """The plan that fills everything `target` holds from what `source` still holds.

    Raises:
        LayoutError: when tensors contradict each other, when a wanted box has no surviving
            holder that a new rank can read, or when the topology lacks a rank.
    """
    _check_nodes("source", source.ranks, topology.source_nodes)
    _check_nodes("target", target.ranks, topology.target_nodes)
    _check_tensors(source.tensors, target.tensors)
    found = _find_all_routes(source, target, topology)
    _check_complete(found, source, topology)
    transfers: list[Transfer] = []
    demands: list[_Demand] = []
    created: list[tuple[int, Box]] = []
    for name, routes in found.items():
        itemsize = target.tensors[name].itemsize
        created.extend((rank, Box(name, region)) for rank, region in routes.created)
        transfers.extend(
            Transfer(rank, name, region, source_rank, rank)
            for rank, region, source_rank in routes.local
        )
        demands.extend(
            _Demand(name, itemsize, piece, piece.region.numel * itemsize) for piece in routes.remote
        )
    lower_bound = sum(demand.nbytes for demand in demands)
    transfers += _assign_senders(_assign_nodes(demands), topology)
    return ReshardPlan(
        tensors=target.tensors,
        topology=topology,
        transfers=tuple(sorted(transfers, key=_sort_key)),
        created=tuple(sorted(created)),
        bytes_lower_bound=lower_bound,
        unused=tuple(sorted(set(source.tensors) - set(target.all_holders()))),
    )


def _sort_key(transfer: Transfer) -> tuple[object, ...]:
    """The order of transfers as a flat tuple, which compares faster than nested values."""
    region = transfer.region
    return (
        transfer.target_rank,
        transfer.tensor,
        region.start,
        region.stop,
        transfer.source_rank,
        transfer.sender_rank,
    )


def _check_nodes(side: str, ranks: Iterable[int], nodes: Mapping[int, str]) -> None:
    unknown = [rank for rank in ranks if rank not in nodes]
    if unknown:
        raise LayoutError(
            f"{side} ranks {unknown} have no node; the topology names ranks {list(nodes)}"
        )


def _check_tensors(source: Mapping[str, TensorSpec], target: Mapping[str, TensorSpec]) -> None:
    problems = []
    for name, wanted in target.items():
        held = source.get(name)
        if held is None:
            problems.append(f"{name}: the target needs it, the source has no such tensor")
        elif held.dtype != wanted.dtype:
            problems.append(f"{name}: the source has {held.dtype}, the target {wanted.dtype}")
        elif held.shape != wanted.shape and not _differ_in_padding(held, wanted):
            problems.append(f"{name}: the source has shape {held.shape}, the target {wanted.shape}")
    if problems:
        raise LayoutError(join_names(problems))


def _differ_in_padding(held: TensorSpec, wanted: TensorSpec) -> bool:
    return held.padded and wanted.padded and held.shape[1:] == wanted.shape[1:]


def _find_all_routes(
    source: TensorCollection, target: TensorCollection, topology: Topology
) -> dict[str, TensorRoutes]:
    held, wanted = source.all_holders(), target.all_holders()
    reachable = set(topology.target_nodes.values())
    readable = {rank for rank in source.ranks if topology.source_nodes[rank] in reachable}
    known: dict[tuple[tuple[int, ...], Holders, Holders], TensorRoutes] = {}
    found: dict[str, TensorRoutes] = {}
    for name, targets in wanted.items():
        sources = tuple(entry for entry in held.get(name, ()) if entry[0] in readable)
        whole = source.tensors[name].region
        key = (whole.stop, sources, targets)
        if key not in known:
            known[key] = find_routes(
                whole,
                sources,
                targets,
                source_nodes=topology.source_nodes,
                target_nodes=topology.target_nodes,
            )
        found[name] = known[key]
    return found


def _check_complete(
    found: Mapping[str, TensorRoutes], source: TensorCollection, topology: Topology
) -> None:
    missing = {
        Box(name, region): rank
        for name, routes in found.items()
        for rank, region in reversed(routes.missing)
    }
    if not missing:
        return
    holders = source.all_holders()
    stranded = sorted(
        {
            topology.source_nodes[rank]
            for box in missing
            for rank, region in holders.get(box.tensor, ())
            if region.intersect(box.region) is not None
        }
    )
    names = join_names(f"{box} (wanted by rank {rank})" for box, rank in sorted(missing.items()))
    if stranded:
        raise LayoutError(
            f"no new rank runs on nodes {stranded}, so that nobody can read parts of {names}; "
            "place a rank there or restore from a checkpoint"
        )
    raise LayoutError(f"no surviving rank holds {names}; restore from a copy or a checkpoint")


@dataclass(frozen=True, slots=True)
class _Demand:
    """A remote piece of a named tensor."""

    tensor: str
    itemsize: int
    piece: RemotePiece
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Sending:
    """A part of a demand that one node serves."""

    node: str
    demand: _Demand
    region: Region

    @property
    def nbytes(self) -> int:
        return self.region.numel * self.demand.itemsize


def _assign_nodes(demands: Iterable[_Demand]) -> list[_Sending]:
    """The node that serves each demand, some of them cut where a node has its share."""
    groups: dict[Group, list[_Demand]] = {}
    for demand in demands:
        group = tuple(node for node, _ in demand.piece.sources)
        groups.setdefault(group, []).append(demand)
    totals = {group: sum(one.nbytes for one in members) for group, members in groups.items()}
    shares = balance(totals)
    busiest = max((_total_by_node(shares)).values(), default=0)
    tolerance = busiest // (_CUT_SHARE * max(1, len(groups)))
    sendings: list[_Sending] = []
    for group, members in sorted(groups.items()):
        quotas = {node: shares[group, node] for node in group if (group, node) in shares}
        sendings.extend(_share_out(members, quotas, tolerance))
    return sendings


def _total_by_node(shares: Mapping[tuple[Group, str], int]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for (_, node), amount in shares.items():
        totals[node] = totals.get(node, 0) + amount
    return totals


def _share_out(
    demands: Iterable[_Demand], quotas: Mapping[str, int], tolerance: int
) -> list[_Sending]:
    """Fills each node up to its quota, in order; the last one takes what rounding left."""
    sendings: list[_Sending] = []
    nodes = sorted(quotas)
    room = quotas[nodes[0]]
    for demand in demands:
        rest = [demand.piece.region]
        while rest:
            region = rest.pop(0)
            last = len(nodes) == 1
            first, remainder = cut_after(
                region,
                region.numel if last else room // demand.itemsize,
                tolerance=tolerance // demand.itemsize,
            )
            for part in first:
                sendings.append(_Sending(nodes[0], demand, part))
                room -= sendings[-1].nbytes
            if remainder:
                rest[:0] = remainder
                del nodes[0]
                room += quotas[nodes[0]]
    return sendings


def _assign_senders(sendings: Iterable[_Sending], topology: Topology) -> list[Transfer]:
    """The new rank of each node that reads and sends each part, with even bytes per rank."""
    by_node: dict[str, list[_Sending]] = {}
    for sending in sendings:
        by_node.setdefault(sending.node, []).append(sending)
    transfers: list[Transfer] = []
    for node, members in sorted(by_node.items()):
        ranks = topology.target_ranks(node)
        bins = spread([member.nbytes for member in members], len(ranks))
        for member, index in zip(members, bins, strict=True):
            piece = member.demand.piece
            transfers.append(
                Transfer(
                    target_rank=piece.target_rank,
                    tensor=member.demand.tensor,
                    region=member.region,
                    source_rank=dict(piece.sources)[node],
                    sender_rank=ranks[index],
                )
            )
    return transfers
