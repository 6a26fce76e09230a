"""Laws of the memory model, its parts counted another way, and published measurements."""

import itertools
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.columns import Columns
from tenplex_megatron.planner.memory.activations import Choices, layer_bytes
from tenplex_megatron.planner.memory.buffers import buffer_elements
from tenplex_megatron.planner.memory.in_flight import chunks_in_flight
from tenplex_megatron.planner.memory.parameters import has_padding, stage_elements
from tenplex_megatron.planner.memory.predict import (
    MemoryPrediction,
    predict_memories,
    predict_memory,
)
from tenplex_megatron.planner.profile import LatentAttention, ModelProfile
from tenplex_megatron.planner.space import EVERYTHING, strategies
from tenplex_megatron.planner.strategy import Strategy
from tests.unit.planner.memory_rows import LLAMA, MemoryRow, b200_rows, functional_rows

CLUSTER = ClusterProfile(
    name="any",
    devices_per_node=8,
    memory_bytes=80e9,
    peak_flops=1e15,
    memory_bandwidth=1e12,
    node_bandwidth=1e11,
    network_bandwidth=1e10,
    context_bytes=1e9,
)
GPT = ModelProfile(
    num_layers=8,
    hidden_size=512,
    num_heads=8,
    num_query_groups=8,
    head_size=64,
    ffn_size=2048,
    seq_length=256,
    vocab_size=1024,
)
ODD = replace(GPT, num_layers=4, hidden_size=72, num_heads=6, num_query_groups=3, head_size=12)
MIXTURE = replace(
    GPT,
    **LLAMA,
    num_experts=4,
    experts_per_token=2,
    expert_ffn_size=1024,
    shared_expert_ffn_size=512,
    num_dense_layers=2,
)
LATENT = LatentAttention(query_rank=96, key_value_rank=64, rope_head_size=32, value_head_size=64)


def strategy(text: str, batch: int = 96, **choices: Any) -> Strategy:  # noqa: ANN401 - of any field
    return Strategy(layout=ParallelLayout.parse(text), global_batch_size=batch, **choices)


# ---- parameters -----------------------------------------------------------------------------


def test_tensor_and_pipeline_ranks_share_the_whole_model() -> None:
    """Norms and biases of row-parallel matrices are on every tensor rank, all else on one."""
    whole = stage_elements(GPT, ParallelLayout(), is_sharded=False, is_bucketed=False)[0]
    h, layers = GPT.hidden_size, GPT.num_layers
    replicated = layers * 6 * h + 2 * h + GPT.seq_length * h
    for tp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)):
        layout = ParallelLayout(tp=tp, pp=pp)
        stages = stage_elements(GPT, layout, is_sharded=False, is_bucketed=False)
        embedding = GPT.vocab_size * h if pp > 1 else 0
        total = tp * sum(stage.parameters for stage in stages)
        assert total == whole.parameters + embedding + (tp - 1) * replicated


def test_a_gpt_layer_has_12_hh_parameters_and_13_h_more() -> None:
    two = stage_elements(GPT, ParallelLayout(), is_sharded=False, is_bucketed=False)[0]
    fewer = replace(GPT, num_layers=7)
    one = stage_elements(fewer, ParallelLayout(), is_sharded=False, is_bucketed=False)[0]
    assert two.parameters - one.parameters == 12 * 512 * 512 + 13 * 512


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=12),
    st.integers(1, 9),
    st.none() | st.integers(1, 900),
    st.integers(-1, 11),
)
def test_every_element_of_a_buffer_has_one_owner(
    sizes: list[int], shards: int, bucket: int | None, alone: int
) -> None:
    found = buffer_elements(sizes, shards, bucket, alone=alone)
    assert found.parameters == sum(found.owned) == sum(sizes)
    assert len(found.owned) == shards
    assert found.allocated % math.lcm(shards, 128) == 0
    assert max(found.owned) <= found.allocated // shards
    buckets = len(sizes) if bucket else min(len(sizes), 3)
    padding = 63 * len(sizes) + math.lcm(shards, 128) * buckets
    assert found.allocated <= sum(sizes) + padding


def test_without_shards_a_buffer_has_no_padding() -> None:
    found = buffer_elements([3, 5], 0)
    assert (found.parameters, found.allocated, found.owned) == (8, 8, (8,))


@pytest.mark.parametrize("model", [GPT, ODD, MIXTURE, replace(MIXTURE, latent=LATENT)])
def test_buffers_that_need_no_padding_are_shared_evenly(model: ModelProfile) -> None:
    """What many strategies skip, because it changes nothing."""
    seen = set()
    for tp, pp, dp, ep in itertools.product((1, 2), (1, 2), (1, 2, 3, 4, 8), (1, 2)):
        if dp % ep or (ep > 1 and not model.num_experts):
            continue
        layout = ParallelLayout(tp=tp, pp=pp, dp=dp, ep=ep)
        padded = has_padding(model, tp, ep, dp)
        seen.add(padded)
        for stage in stage_elements(model, layout, is_sharded=True, is_bucketed=True):
            assert padded or stage.allocated == stage.parameters
            assert padded or len(set(stage.owned)) == 1
    assert True in seen


# ---- the schedule ---------------------------------------------------------------------------


def units(pp: int, vpp: int, micro_batches: int) -> list[int]:
    """Chunks in the order in which a stage runs them forward, group after group of `pp`."""
    return [
        chunk
        for start in range(0, micro_batches, pp)
        for chunk in range(vpp)
        for _ in range(start, min(start + pp, micro_batches))
    ]


@pytest.mark.parametrize(
    ("pp", "vpp", "groups"), list(itertools.product((2, 3, 4), (1, 2, 3), (1, 2, 3)))
)
def test_a_stage_keeps_most_when_its_first_backward_pass_starts(
    pp: int, vpp: int, groups: int
) -> None:
    """Plays the schedule of every stage: warm-up, then forward and backward by turns."""
    micro_batches = pp * groups
    forward = units(pp, vpp, micro_batches)
    backward = [vpp - 1 - chunk for chunk in forward]
    for stage in range(pp):
        warm_up = pp - stage - 1 if vpp == 1 else 2 * (pp - stage - 1) + (vpp - 1) * pp
        alive = [0] * vpp
        first: list[int] = []
        most = 0
        for step in range(len(forward) + warm_up + 1):
            if step < len(forward):
                alive[forward[step]] += 1
            most = max(most, sum(alive))
            if warm_up <= step < len(forward) + warm_up:
                first = first or list(alive)
                alive[backward[step - warm_up]] -= 1
        first = first or [forward.count(chunk) for chunk in range(vpp)]
        found = chunks_in_flight(stage, np.arange(vpp), pp, vpp, micro_batches)
        assert found.tolist() == first
        assert sum(first) == most
        assert set(alive) == {0}


# ---- activations ----------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("selective", [False, True])
def test_a_layer_keeps_what_korthikanti_et_al_count(tp: int, splits: bool, selective: bool) -> None:
    """Per token h (10 + 24 / t + 5 a s / (h t)) and so on: arXiv 2205.05198, table 2."""
    choices = Choices(
        tp=np.array([float(tp)]),
        cp=np.ones(1),
        element=np.array([2.0]),
        splits_sequence=np.array([splits]),
        is_flash=np.array([False]),
        is_selective=np.array([selective]),
    )
    h, a, s = GPT.hidden_size, GPT.num_heads, GPT.seq_length
    outside = 10 / tp if splits else 10
    scores = 0 if selective else 5 * a * s / (h * tp)
    found = layer_bytes(GPT, choices, has_experts=False)
    assert found.kept[0] == pytest.approx(h * (outside + 24 / tp + scores))
    assert found.recomputed[0] == pytest.approx(2 * h / (tp if splits else 1))


def totals(prediction: MemoryPrediction) -> list[float]:
    return [stage.total for stage in prediction.stages]


def predict(text: str, **choices: Any) -> MemoryPrediction:  # noqa: ANN401 - likewise
    return predict_memory(GPT, CLUSTER, strategy(text, **choices))


def test_earlier_stages_keep_more_micro_batches() -> None:
    kept = [stage.activations for stage in predict("PP4,DP2,MBS1").stages]
    assert kept == sorted(kept, reverse=True)
    few = [stage.activations for stage in predict("PP4,DP2,MBS1", batch=2).stages]
    assert few[0] < kept[0]


def test_choices_that_save_memory_do() -> None:
    base = predict("TP2,PP2,DP2,MBS2", is_flash=False)
    for choices in (
        {"recompute": "selective"},
        {"recompute": "full"},
        {"recompute": "full", "recompute_layers": 1},
        {"sequence_parallel": True},
        {"zero_stage": 1},
        {"zero_stage": 2},
        {"zero_stage": 3},
        {"is_flash": True},
    ):
        assert predict("TP2,PP2,DP2,MBS2", **{"is_flash": False, **choices}).peak_bytes < (
            base.peak_bytes
        ), choices
    kept = [
        predict("TP2,PP2,DP2,MBS2", recompute="full", recompute_layers=n).stages[0].activations
        for n in range(5)
    ]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] == predict("TP2,PP2,DP2,MBS2").stages[0].activations
    assert kept[4] == predict("TP2,PP2,DP2,MBS2", recompute="full").stages[0].activations


def test_each_precision_takes_its_bytes() -> None:
    """Weights, gradients and optimizer state of Megatron's mixed precision, per parameter."""
    parameters = predict("DP2,MBS1", precision="fp32").stages[0].parameters / 4
    for precision, expected in {
        "fp32": (4, 4, 8),
        "fp16": (2, 2, 12),
        "bf16": (2, 4, 12),
        "fp8": (4, 4, 12),
    }.items():
        stage = predict("DP2,MBS1", precision=precision).stages[0]
        state = (stage.parameters, stage.gradients, stage.optimizer)
        assert state == tuple(each * parameters for each in expected)
        sharded = predict("DP2,MBS1", precision=precision, zero_stage=1).stages[0]
        assert sharded.optimizer == stage.optimizer / 2


def test_a_device_needs_more_than_the_peak() -> None:
    found = predict("TP2,PP2,DP2,MBS1")
    assert found.peak_bytes == max(totals(found))
    assert found.required_bytes > found.peak_bytes + CLUSTER.context_bytes


# ---- many at once ---------------------------------------------------------------------------


@pytest.mark.parametrize("model", [GPT, ODD, MIXTURE, replace(MIXTURE, latent=LATENT)])
def test_many_strategies_at_once_are_those_one_by_one(model: ModelProfile) -> None:
    layouts = ["DP1,MBS1", "TP2,PP2,DP3,MBS2", "PP2,VPP2,DP2,MBS1"]
    if model.num_layers == 8:
        layouts += ["PP2,DP2,STAGES3-5,MBS1", "PP2,VPP2,DP2,STAGES1-2-3-2,MBS1"]
    many = [
        strategy(text, zero_stage=zero, recompute=recompute, precision=precision)
        for text, zero, recompute, precision in itertools.product(
            layouts, (0, 1), ("none", "full"), ("bf16", "fp16")
        )
    ]
    table = predict_memories(model, CLUSTER, many)
    for index, one in enumerate(many):
        alone = predict_memory(model, CLUSTER, one)
        assert table.prediction(index) == alone
        assert table.peak_bytes[index] == alone.peak_bytes
        assert table.required_bytes[index] == alone.required_bytes


@pytest.mark.parametrize("model", [GPT, ODD, MIXTURE, replace(MIXTURE, latent=LATENT)])
def test_the_fullest_stage_is_among_those_that_can_be(model: ModelProfile) -> None:
    many = [
        replace(one, recompute_layers=layers if one.recompute == "full" else None)
        for one in strategies(
            model, devices=16, devices_per_node=8, global_batch_size=48, scope=EVERYTHING
        )
        for layers in (None, 1)
    ]
    whole = predict_memories(model, CLUSTER, many)
    some = predict_memories(model, CLUSTER, many, is_decisive=True)
    assert len(some.stages.total) < len(whole.stages.total)
    assert some.peak_bytes.tolist() == whole.peak_bytes.tolist()


ALIGNED = replace(GPT, hidden_size=4096, num_heads=32, num_query_groups=32, head_size=128)
WIDE = {"ffn_size": 16384, "num_layers": 6, "vocab_size": 51200}


@pytest.mark.parametrize("dp", [3, 4, 6, 12, 24])
@pytest.mark.parametrize(
    "model",
    [
        replace(ALIGNED, **WIDE),
        replace(ALIGNED, **WIDE, is_tied=False),
        replace(MIXTURE, num_layers=6, hidden_size=4096, ffn_size=14336, expert_ffn_size=8192),
        replace(ODD, num_layers=6),
    ],
    ids=["tied", "untied", "experts", "odd sizes"],
)
def test_padded_buffers_of_many_strategies_are_those_of_one(model: ModelProfile, dp: int) -> None:
    """A closed formula and a table of fillings against the buffers tensor by tensor."""
    layouts = [
        ParallelLayout(tp=tp, pp=pp, dp=dp, vpp=vpp, ep=ep, micro_batch_size=1)
        for tp, pp, vpp, ep in itertools.product((1, 2), (1, 2, 3), (1, 2), (1, 2))
        if (pp > 1 or vpp == 1) and 6 % (pp * vpp) == 0 and dp % ep == 0
        if ep == 1 or model.num_experts
    ]
    layouts.append(ParallelLayout(pp=3, dp=dp, micro_batch_size=1, stage_layers=(1, 3, 2)))
    assert has_padding(model, 1, 1, dp) == (dp % 3 == 0 or model.hidden_size == 72)
    for overlaps in (False, True):
        many = [
            Strategy(layout=layout, global_batch_size=72, zero_stage=1, overlaps_gradients=overlaps)
            for layout in layouts
        ]
        table = predict_memories(model, CLUSTER, many)
        for index, layout in enumerate(layouts):
            elements = stage_elements(model, layout, is_sharded=True, is_bucketed=overlaps)
            for stage, found in zip(elements, table.prediction(index).stages, strict=True):
                assert found.parameters == 2 * stage.allocated
                assert found.gradients == 4 * stage.allocated
                assert found.optimizer == 12 * max(stage.owned)


def test_nothing_to_predict_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one strategy"):
        predict_memories(GPT, CLUSTER, [])


def test_ten_thousand_strategies_take_little_time() -> None:
    model = replace(GPT, num_layers=96, hidden_size=12288, num_heads=96, num_query_groups=96)
    many = strategies(model, devices=1024, devices_per_node=8, global_batch_size=1536)[:10_000]
    columns = Columns.of(many)
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        peaks = predict_memories(model, CLUSTER, columns, is_decisive=True).peak_bytes
        seconds.append(time.process_time() - begin)
        assert len(peaks) == 10_000
    assert min(seconds) < 0.1


# ---- published measurements -----------------------------------------------------------------


def errors_pct(rows: list[MemoryRow], *, is_last_rank: bool) -> NDArray[np.float64]:
    found = []
    for row in rows:
        prediction = predict_memory(row.model, CLUSTER, row.strategy)
        predicted = prediction.stages[-1].total if is_last_rank else prediction.peak_bytes
        found.append(100 * (predicted / row.measured_bytes - 1))
    return np.array(found)


def test_dense_and_expert_models_on_eight_b200() -> None:
    errors = errors_pct(list(b200_rows()), is_last_rank=False)
    assert len(errors) >= 10
    assert np.abs(errors).mean() <= 0.5
    assert np.abs(errors).max() <= 1.5


def test_functional_tests_of_megatron() -> None:
    errors = errors_pct(list(functional_rows()), is_last_rank=True)
    assert len(errors) >= 20
    assert np.abs(errors).mean() <= 4.0
    assert np.median(np.abs(errors)) <= 2.0
