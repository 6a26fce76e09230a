import itertools
from collections.abc import Iterable

import numpy as np
import pytest

from tenplex_megatron.planner.order import Fallback, plan_order

type Pairs = list[tuple[int, int]]


def rules(sizes: list[int], pairs: Pairs, fallback: Fallback = "branch") -> str:
    return " ".join(step.rule for step in plan_order(sizes, pairs, fallback=fallback).steps)


def chain(operators: Iterable[int]) -> Pairs:
    return list(itertools.pairwise(operators))


def complete(count: int) -> Pairs:
    return list(itertools.combinations(range(count), 2))


@pytest.mark.parametrize(
    ("sizes", "pairs", "expected"),
    [
        ([], [], ""),
        ([4], [], "last"),
        ([4, 4], [], "last last"),
        ([4, 4], [(0, 1), (1, 0)], "leaf last"),
        ([4, 4, 4], chain(range(3)), "leaf leaf last"),
        ([4, 4, 4], [*chain(range(3)), (2, 0)], "node leaf last"),
        ([4, 4, 4, 4], [*chain(range(4)), (3, 0)], "node node leaf last"),
        ([4, 4, 4, 4], complete(4), "branch node leaf last"),
        ([1, 4, 4, 4], complete(4), "lone node leaf last"),
        ([1, 1], [(0, 1)], "lone last"),
    ],
)
def test_the_rules_apply_as_the_paper_says(sizes: list[int], pairs: Pairs, expected: str) -> None:
    assert rules(sizes, pairs) == expected


def random_graph(seed: int) -> tuple[list[int], Pairs]:
    generator = np.random.default_rng(seed)
    count = int(generator.integers(1, 12))
    pairs = [pair for pair in complete(count) if generator.random() < seed % 10 / 10]
    return generator.integers(1, 5, count).tolist(), pairs


@pytest.mark.parametrize("fallback", ["branch", "freeze"])
def test_every_operator_disappears_once(fallback: Fallback) -> None:
    for seed in range(100):
        sizes, pairs = random_graph(seed)
        order = plan_order(sizes, pairs, fallback=fallback)
        assert order.is_complete
        assert sorted(step.operator for step in order.steps) == list(range(len(sizes)))
        assert len(set(order.hubs)) == len(order.hubs)
        assert fallback == "branch" or all(step.rule != "branch" for step in order.steps)


def test_a_chain_is_walked_from_one_end_to_the_other() -> None:
    listed = [3, 0, 4, 1, 2]
    order = plan_order([2] * 5, chain(listed), fallback="stop", as_chain=True)
    assert [step.operator for step in order.steps] in (listed, listed[::-1])


def test_what_hangs_on_a_chain_is_no_obstacle() -> None:
    pairs = [*chain(range(5)), (5, 2), (1, 3)]
    order = plan_order([2] * 6, pairs, fallback="stop", as_chain=True)
    assert order.is_complete
    assert {step.rule for step in order.steps} <= {"leaf", "node", "last"}


@pytest.mark.parametrize(("pairs", "is_complete"), [(complete(3), True), (complete(4), False)])
def test_a_graph_without_a_chain_is_left_unfinished(pairs: Pairs, is_complete: bool) -> None:
    assert plan_order([2] * 4, pairs, fallback="stop", as_chain=True).is_complete == is_complete


def test_the_operator_with_most_neighbours_is_frozen() -> None:
    pairs = [*complete(4), *itertools.combinations((2, 4, 5, 6), 2)]
    assert plan_order([2] * 7, pairs, fallback="freeze").hubs == (2,)
    assert plan_order([2] * 4, complete(4), fallback="freeze").hubs == (0,)


@pytest.mark.parametrize("count", [10, 100, 1000])
def test_two_hubs_of_a_long_chain_cost_what_they_cost_once_for_each_operator(count: int) -> None:
    pairs = [*chain(range(2, count)), *itertools.product((0, 1), range(2, count))]
    assert plan_order([3] * count, pairs).work <= count * 3**4
