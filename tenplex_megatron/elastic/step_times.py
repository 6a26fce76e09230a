"""How long do the steps of a generation take?

Rank 0 writes the median into a file of the run folder, from which the next decisions learn.
"""

import json
import logging
import time
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from statistics import median

from tenplex_megatron.elastic.generation import GenerationSpec
from tenplex_megatron.elastic.messages import step_time, step_time_json
from tenplex_megatron.elastic.records import StepTime
from tenplex_megatron.errors import LayoutError

__all__ = ["StepClock", "read_step_times"]

logger = logging.getLogger(__name__)

_FILE = "step_times.jsonl"
_WARM_UP = 1
"""Steps that do not count: they compile, allocate and fill caches."""
_MOST_SECONDS = 4096


class StepClock:
    """The steps of one generation; a row is written whenever their number has doubled."""

    def __init__(self, spec: GenerationSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec = spec
        self._clock = clock
        self._seen = 0
        self._last = 0.0
        self._seconds: list[float] = []

    def step(self) -> None:
        """A step is finished."""
        now = self._clock()
        if self._seen >= _WARM_UP and len(self._seconds) < _MOST_SECONDS:
            self._seconds.append(now - self._last)
            count = len(self._seconds)
            if count & (count - 1) == 0:
                self._write()
        self._seen += 1
        self._last = now

    def _write(self) -> None:
        spec = self._spec
        count, step_s = len(self._seconds), median(self._seconds)
        row = StepTime(spec.identity, spec.generation, spec.layout, count, step_s)
        with (spec.rundir / _FILE).open("a") as file:
            file.write(json.dumps(step_time_json(row)) + "\n")


def read_step_times(run_dir: Path, identity: str) -> tuple[StepTime, ...]:
    """The last row of every generation of this training; a damaged line is passed over."""
    try:
        lines = (run_dir / _FILE).read_text().splitlines()
    except FileNotFoundError:
        return ()
    found: dict[int, StepTime] = {}
    for line in lines:
        try:
            row = step_time(json.loads(line))
            is_sound = isfinite(row.step_s) and row.step_s > 0 and row.steps > 0
        except (ValueError, KeyError, TypeError, LayoutError):
            is_sound = False
        if not is_sound:
            logger.warning("%s: a line is damaged and is passed over", run_dir / _FILE)
            continue
        if row.identity == identity:
            found[row.generation] = row
    return tuple(found.values())
