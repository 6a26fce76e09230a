from dataclasses import replace

import numpy as np
import pytest

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.strategy import Strategy
from tenplex_megatron.planner.timing.calibrate import CONSTANTS, Measurement, calibrate
from tenplex_megatron.planner.timing.predict import predict_time
from tests.unit.planner.clusters import A100

MODEL = ModelProfile(
    num_layers=16,
    hidden_size=2048,
    num_heads=16,
    num_query_groups=16,
    head_size=128,
    ffn_size=8192,
    seq_length=1024,
    vocab_size=51200,
)
CLUSTER = A100
OTHER = replace(
    CLUSTER, gemm_efficiency=0.6, node_efficiency=0.4, launch_backward_s=3e-3, fixed_s=0.03
)
"""A machine that the profile does not describe."""
LAYOUTS = [
    "MBS1", "MBS8", "TP2,MBS1", "TP8,MBS8", "PP2,MBS2", "PP4,MBS4", "DP8,MBS1", "DP8,MBS4",
    "TP4,DP2,MBS8", "TP2,PP2,DP2,MBS4", "PP8,MBS1", "TP2,DP4,MBS2",
]  # fmt: skip


def rows(cluster: ClusterProfile, layouts: list[str]) -> list[Measurement]:
    """Iterations as `cluster` would run them."""
    strategies = [
        Strategy(layout=ParallelLayout.parse(text), global_batch_size=64, is_flash=False)
        for text in layouts
    ]
    return [
        Measurement(MODEL, each, predict_time(MODEL, cluster, each).step_s) for each in strategies
    ]


def mean_error(cluster: ClusterProfile, measured: list[Measurement]) -> float:
    errors = [
        predict_time(row.model, cluster, row.strategy).step_s / row.step_s - 1 for row in measured
    ]
    return float(np.mean(np.abs(errors)))


def test_rows_the_profile_explains_leave_it_as_it_is() -> None:
    fitted = calibrate(CLUSTER, rows(CLUSTER, LAYOUTS))
    for constant in CONSTANTS:
        value = max(getattr(CLUSTER, constant.name), constant.lowest)
        assert getattr(fitted, constant.name) == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize("count", [3, 6, 9])
def test_a_few_rows_of_another_machine_predict_the_others(count: int) -> None:
    measured = rows(OTHER, LAYOUTS)
    fitted = calibrate(CLUSTER, measured[:count])
    rest = measured[count:]
    assert mean_error(fitted, rest) < 0.5 * mean_error(CLUSTER, rest)


def test_enough_rows_explain_another_machine() -> None:
    measured = rows(OTHER, LAYOUTS)
    assert mean_error(calibrate(CLUSTER, measured), measured) < 0.03


def test_a_profile_far_from_every_row_gives_way() -> None:
    slow = replace(
        CLUSTER,
        gemm_efficiency=0.06,
        memory_efficiency=0.1,
        launch_forward_s=7e-3,
        launch_backward_s=16e-3,
    )
    measured = rows(slow, LAYOUTS)
    assert mean_error(CLUSTER, measured) > 0.75
    assert mean_error(calibrate(CLUSTER, measured[::4]), measured) < 0.3


@pytest.mark.parametrize("factor", [0.05, 20.0])
def test_one_row_never_wrecks_a_constant(factor: float) -> None:
    row = rows(CLUSTER, ["TP2,PP2,DP2,MBS4"])[0]
    fitted = calibrate(CLUSTER, [replace(row, step_s=factor * row.step_s)])
    for constant in CONSTANTS:
        value = getattr(fitted, constant.name)
        start = max(getattr(CLUSTER, constant.name), constant.lowest)
        assert constant.lowest * 0.999 <= value <= constant.highest * 1.001
        assert abs(np.log(value / start)) < 3 * constant.spread


@pytest.mark.parametrize("odd", range(0, len(LAYOUTS), 3))
def test_one_odd_row_hardly_moves_what_the_others_say(odd: int) -> None:
    measured = rows(CLUSTER, LAYOUTS)
    spoilt = list(measured)
    spoilt[odd] = replace(measured[odd], step_s=5 * measured[odd].step_s)
    del measured[odd]
    assert mean_error(calibrate(CLUSTER, spoilt), measured) < 0.05


def test_equal_rows_give_equal_constants() -> None:
    measured = rows(OTHER, LAYOUTS)
    assert calibrate(CLUSTER, measured) == calibrate(CLUSTER, measured)


def test_only_the_constants_asked_for_move() -> None:
    only = [constant for constant in CONSTANTS if constant.name == "gemm_efficiency"]
    fitted = calibrate(CLUSTER, rows(OTHER, LAYOUTS), only)
    assert fitted == replace(CLUSTER, gemm_efficiency=fitted.gemm_efficiency)
    assert fitted.gemm_efficiency < CLUSTER.gemm_efficiency


def test_no_rows_and_no_time_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected at least one row"):
        calibrate(CLUSTER, [])
    for seconds in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="expected seconds above 0"):
            replace(rows(CLUSTER, ["MBS1"])[0], step_s=seconds)
