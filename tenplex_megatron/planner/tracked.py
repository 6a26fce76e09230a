"""What does a search over cuts remember of those it found, and which stages does it give them?"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.planner.columns import Integers

__all__ = ["Tracked", "filled"]

type Floats = NDArray[np.float64]
type Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Tracked:
    """Cuts and what they recompute, one entry each."""

    layout: Integers
    recomputed: Integers
    """Layers that every stage recomputes fully, all of it if it has fewer."""
    largest: Integers
    """Layers of the largest stage."""
    first: Integers
    last: Integers
    step_s: Floats
    memory_bytes: Floats

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All of them."""
        names = [field.name for field in fields(cls)]
        return cls(
            **{name: np.concatenate([getattr(one, name) for one in parts]) for name in names}
        )

    def at(self, places: Integers | Flags) -> Self:
        """Some of them."""
        names = [field.name for field in fields(self)]
        return type(self)(**{name: getattr(self, name)[places] for name in names})

    def in_need_of(self, memory_bytes: Floats) -> Self:
        """The same, of which more is known."""
        return replace(self, memory_bytes=np.maximum(self.memory_bytes, memory_bytes))

    @property
    def is_largest_between(self) -> Flags:
        """Whether neither the first nor the last stage is the largest."""
        return (self.first < self.largest) & (self.last < self.largest)


def filled(room: list[int], layers: int, forced: int) -> list[int]:
    """As equal stages as their room allows; with `forced`, the last one holds so many.

    >>> filled([1, 2, 4], 6, 0), filled([1, 2, 4], 6, 4)
    ([1, 2, 3], [1, 1, 4])
    """
    if not room:
        return []
    if forced:
        return [*filled(room[:-1], layers - forced, 0), forced]
    level = next(n for n in range(layers + 1) if sum(min(n, one) for one in room) >= layers)
    stages = [min(level, one) for one in room]
    # Early stages, which keep more in flight, are the first to give up what is too much.
    for stage in [i for i, size in enumerate(stages) if size == level][: sum(stages) - layers]:
        stages[stage] -= 1
    return stages
