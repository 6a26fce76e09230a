"""What a search returns: strategies worth a look, each with what is predicted of it."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import LayoutError
from tenplex_megatron.planner.exploration import NEAR
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.rules import broken_rules
from tenplex_megatron.planner.search import Evaluated, evaluate, search
from tenplex_megatron.planner.space import Scope, strategies
from tenplex_megatron.planner.strategy import Strategy
from tenplex_megatron.testing.every_strategy import predicted
from tests.unit.planner.clusters import A100

MODEL = ModelProfile(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_query_groups=32,
    head_size=128,
    ffn_size=16384,
    seq_length=2048,
    vocab_size=51200,
)
GPT3 = replace(
    MODEL, num_layers=96, hidden_size=12288, num_heads=96, num_query_groups=96, ffn_size=49152
)
SCOPE = Scope(recompute=("none", "full"))
SEARCH: dict[str, Any] = {"devices": 24, "global_batch_size": 96}


@pytest.fixture(scope="module")
def found() -> Evaluated:
    return search(MODEL, A100, **SEARCH, scope=SCOPE)


def test_every_strategy_runs_comes_once_and_is_predicted_right(found: Evaluated) -> None:
    values = list(found.strategies)
    assert len(set(values)) == len(values) == len(found)
    assert not any(broken_rules(MODEL, strategy) for strategy in values)
    memory, step_s = predicted(MODEL, A100, values)
    assert found.memory_bytes == pytest.approx(memory, rel=1e-12)
    assert found.step_s == pytest.approx(step_s, rel=1e-12)


def test_the_same_search_finds_the_same_in_the_same_order(found: Evaluated) -> None:
    again = search(MODEL, A100, **SEARCH, scope=SCOPE)
    assert list(again.strategies) == list(found.strategies)
    assert again.step_s.tolist() == found.step_s.tolist()


def test_the_frontier_ascends_and_no_strategy_beats_it(found: Evaluated) -> None:
    places = found.frontier()
    memory, step_s = found.memory_bytes[places], found.step_s[places]
    assert (np.diff(memory) > 0).all()
    assert (np.diff(step_s) < 0).all()
    for needed, took in zip(found.memory_bytes, found.step_s, strict=True):
        assert step_s[np.searchsorted(memory, needed, side="right") - 1] <= took


@pytest.mark.parametrize("limit", [20e9, 40e9, 80e9])
def test_the_fastest_that_fit_are_many_layouts(found: Evaluated, limit: float) -> None:
    places = found.fastest(limit)
    assert (found.memory_bytes[places] <= limit).all()
    assert (np.diff(found.step_s[places]) >= 0).all()
    assert places == [
        place
        for place in np.lexsort((found.memory_bytes, found.step_s)).tolist()
        if found.memory_bytes[place] <= limit
    ]
    near = [place for place in places if found.step_s[place] <= NEAR * found.step_s[places[0]]]
    assert len({found.strategies[place].layout for place in near}) >= 10


def test_what_nearly_fits_is_made_to_fit_with_the_fewest_recomputed_layers() -> None:
    tight = replace(A100, memory_bytes=30e9)
    found = search(MODEL, tight, **SEARCH, scope=SCOPE)
    best = found.step_s[found.fastest(30e9)[0]]
    some = [
        (place, strategy)
        for place, strategy in enumerate(found.strategies)
        if strategy.recompute_layers is not None and found.memory_bytes[place] <= 30e9
    ]
    assert len(some) >= 10
    for place, strategy in some:
        layers = strategy.recompute_layers
        assert layers is not None
        fewer = replace(
            strategy,
            recompute="full" if layers > 1 else "none",
            recompute_layers=layers - 1 or None,
        )
        memory, step_s = predicted(MODEL, tight, [fewer])
        on_frontier = place in found.frontier()
        assert on_frontier or (memory > 30e9).all() or (step_s > best).all()


def test_strategies_can_be_looked_up_by_layout(found: Evaluated) -> None:
    for place in (found.frontier()[-1], 0, -1):
        layout = found.strategies[place].layout
        expected = [i for i, one in enumerate(found.strategies) if one.layout == layout]
        assert found.with_layout(layout) == expected
        some = [found.strategies[place] for place in expected]
        assert evaluate(MODEL, A100, some).with_layout(layout) == list(range(len(some)))
    assert found.with_layout(ParallelLayout(tp=31)) == []


def test_only_layouts_that_are_kept_are_searched() -> None:
    found = search(MODEL, A100, **SEARCH, scope=SCOPE, keep=lambda one: one.layout.tp == 4)
    assert {strategy.layout.tp for strategy in found.strategies} == {4}
    assert len(search(MODEL, A100, **SEARCH, keep=lambda _: False)) == 0


@pytest.mark.parametrize(
    ("scope", "kinds"),
    [
        (Scope(recompute=("none",)), {("none", False)}),
        (Scope(recompute=("selective",)), {("selective", False)}),
        (Scope(recompute=("full",), some_layers=False), {("full", False)}),
        (Scope(recompute=("full",)), {("full", False), ("full", True)}),
        (SCOPE, {("none", False), ("full", False), ("full", True)}),
    ],
)
def test_only_what_the_scope_has_is_tried(scope: Scope, kinds: set[tuple[str, bool]]) -> None:
    tight = replace(A100, memory_bytes=30e9)
    found = search(MODEL, tight, devices=8, global_batch_size=96, scope=scope)
    assert {(s.recompute, s.recompute_layers is not None) for s in found.strategies} == kinds
    even = search(
        MODEL, tight, devices=8, global_batch_size=96, scope=replace(scope, uneven_stages=False)
    )
    assert {s.layout.stage_layers for s in even.strategies} == {None}
    assert {s.recompute for s in even.strategies} == {kind for kind, _ in kinds}


def test_some_strategies_are_evaluated_in_their_order() -> None:
    some = strategies(MODEL, devices=8, devices_per_node=8, global_batch_size=32)[::7]
    found = evaluate(MODEL, A100, some)
    assert list(found.strategies) == some
    memory, step_s = predicted(MODEL, A100, some)
    assert found.memory_bytes == pytest.approx(memory, rel=1e-12)
    assert found.step_s == pytest.approx(step_s, rel=1e-12)
    assert len(evaluate(MODEL, A100, [])) == 0


@pytest.mark.parametrize("text", ["PP3", "PP2,STAGES1-2", "PP2,VPP2,STAGES1-2-3-4"])
def test_stages_that_do_not_hold_the_model_are_refused(text: str) -> None:
    layout = replace(ParallelLayout.parse(text), micro_batch_size=1)
    with pytest.raises(LayoutError, match="32"):
        evaluate(MODEL, A100, [Strategy(layout=layout, global_batch_size=8)])


def test_slices_of_the_strategies_are_strategies(found: Evaluated) -> None:
    assert list(found.strategies[2:9:3]) == [found.strategies[place] for place in (2, 5, 8)]
    assert found.strategies[-1] == found.strategies[len(found) - 1]
    with pytest.raises(IndexError):
        found.strategies[len(found)]


def test_a_thousand_devices_take_little_time() -> None:
    seconds = []
    for devices in (1024, 1016, 1024):
        begin = time.process_time()
        found = search(GPT3, A100, devices=devices, global_batch_size=1536, scope=SCOPE)
        assert found.frontier()
        seconds.append(time.process_time() - begin)
        assert len(found) > 10_000
    # A third of a second on an idle core, a fifth when the caches are warm.
    assert min(seconds) < 1.0
