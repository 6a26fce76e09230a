from pathlib import Path

import pytest
from torch.distributed import HashStore

from tenplex_megatron.config import ElasticPolicy
from tenplex_megatron.elastic.board import Board
from tenplex_megatron.elastic.desk import RequestDesk
from tenplex_megatron.elastic.membership import decide
from tenplex_megatron.elastic.records import Change, Ledger, NextGeneration, NodeReport
from tenplex_megatron.elastic.requests import post_request, read_answer
from tests.unit.elastic.jobs import small_job

RULES = small_job(ElasticPolicy(layouts=("TP2,PP2", "TP1,PP1,DP3")))
REPORTS = [NodeReport("a", 4), NodeReport("b", 4)]


def after(ledger: Ledger, change: Change) -> NextGeneration:
    decision = decide(ledger, change, REPORTS, RULES)
    assert isinstance(decision, NextGeneration)
    return decision


PRESENT = after(Ledger(), Change("start", "", 1.0, "a"))


@pytest.fixture
def board() -> Board:
    return Board(HashStore(), 0, 1)


def desk(run_dir: Path) -> RequestDesk:
    ticks = iter(range(100))
    return RequestDesk(run_dir, RULES, clock=lambda: float(next(ticks)))


def state(run_dir: Path, identity: str) -> str:
    answer = read_answer(run_dir, identity)
    return "" if answer is None else str(answer["state"])


def test_a_request_waits_for_the_generation_it_leads_to(run_dir: Path, board: Board) -> None:
    front, asked = desk(run_dir), post_request(run_dir, 4)
    front.look(board, PRESENT)
    assert state(run_dir, asked.id) == "pending"
    assert board.request() is not None
    change = Change("planned", "", 2.0, "a", gpus=4, step=6, request=asked.id)
    front.turned(PRESENT, after(PRESENT.ledger, change))
    answer = read_answer(run_dir, asked.id) or {}
    assert (answer["state"], answer["old"], answer["new"]) == ("done", "TP2,PP2,DP2", "TP2,PP2,DP1")
    assert answer["step"] == 6


@pytest.mark.parametrize(("gpus", "why"), [(9, "expected 1 to 8 devices"), (2, "no allowed")])
def test_what_can_not_be_done_is_refused_without_disturbing_the_job(
    run_dir: Path, board: Board, gpus: int, why: str
) -> None:
    front, asked = desk(run_dir), post_request(run_dir, gpus)
    front.look(board, PRESENT)
    assert state(run_dir, asked.id) == "refused"
    assert why in (read_answer(run_dir, asked.id) or {})["reason"]
    assert board.request() is None


def test_what_is_so_already_is_answered_at_once(run_dir: Path, board: Board) -> None:
    front, asked = desk(run_dir), post_request(run_dir, 8)
    front.look(board, PRESENT)
    assert state(run_dir, asked.id) == "done"
    assert board.request() is None


def test_a_failure_in_between_makes_the_request_wait_again(run_dir: Path, board: Board) -> None:
    front, asked = desk(run_dir), post_request(run_dir, 4)
    front.look(board, PRESENT)
    front.turned(PRESENT, PRESENT)
    fresh = Board(HashStore(), 0, 1)
    front.look(fresh, PRESENT)
    assert fresh.request() is not None
    assert state(run_dir, asked.id) == "pending"


def test_requests_are_served_one_after_the_other(run_dir: Path, board: Board) -> None:
    front = desk(run_dir)
    first, second = post_request(run_dir, 4), post_request(run_dir, 3)
    front.look(board, PRESENT)
    front.look(board, PRESENT)
    assert (state(run_dir, first.id), state(run_dir, second.id)) == ("pending", "")


def test_nobody_waits_for_a_job_that_ended(run_dir: Path, board: Board) -> None:
    front, taken = desk(run_dir), post_request(run_dir, 4)
    front.look(board, PRESENT)
    untaken = post_request(run_dir, 3)
    front.close("the job ended")
    assert [state(run_dir, one.id) for one in (taken, untaken)] == ["refused", "refused"]
