"""Who asked for another number of devices, and what became of it?

An agent takes requests out of the run folder, checks them against the policy before anything is
disturbed, posts one at a time for rank 0, and answers when the generation it led to has started.
"""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from tenplex_megatron.elastic.board import Board
from tenplex_megatron.elastic.membership import Rules, check_target
from tenplex_megatron.elastic.records import NextGeneration
from tenplex_megatron.elastic.requests import ResizeRequest, claim_requests, write_answer
from tenplex_megatron.errors import ConfigError, LayoutError

__all__ = ["RequestDesk"]

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2


class RequestDesk:
    """The requests this agent has taken."""

    def __init__(
        self, run_dir: Path, rules: Rules, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run_dir = run_dir
        self._rules = rules
        self._clock = clock
        self._since_ns = time.time_ns()
        self._next_look = 0.0
        self._waiting: list[ResizeRequest] = []
        self._posted: ResizeRequest | None = None

    def look(self, board: Board, present: NextGeneration) -> None:
        """Take new requests, and post the oldest unless one is under way."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_EVERY_S
        self._waiting.extend(claim_requests(self._run_dir, since_ns=self._since_ns))
        if self._posted is None and self._waiting:
            self._serve(board, present)

    def _serve(self, board: Board, present: NextGeneration) -> None:
        request = self._waiting[0]
        try:
            chosen = check_target(request.gpus, present.totals, self._rules)
        except (ConfigError, LayoutError) as error:
            self._waiting.pop(0)
            self._answer(request, state="refused", reason=str(error))
            return
        if request.gpus == present.ledger.gpus:
            self._waiting.pop(0)
            self._answer(
                request, state="done", old=str(present.layout), new=str(present.layout), seconds=0.0
            )
            return
        cause = f"request: {request.gpus} devices"
        text = json.dumps({"gpus": request.gpus, "cause": cause, "request": request.id})
        if board.post_request(text):
            self._posted = self._waiting.pop(0)
            logger.info("asked rank 0 to go to %s devices (%s)", request.gpus, chosen)
            self._answer(request, state="pending", old=str(present.layout), new=str(chosen))

    def turned(self, old: NextGeneration, new: NextGeneration) -> None:
        """A new generation started: answer, or ask again where something else came between."""
        request, self._posted = self._posted, None
        if request is None:
            return
        if new.change.request == request.id:
            self._answer(
                request,
                state="done",
                old=str(old.layout),
                new=str(new.layout),
                step=new.change.step,
                seconds=time.time() - new.change.time,
            )
        else:
            self._waiting.insert(0, request)

    def close(self, reason: str) -> None:
        """The job ends: nobody should wait any longer."""
        left = [
            self._posted,
            *self._waiting,
            *claim_requests(self._run_dir, since_ns=self._since_ns),
        ]
        for request in filter(None, left):
            self._answer(request, state="refused", reason=reason)

    def _answer(self, request: ResizeRequest, **fields: object) -> None:
        write_answer(self._run_dir, request.id, **fields)
