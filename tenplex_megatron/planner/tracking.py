"""Which strategies of an operator graph are worth having, and what does each choose?

Frontier Tracking (TensorOpt, arXiv 2004.10856): operators are eliminated one by one while frontiers
take the place of single costs. What is left in the end is the frontier over all strategies, and
every point of it knows its choices.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product as combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.elimination import Elimination, Scope
from tenplex_megatron.planner.frontier import Frontier, check_epsilon, union
from tenplex_megatron.planner.operator_graph import Edge, Node, OperatorGraph
from tenplex_megatron.planner.order import Fallback, Order, plan_order
from tenplex_megatron.planner.table import Integers, Table, Trace, chosen

__all__ = ["Edge", "Method", "Node", "OperatorGraph", "Tracked", "track"]

type Floats = NDArray[np.float64]
type Method = Literal["auto", "elimination", "ldp", "heuristic", "repeated"]

WORK_LIMIT = 5_000_000
"""Combinations of configurations, about a second's worth, past which "auto" freezes hubs."""
WORK_MOST = 100_000_000
"""Combinations of configurations past which memory would run out."""
FALLBACKS: Mapping[Method, Fallback] = {
    "elimination": "branch",
    "ldp": "stop",
    "heuristic": "freeze",
    "repeated": "freeze",
}


@dataclass(frozen=True, slots=True, eq=False)
class Tracked:
    """The frontier over all strategies of a graph."""

    frontier: Frontier
    method: Method
    is_exact: bool
    """Whether nothing is missing: False where a hub was frozen or points were thinned out."""
    operators: tuple[str, ...]
    traces: tuple[Trace, ...]
    """What the points were made from; `frontier.sources` says which trace, and which place."""

    @property
    def was_thinned(self) -> bool:
        """Whether points within epsilon of others were left out."""
        return self.frontier.was_thinned

    def strategy(self, index: int) -> dict[str, int]:
        """The configuration of every operator at a point of the frontier."""
        return {name: int(choice[0]) for name, choice in self.strategies([index]).items()}

    def strategies(self, points: Sequence[int] | None = None) -> dict[str, Integers]:
        """The configuration of every operator at these points, at all of them by default."""
        run, place = (
            source if points is None else source[list(points)] for source in self.frontier.sources
        )
        found = {name: np.empty(len(run), dtype=np.int64) for name in self.operators}
        for number in np.unique(run).tolist():
            of_run = run == number
            for name, choice in chosen(self.traces[number], place[of_run]).items():
                found[name][of_run] = choice
        return found


def track(graph: OperatorGraph, *, method: Method = "auto", epsilon: float = 0.0) -> Tracked:
    """The frontier over all strategies of the graph; the same one on every machine.

    Args:
        graph: What may be chosen, and what it costs.
        method: "elimination" (FT-Elimination) takes operators away until none is left, by a branch
            where no other rule applies. "ldp" (FT-LDP) walks along the chain that the other rules
            leave. "heuristic" freezes hubs, operators with many neighbours, in place of a branch:
            fast, not exact. "repeated" does so for every configuration of the hubs: exact, and
            slower than branches but for few graphs. "auto" is "elimination" where that is a matter
            of seconds, otherwise "heuristic".
        epsilon: Above 0 the frontiers are thinned: under every memory limit the best time is at
            most 1 + epsilon times the true one, and both end points of the frontier are true.

    Raises:
        ConfigError: epsilon is negative, the graph has no chain for "ldp", or the method would take
            more than a machine has.
    """
    check_epsilon(epsilon)
    method, order = _order(graph, method)
    frozen = _frozen(graph, order.hubs, method)
    # On the way errors add up, so that little can be left out: half of epsilon is for the result.
    runs = [_run(graph, order, choice, epsilon / 2) for choice in frozen]
    frontier = union([frontier for frontier, _ in runs])
    frontier = frontier.thinned((1 + epsilon) / (1 + epsilon / 2) - 1)
    return Tracked(
        frontier=frontier,
        method=method,
        is_exact=not frontier.was_thinned and not (order.hubs and method == "heuristic"),
        operators=tuple(graph.nodes),
        traces=tuple(trace for _, trace in runs),
    )


def _order(graph: OperatorGraph, method: Method) -> tuple[Method, Order]:
    """How to go about it, and what "auto" stands for."""
    sizes = [len(node.memory) for node in graph.nodes.values()]
    number = {name: index for index, name in enumerate(graph.nodes)}
    edges = [(number[edge.source], number[edge.target]) for edge in graph.edges]
    if method == "auto":
        order = plan_order(sizes, edges)
        if order.work <= WORK_LIMIT:
            return "elimination", order
        method = "heuristic"
    order = plan_order(sizes, edges, fallback=FALLBACKS[method], as_chain=method == "ldp")
    if not order.is_complete:
        raise ConfigError(
            "graph: node and leaf elimination leave operators with three neighbours and more, "
            "expected a chain; use the method 'elimination' or 'auto'"
        )
    repeats = math.prod(sizes[hub] for hub in order.hubs) if method == "repeated" else 1
    if repeats * order.work > WORK_MOST:
        raise ConfigError(
            f"graph: method {method!r} would look at {repeats * order.work:.1e} combinations of "
            f"configurations, expected at most {WORK_MOST:.0e}; use the method 'heuristic', or "
            "give fewer configurations"
        )
    return method, order


def _frozen(graph: OperatorGraph, hubs: Sequence[int], method: Method) -> list[dict[str, int]]:
    """The configurations to freeze the hubs in, one run for each."""
    names = [list(graph.nodes)[hub] for hub in hubs]
    if method == "repeated":
        sizes = [range(len(graph.nodes[name].memory)) for name in names]
        return [dict(zip(names, choice, strict=True)) for choice in combinations(*sizes)]
    # Led by time alone the frontier would end far from the least memory, and the other way round.
    guided = [_guided(graph, names, lead) for lead in ("time", "memory")]
    return guided[:1] if guided[0] == guided[1] else guided


def _guided(
    graph: OperatorGraph, names: Sequence[str], lead: Literal["time", "memory"]
) -> dict[str, int]:
    """For each hub the configuration that is best with neighbours which suit it best."""
    nodes = {name: _leading(node, lead) for name, node in graph.nodes.items()}
    frozen: dict[str, int] = {}
    for name in names:
        total = nodes[name].copy()
        beside: dict[str, Floats] = {}
        for edge in graph.edges:
            if name in {edge.source, edge.target}:
                costs = _leading(edge, lead)
                other, pairs = (
                    (edge.target, costs) if name == edge.source else (edge.source, costs.T)
                )
                beside[other] = beside.get(other, nodes[other]) + pairs
        for other, pairs in beside.items():
            total += pairs[:, frozen[other]] if other in frozen else pairs.min(axis=1)
        frozen[name] = int(np.argmin(total))
    return frozen


def _leading(part: Node | Edge, lead: Literal["time", "memory"]) -> Floats:
    costs: Floats = getattr(part, lead)
    return np.where(np.isfinite(part.memory) & np.isfinite(part.time), costs, np.inf)


def _run(
    graph: OperatorGraph, order: Order, frozen: Mapping[str, int], epsilon: float
) -> tuple[Frontier, Trace]:
    """The frontier with these operators frozen."""
    tables = _tables(graph, frozen)
    width = 0
    if epsilon:
        # The least time, and how many thinnings may add to it, tell how coarse each one may be.
        timed = Elimination((scope, _without_memory(table)) for scope, table in tables)
        least = timed.run(order.steps).time
        width = int(epsilon * least[0] / timed.num_thinnings) if len(least) else 0
    elimination = Elimination(tables, width)
    table = elimination.run(order.steps)
    memory, time = np.multiply(graph.quanta, np.stack([table.memory, table.time], axis=1)).T
    places = np.arange(len(memory))
    return Frontier(memory, time, (places,), elimination.was_thinned), table.trace


def _tables(graph: OperatorGraph, frozen: Mapping[str, int]) -> list[tuple[Scope, Table]]:
    """The costs in whole quanta, where frozen operators have one configuration."""
    number = {name: index for index, name in enumerate(graph.nodes)}
    left = {
        name: slice(frozen[name], frozen[name] + 1) if name in frozen else slice(None)
        for name in graph.nodes
    }
    tables: list[tuple[Scope, Table]] = [
        ((number[name],), graph.table(node, name)[left[name]]) for name, node in graph.nodes.items()
    ]
    for edge in graph.edges:
        ends = number[edge.source], number[edge.target]
        table = graph.table(edge)[left[edge.source], left[edge.target]]
        scope = min(ends), max(ends)
        tables.append((scope, table.spread(ends, scope)))
    return tables


def _without_memory(table: Table) -> Table:
    return replace(table, memory=np.zeros_like(table.memory))
