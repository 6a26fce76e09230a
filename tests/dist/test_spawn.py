"""`run_ranks` gives every rank's result, or the one error that came first."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tenplex_megatron.testing.spawn import RankError, run_ranks


def sum_of_ranks(rank: int, offset: int) -> float:
    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    return value.item()


def fail_on_one(rank: int, failing: int) -> None:
    if rank == failing:
        raise ValueError(f"wrong on purpose on {rank}")
    dist.barrier()


def die_on_one(rank: int, dying: int) -> str:
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError:
        return "saw it"
    return "saw nothing"


def return_early(rank: int, early: int) -> int:
    if rank != early:
        time.sleep(0.3)
        dist.barrier(group=dist.new_group([r for r in range(3) if r != early]))
    else:
        dist.new_group([r for r in range(3) if r != early])
    return rank


class UnpicklableError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.handle = lambda: second


def raise_unpicklable(rank: int) -> None:
    raise UnpicklableError(f"stuck on {rank}", "here")


def hang_on_one(rank: int, hanging: int) -> None:
    while rank == hanging:
        time.sleep(0.1)


def identity(rank: int, value: object) -> object:
    return value


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_results_come_in_rank_order_from_one_group(num_ranks: int) -> None:
    total = sum(range(num_ranks)) + 10 * num_ranks
    assert run_ranks(sum_of_ranks, num_ranks, 60, 10) == [total] * num_ranks


@pytest.mark.parametrize("failing", [0, 2])
def test_the_first_error_is_raised_with_its_rank_and_traceback(failing: int) -> None:
    with pytest.raises(RankError, match=f"rank {failing} of 3: ValueError: wrong on purpose") as e:
        run_ranks(fail_on_one, 3, 60, failing)
    assert e.value.rank == failing
    assert isinstance(e.value.__cause__, ValueError)
    assert "in fail_on_one" in str(e.value)


def test_an_error_that_cannot_be_pickled_is_raised_with_its_traceback() -> None:
    with pytest.raises(RankError, match="UnpicklableError: stuck on 0") as e:
        run_ranks(raise_unpicklable, 1, 60)
    assert e.value.__cause__ is None


def test_a_killed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(RankError, match="rank 1 of 2: died of SIGKILL"):
        run_ranks(die_on_one, 2, 60, 1)


def test_a_death_that_is_part_of_the_test_is_no_error() -> None:
    assert run_ranks(die_on_one, 3, 60, 1, may_die=[1]) == ["saw it", None, "saw it"]


def test_a_rank_that_returns_early_stays_in_the_group() -> None:
    assert run_ranks(return_early, 3, 60, 0) == [0, 1, 2]


def test_a_hanging_rank_is_killed_and_its_place_shown() -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 ran past 2 s(.|\n)*hang_on_one"):
        run_ranks(hang_on_one, 2, 2, 1)
    assert time.monotonic() - started < 10


def test_tensors_travel_as_values() -> None:
    got = run_ranks(identity, 2, 60, torch.arange(4))
    assert all(torch.equal(value, torch.arange(4)) for value in got)
