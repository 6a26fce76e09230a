"""What would a job get on other devices, what does going there cost, and when has it paid off?

Pure.  The decision is that of `choose`; here it is laid beside what the job did before, and beside
the least that could be done instead.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError, LayoutError
from tenplex_megatron.planner.choose import Choice, Option, Outlook, decide, placement_of
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.moves import Moves, Placement, Source, StateSizes, Wait
from tenplex_megatron.planner.placement import place_ranks
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.rules import broken_rules
from tenplex_megatron.planner.search import Evaluated, evaluate
from tenplex_megatron.planner.strategy import Strategy

__all__ = ["Answer", "Situation", "Way", "answer", "batch_note", "pays_off_after", "running"]

type Devices = Mapping[str, tuple[int, ...]]
_MOST_OPTIONS = 256
"""More than `decide` looks at."""

type Baseline = Literal["stay", "fewer replicas", "runner-up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A job, where it runs, and the devices that it will have."""

    model: ModelProfile
    cluster: ClusterProfile
    running: Evaluated
    """The one strategy that it trains with."""
    before: Devices
    """The devices of its ranks, node by node in the order of the ranks."""
    left: Devices
    """The devices it will have, without nodes that have none."""

    @property
    def strategy(self) -> Strategy:
        """What it trains with."""
        return self.running.strategies[0]

    @property
    def is_running(self) -> bool:
        """Whether it keeps all its devices, so that it could stay as it is."""
        return all(set(used) <= set(self.left.get(node, ())) for node, used in self.before.items())

    @property
    def current(self) -> Placement:
        """Where its state is: in the memory of the nodes that are left."""
        ranks = enumerate(place_ranks(self.strategy.layout, self.before))
        return placement_of(self.strategy, {rank: n for rank, (n, _) in ranks if n in self.left})


@dataclass(frozen=True, slots=True)
class Way:
    """One thing the job could do."""

    option: Option
    moves: Moves | None
    """None where it goes on as it is."""
    slowest: Wait | None
    pause_s: float
    """Seconds without training: the restart, and the slowest link."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What it would do, and why nothing else."""

    best: Way
    reason: str
    runners_up: tuple[tuple[Way, str], ...]
    baseline: Way | None
    """What the best is measured against; None where there is nothing else."""
    baseline_kind: Baseline


def running(
    model: ModelProfile, cluster: ClusterProfile, candidates: Sequence[Strategy]
) -> Evaluated:
    """The fastest of the candidates that Megatron accepts and that fits, else the smallest.

    Raises:
        ConfigError: Megatron accepts none of them.
    """
    broken = [broken_rules(model, strategy) for strategy in candidates]
    legal = [one for one, rules in zip(candidates, broken, strict=True) if not rules]
    if not legal:
        index = min(range(len(broken)), key=lambda number: len(broken[number]))
        raise ConfigError(
            f"--from {_shown(candidates[index].layout)}: Megatron refuses it: "
            f"{'; '.join(broken[index])}{_other_batches(candidates[index])}"
        )
    found = evaluate(model, cluster, legal)
    fitting = found.fastest(cluster.memory_bytes) or [int(found.memory_bytes.argmin())]
    return _some(found, fitting[:1])


def answer(situation: Situation, found: Evaluated, outlook: Outlook) -> Answer:
    """What the job would do with the strategies of `found` to choose from.

    Raises:
        ConfigError: none of them fits into the devices' memory.
    """
    source = Source(StateSizes.of(situation.model), situation.model.num_layers, situation.current)
    if situation.is_running:
        found = _with_running(found, situation)
    chosen = _decide(situation, found, outlook)
    best = _way(situation, source, chosen.best, outlook)
    others = tuple((_way(situation, source, one, outlook), why) for one, why in chosen.runners_up)
    least = situation.running if situation.is_running else _fewer_replicas(situation)
    kind: Baseline = "stay" if situation.is_running else "fewer replicas"
    baseline = None
    if least is not None and least.strategies[0] != chosen.best.strategy:
        baseline = _way(situation, source, _decide(situation, least, outlook).best, outlook)
    elif others:
        kind, baseline = "runner-up", others[0][0]
    return Answer(best, chosen.reason, others, baseline, kind)


def pays_off_after(best: Way, other: Way) -> int | None:
    """Steps after which `best` has done as many as `other` would have; None for never.

    Both train on the same global batches, so that steps can be compared.
    """
    later = best.pause_s - other.pause_s
    gain = other.option.step_s - best.option.step_s
    if later <= 0:
        return 0
    return math.ceil(later / gain) if gain > 0 else None


def batch_note(situation: Situation) -> str | None:
    """Which global batch would let the same cut use more replicas, where one would."""
    strategy, layout = situation.strategy, situation.strategy.layout
    most = _most_replicas(layout, situation.left)
    now = _fewer_replicas(situation, must_fit=False)
    if most == 0 or (now is not None and now.strategies[0].layout.dp >= most):
        return None
    wanted = replace(strategy, layout=replace(layout, dp=most))
    size = wanted.layout.world_size
    return f"{_shown(wanted.layout)} would use {size} devices{_other_batches(wanted)}"


def _decide(situation: Situation, found: Evaluated, outlook: Outlook) -> Choice:
    return decide(
        situation.model,
        situation.cluster,
        found,
        situation.left,
        current=situation.current,
        running=situation.strategy if situation.is_running else None,
        outlook=outlook,
    )


def _way(situation: Situation, source: Source, option: Option, outlook: Outlook) -> Way:
    if situation.is_running and option.strategy == situation.strategy:
        return Way(option, None, None, 0.0)
    nodes = {rank: node for rank, (node, _) in enumerate(option.ranks)}
    moves = source.moves(placement_of(option.strategy, nodes))
    slowest = moves.slowest(situation.cluster)
    return Way(option, moves, slowest, outlook.restart_s + slowest.seconds)


def _fewer_replicas(situation: Situation, *, must_fit: bool = True) -> Evaluated | None:
    """The same but for the replicas: as many as the devices and the batch allow."""
    strategy, layout = situation.strategy, situation.strategy.layout
    for dp in range(_most_replicas(layout, situation.left), 0, -1):
        try:
            other = replace(strategy, layout=replace(layout, dp=dp))
        except LayoutError:
            continue  # the experts' axis does not divide so few ranks
        if not broken_rules(situation.model, other):
            found = evaluate(situation.model, situation.cluster, [other])
            fits = bool(found.fastest(situation.cluster.memory_bytes))
            return found if fits or not must_fit else None
    return None


def _most_replicas(layout: ParallelLayout, devices: Devices) -> int:
    """Replicas of a layout for which there is room, tensor groups inside nodes where they can."""
    counts = [len(numbers) for numbers in devices.values()]
    groups = sum(count // layout.tp for count in counts) or sum(counts) // layout.tp
    return groups // (layout.cp * layout.pp)


def _other_batches(strategy: Strategy) -> str:
    """The nearest global batches that a strategy could train, where its own is not one."""
    batch, layout = strategy.global_batch_size, strategy.layout
    unit = strategy.micro_batch_size * layout.dp * (layout.pp if layout.vpp > 1 else 1)
    if batch % unit == 0:
        return ""
    below = batch // unit * unit
    nearest = f"{below} or {below + unit}" if below else str(unit)
    return f"; with a global batch of {nearest} instead of {batch} it could run"


def _shown(layout: ParallelLayout) -> str:
    return str(replace(layout, micro_batch_size=None))


def _some(found: Evaluated, indices: Sequence[int]) -> Evaluated:
    chosen = list(indices)
    strategies = tuple(found.strategies[index] for index in chosen)
    return Evaluated(strategies, found.step_s[chosen], found.memory_bytes[chosen])


def _with_running(found: Evaluated, situation: Situation) -> Evaluated:
    """The fastest that fit, and what runs, which a search may have left out."""
    some = _some(found, found.fastest(situation.cluster.memory_bytes)[:_MOST_OPTIONS])
    now = situation.running
    if not len(some) or situation.strategy in some.strategies:
        return found
    return Evaluated(
        (*some.strategies, *now.strategies),
        np.concatenate([some.step_s, now.step_s]),
        np.concatenate([some.memory_bytes, now.memory_bytes]),
    )
