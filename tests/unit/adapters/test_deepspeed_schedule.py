"""Learning-rate schedules go on, also where a rank has other parameter groups."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupDecayLR, WarmupLR
from torch.optim import lr_scheduler

from tenplex_megatron.adapters.deepspeed.schedule import load_schedule, schedule_progress
from tenplex_megatron.errors import LayoutError

STEPS, MORE = 3, 4
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda sgd: lr_scheduler.LambdaLR(sgd, lambda step: 0.9**step),
    "steps": lambda sgd: lr_scheduler.MultiStepLR(sgd, [2, 5]),
    "cosine": lambda sgd: lr_scheduler.CosineAnnealingLR(sgd, 10),
    "one cycle": lambda sgd: lr_scheduler.OneCycleLR(sgd, [0.1] * len(sgd.param_groups), 10),
    "warm-up": lambda sgd: WarmupLR(sgd, warmup_num_steps=5),
    "warm-up and decay": lambda sgd: WarmupDecayLR(sgd, 10, warmup_num_steps=3),
}


def optimizer(rates: tuple[float, ...] = (0.1, 0.2)) -> torch.optim.SGD:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups)


def rates_after(scheduler: lr_scheduler.LRScheduler, steps: int) -> list[list[float]]:
    rates = []
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()
        rates.append([group["lr"] for group in scheduler.optimizer.param_groups])
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on(name: str) -> None:
    source, target = (SCHEDULES[name](optimizer()) for _ in range(2))
    rates_after(source, STEPS)
    load_schedule(target, [schedule_progress(source)] * 2)
    for mine, theirs in zip(
        target.optimizer.param_groups, source.optimizer.param_groups, strict=True
    ):
        mine.update({key: value for key, value in theirs.items() if key != "params"})
    assert rates_after(target, MORE) == rates_after(source, MORE)


def test_a_rank_with_other_groups_keeps_what_is_per_group() -> None:
    whole, first, last = (
        SCHEDULES["lambda"](optimizer(rates)) for rates in ((0.1, 0.2), (0.1,), (0.2,))
    )
    for scheduler in (first, last):
        rates_after(scheduler, STEPS)
    stored = [json.loads(json.dumps(schedule_progress(one))) for one in (first, last)]
    load_schedule(whole, stored)
    assert whole.last_epoch == STEPS
    expected = [rate for one in (first, last) for rate in rates_after(one, 1)[0]]
    assert rates_after(whole, 1) == [expected]


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


def test_a_tensor_of_one_element_is_a_number() -> None:
    scheduler = SCHEDULES["lambda"](optimizer())
    scheduler.best = torch.tensor(0.5)
    assert schedule_progress(scheduler)["best"] == 0.5
