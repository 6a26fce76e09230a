"""Boxes in motion over a torch process group: gloo between hosts' memory, NCCL between GPUs."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from tenplex_megatron.errors import TransportError
from tenplex_megatron.transport.base import Traffic, Transport

__all__ = ["ProcessGroupTransport"]

# A group takes a timeout of zero for none at all.
_LEAST_WAIT_S = 0.001


class ProcessGroupTransport(Transport):
    """One process group over all ranks of the generation.

    Args:
        group: the group; its backend decides how bytes travel.
        device: where messages must lie for that backend (cpu for gloo, the current GPU for NCCL);
            messages elsewhere are staged through it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        if device == torch.device("cuda"):
            device = torch.device("cuda", torch.cuda.current_device())
        self._group = group
        self._device = device
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self.traffic = Traffic()

    @classmethod
    def open(cls, timeout_s: float) -> "ProcessGroupTransport":
        """A gloo group of its own beside the framework's groups; collective over the world.

        Snapshots lie in host memory, so gloo needs no detour over the GPU, and the framework's
        NCCL communicators stay untouched.
        """
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup)
        return cls(group, torch.device("cpu"))

    def exchange(
        self,
        sends: Mapping[int, Sequence[torch.Tensor]],
        receives: Mapping[int, Sequence[torch.Tensor]],
        *,
        timeout_s: float,
    ) -> None:
        """See `Transport.exchange`."""
        self._exchange(sends, receives, timeout_s)
        for tensor in _flatten(receives):
            self.traffic.received_bytes += tensor.nbytes
        for tensor in _flatten(sends):
            self.traffic.sent_bytes += tensor.nbytes
            self.traffic.messages += 1

    def gather(self, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """See `Transport.gather`; sizes first, then every payload in its own size."""
        size = torch.tensor([len(payload)], dtype=torch.int64, device=self._device)
        sizes = [torch.zeros_like(size) for _ in range(self._size)]
        self._finish(
            f"gathering {len(payload)} bytes from every rank",
            lambda: [dist.all_gather(sizes, size, group=self._group, async_op=True)],
            timeout_s,
        )
        mine = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[: len(payload)]
        rows = [torch.empty(int(count), dtype=torch.uint8) for count in sizes]
        others = [peer for peer in range(self._size) if peer != self._rank]
        self._exchange(
            {peer: [mine] for peer in others}, {peer: [rows[peer]] for peer in others}, timeout_s
        )
        rows[self._rank] = mine
        return [row.numpy().tobytes() for row in rows]

    def agree(self, values: Sequence[int], *, timeout_s: float) -> list[int]:
        """See `Transport.agree`."""
        tensor = torch.tensor(list(values), dtype=torch.int64, device=self._device)
        self._finish(
            f"agreeing on {list(values)}",
            lambda: [dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)],
            timeout_s,
        )
        return [int(value) for value in tensor]

    def _exchange(
        self,
        sends: Mapping[int, Sequence[torch.Tensor]],
        receives: Mapping[int, Sequence[torch.Tensor]],
        timeout_s: float,
    ) -> None:
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        operations: list[dist.P2POp] = []
        operation = partial(dist.P2POp, group=self._group)
        for peer in sorted(receives):
            for tensor in filter(torch.numel, receives[peer]):
                landing = tensor
                if tensor.device != self._device:
                    landing = torch.empty_like(tensor, device=self._device)
                    staged.append((tensor, landing))
                operations.append(operation(dist.irecv, landing, group_peer=peer))
        for peer in sorted(sends):
            for tensor in filter(torch.numel, sends[peer]):
                leaving = tensor.to(self._device)
                operations.append(operation(dist.isend, leaving, group_peer=peer))
        # One batch: NCCL would wait for the first message before it starts the second.
        self._finish(
            f"exchange with ranks {sorted({*sends, *receives})}",
            lambda: dist.batch_isend_irecv(operations) if operations else [],
            timeout_s,
        )
        for tensor, landing in staged:
            tensor.copy_(landing)

    def _finish(
        self, action: str, start: Callable[[], Sequence[dist.Work | None]], timeout_s: float
    ) -> None:
        """Start some work and block until all of it is finished."""
        deadline = time.monotonic() + timeout_s
        try:
            for work in start():
                if work is not None:
                    left = max(_LEAST_WAIT_S, deadline - time.monotonic())
                    work.wait(timedelta(seconds=left))
            if self._device.type == "cuda":
                # Waiting for NCCL only orders the stream; callers reuse their buffers at once.
                torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError as error:
            raise TransportError(
                f"rank {self._rank} of {self._size}: {action} failed within {timeout_s} s: {error}"
            ) from error


def _flatten(messages: Mapping[int, Sequence[torch.Tensor]]) -> Iterable[torch.Tensor]:
    return (tensor for row in messages.values() for tensor in row)
