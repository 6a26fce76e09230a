"""Cuts into stages and numbers of recomputed layers: nothing of the frontier is missed."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.columns import Columns
from tenplex_megatron.planner.frontier import Frontier
from tenplex_megatron.planner.memory.prices import Prices
from tenplex_megatron.planner.paces import Paces
from tenplex_megatron.planner.profile import LatentAttention, ModelProfile
from tenplex_megatron.planner.rules import broken_rules
from tenplex_megatron.planner.search import search
from tenplex_megatron.planner.space import Scope, layouts
from tenplex_megatron.planner.stage_costs import StageCosts
from tenplex_megatron.testing.every_strategy import (
    every_cut,
    every_strategy,
    missed,
    predicted,
)
from tests.unit.planner.clusters import A100

GPT = ModelProfile(
    num_layers=6,
    hidden_size=1024,
    num_heads=8,
    num_query_groups=4,
    head_size=128,
    ffn_size=4096,
    seq_length=2048,
    vocab_size=32000,
)
MIXTURE = replace(
    GPT, num_experts=4, experts_per_token=2, expert_ffn_size=1024, has_bias=False, is_gated=True
)
MODELS = {
    "tied": GPT,
    "large vocabulary": replace(GPT, vocab_size=256000, is_tied=False),
    "odd sizes": replace(
        GPT, hidden_size=72, num_heads=6, num_query_groups=3, head_size=12, ffn_size=290,
        vocab_size=1001,
    ),
    "wide": replace(GPT, num_layers=5, hidden_size=8192, num_heads=64, num_query_groups=64,
                    ffn_size=32768),
    "experts": MIXTURE,
    "leading layers": replace(MIXTURE, num_dense_layers=2, shared_expert_ffn_size=512),
    "latent": replace(
        GPT,
        latent=LatentAttention(
            query_rank=96, key_value_rank=64, rope_head_size=32, value_head_size=64
        ),
    ),
}  # fmt: skip
SLOW_NETWORK = replace(A100, network_bandwidth=1e9, devices_per_node=2, context_bytes=1e9)
SCOPE = Scope(recompute=("none", "full"), max_virtual_stages=3)


def random_world(seed: int) -> tuple[ModelProfile, ClusterProfile, Scope, dict[str, Any]]:
    """A model, a cluster, what is worth a try, and the arguments of a search."""
    draw = np.random.default_rng(seed)
    model = replace(list(MODELS.values())[seed % len(MODELS)], num_layers=int(draw.integers(2, 8)))
    cluster = replace(
        A100,
        devices_per_node=int(draw.choice([2, 8])),
        memory_bytes=10 ** draw.uniform(8.5, 11),
        network_bandwidth=10 ** draw.uniform(8, 10.5),
        launch_backward_s=float(draw.choice([0.0, 1.6e-3])),
        overlap=float(draw.choice([0.0, 0.7, 1.0])),
    )
    kinds = [("none", "full"), ("none", "selective", "full"), ("full",), ("none",)]
    scope = Scope(
        recompute=kinds[int(draw.integers(len(kinds)))],
        zero_stages=(0, 1, 2, 3) if draw.random() < 0.3 else (0, 1),
        some_layers=draw.random() < 0.8,
        uneven_stages=draw.random() < 0.8,
        is_flash=draw.random() < 0.6,
        fewer_replicas=draw.random() < 0.3,
        overlaps_gradients=draw.random() < 0.7,
        precision="fp16" if draw.random() < 0.3 else "bf16",
        max_virtual_stages=int(draw.choice([1, 4])),
    )
    arguments = {
        "devices": int(draw.integers(2, 6)),
        "devices_per_node": cluster.devices_per_node,
        "global_batch_size": int(draw.choice([1, 2, 6, 24, 96])),
        "micro_batch_sizes": (1, 2),
    }
    return model, cluster, scope, arguments


def check(
    model: ModelProfile, cluster: ClusterProfile, scope: Scope, arguments: dict[str, Any]
) -> int:
    """The search finds the best strategy under every memory limit, and predicts it right."""
    everything = list(every_strategy(model, scope=scope, **arguments))
    best = Frontier.of(*predicted(model, cluster, everything))
    found = search(model, cluster, scope=scope, **arguments)
    places = found.frontier()
    points = [found.strategies[place] for place in places]
    memory, step_s = predicted(model, cluster, points)
    assert found.memory_bytes[places] == pytest.approx(memory, rel=1e-12)
    assert found.step_s[places] == pytest.approx(step_s, rel=1e-12)
    assert set(points) <= set(everything)
    assert missed(best, Frontier.of(memory, step_s)) == 0
    assert missed(Frontier.of(memory, step_s), best) == 0
    return len(everything)


@pytest.mark.parametrize("cluster", [A100, SLOW_NETWORK], ids=["fast", "slow network"])
@pytest.mark.parametrize("name", MODELS)
def test_the_frontier_has_the_best_of_all_cuts_under_every_memory_limit(
    name: str, cluster: ClusterProfile
) -> None:
    arguments = {
        "devices": 6,
        "devices_per_node": cluster.devices_per_node,
        "global_batch_size": 12,
        "micro_batch_sizes": (1, 2),
    }
    assert check(MODELS[name], cluster, SCOPE, arguments) > 700


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_the_same_in_random_worlds(first: int) -> None:
    for seed in range(first, first + 10):
        check(*random_world(seed))


def columns(cuts: list[tuple[int, ...]], name: str = "tied") -> Columns:
    """The first layout of as many stages as the cuts have."""
    found = layouts(
        MODELS[name],
        devices=8,
        devices_per_node=8,
        global_batch_size=12,
        micro_batch_sizes=(2,),
        scope=SCOPE,
    )
    return found.at(np.flatnonzero((found.pp == len(cuts[0])) & (found.vpp == 1)))


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_no_cut_is_faster_than_the_bound_of_its_largest_stage(name: str, pp: int) -> None:
    model = MODELS[name]
    cuts = [cut for cut in every_cut(model, pp, 1, uneven=True) if cut is not None]
    found = columns(cuts, name)
    paces = Paces(model, A100, found)
    some = [found.strategy(place) for place in range(len(found))]
    for cut, recomputed in itertools.product(cuts, range(max(max(cut) for cut in cuts) + 1)):
        largest = np.full(len(some), max(cut))
        layers = np.full(len(some), recomputed)
        place = np.arange(len(some))
        bound = paces.least_step_s(place, layers, largest)
        strategies = [
            replace(
                one,
                layout=replace(one.layout, stage_layers=cut),
                recompute="full" if recomputed else "none",
                recompute_layers=recomputed or None,
            )
            for one in some
        ]
        _, step_s = predicted(model, A100, strategies)
        exact = paces.step_s(
            place, layers, largest=largest, first=layers * 0 + cut[0], last=layers * 0 + cut[-1]
        )
        assert (bound <= step_s).all()
        assert exact.tolist() == step_s.tolist()


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_fullest_stage_costs_what_its_layers_cost(name: str, pp: int) -> None:
    model = MODELS[name]
    leading = model.num_dense_layers if model.num_experts else 0
    cuts = [cut for cut in every_cut(model, pp, 1, uneven=True) if cut and cut[0] >= leading]
    found = columns(cuts, name)
    costs = StageCosts(model, A100, found, Prices.of(model, found))
    place, layers = np.arange(len(found)), model.num_layers
    for recomputed in range(layers + 1):
        again = np.full(len(found), recomputed)
        first, last, between = (
            of(place, again, layers) for of in (costs.first, costs.last, costs.between)
        )
        assert (np.diff(first[:, leading:]) >= 0).all()
        assert (np.diff(last) >= 0).all()
        assert (np.diff(between) >= 0).all()
        assert (np.diff(between, axis=1) <= 0).all()
        for cut in cuts:
            needed = np.maximum(first[:, cut[0]], last[:, cut[-1]])
            for stage, size in enumerate(cut[1:-1]):
                needed = np.maximum(needed, between[:, stage, size - 1])
            strategies = [
                replace(
                    one,
                    layout=replace(one.layout, stage_layers=cut),
                    recompute="full" if recomputed else "none",
                    recompute_layers=recomputed or None,
                )
                for one in map(found.strategy, place.tolist())
            ]
            memory, _ = predicted(model, A100, strategies)
            assert needed == pytest.approx(memory, rel=1e-12)
            # A limit that a cut keeps must never be ruled out.
            assert costs.have_room(
                place, memory * (1 + 1e-9), largest=again * 0 + max(cut), recomputed=again
            ).all()
            assert costs.have_room(place, memory * (1 + 1e-9), largest=again * 0 + layers).all()


def test_early_stages_get_fewer_layers_where_memory_is_short() -> None:
    """They keep more micro-batches in flight."""
    model = replace(GPT, num_layers=24, hidden_size=4096, num_heads=32, num_query_groups=32)
    found = search(
        model, A100, devices=4, global_batch_size=64, scope=replace(SCOPE, recompute=("none",))
    )
    for place in found.frontier():
        layout = found.strategies[place].layout
        if layout.stage_layers is not None and layout.vpp == 1:
            inner = layout.stage_layers[1:-1]
            assert list(inner) == sorted(inner)
            assert broken_rules(model, found.strategies[place]) == []
