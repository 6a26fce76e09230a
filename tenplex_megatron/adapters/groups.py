"""What does an optimizer keep besides tensors: values of its parameter groups, and its step?"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tenplex_megatron.errors import LayoutError

__all__ = ["common_step", "group_values", "merged_groups", "plain", "set_value"]


def group_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters, as plain values."""
    return {key: plain(value) for key, value in group.items() if key != "params"}


def common_step(optimizer: torch.optim.Optimizer) -> float | None:
    """The step that all parameters of one rank have taken; None where none has a state.

    Raises:
        LayoutError: they differ.
    """
    steps = {
        float(state["step"])
        for state in optimizer.state.values()
        if "step" in state and not isinstance(state["step"], str)
    }
    if len(steps) > 1:
        raise LayoutError(
            f"optimizer steps differ between parameters of one rank: {sorted(steps)}; "
            "expected one step for all"
        )
    return steps.pop() if steps else None


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
