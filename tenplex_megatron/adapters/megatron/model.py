"""Where does every parameter and buffer of a Megatron model lie in its global tensor?

The answer comes from `sharded_state_dict()` alone (megatron/core/dist_checkpointing/mapping.py):
a `ShardedTensor` names the global tensor, its shape and the offset of the local part; a
`ShardedTensorFactory` (fused gate/up and the like) builds several of them over one storage.
No tensor name has a meaning here.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
)

from tenplex_megatron.adapters.parts import Part
from tenplex_megatron.core.region import Region
from tenplex_megatron.errors import UnsupportedLayoutError

__all__ = ["ModelTensors", "describe_model"]


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """Local tensors with their parts."""

    tensors: tuple[tuple[torch.Tensor, tuple[Part, ...]], ...]

    def by_identity(self) -> dict[int, tuple[Part, ...]]:
        """`id(tensor)` -> its parts."""
        return {id(tensor): parts for tensor, parts in self.tensors}


def describe_model(chunks: Sequence[torch.nn.Module], metadata: dict[str, object]) -> ModelTensors:
    """Every local tensor of the model chunks of this rank, each once.

    Args:
        chunks: the model chunks Megatron trains (one per virtual pipeline stage), wrapped or not.
        metadata: Megatron's `sharded_state_dict` metadata.
    """
    tensors: dict[int, tuple[torch.Tensor, tuple[Part, ...]]] = {}
    for chunk in chunks:
        described: Any = chunk
        for entry in nested_values(described.sharded_state_dict(metadata=metadata)):
            if _has_data(entry):
                tensors[id(entry.data)] = (entry.data, tuple(_parts(entry)))
    return ModelTensors(tuple(tensors.values()))


def _has_data(entry: object) -> bool:
    if not isinstance(entry, ShardedTensor | ShardedTensorFactory):
        return False
    return entry.data is not None and entry.data.numel() > 0


def _parts(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[Part]:
    whole = entry.data
    if not whole.is_contiguous():
        raise UnsupportedLayoutError(
            f"{entry.key}: a local tensor with strides {whole.stride()} is not contiguous; "
            "reload from a checkpoint"
        )
    built: Iterable[ShardedTensor] = (
        nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else (entry,)
    )
    covered = 0
    for part in built:
        offset = part.data.data_ptr() - whole.data_ptr()
        start, remainder = divmod(offset, whole.element_size())
        inside = start >= 0 and start + part.data.numel() <= whole.numel() and not remainder
        if not inside or not part.data.is_contiguous():
            raise UnsupportedLayoutError(
                f"{part.key}: the factory of {entry.key} copies or reorders its tensor, so its "
                "parts have no place in the live storage; reload from a checkpoint"
            )
        covered += part.data.numel()
        yield _part(part, start)
    if covered != whole.numel():
        raise UnsupportedLayoutError(
            f"{entry.key}: its parts cover {covered} of {whole.numel()} elements; "
            "reload from a checkpoint"
        )


def _part(entry: ShardedTensor, start: int) -> Part:
    shape = (1,) * entry.prepend_axis_num + tuple(entry.local_shape)
    low = tuple(entry.global_offset)
    high = tuple(first + size for first, size in zip(low, shape, strict=True))
    return Part(
        key=entry.key,
        shape=tuple(entry.global_shape),
        padded=entry.allow_shape_mismatch,
        region=Region(low, high),
        start=start,
    )
