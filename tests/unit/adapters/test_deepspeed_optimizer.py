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

OPTIM = torch.optim
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: OPTIM.AdamW(groups, lr=0.1, weight_decay=0.1),
    "Adam": lambda groups: OPTIM.Adam(groups, lr=0.1, amsgrad=True),
    "fused AdamW": lambda groups: OPTIM.AdamW(groups, lr=0.1, fused=True),
    "NAdam": lambda groups: OPTIM.NAdam(groups, lr=0.1, weight_decay=0.1),
    "RAdam": lambda groups: OPTIM.RAdam(groups, lr=0.1, decoupled_weight_decay=True),
    "Adamax": lambda groups: OPTIM.Adamax(groups, lr=0.1),
    "Adadelta": lambda groups: OPTIM.Adadelta(groups, lr=0.1, weight_decay=0.1),
    "Adagrad": lambda groups: OPTIM.Adagrad(groups, lr=0.1, lr_decay=0.1),
    "Adagrad, filled": lambda groups: OPTIM.Adagrad(groups, 0.1, initial_accumulator_value=0.3),
    "fused Adagrad": lambda groups: OPTIM.Adagrad(groups, lr=0.1, fused=True),
    "RMSprop": lambda groups: OPTIM.RMSprop(groups, lr=0.1),
    "RMSprop with momentum": lambda groups: OPTIM.RMSprop(groups, lr=0.1, momentum=0.9),
    "RMSprop, centered": lambda groups: OPTIM.RMSprop(groups, 0.1, momentum=0.9, centered=True),
    "Rprop": lambda groups: OPTIM.Rprop(groups, lr=0.1),
    "Rprop, large": lambda groups: OPTIM.Rprop(groups, lr=0.1, step_sizes=(1e-6, 0.05)),
    "ASGD": lambda groups: OPTIM.ASGD(groups, lr=0.1, lambd=0.1),
    "ASGD, averaging": lambda groups: OPTIM.ASGD(groups, lr=0.1, t0=1.0, weight_decay=0.1),
    "SGD": lambda groups: OPTIM.SGD(groups, lr=0.1, weight_decay=0.1),
    "SGD with momentum": lambda groups: OPTIM.SGD(groups, lr=0.1, momentum=0.9),
    "SGD, Nesterov": lambda groups: OPTIM.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "SGD, damped": lambda groups: OPTIM.SGD(groups, lr=0.1, momentum=0.9, dampening=0.3),
    "fused SGD, damped": lambda groups: OPTIM.SGD(groups, 0.1, 0.9, 0.3, fused=True),
    "SGD, damped alone": lambda groups: OPTIM.SGD(groups, lr=0.1, dampening=0.3),
}


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3, 5), (5,), (1,), (), (37,))
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def grouped(mine: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": mine[:2]}, {"params": mine[2:], "lr": 0.01}]


class Cut(Masters):
    """Every group is one flat tensor in some parts, as ZeRO cuts it."""

    def __init__(self, name: str, mine: list[torch.nn.Parameter], parts: int) -> None:
        self._groups = [group["params"] for group in grouped(mine)]
        flats = [torch.cat([one.detach().view(-1) for one in group]) for group in self._groups]
        cut = [
            {**group, "params": [part.clone() for part in flat.tensor_split(parts) if len(part)]}
            for group, flat in zip(grouped(mine), flats, strict=True)
        ]
        self.base = OPTIMIZERS[name](cut)

    def groups(self) -> tuple[Group, ...]:
        return tuple(
            Group(values, tuple(group), tuple(values["params"]))
            for group, values in zip(self._groups, self.base.param_groups, strict=True)
        )

    def fragments(self) -> Iterator[Fragment]:
        for group in self.groups():
            first = 0
            for master in group.masters:
                offset = 0
                for one in group.parameters:
                    low, high = max(offset, first), min(offset + one.numel(), first + len(master))
                    if low < high:
                        yield Fragment(one, low - offset, high - offset, master, low - first)
                    offset += one.numel()
                first += len(master)

    def refresh(self) -> None:
        raise AssertionError


def of(name: str, mine: list[torch.nn.Parameter], parts: int) -> Masters:
    """An optimizer of two groups, over the parameters themselves or over parts of flat ones."""
    return Cut(name, mine, parts) if parts else masters_of(OPTIMIZERS[name](grouped(mine)))


def step(masters: Masters, mine: list[torch.nn.Parameter], number: int) -> None:
    """One step of a schedule, with the same gradients however parameters are cut."""
    generator = torch.Generator().manual_seed(100 + number)
    gradients = {id(one): torch.randn(one.numel(), generator=generator) for one in mine}
    gradients[id(mine[0])][0] = -0.0
    for one in masters.fragments():
        if one.master.grad is None:
            one.master.grad = torch.zeros_like(one.master)
        part = one.master.grad.view(-1)[one.offset :][: one.stop - one.start]
        part.copy_(gradients[id(one.parameter)][one.start : one.stop])
    masters.base.param_groups[0]["lr"] = 0.05 + 0.02 * number
    masters.base.step()


def keys_of(mine: list[torch.nn.Parameter]) -> dict[int, str]:
    return {id(parameter): str(number) for number, parameter in enumerate(mine)}


def tensors(masters: Masters, mine: list[torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Every tensor of the state, whole and as bits."""
    found: dict[str, torch.Tensor] = {}
    for one in owned_parameters(masters):
        for kind, flat in one.states.items():
            whole = torch.zeros(one.parameter.numel(), dtype=torch.int32)
            name = f"{kind}/{keys_of(mine)[id(one.parameter)]}"
            found.setdefault(name, whole)[one.start : one.stop] = flat.view(torch.int32)
    return found


def unlike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_prepared_optimizer_takes_the_first_steps_of_one_that_is_not(name: str) -> None:
    plain, prepared = parameters(), parameters()
    first, second = of(name, plain, 0), of(name, prepared, 0)
    prepare_state(second)
    for number in range(3):
        step(first, plain, number)
        step(second, prepared, number)
        assert unlike(tensors(first, plain), tensors(second, prepared)) == []
        for one, other in zip(plain, prepared, strict=True):
            mine, theirs = first.base.state[one], dict(second.base.state[other])
            theirs.pop("started", None)
            assert mine.keys() == theirs.keys()
            for key, value in mine.items():
                assert value.dtype == theirs[key].dtype
                assert torch.equal(value, theirs[key])
        assert plain_groups(first) == plain_groups(second)


def plain_groups(masters: Masters) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in masters.base.param_groups
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_was_owned_before_the_first_step_is_what_the_steps_update(name: str) -> None:
    mine = parameters()
    masters = of(name, mine, 0)
    prepare_state(masters)
    owned = list(owned_parameters(masters))
    for number in range(3):
        step(masters, mine, number)
    for one in owned:
        assert torch.equal(one.states["master"], one.parameter.detach().view(-1))
        for kind, flat in one.states.items():
            if kind != "master":
                assert torch.equal(flat, masters.base.state[one.parameter][kind].view(-1))
                assert flat.any()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("taken", "taken_before_import"), [(0, 1), (1, 0), (3, 0)])
@pytest.mark.parametrize(("parts", "other_parts"), [(0, 3), (3, 0), (3, 3)])
def test_a_job_goes_on_bit_for_bit_in_an_optimizer_that_is_cut_otherwise(
    name: str, taken: int, taken_before_import: int, parts: int, other_parts: int
) -> None:
    mine, others = parameters(), parameters(seed=1)
    source, target = of(name, mine, parts), of(name, others, other_parts)
    prepare_state(source)
    prepare_state(target)
    for number in range(taken):
        step(source, mine, number)
    for number in range(taken_before_import):
        step(target, others, number)
    progress = json.loads(json.dumps(optimizer_progress(source, keys_of(mine))))
    load_optimizer_progress(target, keys_of(others), [progress, progress])
    stored = tensors(source, mine)
    for one in owned_parameters(target):
        for kind, flat in one.states.items():
            whole = stored[f"{kind}/{keys_of(others)[id(one.parameter)]}"].view(torch.float32)
            flat.copy_(whole[one.start : one.stop])
    assert unlike(tensors(source, mine), tensors(target, others)) == []
    for number in range(taken, taken + 3):
        step(source, mine, number)
        step(target, others, number)
        uninterrupted, resumed = tensors(source, mine), tensors(target, others)
        if "fused" not in name or parts == other_parts:
            assert unlike(uninterrupted, resumed) == []
        # These kernels of torch round by the place of an element, with or without an import.
        for key, bits in uninterrupted.items():
            torch.testing.assert_close(bits.view(torch.float32), resumed[key].view(torch.float32))
    assert plain_groups(source) == plain_groups(target)
    assert optimizer_progress(source, keys_of(mine)) == optimizer_progress(target, keys_of(others))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_and_empty_parameters_are_not_the_optimizers(name: str) -> None:
    mine = parameters()
    frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    empty = torch.nn.Parameter(torch.zeros(0, 2))
    masters = masters_of(OPTIMIZERS[name]([{"params": [mine[0], frozen, *mine[1:], empty]}]))
    prepare_state(masters)
    step(masters, mine, 0)
    (group,) = masters.groups()
    assert [id(one) for one in group.parameters] == [id(one) for one in mine]
    assert [id(one.parameter) for one in owned_parameters(masters)] == [id(one) for one in mine]
    (stored,) = optimizer_progress(masters, keys_of(mine))["groups"]
    assert stored["parameters"] == ["0", "1", "2", "3", "4"]
    assert stored["numbers"].get("step") == (None if "SGD" in name and name[0] != "A" else 1.0)


def test_what_is_trained_only_later_is_refused() -> None:
    mine = parameters()
    mine[1].requires_grad = False
    masters = masters_of(torch.optim.AdamW(grouped(mine)))
    prepare_state(masters)
    mine[0].requires_grad = False
    assert [len(group.parameters) for group in masters.groups()] == [1, 3]
    mine[1].requires_grad = True
    with pytest.raises(UnsupportedLayoutError, match=r"of shape \(5,\) was frozen when"):
        masters.groups()


def test_a_group_finds_its_values_by_its_parameters_not_by_its_number() -> None:
    mine, fresh = parameters(), parameters()
    source = masters_of(torch.optim.SGD(grouped(mine), lr=0.1))
    # A pipeline stage that has only the second group.
    target = masters_of(torch.optim.SGD([{"params": fresh[2:]}], lr=0.5))
    load_optimizer_progress(target, keys_of(fresh), [optimizer_progress(source, keys_of(mine))])
    assert target.base.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one["groups"][0]["values"].update(lr=7.0), "on one rank and"),
        (lambda one: one["groups"][0]["numbers"].update(step=7.0), "on one rank and"),
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
    with pytest.raises(LayoutError, match="of 5 parameters was not one group in the snapshot"):
        load_optimizer_progress(masters, keys_of(mine), [progress])


def test_an_optimizer_that_counts_what_the_snapshot_lacks_is_refused() -> None:
    mine = parameters()
    source = of("AdamW", mine, 0)
    prepare_state(source)
    target = of("NAdam", mine, 0)
    prepare_state(target)
    with pytest.raises(LayoutError, match=r"NAdam needs \['mu_product'\] of .* holds \['step'\]"):
        load_optimizer_progress(target, keys_of(mine), [optimizer_progress(source, keys_of(mine))])


def test_numbers_that_differ_within_a_group_are_refused() -> None:
    mine = parameters()
    masters = of("NAdam", mine, 0)
    prepare_state(masters)
    masters.base.state[mine[0]]["mu_product"].fill_(0.5)
    with pytest.raises(LayoutError, match=r"the optimizer's mu_product differs .* \[0.5, 1.0\]"):
        optimizer_progress(masters, keys_of(mine))


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
        *(
            (
                optimizer,
                rf"optimizer {type(optimizer).__name__}: .* expected .*\(Adam, AdamW, NAdam",
            )
            for optimizer in (
                OPTIM.LBFGS(parameters()),
                OPTIM.Adafactor(parameters()),
                OPTIM.SparseAdam(parameters()),
                OPTIM.Muon([torch.nn.Parameter(torch.zeros(2, 2))]),
                type("Own", (OPTIM.AdamW,), {})(parameters()),
            )
        ),
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
