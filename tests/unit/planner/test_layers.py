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
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.rules import broken_rules
from tenplex_megatron.planner.search import search
from tenplex_megatron.planner.space import Scope, layouts
from tenplex_megatron.planner.stage_costs import StageCosts
from tenplex_megatron.testing.every_strategy import (
    GPT,
    MODELS,
    every_cut,
    every_strategy,
    missed,
    predicted,
    random_world,
)
from tests.unit.planner.clusters import A100

SLOW_NETWORK = replace(A100, network_bandwidth=1e9, devices_per_node=2, context_bytes=1e9)
SCOPE = Scope(recompute=("none", "full"), max_virtual_stages=3)


def check(
    model: ModelProfile, cluster: ClusterProfile, scope: Scope, arguments: dict[str, Any]
) -> int:
    """The search finds the best strategy under every memory limit, and predicts it right."""
    everything = list(every_strategy(model, scope, arguments))
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


def columns(pp: int, name: str, batch: int = 12) -> Columns:
    """Layouts of so many stages."""
    found = layouts(
        MODELS[name],
        devices=8,
        devices_per_node=8,
        global_batch_size=batch,
        micro_batch_sizes=(2,),
        scope=replace(SCOPE, zero_stages=(0, 1, 2, 3)),
    )
    return found.at(np.flatnonzero((found.pp == pp) & (found.vpp == 1)))


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [4, 12])
def test_no_cut_is_faster_than_the_bound_of_its_largest_stage(
    name: str, pp: int, batch: int
) -> None:
    model = MODELS[name]
    cluster = A100 if batch > 4 else SLOW_NETWORK
    cuts = [cut for cut in every_cut(model, pp, 1, uneven=True) if cut is not None]
    found = columns(pp, name, batch)
    paces = Paces(model, cluster, found)
    some = [found.strategy(place) for place in range(len(found))]
    for cut, recomputed in itertools.product(cuts, (0, 1, 2, model.num_layers)):
        largest = np.full(len(some), max(cut))
        layers = np.full(len(some), recomputed)
        place = np.arange(len(some))
        bound = paces.least_step_s(place, largest, layers)
        any_bound = paces.least_step_s(place, largest)
        strategies = [
            replace(
                one,
                layout=replace(one.layout, stage_layers=cut),
                recompute="full" if recomputed else "none",
                recompute_layers=recomputed or None,
            )
            for one in some
        ]
        _, step_s = predicted(model, cluster, strategies)
        exact = paces.step_s(
            place, layers, largest=largest, first=layers * 0 + cut[0], last=layers * 0 + cut[-1]
        )
        assert (bound <= step_s).all()
        assert (any_bound <= step_s).all()
        assert exact.tolist() == step_s.tolist()


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_fullest_stage_costs_what_its_layers_cost(name: str, pp: int) -> None:
    model = MODELS[name]
    leading = model.num_dense_layers if model.num_experts else 0
    cuts = [cut for cut in every_cut(model, pp, 1, uneven=True) if cut and cut[0] >= leading]
    found = columns(pp, name)
    costs = StageCosts(model, A100, found, Prices.of(model, found))
    place, layers = np.arange(len(found)), model.num_layers
    for recomputed in (0, 1, layers - 1):
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
