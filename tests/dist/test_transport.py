"""Ranks as gloo processes keep the contract of every transport; a killed one is noticed."""

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tenplex_megatron.testing.contracts import RankDiesError, TransportContract, TransportWorld
from tenplex_megatron.testing.spawn import run_ranks
from tenplex_megatron.transport.process_group import ProcessGroupTransport


def live(rank: int, body: Callable[..., Any], args: tuple[object, ...]) -> object:
    transport = ProcessGroupTransport.open(timeout_s=60)
    try:
        return body(rank, transport, *args)
    except RankDiesError:
        os.kill(os.getpid(), signal.SIGKILL)


class GlooProcesses(TransportWorld):
    def run(
        self, body: Callable[..., Any], num_ranks: int, *args: object, may_die: Sequence[int] = ()
    ) -> list[Any]:
        return run_ranks(live, num_ranks, 60.0, body, args, may_die=may_die)


class TestProcessGroupTransport(TransportContract):
    @pytest.fixture
    def world(self) -> TransportWorld:
        return GlooProcesses()
