"""Which random streams does a rank carry, as bytes, and how are they derived when none fits?

A stream belongs to a place: the ranks along every axis and the sizes of the axes.  DeepSpeed seeds
nothing itself, so what ranks have in common is the script's choice: equal seeds make equal
streams.  When the layout changes no stored stream fits, and every new one comes from the seed the
script gave it and the step.
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
    export_tracked_streams,
    import_process_streams,
    import_tracked_streams,
)

__all__ = ["export_streams", "import_streams", "reseed"]


def export_streams() -> dict[str, torch.Tensor]:
    """Every stream of this process as 1-D uint8."""
    return {
        **export_process_streams(),
        "device": get_accelerator().get_rng_state().clone(),
        **export_tracked_streams(get_cuda_rng_tracker()),
    }


def import_streams(stored: Mapping[str, torch.Tensor]) -> None:
    """Set every stream of this process from `export_streams`."""
    import_process_streams(stored)
    get_accelerator().set_rng_state(stored["device"])
    import_tracked_streams(get_cuda_rng_tracker(), stored)


def reseed(step: int) -> None:
    """Fresh streams from the seeds this process was given and the step."""
    accelerator, tracker = get_accelerator(), get_cuda_rng_tracker()
    for name in tracker.get_states():
        with tracker.fork(name):
            accelerator.manual_seed(derived_seed(accelerator.initial_seed(), step))
    derived = derived_seed(torch.initial_seed(), step)
    random.seed(derived)
    np.random.seed(derived)
    torch.manual_seed(derived)
    accelerator.manual_seed_all(derived)
