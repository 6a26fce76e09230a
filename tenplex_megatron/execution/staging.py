"""How does a row of transfers become messages, with as little memory besides the state as possible?

A large transfer whose bytes lie together is sent from where it is and received where it belongs.
Everything else is packed into buffers that are kept from round to round, so that no more than one
round's budget is ever held in each direction.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from tenplex_megatron.core.coalesce import cut_into_messages
from tenplex_megatron.core.plan import Transfer
from tenplex_megatron.execution.boxes import Places, Sources
from tenplex_megatron.execution.copying import copy_into

__all__ = ["Inbox", "Outbox"]

_ALIGNMENT = 16


class _Buffers:
    """One piece of host memory per peer, which only grows."""

    def __init__(self) -> None:
        self._by_peer: dict[int, torch.Tensor] = {}

    def take(self, peer: int, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Uninitialised memory of the given sizes; what was taken before is lost."""
        ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        if not ends:
            return []
        if peer not in self._by_peer or self._by_peer[peer].numel() < ends[-1]:
            self._by_peer.pop(peer, None)
            self._by_peer[peer] = torch.empty(ends[-1], dtype=torch.uint8)
        memory = self._by_peer[peer]
        return [
            memory[start : start + size] for start, size in zip([0, *ends[:-1]], sizes, strict=True)
        ]


class Outbox:
    """Turns what this rank sends in one round into messages."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._buffers = _Buffers()

    def messages(self, peer: int, transfers: Sequence[Transfer]) -> list[torch.Tensor]:
        """1-D bytes to send; valid until the next call for the same peer."""
        found: list[torch.Tensor | None] = []
        packed: list[list[torch.Tensor]] = []
        for run in cut_into_messages(transfers, self._sources.nbytes):
            parts = [self._sources.part(transfer) for transfer in run]
            if len(parts) == 1 and parts[0].is_contiguous():
                found.append(_as_bytes(parts[0]))
            else:
                found.append(None)
                packed.append(parts)
        buffers = self._buffers.take(peer, [sum(p.nbytes for p in parts) for parts in packed])
        for buffer, parts in zip(buffers, packed, strict=True):
            _pack(buffer, parts)
        rest = iter(buffers)
        return [next(rest) if message is None else message for message in found]


class Inbox:
    """Receives the messages of one round and puts them where they belong."""

    def __init__(self, places: Places, sources: Sources) -> None:
        self._places = places
        self._nbytes = sources.nbytes
        self._buffers = _Buffers()

    def messages(self, peer: int, transfers: Sequence[Transfer]) -> list[torch.Tensor]:
        """1-D bytes to receive into, then to be handed to `unpack`."""
        found: list[torch.Tensor | None] = []
        sizes: list[int] = []
        for run in cut_into_messages(transfers, self._nbytes):
            landing = self._direct(run)
            found.append(landing)
            if landing is None:
                sizes.append(sum(map(self._nbytes, run)))
        rest = iter(self._buffers.take(peer, sizes))
        return [next(rest) if message is None else message for message in found]

    def unpack(self, transfers: Sequence[Transfer], messages: Sequence[torch.Tensor]) -> None:
        """Fill every box that holds what has arrived."""
        runs = cut_into_messages(transfers, self._nbytes)
        for run, message in zip(runs, messages, strict=True):
            position = 0
            landed = self._direct(run) is not None
            for transfer in run:
                first, *others = self._places.parts(transfer)
                if not landed:
                    copy_into(first, _slot(message, position, first))
                for other in others:
                    copy_into(other, first)
                position += first.nbytes

    def _direct(self, run: Sequence[Transfer]) -> torch.Tensor | None:
        """The live memory of a message that is one transfer whose bytes lie together."""
        if len(run) > 1:
            return None
        place = self._places.parts(run[0])[0]
        return _as_bytes(place) if place.is_contiguous() else None


def _pack(message: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    position = 0
    for part in parts:
        copy_into(_slot(message, position, part), part)
        position += part.nbytes


def _slot(message: torch.Tensor, position: int, like: torch.Tensor) -> torch.Tensor:
    """The bytes of a message from `position` on, in the type and shape of `like`."""
    return message[position : position + like.nbytes].view(like.dtype).view(like.shape)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
