"""Which layout should N devices run, and why that one?

Enumerates what the policy allows, drops what breaks a rule of the framework, and orders the rest by
a plain rule: more devices first, then the smaller pipeline bubble, then the smaller tensor-parallel
size. Pure: the same arguments give the same decision on every node.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from tenplex_megatron.core.mesh import ParallelLayout, parse_fields
from tenplex_megatron.errors import ConfigError, LayoutError

__all__ = ["Decision", "LayoutPattern", "ModelLimits", "allowed_layouts", "choose"]


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What of a model and its batch restricts the layouts that can train it."""

    num_layers: int
    num_heads: int
    num_query_groups: int
    global_batch_size: int
    micro_batch_size: int


@dataclass(frozen=True, slots=True)
class Decision:
    """One layout, why it was taken, and why the others were not."""

    layout: ParallelLayout
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()


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


def choose(
    num_devices: int,
    limits: ModelLimits,
    layouts: Sequence[str] | None,
    current: ParallelLayout | None = None,
) -> Decision:
    """The layout for at most `num_devices` devices.

    `layouts` are the patterns of the policy, None for every legal one. Between layouts of equal
    merit the axes of `current` are kept.

    Raises:
        ConfigError: nothing fits; the message says what would.
    """
    patterns = _patterns(layouts, limits, num_devices)
    found: list[ParallelLayout] = []
    rejected: list[tuple[str, str]] = []
    for pattern in patterns:
        layout, why = _fit(pattern, num_devices, limits)
        if layout is not None:
            found.append(layout)
        else:
            rejected.append((pattern.text, why))
    if not found:
        raise ConfigError(_nothing_fits(num_devices, limits, layouts, rejected))
    ranked = sorted(found, key=lambda layout: _merit(layout, limits, current))
    best = ranked[0]
    rejected.extend((str(other), _slower(best, other, limits)) for other in ranked[1:])
    return Decision(best, _reason(best, num_devices, limits), tuple(rejected))


def allowed_layouts(
    limits: ModelLimits, layouts: Sequence[str] | None, max_devices: int
) -> tuple[ParallelLayout, ...]:
    """One layout for every way of splitting the model that the policy allows.

    What has to be the same in all of them, such as a padded size, can be derived from these.
    """
    found = [
        next(_smallest(pattern, limits), None)
        for pattern in _patterns(layouts, limits, max_devices)
    ]
    return tuple(layout for layout in found if layout is not None)


def _patterns(
    layouts: Sequence[str] | None, limits: ModelLimits, num_devices: int
) -> list[LayoutPattern]:
    if layouts is not None:
        return [LayoutPattern.parse(text) for text in layouts]
    sizes = range(1, num_devices + 1)
    # TP above the number of query groups gathers keys and values in every step: never chosen alone.
    return [
        LayoutPattern(f"TP{tp},PP{pp}", tp=tp, pp=pp)
        for tp in sizes
        if limits.num_heads % tp == 0 and limits.num_query_groups % tp == 0
        for pp in sizes
        if limits.num_layers % pp == 0 and tp * pp <= num_devices
    ]


def _fit(
    pattern: LayoutPattern, num_devices: int, limits: ModelLimits
) -> tuple[ParallelLayout | None, str]:
    """The largest legal layout of the pattern, or None and the reason."""
    pinned, one = pattern.data_parallel, pattern.replica_size
    if pinned is not None and pinned * one != num_devices:
        return None, f"is pinned to {pinned * one} devices"
    if one > num_devices:
        return None, f"needs {one} devices"
    sizes = [pinned] if pinned is not None else range(num_devices // one, 0, -1)
    first = ""
    for size in sizes:
        try:
            layout = pattern.sized(size)
        except LayoutError as error:
            first = first or str(error)
            continue
        broken = next(_broken_rules(layout, limits), None)
        if broken is None:
            return layout, ""
        first = first or broken
    return None, first


def _broken_rules(layout: ParallelLayout, limits: ModelLimits) -> Iterator[str]:
    if limits.num_heads % layout.tp:
        yield f"{limits.num_heads} attention heads do not divide by TP{layout.tp}"
    if limits.num_query_groups % layout.tp and layout.tp % limits.num_query_groups:
        yield (
            f"{limits.num_query_groups} query groups are neither a multiple nor a divisor of "
            f"TP{layout.tp}"
        )
    if layout.vpp > 1 and layout.pp == 1:
        yield f"VPP{layout.vpp} needs more than one pipeline stage"
    stages = layout.pp * layout.vpp
    if layout.stage_layers is None and limits.num_layers % stages:
        yield f"{limits.num_layers} layers do not divide into {stages} pipeline parts"
    if layout.stage_layers is not None and sum(layout.stage_layers) != limits.num_layers:
        yield f"stages of {layout.stage_layers} layers do not make {limits.num_layers} layers"
    yield from _broken_batch_rules(layout, limits)


def _broken_batch_rules(layout: ParallelLayout, limits: ModelLimits) -> Iterator[str]:
    micro = layout.micro_batch_size or limits.micro_batch_size
    per_step = micro * layout.dp
    if limits.global_batch_size % per_step:
        yield (
            f"global batch {limits.global_batch_size} does not divide by micro batch "
            f"{micro} x DP{layout.dp}"
        )
    elif layout.vpp > 1 and _micro_batches(layout, limits) % layout.pp:
        yield (
            f"{_micro_batches(layout, limits)} micro batches do not divide by PP{layout.pp}, "
            f"as VPP{layout.vpp} needs"
        )


def _micro_batches(layout: ParallelLayout, limits: ModelLimits) -> int:
    micro = layout.micro_batch_size or limits.micro_batch_size
    return limits.global_batch_size // (micro * layout.dp)


def _bubble(layout: ParallelLayout, limits: ModelLimits) -> float:
    """Idle time of a pipeline stage, as a fraction of its busy time."""
    return (layout.pp - 1) / (_micro_batches(layout, limits) * layout.vpp)


def _merit(
    layout: ParallelLayout, limits: ModelLimits, current: ParallelLayout | None
) -> tuple[int, float, int, bool, str]:
    keeps = current is not None and (layout.tp, layout.pp, layout.vpp) == (
        current.tp,
        current.pp,
        current.vpp,
    )
    return (-layout.world_size, _bubble(layout, limits), layout.tp, not keeps, str(layout))


def _reason(layout: ParallelLayout, num_devices: int, limits: ModelLimits) -> str:
    return (
        f"{layout} uses {layout.world_size} of {num_devices} devices, "
        f"pipeline bubble {_bubble(layout, limits):.1%}"
    )


def _slower(best: ParallelLayout, other: ParallelLayout, limits: ModelLimits) -> str:
    if other.world_size < best.world_size:
        return f"uses {other.world_size} devices instead of {best.world_size}"
    ours, theirs = _bubble(best, limits), _bubble(other, limits)
    if theirs > ours:
        return f"pipeline bubble {theirs:.1%} instead of {ours:.1%}"
    if other.tp > best.tp:
        return f"splits tensors over {other.tp} devices instead of {best.tp}"
    return f"equal to {best}"


def _nothing_fits(
    num_devices: int,
    limits: ModelLimits,
    layouts: Sequence[str] | None,
    rejected: Sequence[tuple[str, str]],
) -> str:
    reasons = "; ".join(f"{layout}: {why}" for layout, why in rejected) or "no layout is allowed"
    fits = [
        layout
        for pattern in _patterns(layouts, limits, limits.num_heads * limits.num_layers)
        for layout in _smallest(pattern, limits)
    ]
    problem = f"no allowed layout fits {num_devices} devices ({reasons})"
    if not fits:
        return f"{problem}; none would fit any other number"
    fit = min(fits, key=lambda layout: _merit_of_size(layout, limits))
    return f"{problem}; {fit} would fit {fit.world_size}"


def _smallest(pattern: LayoutPattern, limits: ModelLimits) -> Iterator[ParallelLayout]:
    """The smallest legal layout of the pattern, if any."""
    pinned = pattern.data_parallel
    for size in [pinned] if pinned is not None else range(1, limits.global_batch_size + 1):
        layout, _ = _fit(replace(pattern, data_parallel=size), pattern.replica_size * size, limits)
        if layout is not None:
            yield layout
            return


def _merit_of_size(layout: ParallelLayout, limits: ModelLimits) -> tuple[int, float, int, str]:
    return (layout.world_size, _bubble(layout, limits), layout.tp, str(layout))
