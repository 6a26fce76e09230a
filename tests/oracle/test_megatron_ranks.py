"""Megatron places ranks, groups and layers where the mesh does.

The oracles are `RankGenerator` and the layer offsets of megatron-core 0.19.2.
"""

import importlib.metadata
import itertools

import pytest

from tenplex_megatron.core.mesh import ParallelLayout

pytest.importorskip("megatron.core")
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

ORACLE = "0.19.2"
ORDER = "tp-cp-ep-dp-pp"
AXES = [("tp",), ("cp",), ("dp",), ("pp",), ("dp", "cp"), ("tp", "pp"), ("tp", "dp"), ("tp", "cp")]
SIZES = [
    (tp, pp, dp, cp)
    for tp, pp, dp, cp in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 3, 4), (1, 2))
    if tp * pp * dp * cp <= 16
]


def test_the_oracle_is_the_version_that_was_read() -> None:
    assert importlib.metadata.version("megatron-core") == ORACLE


@pytest.mark.parametrize(("tp", "pp", "dp", "cp"), SIZES)
def test_dense_groups_are_those_of_megatron(tp: int, pp: int, dp: int, cp: int) -> None:
    theirs = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=ORDER)
    layout = ParallelLayout(tp=tp, pp=pp, dp=dp, cp=cp)
    for axes in AXES:
        expected = sorted(tuple(sorted(group)) for group in theirs.get_ranks("-".join(axes)))
        assert list(layout.groups(*axes)) == expected
        for group in theirs.get_ranks(axes[0]):
            places = [getattr(layout.coordinates(rank), axes[0]) for rank in group]
            assert places == list(range(len(group)))


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "cp", "ep"),
    [(*sizes, ep) for sizes in SIZES for ep in (1, 2, 4) if sizes[2] * sizes[3] % ep == 0],
)
def test_expert_groups_are_those_of_megatron(tp: int, pp: int, dp: int, cp: int, ep: int) -> None:
    layout = ParallelLayout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep)
    theirs = RankGenerator(tp=tp, ep=ep, dp=layout.expert_dp, pp=pp, cp=1, order=ORDER)
    for axis in ("tp", "ep", "dp", "pp"):
        for group in theirs.get_ranks(axis):
            places = [getattr(layout.expert_coordinates(rank), axis) for rank in group]
            assert places == list(range(len(group)))
            others = [
                tuple(
                    getattr(layout.expert_coordinates(rank), name)
                    for name in ("tp", "ep", "dp", "pp")
                    if name != axis
                )
                for rank in group
            ]
            assert len(set(others)) == 1


def config(pp: int, vpp: int, **uneven: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=12,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_dtype="float32",
        **uneven,
    )


@pytest.mark.parametrize(
    ("layout", "uneven"),
    [
        (ParallelLayout(), {}),
        (ParallelLayout(pp=2), {}),
        (ParallelLayout(pp=4), {}),
        (ParallelLayout(pp=2, vpp=3), {}),
        (ParallelLayout(pp=3, vpp=2), {}),
        (
            ParallelLayout(pp=3, stage_layers=(2, 6, 4)),
            {
                "num_layers_in_first_pipeline_stage": 2,
                "num_layers_in_last_pipeline_stage": 4,
            },
        ),
        (
            ParallelLayout(pp=3, vpp=2, stage_layers=(2, 6, 4)),
            {
                "num_layers_in_first_pipeline_stage": 2,
                "num_layers_in_last_pipeline_stage": 4,
            },
        ),
        (
            ParallelLayout(pp=4, stage_layers=(3, 3, 3, 3)),
            {"num_layers_in_first_pipeline_stage": 3},
        ),
    ],
)
def test_layers_fall_on_stages_as_in_megatron(
    layout: ParallelLayout, uneven: dict[str, int]
) -> None:
    theirs = config(layout.pp, layout.vpp, **uneven)
    for stage, chunk in itertools.product(range(layout.pp), range(layout.vpp)):
        vp_stage = chunk if layout.vpp > 1 else None
        offset = get_transformer_layer_offset(theirs, vp_stage=vp_stage, pp_rank=stage)
        count = get_num_layers_to_build(theirs, vp_stage=vp_stage, pp_rank=stage)
        assert layout.layers(12, stage, chunk) == range(offset, offset + count)
