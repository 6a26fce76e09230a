import json
import time
from pathlib import Path

import pytest

from tenplex_megatron.cli.main import main as tenplex
from tenplex_megatron.elastic.events import EventLog
from tenplex_megatron.elastic.requests import (
    LOCK,
    claim_requests,
    owner_only_folder,
    post_request,
    read_answer,
    write_answer,
)
from tenplex_megatron.errors import ConfigError


def test_a_request_goes_to_one_agent_only(run_dir: Path) -> None:
    asked = [post_request(run_dir, gpus) for gpus in (4, 8)]
    assert list(claim_requests(run_dir)) == asked
    assert list(claim_requests(run_dir)) == []


def test_a_request_that_is_none_is_refused(run_dir: Path) -> None:
    for number, text in enumerate(("x", "[]", '{"gpus": "4"}')):
        (run_dir / "requests" / f"{number}.json").write_text(text)
    assert list(claim_requests(run_dir)) == []
    assert all((read_answer(run_dir, str(n)) or {})["state"] == "refused" for n in range(3))


def test_an_answer_is_replaced_as_a_whole(run_dir: Path) -> None:
    assert read_answer(run_dir, "1") is None
    write_answer(run_dir, "1", state="pending")
    write_answer(run_dir, "1", state="done")
    assert read_answer(run_dir, "1") == {"state": "done"}


def test_a_job_that_does_not_run_can_not_be_asked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no job runs in"):
        post_request(tmp_path, 4)
    owner_only_folder(tmp_path / "requests")
    (owner_only_folder(tmp_path / "nodes/a") / LOCK).touch()  # as a job leaves it
    assert tenplex(["resize", "--gpus", "3", "--run-dir", str(tmp_path)]) == 2
    assert not list((tmp_path / "requests").iterdir())


def test_what_was_asked_before_the_start_is_refused(run_dir: Path) -> None:
    old = post_request(run_dir, 4)
    started = time.time_ns()
    new = post_request(run_dir, 8)
    assert list(claim_requests(run_dir, since_ns=started)) == [new]
    answer = read_answer(run_dir, old.id)
    assert answer is not None
    assert answer["state"] == "refused"
    assert "before this start of the job" in answer["reason"]


def test_a_request_nobody_answers_is_withdrawn(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["resize", "--gpus", "3", "--run-dir", str(run_dir), "--timeout", "0.1"]
    assert tenplex(ask) == 1
    assert "the change is withdrawn" in capsys.readouterr().err
    assert list(claim_requests(run_dir)) == []


def test_folders_are_closed_to_others_and_links_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    assert owner_only_folder(folder).stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="must be a folder that belongs to user"):
        owner_only_folder(tmp_path / "link")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be made"):
        owner_only_folder(tmp_path / "file" / "below")


def test_resize_without_waiting_leaves_a_request(run_dir: Path) -> None:
    assert tenplex(["resize", "--gpus", "3", "--run-dir", str(run_dir), "--no-wait"]) == 0
    assert [request.gpus for request in claim_requests(run_dir)] == [3]


def test_resize_says_what_became_of_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = iter(
        [
            None,
            {"state": "pending", "old": "TP2", "new": "TP1"},
            {"state": "done", "old": "TP2", "new": "TP1", "step": 6, "seconds": 0.5},
        ]
    )
    monkeypatch.setattr("tenplex_megatron.cli.resize.read_answer", lambda *_: next(told))
    assert tenplex(["resize", "--gpus", "3", "--run-dir", str(run_dir)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "waiting for the job",
        "TP2 -> TP1: waiting for the end of a step",
        "TP2 -> TP1 after step 6, workers started 0.50 s later",
    ]


def test_resize_ends_with_2_when_refused_and_1_when_unanswered(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["resize", "--gpus", "3", "--run-dir", str(run_dir), "--timeout", "0.1"]
    assert tenplex(command) == 1
    assert "no answer within 0.1 s" in capsys.readouterr().err
    refused = {"state": "refused", "reason": "too many"}
    monkeypatch.setattr("tenplex_megatron.cli.resize.read_answer", lambda *_: refused)
    assert tenplex(command) == 2
    assert capsys.readouterr().err == "tenplex resize: too many\n"


def test_events_are_one_json_line_each(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", "a")
    log.append("event", 1, cause="x")
    log.append("started", 2)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["generation"], line["node"]) for line in lines] == [
        ("event", 1, "a"),
        ("started", 2, "a"),
    ]
