"""What must a training framework offer so that its jobs can change layout?

Two interfaces besides the reading of its command line (`adapters.arguments`): the live state of one
rank (`TrainingState`), and who is told when that state exists and at each step (`StepObserver`).
Adapters translate; no algorithm lives in them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import LayoutError

__all__ = [
    "FrameworkAdapter",
    "Piece",
    "Progress",
    "StepObserver",
    "TrainingState",
]

type Progress = dict[str, Any]
"""Plain values by name: what JSON holds, tuples and non-finite numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One box of the collection and the memory it lives in on this rank.

    `flat` is a 1-D contiguous view of exactly `box.region.numel` elements, in the row-major order
    of the box.  Writing to it changes the framework's own tensor.  `is_local` marks state of a
    place in the layout (random streams), which another layout lacks.  `is_early` marks memory that
    may change before the next update of the weights (buffers written in the forward pass).
    """

    spec: TensorSpec
    box: Box
    flat: torch.Tensor
    is_local: bool = False
    is_early: bool = False

    def __post_init__(self) -> None:
        if self.flat.dim() != 1 or self.flat.numel() != self.box.region.numel:
            raise LayoutError(
                f"{self.box.tensor}: box {self.box.region} holds {self.box.region.numel} elements, "
                f"its memory has shape {tuple(self.flat.shape)}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return self.flat.numel() * self.flat.element_size()

    def as_bytes(self) -> torch.Tensor:
        """The same memory as 1-D uint8."""
        return self.flat.view(torch.uint8)

    def as_box(self) -> torch.Tensor:
        """The same memory in the shape of the box."""
        return self.flat.view(self.box.region.shape)


class TrainingState(ABC):
    """The live state of one rank of a training job, as boxes of global tensors.

    Built once per generation, after the framework has built model and optimizer.
    """

    @property
    @abstractmethod
    def global_batch_size(self) -> int:
        """Samples per training step, over all ranks."""

    @abstractmethod
    def pieces(self, stored: Mapping[str, TensorSpec] | None = None) -> tuple[Piece, ...]:
        """Every box this rank holds or needs, sorted by tensor and region; no bytes are copied.

        Args:
            stored: the tensors a snapshot holds, when one is about to be imported; state that
                exists only for equal coordinates (random streams) is asked for only if stored.
        """

    @abstractmethod
    def refresh(self) -> None:
        """Bring memory that is a copy (random streams) up to date, before a snapshot."""

    @abstractmethod
    def progress(self) -> Progress:
        """What is not a tensor: step, schedule, samples, scalers.  JSON, exact."""

    @abstractmethod
    def load_progress(self, progress: Sequence[Progress]) -> int:
        """Set what is not a tensor from the progress of all ranks of the snapshot.

        Returns:
            The step training goes on from.

        Raises:
            LayoutError: two ranks of the snapshot contradict each other.
        """

    @abstractmethod
    def finish_import(self) -> None:
        """Derive what was not moved (low-precision weights, gathered parameters)."""


class StepObserver(ABC):
    """Who is told about the life of a training job; called by an adapter's hooks."""

    @abstractmethod
    def on_built(self, state: TrainingState) -> None:
        """Model and optimizer exist; blocks until a pending import is finished."""

    @abstractmethod
    def before_update(self) -> None:
        """The weights are about to change; blocks until a running copy of them is finished."""

    @abstractmethod
    def on_step(
        self, step: int, losses: Mapping[str, float] | None, *, is_last: bool = False
    ) -> bool:
        """A step is finished; True when the process should leave its training loop now.

        Args:
            step: how many steps are finished.
            losses: of this step, where they are known.
            is_last: the framework itself leaves its loop after this step, on all ranks.
        """

    @abstractmethod
    def on_samples(self, first_batch: int, ids: Sequence[int]) -> None:
        """Micro-batch `first_batch` of this generation reads the samples `ids` on this rank."""

    @property
    @abstractmethod
    def imports_state(self) -> bool:
        """Whether `on_built` will replace the state by that of a snapshot."""

    @property
    @abstractmethod
    def audits_samples(self) -> bool:
        """Whether sample ids should be reported."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """The code to exit with once the training loop was left because `on_step` said so."""


class FrameworkAdapter(ABC):
    """The hooks into a framework's training loop, inside a worker."""

    @abstractmethod
    def install(self, observer: StepObserver, layout: ParallelLayout) -> None:
        """Make the framework build `layout` and call `observer`; before the script runs."""
