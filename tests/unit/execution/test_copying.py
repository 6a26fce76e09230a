"""A copy is a copy, whatever the size, the type, and where the two memories begin."""

import warnings

import pytest
import torch

from tenplex_megatron.execution.copying import copy_into, read_only_bytes

LARGE = (1 << 20) + 8


@pytest.mark.parametrize("nbytes", [0, 8, LARGE])
@pytest.mark.parametrize("offset", [0, 8, 64, 1024, 4096])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_all_bytes_arrive_and_no_other_is_touched(
    nbytes: int, offset: int, dtype: torch.dtype
) -> None:
    source = (torch.arange(nbytes + 4096) % 251).to(torch.uint8)[:nbytes].view(dtype)
    memory = torch.full((nbytes + 8192,), 255, dtype=torch.uint8)
    copy_into(memory[offset : offset + nbytes].view(dtype), source)
    assert torch.equal(memory[offset : offset + nbytes], source.view(torch.uint8))
    assert bool((memory[:offset] == 255).all())
    assert bool((memory[offset + nbytes :] == 255).all())


def test_rows_of_a_wider_tensor_are_copied() -> None:
    whole = torch.zeros(1024, 1024)
    part = torch.randn(1024, 512)
    copy_into(whole[:, 256:768], part)
    assert torch.equal(whole[:, 256:768], part)
    assert float(whole[:, :256].abs().sum() + whole[:, 768:].abs().sum()) == 0
    back = torch.zeros(1024, 512)
    copy_into(back, whole[:, 256:768])
    assert torch.equal(back, part)


def test_tensors_without_dims_and_trained_ones_are_copied() -> None:
    target, parameter = torch.zeros(()), torch.nn.Parameter(torch.zeros(LARGE))
    copy_into(target, torch.tensor(3.0))
    copy_into(parameter.detach(), torch.ones(LARGE))
    assert float(target) == 3
    assert float(parameter.detach().sum()) == LARGE


def test_a_read_only_view_is_read_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = read_only_bytes(memoryview(b"\1\2\3"))
    assert tensor.tolist() == [1, 2, 3]
