"""Where each wanted element of one tensor can come from: its own node, other nodes, or nobody.

The answer depends on shapes and on who holds what, never on names or dtypes, so that tensors cut
alike (a weight and its optimizer moments) share one answer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tenplex_megatron.core.region import Region, missing_parts

__all__ = ["Holders", "RemotePiece", "TensorRoutes", "find_routes", "overlapping_pairs"]

type Holders = tuple[tuple[int, Region], ...]
type Sources = dict[str, int]
"""For each node, the lowest source rank that holds a piece there."""

_PAIRS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class RemotePiece:
    """A wanted piece that the target's node lacks; `sources` gives one holder per other node."""

    target_rank: int
    region: Region
    sources: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class TensorRoutes:
    """The wanted elements of one tensor, each exactly once per target rank."""

    local: tuple[tuple[int, Region, int], ...]
    """(target rank, piece, source rank) on the target's own node."""
    remote: tuple[RemotePiece, ...]
    missing: tuple[tuple[int, Region], ...]
    """(target rank, piece) inside the source tensor that no source rank holds."""
    created: tuple[tuple[int, Region], ...]
    """(target rank, piece) outside the source tensor: padding that only the target has."""


def find_routes(
    whole: Region,
    holders: Holders,
    wanted: Holders,
    *,
    source_nodes: Mapping[int, str],
    target_nodes: Mapping[int, str],
) -> TensorRoutes:
    """Routes of all `wanted` pieces, out of what `holders` have of the tensor `whole`."""
    held = _by_region(holders)
    sources = {region: _sources(ranks, source_nodes) for region, ranks in held.items()}
    routes = _Routes([], [], [], [])
    inside: dict[Region, list[int]] = {}
    for region, ranks in _by_region(_disjoint_per_rank(wanted)).items():
        for part in missing_parts(region, (whole,)):
            routes.created.extend((rank, part) for rank in ranks)
        shared = region.intersect(whole)
        if shared is not None:
            inside.setdefault(shared, []).extend(ranks)
    tangled = _overlapping(tuple(sources))
    for target, candidates in _candidates(tuple(inside), tuple(sources)):
        by_node = _ranks_by_node(inside[target], target_nodes)
        plain = [region for region in candidates if region not in tangled]
        rest = routes.add_cells(by_node, target, plain, sources)
        if rest:
            others = [region for region in candidates if region in tangled]
            for node, ranks in by_node.items():
                routes.add_local_first(node, ranks, rest, others, sources)
    return routes.frozen()


def overlapping_pairs(first: Sequence[Region], second: Sequence[Region]) -> npt.NDArray[np.intp]:
    """The index pairs (i, j) for which `first[i]` and `second[j]` share an element, sorted.

    >>> overlapping_pairs([Region((0,), (4,))], [Region((4,), (6,)), Region((2,), (3,))])
    array([[0, 1]])
    """
    if not first or not second:
        return np.empty((0, 2), dtype=np.intp)
    ndim = first[0].ndim
    low, high = _bounds(first, ndim)
    other_low, other_high = _bounds(second, ndim)
    rows = max(1, _PAIRS_AT_ONCE // len(second))
    found = []
    for begin in range(0, len(first), rows):
        chunk = slice(begin, begin + rows)
        shared = np.ones((len(low[chunk]), len(second)), dtype=np.bool_)
        for dim in range(ndim):
            start = np.maximum(low[chunk, None, dim], other_low[None, :, dim])
            shared &= start < np.minimum(high[chunk, None, dim], other_high[None, :, dim])
        found.append(np.argwhere(shared) + np.array((begin, 0)))
    return np.concatenate(found)


def _bounds(
    regions: Sequence[Region], ndim: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    shape = (len(regions), ndim)
    low = np.array([region.start for region in regions], dtype=np.int64).reshape(shape)
    high = np.array([region.stop for region in regions], dtype=np.int64).reshape(shape)
    return low, high


def _overlapping(regions: Sequence[Region]) -> set[Region]:
    """The regions, all different, that share an element with another one."""
    pairs = overlapping_pairs(regions, regions)
    if len(pairs) <= len(regions):
        return set()
    return {regions[index] for index in pairs[pairs[:, 0] != pairs[:, 1], 0].tolist()}


def _any_overlap(regions: Sequence[Region]) -> bool:
    """Whether two of the regions, sorted and without empty ones, share an element."""
    if not regions[0].ndim:
        return len(regions) > 1
    for index, region in enumerate(regions):
        for other in regions[index + 1 :]:
            if other.start[0] >= region.stop[0]:
                break
            if region.intersect(other) is not None:
                return True
    return False


def _candidates(
    targets: Sequence[Region], regions: Sequence[Region]
) -> Iterator[tuple[Region, list[Region]]]:
    """Every target with the regions that share an element with it."""
    found: list[list[Region]] = [[] for _ in targets]
    for target, region in overlapping_pairs(targets, regions).tolist():
        found[target].append(regions[region])
    return zip(targets, found, strict=True)


def _by_region(holders: Holders) -> dict[Region, list[int]]:
    """The ranks of every distinct, non-empty region; both sorted."""
    table: dict[Region, list[int]] = {}
    for rank, region in holders:
        if not region.is_empty:
            table.setdefault(region, []).append(rank)
    return {region: sorted(set(table[region])) for region in sorted(table)}


def _sources(ranks: Sequence[int], nodes: Mapping[int, str]) -> Sources:
    lowest: Sources = {}
    for rank in ranks:
        lowest.setdefault(nodes[rank], rank)
    return lowest


def _merged(sources: Iterable[Sources]) -> Sources:
    """The lowest rank of every node that any of the sources names."""
    lowest: Sources = {}
    for offers in sources:
        for node, rank in offers.items():
            lowest[node] = min(rank, lowest.get(node, rank))
    return lowest


def _ranks_by_node(ranks: Sequence[int], nodes: Mapping[int, str]) -> dict[str, list[int]]:
    table: dict[str, list[int]] = {}
    for rank in sorted(set(ranks)):
        table.setdefault(nodes[rank], []).append(rank)
    return table


def _disjoint_per_rank(wanted: Holders) -> Holders:
    """The same elements of every rank, with its overlapping boxes cut where they overlap.

    No piece then crosses the border of any box of its rank, and no element comes twice.
    """
    by_rank: dict[int, list[Region]] = {}
    for rank, region in sorted(set(wanted)):
        if not region.is_empty:
            by_rank.setdefault(rank, []).append(region)
    pieces: list[tuple[int, Region]] = []
    for rank, regions in by_rank.items():
        if _any_overlap(regions):
            pieces.extend((rank, cell) for cell, _ in _refine(regions))
        else:
            pieces.extend((rank, region) for region in regions)
    return tuple(pieces)


def _refine(regions: Sequence[Region]) -> list[tuple[Region, list[int]]]:
    """Disjoint cells of the union, each with the indices of the regions that contain it."""
    cells: list[tuple[Region, list[int]]] = []
    for index, region in enumerate(regions):
        rest = missing_parts(region, (cell for cell, _ in cells))
        refined: list[tuple[Region, list[int]]] = []
        for cell, members in cells:
            shared = cell.intersect(region)
            if shared is None:
                refined.append((cell, members))
                continue
            refined.append((shared, [*members, index]))
            refined.extend((part, members) for part in cell.subtract(region))
        cells = refined + [(part, [index]) for part in rest]
    return sorted(cells)


@dataclass(frozen=True, slots=True)
class _Routes:
    """Routes under construction."""

    local: list[tuple[int, Region, int]]
    remote: list[RemotePiece]
    missing: list[tuple[int, Region]]
    created: list[tuple[int, Region]]

    def frozen(self) -> TensorRoutes:
        """The same as a value."""
        return TensorRoutes(
            tuple(self.local), tuple(self.remote), tuple(self.missing), tuple(self.created)
        )

    def add_cells(
        self,
        by_node: Mapping[str, Sequence[int]],
        target: Region,
        candidates: Sequence[Region],
        sources: Mapping[Region, Sources],
    ) -> tuple[Region, ...]:
        """Routes what disjoint candidates hold of `target`, and returns the rest of it."""
        cells = []
        for region in candidates:
            cell = target.intersect(region)
            if cell is not None:
                cells.append(cell)
                for node, ranks in by_node.items():
                    self._add_cell(node, ranks, cell, sources[region])
        if sum(cell.numel for cell in cells) == target.numel:
            return ()
        return missing_parts(target, cells)

    def add_local_first(
        self,
        node: str,
        ranks: Sequence[int],
        wanted: Sequence[Region],
        candidates: Sequence[Region],
        sources: Mapping[Region, Sources],
    ) -> None:
        """Takes from overlapping candidates all the node has, and cuts only the rest into cells."""
        rest = list(wanted)
        for region in candidates:
            source = sources[region].get(node)
            if source is None or not rest:
                continue
            pieces = [piece for box in rest if (piece := box.intersect(region)) is not None]
            rest = [part for box in rest for part in box.subtract(region)]
            self.local.extend((rank, piece, source) for piece in pieces for rank in ranks)
        for box in rest:
            cuts = [(cut, sources[one]) for one in candidates if (cut := box.intersect(one))]
            regions = [cut for cut, _ in cuts]
            for gap in missing_parts(box, regions):
                self.missing.extend((rank, gap) for rank in ranks)
            for cell, members in _refine(regions):
                offers = _merged(cuts[member][1] for member in members)
                self._add_cell(node, ranks, cell, offers)

    def _add_cell(self, node: str, ranks: Sequence[int], cell: Region, sources: Sources) -> None:
        if node in sources:
            self.local.extend((rank, cell, sources[node]) for rank in ranks)
            return
        offers = tuple(sorted(sources.items()))
        self.remote.extend(RemotePiece(rank, cell, offers) for rank in ranks)
