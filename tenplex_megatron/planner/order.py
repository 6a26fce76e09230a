"""In which order do the operators of a graph disappear, until none is left?

Only the shape of the graph and the number of configurations decide. The rules are those of Frontier
Tracking (TensorOpt, arXiv 2004.10856), on edges without a direction, since a cost has none:

- lone: an operator with one configuration adds its edges to what is at their other ends;
- leaf: an operator with one neighbour becomes part of the neighbour's own cost;
- node: an operator with two neighbours becomes an edge between these;
- branch: an operator with more neighbours becomes one edge between all of them. This is what
  folding some of them into pairs and then eliminating a node comes to, but no other edge grows;
- last: an operator without neighbours is decided.

Parallel edges merge whenever they come up, which is edge elimination. Freezing the configuration of
a hub, which is heuristic elimination, makes it a lone operator.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Fallback", "Order", "Step", "plan_order"]

type Rule = Literal["lone", "leaf", "node", "branch", "last"]
type Fallback = Literal["branch", "freeze", "stop"]
"""What to do where every operator has three neighbours or more."""


@dataclass(frozen=True, slots=True)
class Step:
    """One rule applied to one operator; operators are numbered as the graph lists them."""

    rule: Rule
    operator: int


@dataclass(frozen=True, slots=True)
class Order:
    """One step for every operator."""

    steps: tuple[Step, ...]
    work: int
    """Combinations of configurations that the steps look at."""
    hubs: tuple[int, ...] = ()
    """Operators that must be left with one configuration before the first step."""
    is_complete: bool = True
    """False where no rule was left for some operators."""


def plan_order(
    sizes: Sequence[int],
    edges: Iterable[tuple[int, int]],
    *,
    fallback: Fallback = "branch",
    as_chain: bool = False,
) -> Order:
    """The cheapest step first, until no operator is left; ties go to the one listed first.

    With `as_chain`, chains are walked from one end to the other once nothing else is left.

    >>> [step.rule for step in plan_order([2, 2, 2], [(0, 1), (1, 2)]).steps]
    ['leaf', 'leaf', 'last']
    """
    shape = _Shape(sizes, edges)
    while (operator := shape.cheapest()) is not None:
        if as_chain and (chains := shape.chains()):
            for passed in chains:
                shape.eliminate(passed)
        elif shape.rule(operator) != "branch" or fallback == "branch":
            shape.eliminate(operator)
        elif fallback == "freeze":
            shape.freeze()
        else:
            return shape.order(is_complete=False)
    return shape.order(is_complete=True)


class _Shape:
    """The graph as it shrinks: who is near whom, with how many configurations."""

    def __init__(self, sizes: Sequence[int], edges: Iterable[tuple[int, int]]) -> None:
        self.sizes = list(sizes)
        self.near: dict[int, set[int]] = {operator: set() for operator in range(len(sizes))}
        for source, target in edges:
            self.near[source].add(target)
            self.near[target].add(source)
        self.steps: list[Step] = []
        self.hubs: list[int] = []
        self.work = 0
        # A branch waits until no other rule applies. Entries that are out of date are skipped.
        self.queue: list[tuple[bool, int, int]] = []
        self.refresh(self.near)

    def order(self, *, is_complete: bool) -> Order:
        return Order(tuple(self.steps), self.work, tuple(self.hubs), is_complete)

    def rule(self, operator: int) -> Rule:
        count = len(self.near[operator])
        if count and self.sizes[operator] == 1:
            return "lone"
        by_count: tuple[Rule, ...] = ("last", "leaf", "node")
        return by_count[count] if count < len(by_count) else "branch"

    def cost(self, operator: int) -> int:
        """Combinations of configurations that a step on this operator looks at."""
        sizes = [self.sizes[other] for other in self.near[operator]]
        if self.sizes[operator] == 1:
            return sum(sizes)
        return self.sizes[operator] * math.prod(sizes)

    def entry(self, operator: int) -> tuple[bool, int, int]:
        return self.rule(operator) == "branch", self.cost(operator), operator

    def cheapest(self) -> int | None:
        while self.queue:
            operator = self.queue[0][-1]
            if operator in self.near and self.queue[0] == self.entry(operator):
                return operator
            heapq.heappop(self.queue)
        return None

    def eliminate(self, operator: int) -> None:
        rule = self.rule(operator)
        self.steps.append(Step(rule, operator))
        self.work += self.cost(operator)
        near = self.near.pop(operator)
        for other in near:
            self.near[other].discard(operator)
            if rule != "lone":
                self.near[other] |= near - {other}
        self.refresh(near)

    def freeze(self) -> None:
        """Take every configuration but one from the operator with the most neighbours."""
        hub = max(self.near, key=lambda operator: (len(self.near[operator]), -operator))
        self.hubs.append(hub)
        self.sizes[hub] = 1
        self.refresh(self.near[hub] | {hub})

    def refresh(self, operators: Iterable[int]) -> None:
        for operator in operators:
            heapq.heappush(self.queue, self.entry(operator))

    def chains(self) -> list[int]:
        """All operators, chain after chain; none unless nothing but chains is left."""
        if any(len(near) > 2 for near in self.near.values()):
            return []
        walked: dict[int, None] = {}
        for operator, near in self.near.items():
            ahead = operator if len(near) < 2 and operator not in walked else None
            while ahead is not None:
                walked[ahead] = None
                ahead = next((other for other in self.near[ahead] if other not in walked), None)
        # Operators on a circle are never reached.
        return list(walked) if len(walked) == len(self.near) else []
