"""Should the workers stop after this step, and for what?

Rank 0 asks once per step and tells its agent when the workers hand over. Both speak through two
small files in a folder of the generation, so a question costs one `stat` at most every 0.1 s and
never waits for a network.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tenplex_megatron.config import ElasticPolicy
from tenplex_megatron.elastic.generation import GenerationSpec
from tenplex_megatron.elastic.records import Change
from tenplex_megatron.elastic.requests import owner_only_folder, replace_json

__all__ = ["PlannedChange", "StepControl", "ask", "fresh_folder", "read_accepted"]

_PENDING = "pending.json"
_ACCEPTED = "accepted.json"

_LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """After `step`, go to `gpus` devices."""

    gpus: int
    step: int
    cause: str
    request: str | None = None


class StepControl:
    """Used by global rank 0 only; it broadcasts the answer to the other ranks."""

    def __init__(
        self,
        spec: GenerationSpec,
        policy: ElasticPolicy,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder: Path = spec.control
        self._gpus = spec.gpus
        self._schedule = dict(policy.schedule)
        self._asked_step = spec.source.version if spec.source is not None else 0
        self._clock = clock
        self._next_look = 0.0

    def pending(self, step: int) -> PlannedChange | None:
        """The change to make now that `step` is finished, if any.

        Call it once per finished step. The schedule counts before a request; an entry whose number
        of devices is already there is passed over.
        """
        return self._scheduled(step) or self._requested(step)

    def accept(self, change: PlannedChange) -> None:
        """Tell the agents that the workers hand over; call it after the snapshot is committed.

        The agents give the workers `timeouts.stop_s` from here to exit with code 85.
        """
        values = {
            "gpus": change.gpus,
            "step": change.step,
            "cause": change.cause,
            "request": change.request,
            "time": time.time(),
        }
        replace_json(self._folder / _ACCEPTED, values)

    def _scheduled(self, step: int) -> PlannedChange | None:
        due = [at for at in self._schedule if self._asked_step < at <= step]
        self._asked_step = max(step, self._asked_step)
        if not due or self._schedule[max(due)] == self._gpus:
            return None
        gpus = self._schedule[max(due)]
        return PlannedChange(gpus, step, f"schedule: {gpus} devices after step {max(due)}")

    def _requested(self, step: int) -> PlannedChange | None:
        now = self._clock()
        if now < self._next_look:
            return None
        self._next_look = now + _LOOK_EVERY_S
        try:
            asked = json.loads((self._folder / _PENDING).read_text())
        except FileNotFoundError:
            return None
        return PlannedChange(asked["gpus"], step, asked["cause"], asked["request"])


def fresh_folder(path: Path) -> Path:
    """The folder of a new generation, without what an earlier job of that name left in it."""
    folder = owner_only_folder(path)
    for name in (_PENDING, _ACCEPTED):
        (folder / name).unlink(missing_ok=True)
    return folder


def ask(folder: Path, request: str) -> None:
    """The agent's side: let rank 0 find a change, in JSON, at its next step."""
    replace_json(folder / _PENDING, json.loads(request))


def read_accepted(folder: Path, node: str) -> Change | None:
    """The agent's side: the change rank 0 told to be under way, if any."""
    try:
        told = json.loads((folder / _ACCEPTED).read_text())
    except FileNotFoundError:
        return None
    return Change(
        "planned", told["cause"], told["time"], node, told["gpus"], told["step"], told["request"]
    )
