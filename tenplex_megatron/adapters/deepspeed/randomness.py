"""Which random streams does a rank carry, as bytes, and how are they derived when none fits?

A stream belongs to a place: the ranks along every axis and the sizes of the axes.  DeepSpeed seeds
nothing itself, so what ranks have in common is the script's choice: equal seeds make equal
streams.  When the layout changes no stored stream fits, and new ones come from the seed of every
rank and the step.
"""

import random
from collections.abc import Mapping

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

from tenplex_megatron.adapters.streams import (
    derived_seed,
    export_process_streams,
    import_process_streams,
)

__all__ = ["export_streams", "import_streams", "reseed"]

_TRACKED = "tracker."


def export_streams() -> dict[str, torch.Tensor]:
    """Every stream of this process as 1-D uint8."""
    tracked = get_cuda_rng_tracker().get_states()
    return {
        **export_process_streams(),
        "device": get_accelerator().get_rng_state().clone(),
        **{f"{_TRACKED}{name}": state.clone().cpu() for name, state in tracked.items()},
    }


def import_streams(stored: Mapping[str, torch.Tensor]) -> None:
    """Set every stream of this process from `export_streams`."""
    import_process_streams(stored)
    get_accelerator().set_rng_state(stored["device"])
    get_cuda_rng_tracker().set_states(
        {
            name.removeprefix(_TRACKED): state
            for name, state in stored.items()
            if name.startswith(_TRACKED)
        }
    )


def reseed(step: int) -> None:
    """Fresh streams from the seed this process was given and the step."""
    derived = derived_seed(torch.initial_seed(), step)
    random.seed(derived)
    np.random.seed(derived)
    torch.manual_seed(derived)
    get_accelerator().manual_seed_all(derived)
