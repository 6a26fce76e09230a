import itertools
from dataclasses import replace

import numpy as np
import pytest

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError, LayoutError
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.profile import LatentAttention, ModelProfile
from tenplex_megatron.planner.strategy import Recompute, Strategy
from tenplex_megatron.planner.timing import collectives, compute
from tenplex_megatron.planner.timing.candidates import Candidates
from tenplex_megatron.planner.timing.predict import (
    edge_times,
    layer_times,
    predict_time,
    predict_times,
    stage_parameters,
)

MODEL = ModelProfile(
    num_layers=16,
    hidden_size=2048,
    num_heads=16,
    num_query_groups=16,
    head_size=128,
    ffn_size=8192,
    seq_length=1024,
    vocab_size=51200,
)
CLUSTER = ClusterProfile(
    name="test",
    devices_per_node=8,
    memory_bytes=80e9,
    peak_flops=300e12,
    memory_bandwidth=2e12,
    node_bandwidth=300e9,
    network_bandwidth=25e9,
)
LAYOUTS = [
    ParallelLayout(tp=tp, pp=pp, dp=dp, vpp=vpp, micro_batch_size=mbs)
    for tp, pp, dp, vpp, mbs in itertools.product((1, 2, 8), (1, 2, 4), (1, 4), (1, 2), (1, 4))
    if vpp == 1 or pp > 1
]


def strategy(text: str, *, batch: int = 128, **choices: object) -> Strategy:
    return Strategy(layout=ParallelLayout.parse(text), global_batch_size=batch, **choices)


def step_s(text: str, *, cluster: ClusterProfile = CLUSTER, **choices: object) -> float:
    return predict_time(MODEL, cluster, strategy(text, **choices)).step_s


def varied() -> list[Strategy]:
    """Every layout with choices that go round."""
    recompute = itertools.cycle(("none", "selective", "full"))
    return [
        Strategy(
            layout=layout,
            global_batch_size=64,
            sequence_parallel=index % 2 == 0 and layout.tp > 1,
            zero_stage=index % 4,
            recompute=next(recompute),
            is_flash=index % 3 > 0,
            precision=("bf16", "fp16", "fp8")[index % 3],
        )
        for index, layout in enumerate(LAYOUTS)
    ]


def test_many_candidates_are_predicted_as_each_alone() -> None:
    found = predict_times(CLUSTER, Candidates.of(MODEL, varied()))
    for index, each in enumerate(varied()):
        alone = predict_time(MODEL, CLUSTER, each)
        assert alone.step_s == found.step_s[index]
        assert alone.parts == {name: part[index] for name, part in found.parts.items()}


def test_parts_sum_to_the_step_and_none_is_negative() -> None:
    for each in varied():
        found = predict_time(MODEL, CLUSTER, each)
        assert sum(found.parts.values()) == pytest.approx(found.step_s)
        assert all(part >= 0.0 for part in found.parts.values())


def test_no_step_is_faster_than_the_peak_allows() -> None:
    tokens, h = 64 * MODEL.seq_length, MODEL.hidden_size
    flops = 6 * tokens * (12 * MODEL.num_layers * h * h + MODEL.vocab_size * h)
    for each in varied():
        if each.precision != "fp8":
            least = flops / (CLUSTER.peak_flops * each.layout.world_size)
            assert predict_time(MODEL, CLUSTER, each).step_s > least


@pytest.mark.parametrize("layout", ["TP1,PP1,DP1", "TP2,PP2,DP2", "TP8,PP4,DP1"])
def test_twice_the_micro_batches_take_twice_the_passes_and_the_same_rest(layout: str) -> None:
    small, large = (
        predict_time(MODEL, CLUSTER, strategy(f"{layout},MBS2", batch=batch)).parts
        for batch in (64, 128)
    )
    for name, part in small.items():
        factor = 2.0 if name == "passes" else 1.0
        assert large[name] == pytest.approx(factor * part)


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (2, 2), (4, 1), (4, 4), (8, 2)])
def test_a_pipeline_without_edges_takes_the_slots_of_its_schedule(pp: int, vpp: int) -> None:
    # Narayanan et al., section 2.2: m + (p - 1) / v slots of one stage.
    free = replace(CLUSTER, node_bandwidth=1e30, network_bandwidth=1e30)
    free = replace(free, node_latency_s=0.0, network_latency_s=0.0)
    model = replace(MODEL, vocab_size=1, num_layers=32)
    each = strategy(f"PP{pp},VPP{vpp},MBS1", batch=16)
    candidates = Candidates.of(model, [each])
    layer = layer_times(free, candidates)
    edges = sum(float(edge[0]) for edge in edge_times(free, candidates))
    stage = 32 / pp * float(layer.forward_s[0] + layer.backward_s[0])
    found = predict_time(model, free, each).parts
    slots = (found["passes"] + found["bubble"]) / stage
    assert slots == pytest.approx(16 + (pp - 1) / vpp, abs=20 * edges / stage)


@pytest.mark.parametrize("sizes", [(8, 8), (7, 9), (4, 6, 6), (5, 5, 4, 2), (1, 3, 8, 4)])
@pytest.mark.parametrize(("recompute", "layers"), [("none", None), ("full", None), ("full", 3)])
def test_uneven_stages_take_what_their_list_says(
    sizes: tuple[int, ...], recompute: Recompute, layers: int | None
) -> None:
    layout = ParallelLayout(pp=len(sizes), micro_batch_size=2, stage_layers=sizes)
    each = Strategy(
        layout=layout, global_batch_size=32, recompute=recompute, recompute_layers=layers
    )
    quiet = replace(CLUSTER, node_bandwidth=1e30, network_bandwidth=1e30)
    quiet = replace(quiet, node_latency_s=0.0, network_latency_s=0.0)
    candidates = Candidates.of(MODEL, [each])
    layer = layer_times(quiet, candidates)
    passes, again = float((layer.forward_s + layer.backward_s)[0]), layer.full_recompute_s[0]
    limit = 0 if recompute == "none" else MODEL.num_layers if layers is None else layers
    stages = [size * passes + min(size, limit) * float(again) for size in sizes]
    embedding, loss = (float(edge[0]) for edge in edge_times(quiet, candidates))
    stages[0] += embedding
    stages[-1] += loss
    found = predict_time(MODEL, quiet, each).parts
    # Only a middle stage of fewer layers than the limit recomputes less than the formula's mean.
    assert found["passes"] == pytest.approx(16 * max(stages))
    assert found["bubble"] == pytest.approx(sum(stages) - max(stages), rel=0.1)


def test_layers_that_do_not_fit_the_stages_are_refused() -> None:
    with pytest.raises(LayoutError, match="16 layers do not divide over 3 stages"):
        step_s("PP3,MBS1")
    with pytest.raises(LayoutError, match="stage layers sum to 15, the model has 16"):
        step_s("PP2,STAGES7-8,MBS1")


def test_recomputation_costs_a_forward_pass_per_layer_that_recomputes() -> None:
    none, some, every = (
        predict_time(
            MODEL, CLUSTER, strategy("MBS2", batch=2, recompute=kind, recompute_layers=layers)
        ).step_s
        for kind, layers in (("none", None), ("full", 4), ("full", None))
    )
    forward = float(layer_times(CLUSTER, Candidates.of(MODEL, [strategy("MBS2")])).forward_s[0])
    assert some - none == pytest.approx(4 * forward)
    assert every - none == pytest.approx(16 * forward)


def test_selective_recomputation_repeats_attention_without_flash_and_nothing_with_it() -> None:
    for is_flash in (False, True):
        plain, selective, full = (
            step_s("MBS2", recompute=kind, is_flash=is_flash)
            for kind in ("none", "selective", "full")
        )
        assert (plain == selective) == is_flash
        assert selective < full


@pytest.mark.parametrize("slower", ["node_bandwidth", "network_bandwidth", "memory_bandwidth"])
def test_a_slower_cluster_is_never_faster(slower: str) -> None:
    candidates = Candidates.of(MODEL, varied())
    slow = replace(CLUSTER, **{slower: getattr(CLUSTER, slower) / 4})
    assert np.all(
        predict_times(slow, candidates).step_s >= predict_times(CLUSTER, candidates).step_s
    )


def test_tensor_parallelism_that_leaves_the_node_is_slower_than_inside() -> None:
    assert step_s("TP16,MBS4") > 2 * step_s("TP8,DP2,MBS4")


def test_overlap_hides_communication_but_never_all_of_it() -> None:
    for layout in ("DP8,MBS1", "TP2,DP16,MBS1"):
        hidden, shown = (
            predict_time(MODEL, CLUSTER, strategy(layout, overlaps_gradients=overlaps)).parts
            for overlaps in (True, False)
        )
        assert 0.0 < hidden["data_parallel"] < shown["data_parallel"]
    shown_s, hidden_s = (
        step_s("TP8,MBS4", sequence_parallel=True, overlaps_tensor_parallel=overlaps)
        for overlaps in (False, True)
    )
    assert hidden_s < shown_s


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_fused_loss_saves_its_traffic_on_every_micro_batch(tp: int) -> None:
    layout = f"TP{tp},MBS4"
    logits = 128 * MODEL.seq_length * MODEL.vocab_size / tp
    byte_s = logits / (CLUSTER.memory_bandwidth * CLUSTER.memory_efficiency)
    fused, native = (step_s(layout, loss_fusion=kind) for kind in ("te", "native"))
    assert native - fused == pytest.approx(22 * byte_s)
    assert step_s(layout) - native == pytest.approx(20 * byte_s)


def test_a_sharded_optimizer_updates_a_share_of_the_parameters() -> None:
    whole, share = (
        predict_time(MODEL, CLUSTER, strategy("DP8,MBS1", zero_stage=stage)).parts["optimizer"]
        for stage in (0, 1)
    )
    assert whole == pytest.approx(8 * share)


def test_zero3_takes_at_least_the_time_of_its_gathers() -> None:
    parameters = sum(stage_parameters(Candidates.of(MODEL, [strategy("DP64,MBS1")])))
    least = 3 * 2 * float(parameters[0]) * 63 / 64 / CLUSTER.network_bandwidth
    assert step_s("DP64,MBS1", batch=64, zero_stage=3) > least


def test_one_expert_that_sees_every_token_is_the_dense_layer() -> None:
    experts = replace(MODEL, num_experts=1, expert_ffn_size=MODEL.ffn_size)
    each = strategy("TP2,PP2,MBS2")
    dense, routed = (
        layer_times(CLUSTER, Candidates.of(model, [each])) for model in (MODEL, experts)
    )
    assert routed.forward_s[0] == pytest.approx(dense.forward_s[0], rel=0.02)


GROUPED = replace(MODEL, num_query_groups=4, is_gated=True)
LATENT = replace(
    MODEL,
    latent=LatentAttention(
        query_rank=768, key_value_rank=256, rope_head_size=64, value_head_size=96
    ),
)


@pytest.mark.parametrize("model", [MODEL, GROUPED, LATENT])
def test_every_weight_of_a_layer_is_multiplied_once_per_token(model: ModelProfile) -> None:
    ideal = replace(CLUSTER, memory_bandwidth=1e30, gemm_wave=0.0, flash_efficiency=1.0)
    candidates = Candidates.of(model, [strategy("PP16,MBS1", batch=16)])
    weights = stage_parameters(candidates)[0] - model.vocab_size * model.hidden_size
    channels = model.head_size, model.head_size
    if model.latent:
        channels = model.head_size + model.latent.rope_head_size, model.latent.value_head_size
    scores = model.seq_length / 2 * model.num_heads * sum(channels)
    flops = 2 * model.seq_length * (weights + scores)
    found = compute.layer_compute(ideal, candidates).forward_s
    assert found == pytest.approx(flops / (ideal.peak_flops * ideal.gemm_efficiency))


@pytest.mark.parametrize("dense", range(0, 17, 4))
def test_a_layer_is_the_mean_of_those_with_experts_and_those_without(dense: int) -> None:
    def forward_s(**sizes: int) -> float:
        model = replace(MODEL, **sizes)
        candidates = Candidates.of(model, [strategy("DP8,EP4,MBS2")])
        return float(compute.layer_compute(CLUSTER, candidates).forward_s[0])

    experts = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_size": 4096}
    part = dense / MODEL.num_layers
    mean = part * forward_s() + (1 - part) * forward_s(**experts)
    assert forward_s(**experts, num_dense_layers=dense) == pytest.approx(mean)


def test_experts_are_split_over_ranks_and_their_all_to_all_leaves_the_node() -> None:
    model = replace(MODEL, num_experts=64, experts_per_token=4, expert_ffn_size=1024)
    here, split, far = (
        Candidates.of(model, [strategy(f"DP64,EP{ep},MBS4", batch=256)]) for ep in (1, 8, 64)
    )
    assert stage_parameters(here)[1][0] == 8 * stage_parameters(split)[1][0]
    assert layer_times(CLUSTER, far).forward_s[0] > layer_times(CLUSTER, split).forward_s[0]


@pytest.mark.parametrize(("size", "stride"), list(itertools.product((1, 2, 4, 8, 16), repeat=2)))
def test_a_group_uses_the_network_exactly_when_it_leaves_the_node(size: int, stride: int) -> None:
    link = collectives.group_link(CLUSTER, np.array([float(size)]), np.array([float(stride)]))
    leaves = size * stride > CLUSTER.devices_per_node
    assert (link.latency_s[0] == CLUSTER.network_latency_s) == leaves
    node = CLUSTER.node_bandwidth * CLUSTER.node_efficiency
    card = CLUSTER.network_bandwidth * CLUSTER.network_efficiency
    in_node = max(1, min(size, CLUSTER.devices_per_node // stride))
    assert link.bandwidth[0] == pytest.approx(min(node, card * in_node) if leaves else node)


def test_a_group_of_one_exchanges_nothing() -> None:
    one = np.array([1.0])
    link = collectives.group_link(CLUSTER, one, one)
    assert collectives.all_reduce_s(link, 1e9 * one)[0] == 0.0
    assert collectives.all_to_all_s(CLUSTER, link, one, 1e9 * one)[0] == 0.0


def test_a_large_product_runs_at_the_reached_rate_and_a_small_one_waits_for_a_wave() -> None:
    candidates = Candidates.of(MODEL, [strategy("MBS1")])
    rate = CLUSTER.peak_flops * CLUSTER.gemm_efficiency

    def seconds(m: float, n: float, k: float) -> float:
        found = compute.gemm_s(CLUSTER, candidates, *(np.array([size]) for size in (m, n, k)))
        return float(found[0])

    assert seconds(65536, 65536, 8192) == pytest.approx(2 * 65536**2 * 8192 / rate, rel=1e-3)
    assert seconds(128, 128, 8192) > 50 * 2 * 128**2 * 8192 / rate


def test_a_cluster_with_an_impossible_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"network_bandwidth: expected a number above 0, got 0"):
        replace(CLUSTER, network_bandwidth=0.0)
    with pytest.raises(ConfigError, match=r"overlap: expected a number at least 0, got -1"):
        replace(CLUSTER, overlap=-1.0)
