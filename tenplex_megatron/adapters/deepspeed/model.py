"""Where does every parameter and buffer of a DeepSpeed model lie in its global tensor?

A parameter is whole on every rank unless DeepSpeed says otherwise: tensor parallelism describes
its shards on the parameter, and experts are numbered over their group.  Names come from the
model's modules, so that a pipeline stage calls a layer what every other split calls it; no name
has a meaning.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.linear.optimized_linear import LoRAOptimizedLinear
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.pipe import PipelineModule

from tenplex_megatron.adapters.deepspeed.affine import parts_of_shard
from tenplex_megatron.adapters.parts import Part
from tenplex_megatron.core.region import Region
from tenplex_megatron.errors import LayoutError, UnsupportedLayoutError

__all__ = ["Buffers", "Held", "ModelTensors", "describe_model", "owned_range"]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Elements `[start, stop)` of a flattened local tensor that no optimizer updates.

    `counts` says that the value of this rank is the one to keep.
    """

    parts: tuple[Part, ...]
    flat: torch.Tensor
    start: int
    stop: int
    counts: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """Copies of a model's persistent buffers, flat, by name.

    A forward pass may put another tensor in the place of a buffer, and keep the one before for
    itself; only a copy stays where it is, and belongs to nobody else.
    """

    model: torch.nn.Module
    copies: Mapping[str, torch.Tensor]

    def refresh(self) -> None:
        """Take over what the model has now."""
        for buffer, copied in self._pairs():
            copied.copy_(buffer)

    def restore(self) -> None:
        """Set what the model has now."""
        for buffer, copied in self._pairs():
            buffer.copy_(copied)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every buffer and its copy, in one shape.

        Raises:
            LayoutError: the model has other buffers than when it was described.
        """
        found = {name: one.detach() for name, one in _persistent_buffers(self.model)}
        for name in sorted(found.keys() | self.copies.keys()):
            now, then = found.get(name), self.copies.get(name)
            if now is None or then is None or _size(now) != _size(then):
                raise LayoutError(
                    f"buffer {name}: {_size(then)} when the engine became elastic, {_size(now)} "
                    "now; expected buffers that keep their number, size and type, or "
                    "register_buffer(..., persistent=False)"
                )
            yield now, then.view(now.shape)


@dataclass(frozen=True, slots=True, eq=False)
class ModelTensors:
    """The parts and the key of every parameter, by its identity, and what is not trained.

    `followers` are parameters whose values count on another rank; `untrained` has the copies of
    `buffers` as well as frozen weights.
    """

    parts: dict[int, tuple[Part, ...]]
    keys: dict[int, str]
    untrained: tuple[Held, ...]
    followers: frozenset[int]
    buffers: Buffers


def owned_range(parameter: Any) -> tuple[int, int]:
    """Which elements of its flattened whole this rank keeps of a parameter cut by ZeRO stage 3."""
    size = parameter.partition_numel()
    start = dist.get_rank(parameter.ds_process_group) * size
    return start, min(start + size, parameter.ds_numel)


def describe_model(engine: Any, tp_rank: int, trained: Collection[int]) -> ModelTensors:
    """Every parameter and persistent buffer of this rank, each once.

    Args:
        engine: DeepSpeed's engine.
        tp_rank: of this rank.
        trained: the identities of the parameters that an optimizer updates.

    Raises:
        UnsupportedLayoutError: a shard has no place in a whole tensor, or a tensor that is not
            trained can't be read and set as one range of memory.
    """
    _check_layers(engine.module)
    experts = _experts(engine.module)
    followers = frozenset(_followers(engine.module))
    parts: dict[int, tuple[Part, ...]] = {}
    keys: dict[int, str] = {}
    untrained: list[Held] = []
    for parameter, name in engine.param_names.items():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        key = _global_name(name, experts)
        keys[id(parameter)] = key
        parts[id(parameter)] = parts_of_shard(key, shape, parameter, tp_rank)
        if id(parameter) not in trained:
            counts = id(parameter) not in followers
            untrained.extend(_kept(key, parameter, parts[id(parameter)], counts=counts))
    copies = {}
    for name, buffer in _persistent_buffers(engine.module):
        whole = Region.full(tuple(buffer.shape))
        part = Part(_global_name(name, experts), whole.stop, False, whole, 0)
        copies[name] = _flat(part.key, buffer).clone()
        untrained.append(Held((part,), copies[name], 0, buffer.numel()))
    buffers = Buffers(engine.module, copies)
    return ModelTensors(parts, keys, tuple(untrained), followers, buffers)


def _check_layers(model: torch.nn.Module) -> None:
    """Refuse base weights of which every rank has another part, under one name and shape."""
    for name, module in model.named_modules():
        if isinstance(module, LoRAOptimizedLinear) and module.zero_shards > 1:
            raise UnsupportedLayoutError(
                f"{name}: its base weight is split over {module.zero_shards} ranks in a way that "
                "is not described; expected LoRAConfig(base_weight_sharding=1)"
            )


def _followers(model: torch.nn.Module) -> Iterator[int]:
    """What later pipeline stages have of a tied layer besides its tied weights.

    Every stage with the layer has all of it, but only the tied weights have equal gradients.  Of
    the rest DeepSpeed counts the copy of the first stage (`ds_pipe_replicated`).
    """
    if not isinstance(model, PipelineModule):
        return
    for comm in model.tied_comms.values():
        layer: torch.nn.Module = comm["module"]
        tied = {id(layer.get_parameter(name)) for name in comm["weight_attr"]}
        for parameter in layer.parameters():
            copy: Any = parameter
            if copy.ds_pipe_replicated and id(parameter) not in tied:
                yield id(parameter)


def _kept(key: str, parameter: Any, parts: tuple[Part, ...], *, counts: bool) -> Iterator[Held]:
    if hasattr(parameter, "ds_tensor"):
        start, stop = owned_range(parameter)
        if start < stop:
            flat = _flat(key, parameter.ds_tensor)[: stop - start]
            yield Held(parts, flat, start, stop, counts=counts)
    else:
        yield Held(parts, _flat(key, parameter), 0, parameter.numel(), counts=counts)


def _flat(key: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise UnsupportedLayoutError(
            f"{key}: a tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}; "
            "expected contiguous memory: call .contiguous() on it before deepspeed.initialize"
        )
    return tensor.detach().view(-1)


def _size(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.numel()} elements of {tensor.dtype}"


def _persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers a checkpoint would hold: the others are derived, and may have any shape."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _experts(model: torch.nn.Module) -> dict[str, int]:
    """Where the experts of every layer are named, and the global number of the first local one."""
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, MOELayer):
            layer: Any = module
            first = dist.get_rank(layer.ep_group) * layer.num_local_experts
            found[f"{prefix}.experts.deepspeed_experts."] = first
    return found


def _global_name(name: str, experts: dict[str, int]) -> str:
    for prefix, first in experts.items():
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            return f"{prefix}{first + int(number)}.{rest}"
    return name
