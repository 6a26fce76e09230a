import math

import pytest

from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.frontier import Frontier
from tenplex_megatron.planner.modes import mini_parallelism, mini_time, profiling

GB = 1e9
FRONTIERS = {
    2: Frontier.of([60 * GB, 90 * GB], [8.0, 6.0]),
    4: Frontier.of([30 * GB, 50 * GB, 70 * GB], [5.0, 4.0, 3.0]),
    8: Frontier.of([15 * GB, 25 * GB, 35 * GB], [3.5, 2.5, 2.0]),
    16: Frontier.of([], []),
}


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("limit", [10 * GB, 30 * GB, 49 * GB, 65 * GB, math.inf])
def test_mini_time_is_the_fastest_of_all_that_fit(devices: int, limit: float) -> None:
    frontier = FRONTIERS[devices]
    within = [
        (time, memory, index)
        for index, (memory, time) in enumerate(zip(frontier.memory, frontier.time, strict=True))
        if memory <= limit
    ]
    if not within:
        with pytest.raises(ConfigError, match="no strategy"):
            mini_time(FRONTIERS, devices=devices, memory_limit=limit)
        return
    selected = mini_time(FRONTIERS, devices=devices, memory_limit=limit)
    assert selected.devices == devices
    assert (selected.time, selected.memory, selected.index) == min(within)


@pytest.mark.parametrize(
    ("limit", "devices", "time"),
    [(95, 2, 6.0), (60, 2, 8.0), (59, 4, 4.0), (30, 4, 5.0), (29, 8, 2.5), (15, 8, 3.5)],
)
def test_mini_parallelism_takes_the_fewest_devices_and_there_the_fastest(
    limit: float, devices: int, time: float
) -> None:
    selected = mini_parallelism(FRONTIERS, devices=[8, 4, 2, 16], memory_limit=limit * GB)
    assert (selected.devices, selected.time) == (devices, time)


def test_mini_parallelism_asks_for_no_frontier_it_does_not_need() -> None:
    asked = []

    def frontier(devices: int) -> Frontier:
        asked.append(devices)
        return FRONTIERS[devices]

    mini_parallelism(frontier, devices=[16, 8, 4, 2, 2], memory_limit=50 * GB)
    assert asked == [2, 4]


def test_fewer_devices_may_fit_where_more_do_not() -> None:
    odd = {3: Frontier.of([9.0], [1.0]), 4: Frontier.of([20.0], [1.0]), 5: FRONTIERS[8]}
    assert mini_parallelism(odd, devices=odd, memory_limit=10).devices == 3
    del odd[3]
    assert mini_parallelism(odd, devices=odd, memory_limit=16 * GB).devices == 4


def test_profiling_lists_every_number_of_devices() -> None:
    rows = profiling(FRONTIERS, devices=FRONTIERS, memory_limit=50 * GB)
    assert [row.devices for row in rows] == [2, 4, 8, 16]
    assert [row.selected and row.selected.time for row in rows] == [None, 4.0, 2.0, None]
    assert [row.speedup for row in rows] == [None, 1.0, 2.0, None]
    assert [row.least_memory for row in rows] == [60 * GB, 30 * GB, 15 * GB, None]
    assert [row.frontier for row in rows] == list(FRONTIERS.values())


def test_profiling_without_a_limit_takes_the_fastest() -> None:
    rows = profiling(FRONTIERS.__getitem__, devices=range(2, 5, 2))
    assert [row.selected and row.selected.time for row in rows] == [6.0, 3.0]


def test_what_takes_no_time_is_infinitely_faster() -> None:
    instant = {1: Frontier.of([1], [2]), 2: Frontier.of([1], [0])}
    assert [row.speedup for row in profiling(instant, devices=instant)] == [1, math.inf]


def test_a_miss_says_how_much_is_missing_where_the_least_is() -> None:
    with pytest.raises(ConfigError, match=r"for 2, 4, 16 devices fits 20.00 GB") as caught:
        mini_parallelism(FRONTIERS, devices=[2, 4, 16], memory_limit=20 * GB)
    assert "on 4 devices, needs 30.00 GB, 10.00 GB more" in str(caught.value)
    with pytest.raises(ConfigError, match=r"on 2 devices, needs 60.00 GB, 10.00 GB more"):
        mini_time(FRONTIERS, devices=2, memory_limit=50 * GB)
    with pytest.raises(ConfigError, match="no strategy at all for 16 devices"):
        mini_time(FRONTIERS, devices=16, memory_limit=50 * GB)
    with pytest.raises(ConfigError, match="no number of devices"):
        mini_parallelism(FRONTIERS, devices=[], memory_limit=50 * GB)


def test_an_unknown_number_of_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match="no frontier for 3 devices, only for: 2, 4, 8, 16"):
        mini_time(FRONTIERS, devices=3, memory_limit=GB)
