"""Which strategies of a network are worth having when the memory an operator works in counts too?

Tracking adds costs up, and what an operator needs while it runs is no sum: the largest counts. So
it is limited from outside: at each of a few levels, evenly spaced in ratio, configurations that
work in more are left out, tracking finds the frontier of the rest, and every point gets what it
really needs. The result is the frontier but for working memory within one level.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.frontier import Frontier, union
from tenplex_megatron.planner.tensoropt.dominance import Indices, restricted, worthwhile
from tenplex_megatron.planner.tensoropt.network import PricedNetwork
from tenplex_megatron.planner.timing.candidates import Array
from tenplex_megatron.planner.tracking import Tracked, track

__all__ = ["Found", "search"]


@dataclass(frozen=True, slots=True)
class _Level:
    """Tracking with some configurations only, and the frontier with working memory."""

    kept: Mapping[str, Indices]
    tracked: Tracked
    frontier: Frontier


@dataclass(frozen=True, slots=True)
class Found:
    """The frontier of peak memory and time, and its strategies."""

    frontier: Frontier
    levels: tuple[_Level, ...]

    @property
    def is_exact(self) -> bool:
        """Whether tracking left nothing out at any level."""
        return all(level.tracked.is_exact for level in self.levels)

    def strategy(self, index: int) -> dict[str, int]:
        """The configuration of every operator at a point, as the priced network numbers them."""
        number, place = (int(source[index]) for source in self.frontier.sources)
        level = self.levels[number]
        chosen = level.tracked.strategy(int(level.frontier.sources[0][place]))
        return {name: int(level.kept[name][choice]) for name, choice in chosen.items()}


def search(priced: PricedNetwork, *, num_levels: int = 8, epsilon: float = 0.0) -> Found:
    """The frontier of the network, with `epsilon` for tracking.

    Raises:
        ConfigError: without a level.
    """
    if num_levels < 1:
        raise ConfigError(f"search: expected at least 1 level of working memory, got {num_levels}")
    working = priced.working_bytes.values()
    most = max(float(needs.max()) for needs in working)
    # Below this some operator could not run.
    least = max(float(needs.min()) for needs in working)
    fits = (_fitting(priced, limit) for limit in np.geomspace(most, least, num_levels))
    # Two limits between which no configuration lies are one level.
    different = {tuple(places.tobytes() for places in each.values()): each for each in fits}
    levels = tuple(_level(priced, each, epsilon) for each in different.values())
    return Found(union([level.frontier for level in levels]), levels)


def _fitting(priced: PricedNetwork, limit: float) -> dict[str, Indices]:
    # geomspace rounds its ends.
    return {
        name: np.flatnonzero(needs <= limit * (1 + 1e-9))
        for name, needs in priced.working_bytes.items()
    }


def _level(priced: PricedNetwork, fits: Mapping[str, Indices], epsilon: float) -> _Level:
    graph = restricted(priced.graph, fits)
    useful = worthwhile(graph)
    kept = {name: fits[name][places] for name, places in useful.items()}
    tracked = track(restricted(graph, useful), epsilon=epsilon)
    peak: Array = np.zeros(len(tracked.frontier))
    for name, choices in tracked.strategies().items():
        np.maximum(peak, priced.working_bytes[name][kept[name][choices]], out=peak)
    frontier = Frontier.of(tracked.frontier.memory + peak, tracked.frontier.time)
    return _Level(kept, tracked, frontier)
