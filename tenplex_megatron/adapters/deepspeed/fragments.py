"""What must be known of an optimizer of DeepSpeed to read and set what it updates?"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Fragment", "Group", "Masters"]


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """Elements `[start, stop)` of a flattened local parameter, as this rank updates them.

    They lie at `[offset, offset + stop - start)` of the flattened `master`, which is what the
    optimizer underneath calls its parameter.
    """

    parameter: torch.nn.Parameter
    start: int
    stop: int
    master: torch.Tensor
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One parameter group.

    `values` is the optimizer's own dict, `parameters` are the model's, `masters` is what this rank
    updates for them.
    """

    values: dict[str, Any]
    parameters: tuple[torch.nn.Parameter, ...]
    masters: tuple[torch.Tensor, ...]


class Masters(ABC):
    """What one of DeepSpeed's optimizers updates."""

    base: torch.optim.Optimizer
    """The optimizer underneath, which keeps the moments."""

    @abstractmethod
    def groups(self) -> tuple[Group, ...]:
        """Every parameter group that holds a parameter, in the optimizer's order."""

    @abstractmethod
    def fragments(self) -> Iterator[Fragment]:
        """What this rank updates of every parameter."""

    @abstractmethod
    def refresh(self) -> None:
        """Derive the weights of the forward pass from new masters; collective."""

    @property
    def scaler(self) -> Any:
        """Who keeps the loss scale, or None where none is kept."""
        return None
