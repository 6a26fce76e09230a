"""`tenplex resize`: ask a running job to use another number of devices."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tenplex_megatron.elastic.requests import (
    default_run_dir,
    is_running,
    post_request,
    read_answer,
    withdraw_request,
)
from tenplex_megatron.errors import ConfigError

__all__ = ["build_parser", "resize"]

_LOOK_EVERY_S = 0.05
_EPILOG = """examples:
  tenplex resize --gpus 4 --job gpt
  tenplex resize --gpus 8 --run-dir /scratch/gpt --no-wait
"""


def resize(arguments: Sequence[str]) -> int:
    """Ask, and wait until the job runs its new layout."""
    given = build_parser().parse_args(arguments)
    run_dir: Path = given.run_dir or default_run_dir(given.job)
    request = post_request(run_dir, given.gpus)
    if given.no_wait:
        print(f"asked for {given.gpus} devices")
        return 0
    return _wait(run_dir, request.id, timeout_s=given.timeout)


def _wait(run_dir: Path, identity: str, *, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    said = ""
    answer: dict[str, Any] = {"state": "unanswered"}
    while time.monotonic() < deadline:
        answer = read_answer(run_dir, identity) or {"state": "unanswered"}
        line = _describe(answer)
        if line != said:
            print(line, flush=True)
            said = line
        if answer["state"] == "done":
            return 0
        if answer["state"] == "refused":
            raise ConfigError(str(answer["reason"]))
        if not is_running(run_dir):
            withdraw_request(run_dir, identity)
            raise ConfigError(f"the job in {run_dir} has ended without an answer")
        time.sleep(_LOOK_EVERY_S)
    withdraw_request(run_dir, identity)
    what = "has not been made" if answer["state"] == "pending" else "is withdrawn"
    sys.stderr.write(f"tenplex resize: no answer within {timeout_s:g} s; the change {what}\n")
    return 1


def _describe(answer: dict[str, Any]) -> str:
    match answer["state"]:
        case "unanswered":
            return "waiting for the job"
        case "pending":
            return f"{answer['old']} -> {answer['new']}: waiting for the end of a step"
        case "refused":
            return "refused"
    if answer["old"] == answer["new"]:
        return f"{answer['old']}: nothing to change"
    step, seconds = answer["step"], answer["seconds"]
    changed = f"{answer['old']} -> {answer['new']}"
    return f"{changed} after step {step}, workers started {seconds:.2f} s later"


def build_parser() -> argparse.ArgumentParser:
    """The options of `tenplex resize`."""
    parser = argparse.ArgumentParser(
        prog="tenplex resize",
        description="Asks a running job to use another number of devices.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="devices to use")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run-dir", type=Path, help="run folder of the job")
    which.add_argument("--job", help="name of the job, when its run folder is the default one")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for the answer")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds to wait (default 600)"
    )
    return parser
