"""What would one rank of a layout hold?  Its framework builds it alone, and nothing is trained.

The training script itself runs, with its own flags, in a process that believes to be one rank of
the world: collectives do nothing, and the script is left once model and optimizer exist.  Only the
places of tensors are of interest, so the bytes of large ones are never written.
"""

import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tenplex_megatron.adapters.base import StepObserver, TrainingState
from tenplex_megatron.adapters.registry import framework_adapter
from tenplex_megatron.core.codec import canonical, collection_from_json, collection_to_json
from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.core.tensors import TensorSpec
from tenplex_megatron.elastic.entry import run_script
from tenplex_megatron.elastic.generation import ENVIRONMENT_VARIABLE
from tenplex_megatron.elastic.lifeline import end_with_parent
from tenplex_megatron.errors import ConfigError

__all__ = ["RankTask", "describe_rank", "read_description", "send_description"]

_LARGE_BYTES = 1 << 20
"""Smaller tensors are computed as always; scripts may read them."""

_FILLS = frozenset(
    f"aten::{name}"
    for name in (
        "add_", "clamp_", "copy_", "div_", "erfinv_", "fill_", "mul_", "normal_", "uniform_",
        "zero_",
    )
)  # fmt: skip
_NEW = frozenset(f"aten::{name}" for name in ("full", "ones", "rand", "randn", "zeros"))
_NEW_LIKE = frozenset(
    f"aten::{name}"
    for name in (
        "_to_copy", "clone", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like",
    )
)  # fmt: skip
_LIKE_OPTIONS = ("dtype", "layout", "device", "pin_memory", "memory_format")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """One rank to build."""

    framework: str
    script: str
    is_module: bool
    argv: tuple[str, ...]
    """The script's flags, those of the layout included."""
    rank: int
    world_size: int
    stored: Mapping[str, TensorSpec] | None
    """Tensors of the snapshot this rank would import; None: what it would store."""
    log: str
    """File for what the script prints."""


def send_description(task: RankTask, answer: Connection) -> None:
    """Body of a process that builds one rank; sends nothing when that fails."""
    end_with_parent()
    log = os.open(task.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    collection = describe_rank(task)
    answer.send_bytes(canonical(collection_to_json(collection)).encode())
    answer.close()
    # Nothing the framework would do at exit is wanted of a world that never was.
    os._exit(0)


def read_description(text: bytes) -> TensorCollection:
    """What `send_description` sent."""
    return collection_from_json(json.loads(text))


def describe_rank(task: RankTask) -> TensorCollection:
    """Run the script until model and optimizer exist; the boxes of this rank.

    Changes this process for good: it stands for CUDA and for a world of ranks afterwards.

    Raises:
        ConfigError: the script ended before, or does not exist.
    """
    _pretend_world(task.rank, task.world_size)
    recorder = _Recorder(task.rank, task.stored)
    framework_adapter(task.framework).install(recorder, ParallelLayout())
    sys.argv = [task.script, *task.argv]
    try:
        with _UntouchedMemory():  # type: ignore[no-untyped-call] # torch has no types here
            run_script(task.script, is_module=task.is_module)
    except _BuiltError:
        assert recorder.collection is not None
        return recorder.collection
    raise ConfigError(
        f"{task.script} ended without building a model and an optimizer through {task.framework}"
    )


class _BuiltError(BaseException):
    """Leaves the training script; no `except Exception` of it catches this."""


class _Recorder(StepObserver):
    """Notes what a rank holds and leaves."""

    def __init__(self, rank: int, stored: Mapping[str, TensorSpec] | None) -> None:
        self._rank = rank
        self._stored = stored
        self.collection: TensorCollection | None = None

    @property
    def imports_state(self) -> bool:
        return True

    @property
    def audits_samples(self) -> bool:
        return False

    @property
    def exit_code(self) -> int | None:
        return None

    def on_built(self, state: TrainingState) -> NoReturn:
        pieces = state.pieces(self._stored)
        specs = {piece.spec.name: piece.spec for piece in pieces}
        self.collection = TensorCollection(specs, {self._rank: tuple(p.box for p in pieces)})
        raise _BuiltError

    def before_update(self) -> None:
        """Never reached."""

    def on_step(
        self, step: int, losses: Mapping[str, float] | None, *, is_last: bool = False
    ) -> bool:
        del step, losses
        return True

    def on_samples(self, first_batch: int, ids: Sequence[int]) -> None:
        """Never reached."""


class _UntouchedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call] # likewise
    """Gives large tensors memory that nothing is ever written to.

    The kernel then backs it with no pages: the ranks of a model that fills several nodes can be
    built on a laptop, one after the other.
    """

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's operators have no public type
        types: Any,  # noqa: ANN401 - likewise
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        del types
        options = kwargs or {}
        name: str = func._schema.name
        if name in _FILLS and _is_large(args[0]):
            return args[0]
        elif name == "aten::cat" and any(map(_is_large, args[0])):
            return options["out"] if "out" in options else _joined(*args, **options)
        elif name in _NEW_LIKE and _is_large(args[0]):
            kept = {key: options[key] for key in _LIKE_OPTIONS if key in options}
            return torch.ops.aten.empty_like.default(args[0], **kept)
        elif name in _NEW and _is_large_shape(args[0]):
            return torch.ops.aten.empty.memory_format(args[0], **options)
        return func(*args, **options)


def _is_large(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.nbytes >= _LARGE_BYTES


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Memory for the result of `torch.cat`, which takes vectors without elements of any shape."""
    parts = [one for one in tensors if one.shape != (0,)]
    shape = list(parts[0].shape)
    shape[dim] = sum(one.shape[dim] for one in parts)
    return parts[0].new_empty(shape)


def _is_large_shape(shape: Iterable[int]) -> bool:
    return math.prod(shape) >= _LARGE_BYTES


def _pretend_world(rank: int, world_size: int) -> None:
    """Make this process look like one rank under an agent, with collectives that do nothing."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="localhost",
        MASTER_PORT="0",
        # No device is used even where there is one.
        TENPLEX_CPU="force",
    )
    # The script's own hook must not look for an agent or a snapshot.
    os.environ[ENVIRONMENT_VARIABLE] = ""
    importlib.import_module("tenplex_megatron.cpu").install()
    torch.set_num_threads(1)
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    c10d: Any = distributed.distributed_c10d
    new_group = _ignoring_backend(c10d.new_group)
    for module in (c10d, distributed):
        vars(module)["new_group"] = new_group


def _ignoring_backend(original: Callable[..., object]) -> Callable[..., object]:
    """Groups are asked for with gloo or nccl; members of one that never was can't connect."""

    def new_group(ranks: Sequence[int] | None = None, *_: object, **__: object) -> object:
        return original(ranks, backend="fake")

    return new_group
