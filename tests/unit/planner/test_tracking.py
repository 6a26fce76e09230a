import itertools
import math
from collections.abc import Mapping

import numpy as np
import pytest

from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner import table as table_module
from tenplex_megatron.planner.frontier import Frontier
from tenplex_megatron.planner.operator_graph import Edge, Node, OperatorGraph
from tenplex_megatron.planner.tracking import Method, Tracked, track
from tenplex_megatron.testing.graphs import Draw, brute_force, every_total


def point_of(tracked: Tracked, index: int) -> tuple[float, float]:
    return tracked.frontier.memory[index], tracked.frontier.time[index]


def check_every_point(graph: OperatorGraph, tracked: Tracked) -> None:
    """Each point unrolls to a strategy that costs exactly what the point says."""
    strategies = tracked.strategies()
    assert list(strategies) == list(graph.nodes)
    memory, time = (total[tuple(strategies.values())] for total in every_total(graph))
    assert memory.tolist() == tracked.frontier.memory.tolist()
    assert time.tolist() == tracked.frontier.time.tolist()
    for index in {0, len(memory) // 2, len(memory) - 1} & set(range(len(memory))):
        strategy = tracked.strategy(index)
        assert strategy == {name: choice[index] for name, choice in strategies.items()}
        assert graph.cost(strategy) == point_of(tracked, index)


def check_every_point_by_cost(graph: OperatorGraph, tracked: Tracked) -> None:
    for index in range(len(tracked.frontier)):
        assert graph.cost(tracked.strategy(index)) == point_of(tracked, index)


def check_exactly(graph: OperatorGraph, method: Method) -> Tracked:
    tracked = track(graph, method=method)
    expected = brute_force(graph)
    assert (tracked.frontier.memory.tolist(), tracked.frontier.time.tolist()) == expected
    assert tracked.is_exact
    assert not tracked.was_thinned
    check_every_point(graph, tracked)
    return tracked


@pytest.mark.parametrize("first", range(0, 500, 25))
def test_elimination_finds_the_frontier_of_all_strategies(first: int) -> None:
    for seed in range(first, first + 25):
        # Few different costs make ties, many make long frontiers.
        draw = Draw(seed, highest=(4, 30, 10**9)[seed % 3], impossible=0.05 * (seed % 7 == 0))
        check_exactly(draw.any_graph(), "elimination")


@pytest.mark.parametrize("first", range(500, 600, 25))
def test_auto_finds_it_too(first: int) -> None:
    for seed in range(first, first + 25):
        check_exactly(Draw(seed).any_graph(), "auto")


@pytest.mark.parametrize("first", range(600, 650, 25))
def test_freezing_hubs_in_every_configuration_finds_it_too(first: int) -> None:
    for seed in range(first, first + 25):
        check_exactly(Draw(seed).any_graph(most_operators=5), "repeated")


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_ldp_finds_it_wherever_a_chain_remains(first: int) -> None:
    for seed in range(first, first + 25):
        draw = Draw(seed)
        check_exactly(draw.chain(*draw.generator.integers(1, 5, 2 + seed % 6).tolist()), "ldp")
        check_exactly(draw.reducible(), "ldp")


def test_ldp_refuses_a_graph_without_a_chain() -> None:
    everyone = list(itertools.combinations(range(4), 2))
    with pytest.raises(ConfigError, match="expected a chain; use the method"):
        track(Draw(0).graph([2] * 4, everyone), method="ldp")


@pytest.mark.parametrize(
    ("name", "count", "pairs"),
    [
        ("alone", 1, []),
        ("apart", 3, []),
        ("parallel edges", 2, [(0, 1), (0, 1), (1, 0)]),
        ("leaves", 5, [(0, 2), (1, 2), (2, 3), (2, 4)]),
        ("circle", 5, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]),
        ("ladder", 6, [(0, 1), (2, 3), (4, 5), (0, 2), (2, 4), (1, 3), (3, 5)]),
        ("everyone", 5, list(itertools.combinations(range(5), 2))),
        ("two halves", 6, list(itertools.product(range(3), range(3, 6)))),
        ("two circles", 6, [(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3)]),
    ],
)
@pytest.mark.parametrize("method", ["elimination", "repeated", "auto"])
def test_every_shape_of_graph_is_solved(
    name: str, count: int, pairs: list[tuple[int, int]], method: Method
) -> None:
    for seed in range(3):
        check_exactly(Draw(seed).graph([3] * count, pairs), method)


@pytest.mark.parametrize("candidates_at_once", [1, 7, 100])
def test_the_size_of_the_parts_makes_no_difference(
    candidates_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "CANDIDATES_AT_ONCE", candidates_at_once)
    monkeypatch.setattr(table_module, "CELLS_AT_ONCE", 5)
    monkeypatch.setattr(table_module, "FILTER_FROM", 1)
    monkeypatch.setattr(table_module, "RUN_POINTS", 2)
    for seed in range(10):
        check_exactly(Draw(seed, highest=1000).any_graph(most_operators=5), "auto")


def long_chain(seed: int, count: int, size: int) -> OperatorGraph:
    return Draw(seed, highest=10**6).chain(*[size] * count)


def plain_ldp(graph: OperatorGraph) -> list[tuple[float, float]]:
    """The recurrence over a chain, written down as a person would."""
    reached: list[set[tuple[float, float]]] = []
    edges = [None, *graph.edges]
    for edge, node in zip(edges, graph.nodes.values(), strict=True):
        before = reached
        reached = []
        for a in range(len(node.memory)):
            sums = {(0.0, 0.0)}
            if edge is not None:
                sums = {
                    (memory + edge.memory[b, a], time + edge.time[b, a])
                    for b in range(len(before))
                    for memory, time in before[b]
                }
            reached.append(
                lowest({(memory + node.memory[a], time + node.time[a]) for memory, time in sums})
            )
    return sorted(lowest(set().union(*reached)))


def lowest(points: set[tuple[float, float]]) -> set[tuple[float, float]]:
    kept, best = set(), math.inf
    for memory, time in sorted(points):
        if time < best:
            kept.add((memory, time))
            best = time
    return kept


@pytest.mark.parametrize(("count", "size"), [(24, 4), (12, 8)])
def test_long_frontiers_are_those_of_the_plain_recurrence(count: int, size: int) -> None:
    graph = long_chain(count, count, size)
    tracked = track(graph)
    points = zip(tracked.frontier.memory.tolist(), tracked.frontier.time.tolist(), strict=True)
    assert list(points) == plain_ldp(graph)
    for index in range(0, len(tracked.frontier), 10):
        assert graph.cost(tracked.strategy(index)) == point_of(tracked, index)


@pytest.mark.parametrize("seed", range(20))
def test_costs_that_are_no_whole_numbers_add_up_to_the_last_bit(seed: int) -> None:
    draw = Draw(seed)
    sizes = draw.generator.integers(2, 5, 5).tolist()
    graph = draw.graph(sizes, [*itertools.pairwise(range(5)), (0, 2), (1, 3)])
    graph = scaled(graph, 1 / 3e9, 1 / 7)
    tracked = track(graph)
    check_every_point_by_cost(graph, tracked)
    plain = Frontier.of(*map(np.ravel, every_total(graph)))
    for one, other in itertools.permutations([tracked.frontier, plain]):
        for memory, time in zip(one.memory, one.time, strict=True):
            found = other.fastest_within(memory * (1 + 1e-12))
            assert found is not None
            assert other.time[found] <= time * (1 + 1e-12)


def scaled(graph: OperatorGraph, memory: float, time: float) -> OperatorGraph:
    return OperatorGraph(
        {name: Node(node.memory * memory, node.time * time) for name, node in graph.nodes.items()},
        [
            Edge(edge.source, edge.target, edge.memory * memory, edge.time * time)
            for edge in graph.edges
        ],
    )


def test_the_order_of_equal_layers_never_makes_two_points_of_one() -> None:
    # Floats of the same sum differ with its order: 0.1 + 0.7 + 0.2 is not 0.7 + 0.2 + 0.1.
    node = Node(np.array([0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.7]))
    names = [f"layer{number}" for number in range(20)]
    same = np.zeros((3, 3))
    edges = [Edge(one, other, same, same) for one, other in itertools.pairwise(names)]
    tracked = track(OperatorGraph(dict.fromkeys(names, node), edges))
    choices = np.sort(np.stack(list(tracked.strategies().values())), axis=0)
    assert len(np.unique(choices, axis=1).T) == len(tracked.frontier) > 40


def hub_graph(seed: int) -> OperatorGraph:
    """Six operators who know each other, so that no rule but freezing applies."""
    return Draw(seed, highest=1000).graph([3] * 6, list(itertools.combinations(range(6), 2)))


def test_the_heuristic_is_close_never_better_and_says_that_it_is_one() -> None:
    slower, bigger = [], []
    for seed in range(60):
        graph = hub_graph(seed)
        tracked = track(graph, method="heuristic")
        check_every_point(graph, tracked)
        assert not tracked.is_exact
        memory, time = brute_force(graph)
        for limit, found in zip(tracked.frontier.memory, tracked.frontier.time, strict=True):
            assert found >= time[np.searchsorted(memory, limit, side="right") - 1]
        slower.append(tracked.frontier.time[-1] / time[-1])
        bigger.append(tracked.frontier.memory[0] / memory[0])
    # Measured: 1.030 and 1.198 for time, 1.034 and 1.291 for memory.
    for ratios in (slower, bigger):
        assert np.mean(ratios) < 1.05
        assert np.max(ratios) < 1.35


def test_the_heuristic_is_exact_where_it_freezes_nothing() -> None:
    check_exactly(Draw(1).chain(3, 4, 2, 3), "heuristic")


def test_auto_freezes_hubs_where_exactness_would_take_too_long() -> None:
    few, many = (
        Draw(0).graph([size] * 9, list(itertools.combinations(range(9), 2))) for size in (2, 7)
    )
    assert (track(few).method, track(few).is_exact) == ("elimination", True)
    assert (track(many).method, track(many).is_exact) == ("heuristic", False)
    check_every_point_by_cost(many, track(many))


@pytest.mark.parametrize("method", ["elimination", "repeated"])
def test_what_no_machine_could_do_is_refused(method: Method) -> None:
    graph = Draw(0).graph([9] * 12, list(itertools.combinations(range(12), 2)))
    with pytest.raises(ConfigError, match="combinations of configurations, expected at most"):
        track(graph, method=method)
    assert len(track(graph, method="heuristic").frontier) > 0


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("seed", range(20))
def test_a_thinned_frontier_is_within_epsilon_and_has_true_ends(seed: int, epsilon: float) -> None:
    draw = Draw(seed, highest=10**6)
    graph = draw.chain(*[4] * 10) if seed % 2 else draw.any_graph()
    whole, thin = track(graph).frontier, track(graph, epsilon=epsilon)
    assert thin.is_exact == (not thin.was_thinned)
    assert thin.was_thinned or len(thin.frontier) == len(whole)
    for end in (0, -1):
        assert thin.frontier.memory[end] == whole.memory[end]
        assert thin.frontier.time[end] == whole.time[end]
    for memory, time in zip(whole.memory, whole.time, strict=True):
        index = thin.frontier.fastest_within(memory)
        assert index is not None
        assert thin.frontier.time[index] <= (1 + epsilon) * time
    check_every_point_by_cost(graph, thin)


def test_thinning_says_when_it_acted() -> None:
    graph = long_chain(0, 10, 4)
    assert not track(graph, epsilon=0.0).was_thinned
    assert not track(graph, epsilon=1e-9).was_thinned
    assert track(graph, epsilon=0.1).was_thinned


def test_nothing_to_choose_costs_nothing() -> None:
    tracked = track(OperatorGraph({}))
    assert (tracked.frontier.memory.tolist(), tracked.frontier.time.tolist()) == ([0], [0])
    assert tracked.strategy(0) == {}
    assert OperatorGraph({}).cost({}) == (0, 0)


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_without_a_possible_strategy_the_frontier_is_empty(epsilon: float) -> None:
    never = np.full((2, 2), math.inf)
    graph = Draw(0).chain(2, 2, 2)
    first = graph.edges[0]
    blocked = OperatorGraph(
        graph.nodes, [Edge(first.source, first.target, first.memory, never), graph.edges[1]]
    )
    tracked = track(blocked, epsilon=epsilon)
    assert len(tracked.frontier) == 0
    assert all(len(choice) == 0 for choice in tracked.strategies().values())
    assert blocked.cost({"op0": 0, "op1": 0, "op2": 0}) == (math.inf, math.inf)


def test_the_same_graph_gives_the_same_strategies_each_time() -> None:
    graphs = [Draw(7, highest=3).any_graph() for _ in range(2)]
    one, other = (track(graph).strategies() for graph in graphs)
    assert {k: v.tolist() for k, v in one.items()} == {k: v.tolist() for k, v in other.items()}


TWO = np.zeros(2)
PAIR = np.zeros((2, 2))
NODES: Mapping[str, Node] = {"a": Node(TWO, TWO), "b": Node(TWO, TWO)}


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        (NODES, [Edge("a", "c", PAIR, PAIR)], "edge a -> c: there is no operator 'c'"),
        (NODES, [Edge("a", "a", PAIR, PAIR)], "edge a -> a: expected two operators"),
        (NODES, [Edge("a", "b", TWO, PAIR)], r"memory has shape \(2,\), expected \(2, 2\)"),
        ({"a": Node(TWO, np.zeros(3))}, [], r"time has shape \(3,\), expected \(2,\)"),
        ({"a": Node(np.zeros(0), np.zeros(0))}, [], r"shape \(0,\), expected \(1,\)"),
        ({"a": Node(PAIR, PAIR)}, [], r"shape \(2, 2\), expected"),
        ({"a": Node(TWO, TWO - 1)}, [], "operator a: time is -1.0"),
        ({"a": Node(TWO * math.nan, TWO)}, [], "operator a: memory is nan"),
    ],
)
def test_a_graph_that_is_none_is_refused(
    nodes: Mapping[str, Node], edges: list[Edge], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        OperatorGraph(nodes, edges)


@pytest.mark.parametrize("epsilon", [-1.0, math.nan])
def test_an_epsilon_that_is_none_is_refused(epsilon: float) -> None:
    with pytest.raises(ConfigError, match="epsilon"):
        track(Draw(0).chain(2, 2), epsilon=epsilon)
