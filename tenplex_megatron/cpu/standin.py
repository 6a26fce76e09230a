"""When does the host stand in for CUDA, and when is that refused?

Installing starts no thread, no process group and no CUDA context, so that a process may install
once and fork its workers afterwards.
"""

import logging
import os
import sys
from typing import Any

import torch

from tenplex_megatron.cpu.loading import patch_loading
from tenplex_megatron.cpu.patching import Patches
from tenplex_megatron.cpu.runtime import patch_runtime
from tenplex_megatron.cpu.tensors import patch_tensors
from tenplex_megatron.errors import ConfigError

__all__ = ["install", "is_installed", "uninstall"]

logger = logging.getLogger(__name__)

_VARIABLE = "TENPLEX_CPU"
_ENVIRONMENT = {
    # Compiled kernels would bypass the replaced functions, and compiling costs more than it saves.
    "TORCHDYNAMO_DISABLE": "1",
    # Megatron asks for it whenever tensor parallelism meets a device older than Blackwell.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
_RANDOM_LOGGER = logging.getLogger("megatron.core.tensor_parallel.random")
_active: list[Patches] = []


def is_installed() -> bool:
    """Whether this process uses the host in place of CUDA."""
    return bool(_active)


def install() -> None:
    """Let the host stand in for CUDA in this process and the ones it forks; idempotent.

    Raises:
        ConfigError: A CUDA device exists and `TENPLEX_CPU=force` is not set.
    """
    if _active:
        return
    _refuse_beside_cuda()
    patches = Patches()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    patch_tensors(patches)
    patch_runtime(patches)
    patch_loading(patches)
    _disable_dynamo(patches)
    _RANDOM_LOGGER.addFilter(_one_generator)
    _active.append(patches)
    if os.environ.get("RANK", "0") == "0":
        logger.warning("CPU STAND-IN FOR CUDA IS ON: everything runs on the host, over gloo")


def uninstall() -> None:
    """Give `torch` its own functions back; objects made meanwhile stay what they are."""
    while _active:
        _active.pop().restore()
        _RANDOM_LOGGER.removeFilter(_one_generator)


def _count_cuda_devices() -> int:
    return torch.cuda.device_count()


def _refuse_beside_cuda() -> None:
    if os.environ.get(_VARIABLE) == "force":
        return
    if count := _count_cuda_devices():
        raise ConfigError(
            f"device cpu: this machine has {count} CUDA device(s), which the CPU stand-in would "
            f"leave idle; use device cuda, or set {_VARIABLE}=force to run on the CPU anyway"
        )


def _disable_dynamo(patches: Patches) -> None:
    """Reach a dynamo that read its environment before this module set it."""
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is not None:
        patches.set(config, "disable", True)


def _one_generator(record: logging.LogRecord) -> bool:
    # One generator plays both parts, so every CUDA draw changes the CPU's state.
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()
