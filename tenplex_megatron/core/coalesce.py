"""How is a plan's remote traffic cut into messages, so that few bytes are in flight at once?

Pure, and computed alike on both ends of every pair: round `i` of a pair has the same transfers, in
the same order, for its sender and its receiver.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tenplex_megatron.core.plan import ReshardPlan, Transfer
from tenplex_megatron.core.region import Region

__all__ = ["Round", "cut_into_messages", "message_rounds"]

MESSAGE_BYTES = 8 << 20
SMALLEST_MESSAGE_BYTES = 64 << 10
ALONE_BYTES = 64 << 10
"""A transfer of this size is a message of its own, so that it needs no packing."""
STAGING_FRACTION = 8
"""Messages in flight take at most 1/8 of a rank's own shard in each direction."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one rank sends and receives at the same time: peer -> transfers, in order."""

    sends: Mapping[int, tuple[Transfer, ...]] = field(default_factory=dict)
    receives: Mapping[int, tuple[Transfer, ...]] = field(default_factory=dict)


def message_rounds(plan: ReshardPlan, rank: int) -> Iterator[Round]:
    """The rounds of one rank.

    Every rank walks its own rounds in order; row `i` of every pair is in round `i` of both.
    """
    itemsize = {name: spec.itemsize for name, spec in plan.tensors.items()}
    pairs: dict[tuple[int, int], list[Transfer]] = {}
    shard_bytes: dict[int, int] = {}
    for transfer in plan.transfers:
        nbytes = transfer.region.numel * itemsize[transfer.tensor]
        shard_bytes[transfer.target_rank] = shard_bytes.get(transfer.target_rank, 0) + nbytes
        if transfer.sender_rank != transfer.target_rank:
            pair = (transfer.sender_rank, transfer.target_rank)
            pairs.setdefault(pair, []).append(transfer)
    messages = {
        pair: _messages(transfers, _budget(pair, pairs, shard_bytes), itemsize)
        for pair, transfers in pairs.items()
        if rank in pair
    }
    for number in range(max(map(len, messages.values()), default=0)):
        current = {pair: rows[number] for pair, rows in messages.items() if number < len(rows)}
        yield Round(
            sends={target: row for (sender, target), row in current.items() if sender == rank},
            receives={sender: row for (sender, target), row in current.items() if target == rank},
        )


def cut_into_messages(
    transfers: Sequence[Transfer], nbytes: Callable[[Transfer], int]
) -> tuple[tuple[Transfer, ...], ...]:
    """One pair's transfers of one round as messages: large ones alone, the others together."""
    alone = [transfer for transfer in transfers if nbytes(transfer) >= ALONE_BYTES]
    together = tuple(transfer for transfer in transfers if nbytes(transfer) < ALONE_BYTES)
    return (*((transfer,) for transfer in alone), *([together] if together else []))


def _budget(
    pair: tuple[int, int],
    pairs: Mapping[tuple[int, int], Sequence[Transfer]],
    shard_bytes: Mapping[int, int],
) -> int:
    """Bytes per message: the staging share of either end, divided by the peers it talks to."""
    sender, target = pair
    fan_out = sum(1 for other, _ in pairs if other == sender)
    fan_in = sum(1 for _, other in pairs if other == target)
    smallest_share = min(
        shard_bytes.get(sender, shard_bytes[target]) // fan_out, shard_bytes[target] // fan_in
    )
    return max(SMALLEST_MESSAGE_BYTES, min(MESSAGE_BYTES, smallest_share // STAGING_FRACTION))


def _messages(
    transfers: Sequence[Transfer], budget: int, itemsize: Mapping[str, int]
) -> list[tuple[Transfer, ...]]:
    """Wide items first, so that every part of a message starts aligned for its type."""
    messages: list[tuple[Transfer, ...]] = []
    current: list[Transfer] = []
    room = budget
    for transfer in sorted(transfers, key=lambda one: (-itemsize[one.tensor], one)):
        size = itemsize[transfer.tensor]
        for region in _cut(transfer.region, max(1, budget // size)):
            nbytes = region.numel * size
            if nbytes > room and current:
                messages.append(tuple(current))
                current, room = [], budget
            current.append(replace(transfer, region=region))
            room -= nbytes
    return [*messages, tuple(current)] if current else messages


def _cut(region: Region, most: int) -> Iterator[Region]:
    """Pieces of a region of at most `most` elements each, in row-major order.

    >>> [piece.start for piece in _cut(Region((0, 0), (2, 3)), 2)]
    [(0, 0), (0, 2), (1, 0), (1, 2)]
    """
    if region.numel <= most:
        yield region
        return
    dim = next(d for d, size in enumerate(region.shape) if size > 1)
    step = max(1, most // (region.numel // region.shape[dim]))
    for low in range(region.start[dim], region.stop[dim], step):
        high = min(low + step, region.stop[dim])
        start = (*region.start[:dim], low, *region.start[dim + 1 :])
        stop = (*region.stop[:dim], high, *region.stop[dim + 1 :])
        yield from _cut(Region(start, stop), most)
