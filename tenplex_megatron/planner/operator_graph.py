"""What may be chosen in a model, operator by operator, and what does each choice cost?

Everything is a sum: a strategy names a configuration of every operator, and costs what these cost
plus what the edges cost for the pairs at their ends.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.table import COST_BITS, Table

__all__ = ["Edge", "Node", "OperatorGraph"]

type Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """What an operator itself costs, by configuration: two arrays of shape [K].

    Memory is in bytes per device, time in seconds per step. An infinite cost marks a configuration
    that is impossible; a large number instead would cost all others their precision.
    """

    memory: Floats
    time: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """What joins two operators costs, by pair: two arrays of shape [K_source, K_target]."""

    source: str
    target: str
    memory: Floats
    time: Floats


@dataclass(frozen=True, eq=False)
class OperatorGraph:
    """Operators by name, and any edges between them: parallel ones and several components too.

    Costs are rounded to whole quanta, a power of two below 2 ** -44 of the largest possible total.
    So sums are the same in any order, and bytes stay whole up to 35 TB.

    Raises:
        ConfigError: an edge names an unknown operator or one operator twice, shapes disagree, or a
            cost is negative or no number.
    """

    nodes: Mapping[str, Node]
    edges: Sequence[Edge] = ()

    def __post_init__(self) -> None:
        for name, node in self.nodes.items():
            _check_costs(f"operator {name}", node, (max(1, np.size(node.memory)),))
        for edge in self.edges:
            where = f"edge {edge.source} -> {edge.target}"
            for name in (edge.source, edge.target):
                if name not in self.nodes:
                    raise ConfigError(f"{where}: there is no operator {name!r}")
            if edge.source == edge.target:
                raise ConfigError(f"{where}: expected two operators; add the cost to the operator")
            ends = (self.nodes[edge.source], self.nodes[edge.target])
            _check_costs(where, edge, tuple(len(end.memory) for end in ends))

    @cached_property
    def quanta(self) -> tuple[float, float]:
        """The least difference of memory, and of time, that is told apart."""
        parts: list[Node | Edge] = [*self.nodes.values(), *self.edges]
        return _quantum([part.memory for part in parts]), _quantum([part.time for part in parts])

    def cost(self, strategy: Mapping[str, int]) -> tuple[float, float]:
        """Memory and time of one configuration for every operator: what its point says, exactly."""
        costs = [
            (node.memory[strategy[name]], node.time[strategy[name]])
            for name, node in self.nodes.items()
        ]
        for edge in self.edges:
            pair = strategy[edge.source], strategy[edge.target]
            costs.append((edge.memory[pair], edge.time[pair]))
        if not np.isfinite(costs).all():
            return math.inf, math.inf
        counts = np.rint(np.reshape(costs, (-1, 2)) / self.quanta).sum(axis=0)
        memory, time = (counts * self.quanta).tolist()
        return memory, time

    def table(self, part: Node | Edge, operator: str | None = None) -> Table:
        """The costs of a node, with its name, or of an edge in whole quanta."""
        possible = np.isfinite(part.memory) & np.isfinite(part.time)
        memory, time = (
            np.rint(np.where(possible, costs, 0) / quantum).astype(np.int64)
            for costs, quantum in zip((part.memory, part.time), self.quanta, strict=True)
        )
        return Table.of(memory, time, possible, operator)


def _check_costs(where: str, part: Node | Edge, shape: tuple[int, ...]) -> None:
    for name, costs in (("memory", part.memory), ("time", part.time)):
        if np.shape(costs) != shape:
            raise ConfigError(
                f"{where}: {name} has shape {np.shape(costs)}, expected {shape}, an entry for each "
                "configuration"
            )
        if not (costs >= 0).all():
            raise ConfigError(f"{where}: {name} is {np.min(costs)} somewhere, expected 0 or more")


def _quantum(costs: Sequence[Floats]) -> float:
    bound = math.fsum(np.max(some, where=np.isfinite(some), initial=0) for some in costs)
    # Half of the range is left to rounding.
    return max(math.ldexp(1.0, math.frexp(bound)[1] - COST_BITS + 1), sys.float_info.min)
