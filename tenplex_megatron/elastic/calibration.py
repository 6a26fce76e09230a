"""What do the step times of this job say about the cluster it runs on?

Fitted on a thread while training goes on: the fit takes tenths of a second, which a decision after
a failure must not wait for.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tenplex_megatron.elastic.membership import Rules
from tenplex_megatron.elastic.records import StepTime
from tenplex_megatron.elastic.step_times import read_step_times
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.timing.calibrate import Measurement, calibrate

__all__ = ["Calibration", "measurements"]

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 2.0
_ENOUGH_STEPS = 4
"""A few steps say little: the first ones of a generation are slow."""
_MOST_ROWS = 24
"""More generations than these do not make a fit better."""


class Calibration:
    """The cluster's profile, fitted to what this node knows of the job's generations."""

    def __init__(
        self,
        rules: Rules,
        run_dir: Path,
        identity: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules, self._run_dir, self._identity = rules, run_dir, identity
        self._clock = clock
        self._next_look = 0.0
        self._rows: tuple[StepTime, ...] = ()
        self._fitting: Future[ClusterProfile] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tenplex-calibration")
        self.cluster = rules.cluster
        """The newest fit; the profile itself until there is one."""

    def look(self) -> None:
        """Fit anew when there are new rows; returns at once."""
        self._collect()
        now = self._clock()
        if now < self._next_look or self._fitting is not None:
            return
        self._next_look = now + _LOOK_EVERY_S
        rows = read_step_times(self._run_dir, self._identity)
        if rows != self._rows:
            self._rows = rows
            found = measurements(self._rules, rows)
            if found:
                self._fitting = self._thread.submit(calibrate, self._rules.cluster, found)

    def close(self) -> None:
        """Wait for nothing any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _collect(self) -> None:
        if self._fitting is None or not self._fitting.done():
            return
        fitted, self._fitting = self._fitting, None
        error = fitted.exception()
        if error is None:
            self.cluster = fitted.result()
        else:
            logger.warning("step times could not be fitted and are not used: %s", error)


def measurements(rules: Rules, rows: Sequence[StepTime]) -> list[Measurement]:
    """What can be learned from rows: of legal layouts, over enough steps."""
    model = rules.job.model
    if model is None:
        return []
    strategies = [(rules.job.strategy(row.layout), row) for row in rows]
    return [
        Measurement(model, strategy, row.step_s)
        for strategy, row in strategies
        if row.steps >= _ENOUGH_STEPS and not rules.job.broken_rules(strategy)
    ][-_MOST_ROWS:]
