"""Boxes in motion between the threads of one process: what every transport must do, in the open.

Each rank is one thread with its own `LoopbackTransport`; messages are handed over by reference and
copied by the receiver. A rank that leaves is a dead peer to the others.
"""

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from tenplex_megatron.errors import TransportError
from tenplex_megatron.transport.base import Traffic, Transport

__all__ = ["LoopbackTransport"]


@dataclass(slots=True, eq=False)
class _Message:
    """One tensor under way; the sender may not touch it before it is taken."""

    tensor: torch.Tensor
    taken: bool = False

    def is_taken(self) -> bool:
        return self.taken


@dataclass(slots=True, eq=False)
class _World:
    """What the ranks share; everything in it is guarded by `changed`."""

    size: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    boxes: dict[tuple[int, int], deque[_Message]] = field(default_factory=dict)
    rows: dict[int, dict[int, tuple[bytes]]] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)


class LoopbackTransport(Transport):
    """One rank among threads; made by `world`."""

    def __init__(self, world: _World, rank: int) -> None:
        self._world = world
        self._rank = rank
        self._gathered = 0
        self.traffic = Traffic()

    @classmethod
    def world(cls, num_ranks: int) -> "list[LoopbackTransport]":
        """The transports of all ranks, one for each thread."""
        shared = _World(num_ranks)
        return [cls(shared, rank) for rank in range(num_ranks)]

    def leave(self) -> None:
        """This rank is dead from now on: its peers fail as soon as they need it."""
        with self._world.changed:
            self._world.left.add(self._rank)
            self._world.changed.notify_all()

    def exchange(
        self,
        sends: Mapping[int, Sequence[torch.Tensor]],
        receives: Mapping[int, Sequence[torch.Tensor]],
        *,
        timeout_s: float,
    ) -> None:
        """See `Transport.exchange`."""
        deadline = time.monotonic() + timeout_s
        boxes = self._world.boxes
        sent = [(peer, _Message(tensor)) for peer in sorted(sends) for tensor in sends[peer]]
        with self._world.changed:
            for peer, message in sent:
                boxes.setdefault((self._rank, peer), deque()).append(message)
            self._world.changed.notify_all()
        for peer in sorted(receives):
            for tensor in receives[peer]:
                self._wait(partial(boxes.get, (peer, self._rank)), peer, deadline)
                self._take(boxes[peer, self._rank].popleft(), peer, tensor)
        for peer, message in sent:
            self._wait(message.is_taken, peer, deadline)
            self.traffic.sent_bytes += message.tensor.nbytes
            self.traffic.messages += 1

    def gather(self, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """See `Transport.gather`."""
        deadline = time.monotonic() + timeout_s
        number, self._gathered = self._gathered, self._gathered + 1
        with self._world.changed:
            rows = self._world.rows.setdefault(number, {})
            rows[self._rank] = (bytes(payload),)
            # All ranks have read a row before any of them adds the one after the next.
            self._world.rows.pop(number - 2, None)
            self._world.changed.notify_all()
        for peer in range(self._world.size):
            self._wait(partial(rows.get, peer), peer, deadline)
        return [rows[peer][0] for peer in range(self._world.size)]

    def agree(self, values: Sequence[int], *, timeout_s: float) -> list[int]:
        """See `Transport.agree`."""
        form = f"{len(values)}q"
        rows = self.gather(struct.pack(form, *values), timeout_s=timeout_s)
        columns = zip(*(struct.unpack(form, row) for row in rows), strict=True)
        return [max(column) for column in columns]

    def _take(self, message: _Message, peer: int, tensor: torch.Tensor) -> None:
        if tensor.numel() != message.tensor.numel():
            raise TransportError(
                f"rank {self._rank} of {self._world.size}: rank {peer} sent "
                f"{message.tensor.numel()} bytes, expected {tensor.numel()}"
            )
        tensor.copy_(message.tensor)
        self.traffic.received_bytes += tensor.nbytes
        with self._world.changed:
            message.taken = True
            self._world.changed.notify_all()

    def _wait(self, is_done: Callable[[], object], peer: int, deadline: float) -> None:
        """Block until `peer` has done its part."""
        with self._world.changed:
            self._world.changed.wait_for(
                lambda: bool(is_done()) or peer in self._world.left,
                timeout=max(0.0, deadline - time.monotonic()),
            )
            if is_done():
                return
            reason = "is gone" if peer in self._world.left else "is silent"
            raise TransportError(f"rank {self._rank} of {self._world.size}: rank {peer} {reason}")
