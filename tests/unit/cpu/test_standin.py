import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from tenplex_megatron import cpu
from tenplex_megatron.cpu import standin
from tenplex_megatron.errors import ConfigError


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TENPLEX_CPU", raising=False)
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "RANK", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(standin, "_count_cuda_devices", lambda: 0)
    yield
    cpu.uninstall()


def torch_surface() -> dict[str, object]:
    owners = {
        "torch": torch,
        "tensor": torch.Tensor,
        "cuda": torch.cuda,
        "random": torch.cuda.random,
        "accelerator": torch.accelerator,
    }
    # Importing more of torch adds modules; only replaced attributes count.
    return {
        f"{owner}.{name}": value
        for owner, module in owners.items()
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("__")
    }


def test_it_refuses_beside_a_real_device_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(standin, "_count_cuda_devices", lambda: 2)
    with pytest.raises(ConfigError, match=r"2 CUDA device.*TENPLEX_CPU=force"):
        cpu.install()
    assert not cpu.is_installed()
    assert torch.cuda.current_device.__module__ == "torch.cuda"


def test_force_runs_beside_a_real_device_without_asking_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(standin, "_count_cuda_devices", lambda: pytest.fail("asked"))
    monkeypatch.setenv("TENPLEX_CPU", "force")
    cpu.install()
    assert cpu.is_installed()


def test_installing_twice_changes_and_says_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        cpu.install()
        once = torch_surface()
        cpu.install()
    assert torch_surface() == once
    assert len(caplog.records) == 1


def test_only_rank_zero_speaks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    cpu.install()
    assert not caplog.records


def test_uninstalling_gives_torch_every_function_back() -> None:
    before = torch_surface()
    cpu.install()
    assert torch_surface() != before
    cpu.uninstall()
    assert torch_surface() == before


def test_importing_changes_nothing_in_torch() -> None:
    code = """
import os, torch
variables = dict(os.environ)
before = [dict(vars(m)) for m in (torch.Tensor, torch.cuda, torch.accelerator)]
import tenplex_megatron.cpu
after = [dict(vars(m)) for m in (torch.Tensor, torch.cuda, torch.accelerator)]
assert before == after
assert variables == dict(os.environ)
assert not tenplex_megatron.cpu.is_installed()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_installing_starts_no_thread_no_group_and_no_cuda() -> None:
    threads = threading.active_count()
    cpu.install()
    assert threading.active_count() == threads
    assert not torch.distributed.is_initialized()
    assert not vars(torch.cuda)["_initialized"]


def test_a_forked_child_trains_on_what_its_parent_installed() -> None:
    cpu.install()
    child = os.fork()
    if child == 0:
        try:
            layer = torch.nn.Linear(4, 4).cuda()
            layer(torch.ones(2, 4, device="cuda")).sum().backward()
            torch.cuda.synchronize()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
