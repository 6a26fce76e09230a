"""How do DeepSpeed's affine maps and the boxes of this package say the same?

An affine map (deepspeed/checkpoint/affine.py) lists, per tensor-parallel rank, pieces that have the
same shape in the whole tensor and in the shard, and the strides of both.  A piece that follows the
rows of its whole tensor is one box, or one box per run that lies together in the shard.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap, contiguous_split_map
from deepspeed.checkpoint.constants import (
    AFFINE_MAP,
    AUTOEP_PARAM_EP_RANK,
    DS_AUTOEP_UC_META,
    DS_AUTOTP_UC_META,
)

from tenplex_megatron.adapters.parts import Part
from tenplex_megatron.core.region import Region
from tenplex_megatron.errors import UnsupportedLayoutError

__all__ = ["affine_map_of", "parts_of_map", "parts_of_shard"]


def parts_of_shard(
    key: str, shape: tuple[int, ...], parameter: object, tp_rank: int
) -> tuple[Part, ...]:
    """The parts of one local parameter of this shape.

    Raises:
        UnsupportedLayoutError: DeepSpeed knows no map, one of other shapes, or one that is not made
            of boxes.
    """
    experts: Any = vars(parameter).get(DS_AUTOEP_UC_META)
    if experts:
        affine_map, rank = (
            ParamAffineMap.from_dict(experts[AFFINE_MAP]),
            experts[AUTOEP_PARAM_EP_RANK],
        )
    else:
        split: Any = vars(parameter).get(DS_AUTOTP_UC_META)
        if not split or split["replicated"]:
            return (Part(key, shape, False, Region.full(shape), 0),)
        affine_map, rank = _map_of_split(key, split), tp_rank
    shards = affine_map.shard_shapes
    if rank not in shards or tuple(shards[rank]) != shape:
        raise UnsupportedLayoutError(
            f"{key}: rank {rank} of its split has the shape {shape}, DeepSpeed's affine map says "
            f"{shards.get(rank, 'nothing')}; save and load a checkpoint instead"
        )
    return parts_of_map(key, affine_map, rank)


def _map_of_split(key: str, split: dict[str, Any]) -> ParamAffineMap:
    conversion = split["conversion"]
    if conversion.get("affine_map") is not None:
        return ParamAffineMap.from_dict(conversion["affine_map"])
    # Embeddings are described by sizes alone (module_inject/auto_tp.py).
    reason = conversion["unsupported_reason"]
    if reason is None and split["partition_sizes"] and not split["sub_param_sizes"]:
        return contiguous_split_map(
            split["logical_shape"], split["partition_sizes"], split["partition_dim"]
        )
    raise UnsupportedLayoutError(
        f"{key}: how tensor parallelism split it is not known ({reason or 'no affine map'}); name "
        "its layer in tensor_parallel.partition_config, or save and load a checkpoint instead"
    )


def parts_of_map(key: str, affine_map: ParamAffineMap, tp_rank: int) -> tuple[Part, ...]:
    """What one rank of an affine map holds, as parts of the whole tensor.

    Raises:
        UnsupportedLayoutError: a piece is scaled, or does not follow the rows of its tensor.
    """
    whole = tuple(affine_map.logical_shape)
    parts = [
        part
        for piece in affine_map.pieces_by_rank[tp_rank]
        if piece.numel
        for part in _boxes(key, whole, piece)
    ]
    return tuple(sorted(parts, key=lambda part: part.start))


def _boxes(key: str, whole: tuple[int, ...], piece: AffinePiece) -> Iterator[Part]:
    if piece.scale != 1.0 or tuple(piece.source_strides) != _strides(whole):
        raise UnsupportedLayoutError(
            f"{key}: its affine map has the piece {piece}, which is no box of the whole tensor; "
            "save and load a checkpoint instead"
        )
    start = tuple(int(place) for place in np.unravel_index(piece.source_offset, whole))
    # Dims from `inner` on lie in the shard one after the other.
    packed = _strides(piece.shape)
    inner = len(piece.shape)
    while inner and (
        piece.shape[inner - 1] == 1 or piece.dest_strides[inner - 1] == packed[inner - 1]
    ):
        inner -= 1
    for place in itertools.product(*map(range, piece.shape[:inner])):
        low = (*(a + b for a, b in zip(start, place, strict=False)), *start[inner:])
        size = (1,) * inner + piece.shape[inner:]
        high = tuple(a + b for a, b in zip(low, size, strict=True))
        offset = piece.dest_offset + sum(
            a * b for a, b in zip(place, piece.dest_strides, strict=False)
        )
        yield Part(key, whole, False, Region(low, high), offset)


def affine_map_of(
    shape: Sequence[int], shard_shapes: Sequence[Sequence[int]], parts: Sequence[Sequence[Part]]
) -> ParamAffineMap:
    """The same parts as an affine map of DeepSpeed.

    Args:
        shape: of the whole tensor.
        shard_shapes: of the local tensor of every rank.
        parts: of every rank, in the order of ranks.
    """
    holders: dict[Region, list[int]] = {}
    for rank, mine in enumerate(parts):
        for part in mine:
            holders.setdefault(part.region, []).append(rank)
    pieces = {
        rank: [
            AffinePiece(
                shape=part.region.shape,
                source_offset=sum(
                    a * b for a, b in zip(part.region.start, _strides(shape), strict=True)
                ),
                source_strides=_strides(shape),
                dest_offset=part.start,
                dest_strides=_strides(part.region.shape),
                locations=holders[part.region],
            )
            for part in mine
        ]
        for rank, mine in enumerate(parts)
    }
    return ParamAffineMap(shape, dict(enumerate(shard_shapes)), pieces)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
