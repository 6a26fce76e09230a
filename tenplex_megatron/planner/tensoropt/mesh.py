"""How do tensors lie on the devices: the grid of devices, and what its axes do to a tensor.

A layout gives every mesh axis a role: it splits one dim of the tensor, or all its devices hold the
same, or the tensor is the sum of what they hold. An axis that splits a dim selects by one digit of
the dim's index, the digits being written in the sizes of the axes, outermost first. So the order of
splits never matters and each axis can change its role on its own; a dim that is split over the
first axes only lies in contiguous blocks, any other one block-cyclic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from tenplex_megatron.errors import LayoutError

__all__ = ["PARTIAL", "REPLICATED", "DeviceMesh", "Layout", "Tensor", "shares"]

type Layout = tuple[int, ...]
"""For every mesh axis the dim it splits, or `REPLICATED`, or `PARTIAL`."""

REPLICATED = -1
PARTIAL = -2


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """Devices 0 .. n-1 as a grid; the last axis varies fastest.

    >>> DeviceMesh.over(12).sizes
    (3, 2, 2)
    """

    sizes: tuple[int, ...]

    @classmethod
    def over(cls, num_devices: int) -> Self:
        """The grid of prime sizes, largest first: what is left of a node is a whole number of axes.

        Raises:
            LayoutError: without devices.
        """
        if num_devices < 1:
            raise LayoutError(f"device mesh: expected at least 1 device, got {num_devices}")
        primes, rest = [], num_devices
        for factor in range(2, num_devices + 1):
            while rest % factor == 0:
                primes.append(factor)
                rest //= factor
        return cls(tuple(reversed(primes)))

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.sizes)

    def group_size(self, axes: Sequence[int]) -> int:
        """Devices that differ in nothing but their coordinates on `axes`."""
        return math.prod(self.sizes[axis] for axis in axes)

    def can_split(self, size: int, axis: int) -> bool:
        """Whether a dim of `size` has a digit for `axis`."""
        return size % math.prod(self.sizes[: axis + 1]) == 0

    def members_per_node(self, axes: Sequence[int], devices_per_node: int) -> int:
        """Members of a group over `axes` that share a node; the group split worst counts."""
        others = [axis for axis in range(len(self.sizes)) if axis not in axes]
        grid = np.arange(self.num_devices).reshape(self.sizes).transpose(*others, *axes)
        nodes = grid.reshape(-1, self.group_size(axes)) // devices_per_node
        return min(int(np.unique(group, return_counts=True)[1].min()) for group in nodes)


@dataclass(frozen=True, slots=True)
class Tensor:
    """The sizes of the dims that can be split, and the bytes of the whole."""

    sizes: tuple[int, ...]
    size_bytes: float


def shares(mesh: DeviceMesh, layout: Layout) -> int:
    """Parts into which the layout cuts a tensor, of which each device holds one.

    >>> shares(DeviceMesh((2, 2, 2)), (0, 1, REPLICATED))
    4
    """
    return mesh.group_size([axis for axis, role in enumerate(layout) if role >= 0])
