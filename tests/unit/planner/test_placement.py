import itertools

import pytest

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.placement import pick_devices, place_ranks, spread


@pytest.mark.parametrize(("a", "b", "c"), list(itertools.product(range(4), repeat=3)))
def test_shares_are_as_even_as_capacity_allows(a: int, b: int, c: int) -> None:
    capacity = {"a": a, "b": b, "c": c}
    for count in range(a + b + c + 1):
        shares = spread(count, capacity)
        assert sum(shares.values()) == count
        open_shares = [shares[node] for node in capacity if shares[node] < capacity[node]]
        assert all(share <= min(open_shares, default=count) + 1 for share in shares.values())


def test_more_ranks_than_places_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 ranks do not fit 2 places"):
        spread(3, {"a": 2})


@pytest.mark.parametrize(
    ("layout", "nodes"),
    [
        ("TP2,PP2", "aabb"),
        ("TP1,DP3", "aab"),
        ("TP2,DP3", "aaaabb"),
        ("TP4,DP2", "aaaabbbb"),
        ("TP1,DP7", "aaaabbb"),
    ],
)
def test_ranks_fill_nodes_and_tensor_groups_stay_inside_a_node(layout: str, nodes: str) -> None:
    allotted = {"a": (0, 1, 2, 3), "b": (0, 1, 2, 3)}
    ranks = place_ranks(ParallelLayout.parse(layout), allotted)
    assert "".join(node for node, _ in ranks) == nodes
    assert len(set(ranks)) == len(ranks)


def test_a_lost_device_is_stepped_over() -> None:
    ranks = place_ranks(ParallelLayout(dp=3), {"a": (0, 2, 3)})
    assert ranks == (("a", 0), ("a", 2), ("a", 3))


def test_tensor_groups_are_split_only_where_there_is_no_other_way() -> None:
    whole = place_ranks(ParallelLayout(tp=2, dp=2), {"a": (0, 1, 2), "b": (0, 1, 2)})
    assert [node for node, _ in whole] == ["a", "a", "b", "b"]
    split = place_ranks(ParallelLayout(tp=2, dp=3), {"a": (0, 1, 2), "b": (0, 1, 2)})
    assert [node for node, _ in split] == ["a", "a", "a", "b", "b", "b"]


def test_picked_devices_are_the_first_free_ones_of_every_node() -> None:
    free = {"a": (0, 2, 3), "b": (0, 1, 2, 3)}
    assert pick_devices(free, 4) == {"a": (0, 2), "b": (0, 1)}
    assert pick_devices(free, None) == free
    assert pick_devices(free, 9) == free


def test_whole_nodes_are_filled_but_none_is_left_without_a_rank() -> None:
    allotted = {f"n{number}": tuple(range(5 if number == 0 else 8)) for number in range(8)}
    used = [node for node, _ in place_ranks(ParallelLayout(pp=7, dp=8), allotted)]
    assert used == sorted(used)
    assert [used.count(f"n{number}") for number in range(8)] == [1, 8, 8, 8, 8, 8, 8, 7]
