"""Learning-rate schedules go on, also where a rank has other parameter groups."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from deepspeed.runtime.lr_schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from torch.optim import lr_scheduler

from tenplex_megatron.adapters.deepspeed.schedule import load_schedule, schedule_progress
from tenplex_megatron.errors import LayoutError
from tenplex_megatron.store.values import decode_value, encode_value

STEPS, MORE = 3, 4


class Decay:
    def __init__(self, base: float) -> None:
        self.base = base

    def __call__(self, step: int) -> float:
        return self.base**step


def in_turn(
    sgd: torch.optim.Optimizer, then: lr_scheduler.LRScheduler, milestone: int
) -> lr_scheduler.LRScheduler:
    return lr_scheduler.SequentialLR(
        sgd, [lr_scheduler.LinearLR(sgd, total_iters=2), then], [milestone]
    )


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda sgd: lr_scheduler.LambdaLR(sgd, lambda step: 0.9**step),
    "object": lambda sgd: lr_scheduler.LambdaLR(sgd, Decay(0.9)),
    "steps": lambda sgd: lr_scheduler.MultiStepLR(sgd, [2, 5]),
    "cosine": lambda sgd: lr_scheduler.CosineAnnealingLR(sgd, 10),
    "cyclic": lambda sgd: lr_scheduler.CyclicLR(sgd, 0.1, 0.5, 3, cycle_momentum=False),
    "one cycle": lambda sgd: lr_scheduler.OneCycleLR(sgd, [0.1] * len(sgd.param_groups), 10),
    "in turn": lambda sgd: in_turn(sgd, lr_scheduler.CosineAnnealingLR(sgd, 10), 2),
    "in turn, later": lambda sgd: in_turn(sgd, lr_scheduler.MultiStepLR(sgd, [2, 5]), STEPS + 1),
    "chained": lambda sgd: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(sgd, total_iters=2), lr_scheduler.ExponentialLR(sgd, 0.9)]
    ),
    "warm-up": lambda sgd: WarmupLR(sgd, warmup_num_steps=5),
    "warm-up and decay": lambda sgd: WarmupDecayLR(sgd, 10, warmup_num_steps=3),
    "warm-up and cosine": lambda sgd: WarmupCosineLR(sgd, 10, warmup_num_steps=3),
    "DeepSpeed's cycle": lambda sgd: OneCycle(sgd, 0.1, 0.5, cycle_first_step_size=3),
    "range test": lambda sgd: LRRangeTest(sgd, lr_range_test_step_size=2),
}


def optimizer(rates: Sequence[Any] = (0.1, 0.2)) -> torch.optim.SGD:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups)


def rates_after(scheduler: lr_scheduler.LRScheduler, steps: int) -> list[list[float]]:
    rates = []
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()
        rates.append([float(group["lr"]) for group in scheduler.optimizer.param_groups])
    return rates


def take(
    target: lr_scheduler.LRScheduler,
    sources: Sequence[lr_scheduler.LRScheduler],
    groups: Sequence[dict[str, Any]],
) -> None:
    """Go on from a snapshot of `sources`; `groups` are theirs that `target` has."""
    stored = [decode_value(encode_value(schedule_progress(source))) for source in sources]
    load_schedule(target, stored)
    for mine, theirs in zip(target.optimizer.param_groups, groups, strict=True):
        for key, value in theirs.items():
            if isinstance(value, torch.Tensor):
                mine[key].copy_(value)
            elif key != "params":
                mine[key] = value


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on(name: str) -> None:
    source, target = (SCHEDULES[name](optimizer()) for _ in range(2))
    rates_after(source, STEPS)
    take(target, [source] * 2, source.optimizer.param_groups)
    assert rates_after(target, MORE) == rates_after(source, MORE)


@pytest.mark.parametrize("name", SCHEDULES)
def test_it_goes_on_where_a_rank_has_other_groups(name: str) -> None:
    source, target = (
        [SCHEDULES[name](optimizer(rates)) for rates in ((0.1, 0.2), (0.1,), (0.2,))]
        for _ in range(2)
    )
    for scheduler in source:
        rates_after(scheduler, STEPS)
    whole, *stages = source
    take(target[0], stages, [stage.optimizer.param_groups[0] for stage in stages])
    for stage, group in zip(target[1:], whole.optimizer.param_groups, strict=True):
        take(stage, [whole], [group])
    expected = rates_after(whole, MORE)
    assert rates_after(target[0], MORE) == expected
    apart = zip(*(rates_after(stage, MORE) for stage in target[1:]), strict=True)
    assert [first + last for first, last in apart] == expected


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates_may_be_tensors(name: str) -> None:
    source, target = (SCHEDULES[name](optimizer([torch.tensor(0.1)])) for _ in range(2))
    rates_after(source, STEPS)
    take(target, [source], source.optimizer.param_groups)
    assert rates_after(target, MORE) == rates_after(source, MORE)


def test_inner_schedules_at_different_steps_are_refused() -> None:
    one, other = (SCHEDULES["chained"](optimizer()) for _ in range(2))
    other._schedulers[1].last_epoch = 7
    message = r"ranks of the snapshot disagree on _schedulers\[1\].last_epoch: \[0, 7"
    with pytest.raises(LayoutError, match=message):
        load_schedule(one, [schedule_progress(one), schedule_progress(other)])


def test_another_number_of_inner_schedules_is_refused() -> None:
    source = SCHEDULES["chained"](optimizer([0.1]))
    rates_after(source, STEPS)
    target = lr_scheduler.ChainedScheduler(source._schedulers[:1])
    state = schedule_progress(source)
    target._schedulers[0].last_epoch = 0
    message = r"_schedulers: this rank has 1 of them, ranks of the snapshot \[2\]; keep"
    with pytest.raises(LayoutError, match=message):
        load_schedule(target, [state])


def test_only_what_there_is_for_every_group_may_differ() -> None:
    one, other = (SCHEDULES["lambda"](optimizer()) for _ in range(2))
    one.seen, other.seen = [1], [2]
    with pytest.raises(LayoutError, match=r"disagree on seen: \[\[1\], \[2\]\]"):
        load_schedule(one, [schedule_progress(one), schedule_progress(other)])


def test_ranks_at_different_steps_are_refused() -> None:
    one, other = (SCHEDULES["lambda"](optimizer()) for _ in range(2))
    rates_after(other, 1)
    with pytest.raises(LayoutError, match="ranks of the snapshot disagree on last_epoch: \\[0, 1"):
        load_schedule(one, [schedule_progress(one), schedule_progress(other)])


def test_no_schedule_is_none() -> None:
    assert schedule_progress(None) is None
    load_schedule(None, [{"last_epoch": 3}])
    scheduler = SCHEDULES["lambda"](optimizer())
    load_schedule(scheduler, [None])
    assert scheduler.last_epoch == 0


def test_a_tensor_is_numbers_in_a_snapshot_and_a_tensor_again() -> None:
    source, target = (SCHEDULES["lambda"](optimizer()) for _ in range(2))
    source.best, target.best = torch.tensor([0.5, 2.0]), torch.tensor([1.0, 1.0])
    assert schedule_progress(source)["best"] == [0.5, 2.0]
    load_schedule(target, [schedule_progress(source)])
    assert torch.equal(target.best, source.best)
