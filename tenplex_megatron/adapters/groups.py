"""What does an optimizer keep: of each parameter, in its parameter groups, and as its step?"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tenplex_megatron.errors import LayoutError

__all__ = [
    "MOMENTS",
    "TORCH_OPTIMIZERS",
    "Kept",
    "common_numbers",
    "common_step",
    "group_values",
    "merged_groups",
    "plain",
    "set_value",
]


@dataclass(frozen=True, slots=True)
class Kept:
    """What an optimizer keeps of a parameter: names, and the values before the first step.

    `tensors` have the shape of the parameter; `numbers` are the same for all parameters of a group.
    A value that is a name is that of the parameter group: "lr" in the first step, any other when
    the optimizer is made.  `options` are values of the group without which a name is not kept.
    """

    tensors: Mapping[str, float | str]
    numbers: Mapping[str, float | str] = field(default_factory=lambda: {"step": 0.0})
    options: Mapping[str, str] = field(default_factory=dict)

    def names(self, values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """The tensors and the numbers that are kept with the values of a group."""
        tensors, numbers = (
            [name for name in names if name not in self.options or values[self.options[name]]]
            for names in (self.tensors, self.numbers)
        )
        return tensors, numbers

    def fresh_state(
        self, base: torch.optim.Optimizer, values: Mapping[str, Any], parameter: torch.Tensor
    ) -> dict[str, Any]:
        """The state of a parameter before its first step, as torch's optimizers make it."""
        first = {
            name: float((values if value == "lr" else base.defaults)[value])
            if isinstance(value, str)
            else value
            for name, value in {**self.tensors, **self.numbers}.items()
        }
        on_device = type(base) is torch.optim.ASGD or any(
            values.get(option) for option in ("capturable", "fused")
        )
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        device = parameter.device if on_device else "cpu"
        tensors, numbers = self.names(values)
        return {
            **{name: torch.tensor(first[name], dtype=dtype, device=device) for name in numbers},
            **{name: torch.full_like(parameter, first[name]) for name in tensors},
        }

    def follow_first_step(self, base: torch.optim.Optimizer) -> None:
        """Let the first step of a prepared state be that of a state which torch makes."""
        at_lr = [name for name, one in {**self.tensors, **self.numbers}.items() if one == "lr"]
        if at_lr:
            _start_at_learning_rate(base, at_lr)
        if "started" in self.numbers:
            _start_undamped(base)


def _start_at_learning_rate(base: torch.optim.Optimizer, names: Sequence[str]) -> None:
    """Schedules may still change the learning rate before the first step."""

    def before(*_: object) -> None:
        for group, states in _updated(base):
            for state in states:
                for name in names if state["step"] == 0 else ():
                    state[name].fill_(float(group["lr"]))

    base.register_step_pre_hook(before)


def _start_undamped(base: torch.optim.Optimizer) -> None:
    """Torch's SGD damps every gradient but the first."""
    dampings: list[tuple[dict[str, Any], float]] = []

    def before(*_: object) -> None:
        for group, states in _updated(base):
            if any(state.get("started") == 0 for state in states):
                dampings.append((group, group["dampening"]))
                group["dampening"] = 0.0

    def after(*_: object) -> None:
        for group, dampening in dampings:
            group["dampening"] = dampening
        dampings.clear()
        for _group, states in _updated(base):
            for state in states:
                if "started" in state:
                    state["started"].fill_(1.0)

    base.register_step_pre_hook(before)
    base.register_step_post_hook(after)


def _updated(base: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The groups of a step, and the state of every parameter that it updates."""
    for group in base.param_groups:
        yield group, [base.state[one] for one in group["params"] if one.grad is not None]


MOMENTS = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
_ADAM = Kept({**MOMENTS, "max_exp_avg_sq": 0.0}, options={"max_exp_avg_sq": "amsgrad"})
TORCH_OPTIMIZERS: dict[type, Kept] = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.NAdam: Kept(MOMENTS, {"step": 0.0, "mu_product": 1.0}),
    torch.optim.RAdam: Kept(MOMENTS),
    torch.optim.Adamax: Kept({"exp_avg": 0.0, "exp_inf": 0.0}),
    torch.optim.Adadelta: Kept({"square_avg": 0.0, "acc_delta": 0.0}),
    torch.optim.Adagrad: Kept({"sum": "initial_accumulator_value"}),
    torch.optim.RMSprop: Kept(
        {"square_avg": 0.0, "momentum_buffer": 0.0, "grad_avg": 0.0},
        options={"momentum_buffer": "momentum", "grad_avg": "centered"},
    ),
    torch.optim.Rprop: Kept({"prev": 0.0, "step_size": "lr"}),
    torch.optim.ASGD: Kept({"ax": 0.0}, {"step": 0.0, "eta": "lr", "mu": 1.0}),
    # The momentum starts as the first gradient, undamped: as minus zero plus that gradient, which
    # is the gradient even where that is minus zero.
    torch.optim.SGD: Kept(
        {"momentum_buffer": -0.0},
        {"started": 0.0},
        options={"momentum_buffer": "momentum", "started": "dampening"},
    ),
}
"""Those that update every element by itself, so that it does not matter how parameters are cut.

`started` is not torch's: it tells a first gradient, which SGD does not damp, from later ones.
"""


def group_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters, as plain values."""
    return {key: plain(value) for key, value in group.items() if key != "params"}


def common_numbers(states: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[str, float]:
    """What an optimizer counts for each of some parameters, and has to be the same for all.

    Raises:
        LayoutError: they differ.
    """
    found: dict[str, float] = {}
    for state in states:
        for name in names:
            if name in state and found.setdefault(name, float(state[name])) != float(state[name]):
                raise LayoutError(
                    f"the optimizer's {name} differs between parameters of one rank: "
                    f"{sorted({found[name], float(state[name])})}; expected one for all"
                )
    return found


def common_step(optimizer: torch.optim.Optimizer) -> float | None:
    """The step that all parameters of one rank have taken; None where none has a state.

    Raises:
        LayoutError: they differ.
    """
    states = [one for one in optimizer.state.values() if not isinstance(one.get("step"), str)]
    return common_numbers(states, ["step"]).get("step")


def plain(value: object) -> object:
    """A value as JSON holds it; what it can't hold as its text."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else [float(item) for item in value.view(-1)]
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)


def merged_groups(
    all_groups: Iterable[Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, Any]]:
    """One dict per parameter group; a rank with nothing in a group may lack values others have.

    Raises:
        LayoutError: two ranks contradict each other.
    """
    merged: dict[str, dict[str, Any]] = {}
    for groups in all_groups:
        for name, values in groups.items():
            target = merged.setdefault(name, {})
            for key, value in values.items():
                if target.setdefault(key, value) is None:
                    target[key] = value
                elif value is not None and target[key] != value:
                    raise LayoutError(
                        f"parameter group {name}: {key} is {target[key]} on one rank and {value} "
                        "on another"
                    )
    return merged


def set_value(target: dict[str, Any], key: str, value: object) -> None:
    """Set a value of a group or a state, in the form it has there."""
    current = target.get(key)
    if isinstance(current, torch.Tensor):
        current.copy_(torch.as_tensor(value, dtype=current.dtype).view(current.shape))
    elif isinstance(current, tuple) and isinstance(value, list | tuple):
        target[key] = tuple(value)
    elif key != "step" or value is not None:
        target[key] = value
