"""Optimizer state exists before the first step without changing it, and its values travel."""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

from tenplex_megatron.adapters.deepspeed.fragments import Fragment, Group, Masters
from tenplex_megatron.adapters.deepspeed.masters import masters_of
from tenplex_megatron.adapters.deepspeed.optimizer import (
    load_optimizer_progress,
    optimizer_progress,
    owned_parameters,
    prepare_state,
)
from tenplex_megatron.errors import LayoutError, UnsupportedLayoutError

OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=True),
    "fused AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, weight_decay=0.1),
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "SGD, Nesterov": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
}


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3, 5), (5,), (1,))
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def grouped(mine: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": mine[:2]}, {"params": mine[2:], "lr": 0.01}]


def step(optimizer: torch.optim.Optimizer, mine: list[torch.nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for parameter in mine:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def keys_of(mine: list[torch.nn.Parameter]) -> dict[int, str]:
    return {id(parameter): str(number) for number, parameter in enumerate(mine)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_prepared_state_takes_the_same_steps(name: str) -> None:
    plain, prepared = parameters(), parameters()
    first, second = OPTIMIZERS[name](grouped(plain)), OPTIMIZERS[name](grouped(prepared))
    prepare_state(masters_of(second))
    for number in range(3):
        step(first, plain, number)
        step(second, prepared, number)
    for mine, other in zip(plain, prepared, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_was_owned_before_the_first_step_is_what_the_steps_update(name: str) -> None:
    mine = parameters()
    masters = masters_of(OPTIMIZERS[name](grouped(mine)))
    prepare_state(masters)
    owned = list(owned_parameters(masters))
    step(masters.base, mine, 0)
    for one in owned:
        assert torch.equal(one.states["master"], one.parameter.detach().view(-1))
        for kind, flat in one.states.items():
            if kind != "master":
                assert torch.equal(flat, masters.base.state[one.parameter][kind].view(-1))
                assert flat.any()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_values_and_steps_go_on_in_another_optimizer(name: str) -> None:
    mine, fresh = parameters(), parameters(seed=1)
    source = masters_of(OPTIMIZERS[name](grouped(mine)))
    target = masters_of(OPTIMIZERS[name](grouped(fresh)))
    prepare_state(source)
    prepare_state(target)
    for number in range(3):
        source.base.param_groups[0]["lr"] *= 0.5
        step(source.base, mine, number)
    progress = json.loads(json.dumps(optimizer_progress(source, keys_of(mine))))
    load_optimizer_progress(target, keys_of(fresh), [progress, progress])
    for theirs, ours in zip(owned_parameters(source), owned_parameters(target), strict=True):
        for kind, flat in ours.states.items():
            flat.copy_(theirs.states[kind])
    assert [group["lr"] for group in target.base.param_groups] == [0.0125, 0.01]
    for number in range(3, 5):
        step(source.base, mine, number)
        step(target.base, fresh, number)
    for one, other in zip(mine, fresh, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_and_empty_parameters_are_not_the_optimizers(name: str) -> None:
    mine = parameters()
    frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    empty = torch.nn.Parameter(torch.zeros(0, 2))
    masters = masters_of(OPTIMIZERS[name]([{"params": [mine[0], frozen, *mine[1:], empty]}]))
    prepare_state(masters)
    step(masters.base, mine, 0)
    (group,) = masters.groups()
    assert [id(one) for one in group.parameters] == [id(one) for one in mine]
    assert [id(one.parameter) for one in owned_parameters(masters)] == [id(one) for one in mine]
    progress = optimizer_progress(masters, keys_of(mine))
    assert progress["groups"][0]["parameters"] == ["0", "1", "2"]
    assert progress["step"] == (None if "SGD" in name else 1.0)


def test_what_is_trained_only_later_is_refused() -> None:
    mine = parameters()
    mine[1].requires_grad = False
    masters = masters_of(torch.optim.AdamW(grouped(mine)))
    prepare_state(masters)
    mine[0].requires_grad = False
    assert [len(group.parameters) for group in masters.groups()] == [1, 1]
    mine[1].requires_grad = True
    with pytest.raises(UnsupportedLayoutError, match=r"of shape \(5,\) was frozen when"):
        masters.groups()


def test_a_group_finds_its_values_by_its_parameters_not_by_its_number() -> None:
    mine, fresh = parameters(), parameters()
    source = masters_of(torch.optim.SGD(grouped(mine), lr=0.1))
    # A pipeline stage that has only the second group.
    target = masters_of(torch.optim.SGD([{"params": fresh[2:]}], lr=0.5))
    keys = {id(fresh[2]): "2"}
    load_optimizer_progress(target, keys, [optimizer_progress(source, keys_of(mine))])
    assert target.base.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one["groups"][0]["values"].update(lr=7.0), "on one rank and"),
        (lambda one: one.update(step=7.0), "step of the optimizer: ranks of the snapshot disagree"),
        (lambda one: one.update(scale={"cur_scale": 2.0}), "loss scale: ranks of the snapshot"),
    ],
)
def test_ranks_that_disagree_are_refused(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    mine = parameters()
    masters = masters_of(torch.optim.AdamW(grouped(mine), lr=0.1))
    prepare_state(masters)
    one = optimizer_progress(masters, keys_of(mine)) | {"scale": {"cur_scale": 1.0}}
    other = copy.deepcopy(one)
    change(other)
    with pytest.raises(LayoutError, match=message):
        load_optimizer_progress(masters, keys_of(mine), [one, other])


def test_a_group_that_was_two_is_refused() -> None:
    mine = parameters()
    progress = optimizer_progress(masters_of(torch.optim.SGD(grouped(mine))), keys_of(mine))
    masters = masters_of(torch.optim.SGD(mine))
    with pytest.raises(LayoutError, match="of 3 parameters was not one group in the snapshot"):
        load_optimizer_progress(masters, keys_of(mine), [progress])


class Scaled(Masters):
    """Nothing but a loss scaler."""

    def __init__(self, scaler: object) -> None:
        self.base = torch.optim.SGD(parameters())
        self._scaler = scaler

    def groups(self) -> tuple[Group, ...]:
        return ()

    def fragments(self) -> Iterator[Fragment]:
        return iter(())

    def refresh(self) -> None:
        raise AssertionError

    @property
    def scaler(self) -> object:
        return self._scaler


def dynamic(scale: float) -> DynamicLossScaler:
    scaler = DynamicLossScaler(scale, 1000, 1, 2, consecutive_hysteresis=False)
    scaler.raise_error_at_min_scale = False
    return scaler


def test_a_dynamic_loss_scale_goes_on_and_a_fixed_one_stays() -> None:
    source, target, fixed = dynamic(2.0**16), dynamic(2.0**32), LossScaler(8.0)
    for overflow in (False, True, False):
        source.cur_iter += 1
        source.cur_hysteresis -= overflow
    progress = optimizer_progress(Scaled(source), {})
    load_optimizer_progress(Scaled(target), {}, [progress])
    assert vars(target) == vars(source)
    load_optimizer_progress(Scaled(fixed), {}, [progress])
    assert fixed.cur_scale == 8.0
    assert optimizer_progress(Scaled(fixed), {})["scale"] is None


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.SGD(parameters(), momentum=0.9, dampening=0.1), "SGD with dampening"),
        (torch.optim.RAdam(parameters()), "optimizer RAdam: its state is not known before"),
        (
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(3, 2).t())]),
            r"a weight of shape \(2, 3\) has strides \(1, 2\)",
        ),
    ],
)
def test_state_nobody_can_prepare_is_refused(
    optimizer: torch.optim.Optimizer, message: str
) -> None:
    with pytest.raises(UnsupportedLayoutError, match=message):
        prepare_state(masters_of(optimizer))


def test_an_optimizer_class_nobody_described_is_refused() -> None:
    with pytest.raises(UnsupportedLayoutError, match="optimizer OneBitAdam: its state is not"):
        masters_of(type("OneBitAdam", (), {})())
