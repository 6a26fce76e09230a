"""One rank's share of a plan: copy what its node holds, exchange the rest, in bounded memory.

The executor obeys: every transfer of the plan that names this rank is carried out, and a transfer
that names something this rank lacks is an error, never skipped.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tenplex_megatron.core.coalesce import message_rounds
from tenplex_megatron.core.plan import ReshardPlan, Transfer
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import LayoutError
from tenplex_megatron.store.base import TensorReader
from tenplex_megatron.transport.base import Transport

__all__ = ["Movement", "Target", "execute_plan"]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One box to fill and the memory it lives in: 1-D, contiguous, row-major in the box."""

    box: Box
    flat: torch.Tensor


@dataclass(frozen=True, slots=True)
class Movement:
    """What one rank did: bytes copied on its node, sent and received; seconds."""

    local_bytes: int
    sent_bytes: int
    received_bytes: int
    seconds: float


def execute_plan(
    plan: ReshardPlan,
    rank: int,
    *,
    reader: TensorReader | None,
    targets: Sequence[Target],
    transport: Transport,
    timeout_s: float,
) -> Movement:
    """Fill `targets` with the bytes the plan assigns to them; collective over all ranks.

    Args:
        plan: the same on every rank.
        rank: this rank of the new generation.
        reader: the snapshot on this node; None when this node holds nothing.
        targets: the boxes of this rank, as in the plan's target collection.
        transport: between the ranks of the new generation.
        timeout_s: seconds until a silent peer counts as lost.

    Raises:
        LayoutError: the plan names a box this rank or node lacks.
        TransportError: a peer is gone or silent.
    """
    started = time.monotonic()
    sources = _Sources(reader, plan.tensors)
    places = _Places(targets)
    local_bytes = 0
    for transfer in plan.transfers:
        if transfer.target_rank == rank and transfer.sender_rank == rank:
            source = sources.part(transfer)
            places.part(transfer).copy_(source)
            local_bytes += source.numel() * source.element_size()
    sent, received = transport.traffic.sent_bytes, transport.traffic.received_bytes
    for step in message_rounds(plan, rank):
        sends = {peer: [_pack(sources, row)] for peer, row in step.sends.items()}
        landings = {
            peer: torch.empty(sources.nbytes(row), dtype=torch.uint8)
            for peer, row in step.receives.items()
        }
        receives = {peer: [landing] for peer, landing in landings.items()}
        transport.exchange(sends, receives, timeout_s=timeout_s)
        for peer, row in step.receives.items():
            _unpack(places, row, landings[peer])
    return Movement(
        local_bytes=local_bytes,
        sent_bytes=transport.traffic.sent_bytes - sent,
        received_bytes=transport.traffic.received_bytes - received,
        seconds=time.monotonic() - started,
    )


class _Sources:
    """Boxes of the snapshot on this node, as tensors over the mapped files."""

    def __init__(self, reader: TensorReader | None, specs: Mapping[str, TensorSpec]) -> None:
        self._reader = reader
        self._specs = specs
        self._index: dict[int, dict[str, list[tuple[Region, int]]]] = {}

    def nbytes(self, transfers: Sequence[Transfer]) -> int:
        return sum(one.region.numel * self._specs[one.tensor].itemsize for one in transfers)

    def part(self, transfer: Transfer) -> torch.Tensor:
        if self._reader is None:
            raise LayoutError(
                f"{transfer.tensor}: the plan reads {transfer.region} of old rank "
                f"{transfer.source_rank} on this node, which holds no snapshot"
            )
        for region, number in self._boxes(self._reader, transfer):
            if region.contains(transfer.region):
                view = self._reader.view(transfer.source_rank, number)
                dtype = getattr(torch, self._specs[transfer.tensor].dtype)
                shaped = _bytes(view).view(dtype).view(region.shape)
                return shaped[transfer.region.relative_to(region).slices()]
        raise LayoutError(
            f"{transfer.tensor}: old rank {transfer.source_rank} holds no box with "
            f"{transfer.region} on this node"
        )

    def _boxes(self, reader: TensorReader, transfer: Transfer) -> Sequence[tuple[Region, int]]:
        if transfer.source_rank not in self._index:
            index: dict[str, list[tuple[Region, int]]] = {}
            for number, box in enumerate(reader.boxes(transfer.source_rank)):
                index.setdefault(box.tensor, []).append((box.region, number))
            self._index[transfer.source_rank] = index
        return self._index[transfer.source_rank].get(transfer.tensor, ())


class _Places:
    """The memory of this rank's boxes, found by region."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._by_tensor: dict[str, list[Target]] = {}
        for target in targets:
            self._by_tensor.setdefault(target.box.tensor, []).append(target)

    def part(self, transfer: Transfer) -> torch.Tensor:
        for target in self._by_tensor.get(transfer.tensor, ()):
            whole = target.box.region
            if whole.contains(transfer.region):
                shaped = target.flat.view(whole.shape)
                return shaped[transfer.region.relative_to(whole).slices()]
        raise LayoutError(
            f"{transfer.tensor}: the plan fills {transfer.region}, which rank "
            f"{transfer.target_rank} does not hold"
        )


def _bytes(view: memoryview) -> torch.Tensor:
    """A read-only mapping as a tensor; torch warns about those, and nothing here writes to it."""
    return torch.from_numpy(np.frombuffer(view, dtype=np.uint8))


def _pack(sources: _Sources, transfers: Sequence[Transfer]) -> torch.Tensor:
    message = torch.empty(sources.nbytes(transfers), dtype=torch.uint8)
    position = 0
    for transfer in transfers:
        part = sources.part(transfer)
        position += _slot(message, position, part).copy_(part).nbytes
    return message


def _unpack(places: _Places, transfers: Sequence[Transfer], message: torch.Tensor) -> None:
    position = 0
    for transfer in transfers:
        place = places.part(transfer)
        place.copy_(_slot(message, position, place))
        position += place.numel() * place.element_size()


def _slot(message: torch.Tensor, position: int, like: torch.Tensor) -> torch.Tensor:
    """The bytes of a message from `position` on, in the type and shape of `like`."""
    nbytes = like.numel() * like.element_size()
    return message[position : position + nbytes].view(like.dtype).view(like.shape)
