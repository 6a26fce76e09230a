"""How good are predictions of measured rows: which rows calibrate, how far off, which choice?"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from published_rows import Row
from scipy.stats import spearmanr

type Floats = NDArray[np.float64]
type Rows = Sequence[Row]
type Predict = Callable[[Rows, Rows], Floats]
"""Seconds of the second rows from a model that has seen the first; None of them is in both."""

LEAST_COMPETING = 4
"""Layouts of one model, GPU count and batch that make a group in which a choice is scored."""


@dataclass(frozen=True)
class Split:
    """Rows that calibrate and rows that are scored."""

    calibrating: Rows
    scored: Rows
    draw: int = 0


type Splits = Callable[[Rows, int], Iterator[Split]]
"""From the rows of a table and the number of draws, where rows are drawn."""


def unfitted(rows: Rows, _draws: int) -> Iterator[Split]:
    """Nothing calibrates."""
    yield Split((), rows)


def one_model_out(rows: Rows, _draws: int) -> Iterator[Split]:
    """The rows of the other models calibrate; for one model alone nothing does."""
    for model in dict.fromkeys(row.model for row in rows):
        others = [row for row in rows if row.model != model]
        yield Split(others, [row for row in rows if row.model == model])


def one_row_out(rows: Rows, _draws: int) -> Iterator[Split]:
    """All other rows of its kind calibrate."""
    for index, row in enumerate(rows):
        others = [*rows[:index], *rows[index + 1 :]]
        yield Split([other for other in others if other.kind == row.kind], [row])


def drawn(count: int) -> Splits:
    """`count` rows calibrate, at most half of all, and the rest is scored; again for every seed.

    Rows that contradict themselves are scored only.
    """

    def split(rows: Rows, draws: int) -> Iterator[Split]:
        sound = [index for index, row in enumerate(rows) if row.contradiction is None]
        few = min(count, len(sound) // 2)
        for seed in range(draws):
            order = np.random.default_rng(seed).permutation(len(sound)).tolist()
            chosen = {sound[place] for place in order[:few]}
            rest = [row for index, row in enumerate(rows) if index not in chosen]
            yield Split([rows[index] for index in sorted(chosen)], rest, seed)

    return split


@dataclass
class Scored:
    """Predictions of one table, one entry per row and draw of calibration rows."""

    rows: list[Row] = field(default_factory=list)
    predicted_s: list[float] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, splits: Sequence[Split], predict: Predict) -> "Scored":
        """Every scored row of every split."""
        found = cls()
        for split in splits:
            found.rows.extend(split.scored)
            found.predicted_s.extend(predict(split.calibrating, split.scored).tolist())
            found.draws.extend([split.draw] * len(split.scored))
        return found

    @property
    def errors_pct(self) -> Floats:
        """Predicted over measured time, less one."""
        measured = np.array([row.step_s for row in self.rows])
        return np.asarray(100.0 * (np.array(self.predicted_s) / measured - 1.0), np.float64)

    def summary(self) -> dict[str, Any]:
        """Errors of the time, and what choosing by it costs where layouts compete."""
        errors = self.errors_pct
        found = {"time_error_pct": spread(errors), **choices(self)}
        contradicted = [row.contradiction is not None for row in self.rows]
        if any(contradicted) and not all(contradicted):
            sound = errors[~np.array(contradicted)]
            found["time_error_pct_without_contradictions"] = spread(sound)
            found["contradictions"] = sorted(
                {row.contradiction for row in self.rows if row.contradiction}
            )
        return found


def spread(errors_pct: Floats) -> dict[str, float]:
    """Mean, median, 90th percentile and maximum of absolute errors, and the lowest signed one."""
    size = np.abs(errors_pct)
    return {
        "rows": len(size),
        "mean": float(size.mean()),
        "median": float(np.median(size)),
        "p90": float(np.percentile(size, 90)),
        "max": float(size.max()),
        "lowest": float(errors_pct.min()),
    }


def choices(scored: Scored) -> dict[str, Any]:
    """Regret and rank correlation over groups of competing layouts; empty without such a group."""
    members: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(scored.rows):
        members.setdefault((scored.draws[index], *row.group), []).append(index)
    regret, top3, correlation = [], [], []
    for indices in members.values():
        predicted = np.array([scored.predicted_s[i] for i in indices])
        measured = np.array([scored.rows[i].step_s for i in indices])
        if len(indices) < LEAST_COMPETING or np.ptp(measured) == 0.0 or np.ptp(predicted) == 0.0:
            continue
        order = np.argsort(predicted, kind="stable")
        regret.append(100.0 * (measured[order[0]] / measured.min() - 1.0))
        top3.append(100.0 * (measured[order[:3]].min() / measured.min() - 1.0))
        correlation.append(float(spearmanr(predicted, measured).statistic))
    if not regret:
        return {}
    return {
        "groups": len(regret),
        "regret_pct": {
            "mean": float(np.mean(regret)),
            "max": float(np.max(regret)),
            "top3_mean": float(np.mean(top3)),
        },
        "spearman": float(np.mean(correlation)),
    }


def sentence(summary: Mapping[str, Any]) -> str:
    """A summary for a person."""
    error = summary["time_error_pct"]
    text = "time  " + "  ".join(
        f"{key} {error[key]:.2f}" for key in ("mean", "median", "p90", "max")
    )
    text += " %"
    if "regret_pct" in summary:
        regret = summary["regret_pct"]
        text += f"\n   choice in {summary['groups']} groups: regret mean {regret['mean']:.2f} max "
        text += f"{regret['max']:.2f} top-3 {regret['top3_mean']:.2f} %, Spearman "
        text += f"{summary['spearman']:.3f}"
    return text
