from collections.abc import Callable, Iterator
from io import BytesIO

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from tenplex_megatron import cpu
from tenplex_megatron.cpu import standin
from tenplex_megatron.cpu.tensors import host_device

CUDA_NAMES = ["cuda", "cuda:3", 0, torch.device("cuda"), torch.device("cuda", 1)]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(standin, "_count_cuda_devices", lambda: 0)
    cpu.install()
    yield
    cpu.uninstall()


@pytest.mark.parametrize("device", CUDA_NAMES)
def test_every_name_of_a_cuda_device_means_the_host(device: object) -> None:
    assert torch.device(host_device(device)) == torch.device("cpu")


@pytest.mark.parametrize("device", [None, "cpu", "meta", torch.device("meta"), torch.float16, True])
def test_what_names_no_cuda_device_is_kept(device: object) -> None:
    assert host_device(device) is device


@pytest.mark.parametrize("device", CUDA_NAMES)
@pytest.mark.parametrize(
    "create",
    [
        lambda device: torch.empty(2, 2, device=device),
        lambda device: torch.zeros((2, 2), dtype=torch.bfloat16, device=device, pin_memory=True),
        lambda device: torch.tensor([1.0], device=device),
        lambda device: torch.arange(3, device=device),
        lambda device: torch.randn(2, device=device),
        lambda device: torch.zeros_like(torch.ones(2), device=device),
        lambda device: torch.ones(2).new_empty(2, device=device),
        lambda device: torch.ones(2).to(device),
        lambda device: torch.ones(2).to(device, torch.float16),
        lambda device: torch.ones(2).to(device=device, dtype=torch.float16),
        lambda device: torch.ones(2).cuda(device, non_blocking=True),
        lambda device: torch.nn.Linear(2, 2, device=device).weight,
        lambda device: torch.nn.Linear(2, 2).cuda(device).weight,
        lambda device: torch.nn.Linear(2, 2).to(device).weight,
    ],
)
def test_tensors_asked_for_on_cuda_live_on_the_host(
    create: Callable[[object], torch.Tensor], device: object
) -> None:
    assert create(device).device == torch.device("cpu")


def test_the_meta_device_still_works_as_argument_and_context() -> None:
    assert torch.empty(2, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"


def test_a_cuda_context_creates_on_the_host() -> None:
    with torch.device("cuda"):
        assert torch.empty(2).device.type == "cpu"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "torch.cuda.FloatTensor"),
        (torch.float16, "torch.cuda.HalfTensor"),
        (torch.bfloat16, "torch.cuda.BFloat16Tensor"),
    ],
)
def test_type_names_read_as_on_cuda_and_convert_back(dtype: torch.dtype, name: str) -> None:
    tensor = torch.zeros(2, dtype=dtype)
    assert tensor.type() == name
    assert torch.zeros(2).type(name).dtype == dtype
    assert torch.zeros(2).type(dtype).dtype == dtype


def test_answers_are_the_same_inside_a_torch_function_mode() -> None:
    class PassThrough(TorchFunctionMode):
        def __torch_function__(
            self,
            func: Callable[..., object],
            types: object,
            args: tuple[object, ...] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            return func(*args, **(kwargs or {}))

    with PassThrough():
        assert torch.ones(2, device="cuda").type() == "torch.cuda.FloatTensor"
        assert torch.ones(2).to("cuda").cuda().is_cuda


def test_host_tensors_answer_that_they_are_on_cuda_and_others_do_not() -> None:
    assert torch.ones(2).is_cuda
    assert torch.nn.Parameter(torch.ones(2)).is_cuda
    assert not torch.ones(2, device="meta").is_cuda


def test_parameters_and_gradients_keep_their_identity_when_moved() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert parameter.cuda() is parameter
    assert parameter.pin_memory() is parameter
    assert parameter.record_stream(torch.cuda.current_stream()) is None


def test_a_file_that_names_a_cuda_device_loads_on_the_host() -> None:
    file = BytesIO()
    torch.save(torch.ones(2), file)
    for location in (None, "cuda", torch.device("cuda", 1)):
        file.seek(0)
        assert torch.load(file, map_location=location).device.type == "cpu"


def test_a_pinning_loader_yields_its_samples() -> None:
    loader = DataLoader([torch.ones(2)] * 4, batch_size=2, pin_memory=True)
    assert [batch.shape for batch in loader] == [(2, 2), (2, 2)]
