"""How do tensors that ask for a CUDA device come to live in host memory?

Factories and tensor methods are wrapped one by one. A `TorchFunctionMode` would be shorter, but it
is entered for every operation of every step and belongs to one thread only.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _device as torch_device_context

from tenplex_megatron.cpu.patching import Patches

__all__ = ["host_device", "patch_tensors"]

HOST = torch.device("cpu")

_FACTORIES = (
    "arange",
    "as_tensor",
    "asarray",
    "bartlett_window",
    "blackman_window",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "linspace",
    "logspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "sparse_coo_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
_NEW_METHODS = ("new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor")
_TYPES = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")


def host_device(device: Any) -> Any:
    """The host in place of a CUDA device given as index, name or object; others unchanged."""
    kind = type(device)
    if kind is torch.device:
        return HOST if device.type == "cuda" else device
    if kind is str:
        return "cpu" if device.startswith("cuda") else device
    return "cpu" if kind is int else device


def patch_tensors(patches: Patches) -> None:
    """Replace what creates tensors on a device or moves them there."""
    # The set is cached on first use and must hold torch's own functions: a DeviceContext is
    # handed those, never the wrappers.
    torch_device_context._device_constructors()
    for name in _FACTORIES:
        patches.set(torch, name, _on_host(getattr(torch, name)))
    for name in (*_NEW_METHODS, "new_zeros"):
        patches.set(torch.Tensor, name, _on_host(getattr(torch.Tensor, name)))
    patches.set(torch.Tensor, "to", _to_on_host(torch.Tensor.to))
    patches.set(torch.Tensor, "type", _cuda_type(torch.Tensor.type))
    # Megatron's token dispatcher asks this before it reads sizes back into Python.
    patches.set(torch.Tensor, "is_cuda", property(lambda tensor: tensor.device == HOST))
    patches.set(torch, "load", _load_on_host(torch.load))
    for owner in (torch.Tensor, torch.UntypedStorage, torch.TypedStorage):
        patches.set(owner, "cuda", _stay)
        patches.set(owner, "pin_memory", _stay)
    patches.set(torch.Tensor, "record_stream", _ignore)
    context = torch_device_context.DeviceContext
    patches.set(context, "__init__", _context_on_host(context.__init__))
    for kind in _TYPES:
        patches.set(torch.cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))


def _stay[T](value: T, *_args: object, **_kwargs: object) -> T:
    return value


def _ignore(_value: object, *_args: object, **_kwargs: object) -> None:
    return None


def _on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if kwargs.get("device") is not None:
                kwargs["device"] = host_device(kwargs["device"])
            kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return factory


def _to_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (host_device(args[0]), *args[1:])
        if kwargs.get("device") is not None:
            kwargs["device"] = host_device(kwargs["device"])
        return original(tensor, *args, **kwargs)

    return to


def _cuda_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type`, naming host tensors as CUDA ones: Megatron's optimizers compare the names."""

    @functools.wraps(original)
    def tensor_type(tensor: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is None:
            kind = str(original(tensor)).rpartition(".")[2]
            return f"torch.cuda.{kind}" if tensor.device == HOST else original(tensor)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return original(tensor, dtype, **kwargs)

    return tensor_type


def _load_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        # A checkpoint written on CUDA names a device that does not exist here.
        location = HOST if map_location is None else host_device(map_location)
        return original(f, location, *args, **kwargs)

    return load


def _context_on_host(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(context: Any, device: Any) -> None:
        original(context, host_device(device))

    return init
