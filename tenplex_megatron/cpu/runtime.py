"""What does `torch.cuda` answer when the host stands in for the device?

One device per local rank, one stream on it, every operation finished when it returns. The default
CPU generator plays the part of every CUDA generator, and the process's memory that of the device.
"""

import contextlib
import os
import resource
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import torch

from tenplex_megatron.cpu.patching import Patches

__all__ = ["Event", "Stream", "patch_runtime"]

_CAPABILITY = (8, 0)
_NAME = "CPU stand-in for CUDA"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_KILOBYTE = 1024


class Stream:
    """The one stream: everything submitted to it has already happened."""

    device = torch.device("cuda", 0)
    device_index = 0
    device_type = 1
    stream_id = 0
    cuda_stream = 0
    priority = 0

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        """Accepts what `torch.cuda.Stream` and `ExternalStream` accept."""

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority: there is one."""
        return (0, 0)

    def wait_event(self, _event: object) -> None:
        """Return at once."""

    def wait_stream(self, _stream: object) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Everything submitted is done."""
        return True

    def is_capturing(self) -> bool:
        """No graph is ever captured."""
        return False

    def record_event(self, event: "Event | None" = None) -> "Event":
        """The given or a new event, recorded now."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Self:
        """Make this the current stream, as it always is."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave nothing."""

    def __eq__(self, other: object) -> bool:
        """All streams are the same one."""
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        """All streams are the same one."""
        return 0


class Event:
    """A point in time, reached as soon as it is recorded."""

    cuda_event = 0

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self._recorded_s = 0.0

    def record(self, _stream: object = None) -> None:
        """Remember the time."""
        self._recorded_s = time.perf_counter()

    def wait(self, _stream: object = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Whatever was recorded is done."""
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to `end`."""
        return (end._recorded_s - self._recorded_s) * 1e3


class _Guard:
    """Context manager for a device or a stream; there is only one of either."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class _Generators:
    """The CPU's default generator under every device index."""

    def __getitem__(self, _index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return _device_count()


class _Device:
    """The device index this process has chosen with `set_device`."""

    def __init__(self) -> None:
        self.index = 0

    def current(self) -> int:
        return self.index

    def select(self, device: Any) -> None:
        index = torch.device(device).index if isinstance(device, str) else device
        index = index.index if isinstance(index, torch.device) else index
        self.index = int(index or 0)


def patch_runtime(patches: Patches) -> None:
    """Replace what asks `torch.cuda` and `torch.accelerator` about devices, streams and memory."""
    device = _Device()
    stream = Stream()
    shared = {
        "current_stream": lambda *_: stream,
        "device_count": _device_count,
        "empty_cache": _nothing,
        "is_available": lambda: True,
        "max_memory_allocated": _peak_bytes,
        "max_memory_reserved": _peak_bytes,
        "memory_allocated": _resident_bytes,
        "memory_reserved": _resident_bytes,
        "memory_stats": _memory_stats,
        "reset_accumulated_memory_stats": _nothing,
        "reset_peak_memory_stats": _nothing,
        "set_stream": _nothing,
        "synchronize": _nothing,
    }
    cuda = {
        "Event": Event,
        "ExternalStream": Stream,
        "Stream": Stream,
        "StreamContext": _Guard,
        "can_device_access_peer": lambda *_: False,
        "check_error": _nothing,
        "current_device": device.current,
        "default_generators": _Generators(),
        "default_stream": lambda *_: stream,
        "device": _Guard,
        "device_memory_used": _resident_bytes,
        "device_of": _Guard,
        "get_arch_list": list,
        "get_device_capability": lambda *_: _CAPABILITY,
        "get_device_name": lambda *_: _NAME,
        "get_device_properties": _properties,
        "init": _nothing,
        "ipc_collect": _nothing,
        "is_bf16_supported": lambda *_a, **_k: True,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "max_memory_cached": _peak_bytes,
        "mem_get_info": _memory_info,
        "memory_cached": _resident_bytes,
        "memory_snapshot": lambda *_a, **_k: [],
        "memory_summary": lambda *_a, **_k: _NAME,
        "set_device": device.select,
        "stream": _Guard,
    }
    _patch_package(patches, "torch.cuda", shared | cuda)
    patches.set_all(torch.cuda.nvtx, _silent_nvtx())
    accelerator = {
        "current_accelerator": lambda *_a, **_k: torch.device("cuda"),
        "current_device_index": device.current,
        "current_device_idx": device.current,
        "get_memory_info": _memory_info,
        "set_device_index": device.select,
        "set_device_idx": device.select,
    }
    _patch_package(patches, "torch.accelerator", shared | accelerator)


def _patch_package(patches: Patches, package: str, values: dict[str, Any]) -> None:
    """Replace names in a package and wherever its own submodules have imported them."""
    originals = {name: vars(sys.modules[package]).get(name) for name in values}
    patches.set_all(sys.modules[package], values)
    inside = [m for name, m in sys.modules.items() if name.startswith(f"{package}.")]
    for module in inside:
        own = vars(module)
        copies = {n: v for n, v in values.items() if n in own and own[n] is originals[n]}
        patches.set_all(module, copies)


def _nothing(*_args: object, **_kwargs: object) -> None:
    return None


def _device_count() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _properties(_device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name=_NAME,
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=_memory_info()[1],
        multi_processor_count=os.cpu_count() or 1,
        warp_size=32,
    )


def _resident_bytes(_device: Any = None) -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * _PAGE_BYTES


def _peak_bytes(_device: Any = None) -> int:
    # The kernel updates the peak less often than the current size.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KILOBYTE
    return max(peak, _resident_bytes())


def _memory_info(_device: Any = None) -> tuple[int, int]:
    free, total = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PHYS_PAGES")
    return free * _PAGE_BYTES, total * _PAGE_BYTES


def _memory_stats(_device: Any = None) -> defaultdict[str, int]:
    stats: defaultdict[str, int] = defaultdict(int)
    for kind in ("allocated", "reserved", "active"):
        stats[f"{kind}_bytes.all.current"] = _resident_bytes()
        stats[f"{kind}_bytes.all.peak"] = _peak_bytes()
    return stats


def _silent_nvtx() -> dict[str, Any]:
    silent = contextlib.nullcontext
    return {
        "mark": _nothing,
        "range": lambda *_a, **_k: silent(),
        "range_end": _nothing,
        "range_pop": _nothing,
        "range_push": _nothing,
        "range_start": lambda *_a, **_k: 0,
    }
