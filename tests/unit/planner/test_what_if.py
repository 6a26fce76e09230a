"""What a job would get is what `decide` takes, and it is measured against the least change."""

import time
from dataclasses import replace

import numpy as np
import pytest

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.choose import Outlook, decide
from tenplex_megatron.planner.fleet import Fleet
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.search import Evaluated, search
from tenplex_megatron.planner.space import Scope
from tenplex_megatron.planner.strategy import Strategy
from tenplex_megatron.planner.what_if import (
    Answer,
    Situation,
    answer,
    batch_note,
    pays_off_after,
    running,
)
from tests.unit.planner.clusters import A100

MODEL = ModelProfile(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_query_groups=32,
    head_size=128,
    ffn_size=16384,
    seq_length=2048,
    vocab_size=51200,
)
OUTLOOK = Outlook(next_change_s=1000.0, restart_s=10.0)


def strategy(text: str, batch: int = 64, micro: int = 1) -> Strategy:
    layout = replace(ParallelLayout.parse(text), micro_batch_size=micro)
    return Strategy(layout=layout, global_batch_size=batch, zero_stage=1)


def situation(text: str, gpus: int, *, batch: int = 64, lost: list[str] | None = None) -> Situation:
    now = running(MODEL, A100, [strategy(text, batch)])
    used = ParallelLayout.parse(text).world_size
    sizes = [8] * -(-max(used, gpus) // 8)
    fleet = Fleet.of(sizes, used=used, wanted=gpus, lost=lost or [])
    return Situation(model=MODEL, cluster=A100, running=now, before=fleet.before, left=fleet.after)


def searched(case: Situation) -> Evaluated:
    counts = [len(devices) for devices in case.left.values()]
    return search(
        MODEL,
        A100,
        devices=sum(counts),
        devices_per_node=counts,
        global_batch_size=case.strategy.global_batch_size,
        micro_batch_sizes=(1,),
        scope=Scope(recompute=("none",), zero_stages=(1,), uneven_stages=False),
    )


def asked(case: Situation, found: Evaluated | None = None) -> Answer:
    return answer(case, found or searched(case), OUTLOOK)


@pytest.mark.parametrize(("text", "gpus"), [("TP2,PP2,DP4", 13), ("TP4,PP2,DP4", 24)])
def test_after_a_loss_the_best_is_measured_against_fewer_replicas(text: str, gpus: int) -> None:
    case = situation(text, gpus)
    found = asked(case)
    chosen = decide(MODEL, A100, searched(case), case.left, current=case.current, outlook=OUTLOOK)
    assert found.best.option == chosen.best
    assert not case.is_running
    assert found.baseline_kind == "fewer replicas"
    assert found.baseline is not None
    cut = found.baseline.option.strategy.layout
    assert cut == replace(case.strategy.layout, dp=cut.dp)
    assert cut.dp == max(dp for dp in (1, 2, 4) if dp * cut.tp * cut.pp <= gpus)
    assert found.best.pause_s == 10 + found.best.slowest.seconds  # type: ignore[union-attr]


def test_a_job_that_keeps_its_devices_may_go_on() -> None:
    case = situation("TP1,PP1,DP8", 16)
    only = running(MODEL, A100, [case.strategy])
    found = asked(case, only)
    assert (found.best.moves, found.best.pause_s) == (None, 0.0)
    assert (found.baseline, found.runners_up) == (None, ())
    grown = asked(case)
    assert grown.baseline_kind == "stay"
    assert grown.baseline is not None
    assert grown.baseline.option.strategy == case.strategy
    assert grown.baseline.pause_s == 0
    steps = pays_off_after(grown.best, grown.baseline)
    assert steps is not None
    assert steps > 0


def test_what_pays_off_has_done_as_many_steps_by_then_and_fewer_before() -> None:
    found = asked(situation("TP1,PP1,DP8", 16))
    best, other = found.best, found.baseline
    assert other is not None
    slower = replace(other, option=replace(other.option, step_s=best.option.step_s + 0.7))
    steps = pays_off_after(best, slower)
    assert steps is not None
    for count, is_ahead in ((steps, True), (steps - 1, False)):
        ours = best.pause_s + count * best.option.step_s
        theirs = slower.pause_s + count * slower.option.step_s
        assert (ours <= theirs) is is_ahead
    assert pays_off_after(slower, best) == 0  # it starts first
    assert pays_off_after(best, replace(best, pause_s=0.0)) is None  # as fast, and starts first


def test_the_runner_up_is_the_measure_where_fewer_replicas_are_chosen() -> None:
    case = situation("TP2,PP2,DP4", 12)
    fewer = running(MODEL, A100, [strategy("TP2,PP2,DP2")])
    slow = running(MODEL, A100, [strategy("TP8,PP1,DP1")])
    both = Evaluated(
        (*fewer.strategies, *slow.strategies),
        np.concatenate([fewer.step_s, fewer.step_s * 2]),
        np.concatenate([fewer.memory_bytes, fewer.memory_bytes]),
    )
    found = asked(case, both)
    assert found.best.option.strategy == fewer.strategies[0]
    assert found.baseline_kind == "runner-up"
    assert found.baseline == found.runners_up[0][0]
    alone = asked(case, fewer)
    assert (alone.baseline, alone.runners_up) == (None, ())


def test_a_node_with_one_device_keeps_its_state_and_a_lost_one_does_not() -> None:
    kept = asked(situation("TP4,PP2,DP2", 9))
    lost = asked(situation("TP4,PP2,DP2", 8))
    assert kept.best.moves is not None
    assert lost.best.moves is not None
    assert kept.best.moves.missing.sum() == pytest.approx(0)
    state = kept.best.moves.within.sum() + kept.best.moves.moved_bytes
    assert lost.best.moves.missing.sum() == pytest.approx(state / 2, rel=0.05)


def test_the_fastest_that_fits_is_what_runs_else_the_smallest() -> None:
    found = running(MODEL, A100, [strategy("TP2"), strategy("TP4"), strategy("TP4", micro=3)])
    assert found.strategies[0].layout.tp == 4  # TP2 does not fit; 64 does not divide by 3
    small = replace(A100, memory_bytes=1e9)
    assert running(MODEL, small, [strategy("TP2"), strategy("TP8")]).strategies[0].layout.tp == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("TP3,PP1,DP1", "--from TP3,PP1,DP1: Megatron refuses it: 32 attention heads do not"),
        ("TP1,PP5,DP1", "32 layers do not divide into 5 pipeline parts"),
        ("TP1,PP1,DP5", "by micro batch 1 x DP5; with a global batch of 60 or 65 instead of 64"),
        ("TP1,PP1,DP99", "with a global batch of 99 instead of 64 it could run"),
    ],
)
def test_the_rule_that_megatron_would_name_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        running(MODEL, A100, [strategy(text)])


def test_a_batch_that_would_use_more_devices_is_named() -> None:
    assert batch_note(situation("TP2,PP2,DP4", 13)) == (
        "TP2,PP2,DP3 would use 12 devices; with a global batch of 63 or 66 instead of 64 it could "
        "run"
    )
    assert batch_note(situation("TP2,PP2,DP4", 11)) is None  # DP2 is all there is room for
    assert batch_note(situation("TP2,PP2,DP4", 3)) is None


def test_nothing_that_fits_is_an_error() -> None:
    case = situation("TP2,PP2,DP4", 13)
    tiny = replace(case, cluster=replace(A100, memory_bytes=1e9))
    with pytest.raises(ConfigError, match="GB short"):
        asked(tiny, searched(case))


def test_a_thousand_devices_are_answered_at_once() -> None:
    case = situation("TP8,PP8,DP16", 1021)
    found = running(MODEL, A100, [strategy("TP8,PP8,DP8")])
    started = time.process_time()
    asked(case, found)
    assert time.process_time() - started < 0.5
