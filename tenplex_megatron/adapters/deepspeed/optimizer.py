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
from tenplex_megatron.adapters.groups import common_step, group_values, set_value
from tenplex_megatron.adapters.parts import OwnedParameter, states_of
from tenplex_megatron.errors import LayoutError, UnsupportedLayoutError

__all__ = ["load_optimizer_progress", "optimizer_progress", "owned_parameters", "prepare_state"]

type Keys = Mapping[int, str]
"""The key of every parameter, by its identity."""

_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What DeepSpeed's loss scalers count; the rest of them is configuration."""


def prepare_state(masters: Masters) -> None:
    """Give every master the state it would get in its first step, all zero.

    Optimizers create their state lazily; the memory must exist before it can be imported into.

    Raises:
        UnsupportedLayoutError: an optimizer whose state is not known before its first step.
    """
    for group in masters.groups():
        for master in group.masters:
            if not master.is_contiguous():
                raise UnsupportedLayoutError(
                    f"a weight of shape {tuple(master.shape)} has strides {master.stride()}; "
                    "expected contiguous weights: call .contiguous() on them before "
                    "deepspeed.initialize"
                )
            state = masters.base.state[master]
            for name, value in _fresh_state(masters.base, group, master).items():
                state.setdefault(name, value)


def _fresh_state(base: Any, group: Group, master: torch.Tensor) -> dict[str, torch.Tensor | int]:
    values = group.values
    moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
    if type(base) in (DeepSpeedCPUAdam, FusedAdam):
        if type(base) is DeepSpeedCPUAdam and base.fp32_optimizer_states:
            moments = {name: moment.float() for name, moment in moments.items()}
        return {"step": 0, **moments}
    if type(base) in (torch.optim.Adam, torch.optim.AdamW):
        if values["amsgrad"]:
            moments["max_exp_avg_sq"] = torch.zeros_like(master)
        on_device = values["capturable"] or values["fused"]
        step = torch.zeros((), device=master.device if on_device else None)
        return {"step": step, **moments}
    if type(base) is torch.optim.SGD:
        if values["momentum"] and values["dampening"]:
            raise UnsupportedLayoutError(
                "SGD with dampening: its first step is unlike later ones; set dampening to 0, or "
                "save and load a checkpoint instead"
            )
        # The momentum starts as the first gradient: as zero plus that gradient.
        return {"momentum_buffer": torch.zeros_like(master)} if values["momentum"] else {}
    raise UnsupportedLayoutError(
        f"optimizer {type(base).__name__}: its state is not known before its first step; expected "
        "torch's Adam, AdamW or SGD, or DeepSpeed's CPU or fused Adam; save and load a checkpoint "
        "instead"
    )


def owned_parameters(masters: Masters) -> Iterator[OwnedParameter]:
    """What this rank's optimizer owns; views of its memory."""
    for fragment in masters.fragments():
        states = {
            name: flat.narrow(0, fragment.offset, fragment.stop - fragment.start)
            for name, flat in states_of(
                fragment.master, masters.base.state[fragment.master]
            ).items()
        }
        yield OwnedParameter(fragment.parameter, fragment.start, fragment.stop, states)


def optimizer_progress(masters: Masters, keys: Keys) -> dict[str, Any]:
    """Values of the parameter groups, the optimizer's step, and the loss scale.

    Groups are told apart by the parameters in them: a pipeline stage numbers only its own.
    """
    return {
        "groups": [
            {
                "parameters": [keys[id(parameter)] for parameter in group.parameters],
                "values": _values(group),
            }
            for group in masters.groups()
        ],
        "step": _step(masters.base),
        "scale": _scale(masters.scaler),
    }


def _values(group: Group) -> dict[str, Any]:
    """Names and what has no plain form are structure, not state."""
    return {
        key: value
        for key, value in group_values(group.values).items()
        if key != "step" and not isinstance(value, str)
    }


def _step(base: torch.optim.Optimizer) -> float | None:
    if type(base) is FusedAdam:
        # It counts in the last parameter of every group, and takes that for all.
        return max((float(state["step"]) for state in base.state.values()), default=None)
    return common_step(base)


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
        LayoutError: ranks of the snapshot disagree, or a group mixes what was apart.
    """
    values = _values_by_key(progress)
    for group in masters.groups():
        _load_group(group, [values.get(keys[id(parameter)]) for parameter in group.parameters])
    step = _agreed("step of the optimizer", [entry["step"] for entry in progress])
    if step is not None:
        _set_step(masters, step)
    scale = _agreed("loss scale", [entry["scale"] for entry in progress])
    if scale is not None and _scale(masters.scaler) is not None:
        vars(masters.scaler).update(
            {name: value for name, value in scale.items() if name in vars(masters.scaler)}
        )


def _values_by_key(progress: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for entry in progress:
        for group in entry["groups"]:
            for key in group["parameters"]:
                if found.setdefault(key, group["values"]) != group["values"]:
                    raise LayoutError(
                        f"{key}: its parameter group has the values {found[key]} on one rank and "
                        f"{group['values']} on another"
                    )
    return found


def _load_group(group: Group, stored: Sequence[dict[str, Any] | None]) -> None:
    if not stored:
        return
    first = stored[0]
    if first is None or any(other != first for other in stored):
        raise LayoutError(
            f"a parameter group of {len(stored)} parameters was not one group in the snapshot "
            f"(values {first} and others); keep the optimizer's parameter groups as they were"
        )
    for key, value in first.items():
        if key in group.values:
            set_value(group.values, key, value)


def _set_step(masters: Masters, step: float) -> None:
    for state in masters.base.state.values():
        if isinstance(state.get("step"), int):
            state["step"] = int(step)
        elif "step" in state:
            set_value(state, "step", step)


def _agreed(what: str, stored: Sequence[Any]) -> Any:
    """The one value of all ranks that have one."""
    known = [value for value in stored if value is not None]
    if any(value != known[0] for value in known):
        raise LayoutError(f"{what}: ranks of the snapshot disagree: {known}")
    return known[0] if known else None
