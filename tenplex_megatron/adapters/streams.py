"""Which random streams does every process carry, as bytes, and when are they set again?"""

import random
import struct
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from tenplex_megatron.adapters.base import Piece
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import LayoutError

__all__ = [
    "CarriedStreams",
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


type Streams = dict[str, torch.Tensor]
"""The bytes of every stream of a process, 1-D uint8, by its name."""


class CarriedStreams:
    """The streams of one process as part of its state.

    Args:
        export: every stream of this process.
        load: sets them from what `export` gave.
    """

    def __init__(self, export: Callable[[], Streams], load: Callable[[Streams], None]) -> None:
        self._export, self._load = export, load
        self._memory: Streams = {}
        self._is_stored = False
        self._pending: Streams | None = None
        """Streams to set before the first step; empty: derive them; None: leave them alone."""

    def pieces(self, place: str, stored: Mapping[str, TensorSpec] | None) -> list[Piece]:
        """Copies of them; of a snapshot all, or none where it lacks one.

        Args:
            place: whose streams they are, equal for the ranks and layouts that continue them.
            stored: the tensors of the snapshot to import; None: what a snapshot would store.
        """
        self._memory = self._export()
        pieces = []
        for name, memory in self._memory.items():
            spec = TensorSpec(f"random/{place}/{name}", (memory.numel(),), "uint8")
            box = Box(spec.name, Region.full(spec.shape))
            pieces.append(Piece(spec, box, memory, is_local=True))
        self._is_stored = stored is None or all(piece.spec.name in stored for piece in pieces)
        return pieces if self._is_stored else []

    def refresh(self) -> None:
        """Bring the copies up to date, in place.

        Raises:
            LayoutError: there are other streams now.
        """
        now = self._export()
        if now.keys() != self._memory.keys():
            raise LayoutError(
                f"random streams: {sorted(self._memory)} when training became elastic, "
                f"{sorted(now)} now; expected the script to add its streams before that"
            )
        for name, state in now.items():
            self._memory[name].copy_(state)

    def keep(self) -> None:
        """Remember what was imported into the copies, for `resume`."""
        imported = {name: memory.clone() for name, memory in self._memory.items()}
        self._pending = imported if self._is_stored else {}

    def resume(self, reseed: Callable[[], None]) -> None:
        """Set what was kept; right before the first step, and only after an import.

        Building data loaders draws from the streams, which an uninterrupted run does not do here.

        Args:
            reseed: derives new streams where the snapshot had none for this place.
        """
        if self._pending:
            self._load(self._pending)
        elif self._pending is not None:
            reseed()
        self._pending = None


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
