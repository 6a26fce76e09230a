"""What does it cost to bring a tensor from one layout over the devices into another?

A conversion is a walk over layouts whose steps are collectives; its cost is that of the cheapest
walk. It follows that the cost is zero exactly when the layouts agree and that a detour never pays.
TensorOpt (arXiv 2004.10856) calls this tensor re-scheduling.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.errors import LayoutError
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.tensoropt.mesh import (
    PARTIAL,
    REPLICATED,
    DeviceMesh,
    Layout,
    Tensor,
    shares,
)
from tenplex_megatron.planner.timing.candidates import Array
from tenplex_megatron.planner.timing.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    group_link,
)

__all__ = ["Kind", "Rescheduler", "Step"]

type Kind = Literal[
    "all_gather", "all_to_all", "all_reduce", "reduce_scatter", "slice", "pad", "mask"
]
"""Collectives, and what a device does alone: keep a slice, pad a slice with zeros to an addend, or
keep the whole on one device of a group and zeros on the others."""

_LOCAL_TRAFFIC = 2.0
"""A local step reads and writes every byte it keeps."""
_MANY_BYTES = 1e15


@dataclass(frozen=True, slots=True)
class Step:
    """One collective over groups along `axes`: their role changes from `source` to `target`."""

    kind: Kind
    axes: tuple[int, ...]
    source: int
    target: int


def _kind(source: int, target: int) -> Kind:
    if source == PARTIAL:
        return "all_reduce" if target == REPLICATED else "reduce_scatter"
    if source == REPLICATED:
        return "mask" if target == PARTIAL else "slice"
    if target == PARTIAL:
        return "pad"
    return "all_gather" if target == REPLICATED else "all_to_all"


@dataclass(frozen=True, slots=True)
class _Moves:
    """Every step between two layouts of a tensor with some number of dims, sorted by its target.

    Many of them are the same step on as small a piece of the tensor: one of `priced`.
    """

    layouts: tuple[Layout, ...]
    source: NDArray[np.intp]
    target: NDArray[np.intp]
    priced: tuple[tuple[Step, int], ...]
    """A step, and the parts into which the tensor is cut before it."""
    price: NDArray[np.intp]
    """The place of each move's step in `priced`."""


@functools.cache
def _moves(mesh: DeviceMesh, num_dims: int) -> _Moves:
    # Python's indexing makes PARTIAL and REPLICATED the last two of every list of roles.
    roles = [*range(num_dims), PARTIAL, REPLICATED]
    layouts = tuple(itertools.product(roles, repeat=len(mesh.sizes)))
    numbers = {layout: number for number, layout in enumerate(layouts)}
    priced: dict[tuple[Step, int], int] = {}
    found = [
        (numbers[after], number, priced.setdefault((step, shares(mesh, before)), len(priced)))
        for number, before in enumerate(layouts)
        for step, after in _neighbours(before, roles)
    ]
    target, source, price = np.array(sorted(found), dtype=np.intp).reshape(-1, 3).T
    return _Moves(layouts, source, target, tuple(priced), price)


class Rescheduler:
    """Prices conversions on one mesh of one cluster; remembers what it has computed."""

    def __init__(self, mesh: DeviceMesh, cluster: ClusterProfile) -> None:
        self.mesh = mesh
        self.cluster = cluster
        self._prices: dict[int, Array] = {}
        self._reached: dict[tuple[Tensor, Layout], Array] = {}

    def times(self, tensor: Tensor, sources: Sequence[Layout], targets: Sequence[Layout]) -> Array:
        """Seconds of the cheapest conversion from each source to each target, float64 [S, T].

        Raises:
            LayoutError: when a dim does not divide as a layout asks.
        """
        for layout in {*sources, *targets}:
            self._check(tensor, layout)
        self._reach(tensor, sources)
        columns = [self._number(tensor, target) for target in targets]
        found = [self._reached[tensor, source][columns] for source in sources]
        return np.array(found, dtype=np.float64).reshape(len(sources), len(targets))

    def time(self, tensor: Tensor, source: Layout, target: Layout) -> float:
        """Seconds of the cheapest conversion."""
        return float(self.times(tensor, [source], [target])[0, 0])

    def steps(self, tensor: Tensor, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The steps of a cheapest conversion, in order.

        Raises:
            LayoutError: when a dim does not divide as a layout asks.
        """
        self.times(tensor, [source], [target])
        moves, reached = _moves(self.mesh, len(tensor.sizes)), self._reached[tensor, source]
        costs = self._costs(tensor)
        here, start, found = self._number(tensor, target), self._number(tensor, source), []
        while here != start:
            # Costs are positive, so the best predecessor is strictly closer to the source.
            into = np.flatnonzero(moves.target == here)
            step = into[np.argmin(reached[moves.source[into]] + costs[into])]
            found.append(moves.priced[moves.price[step]][0])
            here = int(moves.source[step])
        return tuple(reversed(found))

    def _check(self, tensor: Tensor, layout: Layout) -> None:
        if len(layout) != len(self.mesh.sizes) or max(layout, default=0) >= len(tensor.sizes):
            raise LayoutError(
                f"layout {layout}: expected a dim below {len(tensor.sizes)} or a role for each of "
                f"the {len(self.mesh.sizes)} axes of mesh {self.mesh.sizes}"
            )
        for axis, role in enumerate(layout):
            if role >= 0 and not self.mesh.can_split(tensor.sizes[role], axis):
                raise LayoutError(
                    f"layout {layout}: dim {role} of size {tensor.sizes[role]} has no digit for "
                    f"axis {axis} of mesh {self.mesh.sizes}; use an axis before it"
                )

    def _number(self, tensor: Tensor, layout: Layout) -> int:
        """The place of the layout in `_Moves.layouts`."""
        base = len(tensor.sizes) + 2
        return functools.reduce(lambda number, role: number * base + role % base, layout, 0)

    def _reach(self, tensor: Tensor, sources: Sequence[Layout]) -> None:
        """Shortest paths from the sources to every layout: Bellman-Ford, all sources at once."""
        missing = [s for s in dict.fromkeys(sources) if (tensor, s) not in self._reached]
        moves = _moves(self.mesh, len(tensor.sizes))
        rows = range(len(missing))
        reached = np.full((len(missing), len(moves.layouts)), np.inf)
        reached[rows, [self._number(tensor, source) for source in missing]] = 0.0
        if missing and moves.priced:
            kept = self._divisible(tensor, moves)[moves.target]
            source, costs = moves.source[kept], self._costs(tensor)[kept]
            targets, starts = np.unique(moves.target[kept], return_index=True)
            before = None
            while before is None or (reached < before).any():
                before = reached.copy()
                best = np.minimum.reduceat(before[:, source] + costs, starts, axis=1)
                reached[:, targets] = np.minimum(before[:, targets], best)
        self._reached.update({(tensor, s): reached[row] for row, s in enumerate(missing)})

    def _divisible(self, tensor: Tensor, moves: _Moves) -> NDArray[np.bool_]:
        """Which layouts the tensor can have."""
        can = np.array(
            [
                [self.mesh.can_split(size, axis) for size in tensor.sizes] + [True, True]
                for axis in range(len(self.mesh.sizes))
            ]
        )
        roles = np.array(moves.layouts)
        possible: NDArray[np.bool_] = can[np.arange(roles.shape[1]), roles].all(axis=1)
        return possible

    def _costs(self, tensor: Tensor) -> Array:
        """Seconds of every move of the tensor."""
        moves = _moves(self.mesh, len(tensor.sizes))
        prices = self._prices.get(len(tensor.sizes))
        if prices is None:
            price = functools.cache(self._price)
            found = [price(step.kind, step.axes, parts) for step, parts in moves.priced]
            prices = self._prices[len(tensor.sizes)] = np.array(found).reshape(-1, 2)
        seconds: Array = (prices @ [1.0, tensor.size_bytes])[moves.price]
        return seconds

    def _price(self, kind: Kind, axes: tuple[int, ...], parts: int) -> tuple[float, float]:
        """Latency and seconds per byte of the whole tensor, of which a device holds one part."""
        size = self.mesh.group_size(axes)
        per_node = self.mesh.members_per_node(axes, self.cluster.devices_per_node)
        held = 1.0 / parts
        # Groups need not be equally spaced; this stride gives the node as many members as it has.
        stride = np.asarray(self.cluster.devices_per_node / per_node)
        link = group_link(self.cluster, np.asarray(float(size)), stride)

        def seconds(size_bytes: float) -> float:
            held_bytes = np.asarray(held * size_bytes)
            match kind:
                case "all_gather":
                    return float(all_gather_s(link, held_bytes * size))
                case "reduce_scatter":
                    return float(all_gather_s(link, held_bytes))
                case "all_reduce":
                    return float(all_reduce_s(link, held_bytes))
                case "all_to_all":
                    return float(all_to_all_s(self.cluster, link, stride, held_bytes))
            kept = {"slice": 1.0 / size, "pad": float(size), "mask": 1.0}[kind]
            rate = self.cluster.memory_bandwidth * self.cluster.memory_efficiency
            return float(_LOCAL_TRAFFIC * kept * held_bytes / rate)

        latency = seconds(0.0)
        # Far above the latency, so that the difference is not lost to rounding.
        return latency, (seconds(_MANY_BYTES) - latency) / _MANY_BYTES


def _neighbours(layout: Layout, roles: Sequence[int]) -> Iterator[tuple[Step, Layout]]:
    """Every step from the layout: any axes of one role take on another role together."""
    for source in dict.fromkeys(layout):
        axes = [axis for axis, role in enumerate(layout) if role == source]
        groups = itertools.chain.from_iterable(
            itertools.combinations(axes, count) for count in range(1, len(axes) + 1)
        )
        for group, target in itertools.product(groups, roles):
            if target != source:
                after = tuple(target if a in group else role for a, role in enumerate(layout))
                yield Step(_kind(source, target), group, source, target), after
