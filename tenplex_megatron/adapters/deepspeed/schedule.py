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
    """The state of a schedule, with numbers for its one-element tensors; None without one."""
    if scheduler is None:
        return None
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in scheduler.state_dict().items()
    }


def load_schedule(scheduler: Any, stored: Sequence[Mapping[str, Any] | None]) -> None:
    """Go on with the schedule of the snapshot's ranks.

    Raises:
        LayoutError: they contradict each other.
    """
    known = [state for state in stored if state is not None]
    if scheduler is None or not known:
        return
    mine = scheduler.state_dict()
    merged = {}
    for key, value in known[0].items():
        agreed = all(other.get(key) == value for other in known)
        if isinstance(value, list) and not (agreed and len(value) == len(mine.get(key, value))):
            merged[key] = mine[key]
        elif agreed:
            merged[key] = value
        else:
            raise LayoutError(
                f"learning-rate schedule: ranks of the snapshot disagree on {key}: "
                f"{[other.get(key) for other in known]}"
            )
    scheduler.load_state_dict(merged)
