import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest

from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.frontier import Frontier
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.tensoropt.builders import mlp, transformer, vgg16
from tenplex_megatron.planner.tensoropt.mesh import DeviceMesh
from tenplex_megatron.planner.tensoropt.network import Network, PricedNetwork, price
from tenplex_megatron.planner.tensoropt.operators import REPEATED
from tenplex_megatron.planner.tensoropt.search import Found, search
from tenplex_megatron.planner.tracking import track
from tests.unit.planner.clusters import A100

CLUSTER = A100
MODEL = ModelProfile(
    num_layers=2,
    hidden_size=1024,
    num_heads=16,
    num_query_groups=16,
    head_size=64,
    ffn_size=4096,
    seq_length=512,
    vocab_size=32000,
)
NETWORKS = {
    "mlp": mlp(4096, [1024, 4096, 4096, 1024]),
    "vgg16": vgg16(64),
    "transformer": transformer(MODEL, 16),
    "grouped and gated": transformer(replace(MODEL, num_query_groups=4, is_gated=True), 16),
}
each_network = pytest.mark.parametrize("name", NETWORKS)
each_number = pytest.mark.parametrize("num_devices", [1, 2, 4, 8, 16])


@functools.cache
def priced(name: str, num_devices: int) -> PricedNetwork:
    return price(NETWORKS[name], num_devices, CLUSTER, breadth=1)


@functools.cache
def found(name: str, num_devices: int) -> Found:
    return search(priced(name, num_devices), epsilon=0.01)


def parameters(network: Network) -> int:
    return sum(
        operator.elements(operand)
        for operator in network.operators.values()
        for operand in operator.parameters
    )


@each_network
@each_number
def test_a_point_is_at_most_as_slow_and_one_at_most_as_large_as_data_parallelism(
    name: str, num_devices: int
) -> None:
    memory, time = priced(name, num_devices).cost(priced(name, num_devices).data_parallel())
    frontier = found(name, num_devices).frontier
    assert frontier.time[-1] <= time * (1 + 1e-12)
    assert frontier.memory[0] <= memory * (1 + 1e-12)
    fastest = frontier.fastest_within(memory * (1 + 1e-12))
    assert fastest is not None
    assert frontier.time[fastest] <= time * 1.01


@each_network
@each_number
def test_every_point_is_a_strategy_of_that_cost(name: str, num_devices: int) -> None:
    frontier = found(name, num_devices).frontier
    for index in sorted({0, len(frontier) // 2, len(frontier) - 1}):
        memory, time = priced(name, num_devices).cost(found(name, num_devices).strategy(index))
        assert memory == pytest.approx(frontier.memory[index], rel=1e-9)
        assert time == pytest.approx(frontier.time[index], rel=1e-9)


@each_network
def test_one_device_has_one_strategy_and_communicates_nothing(name: str) -> None:
    alone = priced(name, 1)
    assert {len(ways) for ways in alone.configurations.values()} == {1}
    assert all(not edge.time.any() for edge in alone.graph.edges)
    [memory], [time] = found(name, 1).frontier.memory, found(name, 1).frontier.time
    assert (memory, time) == pytest.approx(alone.cost(alone.data_parallel()))


@each_network
def test_twice_the_devices_need_less_memory_each_at_best(name: str) -> None:
    least = [found(name, number).frontier.memory[0] for number in (1, 2, 4, 8, 16)]
    assert all(more < fewer for fewer, more in itertools.pairwise(least))


@each_network
@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_data_parallelism_reschedules_nothing(name: str, num_devices: int) -> None:
    network = priced(name, num_devices)
    assert all(edge.time[0, 0] == 0 for edge in network.graph.edges)
    memory, _ = network.graph.cost(network.data_parallel())
    alone, _ = priced(name, 1).graph.cost(priced(name, 1).data_parallel())
    replicated = parameters(NETWORKS[name]) * 18
    assert memory == pytest.approx(replicated + (alone - replicated) / num_devices)


def test_repeating_everything_on_n_devices_is_one_device() -> None:
    """Where an operator may repeat its work, doing so saves and costs nothing but the edges."""
    network, alone = priced("transformer", 4), priced("transformer", 1)
    repeating = [
        (name, way)
        for name, ways in network.configurations.items()
        for way, split in enumerate(ways)
        if {*split} == {REPEATED}
    ]
    assert {name.rpartition(".")[2] for name, _ in repeating} == {
        "norm",
        "activation",
        "add",
        "loss",
    }
    for name, way in repeating:
        one, many = (graph.nodes[name] for graph in (alone.graph, network.graph))
        assert many.memory[way] == one.memory[0]
        assert many.time[way] == pytest.approx(one.time[0])


@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_the_frontier_of_a_small_mlp_is_that_of_all_its_strategies(num_devices: int) -> None:
    network = price(mlp(24, [12, 48, 24]), num_devices, CLUSTER)
    names = list(network.configurations)
    strategies = [
        dict(zip(names, choice, strict=True))
        for choice in itertools.product(*(range(len(w)) for w in network.configurations.values()))
    ]
    assert len(strategies) > 50
    sums = Frontier.of(*np.transpose([network.graph.cost(strategy) for strategy in strategies]))
    tracked = track(network.graph).frontier
    np.testing.assert_allclose(tracked.memory, sums.memory, rtol=1e-9)
    np.testing.assert_allclose(tracked.time, sums.time, rtol=1e-9)
    # A level for every difference in working memory makes the peak exact too.
    peaks = Frontier.of(*np.transpose([network.cost(strategy) for strategy in strategies]))
    levels = search(network, num_levels=400).frontier
    np.testing.assert_allclose(levels.memory, peaks.memory, rtol=1e-9)
    np.testing.assert_allclose(levels.time, peaks.time, rtol=1e-9)


@pytest.mark.parametrize("num_levels", [1, 2, 4])
def test_more_levels_of_working_memory_lose_nothing(num_levels: int) -> None:
    network = priced("mlp", 8)
    few = search(network, num_levels=num_levels).frontier
    many = search(network, num_levels=2 * num_levels - 1).frontier
    for memory, time in zip(few.memory, few.time, strict=True):
        best = many.fastest_within(memory * (1 + 1e-9))
        assert best is not None
        assert many.time[best] <= time * (1 + 1e-9)


def test_vgg16_has_the_weights_and_the_operations_of_its_table() -> None:
    """138 million parameters: table 2 of arXiv 1409.1556, here without the biases."""
    network = vgg16(1)
    biases = 64 * 2 + 128 * 2 + 256 * 3 + 512 * 6 + 4096 * 2 + 1000
    assert parameters(network) + biases == 138_357_544
    pixels = [224**2, 112**2, 56**2, 28**2, 14**2]
    products = [
        (3 * 64 + 64 * 64, 0),
        (64 * 128 + 128 * 128, 1),
        (128 * 256 + 2 * 256 * 256, 2),
        (256 * 512 + 2 * 512 * 512, 3),
        (3 * 512 * 512, 4),
    ]
    flops = sum(2 * 9 * weights * pixels[stage] for weights, stage in products)
    flops += 2 * (25088 * 4096 + 4096 * 4096 + 4096 * 1000)
    assert sum(operator.flops for operator in network.operators.values()) == flops


@pytest.mark.parametrize(("groups", "gates"), [(16, 1), (4, 1), (16, 2), (4, 2)])
def test_a_transformer_has_the_weights_of_its_sizes(groups: int, gates: int) -> None:
    model = replace(MODEL, num_query_groups=groups, is_gated=gates == 2)
    hidden, ffn = model.hidden_size, model.ffn_size
    query, keys = model.num_heads * model.head_size, groups * model.head_size
    attention = hidden * (query + 2 * keys) + query * hidden
    block = attention + hidden * ffn * gates + ffn * hidden + 2 * 2 * hidden
    expected = 2 * block + 2 * hidden + 2 * model.vocab_size * hidden
    assert parameters(transformer(model, 8)) == expected


def test_a_transformer_computes_what_the_usual_formula_says() -> None:
    """24 b s l h^2 (1 + s / 6h + V / 12lh) forward, with half of the scores masked.

    Source: Narayanan et al., arXiv 2104.04473, section 3.2, where no score is skipped.
    """
    b, s, h, layers, v = 8, MODEL.seq_length, MODEL.hidden_size, 2, MODEL.vocab_size
    flops = sum(operator.flops for operator in transformer(MODEL, b).operators.values())
    assert flops == 24 * b * s * layers * h**2 * (1 + s / (12 * h) + v / (12 * layers * h))


def test_residual_edges_go_round_every_part_of_a_block() -> None:
    network = NETWORKS["transformer"]
    residual = {link.target: link.source for link in network.links if link.slot == 1}
    assert residual == {
        "block0.attention.add": "embedding",
        "block0.mlp.add": "block0.attention.add",
        "block1.attention.add": "block0.mlp.add",
        "block1.mlp.add": "block1.attention.add",
    }


def test_what_a_builder_or_a_search_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="no experts"):
        transformer(replace(MODEL, num_experts=8, expert_ffn_size=64), 8)
    with pytest.raises(ConfigError, match="divisible by 32"):
        vgg16(8, image_size=100)
    with pytest.raises(ConfigError, match="at least 1 level"):
        search(priced("mlp", 1), num_levels=0)
    with pytest.raises(ConfigError, match="batch of 6"):
        price(mlp(6, [16, 16]), 4, CLUSTER).data_parallel()


def test_a_mesh_is_what_the_configurations_are_about() -> None:
    assert priced("mlp", 8).mesh == DeviceMesh.over(8)
