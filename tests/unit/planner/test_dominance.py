import numpy as np
import pytest

from tenplex_megatron.planner.tensoropt.builders import vgg16
from tenplex_megatron.planner.tensoropt.dominance import restricted, worthwhile
from tenplex_megatron.planner.tensoropt.network import price
from tenplex_megatron.planner.tracking import Edge, Node, OperatorGraph, track
from tests.unit.planner.clusters import A100


def random_graph(seed: int) -> OperatorGraph:
    """Operators on a chain and some more edges; whole costs, so that ties occur."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 6, size=rng.integers(2, 6))
    names = [f"operator{number}" for number in range(len(sizes))]

    def costs(*shape: int) -> tuple[np.ndarray, np.ndarray]:
        memory, time = rng.integers(0, 6, size=(2, *shape)).astype(np.float64)
        return memory, time

    nodes = {name: Node(*costs(size)) for name, size in zip(names, sizes, strict=True)}
    pairs = [(number, number + 1) for number in range(len(sizes) - 1)]
    pairs += [
        tuple(sorted(rng.choice(len(sizes), 2, replace=False))) for _ in range(rng.integers(3))
    ]
    edges = [Edge(names[a], names[b], *costs(sizes[a], sizes[b])) for a, b in pairs]
    return OperatorGraph(nodes, edges)


@pytest.mark.parametrize("seed", range(60))
def test_the_frontier_is_the_same_without_what_is_not_worthwhile(seed: int) -> None:
    graph = random_graph(seed)
    whole = track(graph).frontier
    left = track(restricted(graph, worthwhile(graph))).frontier
    np.testing.assert_array_equal(left.memory, whole.memory)
    np.testing.assert_array_equal(left.time, whole.time)


def test_every_operator_keeps_a_configuration_and_half_of_a_real_network_goes() -> None:
    for seed in range(60):
        assert all(len(places) for places in worthwhile(random_graph(seed)).values())
    cluster = A100
    graph = price(vgg16(64), 16, cluster).graph
    before = sum(len(node.memory) for node in graph.nodes.values())
    assert sum(map(len, worthwhile(graph).values())) < before / 2


def test_of_equal_configurations_the_first_stays() -> None:
    node = Node(np.array([2.0, 1.0, 1.0]), np.array([1.0, 2.0, 2.0]))
    assert worthwhile(OperatorGraph({"only": node}))["only"].tolist() == [0, 1]


def test_a_neighbour_that_may_ask_for_it_keeps_a_configuration_alive() -> None:
    dear = Node(np.array([0.0, 0.0]), np.array([0.0, 5.0]))
    free = Node(np.array([0.0, 0.0]), np.array([0.0, 0.0]))
    for penalty, kept in ((6.0, [0, 1]), (4.0, [0])):
        pairs = np.array([[0.0, penalty], [0.0, 0.0]])
        edge = Edge("dear", "free", np.zeros((2, 2)), pairs)
        rest = np.array([[0.0, 9.0], [9.0, 0.0]])
        # The third operator keeps both configurations of the second in play.
        tied = Edge("free", "other", np.zeros((2, 2)), rest)
        other = Node(np.array([1.0, 0.0]), np.array([0.0, 1.0]))
        graph = OperatorGraph({"dear": dear, "free": free, "other": other}, [edge, tied])
        assert worthwhile(graph)["dear"].tolist() == kept


def test_what_a_neighbour_loses_is_looked_at_again() -> None:
    """The second way of `first` only pays beside the second way of `second`, which never pays."""
    first = Node(np.zeros(2), np.array([0.0, 5.0]))
    second = Node(np.zeros(2), np.array([0.0, 9.0]))
    edge = Edge("first", "second", np.zeros((2, 2)), np.array([[0.0, 6.0], [0.0, 0.0]]))
    kept = worthwhile(OperatorGraph({"first": first, "second": second}, [edge]))
    assert [places.tolist() for places in kept.values()] == [[0], [0]]
