import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner import frontier as frontier_module
from tenplex_megatron.planner.frontier import Frontier, product, undominated, union

type Point = tuple[float, float]


def frontier_by_definition(points: Sequence[Point]) -> list[Point]:
    """Every point that no other one beats in one cost and at least equals in the other."""
    return sorted(
        point
        for point in set(points)
        if not any(
            other != point and other[0] <= point[0] and other[1] <= point[1] for other in points
        )
    )


def points_of(frontier: Frontier) -> list[Point]:
    return list(zip(frontier.memory.tolist(), frontier.time.tolist(), strict=True))


def random_points(seed: int, count: int, highest: int = 12) -> list[Point]:
    costs = np.random.default_rng(seed).integers(0, highest, (count, 2)).astype(float)
    return [(memory, time) for memory, time in costs.tolist()]


def frontier_of(points: Sequence[Point]) -> Frontier:
    return Frontier.of([memory for memory, _ in points], [time for _, time in points])


@pytest.mark.parametrize("count", range(4))
def test_every_small_set_of_points_reduces_to_what_the_definition_says(count: int) -> None:
    costs = list(itertools.product(range(3), repeat=2))
    for points in itertools.product(costs, repeat=count):
        assert points_of(frontier_of(points)) == frontier_by_definition(points)


@pytest.mark.parametrize("seed", range(15))
def test_many_points_with_many_ties_reduce_to_what_the_definition_says(seed: int) -> None:
    points = random_points(seed, 80)
    frontier = frontier_of(points)
    assert points_of(frontier) == frontier_by_definition(points)
    assert (np.diff(frontier.memory) > 0).all()
    assert (np.diff(frontier.time) < 0).all()


@pytest.mark.parametrize("seed", range(15))
def test_of_equal_points_the_first_one_stays(seed: int) -> None:
    points = random_points(seed, 60, highest=5)
    (sources,) = frontier_of(points).sources
    assert sources.tolist() == [points.index(points[source]) for source in sources]


def test_memory_counts_even_for_the_slowest_point() -> None:
    assert points_of(Frontier.of([8, 1], [1, 900])) == [(1, 900), (8, 1)]


def test_whole_numbers_that_a_float_would_blur_are_told_apart() -> None:
    memory = np.array([2**60, 2**60 + 1])
    assert undominated(memory, np.array([2, 1])).tolist() == [0, 1]


def test_what_is_impossible_is_left_out() -> None:
    assert points_of(Frontier.of([1, math.inf, 3], [math.inf, 1, 3])) == [(3, 3)]
    assert len(Frontier.of([math.inf], [math.inf])) == 0
    assert len(Frontier.of([], [])) == 0


@pytest.mark.parametrize("seed", range(15))
def test_a_union_is_the_frontier_of_all_points(seed: int) -> None:
    operands = [frontier_of(random_points(seed * 9 + k, k * 4)) for k in range(4)]
    united = union(operands)
    everything = [point for operand in operands for point in points_of(operand)]
    assert points_of(united) == frontier_by_definition(everything)
    for point, operand, index in zip(points_of(united), *united.sources, strict=True):
        assert point == points_of(operands[operand])[index]


def test_a_union_of_nothing_is_empty() -> None:
    assert len(union([])) == 0


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("points_at_once", [1, 50, 1 << 20])
def test_a_product_is_the_frontier_of_all_sums(
    seed: int, points_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontier_module, "BLOCK_POINTS", points_at_once)
    left, right = (frontier_of(random_points(seed * 2 + k, 30, highest=90)) for k in range(2))
    combined = product(left, right)
    sums = [
        (one[0] + other[0], one[1] + other[1])
        for one, other in itertools.product(points_of(left), points_of(right))
    ]
    assert points_of(combined) == frontier_by_definition(sums)
    for point, one, other in zip(points_of(combined), *combined.sources, strict=True):
        assert point[0] == left.memory[one] + right.memory[other]
        assert point[1] == left.time[one] + right.time[other]


def test_a_product_with_nothing_is_empty() -> None:
    something, nothing = Frontier.of([1, 2], [2, 1]), Frontier.of([], [])
    assert len(product(something, nothing)) == len(product(nothing, something)) == 0


@pytest.mark.parametrize("seed", range(10))
def test_the_fastest_within_a_limit_is_found_by_looking_at_all(seed: int) -> None:
    frontier = frontier_of(random_points(seed, 20))
    for limit in np.arange(-1, 13, 0.5):
        within = [time for memory, time in points_of(frontier) if memory <= limit]
        index = frontier.fastest_within(limit)
        assert (None if index is None else frontier.time[index]) == min(within, default=None)


@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 0.05, 0.5, 3.0])
@pytest.mark.parametrize("seed", range(10))
def test_thinning_costs_no_memory_and_at_most_epsilon_of_time(seed: int, epsilon: float) -> None:
    generator = np.random.default_rng(seed)
    time = np.sort(generator.random(300))[::-1]
    time[-1] *= seed % 2  # a frontier may end with a time of 0
    whole = Frontier.of(np.cumsum(generator.random(300)), time)
    thin = whole.thinned(epsilon)
    assert set(points_of(thin)) <= set(points_of(whole))
    assert points_of(thin)[0] == points_of(whole)[0]
    assert points_of(thin)[-1] == points_of(whole)[-1]
    for memory, best in points_of(whole):
        index = thin.fastest_within(memory)
        assert index is not None
        assert thin.time[index] <= (1 + epsilon) * best or thin.time[index] == best
    assert thin.was_thinned == (len(thin) < len(whole))


def test_thinning_says_when_it_acted_and_so_do_its_heirs() -> None:
    whole = Frontier.of([1, 2, 3, 4], [4.0, 3.9, 3.8, 1.0])
    assert not whole.thinned(0.001).was_thinned
    thin = whole.thinned(0.1)
    assert thin.was_thinned
    assert thin.memory.tolist() == [1, 4]
    assert thin.sources[0].tolist() == [0, 3]
    assert thin.thinned(0).was_thinned
    assert union([whole, thin]).was_thinned
    assert product(thin, whole).was_thinned
    assert not product(whole, whole).was_thinned


def test_a_fine_thinning_leaves_few_points_of_many() -> None:
    time = np.linspace(10, 1, 100_000)
    thin = Frontier.of(np.arange(len(time)), time).thinned(0.01)
    assert len(thin) <= math.log(10) / math.log(1.01) + 2


def test_a_frontier_can_not_be_written_to() -> None:
    frontier = Frontier.of([1, 2], [2, 1])
    for array in (frontier.memory, frontier.time, *frontier.sources):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9


@pytest.mark.parametrize(
    ("memory", "time", "message"),
    [
        ([1, 2], [1], r"shape \(2,\) and \(1,\)"),
        ([[1]], [[1]], r"shape \(1, 1\)"),
        ([1, -2], [1, 1], r"memory of point 1 is -2.0"),
        ([1, 2], [math.nan, 1], r"time of point 0 is nan"),
    ],
)
def test_costs_that_are_none_are_refused(
    memory: list[float], time: list[float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Frontier.of(memory, time)


@pytest.mark.parametrize("epsilon", [-0.1, math.inf, math.nan])
def test_an_epsilon_that_is_none_is_refused(epsilon: float) -> None:
    with pytest.raises(ConfigError, match="epsilon"):
        Frontier.of([1], [1]).thinned(epsilon)
