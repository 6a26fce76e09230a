"""Boxes and DeepSpeed's affine maps say the same; DeepSpeed itself is the judge (0.19.8)."""

from collections.abc import Sequence

import pytest
import torch
from deepspeed.checkpoint.affine import (
    AffinePiece,
    ParamAffineMap,
    block_gather_map,
    contiguous_split_map,
    replicated_map,
    segmented_map,
    sub_param_map,
)
from deepspeed.checkpoint.autoep_affine import (
    autoep_placement_to_affine_map,
    make_autoep_placement_descriptor,
)
from deepspeed.checkpoint.constants import DS_AUTOEP_UC_META, DS_AUTOTP_UC_META

from tenplex_megatron.adapters.deepspeed.affine import affine_map_of, parts_of_map, parts_of_shard
from tenplex_megatron.adapters.parts import Part
from tenplex_megatron.errors import UnsupportedLayoutError

EXPERTS = make_autoep_placement_descriptor(5, [[0, 1, 4], [2, 3]])
MAPS = {
    "rows": contiguous_split_map((7, 3), [3, 2, 2], 0),
    "columns": contiguous_split_map((3, 7), [3, 2, 2], 1),
    "a rank with nothing": contiguous_split_map((4, 3), [3, 1, 0], 0),
    "a vector": contiguous_split_map((7,), [4, 3], 0),
    "fused rows": sub_param_map((12, 3), [6, 3, 3], [[4, 2], [1, 2], [2, 1]], 0),
    "fused columns": sub_param_map((3, 12), [6, 3, 3], [[4, 2], [1, 2], [2, 1]], 1),
    "fused inner dim": sub_param_map((2, 6, 3), [4, 2], [[2, 2], [1, 1]], 1),
    "split beside copied": segmented_map((9, 2), [(6, False), (3, True)], 0, 2, [[4, 2]]),
    "chosen columns": block_gather_map((2, 8), {0: [0, 1, 3], 1: [2]}, 2, 1),
    "copied": replicated_map((3, 2), 2),
    "experts": autoep_placement_to_affine_map(EXPERTS, (5, 2, 3)),
}


def whole_of(affine_map: ParamAffineMap) -> torch.Tensor:
    shape = affine_map.logical_shape
    return torch.arange(float(affine_map.numel)).view(shape)


def shard_of(whole: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """What a rank with these parts holds, flat; every element is written by exactly one part."""
    flat = torch.full((sum(part.region.numel for part in parts),), float("nan"))
    for part in parts:
        assert flat[part.start : part.stop].isnan().all()
        flat[part.start : part.stop] = whole[part.region.slices()].reshape(-1)
    return flat


@pytest.mark.parametrize("name", MAPS)
def test_parts_of_a_map_are_what_deepspeed_extracts(name: str) -> None:
    affine_map = MAPS[name]
    whole = whole_of(affine_map)
    for rank in affine_map.shard_shapes:
        parts = parts_of_map("key", affine_map, rank)
        assert torch.equal(shard_of(whole, parts), affine_map.extract(whole, rank).reshape(-1)), (
            rank
        )
        assert [part.start for part in parts] == sorted(part.start for part in parts)


@pytest.mark.parametrize("name", MAPS)
def test_deepspeed_rebuilds_the_whole_from_the_map_of_the_parts(name: str) -> None:
    affine_map = MAPS[name]
    whole = whole_of(affine_map)
    ranks = sorted(affine_map.shard_shapes)
    parts = [parts_of_map("key", affine_map, rank) for rank in ranks]
    shapes = [affine_map.shard_shapes[rank] for rank in ranks]
    ours = affine_map_of(whole.shape, shapes, parts)
    ours.validate_coverage()
    shards = {rank: affine_map.extract(whole, rank) for rank in ranks}
    assert torch.equal(ours.rebuild(shards), whole)
    for rank in ranks:
        assert torch.equal(ours.extract(whole, rank), shards[rank])


def piece(**changes: object) -> ParamAffineMap:
    values = {
        "shape": (2, 3),
        "source_offset": 0,
        "source_strides": (3, 1),
        "dest_offset": 0,
        "dest_strides": (3, 1),
        "locations": [0],
    }
    return ParamAffineMap((2, 3), {0: (2, 3)}, {0: [AffinePiece(**values | changes)]})


@pytest.mark.parametrize("changes", [{"scale": 0.5}, {"source_strides": (1, 2)}])
def test_a_piece_that_is_no_box_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UnsupportedLayoutError, match="key: its affine map has the piece"):
        parts_of_map("key", piece(**changes), 0)


def described(**changes: object) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    conversion = {"affine_map": None, "unsupported_reason": None}
    split = {
        "replicated": False,
        "logical_shape": (4, 7),
        "partition_dim": 1,
        "partition_sizes": (4, 3),
        "sub_param_sizes": None,
        "conversion": conversion,
    }
    conversion.update({name: changes.pop(name) for name in list(changes) if name in conversion})
    setattr(parameter, DS_AUTOTP_UC_META, split | changes)
    return parameter


def test_a_parameter_nobody_describes_is_whole() -> None:
    parts = parts_of_shard("key", (4, 3), torch.nn.Parameter(torch.zeros(4, 3)), 1)
    assert [str(part.region) for part in parts] == ["[0:4, 0:3]"]
    assert parts_of_shard("key", (4, 3), described(replicated=True), 1) == parts


def test_a_parameter_described_by_sizes_alone_is_a_column_slice() -> None:
    (part,) = parts_of_shard("key", (4, 3), described(), 1)
    assert (part.shape, str(part.region)) == ((4, 7), "[0:4, 4:7]")


def test_experts_are_the_rows_of_their_numbers() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 2, 3))
    placed = {"affine_map": MAPS["experts"].to_dict(), "ep_rank": 0}
    setattr(parameter, DS_AUTOEP_UC_META, placed)
    parts = parts_of_shard("key", (3, 2, 3), parameter, 0)
    assert [str(part.region) for part in parts] == ["[0:2, 0:2, 0:3]", "[4:5, 0:2, 0:3]"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"unsupported_reason": "a strange layer"}, "a strange layer"),
        ({"sub_param_sizes": (2, 2)}, "no affine map"),
        ({"partition_sizes": None}, "no affine map"),
    ],
)
def test_a_split_that_nobody_knows_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=f"is not known \\({reason}\\)"):
        parts_of_shard("key", (4, 3), described(**changes), 0)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_map_of_other_shards_is_refused(rank: int) -> None:
    with pytest.raises(
        UnsupportedLayoutError, match=f"key: rank {rank} of its split has the shape"
    ):
        parts_of_shard("key", (4, 3), described(), rank)
