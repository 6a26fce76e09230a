"""A copy is a copy, whatever the size, the type, and where the two memories begin."""

import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tenplex_megatron.errors import StoreError
from tenplex_megatron.execution import copying as copying_module
from tenplex_megatron.execution.copying import Copying, copy_all, copy_into, read_only_bytes

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


@pytest.mark.parametrize("ranks", [1, 1000])
def test_many_copies_at_once_are_each_made_whole(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    sizes = [70 << 18, 0, 1, 5, 3 << 20, 70 << 18]
    sources = [torch.randn(size) for size in sizes]
    targets = [torch.zeros(size) for size in sizes]
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    wide, part = torch.zeros(1024, 1024), torch.randn(1024, 512)
    with torch.no_grad():
        copy_all(
            [
                *zip(targets, sources, strict=True),
                (parameter, torch.ones(64, 64)),
                (wide[:, 256:768], part),
            ]
        )
    assert all(map(torch.equal, targets, sources))
    assert float(parameter.detach().sum()) == 64 * 64
    assert torch.equal(wide[:, 256:768], part)


def test_who_waits_takes_part() -> None:
    sources = [torch.randn(1 << 10) for _ in range(20)]
    targets = [torch.zeros(1 << 10) for _ in range(20)]
    blocked = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(blocked.wait)  # the pool's only thread is busy, so the caller copies all
        copying = Copying(zip(targets, sources, strict=True), pool, threads=1)
        waiting = threading.Thread(target=copying.finish)
        waiting.start()
        while not all(map(torch.equal, targets, sources)):
            time.sleep(0.001)
        assert waiting.is_alive()  # until the helper has seen that nothing is left
        blocked.set()
        waiting.join()
        copying.finish()
    assert copying.seconds > 0


def test_nobody_is_told_that_all_is_copied_while_another_still_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def copy_slowly(target: torch.Tensor, source: torch.Tensor) -> None:
        begun.set()
        go_on.wait()
        target.copy_(source)

    monkeypatch.setattr(copying_module, "copy_into", copy_slowly)
    target = torch.zeros(8)
    with ThreadPoolExecutor(2) as pool:
        copying = Copying([(target, torch.ones(8))], pool, threads=0)
        first = pool.submit(copying.finish)
        begun.wait()
        second = pool.submit(copying.finish)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.05)
        go_on.set()
        second.result()
        assert bool((target == 1).all())
        first.result()


def test_everyone_hears_of_a_copy_that_failed() -> None:
    with ThreadPoolExecutor(1) as pool:
        copying = Copying([(torch.zeros(3), torch.zeros(2))], pool, threads=0)
        with pytest.raises(RuntimeError, match="size"):
            copying.finish()
        with pytest.raises(StoreError, match="a copy failed"):
            copying.finish()


def test_a_copy_that_fails_in_a_thread_is_an_error_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises((RuntimeError, ValueError), match=r"size|shape"):
        copy_all([(torch.zeros(3 << 20), torch.zeros(3 << 19))])


def test_a_read_only_view_is_read_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = read_only_bytes(memoryview(b"\1\2\3"))
    assert tensor.tolist() == [1, 2, 3]
