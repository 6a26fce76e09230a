"""Random operator graphs, and the frontier of all their strategies found the plain way."""

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.planner.operator_graph import Edge, Node, OperatorGraph

__all__ = ["Draw", "brute_force", "every_total"]

type Costs = NDArray[np.float64]


class Draw:
    """Random graphs that differ in everything a rule of elimination looks at."""

    def __init__(self, seed: int, *, highest: int = 30, impossible: float = 0.0) -> None:
        """Costs are whole numbers below `highest`, a share `impossible` of them infinite."""
        self.generator = np.random.default_rng(seed)
        self.highest = highest
        self.impossible = impossible

    def costs(self, *shape: int) -> Costs:
        """Costs of any shape."""
        costs = self.generator.integers(0, self.highest, shape).astype(float)
        costs[self.generator.random(shape) < self.impossible] = math.inf
        return costs

    def node(self, size: int) -> Node:
        """An operator with so many configurations."""
        return Node(self.costs(size), self.costs(size))

    def graph(self, sizes: list[int], pairs: list[tuple[int, int]]) -> OperatorGraph:
        """Operators of these sizes, joined by these edges."""
        names = [f"op{number}" for number in range(len(sizes))]
        nodes = {name: self.node(size) for name, size in zip(names, sizes, strict=True)}
        edges = [
            Edge(
                names[source],
                names[target],
                self.costs(sizes[source], sizes[target]),
                self.costs(sizes[source], sizes[target]),
            )
            for source, target in pairs
        ]
        return OperatorGraph(nodes, edges)

    def any_graph(self, *, most_operators: int = 7) -> OperatorGraph:
        """2 to 7 operators of 1 to 4 configurations; parallel edges, several components."""
        count = int(self.generator.integers(2, most_operators + 1))
        sizes = self.generator.integers(1, 5, count).tolist()
        density = self.generator.choice([0.2, 0.5, 1.0])
        pairs = [
            pair
            for pair in itertools.permutations(range(count), 2)
            if self.generator.random() < density * (1.0 if pair[0] < pair[1] else 0.1)
        ]
        pairs += [pair for pair in pairs if self.generator.random() < 0.2]
        return self.graph(sizes, pairs)

    def chain(self, *sizes: int) -> OperatorGraph:
        """Operators in a row."""
        return self.graph(list(sizes), list(itertools.pairwise(range(len(sizes)))))

    def reducible(self) -> OperatorGraph:
        """A chain with residual connections and leaves, as models have them."""
        count = int(self.generator.integers(2, 6))
        pairs = list(itertools.pairwise(range(count)))
        skips = [start for start in range(0, count - 2, 2) if self.generator.random() < 0.6]
        pairs += [(start, start + 2) for start in skips]
        pairs += [(int(self.generator.integers(0, count)), leaf) for leaf in (count, count + 1)]
        return self.graph(self.generator.integers(1, 5, count + 2).tolist(), pairs)


def every_total(graph: OperatorGraph) -> tuple[Costs, Costs]:
    """Memory and time of every strategy, with one axis for each operator."""
    axis = {name: number for number, name in enumerate(graph.nodes)}
    memory = time = np.zeros([len(node.memory) for node in graph.nodes.values()])
    parts: list[tuple[tuple[str, ...], Node | Edge]] = [
        ((name,), node) for name, node in graph.nodes.items()
    ]
    parts += [((edge.source, edge.target), edge) for edge in graph.edges]
    for names, part in parts:
        swap = len(names) == 2 and axis[names[0]] > axis[names[1]]
        shape = [memory.shape[number] if name in names else 1 for name, number in axis.items()]
        memory = memory + (part.memory.T if swap else part.memory).reshape(shape)
        time = time + (part.time.T if swap else part.time).reshape(shape)
    return memory, time


def brute_force(graph: OperatorGraph) -> tuple[list[float], list[float]]:
    """Memory and time of the frontier of all strategies."""
    memory, time = (total.ravel() for total in every_total(graph))
    order = np.lexsort((time, memory))
    memory, time = memory[order], time[order]
    best = np.minimum.accumulate(np.concatenate([[np.inf], time]))[:-1]
    kept = (time < best) & np.isfinite(memory)
    return memory[kept].tolist(), time[kept].tolist()
