"""How does a graph become one frontier?

Every operator has a table with a frontier for each of its configurations, every edge one with a
frontier for each combination of the configurations at its ends. A step of an order
(`order.plan_order`) takes an operator away and leaves tables that say the same of the others.
"""

import functools
from collections.abc import Iterable

import numpy as np

from tenplex_megatron.planner.order import Step
from tenplex_megatron.planner.table import Table, join

__all__ = ["Elimination", "Scope"]

type Scope = tuple[int, ...]
"""The operators whose configurations are the axes of a table, in ascending order."""

NOTHING = Table.of(np.zeros((), np.int64), np.zeros((), np.int64), np.ones((), np.bool_))


class Elimination:
    """The tables of a graph as it shrinks; operators are numbered as in the order.

    With a `width` above 0 every frontier of a step is thinned to one point for each `width` of
    time. These errors add up in a point of the result, `num_thinnings` of them at most.
    """

    def __init__(self, tables: Iterable[tuple[Scope, Table]], width: int = 0) -> None:
        self.width = width
        self.num_thinnings = 0
        self.was_thinned = False
        self._total = NOTHING
        self._near: dict[int, dict[Scope, Table]] = {}
        for scope, table in tables:
            self._add(scope, table)

    def run(self, steps: Iterable[Step]) -> Table:
        """Take one step for every operator; the frontier over all strategies."""
        for step in steps:
            if step.rule == "lone":
                self._take_lone(step.operator)
            else:
                self._take(step.operator)
        assert not any(self._near.values())
        return self._total

    def _take_lone(self, operator: int) -> None:
        """One configuration: every table loses the axis, and none grows."""
        for scope, table in self._removed(operator).items():
            axis = scope.index(operator)
            self._add(scope[:axis] + scope[axis + 1 :], table[(slice(None),) * axis + (0,)])

    def _take(self, operator: int) -> None:
        """Sum all tables with the operator and unite the frontiers of its configurations.

        For two neighbours: E[a,c] = union over b of N[b] x E[a,b] x E[b,c].
        """
        removed = self._removed(operator)
        others = sorted(set().union(*removed) - {operator})
        axes = (operator, *others)
        tables = sorted(
            (table.spread(scope, axes) for scope, table in removed.items()),
            key=lambda table: table.size.size,
        )
        most = functools.reduce(join, tables[:-1]) if len(tables) > 1 else NOTHING
        self._add(tuple(others), self._settled(join(most, tables[-1], unites=True)))

    def _removed(self, operator: int) -> dict[Scope, Table]:
        removed = self._near.pop(operator)
        for scope in removed:
            for other in scope:
                if other != operator:
                    del self._near[other][scope]
        return removed

    def _add(self, scope: Scope, table: Table) -> None:
        """A table of the same operators becomes one with it: edge elimination, for two."""
        if not scope:
            self._total = self._settled(join(self._total, table))
            return
        near = [self._near.setdefault(operator, {}) for operator in scope]
        if scope in near[0]:
            table = self._settled(join(near[0][scope], table))
        for tables in near:
            tables[scope] = table

    def _settled(self, table: Table) -> Table:
        self.num_thinnings += 1
        thinned = table.thinned(self.width) if self.width else table
        self.was_thinned |= thinned is not table
        return thinned
