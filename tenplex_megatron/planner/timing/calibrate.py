"""Which constants of a cluster explain the iterations measured on it?

A few constants are moved, each within bounds and held by a prior to the profile's value, so that
one odd row never wrecks one. Residuals are logarithms of predicted over measured time, damped by
a soft absolute value. Deterministic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.strategy import Strategy
from tenplex_megatron.planner.timing.candidates import Array, Candidates
from tenplex_megatron.planner.timing.predict import predict_times

__all__ = ["CONSTANTS", "Constant", "Measurement", "calibrate"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One iteration as it ran."""

    model: ModelProfile
    strategy: Strategy
    step_s: float

    def __post_init__(self) -> None:
        if not self.step_s > 0.0:
            raise ConfigError(
                f"measurement of {self.strategy.layout}: expected seconds above 0, got "
                f"{self.step_s!r}"
            )


@dataclass(frozen=True, slots=True)
class Constant:
    """One field of the cluster that may move."""

    name: str
    lowest: float
    highest: float
    spread: float
    """Standard deviation of the prior, of the constant's logarithm."""


CONSTANTS = (
    Constant("gemm_efficiency", 0.01, 1.0, 0.15),
    Constant("gemm_wave", 1.0, 1.1e7, 1.0),
    Constant("attention_efficiency", 0.02, 1.0, 0.3),
    Constant("score_bytes", 4.0, 400.0, 0.7),
    Constant("memory_efficiency", 0.02, 1.0, 0.2),
    Constant("node_efficiency", 0.01, 1.0, 0.4),
    Constant("network_efficiency", 0.01, 1.0, 0.4),
    Constant("launch_forward_s", 1e-6, 1.0, 0.5),
    Constant("launch_backward_s", 1e-6, 1.0, 0.5),
    Constant("launch_send_s", 1e-6, 0.1, 0.5),
    Constant("launch_spread", 1e-3, 1.0, 0.5),
    Constant("overlap", 0.1, 1.0, 0.3),
    Constant("fixed_s", 1e-4, 1.0, 0.7),
)
"""What differs between machines and software stacks, with the range it can have."""

_ROUNDS = 40
_STEP = 1e-4
"""Difference of logarithms for slopes, and below which a move ends the search."""
_LOSS_SCALE = 0.08
"""Relative error from which a row counts less than its square."""
_ROW_NOISE = 0.1
"""Relative error expected of a good row: what weighs the rows against the priors."""
_TRUSTED = 0.3
"""Error of the median row up to which the profile is trusted as its spreads say. A profile further
off, such as a rough one of an unknown machine, gets spreads as much wider."""
_ROWS_FOR_A_MEDIAN = 3
_INDEPENDENT_ROWS = 24
"""Errors of rows share causes that no constant describes: more rows weigh no more than these."""


def calibrate(
    cluster: ClusterProfile,
    rows: Sequence[Measurement],
    constants: Sequence[Constant] = CONSTANTS,
) -> ClusterProfile:
    """The cluster with those `constants` moved that explain the measured `rows`; 1 to 24 suffice.

    Constants are fitted as logarithms, so a constant of 0 starts at its lowest value.

    Raises:
        ConfigError: no row is given.
    """
    if not rows:
        raise ConfigError(f"calibration of {cluster.name}: expected at least one row, got none")
    candidates = Candidates.of_pairs([(row.model, row.strategy) for row in rows])
    measured_s = np.array([row.step_s for row in rows])
    names = [constant.name for constant in constants]
    low, high = (np.log([getattr(c, end) for c in constants]) for end in ("lowest", "highest"))
    known = np.array([max(getattr(cluster, c.name), c.lowest) for c in constants])
    start = np.clip(np.log(known), low, high)
    spreads = np.array([constant.spread for constant in constants])
    errors = np.log(predict_times(cluster, candidates).step_s / measured_s)
    if len(rows) >= _ROWS_FOR_A_MEDIAN:
        spreads = spreads * max(1.0, float(np.median(np.abs(errors))) / _TRUSTED)
    noise = _ROW_NOISE * np.sqrt(max(1.0, len(rows) / _INDEPENDENT_ROWS))

    def moved(point: Array) -> ClusterProfile:
        return replace(cluster, **dict(zip(names, np.exp(point).tolist(), strict=True)))

    def residuals(point: Array) -> Array:
        """Errors of the rows, then of the priors, in standard deviations."""
        errors = np.log(predict_times(moved(point), candidates).step_s / measured_s)
        return np.concatenate([errors / noise, (point - start) / spreads])

    loss = _SoftLoss(len(rows), _LOSS_SCALE / noise)
    return moved(_least(residuals, start, (low, high), loss))


@dataclass(frozen=True, slots=True)
class _SoftLoss:
    """Squares of small errors, absolute values of large ones; priors are squared."""

    rows: int
    knee: float
    """The error, in standard deviations, from which it counts as absolute value."""

    def total(self, values: Array) -> float:
        soft = 2.0 * self.knee**2 * (np.hypot(1.0, values[: self.rows] / self.knee) - 1.0)
        return float(np.sum(soft) + np.sum(values[self.rows :] ** 2))

    def weights(self, values: Array) -> Array:
        """What each square counts, so that the squares have the slope of the loss."""
        weights = np.ones_like(values)
        weights[: self.rows] = 1.0 / np.hypot(1.0, values[: self.rows] / self.knee)
        return weights


def _least(
    residuals: Callable[[Array], Array],
    start: Array,
    bounds: tuple[Array, Array],
    loss: _SoftLoss,
) -> Array:
    """The point of least loss: Gauss-Newton on reweighted squares, damped after Levenberg.

    Steps are clipped to the bounds. Nothing is random: equal rows give equal constants.
    """
    point, damping = start, 1e-3
    values = residuals(point)
    for _ in range(_ROUNDS):
        steps = _STEP * np.eye(len(point))
        slopes = np.stack([residuals(point + step) - values for step in steps], axis=1) / _STEP
        weights = loss.weights(values)
        normal = slopes.T @ (weights[:, None] * slopes)
        downhill = -slopes.T @ (weights * values)
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), downhill)
        candidate = np.clip(point + step, *bounds)
        found = residuals(candidate)
        if loss.total(found) < loss.total(values):
            is_still = np.max(np.abs(candidate - point)) < _STEP
            point, values, damping = candidate, found, max(damping / 5.0, 1e-6)
            if is_still:
                break
        elif damping > 1e6:
            break
        else:
            damping *= 10.0
    return point
