"""The strategies tried are those that break no rule, within what the scope leaves."""

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError, LayoutError
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.space import (
    EVERYTHING,
    RECOMPUTES,
    Scope,
    broken_rules,
    layouts,
    strategies,
)
from tenplex_megatron.planner.strategy import Strategy

BATCH = 12
SIZES = (1, 2, 3)


def model(**changes: int | bool) -> ModelProfile:
    sizes: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 48,
        "num_heads": 12,
        "num_query_groups": 6,
        "head_size": 4,
        "ffn_size": 60,
        "seq_length": 24,
        "vocab_size": 96,
    }
    return ModelProfile(**(sizes | changes))


GPT3 = model(
    num_layers=96, hidden_size=12288, num_heads=96, num_query_groups=96, head_size=128,
    ffn_size=49152, seq_length=2048, vocab_size=51200,
)  # fmt: skip
MODELS = {
    "dense": model(),
    "odd layers": model(num_layers=5, num_query_groups=3),
    "fixed vocabulary": model(num_layers=3, pads_vocab=False, vocab_size=50),
    "experts": model(num_experts=6, has_bias=False, expert_ffn_size=20, num_dense_layers=1),
    "biased experts": model(num_experts=4, expert_ffn_size=32, shared_expert_ffn_size=16),
}


def found(name: str, devices: int, scope: Scope) -> list[Strategy]:
    return strategies(
        MODELS[name],
        devices=devices,
        devices_per_node=4,
        global_batch_size=BATCH,
        micro_batch_sizes=SIZES,
        scope=scope,
    )


def all_strategies(name: str, devices: int) -> Iterator[Strategy]:
    """Every combination of sizes, legal or not, with equal stages."""
    sizes = range(1, devices + 1)
    for tp, pp, dp, cp in itertools.product(sizes, repeat=4):
        if tp * pp * dp * cp > devices:
            continue
        for vpp, ep, micro in itertools.product(range(1, 8), range(1, 8), SIZES):
            try:
                layout = ParallelLayout(tp, pp, dp, vpp, cp, ep, micro)
            except LayoutError:
                continue
            for with_sp in (False, True):
                yield Strategy(layout=layout, global_batch_size=BATCH, sequence_parallel=with_sp)


def without_choices(strategy: Strategy) -> Strategy:
    """The strategy without what Megatron leaves free in every layout."""
    return replace(strategy, zero_stage=0, recompute="none")


@pytest.mark.parametrize("devices", [1, 2, 5, 8])
@pytest.mark.parametrize("name", MODELS)
def test_everything_is_exactly_what_breaks_no_rule(name: str, devices: int) -> None:
    legal = {s for s in all_strategies(name, devices) if not broken_rules(MODELS[name], s)}
    tried = found(name, devices, replace(EVERYTHING, uneven_stages=False))
    assert {without_choices(strategy) for strategy in tried} == legal


@pytest.mark.parametrize("name", MODELS)
def test_uneven_stages_break_no_rule_either(name: str) -> None:
    for strategy in found(name, 9, EVERYTHING):
        assert broken_rules(MODELS[name], strategy) == []


@pytest.mark.parametrize("name", MODELS)
def test_every_strategy_comes_once_with_every_choice_and_in_one_order(name: str) -> None:
    listed = found(name, 8, EVERYTHING)
    assert listed == found(name, 8, EVERYTHING)
    assert len(listed) == len(set(listed))
    for strategy in listed:
        layout = strategy.layout
        zero_stages = (0, 1) if layout.dp * layout.cp > 1 else (0,)
        if (strategy.zero_stage, strategy.recompute) == (0, "none"):
            assert {
                replace(strategy, zero_stage=zero, recompute=recompute)
                for zero in zero_stages
                for recompute in RECOMPUTES
            } <= set(listed)
        assert strategy.zero_stage in zero_stages


@pytest.mark.parametrize("devices", range(1, 10))
def test_of_equal_strategies_the_one_with_most_replicas_stays(devices: int) -> None:
    everything = found("experts", devices, EVERYTHING)
    most: dict[object, int] = {}
    for strategy in everything:
        key = fixed(strategy)
        most[key] = max(most.get(key, 0), strategy.layout.dp)
    expected = [s for s in everything if s.layout.dp == most[fixed(s)]]
    assert found("experts", devices, replace(EVERYTHING, fewer_replicas=False)) == expected


def fixed(strategy: Strategy) -> tuple[object, ...]:
    """All of a layout but its replicas."""
    one = strategy.layout
    return one.tp, one.pp, one.vpp, one.cp, one.ep, one.micro_batch_size, one.stage_layers


def test_scope_only_leaves_out() -> None:
    everything = set(found("odd layers", 8, EVERYTHING))
    tried = found("odd layers", 8, Scope(min_sequence_per_rank=8))
    assert set(tried) < everything
    assert max(s.layout.tp for s in everything) == 6
    assert {s.layout.tp for s in tried} == {1, 3}
    assert max(s.layout.cp for s in tried) == 3
    assert {s.layout.cp for s in found("odd layers", 8, Scope())} == {1}
    fixed_choices = Scope(zero_stages=(1,), recompute=("full",), max_virtual_stages=1)
    for strategy in found("dense", 8, fixed_choices):
        assert (strategy.recompute, strategy.layout.vpp) == ("full", 1)
        assert strategy.zero_stage == (strategy.layout.dp > 1)
    overlapping = found("dense", 8, Scope(overlaps_tensor_parallel=True, loss_fusion="native"))
    for strategy in overlapping:
        assert strategy.overlaps_tensor_parallel == strategy.sequence_parallel
        assert strategy.loss_fusion == "native"


@pytest.mark.parametrize("nodes", [(8,), (8, 8, 5), (3, 3, 3), (7, 1), (0, 4, 2), 8, 5])
def test_tensor_groups_stay_inside_nodes_of_any_size(nodes: tuple[int, ...] | int) -> None:
    devices = 21 if isinstance(nodes, int) else sum(nodes)
    found = strategies(
        model(num_query_groups=12),
        devices=devices,
        devices_per_node=nodes,
        global_batch_size=60,
    )
    if isinstance(nodes, int):
        nodes = tuple(
            len(range(start, min(devices, start + nodes))) for start in range(0, 21, nodes)
        )
    assert {s.layout.tp for s in found} == {t for t in (1, 2, 3, 4, 6) if t <= max(nodes)}
    for strategy in found:
        layout = strategy.layout
        assert layout.world_size // layout.tp <= sum(size // layout.tp for size in nodes)


@pytest.mark.parametrize("devices", [61, 63, 64])
def test_any_number_of_devices_finds_a_large_layout(devices: int) -> None:
    found = strategies(GPT3, devices=devices, devices_per_node=8, global_batch_size=1536)
    assert max(s.layout.world_size for s in found) >= 60


@pytest.mark.parametrize("layers", range(1, 14))
def test_stages_hold_all_layers_and_are_balanced(layers: int) -> None:
    found = strategies(
        model(num_layers=layers),
        devices=8,
        devices_per_node=8,
        global_batch_size=840,
        micro_batch_sizes=(1,),
        scope=EVERYTHING,
    )
    cuts = {(s.layout.pp, s.layout.vpp, s.layout.stage_layers) for s in found}
    for pp, vpp, stages in cuts:
        if stages is None:
            continue
        assert len(stages) == pp * vpp
        assert sum(stages) == layers
        inner = stages[1:-1]
        if vpp > 1:
            # The first and the last chunk hold what is left.
            assert len(set(inner)) == 1
            assert max(stages) == inner[0] == layers // len(stages) + 1
        else:
            # The first may lack one for the embedding, the last one for the loss.
            assert max(stages) - min(stages) <= 2
            assert min(inner, default=1) >= 1
            assert max(stages) == math.ceil((layers + _counted(stages)) / pp)
    for pp in range(1, min(8, layers) + 1):
        assert any(cut[:2] == (pp, 1) for cut in cuts)
    if layers >= 2:
        halves = [layers // 2, layers - layers // 2]
        assert (2, 1, None if layers % 2 == 0 else (halves[1], halves[0])) in cuts


def _counted(stages: tuple[int, ...]) -> int:
    """The least number of embeddings and losses that, counted as layers, explain the stages."""
    for extra in range(3):
        if math.ceil((sum(stages) + extra) / len(stages)) == max(stages):
            return extra
    raise AssertionError(stages)


@pytest.mark.parametrize("name", MODELS)
def test_layouts_are_those_of_the_strategies_each_once(name: str) -> None:
    search = {"devices": 8, "devices_per_node": 4, "global_batch_size": BATCH, "scope": EVERYTHING}
    found = layouts(MODELS[name], micro_batch_sizes=SIZES, **search)
    values = [found.strategy(place) for place in range(len(found))]
    listed = {
        without_choices(without_cut(s))
        for s in strategies(MODELS[name], micro_batch_sizes=SIZES, **search)
    }
    assert len(set(values)) == len(values)
    assert {without_choices(without_cut(s)) for s in values} == listed
    assert {s.recompute for s in values} == {"none"}


def without_cut(strategy: Strategy) -> Strategy:
    return replace(strategy, layout=replace(strategy.layout, stage_layers=None))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"devices": 0}, "must be at least 1"),
        ({"global_batch_size": 0}, "must be at least 1"),
        ({"micro_batch_sizes": (1, 0)}, "must be at least 1"),
        ({"devices_per_node": 0}, "a node holds at least 1 device, got 0"),
        ({"devices_per_node": (4, 3)}, r"nodes of \(4, 3\) devices do not hold 8 devices"),
        ({"devices_per_node": (9, -1)}, r"nodes of \(9, -1\) devices do not hold 8 devices"),
    ],
)
def test_a_search_of_nothing_is_refused(changes: dict[str, Any], match: str) -> None:
    search = {"devices": 8, "devices_per_node": 8, "global_batch_size": 4}
    with pytest.raises(ConfigError, match=f"^search: .*{match}"):
        strategies(model(), **(search | changes))


def test_ten_thousand_layouts_take_little_time() -> None:
    search: dict[str, Any] = {"devices": 1024, "devices_per_node": 8, "global_batch_size": 1536}
    found = layouts(GPT3, **search)
    assert len(found) > 9_000
    seconds = []
    for _ in range(3):
        start = time.process_time()
        layouts(GPT3, **search)
        seconds.append(time.process_time() - start)
    assert min(seconds) / len(found) * 10_000 < 0.1
