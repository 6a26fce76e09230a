"""Which constants of a cluster explain the iterations measured on it?

A few constants are moved, each within bounds and held by a prior to the profile's value, so that
one odd row never wrecks one. Residuals are logarithms of predicted over measured time, damped by
a soft absolute value. Deterministic.
"""

from collections.abc import Sequence
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
_INSIDE = 0.01
"""Standard deviations between the start and the bounds, on which an interior search stands still.
"""
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
    errors = np.log(predict_times(cluster, candidates).step_s / measured_s)
    far = float(np.median(np.abs(errors))) / _TRUSTED if len(rows) >= _ROWS_FOR_A_MEDIAN else 1.0
    spreads = max(1.0, far) * np.array([constant.spread for constant in constants])
    noise = _ROW_NOISE * np.sqrt(max(1.0, len(rows) / _INDEPENDENT_ROWS))
    names = [constant.name for constant in constants]
    low, high = (np.log([getattr(c, end) for c in constants]) for end in ("lowest", "highest"))
    known = np.log([max(getattr(cluster, c.name), c.lowest) for c in constants])
    start = np.clip(known, low, high)

    def moved(point: Array) -> ClusterProfile:
        """Constants `point` standard deviations of their priors away from the profile's."""
        values = np.exp(start + spreads * point)
        return replace(cluster, **dict(zip(names, values.tolist(), strict=True)))

    def residuals(point: Array) -> Array:
        """Errors of the rows, damped, then of the priors, in standard deviations."""
        errors = np.log(predict_times(moved(point), candidates).step_s / measured_s)
        return np.concatenate([_damped(errors) / noise, point])

    bounds = (low - start) / spreads, (high - start) / spreads
    inside = np.clip(np.zeros(len(start)), bounds[0] + _INSIDE, bounds[1] - _INSIDE)
    from scipy.optimize import least_squares  # noqa: PLC0415 - 0.6 s of every start, and few fit

    return moved(least_squares(residuals, inside, bounds=bounds, max_nfev=_ROUNDS).x)


def _damped(errors: Array) -> Array:
    """Errors whose squares are those of small errors and grow linearly with large ones.

    Squared, this is the loss that scipy calls `soft_l1`, which there would damp the priors too.
    """
    return errors * np.sqrt(2.0 / (1.0 + np.hypot(1.0, errors / _LOSS_SCALE)))
