"""Which layout should the devices that are left run, and does going there pay?

A layout is judged by the steps it finishes until the next change: a faster one may lose what it
gains to the move.  Pure: the same arguments give the same decision on every node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.allowed import (
    Job,
    allowed_strategies,
    legal_worlds,
    smallest_world,
)
from tenplex_megatron.planner.batches import richer_batches
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.moves import Placement, Source, StateSizes
from tenplex_megatron.planner.placement import place_ranks
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.search import Evaluated, evaluate
from tenplex_megatron.planner.strategy import Strategy

__all__ = ["Choice", "Option", "Outlook", "choose", "decide", "placement_of"]

_MOST_OPTIONS = 64
"""Only so many of the fastest strategies are weighed with their moves."""
_RUNNERS_UP = 5
_MOST_TIMES = 8
"""Other numbers of devices are named up to so many times those that there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is expected of the time after a decision."""

    next_change_s: float = 3600.0
    """Seconds until the devices change again."""
    restart_s: float = 5.0
    """Seconds a change takes besides moving bytes."""
    least_gain: float = 0.03
    """The part of the steps that another layout must gain before a running one is left."""


@dataclass(frozen=True, slots=True)
class Option:
    """One strategy and what going there costs."""

    strategy: Strategy
    ranks: tuple[tuple[str, int], ...]
    """Node and device of every rank."""
    step_s: float
    memory_bytes: float
    moved_bytes: float
    move_s: float
    """Seconds until training goes on; 0 for the layout that runs."""

    def steps(self, outlook: Outlook) -> float:
        """Steps finished until the next change."""
        return max(outlook.next_change_s - self.move_s, 0.0) / self.step_s


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision, its reason, and the runners-up with theirs."""

    best: Option
    reason: str
    runners_up: tuple[tuple[Option, str], ...]
    illegal: tuple[tuple[str, str], ...] = ()
    """Patterns of the policy that have no layout for these devices, and the rule that says so."""


def choose(
    job: Job,
    cluster: ClusterProfile,
    devices: Mapping[str, tuple[int, ...]],
    *,
    current: Placement | None = None,
    outlook: Outlook | None = None,
    must_run: bool = False,
) -> Choice:
    """The layout of a job for the devices that are left; see `decide`.

    With `must_run` a prediction that nothing fits does not end the job: the smallest is tried.

    Raises:
        ConfigError: no allowed layout is legal for so many devices, or fits into their memory.
    """
    candidates, illegal = allowed_strategies(job, devices)
    if not candidates:
        raise ConfigError(_nothing_legal(job, sum(map(len, devices.values())), illegal))
    found = _by_rule(candidates)
    if job.model is not None:
        found = evaluate(job.model, cluster, candidates)
    if must_run and not found.fastest(cluster.memory_bytes):
        cluster = replace(cluster, memory_bytes=float(found.memory_bytes.min()))
    chosen = decide(job.model, cluster, found, devices, current=current, outlook=outlook)
    return replace(chosen, illegal=tuple(illegal))


def decide(
    model: ModelProfile | None,
    cluster: ClusterProfile,
    found: Evaluated,
    devices: Mapping[str, tuple[int, ...]],
    *,
    current: Placement | None = None,
    running: Strategy | None = None,
    outlook: Outlook | None = None,
) -> Choice:
    """The strategy that finishes most steps until the next change.

    Args:
        model: what is trained; None where `found` is no prediction, and no move is counted.
        cluster: predicts the seconds a move takes.
        found: the strategies to choose from, for at most these devices.
        devices: the usable devices of every node.
        current: where the state is now; None before the first start.
        running: what trains on in `current`, so that keeping it costs nothing; None: nothing does.
        outlook: what is expected.

    Raises:
        ConfigError: nothing fits into the devices' memory.
    """
    outlook = outlook or Outlook()
    fitting = found.fastest(cluster.memory_bytes)
    if not fitting:
        raise ConfigError(_nothing_fits(cluster, found, devices))
    source = None
    if current is not None and model is not None:
        source = Source(StateSizes.of(model), model.num_layers, current)
    weighing = _Weighing(cluster, devices, current, source, running, outlook)
    ranked = weighing.ranked(found, fitting)
    best = ranked[0]
    for option in ranked[1:]:
        stays = current is not None and option.strategy.layout == current.layout
        if stays and best.steps(outlook) < option.steps(outlook) * (1 + outlook.least_gain):
            best = option
            break
    # Cuts of a batch that cost the same are one choice.
    apart = {(one.step_s, one.memory_bytes): one for one in reversed(ranked)}
    apart[best.step_s, best.memory_bytes] = best
    others = tuple(
        (option, _why_not(option, best, outlook))
        for option in ranked
        if option is not best and apart[option.step_s, option.memory_bytes] is option
    )
    reason = _reason(best, devices, outlook)
    if model is None:
        reason = _rule(best, devices)
    return Choice(best, reason, others[:_RUNNERS_UP])


def _by_rule(candidates: Sequence[Strategy]) -> Evaluated:
    """Relative step times of a model of which nothing is known: devices, less the pipeline bubble.

    No memory is known either.
    """
    times = [
        (1 + (one.layout.pp - 1) / (one.num_micro_batches * one.layout.vpp)) / one.layout.world_size
        for one in candidates
    ]
    return Evaluated(tuple(candidates), np.array(times), np.zeros(len(times)))


@dataclass(frozen=True, slots=True)
class _Weighing:
    """What the move to any strategy is counted with; see `decide`."""

    cluster: ClusterProfile
    devices: Mapping[str, tuple[int, ...]]
    current: Placement | None
    source: Source | None
    running: Strategy | None
    outlook: Outlook

    def ranked(self, found: Evaluated, fastest: Sequence[int]) -> list[Option]:
        """Options by the steps they finish, the most first.

        Whatever is slower than the next in `fastest` finishes less than that without any move:
        the rest is left out as soon as it can't win.
        """
        same = [] if self.current is None else found.with_layout(self.current.layout)
        fitting = [
            index for index in same if found.memory_bytes[index] <= self.cluster.memory_bytes
        ]
        kept = sorted(fitting, key=lambda index: found.step_s[index])[:1]
        options: list[Option] = [self._option(found, index) for index in kept]
        for index in fastest[:_MOST_OPTIONS]:
            at_most = self.outlook.next_change_s / found.step_s[index]
            best = max((option.steps(self.outlook) for option in options), default=0.0)
            if len(options) > _RUNNERS_UP and at_most < best:
                break
            if index not in kept:
                options.append(self._option(found, index))
        return sorted(
            options, key=lambda one: (-one.steps(self.outlook), one.step_s, one.moved_bytes)
        )

    def _option(self, found: Evaluated, index: int) -> Option:
        """One strategy with its move."""
        strategy = found.strategies[index]
        ranks = place_ranks(strategy.layout, self.devices)
        moved_bytes, move_s = 0.0, 0.0
        if self.source is not None and strategy != self.running:
            nodes = {rank: node for rank, (node, _) in enumerate(ranks)}
            moves = self.source.moves(placement_of(strategy, nodes))
            moved_bytes = moves.moved_bytes
            move_s = self.outlook.restart_s + moves.slowest(self.cluster).seconds
        step_s, memory = float(found.step_s[index]), float(found.memory_bytes[index])
        return Option(strategy, ranks, step_s, memory, moved_bytes, move_s)


def placement_of(strategy: Strategy, nodes: Mapping[int, str]) -> Placement:
    """Where the state of a strategy lies when its ranks run on these nodes."""
    return Placement(
        strategy.layout,
        nodes,
        is_sharded=strategy.zero_stage > 0,
        is_bucketed=strategy.overlaps_gradients,
    )


def _reason(best: Option, devices: Mapping[str, tuple[int, ...]], outlook: Outlook) -> str:
    total = sum(map(len, devices.values()))
    text = (
        f"predicted {best.step_s:.3g} s per step and {best.memory_bytes / 1e9:.3g} GB per device "
        f"on {best.strategy.layout.world_size} of {total} devices"
    )
    if best.move_s:
        text += (
            f"; {_size(best.moved_bytes)} move between nodes, {best.steps(outlook):.0f} steps in "
            f"the next {outlook.next_change_s:.0f} s"
        )
    return text


def _rule(best: Option, devices: Mapping[str, tuple[int, ...]]) -> str:
    total = sum(map(len, devices.values()))
    return (
        f"uses {best.strategy.layout.world_size} of {total} devices; no profile of the model: more "
        "devices first, then the smaller pipeline bubble"
    )


def _why_not(option: Option, best: Option, outlook: Outlook) -> str:
    ours, theirs = best.steps(outlook), option.steps(outlook)
    if theirs > ours:
        return f"gains only {theirs / ours - 1:.1%} over the layout that runs"
    if option.step_s < best.step_s:
        return f"is faster, but moves {_size(option.moved_bytes)} first"
    return f"{option.step_s / best.step_s - 1:.1%} slower per step"


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3g} MB" if nbytes < 1e9 else f"{nbytes / 1e9:.3g} GB"


def _nothing_legal(job: Job, total: int, illegal: Sequence[tuple[str, str]]) -> str:
    reasons = "; ".join(f"{pattern}: {why}" for pattern, why in illegal)
    problem = f"no allowed layout fits {total} devices ({reasons or 'none is legal'})"
    fit = smallest_world(job)
    if fit is None:
        return f"{problem}; none would fit any other number{_other_batches(job, total)}"
    worlds = legal_worlds(job, _MOST_TIMES * max(total, fit.world_size))
    numbers = f"; numbers that do: {', '.join(map(str, worlds))}" if len(worlds) > 1 else ""
    return f"{problem}{numbers}; {fit} would fit {fit.world_size}"


def _other_batches(job: Job, total: int) -> str:
    """What would run where no number of ranks divides the batch."""
    batch, micro = job.base.global_batch_size, job.base.micro_batch_size
    if batch % micro == 0:
        return ""
    richer = richer_batches(batch, (micro,), range(1, total + 1))
    offers = ", ".join(f"{other} on {count} numbers of ranks" for other, count in richer)
    return offers and f"; batches nearby that run: {offers}"


def _nothing_fits(
    cluster: ClusterProfile, found: Evaluated, devices: Mapping[str, tuple[int, ...]]
) -> str:
    total = sum(map(len, devices.values()))
    if not len(found):
        return f"no layout can train the model on {total} devices; check heads, layers and batch"
    index = int(found.memory_bytes.argmin())
    needed, limit = found.memory_bytes[index] / 1e9, cluster.memory_bytes / 1e9
    return (
        f"none of {len(found)} strategies on {total} devices fits {limit:.3g} GB: the smallest, "
        f"{found.strategies[index].layout}, is predicted to need {needed:.3g} GB and is "
        f"{needed - limit:.3g} GB short; use more devices or recompute more, or correct the limit "
        "(memory_bytes of the cluster's profile, planner.memory_gb of a policy)"
    )
