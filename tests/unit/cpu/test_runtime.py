from collections.abc import Iterator

import pytest
import torch

from tenplex_megatron import cpu
from tenplex_megatron.cpu import standin


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(standin, "_count_cuda_devices", lambda: 0)
    cpu.install()
    yield
    cpu.uninstall()


def test_there_is_one_device_per_local_rank() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == torch.accelerator.device_count() == 4


@pytest.mark.parametrize("device", [3, "cuda:3", torch.device("cuda", 3)])
def test_the_chosen_device_is_the_current_one(device: object) -> None:
    torch.cuda.set_device(device)
    assert torch.cuda.current_device() == torch.accelerator.current_device_index() == 3
    assert torch.ones(2, device=torch.cuda.current_device()).device.type == "cpu"


def test_saved_random_states_replay_what_follows_them() -> None:
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), drawn)
    torch.cuda.manual_seed(7)
    assert torch.equal(torch.rand(4, device="cuda"), drawn)


def test_streams_and_events_never_wait() -> None:
    side = torch.cuda.Stream(device="cuda", priority=-1)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        end.record(torch.cuda.current_stream())
    side.wait_event(end)
    torch.cuda.synchronize()
    assert end.query()
    assert side.query()
    assert not torch.cuda.current_stream().is_capturing()
    assert start.elapsed_time(end) >= 0.0
    assert {side, torch.cuda.current_stream()} == {torch.cuda.default_stream()}


def test_memory_is_that_of_the_process() -> None:
    resident = torch.cuda.memory_allocated()
    assert resident > 0
    assert torch.cuda.max_memory_allocated() >= resident
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total == torch.cuda.get_device_properties(0).total_memory
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] > 0
    assert torch.cuda.memory_stats()["unheard_of"] == 0


def test_optimizers_step_on_what_they_take_for_device_tensors() -> None:
    weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    assert torch.all(weight < 1.0)
