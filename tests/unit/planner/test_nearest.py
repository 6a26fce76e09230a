"""Where nothing fits: the nearest strategy, what it lacks, and what would be enough."""

from dataclasses import replace

import numpy as np
import pytest

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.planner.nearest import (
    MOST_DEVICES,
    enough_devices,
    nearest_miss,
    nothing_runs,
)
from tenplex_megatron.planner.search import Evaluated, search
from tenplex_megatron.planner.space import Scope
from tenplex_megatron.planner.strategy import Strategy
from tenplex_megatron.testing.every_strategy import GPT
from tests.unit.planner.clusters import A100

STRATEGY = Strategy(layout=ParallelLayout(micro_batch_size=1), global_batch_size=8)


@pytest.mark.parametrize("least", [3, 4, 60, 64, MOST_DEVICES, MOST_DEVICES + 1])
def test_enough_is_the_first_doubling_on_which_something_fits(least: int) -> None:
    looked: list[tuple[int, bool]] = []

    def look(devices: int, scope: Scope) -> Evaluated:
        looked.append((devices, scope.some_layers))
        # What is not balanced fits with one device fewer.
        needed = 1.0 if devices >= least - scope.some_layers else 3.0
        return Evaluated((STRATEGY,), np.ones(1), np.array([needed]))

    doublings = [2**power for power in range(1, 16)]
    expected = next((count for count in doublings if count >= least - 1), None)
    if least == MOST_DEVICES + 1:
        expected = None  # balanced strategies alone are tried on most devices
    assert enough_devices(1, 2.0, Scope(), look) == expected
    assert sum(is_whole for _, is_whole in looked) <= 1


def test_the_nearest_lacks_what_its_memory_is_above_the_limit() -> None:
    small = replace(A100, memory_bytes=1e8)
    found = search(GPT, small, devices=2, global_batch_size=8)
    least = found.memory_bytes.min()
    said = nearest_miss(GPT, small, found, 2)
    assert said.startswith(
        f"none of {len(found)} strategies on 2 devices fits the 0.1 GB of test (memory_bytes): "
    )
    assert f"needs {least / 1e9:.4g} GB, {(least - 1e8) / 1e9:.4g} GB more" in said
    smallest = found.strategies[int(found.memory_bytes.argmin())]
    assert str(replace(smallest.layout, stage_layers=None)) in said


def test_a_batch_no_micro_batch_divides_runs_nowhere() -> None:
    assert nothing_runs(GPT, 7, (1, 2)) == ["global batch 7 does not divide by micro batch 2 x DP1"]
    assert nothing_runs(GPT, 8, (1, 2)) == []
