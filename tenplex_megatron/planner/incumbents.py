"""Which strategies need not be looked at, because one that is known is at least as good?"""

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.planner.frontier import undominated

__all__ = ["Incumbents"]

type Floats = NDArray[np.float64]


class Incumbents:
    """The costs of the best strategies found so far."""

    def __init__(self) -> None:
        self.memory: Floats = np.empty(0)
        self.time: Floats = np.empty(0)

    def add(self, memory: Floats, time: Floats) -> None:
        """These costs are known as well."""
        memory = np.concatenate([self.memory, memory])
        time = np.concatenate([self.time, time])
        kept = undominated(memory, time)
        # By ascending memory and descending time.
        self.memory, self.time = memory[kept], time[kept]

    def holds(self, memory: Floats, time: Floats) -> NDArray[np.bool_]:
        """Which of some costs that are known belong to the best."""
        place = np.searchsorted(self.memory, memory, side="left")
        times = np.concatenate([self.time, [np.nan]])
        same: NDArray[np.bool_] = times[place] == time
        return same

    def beat(self, memory: Floats, time: Floats) -> NDArray[np.bool_]:
        """Whether something needs at most so much memory and time."""
        place = np.searchsorted(self.memory, memory, side="right") - 1
        times = np.concatenate([[np.inf], self.time])
        is_beaten: NDArray[np.bool_] = times[place + 1] <= time
        return is_beaten

    def memory_to_beat(self, time: Floats) -> Floats:
        """The memory below which a strategy must stay that takes so long."""
        place = np.searchsorted(-self.time, -time, side="left")
        memory: Floats = np.concatenate([self.memory, [np.inf]])[place]
        return memory

    def least_time(self, memory: float) -> float:
        """The best time within so much memory; infinite where nothing fits."""
        place = int(np.searchsorted(self.memory, memory, side="right"))
        return float(self.time[place - 1]) if place else float("inf")
