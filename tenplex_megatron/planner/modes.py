"""Given a frontier for every number of devices, which point is the one to take?

The three search modes of TensorOpt (arXiv 2004.10856): mini-time and mini-parallelism decide under
a memory limit, profiling lays time against memory before a person or a scheduler who decides.
Memory is in bytes per device, time in seconds per step.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.frontier import Frontier

__all__ = ["FrontierSource", "Profiled", "Selected", "mini_parallelism", "mini_time", "profiling"]

type FrontierSource = Mapping[int, Frontier] | Callable[[int], Frontier]
"""The frontier for a number of devices; a function is called once for each number looked at."""


@dataclass(frozen=True, slots=True)
class Selected:
    """One point of a frontier."""

    devices: int
    index: int
    """Its place in the frontier for that many devices, which leads to the strategy."""
    memory: float
    time: float


@dataclass(frozen=True, slots=True, eq=False)
class Profiled:
    """What one number of devices can do."""

    devices: int
    frontier: Frontier
    selected: Selected | None
    """The fastest point within the memory limit, None where none is."""
    speedup: float | None
    """Its speed relative to the fewest devices that have one."""

    @property
    def least_memory(self) -> float | None:
        """Bytes the most frugal strategy needs, None where there is no strategy."""
        return float(self.frontier.memory[0]) if len(self.frontier) else None


def mini_time(frontiers: FrontierSource, *, devices: int, memory_limit: float) -> Selected:
    """The fastest point within `memory_limit` bytes on this many devices.

    >>> mini_time({8: Frontier.of([20, 40], [3.0, 2.0])}, devices=8, memory_limit=30)
    Selected(devices=8, index=0, memory=20.0, time=3.0)

    Raises:
        ConfigError: nothing fits; the message says how much is missing.
    """
    frontier = _frontier(frontiers, devices)
    selected = _select(devices, frontier, memory_limit)
    if selected is None:
        raise ConfigError(_nothing_fits({devices: frontier}, memory_limit))
    return selected


def mini_parallelism(
    frontiers: FrontierSource, *, devices: Iterable[int], memory_limit: float
) -> Selected:
    """The fastest point within `memory_limit` bytes on the fewest of these devices that have one.

    More devices are not looked at once one number has been found.

    Raises:
        ConfigError: nothing fits any number; the message says where the least is missing.
    """
    seen = {}
    for number in sorted(set(devices)):
        seen[number] = _frontier(frontiers, number)
        selected = _select(number, seen[number], memory_limit)
        if selected is not None:
            return selected
    raise ConfigError(_nothing_fits(seen, memory_limit))


def profiling(
    frontiers: FrontierSource, *, devices: Iterable[int], memory_limit: float = float("inf")
) -> tuple[Profiled, ...]:
    """What each number of devices can do, the fewest first; those where nothing fits included."""
    rows: list[Profiled] = []
    slowest: float | None = None
    for number in sorted(set(devices)):
        frontier = _frontier(frontiers, number)
        selected = _select(number, frontier, memory_limit)
        speedup = None
        if selected is not None:
            slowest = selected.time if slowest is None else slowest
            speedup = slowest / selected.time if selected.time else float("inf")
        rows.append(Profiled(number, frontier, selected, speedup))
    return tuple(rows)


def _frontier(frontiers: FrontierSource, devices: int) -> Frontier:
    if not isinstance(frontiers, Mapping):
        return frontiers(devices)
    if devices not in frontiers:
        known = ", ".join(map(str, sorted(frontiers)))
        raise ConfigError(f"there is no frontier for {devices} devices, only for: {known}")
    return frontiers[devices]


def _select(devices: int, frontier: Frontier, memory_limit: float) -> Selected | None:
    index = frontier.fastest_within(memory_limit)
    if index is None:
        return None
    return Selected(devices, index, float(frontier.memory[index]), float(frontier.time[index]))


def _nothing_fits(frontiers: Mapping[int, Frontier], memory_limit: float) -> str:
    if not frontiers:
        return "no number of devices is given to choose from"
    numbers = ", ".join(map(str, frontiers))
    least = {devices: one.memory[0] for devices, one in frontiers.items() if len(one)}
    if not least:
        return f"there is no strategy at all for {numbers} devices"
    devices, memory = min(least.items(), key=lambda item: (item[1], item[0]))
    return (
        f"no strategy for {numbers} devices fits {memory_limit / 1e9:.2f} GB per device: the most "
        f"frugal one, on {devices} devices, needs {memory / 1e9:.2f} GB, "
        f"{(memory - memory_limit) / 1e9:.2f} GB more"
    )
