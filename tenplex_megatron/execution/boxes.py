"""Where do the bytes of a transfer lie: in which snapshot box, and in which boxes of this rank?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tenplex_megatron.core.geometry import overlapping_pairs
from tenplex_megatron.core.plan import Transfer
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import LayoutError
from tenplex_megatron.execution.copying import read_only_bytes
from tenplex_megatron.store.base import TensorReader

__all__ = ["Places", "Sources", "Target"]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One box to fill and the memory it lives in: 1-D, contiguous, row-major in the box."""

    box: Box
    flat: torch.Tensor


class Sources:
    """Boxes of the snapshot on this node, as tensors over the mapped files."""

    def __init__(self, reader: TensorReader | None, specs: Mapping[str, TensorSpec]) -> None:
        self._reader = reader
        self._specs = specs
        self._held: dict[int, dict[str, _Regions]] = {}
        # Transfers out of one box follow each other.
        self._last: tuple[tuple[int, int], torch.Tensor] = ((-1, -1), torch.empty(0))

    def nbytes(self, transfer: Transfer) -> int:
        """Bytes of a transfer."""
        return transfer.region.numel * self._specs[transfer.tensor].itemsize

    def number(self, transfer: Transfer) -> int:
        """Which box of its source rank a transfer reads.

        Raises:
            LayoutError: this node lacks it.
        """
        return self._find(transfer)[2]

    def part(self, transfer: Transfer) -> torch.Tensor:
        """The bytes of a transfer in its shape and type; read-only."""
        reader, region, number = self._find(transfer)
        key = (transfer.source_rank, number)
        if key != self._last[0]:
            dtype = getattr(torch, self._specs[transfer.tensor].dtype)
            whole = read_only_bytes(reader.view(transfer.source_rank, number))
            self._last = (key, whole.view(dtype).view(region.shape))
        return _cut_out(self._last[1], region, transfer.region)

    def _find(self, transfer: Transfer) -> tuple[TensorReader, Region, int]:
        if self._reader is None:
            raise LayoutError(
                f"{transfer.tensor}: the plan reads {transfer.region} of old rank "
                f"{transfer.source_rank} on this node, which holds no snapshot"
            )
        if transfer.source_rank not in self._held:
            self._held[transfer.source_rank] = _by_tensor(
                [stored.box for stored in self._reader.boxes(transfer.source_rank)]
            )
        regions = self._held[transfer.source_rank].get(transfer.tensor)
        for region, number in regions.containing(transfer.region) if regions else ():
            return self._reader, region, number
        raise LayoutError(
            f"{transfer.tensor}: old rank {transfer.source_rank} holds no box with "
            f"{transfer.region} on this node"
        )


class Places:
    """The memory of this rank's boxes, found by region."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self._held = _by_tensor([target.box for target in targets])

    def check(self, transfer: Transfer) -> None:
        """Refuse a transfer into something that this rank lacks.

        Raises:
            LayoutError: naming it.
        """
        self._find(transfer)

    def parts(self, transfer: Transfer) -> list[torch.Tensor]:
        """The memory a transfer fills: one tensor for every box of this rank that contains it."""
        return [
            self._targets[number].flat.view(region.shape)[
                transfer.region.relative_to(region).slices()
            ]
            for region, number in self._find(transfer)
        ]

    def _find(self, transfer: Transfer) -> list[tuple[Region, int]]:
        regions = self._held.get(transfer.tensor)
        found = regions.containing(transfer.region) if regions else []
        if not found:
            raise LayoutError(
                f"{transfer.tensor}: the plan fills {transfer.region}, which rank "
                f"{transfer.target_rank} does not hold"
            )
        return found


class _Regions:
    """Numbered regions of one tensor, asked which of them contain another one.

    Transfers come in the order of regions, so that the one that was found last, or the next, is
    nearly always right; only where regions overlap do all of them have to be looked at.
    """

    def __init__(self, entries: Sequence[tuple[Region, int]]) -> None:
        self._entries = sorted(entry for entry in entries if not entry[0].is_empty)
        regions = [region for region, _ in self._entries]
        self._overlap = len(regions) > 1 and len(overlapping_pairs(regions, regions)) > len(regions)
        self._last = 0

    def containing(self, wanted: Region) -> list[tuple[Region, int]]:
        entries = self._entries
        if not entries or wanted.ndim != entries[0][0].ndim:
            return []
        if self._overlap:
            return [entry for entry in entries if entry[0].contains(wanted)]
        for step in range(len(entries)):
            number = (self._last + step) % len(entries)
            if entries[number][0].contains(wanted):
                self._last = number
                return [entries[number]]
        return []


def _by_tensor(boxes: Sequence[Box]) -> dict[str, _Regions]:
    table: dict[str, list[tuple[Region, int]]] = {}
    for number, box in enumerate(boxes):
        table.setdefault(box.tensor, []).append((box.region, number))
    return {name: _Regions(entries) for name, entries in table.items()}


def _cut_out(shaped: torch.Tensor, whole: Region, wanted: Region) -> torch.Tensor:
    """The part `wanted` of a tensor that holds `whole`."""
    if wanted == whole:
        return shaped
    return shaped[wanted.relative_to(whole).slices()]
