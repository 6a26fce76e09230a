import itertools
from collections.abc import Mapping

import numpy as np
import pytest

from tenplex_megatron.planner.frontier import Frontier, product, union
from tenplex_megatron.planner.table import Choice, Pair, Table, chosen, join

type Shape = tuple[int, ...]


def random_table(seed: int, shape: Shape, most: int, *, operator: str = "op") -> Table:
    """A frontier of at most this many points in each cell, none in some, and waste in between."""
    generator = np.random.default_rng(seed)
    size = generator.integers(0, most + 1, shape) * (generator.random(shape) < 0.9)
    start = np.cumsum(size + 1).reshape(shape) - size
    count = int(size.sum() + size.size + 1)
    memory, time = np.zeros((2, count), dtype=np.int64)
    for first, length in zip(start.ravel(), size.ravel(), strict=True):
        memory[first : first + length] = np.cumsum(generator.integers(1, 1 << 20, length))
        time[first : first + length] = np.cumsum(generator.integers(1, 1 << 20, length))[::-1]
    return Table(start, size.astype(np.int64), memory, time, Choice(operator, np.arange(count)))


def frontier_in(table: Table, cell: Shape, shape: Shape | None = None) -> Frontier:
    """What a cell holds, once the table is broadcast to `shape`."""
    start, size = (
        np.broadcast_to(column, column.shape if shape is None else shape)[cell]
        for column in (table.start, table.size)
    )
    return Frontier.of(*(costs[start : start + size] for costs in (table.memory, table.time)))


def check_join(
    joined: Table, left: Table, right: Table, expected: Mapping[Shape, Frontier]
) -> None:
    assert joined.size.size == len(expected)
    for cell, frontier in expected.items():
        found = frontier_in(joined, cell)
        assert len(found) == joined.size[cell]
        assert found.memory.tolist() == frontier.memory.tolist()
        assert found.time.tolist() == frontier.time.tolist()
    origin = chosen(joined.trace, np.arange(len(joined.memory)))
    one, other = origin["left"], origin["right"]
    assert (left.memory[one] + right.memory[other]).tolist() == joined.memory.tolist()
    assert (left.time[one] + right.time[other]).tolist() == joined.time.tolist()


# Long frontiers are looked at in runs, many short ones in slots, and a few points not at all.
@pytest.mark.parametrize(
    ("left_most", "right_most"), [(1, 300), (300, 1), (40, 90), (3, 3), (1, 1)]
)
@pytest.mark.parametrize(
    ("left_shape", "right_shape"),
    [((), ()), ((3,), (1,)), ((2, 1), (2, 3)), ((4, 2, 1), (4, 1, 2))],
)
def test_a_join_is_the_product_in_every_cell_united_along_the_first_axis(
    left_most: int, right_most: int, left_shape: Shape, right_shape: Shape
) -> None:
    for seed in range(4):
        left = random_table(2 * seed, left_shape, left_most, operator="left")
        right = random_table(2 * seed + 1, right_shape, right_most, operator="right")
        shape = np.broadcast_shapes(left_shape, right_shape)
        cells = list(itertools.product(*map(range, shape)))
        sums = {
            cell: product(*(frontier_in(table, cell, shape) for table in (left, right)))
            for cell in cells
        }
        check_join(join(left, right), left, right, sums)
        if shape:
            united = {
                cell: union([sums[first, *cell] for first in range(shape[0])])
                for cell in itertools.product(*map(range, shape[1:]))
            }
            check_join(join(left, right, unites=True), left, right, united)


NOTHING = Table(np.zeros((), np.int64), np.ones((), np.int64), *np.zeros((2, 1), np.int64))


@pytest.mark.parametrize("width", [1, 1 << 10, 1 << 21, 1 << 40])
def test_thinning_keeps_the_ends_of_every_frontier_and_is_off_by_less_than_its_width(
    width: int,
) -> None:
    for seed in range(10):
        source = random_table(seed, (3, 2), 60)
        table = join(source, NOTHING)
        thin = table.thinned(width)
        origin = chosen(thin.trace, np.arange(len(thin.memory)))["op"]
        assert source.memory[origin].tolist() == thin.memory.tolist()
        assert width > 1 or thin is table
        for cell in itertools.product(range(3), range(2)):
            whole, kept = frontier_in(table, cell), frontier_in(thin, cell)
            slots = (max(whole.time, default=0) - min(whole.time, default=0)) / width
            assert len(kept) == thin.size[cell] <= slots + 3
            for memory, time in zip(whole.memory, whole.time, strict=True):
                index = kept.fastest_within(memory)
                assert index is not None
                assert kept.time[index] < time + width
            for end in (0, -1) if len(whole) else ():
                assert kept.memory[end] == whole.memory[end]


def test_axes_are_put_in_order_and_new_ones_have_length_one() -> None:
    table = random_table(0, (2, 3), 4)
    spread = table.spread((7, 5), (5, 6, 7))
    assert spread.start.shape == (3, 1, 2)
    assert spread.start[:, 0, :].tolist() == table.start.T.tolist()
    assert spread.size[:, 0, :].tolist() == table.size.T.tolist()


def test_a_trace_names_the_choice_of_every_operator_behind_a_point() -> None:
    one, other = (Choice(name, np.array([5, 6, 7])) for name in "ab")
    inner = Pair(None, other, np.array([0, 0]), np.array([2, 1]))
    trace = Pair(one, inner, np.array([0, 1]), np.array([1, 0]))
    found = chosen(trace, np.array([1, 0, 1]))
    assert {name: choice.tolist() for name, choice in found.items()} == {
        "a": [6, 5, 6],
        "b": [7, 6, 7],
    }
