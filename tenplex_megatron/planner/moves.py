"""How many bytes does a change of layout move over which link, before any tensor is described?

What a new rank needs and its node does not hold has to travel, as in the exact plan (`core.plan`);
where several nodes hold it, the busiest of them sends as little as possible.  See `holders` for
what is simplified.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.holders import Area, Division, Placement, StateSizes

__all__ = ["Moves", "Placement", "Source", "StateSizes", "Wait", "bytes_to_move"]

type _Bools = NDArray[np.bool_]
type _Floats = NDArray[np.float64]

_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Wait:
    """How long one node is busy in one direction."""

    seconds: float
    node: str
    direction: str
    """`arriving`, `leaving` or `within`."""


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Bytes of a change of layout."""

    nodes: tuple[str, ...]
    """Those with new ranks, in the order of the ranks."""
    ranks: tuple[int, ...]
    """New ranks on each node."""
    within: _Floats
    """Bytes copied inside each node, whichever of its devices held them."""
    remote: _Floats
    """Bytes that each node (column) wants and some group of other nodes (row) holds."""
    sends: _Floats
    """The share of what is wanted from each group (row) that each node (column) sends."""

    @property
    def arriving(self) -> _Floats:
        """Bytes each node gets from elsewhere; missing ones count as if they could be got."""
        found: _Floats = self.remote.sum(axis=0)
        return found

    @property
    def leaving(self) -> _Floats:
        """Bytes each node sends to others."""
        found: _Floats = self.remote.sum(axis=1) @ self.sends
        return found

    @property
    def missing(self) -> _Floats:
        """Bytes each node wants that no node with a new rank holds: lost, or out of reach."""
        found: _Floats = self.remote[~self.sends.any(axis=1)].sum(axis=0)
        return found

    @property
    def moved_bytes(self) -> float:
        """Bytes that pass between nodes."""
        return float(self.leaving.sum())

    def between(self) -> dict[tuple[str, str], float]:
        """Bytes from one node to another, where there are any."""
        link = self.sends.T @ self.remote
        return {
            (self.nodes[source], self.nodes[target]): float(link[source, target])
            for source, target in zip(*np.nonzero(link), strict=True)
        }

    def slowest(self, cluster: ClusterProfile) -> Wait:
        """The node that is busy longest; every rank there has its device's share of a link."""
        network = cluster.network_bandwidth * cluster.network_efficiency
        inside = cluster.node_bandwidth * cluster.node_efficiency
        loads = (
            ("arriving", self.arriving, network),
            ("leaving", self.leaving, network),
            ("within", self.within, inside),
        )
        waits = []
        for direction, load, rate in loads:
            seconds = load / (rate * np.array(self.ranks))
            index = int(seconds.argmax())
            waits.append(Wait(float(seconds[index]), self.nodes[index], direction))
        return max(waits, key=lambda wait: wait.seconds)


class Source:
    """Where the state is now, prepared so that the moves to many targets can be counted."""

    def __init__(self, sizes: StateSizes, num_layers: int, place: Placement) -> None:
        self._area = Area.of(sizes, num_layers)
        names = tuple(dict.fromkeys(place.nodes.values()))
        self._number = {name: index for index, name in enumerate(names)}
        self._held = Division(self._area, place, names)
        holders, self._group = np.unique(
            np.sort(self._held.cells, axis=1), axis=0, return_inverse=True
        )
        self._group = self._group.reshape(-1)
        self._holds: _Bools = np.zeros((len(holders), len(names) + 1), dtype=np.bool_)
        """Whether each node (column) holds what each group of cells (row) does; no other does."""
        np.put_along_axis(self._holds, holders, values=True, axis=1)
        self._holds[:, -1] = False

    def moves(self, target: Placement) -> Moves:
        """What has to go where for the ranks of `target`."""
        ranks = Counter(target.nodes.values())
        nodes = tuple(ranks)
        demand = self._demand(Division(self._area, target, nodes), len(nodes))
        # Nobody reads the memory of a node without new ranks.
        number = [self._number.get(name, len(self._number)) for name in nodes]
        holds = self._holds[:, number]
        within = np.where(holds, demand, 0.0)
        remote = demand - within
        sends = _balanced(holds, remote.sum(axis=1))
        return Moves(nodes, tuple(ranks.values()), within.sum(axis=0), remote, sends)

    def _demand(self, wanted_by: Division, num_nodes: int) -> _Floats:
        """Bytes that each node wants (column) of what each group of cells holds (row)."""
        area, source = self._area, self._held
        points = np.sort(np.concatenate([area.edges, source.points, wanted_by.points]))
        sizes = np.diff(points)
        used = sizes > 0
        middle = (points[:-1] + sizes / 2)[used]
        piece = np.clip(
            np.searchsorted(area.edges, middle, side="right") - 1, 0, len(area.size) - 1
        )
        offset = middle - area.edges[piece]
        # Both breadths in whole units of one over their product.
        places = np.unique(
            np.concatenate(
                [
                    np.arange(source.breadth + 1) * wanted_by.breadth,
                    np.arange(wanted_by.breadth + 1) * source.breadth,
                ]
            )
        )
        shares = np.diff(places) / (source.breadth * wanted_by.breadth)
        group = self._group[source.cell(piece, offset, places[:-1] // wanted_by.breadth)]
        cell = wanted_by.cell(piece, offset, places[:-1] // source.breadth)
        wanted, which = np.unique(group * len(wanted_by.cells) + cell, return_inverse=True)
        nbytes = np.bincount(which.reshape(-1), (sizes[used][:, None] * shares).reshape(-1))
        nodes = wanted_by.cells[wanted % len(wanted_by.cells)]
        slots = (wanted // len(wanted_by.cells))[:, None] * (num_nodes + 1) + nodes
        found = np.bincount(
            slots.reshape(-1),
            np.repeat(nbytes, nodes.shape[1]),
            minlength=len(self._holds) * (num_nodes + 1),
        )
        return found.reshape(len(self._holds), num_nodes + 1)[:, :-1]


def bytes_to_move(
    sizes: StateSizes, num_layers: int, source: Placement, target: Placement
) -> dict[str, float]:
    """Bytes that have to arrive on each node of `target`, at least.

    State that no node of `source` holds any more counts as if it arrived too: whether it can is for
    the exact plan to say.
    """
    found = Source(sizes, num_layers, source).moves(target)
    return dict(zip(found.nodes, map(float, found.arriving), strict=True))


def _balanced(holds: _Bools, wanted: _Floats) -> _Floats:
    """The share of what is wanted from each group (row) that each node sends (column).

    Each group in turn, the largest first, fills up those of its nodes that send least until then;
    in a second round it knows what the others did.  That comes within percents of `core.balance`.
    """
    count = holds.sum(axis=1)
    has_choice = (count > 1) & (wanted > 0)
    sends = np.where(has_choice[:, None], 0.0, holds / np.maximum(count, 1)[:, None])
    load = wanted @ sends
    order = np.flatnonzero(has_choice)
    order = order[np.argsort(-wanted[order], kind="stable")]
    members = [(row, np.flatnonzero(holds[row])) for row in order]
    for _ in range(_ROUNDS):
        for row, nodes in members:
            others = load[nodes] - sends[row, nodes] * wanted[row]
            filled = _filled(others, wanted[row])
            sends[row, nodes] = filled / wanted[row]
            load[nodes] = others + filled
    return sends


def _filled(load: _Floats, nbytes: float) -> _Floats:
    """What each of some loads gets of `nbytes`, so that the highest one gets as low as it can.

    >>> [float(share) for share in _filled(np.array([5.0, 1.0, 2.0]), 5.0)]
    [0.0, 3.0, 2.0]
    """
    ordered = np.sort(load)
    levels = (np.cumsum(ordered) + nbytes) / np.arange(1, len(load) + 1)
    # The water stands over as many of the lowest as lie below its level.
    count = int(np.flatnonzero(ordered < levels)[-1])
    found: _Floats = np.maximum(levels[count] - load, 0.0)
    return found
