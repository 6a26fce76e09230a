"""Which layouts may a job run on so many devices, and why not the others?

A policy names patterns whose data-parallel size is open, or leaves the choice to the planner.
What Megatron would refuse (`rules`) is left out with its reason. Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from tenplex_megatron.core.mesh import ParallelLayout, parse_fields
from tenplex_megatron.errors import ConfigError, LayoutError
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.rules import batch_rules, broken_rules, holds, tensor_rules
from tenplex_megatron.planner.space import Scope, strategies
from tenplex_megatron.planner.strategy import Strategy

__all__ = [
    "Job",
    "LayoutPattern",
    "allowed_layouts",
    "allowed_strategies",
    "check_layout",
    "legal_worlds",
    "smallest_world",
]


_DATA_PARALLEL = ("TP1",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained, and what of it may change."""

    model: ModelProfile | None
    """None where nothing is known of it: then only the batch restricts its layouts."""
    base: Strategy
    """What the user's own flags say; all but the layout stays as it is there."""
    layouts: tuple[str, ...] | None = None
    """Patterns such as TP2,PP2; None for every layout Megatron runs, or for data parallelism alone
    where the model is not known. Frameworks with other rules always have patterns."""

    def strategy(self, layout: ParallelLayout) -> Strategy:
        """The strategy that trains `layout`; without a micro-batch size it has the user's."""
        micro = layout.micro_batch_size or self.base.micro_batch_size
        # Megatron itself switches sequence parallelism off for one tensor-parallel rank.
        return replace(
            self.base,
            layout=replace(layout, micro_batch_size=micro),
            zero_stage=self.base.zero_stage if layout.zero_stage is None else layout.zero_stage,
            sequence_parallel=self.base.sequence_parallel and layout.tp > 1,
        )

    def broken_rules(self, strategy: Strategy) -> list[str]:
        """Why a strategy does not run, as far as that is known."""
        if self.model is not None:
            return broken_rules(self.model, strategy)
        layout, batch = strategy.layout, strategy.global_batch_size
        micro = strategy.micro_batch_size
        return list(batch_rules(batch, micro, layout.dp, layout.pp, layout.vpp))

    def layout(self, strategy: Strategy) -> ParallelLayout:
        """The layout as it is shown: a micro-batch size only where it is not the user's."""
        if strategy.micro_batch_size != self.base.micro_batch_size:
            return strategy.layout
        return replace(strategy.layout, micro_batch_size=None)


@dataclass(frozen=True, slots=True)
class LayoutPattern:
    """A layout of the policy whose data-parallel size may be open.

    >>> LayoutPattern.parse("TP2,PP2").sized(3).world_size
    12
    """

    text: str
    tp: int = 1
    pp: int = 1
    cp: int = 1
    data_parallel: int | None = None
    others: tuple[tuple[str, object], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """The pattern `text` means; "DP3" in it pins the data-parallel size."""
        values = dict(parse_fields(text))
        sizes = {axis: _size(values.pop(axis, 1)) for axis in ("tp", "pp", "cp")}
        pinned = values.pop("dp", None)
        return cls(
            text,
            **sizes,
            data_parallel=None if pinned is None else _size(pinned),
            others=tuple(sorted(values.items())),
        )

    @property
    def replica_size(self) -> int:
        """Devices that hold one replica of the model."""
        return self.tp * self.pp * self.cp

    def sized(self, data_parallel: int) -> ParallelLayout:
        """The layout with this data-parallel size.

        Raises:
            LayoutError: when the axes contradict each other.
        """
        axes = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "dp": data_parallel}
        return ParallelLayout.from_json({**axes, **dict(self.others)})


def _size(value: object) -> int:
    assert isinstance(value, int)
    return value


def allowed_strategies(
    job: Job, devices: Mapping[str, tuple[int, ...]]
) -> tuple[list[Strategy], list[tuple[str, str]]]:
    """What may run on at most these devices of every node, and what may not and why.

    A pattern has the largest data-parallel size that is legal and keeps tensor-parallel groups
    inside nodes; one with a pinned size is meant for exactly so many devices, and taken for more
    only where nothing else is left.
    """
    sizes = [len(numbers) for numbers in devices.values()]
    if job.layouts is None and job.model is not None:
        return _every_strategy(job, job.model, sizes), []
    patterns = [LayoutPattern.parse(text) for text in job.layouts or _DATA_PARALLEL]
    tried = [(pattern.text, *_fit(job, pattern, sizes)) for pattern in patterns]
    if not any(strategy for _, strategy, _ in tried):
        tried = [(pattern.text, *_fit(job, pattern, sizes, may_rest=True)) for pattern in patterns]
    found = [strategy for _, strategy, _ in tried if strategy is not None]
    rejected = [(text, why) for text, strategy, why in tried if strategy is None]
    return list(dict.fromkeys(found)), rejected


def allowed_layouts(job: Job, max_devices: int | None = None) -> tuple[ParallelLayout, ...]:
    """One layout for every way of splitting tensors that the policy allows.

    What has to be the same in all of them, such as a padded size, can be derived from these.
    Without `max_devices` there may be any number of them.
    """
    if job.layouts is None and job.model is not None:
        sizes = range(1, min(max_devices or job.model.num_heads, job.model.num_heads) + 1)
        return tuple(ParallelLayout(tp=tp) for tp in sizes if holds(tensor_rules(job.model, tp)))
    smallest = (_smallest(job, LayoutPattern.parse(text)) for text in job.layouts or _DATA_PARALLEL)
    return tuple(job.layout(strategy) for strategy in smallest if strategy is not None)


def check_layout(job: Job, layout: ParallelLayout) -> None:
    """Refuse a layout that the framework would refuse.

    Raises:
        ConfigError: it breaks a rule.
    """
    broken = job.broken_rules(job.strategy(layout))
    if broken:
        raise ConfigError(f"layout {layout}: {'; '.join(broken)}")


def smallest_world(job: Job) -> ParallelLayout | None:
    """The allowed layout that needs the fewest devices; None when no number of them helps."""
    smallest = (_smallest(job, LayoutPattern.parse(text)) for text in job.layouts or _DATA_PARALLEL)
    found = [strategy for strategy in smallest if strategy is not None]
    if not found:
        return None
    return job.layout(min(found, key=lambda strategy: strategy.layout.world_size))


def legal_worlds(job: Job, most: int) -> list[int]:
    """Every number of devices up to `most` that a layout of the policy's patterns fills."""
    found: set[int] = set()
    for text in job.layouts or _DATA_PARALLEL:
        pattern = LayoutPattern.parse(text)
        count = most // pattern.replica_size
        pinned = pattern.data_parallel
        sizes = range(1, count + 1) if pinned is None else [pinned] if pinned <= count else []
        legal = (strategy for strategy, _ in _tried(job, pattern, sizes) if strategy is not None)
        found |= {strategy.layout.world_size for strategy in legal}
    return sorted(found)


def _every_strategy(job: Job, model: ModelProfile, sizes: Sequence[int]) -> list[Strategy]:
    """Other micro-batches, schedules of recomputation or optimizers stay the user's choice.

    So does context parallelism, which not every implementation of attention has.
    """
    base = job.base
    scope = Scope(
        zero_stages=(0,),
        recompute=("none",),
        min_sequence_per_rank=model.seq_length,
        precision=base.precision,
        is_flash=base.is_flash,
    )
    found = strategies(
        model,
        devices=sum(sizes),
        devices_per_node=sizes,
        global_batch_size=base.global_batch_size,
        micro_batch_sizes=(base.micro_batch_size,),
        scope=scope,
    )
    # A stage without layers has nothing to hold its part of the state.
    layouts = dict.fromkeys(
        strategy.layout for strategy in found if min(strategy.layout.stage_layers or (1,)) > 0
    )
    return [one for one in map(job.strategy, layouts) if not job.broken_rules(one)]


def _fit(
    job: Job, pattern: LayoutPattern, nodes: Sequence[int], *, may_rest: bool = False
) -> tuple[Strategy | None, str]:
    """The largest legal strategy of the pattern on nodes of these sizes, or None and the reason."""
    pinned, one, total = pattern.data_parallel, pattern.replica_size, sum(nodes)
    if pinned is not None and pinned * one != total and not (may_rest and pinned * one < total):
        return None, f"is pinned to {pinned * one} devices"
    if one > total:
        return None, f"needs {one} devices"
    groups = sum(size // pattern.tp for size in nodes) * pattern.tp
    # A replica that no groups inside nodes can make reaches over nodes.
    most = (groups if groups >= one else total) // one
    sizes = [pinned] if pinned is not None else range(most, 0, -1)
    first = ""
    for strategy, why in _tried(job, pattern, sizes):
        if strategy is not None:
            return strategy, ""
        first = first or why
    return None, first


def _smallest(job: Job, pattern: LayoutPattern) -> Strategy | None:
    """The smallest legal strategy of the pattern, if any."""
    pinned = pattern.data_parallel
    sizes = [pinned] if pinned is not None else range(1, job.base.global_batch_size + 1)
    tried = _tried(job, pattern, sizes)
    return next((strategy for strategy, _ in tried if strategy is not None), None)


def _tried(
    job: Job, pattern: LayoutPattern, sizes: Sequence[int]
) -> Iterator[tuple[Strategy | None, str]]:
    """The strategy of every data-parallel size, or None and the rule that it breaks."""
    for size in sizes:
        try:
            strategy = job.strategy(pattern.sized(size))
        except LayoutError as error:
            yield None, str(error)
            continue
        broken = job.broken_rules(strategy)
        yield (None, broken[0]) if broken else (strategy, "")
