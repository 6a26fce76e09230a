"""Agents as threads on one store in memory."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from tenplex_megatron.elastic import board as board_module
from tenplex_megatron.elastic.board import Board
from tenplex_megatron.elastic.messages import dump_report
from tenplex_megatron.elastic.records import Change, Ending, NextGeneration, NodeReport
from tenplex_megatron.errors import ConfigError, TransportError

CHANGE = Change("failure", "x", 1.0, "a")


def boards(count: int) -> list[Board]:
    store = HashStore()
    return [Board(store, index, count) for index in range(count)]


def together[T](jobs: Sequence[Callable[[], T]]) -> list[T]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [done.result(20) for done in [pool.submit(job) for job in jobs]]


def named(count: int) -> list[Board]:
    found = boards(count)
    together([lambda b=b, i=i: b.exchange_names("abc"[i], 5.0) for i, b in enumerate(found)])
    return found


def ending(reports: Sequence[NodeReport]) -> NextGeneration | Ending:
    return Ending(0, ",".join(sorted(report.node for report in reports)))


def test_two_nodes_of_one_name_are_refused_on_both() -> None:
    def join(board: Board) -> str:
        with pytest.raises(ConfigError, match="give each its own with --node-name"):
            board.exchange_names("same", 5.0)
        return "refused"

    assert together([lambda b=b: join(b) for b in boards(2)]) == ["refused", "refused"]


def test_a_node_that_does_not_come_is_said() -> None:
    with pytest.raises(TransportError, match=r"waited 0\.05 s for the names of all nodes"):
        boards(2)[0].exchange_names("a", 0.05)


def test_the_first_change_wins_and_everybody_hears_of_it_once() -> None:
    first, second = boards(2)
    assert not second.has_news()
    first.post_change(CHANGE)
    second.post_change(Change("planned", "y", 2.0, "b"))
    assert first.change() == second.change() == CHANGE
    assert second.has_news()
    assert not second.has_news()


def test_a_turn_leaves_old_messages_behind() -> None:
    first, second = named(2)
    first.post_change(CHANGE)
    for board in (first, second):
        board.turn(["a", "b"])
    assert second.change() is None
    assert not second.has_news()


def test_one_request_waits_at_a_time() -> None:
    first, second = boards(2)
    assert first.post_request("r1")
    assert not second.post_request("r2")
    assert second.request() == "r1"


def test_all_are_done_when_every_member_is() -> None:
    first, second = boards(2)
    first.post_done()
    assert not first.all_done()
    second.post_done()
    assert first.all_done()


def test_all_nodes_obey_one_decision_made_from_all_reports() -> None:
    found = named(3)
    deciders: list[int] = []

    def join(index: int) -> NextGeneration | Ending:
        def decide(reports: Sequence[NodeReport]) -> NextGeneration | Ending:
            deciders.append(index)
            return ending(reports)

        return found[index].agree(NodeReport("abc"[index], 4), decide, 5.0)

    decisions = together([lambda i=i: join(i) for i in range(3)])
    assert decisions == [Ending(0, "a,b,c")] * 3
    assert deciders == [0]


def test_a_node_that_said_goodbye_is_not_waited_for() -> None:
    first, second = named(2)
    first.leave()
    assert second.agree(NodeReport("b", 4), ending, 5.0) == Ending(0, "b")


def test_a_node_that_fell_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "_LOST_S", 0.1)
    first, second = named(2)
    second.beat()
    assert first.agree(NodeReport("a", 4), ending, 5.0) == Ending(0, "a")


def test_a_node_that_lives_but_does_not_report_is_given_up_late() -> None:
    first, second = named(2)
    stop = threading.Event()

    def live() -> None:
        while not stop.wait(0.01):
            first._root.add("beat/0", 1)

    beating = threading.Thread(target=live)
    beating.start()
    begun = time.monotonic()
    try:
        assert second.agree(NodeReport("b", 4), ending, 0.5) == Ending(0, "b")
    finally:
        stop.set()
        beating.join()
    assert time.monotonic() - begun > 0.4


def test_without_a_decision_the_wait_ends() -> None:
    first, second = named(2)
    first._store.set("report/0", dump_report(NodeReport("a", 4)))
    with pytest.raises(TransportError, match=r"waited 0\.2 s for the reports of nodes .* decision"):
        second.agree(NodeReport("b", 4), lambda _: pytest.fail("must not decide"), 0.2)


def test_parting_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "_LAST_LOOK_S", 0.0)
    found = boards(2)
    together([found[0].part, found[1].part])
