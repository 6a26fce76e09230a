"""The life of a generation on one node, on a virtual clock."""

from collections.abc import Iterable

import pytest

from tenplex_megatron.elastic.machine import (
    Accepted,
    Action,
    AllDone,
    ChangeSeen,
    Event,
    Exited,
    Finish,
    NodeState,
    Phase,
    PostChange,
    PostDone,
    Reconfigure,
    Stopped,
    StopWorkers,
    Tick,
    advance,
    begin,
)
from tenplex_megatron.elastic.records import Change, WorkerExit

PLANNED = Change("planned", "4 devices", 100.0, "a", gpus=4, step=6)
FAILED = Change("failure", "rank 5 died", 100.0, "b")


def run(events: Iterable[Event], ranks: int = 2) -> tuple[NodeState, list[Action]]:
    state, first = begin("a", frozenset(range(ranks)), stop_s=10.0)
    actions = list(first)
    for event in events:
        state, more = advance(state, event)
        actions.extend(more)
    return state, actions


def left(rank: int, code: int, time: float = 100.0, message: str = "") -> Exited:
    return Exited(WorkerExit(rank, rank + 4, code, time, message))


def test_a_death_is_posted_and_nothing_is_killed_before_a_change_has_won() -> None:
    state, actions = run([left(1, -9)])
    (post,) = actions
    assert isinstance(post, PostChange)
    assert post.change.kind == "failure"
    assert post.change.cause == "rank 1 (device 5 of node a) ended with signal 9"
    assert state.phase is Phase.RUNNING


def test_a_failure_anywhere_kills_at_once_and_then_reconfigures() -> None:
    _, actions = run([ChangeSeen(FAILED), Stopped()])
    assert actions == [StopWorkers(), Reconfigure(FAILED)]


def test_the_message_of_the_worker_is_part_of_the_cause() -> None:
    _, (post,) = run([left(0, 1, message="ValueError: no")])
    assert isinstance(post, PostChange)
    assert post.change.cause.endswith("ended with exit code 1: ValueError: no")


def test_wrong_input_is_no_failure() -> None:
    _, (post,) = run([left(0, 2, message="no such file")])
    assert isinstance(post, PostChange)
    assert (post.change.kind, post.change.cause) == ("invalid", "no such file")


def test_workers_that_hand_over_are_waited_for() -> None:
    _, actions = run([Accepted(PLANNED), ChangeSeen(PLANNED), left(0, 85), left(1, 85)])
    assert actions == [PostChange(PLANNED), Reconfigure(PLANNED)]


def test_workers_may_leave_before_the_change_is_known_here() -> None:
    _, actions = run([left(0, 85), left(1, 85), ChangeSeen(PLANNED)])
    assert actions == [Reconfigure(PLANNED)]


def test_a_broken_connection_while_handing_over_is_no_failure() -> None:
    _, actions = run([left(0, 85), left(1, 1), ChangeSeen(PLANNED)])
    assert actions == [Reconfigure(PLANNED)]
    _, actions = run([ChangeSeen(PLANNED), left(0, 1), left(1, 85)])
    assert actions == [Reconfigure(PLANNED)]


def test_workers_that_do_not_leave_in_time_are_killed_once() -> None:
    events = [ChangeSeen(PLANNED), left(0, 85), Tick(109.9), Tick(110.0), Tick(111.0), Stopped()]
    _, actions = run(events)
    assert actions == [StopWorkers(), Reconfigure(PLANNED)]


def test_a_handover_nobody_announced_goes_on_with_the_same_devices() -> None:
    _, actions = run([left(0, 85), left(1, 85, 100.1), Tick(109.0), Tick(110.0)])
    (post,) = actions
    assert isinstance(post, PostChange)
    assert (post.change.kind, post.change.gpus) == ("planned", None)


def test_the_job_finishes_when_every_node_has() -> None:
    state, actions = run([left(0, 0), left(1, 0), AllDone()])
    assert actions == [PostDone(), Finish()]
    assert state.phase is Phase.OVER


def test_a_node_without_workers_is_done_at_once_but_joins_the_next_change() -> None:
    _, actions = run([], ranks=0)
    assert actions == [PostDone()]
    _, actions = run([ChangeSeen(FAILED)], ranks=0)
    assert actions == [PostDone(), Reconfigure(FAILED)]


def test_a_failure_elsewhere_reaches_a_node_that_was_done() -> None:
    _, actions = run([left(0, 0), left(1, 0), ChangeSeen(FAILED)])
    assert actions == [PostDone(), Reconfigure(FAILED)]


def test_only_the_first_change_counts() -> None:
    _, actions = run([ChangeSeen(FAILED), ChangeSeen(PLANNED), Accepted(PLANNED), Stopped()])
    assert actions == [StopWorkers(), Reconfigure(FAILED)]


@pytest.mark.parametrize(
    "event", [left(0, -9), ChangeSeen(PLANNED), Accepted(PLANNED), AllDone(), Tick(1e9), Stopped()]
)
def test_after_the_end_nothing_matters(event: Event) -> None:
    _, actions = run([ChangeSeen(FAILED), Stopped(), event])
    assert actions == [StopWorkers(), Reconfigure(FAILED)]
