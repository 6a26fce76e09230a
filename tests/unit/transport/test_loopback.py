"""Ranks as threads keep the contract of every transport."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tenplex_megatron.errors import TransportError
from tenplex_megatron.testing.contracts import RankDiesError, TransportContract, TransportWorld
from tenplex_megatron.transport.loopback import LoopbackTransport


class Threads(TransportWorld):
    def run(
        self, body: Callable[..., Any], num_ranks: int, *args: object, may_die: Sequence[int] = ()
    ) -> list[Any]:
        def live(transport: LoopbackTransport, rank: int) -> object:
            try:
                return body(rank, transport, *args)
            except RankDiesError:
                assert rank in may_die
                transport.leave()
                return None

        with ThreadPoolExecutor(num_ranks) as pool:
            return list(pool.map(live, LoopbackTransport.world(num_ranks), range(num_ranks)))


class TestLoopbackTransport(TransportContract):
    @pytest.fixture
    def world(self) -> TransportWorld:
        return Threads()


def test_a_message_of_another_size_is_refused_with_both_sizes() -> None:
    first, second = LoopbackTransport.world(2)

    def send() -> None:
        with pytest.raises(TransportError, match="rank 1 is gone"):
            first.exchange({1: [torch.zeros(3, dtype=torch.uint8)]}, {}, timeout_s=5)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        with pytest.raises(TransportError, match=r"rank 0 sent 3 bytes, expected 4"):
            second.exchange({}, {0: [torch.zeros(4, dtype=torch.uint8)]}, timeout_s=5)
        second.leave()
        sending.result()
