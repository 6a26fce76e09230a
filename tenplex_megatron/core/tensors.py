"""What is known of a global tensor without its bytes: name, shape, dtype.

Names carry no meaning here; two tensors are the same tensor when their names are equal.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType

from tenplex_megatron.core.region import Region
from tenplex_megatron.errors import LayoutError, UnsupportedLayoutError

__all__ = ["DTYPE_BYTES", "Box", "TensorSpec"]

DTYPE_BYTES = MappingProxyType(
    {
        "bfloat16": 2,
        "bool": 1,
        "complex128": 16,
        "complex64": 8,
        "float16": 2,
        "float32": 4,
        "float64": 8,
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "int16": 2,
        "int32": 4,
        "int64": 8,
        "int8": 1,
        "uint16": 2,
        "uint32": 4,
        "uint64": 8,
        "uint8": 1,
    }
)
"""Bytes per element of every dtype name a tensor may have."""


@dataclass(frozen=True, slots=True, order=True)
class TensorSpec:
    """One global tensor, as if it were never cut.

    `padded` says that rows of dim 0 past the logical size are filler, so that two layouts may
    disagree about how many there are (a vocabulary padded for tensor parallelism).

    >>> TensorSpec("weight", (4, 6), "bfloat16").nbytes
    48
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    padded: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise UnsupportedLayoutError(
                f"{self.name}: dtype {self.dtype!r} has no known size; "
                f"known are {', '.join(DTYPE_BYTES)}"
            )
        if any(size < 0 for size in self.shape):
            raise LayoutError(f"{self.name}: expected sizes >= 0, got shape {self.shape}")
        if self.padded and not self.shape:
            raise LayoutError(f"{self.name}: a tensor without dims has no rows to pad")

    @property
    def region(self) -> Region:
        """The region of the whole tensor."""
        return Region.full(self.shape)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A region of a named tensor: the unit that ranks hold, stores keep and plans move."""

    tensor: str
    region: Region

    def __str__(self) -> str:
        return f"{self.tensor}{self.region}"
