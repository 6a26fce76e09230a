"""One rank's share of a plan: copy what its node holds, exchange the rest, in bounded memory.

The executor obeys: every transfer of the plan that names this rank is carried out, and a transfer
that names something this rank lacks is an error before anything is written, never skipped.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tenplex_megatron.core.coalesce import message_rounds
from tenplex_megatron.core.plan import ReshardPlan
from tenplex_megatron.execution.boxes import Places, Sources, Target
from tenplex_megatron.execution.copying import copy_all
from tenplex_megatron.execution.staging import Inbox, Outbox
from tenplex_megatron.store.base import TensorReader
from tenplex_megatron.transport.base import Transport

__all__ = ["Movement", "Target", "execute_plan"]


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

    Besides `targets` it needs at most a quarter of this rank's shard of memory (or 64 KiB per
    peer, when that is more).

    Args:
        plan: the same on every rank.
        rank: this rank of the new generation.
        reader: the snapshot on this node; None when this node holds nothing.
        targets: the boxes of this rank, as in the plan's target collection.
        transport: between the ranks of the new generation.
        timeout_s: seconds until a silent peer counts as lost.

    Raises:
        LayoutError: the plan names a box this rank or node lacks; nothing was written.
        TransportError: a peer is gone or silent; what `targets` hold is undefined.
    """
    started = time.monotonic()
    sources = Sources(reader, plan.tensors)
    places = Places(targets)
    for transfer in plan.transfers:
        if transfer.sender_rank == rank:
            sources.number(transfer)
        if transfer.target_rank == rank:
            places.check(transfer)
    local = plan.local_for(rank)
    copy_all(
        (place, part)
        for transfer in local
        for part in [sources.part(transfer)]
        for place in places.parts(transfer)
    )
    sent, received = transport.traffic.sent_bytes, transport.traffic.received_bytes
    outbox, inbox = Outbox(sources), Inbox(places, sources)
    for step in message_rounds(plan, rank):
        receives = {peer: inbox.messages(peer, row) for peer, row in step.receives.items()}
        sends = {peer: outbox.messages(peer, row) for peer, row in step.sends.items()}
        transport.exchange(sends, receives, timeout_s=timeout_s)
        for peer, row in step.receives.items():
            inbox.unpack(row, receives[peer])
    return Movement(
        local_bytes=sum(map(sources.nbytes, local)),
        sent_bytes=transport.traffic.sent_bytes - sent,
        received_bytes=transport.traffic.received_bytes - received,
        seconds=time.monotonic() - started,
    )
