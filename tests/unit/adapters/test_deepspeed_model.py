"""Buffers are kept and set whatever tensors a model puts in their place."""

from collections.abc import Callable

import pytest
import torch

from tenplex_megatron.adapters.deepspeed.model import Buffers
from tenplex_megatron.errors import LayoutError


class Averages(torch.nn.Module):
    """Two buffers, one in a part of the model, and what was in the first one before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("derived", torch.zeros(9), persistent=False)
        self.inner = torch.nn.Module()
        self.inner.register_buffer("count", torch.tensor(0))
        self.history: list[torch.Tensor] = []

    def forward(self, sample: torch.Tensor) -> None:
        self.history.append(self.mean)
        self.mean = 0.5 * self.mean + 0.5 * sample
        self.inner.count += 1


def copied(model: torch.nn.Module) -> Buffers:
    copies = {name: one.clone().view(-1) for name, one in model.state_dict().items()}
    return Buffers(model, copies)


def test_copies_follow_what_the_model_has_now_and_change_nothing_else() -> None:
    model = Averages()
    buffers = copied(model)
    for number in (1.0, 3.0):
        model(torch.full((3,), number))
        buffers.refresh()
        assert {name: one.tolist() for name, one in buffers.copies.items()} == {
            "mean": model.mean.tolist(),
            "inner.count": [int(number + 1) // 2],
        }
    assert [one.tolist() for one in model.history] == [[0.0] * 3, [0.5] * 3]


def test_a_model_gets_what_the_copies_hold() -> None:
    model, other = Averages(), Averages()
    model(torch.ones(3))
    buffers = copied(other)
    for name, one in model.state_dict().items():
        buffers.copies[name].copy_(one.view(-1))
    buffers.restore()
    for name, one in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], one)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model, "mean", torch.zeros(4)), "buffer mean: 3 elements of .*, 4"),
        (
            lambda model: setattr(model, "mean", model.mean.half()),
            "now; expected buffers that keep",
        ),
        (lambda model: setattr(model, "mean", None), "buffer mean: 3 elements .*, missing now"),
        (lambda model: model.register_buffer("late", torch.ones(1)), "buffer late: missing when"),
    ],
)
def test_other_buffers_are_refused(change: Callable[[torch.nn.Module], None], message: str) -> None:
    model = Averages()
    buffers = copied(model)
    change(model)
    with pytest.raises(LayoutError, match=message):
        buffers.refresh()
