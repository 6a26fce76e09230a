"""Strategies survive being written as columns."""

import itertools

import numpy as np

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.planner.columns import (
    FUSIONS,
    PRECISIONS,
    RECOMPUTES,
    Columns,
    Strategies,
    distinct,
)
from tenplex_megatron.planner.strategy import Strategy

LAYOUTS = ["MBS1", "TP2,PP2,DP3,MBS2", "PP2,VPP2,CP2,EP2,MBS4", "PP2,STAGES3-5,MBS1"]
SOME = [
    Strategy(
        layout=ParallelLayout.parse(text),
        global_batch_size=24,
        sequence_parallel=zero > 1,
        zero_stage=zero,
        recompute=recompute,
        recompute_layers=layers,
        precision=precision,
        is_flash=zero < 2,
        loss_fusion=fusion,
        overlaps_gradients=zero != 1,
        overlaps_tensor_parallel=zero == 3,
    )
    for text, zero, recompute, layers, precision, fusion in itertools.product(
        LAYOUTS, range(4), RECOMPUTES, (None, 0, 2), PRECISIONS, FUSIONS
    )
]


def test_columns_are_the_strategies() -> None:
    columns = Columns.of(SOME)
    assert [columns.strategy(place) for place in range(len(columns))] == SOME
    assert columns.num_micro_batches.tolist() == [one.num_micro_batches for one in SOME]
    assert len(Columns.of([])) == 0


def test_some_of_them_joined_are_those() -> None:
    columns = Columns.of(SOME)
    parts = [columns.at(np.arange(start, len(SOME), 2)) for start in (0, 1)]
    joined = Strategies(Columns.joined(parts, columns.cuts))
    assert list(joined) == [*SOME[::2], *SOME[1::2]]


def test_distinct_rows_are_all_different_and_all_there() -> None:
    draw = np.random.default_rng(0)
    columns = draw.integers(0, 4, (3, 200))
    rows, row = distinct(*columns)
    assert len(set(rows)) == len(rows)
    assert [rows[place] for place in row] == [tuple(one) for one in columns.T.tolist()]
