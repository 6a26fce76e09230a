"""What does a learning-rate schedule keep, and how does it go on with other parameter groups?

A pipeline stage schedules only the groups it has.  What a schedule holds per group is therefore
taken from the snapshot only where all of its ranks and this rank have the same groups; elsewhere it
stays as the script built it, and the groups bring their learning rates with them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tenplex_megatron.errors import LayoutError

__all__ = ["load_schedule", "schedule_progress"]


def schedule_progress(scheduler: Any) -> dict[str, Any] | None:
    """The state of a schedule, with numbers for its tensors; None without one."""
    return None if scheduler is None else _plain(scheduler.state_dict())


def load_schedule(scheduler: Any, stored: Sequence[Mapping[str, Any] | None]) -> None:
    """Go on with the schedule of the snapshot's ranks.

    Raises:
        LayoutError: they contradict each other.
    """
    known = [state for state in stored if state is not None]
    if scheduler is None or not known:
        return
    optimizer = vars(scheduler).get("optimizer")
    groups = None if optimizer is None else len(optimizer.param_groups)
    scheduler.load_state_dict(_merged("", scheduler.state_dict(), known, groups))


def _merged(name: str, mine: Any, stored: Sequence[Any], groups: int | None) -> Any:
    """What this rank goes on with, of the kind it has; schedules may hold others in lists.

    Args:
        name: of the value in the schedule.
        mine: the value this rank has, with its tensors.
        stored: the plain value of every rank of the snapshot.
        groups: how many parameter groups this rank has, if known.
    """
    first, values = stored[0], [_plain(mine), *stored]
    agrees = all(other == first for other in stored)
    if agrees and values[0] == first:
        return mine
    if agrees and isinstance(mine, torch.Tensor):
        return torch.tensor(first, dtype=mine.dtype, device=mine.device)
    if all(isinstance(value, Mapping) for value in values):
        merged = {}
        for key in first:
            inner = [one.get(key) for one in stored]
            place = f"{name}.{key}" if name else str(key)
            merged[key] = _merged(place, mine.get(key, inner[0]), inner, groups)
        return type(mine)(merged)
    if all(isinstance(value, list) for value in values):
        return _merged_list(name, mine, stored, groups)
    if agrees:
        return first
    raise _disagreement(name, stored)


def _merged_list(
    name: str, mine: list[Any], stored: Sequence[list[Any]], groups: int | None
) -> Any:
    """See `_merged`; a list has one value per parameter group, or per inner schedule."""
    built = _plain(mine)
    agrees = all(other == stored[0] for other in stored)
    is_alike = all(len(other) == len(mine) for other in stored)
    is_of_states = any(isinstance(one, Mapping) for value in (built, *stored) for one in value)
    if is_alike and (agrees or is_of_states):
        return [
            _merged(f"{name}[{number}]", one, [other[number] for other in stored], groups)
            for number, one in enumerate(mine)
        ]
    has_moved = any(one not in built for other in stored for one in other)
    if len(mine) == groups and not (is_of_states and has_moved):
        return mine
    if is_of_states:
        raise LayoutError(
            f"learning-rate schedule: {name}: this rank has {len(mine)} of them, ranks of the "
            f"snapshot {[len(other) for other in stored]}; keep the schedule as it was"
        )
    if agrees:
        return stored[0]
    raise _disagreement(name, stored)


def _disagreement(name: str, stored: Sequence[Any]) -> LayoutError:
    return LayoutError(
        f"learning-rate schedule: ranks of the snapshot disagree on {name}: {list(stored)}"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value
