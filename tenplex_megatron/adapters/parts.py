"""Where does a flat range of a local tensor lie in its global tensor, and what is kept of it?

Optimizers own elements `[start, stop)` of a flattened local tensor, and a local tensor is one box
or several of global ones; what is owned of each box becomes a `Piece`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tenplex_megatron.adapters.base import Piece
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.slicing import flat_range
from tenplex_megatron.core.tensors import Box, TensorSpec

__all__ = ["OwnedParameter", "Part", "pieces_of", "states_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """Elements `[start, start + region.numel)` of a flattened local tensor, as one box.

    `key` and `shape` are those of the global tensor.
    """

    key: str
    shape: tuple[int, ...]
    padded: bool
    region: Region
    start: int

    @property
    def stop(self) -> int:
        """One past the last element of the flattened local tensor."""
        return self.start + self.region.numel

    def cut(self, start: int, stop: int) -> Iterator[tuple[Region, int, int]]:
        """The boxes that cover elements `[start, stop)` of the flattened local tensor.

        Yields:
            (box, first element, one past the last element), in order.
        """
        low, high = max(start, self.start), min(stop, self.stop)
        if low >= high:
            return
        position = low
        for box in flat_range(self.region, low - self.start, high - self.start):
            yield box, position, position + box.numel
            position += box.numel


@dataclass(frozen=True, slots=True, eq=False)
class OwnedParameter:
    """Elements `[start, stop)` of a flattened model parameter that this rank's optimizer updates.

    `states` holds the value the optimizer updates ("master") and its state of the same size, each
    of `stop - start` elements.
    """

    parameter: torch.nn.Parameter
    start: int
    stop: int
    states: Mapping[str, torch.Tensor]


def states_of(master: torch.Tensor, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The value an optimizer updates, and what it keeps of the same size, all flat."""
    found = {"master": master.detach().view(-1)}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.numel() == master.numel():
            found[name] = value.detach().view(-1)
    return found


def pieces_of(kind: str, part: Part, flat: torch.Tensor, start: int, stop: int) -> Iterator[Piece]:
    """The boxes of one tensor whose elements `[start, stop)` are `flat`."""
    dtype = str(flat.dtype).removeprefix("torch.")
    spec = TensorSpec(f"{kind}/{part.key}", part.shape, dtype, padded=part.padded)
    for region, low, high in part.cut(start, stop):
        yield Piece(spec, Box(spec.name, region), flat[low - start : high - start])
