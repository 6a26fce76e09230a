"""What does the optimizer under a DeepSpeed engine keep, and how is it read and set?

Its state of the size of a parameter becomes part of `OwnedParameter`s; steps, values of parameter
groups and loss scales are plain values.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaleConfig

from tenplex_megatron.adapters.deepspeed.fragments import Group, Masters
from tenplex_megatron.adapters.groups import (
    MOMENTS,
    TORCH_OPTIMIZERS,
    Kept,
    common_numbers,
    group_values,
    set_value,
)
from tenplex_megatron.adapters.parts import OwnedParameter
from tenplex_megatron.errors import LayoutError, UnsupportedLayoutError

__all__ = ["load_optimizer_progress", "optimizer_progress", "owned_parameters", "prepare_state"]

type Keys = Mapping[int, str]
"""The key of every parameter, by its identity."""

_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What DeepSpeed's loss scalers count; the rest of them is configuration."""
_KEPT = {DeepSpeedCPUAdam: Kept(MOMENTS), FusedAdam: Kept(MOMENTS), **TORCH_OPTIMIZERS}


def _kept_by(base: torch.optim.Optimizer) -> Kept:
    if type(base) not in _KEPT:
        known = ", ".join(kind.__name__ for kind in TORCH_OPTIMIZERS)
        raise UnsupportedLayoutError(
            f"optimizer {type(base).__name__}: its state is not described; expected one of torch's "
            f"that update every element by itself ({known}), or DeepSpeed's CPU or fused Adam; "
            "save and load a checkpoint instead"
        )
    return _KEPT[type(base)]


def prepare_state(masters: Masters) -> None:
    """Give every master the state it would get in its first step, which stays as it would be.

    Optimizers create their state lazily; the memory must exist before it can be imported into.

    Raises:
        UnsupportedLayoutError: an optimizer whose state is not known before its first step.
    """
    kept = _kept_by(masters.base)
    for group in masters.groups():
        for master in group.masters:
            if not master.is_contiguous():
                raise UnsupportedLayoutError(
                    f"a weight of shape {tuple(master.shape)} has strides {master.stride()}; "
                    "expected contiguous weights: call .contiguous() on them before "
                    "deepspeed.initialize"
                )
            state = masters.base.state[master]
            fresh = _fresh_state(kept, masters.base, group, master)
            if state and "started" in fresh:
                fresh["started"].fill_(1.0)
            for name, value in fresh.items():
                state.setdefault(name, value)
    kept.follow_first_step(masters.base)


def _fresh_state(kept: Kept, base: Any, group: Group, master: torch.Tensor) -> dict[str, Any]:
    fresh = kept.fresh_state(base, group.values, master)
    if type(base) is DeepSpeedCPUAdam and base.fp32_optimizer_states:
        fresh = {name: one.float() for name, one in fresh.items()}
    if type(base) in (DeepSpeedCPUAdam, FusedAdam):
        fresh["step"] = 0
    return fresh


def owned_parameters(masters: Masters) -> Iterator[OwnedParameter]:
    """What this rank's optimizer owns; views of its memory."""
    kept = _kept_by(masters.base)
    names = {
        id(master): kept.names(group.values)[0]
        for group in masters.groups()
        for master in group.masters
    }
    for fragment in masters.fragments():
        master, size = fragment.master, fragment.stop - fragment.start
        state = masters.base.state[master]
        states = {
            name: whole.detach().view(-1).narrow(0, fragment.offset, size)
            for name, whole in {
                "master": master,
                **{name: state[name] for name in names[id(master)]},
            }.items()
        }
        yield OwnedParameter(fragment.parameter, fragment.start, fragment.stop, states)


def optimizer_progress(masters: Masters, keys: Keys) -> dict[str, Any]:
    """Values of the parameter groups, numbers of their parameters' state, and the loss scale.

    Groups are told apart by the parameters in them: a pipeline stage numbers only its own.
    """
    return {
        "groups": [
            {
                "parameters": [keys[id(parameter)] for parameter in group.parameters],
                "values": _values(group),
                "numbers": _numbers(masters.base, group),
            }
            for group in masters.groups()
        ],
        "scale": _scale(masters.scaler),
    }


def _values(group: Group) -> dict[str, Any]:
    """Names and what has no plain form are structure, not state."""
    return {
        key: value
        for key, value in group_values(group.values).items()
        if key != "step" and not isinstance(value, str)
    }


def _numbers(base: torch.optim.Optimizer, group: Group) -> dict[str, float]:
    """What the optimizer counts for every parameter of a group alike."""
    states = [base.state[master] for master in group.masters]
    if type(base) is FusedAdam:
        # It counts in the last parameter of every group, and takes that for all.
        return {"step": max(float(state["step"]) for state in states)}
    return common_numbers(states, _kept_by(base).names(group.values)[1])


def _scale(scaler: object) -> dict[str, Any] | None:
    dynamic = isinstance(scaler, DynamicLossScaler) or (
        isinstance(scaler, LossScaleConfig) and scaler.dynamic_loss_scale
    )
    if not dynamic:
        return None
    return {name: vars(scaler)[name] for name in _SCALE if name in vars(scaler)}


def load_optimizer_progress(
    masters: Masters, keys: Keys, progress: Sequence[Mapping[str, Any]]
) -> None:
    """Set group values, steps and the loss scale.

    Args:
        masters: of this rank.
        keys: of its parameters.
        progress: `optimizer_progress` of every rank of the snapshot.

    Raises:
        LayoutError: ranks of the snapshot disagree, a group mixes what was apart, or the optimizer
            is another one.
    """
    stored = _groups_by_key(progress)
    for group in masters.groups():
        _load_group(
            masters.base, group, [stored.get(keys[id(parameter)]) for parameter in group.parameters]
        )
    scale = _agreed("loss scale", [entry["scale"] for entry in progress])
    if scale is not None and _scale(masters.scaler) is not None:
        vars(masters.scaler).update(
            {name: value for name, value in scale.items() if name in vars(masters.scaler)}
        )


def _groups_by_key(progress: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Values and numbers of the group of every parameter."""
    found: dict[str, dict[str, Any]] = {}
    for entry in progress:
        for group in entry["groups"]:
            mine = {"values": group["values"], "numbers": group["numbers"]}
            for key in group["parameters"]:
                if found.setdefault(key, mine) != mine:
                    raise LayoutError(
                        f"{key}: its parameter group has {found[key]} on one rank and {mine} on "
                        "another"
                    )
    return found


def _load_group(
    base: torch.optim.Optimizer, group: Group, stored: Sequence[dict[str, Any] | None]
) -> None:
    if not stored:
        return
    first = stored[0]
    if first is None or any(other != first for other in stored):
        raise LayoutError(
            f"a parameter group of {len(stored)} parameters was not one group in the snapshot "
            f"({first} and others); keep the optimizer's parameter groups as they were"
        )
    for key, value in first["values"].items():
        if key in group.values:
            set_value(group.values, key, value)
    missing = sorted(set(_kept_by(base).names(group.values)[1]) - first["numbers"].keys())
    if missing:
        raise LayoutError(
            f"{type(base).__name__} needs {missing} of every parameter, the snapshot holds "
            f"{sorted(first['numbers'])}; keep the optimizer as it was"
        )
    for master in group.masters:
        state = base.state[master]
        for key, value in first["numbers"].items():
            if isinstance(state.get(key), int):
                state[key] = int(value)
            elif key in state:
                set_value(state, key, value)


def _agreed(what: str, stored: Sequence[Any]) -> Any:
    """The one value of all ranks that have one."""
    known = [value for value in stored if value is not None]
    if any(value != known[0] for value in known):
        raise LayoutError(f"{what}: ranks of the snapshot disagree: {known}")
    return known[0] if known else None
