"""What is asked of a way to move bytes between ranks: one exchange of numbered messages."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Traffic", "Transport"]


@dataclass(slots=True)
class Traffic:
    """Bytes counted where they are handed over and where they arrive, not taken from a plan."""

    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0


class Transport(ABC):
    """Moves bytes between the ranks of one generation."""

    traffic: Traffic

    @abstractmethod
    def exchange(
        self,
        sends: Mapping[int, Sequence[torch.Tensor]],
        receives: Mapping[int, Sequence[torch.Tensor]],
        *,
        timeout_s: float,
    ) -> None:
        """Send and receive; blocks until both are finished.

        Every rank calls it at the same time; the tensors of a pair (sender, receiver) are matched
        in order and have equal sizes on both sides.

        Args:
            sends: receiver -> contiguous 1-D uint8 tensors.
            receives: sender -> contiguous 1-D uint8 tensors, filled in place.
            timeout_s: seconds until a silent peer counts as lost.

        Raises:
            TransportError: a peer is gone or silent; what was received is undefined.
        """

    @abstractmethod
    def gather(self, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """The payload of every rank, in rank order; blocks until all have called it.

        Raises:
            TransportError: a peer is gone or silent.
        """

    @abstractmethod
    def agree(self, values: Sequence[int], *, timeout_s: float) -> list[int]:
        """The element-wise maximum of every rank's values.

        Raises:
            TransportError: a peer is gone or silent.
        """
