"""Which configurations of an operator can no strategy worth having contain?

A configuration goes when another one of the operator needs no more memory and no more time whatever
the neighbours choose: the worst difference over each neighbour's configurations counts. Swapping it
for the other makes no strategy worse, so the frontier stays as it is, while tracking costs the cube
of what is left. This is the criterion of Goldstein, Efficient rotamer elimination applied to
protein side-chains and related spin glasses, Biophysical Journal 66 (1994), for two costs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.planner.tracking import Edge, Node, OperatorGraph

__all__ = ["Indices", "restricted", "worthwhile"]

type Indices = NDArray[np.intp]


@dataclass(slots=True)
class _Operator:
    node: Node
    kept: Indices
    edges: list[tuple[NDArray[np.float64], str]] = field(default_factory=list)
    """(memory, time) of shape [2, K, K_neighbour], and the neighbour."""


def worthwhile(graph: OperatorGraph) -> dict[str, Indices]:
    """Configurations of every operator that some strategy of the frontier may need, ascending.

    Of equal configurations the first one stays.
    """
    operators = {
        name: _Operator(node, np.arange(len(node.memory))) for name, node in graph.nodes.items()
    }
    for edge in graph.edges:
        costs = np.stack([edge.memory, edge.time])
        operators[edge.source].edges.append((costs, edge.target))
        operators[edge.target].edges.append((costs.transpose(0, 2, 1), edge.source))
    # What is left of an operator's neighbours decides about it again when they lose some.
    waiting = dict.fromkeys(operators)
    while waiting:
        name = next(iter(waiting))
        del waiting[name]
        operator = operators[name]
        kept = _undominated(operator, operators)
        if len(kept) < len(operator.kept):
            operator.kept = kept
            waiting |= dict.fromkeys(neighbour for _, neighbour in operator.edges)
    return {name: operator.kept for name, operator in operators.items()}


def _undominated(operator: _Operator, operators: Mapping[str, _Operator]) -> Indices:
    kept = operator.kept
    own = np.stack([operator.node.memory, operator.node.time])[:, kept]
    # [cost, other, configuration]: how much worse the other one is at worst.
    worse = own[:, :, None] - own[:, None, :]
    for costs, neighbour in operator.edges:
        pairs = costs[:, kept][:, :, operators[neighbour].kept]
        worse = worse + (pairs[:, :, None, :] - pairs[:, None, :, :]).max(axis=3)
    replaces = (worse <= 0).all(axis=0)
    np.fill_diagonal(replaces, val=False)
    stays = np.ones(len(kept), dtype=np.bool_)
    # From the last one, so that of two equal ones the first stays.
    for place in reversed(range(len(kept))):
        if (replaces[:, place] & stays).any():
            stays[place] = False
    return kept[stays]


def restricted(graph: OperatorGraph, kept: Mapping[str, Indices]) -> OperatorGraph:
    """The graph with these configurations only, in this order."""
    nodes = {
        name: Node(memory=node.memory[kept[name]], time=node.time[kept[name]])
        for name, node in graph.nodes.items()
    }
    edges = []
    for edge in graph.edges:
        pairs = np.ix_(kept[edge.source], kept[edge.target])
        edges.append(
            Edge(edge.source, edge.target, memory=edge.memory[pairs], time=edge.time[pairs])
        )
    return OperatorGraph(nodes, edges)
