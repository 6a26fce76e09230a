"""Which random streams does every process carry, as bytes?"""

import random
import struct
from collections.abc import Mapping

import numpy as np
import torch

__all__ = ["derived_seed", "export_process_streams", "import_process_streams"]

PYTHON_WORDS = 625
NUMPY_WORDS = 624


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
