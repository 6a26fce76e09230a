"""Which random streams does every process carry, as bytes?"""

import random
import struct
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from tenplex_megatron.errors import LayoutError

__all__ = [
    "StreamTracker",
    "derived_seed",
    "export_process_streams",
    "export_tracked_streams",
    "import_process_streams",
    "import_tracked_streams",
]

PYTHON_WORDS = 625
NUMPY_WORDS = 624
_TRACKED = "tracker."


class StreamTracker(Protocol):
    """What a framework keeps the named streams of its device in."""

    def get_states(self) -> Mapping[str, Any]:
        """The state of every stream by its name."""

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace them all."""


def export_process_streams() -> dict[str, torch.Tensor]:
    """The streams of Python, numpy and torch on the host, each as 1-D uint8."""
    return {
        "python": _bytes(_python_to_bytes()),
        "numpy": _bytes(_numpy_to_bytes()),
        "torch": torch.get_rng_state().clone(),
    }


def import_process_streams(streams: Mapping[str, torch.Tensor]) -> None:
    """Set them from `export_process_streams`."""
    _python_from_bytes(streams["python"].numpy().tobytes())
    _numpy_from_bytes(streams["numpy"].numpy().tobytes())
    torch.set_rng_state(streams["torch"])


def export_tracked_streams(tracker: StreamTracker) -> dict[str, torch.Tensor]:
    """The streams of a tracker, each as 1-D uint8 on the host.

    Raises:
        LayoutError: a stream is an object that holds no bytes.
    """
    streams = {}
    for name, state in tracker.get_states().items():
        if not isinstance(state, torch.Tensor):
            raise LayoutError(
                f"random stream {name}: state is a {type(state).__name__}, expected a tensor; "
                "run without graph-safe random streams"
            )
        streams[_TRACKED + name] = state.clone().cpu()
    return streams


def import_tracked_streams(tracker: StreamTracker, streams: Mapping[str, torch.Tensor]) -> None:
    """Set them from `export_tracked_streams`; other streams may be among them."""
    tracked = {name: state for name, state in streams.items() if name.startswith(_TRACKED)}
    tracker.set_states({name.removeprefix(_TRACKED): state for name, state in tracked.items()})


def derived_seed(seed: int, step: int) -> int:
    """A seed for streams that begin at a step.

    Continuing from `seed` alone would repeat the masks of the first steps.
    """
    return (seed * 1_000_003 + step * 7_919) % (2**31 - 1) + 1


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _python_to_bytes() -> bytes:
    version, words, gauss = random.getstate()
    present = gauss is not None
    return struct.pack(f"<i?d{PYTHON_WORDS}I", version, present, gauss if present else 0.0, *words)


def _python_from_bytes(data: bytes) -> None:
    version, present, gauss, *words = struct.unpack(f"<i?d{PYTHON_WORDS}I", data)
    random.setstate((version, tuple(words), gauss if present else None))


def _numpy_to_bytes() -> bytes:
    kind, words, position, has_gauss, gauss = np.random.get_state()
    assert kind == "MT19937"
    return struct.pack(f"<iid{NUMPY_WORDS}I", position, has_gauss, gauss, *words)


def _numpy_from_bytes(data: bytes) -> None:
    position, has_gauss, gauss, *words = struct.unpack(f"<iid{NUMPY_WORDS}I", data)
    state = ("MT19937", np.array(words, dtype=np.uint32), position, has_gauss, gauss)
    np.random.set_state(state)
