"""Boxes in motion over a torch process group: gloo between hosts' memory, NCCL between GPUs."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from tenplex_megatron.errors import TransportError
from tenplex_megatron.transport.base import Traffic, Transport

__all__ = ["ProcessGroupTransport"]


class ProcessGroupTransport(Transport):
    """One process group over all ranks of the generation.

    Args:
        group: the group; its backend decides how bytes travel.
        device: where messages must lie for that backend (cpu for gloo, the current GPU for NCCL);
            messages elsewhere are staged through it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
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
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        works = []
        try:
            for peer in sorted(receives):
                for tensor in receives[peer]:
                    landing = tensor
                    if tensor.device != self._device:
                        landing = torch.empty_like(tensor, device=self._device)
                        staged.append((tensor, landing))
                    works.append(dist.irecv(landing, group=self._group, group_src=peer))
                    self.traffic.received_bytes += tensor.numel()
            for peer in sorted(sends):
                for tensor in sends[peer]:
                    leaving = tensor.to(self._device)
                    works.append(dist.isend(leaving, group=self._group, group_dst=peer))
                    self.traffic.sent_bytes += tensor.numel()
                    self.traffic.messages += 1
            for work in works:
                if work is not None:
                    work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TransportError(
                f"rank {self._rank} of {self._size}: exchange with ranks "
                f"{sorted({*sends, *receives})} failed: {error}"
            ) from error
        for tensor, landing in staged:
            tensor.copy_(landing)

    def gather(self, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """See `Transport.gather`."""
        mine = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        try:
            dist.all_gather(sizes, torch.tensor([len(payload)]), group=self._group)
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest or 1, dtype=torch.uint8)
            padded[: len(payload)] = mine[: len(payload)]
            rows = [torch.empty_like(padded) for _ in range(self._size)]
            dist.all_gather(rows, padded, group=self._group)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self._rank} of {self._size}: gathering {len(payload)} bytes from every "
                f"rank failed within {timeout_s} s: {error}"
            ) from error
        return [row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def agree(self, values: Sequence[int], *, timeout_s: float) -> list[int]:
        """See `Transport.agree`."""
        tensor = torch.tensor(list(values), dtype=torch.int64)
        try:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self._rank} of {self._size}: agreeing on the next step failed within "
                f"{timeout_s} s: {error}"
            ) from error
        return [int(value) for value in tensor]
