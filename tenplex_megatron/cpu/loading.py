"""Where do data loaders draw their randomness when the host's generator stands in for CUDA's?

On a GPU a loader draws from the host's generator and leaves CUDA's alone.  Loaders exist only on
some ranks of a tensor-parallel group, so drawing from the one generator here would give replicated
layers another dropout mask on each rank: every loader gets a generator of its own.
"""

import functools
from typing import Any

import torch
from torch.utils.data import DataLoader

from tenplex_megatron.cpu.patching import Patches

__all__ = ["patch_loading"]


def patch_loading(patches: Patches) -> None:
    """Give every `DataLoader` that is made without a generator one of its own."""
    original = DataLoader.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("generator") is None:
            kwargs["generator"] = torch.Generator().manual_seed(torch.initial_seed())
        original(self, *args, **kwargs)

    patches.set(DataLoader, "__init__", init)
