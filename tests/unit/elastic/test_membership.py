"""What follows a change, on two nodes of four devices each."""

from dataclasses import replace
from typing import Any

import pytest

from tenplex_megatron.config import ElasticPolicy, parse_policy
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.elastic.membership import (
    Rules,
    check_target,
    culprits,
    decide,
    newest_complete,
)
from tenplex_megatron.elastic.messages import (
    dump_change,
    dump_decision,
    dump_report,
    load_change,
    load_decision,
    load_report,
)
from tenplex_megatron.elastic.records import (
    Change,
    Ending,
    Ledger,
    NextGeneration,
    NodeReport,
    WorkerExit,
)
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.store.base import RankSnapshot
from tests.unit.elastic.jobs import small_job

LAYOUTS = ("TP2,PP2", "TP1,PP1,DP3", "TP1,PP1,DP6", "TP1,PP1,DP1")
START = Change("start", "the job starts", 1.0, "a")
FAILURE = Change("failure", "rank 1 died", 2.0, "a")


def rules(**policy: Any) -> Rules:  # noqa: ANN401 - fields of the policy
    return small_job(ElasticPolicy(**{"layouts": LAYOUTS, **policy}))


def held(
    version: int, rank: int, world: int = 4, *, generation: int = 1, committed: bool = True
) -> RankSnapshot:
    return RankSnapshot(generation, version, rank, world, {}, committed, 8, "x")


def reports(*exits: tuple[str, WorkerExit], version: int | None = None) -> list[NodeReport]:
    def parts(node: str) -> tuple[RankSnapshot, ...]:
        ranks = range(2) if node == "a" else range(2, 4)
        return () if version is None else tuple(held(version, rank) for rank in ranks)

    return [
        NodeReport(node, 4, parts(node), tuple(done for where, done in exits if where == node))
        for node in ("b", "a")
    ]


def died(
    node: str, rank: int, device: int, code: int = -9, time: float = 2.0
) -> tuple[str, WorkerExit]:
    return node, WorkerExit(rank, device, code, time)


def planned(gpus: int) -> Change:
    return Change("planned", f"{gpus} devices", 2.0, "a", gpus=gpus, step=6, request="r1")


def go(
    ledger: Ledger,
    change: Change,
    *exits: tuple[str, WorkerExit],
    **policy: Any,  # noqa: ANN401 - fields of the policy
) -> NextGeneration:
    version = policy.pop("version", None)
    decision = decide(ledger, change, reports(*exits, version=version), rules(**policy))
    assert isinstance(decision, NextGeneration)
    return decision


def started(gpus: int = 8) -> Ledger:
    ledger = go(Ledger(), START).ledger
    return ledger if gpus == 8 else go(ledger, planned(gpus)).ledger


def test_the_start_uses_every_device_in_node_order() -> None:
    decision = go(Ledger(), START)
    assert decision.ranks == tuple((node, device) for node in "ab" for device in range(4))
    assert decision.ledger.generation == 1
    assert decision.source is None


def test_schedule_of_step_zero_sets_the_devices_of_the_start() -> None:
    decision = go(Ledger(), START, schedule={0: 4})
    assert decision.ranks == (("a", 0), ("a", 1), ("b", 0), ("b", 1))


def test_a_planned_change_spreads_the_devices_evenly() -> None:
    decision = go(started(), planned(4), version=6)
    assert [node for node, _ in decision.ranks] == ["a", "a", "b", "b"]
    assert decision.ledger.gpus == 4
    assert decision.source is not None
    assert decision.source.version == 6
    assert dict(decision.source.nodes) == {0: "a", 1: "a", 2: "b", 3: "b"}
    assert decision.change.request == "r1"


def test_a_failed_device_is_dropped_and_the_given_up_ones_stay_given_up() -> None:
    decision = go(started(4), FAILURE, died("a", 1, 1), version=6)
    assert decision.ranks == (("a", 0), ("b", 0), ("b", 1))
    assert str(decision.layout) == "TP1,PP1,DP3"
    assert decision.ledger.lost == {"a": (1,)}


def test_a_failed_device_can_be_used_again_at_once() -> None:
    decision = go(started(4), FAILURE, died("a", 1, 1), failed_device="reuse")
    assert len(decision.ranks) == 4
    assert not decision.ledger.lost


def test_lost_devices_come_back_only_when_more_are_asked_for_than_are_free() -> None:
    ledger = go(started(), FAILURE, died("a", 1, 1)).ledger
    assert ledger.gpus == 7
    less = go(ledger, planned(6)).ledger
    assert less.allotted["a"] == (0, 2, 3)
    assert less.lost == {"a": (1,)}
    full = go(less, planned(8)).ledger
    assert full.gpus == 8
    assert not full.lost


def test_more_devices_than_a_layout_needs_stay_allotted() -> None:
    decision = go(started(), FAILURE, died("b", 6, 2))
    assert (len(decision.ranks), decision.ledger.gpus) == (4, 7)
    decision = go(decision.ledger, FAILURE, died("b", 2, 0))
    assert (len(decision.ranks), decision.ledger.gpus) == (6, 6)


def test_a_kill_counts_before_the_exceptions_it_causes() -> None:
    early = died("b", 5, 1, code=1, time=1.9)
    abort = died("b", 4, 0, code=-6, time=1.95)
    kill = died("a", 1, 1, code=-9, time=2.0)
    assert culprits(reports(early, abort, kill)) == (kill,)
    late = died("a", 1, 1, code=-9, time=3.5)
    assert culprits(reports(early, late)) == (early,)


def test_devices_killed_together_are_all_lost() -> None:
    decision = go(started(), FAILURE, died("a", 1, 1), died("a", 2, 2, time=2.1))
    assert decision.ledger.lost == {"a": (1, 2)}


def test_of_several_exceptions_the_first_is_the_cause() -> None:
    first, second = died("b", 5, 1, code=1, time=2.0), died("a", 1, 1, code=1, time=2.01)
    assert culprits(reports(second, first)) == (first,)
    assert culprits(reports(died("a", 0, 0, code=85), died("a", 1, 1, code=0))) == ()


def test_in_a_planned_change_only_kills_cost_a_device() -> None:
    broken = died("a", 1, 1, code=1)
    assert not go(started(), planned(4), broken).ledger.lost
    assert go(started(), planned(4), broken, died("b", 4, 0)).ledger.lost == {"b": (0,)}


def test_the_newest_version_that_every_rank_finished_counts() -> None:
    parts = [*(held(4, rank) for rank in range(4)), *(held(6, rank) for rank in range(3))]
    source = newest_complete([NodeReport("a", 4, tuple(parts))])
    assert source is not None
    assert source.version == 4


def test_a_committed_version_with_missing_parts_is_better_than_none() -> None:
    parts = tuple(held(6, rank) for rank in range(2))
    source = newest_complete([NodeReport("a", 4, parts)])
    assert source is not None
    assert dict(source.nodes) == {0: "a", 1: "a"}
    uncommitted = tuple(replace(part, committed=False) for part in parts)
    assert newest_complete([NodeReport("a", 4, uncommitted)]) is None


def test_generations_go_on_after_those_of_an_earlier_run() -> None:
    found = [NodeReport("a", 4, tuple(held(6, rank, generation=7) for rank in range(4)))]
    decision = decide(Ledger(), START, found, rules())
    assert isinstance(decision, NextGeneration)
    assert decision.ledger.generation == 8
    assert decision.source is not None


def test_too_many_failures_end_the_job() -> None:
    ledger = go(started(), FAILURE, died("a", 1, 1), max_failures=1).ledger
    ending = decide(ledger, FAILURE, reports(died("a", 2, 2)), rules(max_failures=1))
    assert ending == Ending(1, "2 failures, the policy allows 1 (max_failures); last: rank 1 died")


def test_the_same_exception_three_times_without_progress_ends_the_job() -> None:
    ledger = started()
    for rank in (1, 2):
        ledger = go(ledger, FAILURE, died("a", rank, rank, code=1), version=4).ledger
    third = decide(ledger, FAILURE, reports(died("a", 3, 3, code=1), version=4), rules())
    assert isinstance(third, Ending)
    assert third.reason.startswith("3 generations failed after step 4 with exit code 1")
    further = go(ledger, FAILURE, died("a", 3, 3, code=1), version=6)
    assert further.ledger.repeated == (6, 1, 1)


def test_kills_from_outside_never_look_like_the_same_failure() -> None:
    ledger = started()
    for device in range(4):
        ledger = go(ledger, FAILURE, died("a", device, device), version=4).ledger
    assert ledger.repeated[2] == 0


def test_wrong_input_ends_the_job_with_exit_code_2() -> None:
    change = Change("invalid", "no such script", 2.0, "a")
    assert decide(started(), change, reports(), rules()) == Ending(2, "no such script")


def test_a_world_too_small_is_said_with_the_failure_that_made_it_so() -> None:
    small = rules(layouts=("TP2,PP2",))
    ledger = go(started(), planned(4), layouts=("TP2,PP2",)).ledger
    with pytest.raises(ConfigError, match=r"TP2,PP2,DP1 would fit 4 \(after: rank 1 died\)"):
        decide(ledger, FAILURE, reports(died("a", 1, 1)), small)
    with pytest.raises(ConfigError, match=r"rank 1 died\); the snapshot of step 7 is kept"):
        decide(ledger, FAILURE, reports(died("a", 1, 1), version=7), small)


def test_the_last_device_can_be_lost() -> None:
    ledger = go(started(), planned(1)).ledger
    ending = decide(ledger, FAILURE, reports(died("a", 0, 0)), rules())
    assert ending == Ending(1, "no device is left; last: rank 1 died")


def test_a_script_that_fails_twice_before_the_first_snapshot_ends_the_job() -> None:
    ledger = go(started(), FAILURE, died("a", 1, 1, code=1)).ledger
    ending = decide(ledger, FAILURE, reports(died("a", 2, 2, code=1)), rules())
    assert isinstance(ending, Ending)
    assert ending.reason.startswith(
        "2 generations failed before the first snapshot with exit code 1; last: "
    )


def test_a_schedule_that_can_not_be_kept_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.6: expected 1 to 8 devices"):
        decide(Ledger(), START, reports(), rules(schedule={6: 9}))
    with pytest.raises(ConfigError, match=r"schedule\.6 contradicts layouts: no .* fits 2 devices"):
        decide(Ledger(), START, reports(), rules(schedule={6: 2}, layouts=("TP2,PP2",)))


def test_a_contradiction_names_both_lines() -> None:
    policy = parse_policy('layouts: ["TP2,PP2"]\nschedule:\n  6: 2\n', "p.yaml")
    with pytest.raises(ConfigError) as caught:
        decide(Ledger(), START, reports(), small_job(policy))
    said = "schedule.6 (p.yaml, line 3) contradicts layouts (p.yaml, line 1): "
    assert str(caught.value).startswith(said)


def test_a_choice_says_what_it_predicts_and_why_not_the_others() -> None:
    decision = go(started(4), FAILURE, died("a", 1, 1), layouts=("TP1", "TP2,PP2", "PP3"))
    assert str(decision.layout) == "TP1,PP1,DP3"
    assert decision.reason.startswith(f"predicted {decision.predicted_step_s:.3g} s per step and ")
    assert dict(decision.rejected)["TP2,PP2"] == "needs 4 devices"


def test_a_state_that_lies_elsewhere_counts_the_bytes_that_move() -> None:
    ledger = replace(started(4), generation=1, layout=ParallelLayout(tp=2, pp=2))
    decision = go(ledger, planned(8), version=6, layouts=("TP2,PP2",))
    assert "MB move between nodes" in decision.reason
    earlier = replace(ledger, generation=5)  # the snapshot is not of the last generation
    assert "move between" not in go(earlier, planned(8), version=6, layouts=("TP2,PP2",)).reason


def test_a_prediction_that_nothing_fits_ends_no_job_that_runs() -> None:
    small = replace(rules(), cluster=replace(rules().cluster, memory_bytes=1e3))
    with pytest.raises(ConfigError, match=r"fits 1e-06 GB: the smallest, .* GB short"):
        decide(Ledger(), START, reports(), small)
    ledger = started(4)
    assert isinstance(decide(ledger, FAILURE, reports(), small), NextGeneration)
    assert isinstance(decide(Ledger(), START, reports(version=6), small), NextGeneration)
    with pytest.raises(ConfigError, match="GB short"):
        check_target(4, {"a": 4}, small)


def test_a_target_is_checked_before_anything_stops() -> None:
    assert check_target(3, {"a": 4}, rules()).dp == 3
    with pytest.raises(ConfigError, match=r"expected 1 to 4 devices \(a: 4\), got 5"):
        check_target(5, {"a": 4}, rules())


def test_a_node_that_left_takes_its_devices_along() -> None:
    change = Change("leave", "node b was stopped", 2.0, "b")
    decision = decide(started(), change, reports()[1:], rules())
    assert isinstance(decision, NextGeneration)
    assert {node for node, _ in decision.ranks} == {"a"}
    assert dict(decision.totals) == {"a": 4}


def test_the_end_of_a_node_costs_no_device_of_the_nodes_that_saw_it() -> None:
    found = reports(died("a", 1, 1, code=1))[1:]
    decision = decide(started(), FAILURE, found, rules())
    assert isinstance(decision, NextGeneration)
    assert (decision.ledger.gpus, dict(decision.ledger.lost)) == (4, {})
    assert decision.change.cause == "lost b; first seen: rank 1 died"


def test_decisions_do_not_depend_on_the_order_of_reports() -> None:
    found = reports(died("a", 1, 1), died("b", 5, 1, code=1), version=4)
    assert decide(started(), FAILURE, found, rules()) == decide(
        started(), FAILURE, found[::-1], rules()
    )


def test_messages_come_back_as_they_went() -> None:
    decision = go(started(4), FAILURE, died("a", 1, 1), version=6)
    decision = replace(decision, master=("host", 29500))
    assert load_decision(dump_decision(decision)) == decision
    assert load_decision(dump_decision(Ending(1, "over"))) == Ending(1, "over")
    assert load_change(dump_change(planned(4))) == planned(4)
    report = reports(died("a", 1, 1), version=6)[1]
    assert load_report(dump_report(report)) == report


def test_wrong_input_ends_the_job_also_when_a_peer_was_seen_to_fail_first() -> None:
    lost = WorkerExit(0, 0, 1, 2.0, "connection closed by peer")
    full = WorkerExit(3, 1, 2, 2.1, "no room for snapshots")
    found = decide(Ledger(), FAILURE, reports(("a", lost), ("b", full)), rules())
    assert found == Ending(2, "no room for snapshots")


def test_a_layout_that_ran_out_of_memory_is_not_tried_again_and_costs_no_device() -> None:
    layouts = ("TP1", "TP2,PP2")
    first = go(Ledger(), START, layouts=layouts)
    assert first.layout == ParallelLayout(dp=8)
    done = WorkerExit(1, 1, 1, 2.0, "torch.OutOfMemoryError: CUDA out of memory. Tried to ...")
    change = Change("failure", "rank 1 ended", 2.0, "a")
    next_one = go(first.ledger, change, ("a", done), layouts=layouts)
    assert next_one.layout == ParallelLayout(tp=2, pp=2, dp=2)
    assert next_one.ledger.gpus == 8
    assert load_decision(dump_decision(next_one)) == next_one
    later = go(next_one.ledger, FAILURE, died("a", 1, 1), layouts=layouts)
    assert later.layout.tp == 2  # still remembered
