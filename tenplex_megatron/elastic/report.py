"""What did every change of layout cost, and is the loss curve that of an uninterrupted run?

Pure: reads the lines that agents and workers appended to the run folders, and computes.  A phase
lasts from the moment its predecessor was finished on the last node.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tenplex_megatron.core.mesh import Coordinates, ParallelLayout
from tenplex_megatron.errors import ConfigError

__all__ = [
    "PHASES",
    "ChangeReport",
    "Run",
    "largest_difference",
    "read_run",
    "read_samples",
    "summarise_changes",
    "unequal_tensors",
]

PHASES = ("detect", "stop", "start", "build", "import", "first_step")


@dataclass(frozen=True, slots=True)
class ChangeReport:
    """One change: between which layouts, why, and what it cost; bytes over all ranks."""

    step: int
    """The step the new generation went on from."""
    cause: str
    source: ParallelLayout
    target: ParallelLayout
    steps_lost: int
    """Finished steps that had to be done again."""
    bytes_total: int
    bytes_moved: int
    """Counted where they arrived at another node."""
    bytes_lower_bound: int
    seconds: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Plain values; layouts as axis sizes."""
        values = asdict(self)
        del values["source"], values["target"]
        values["from"], values["to"] = self.source.to_json(), self.target.to_json()
        values["seconds"] = {**self.seconds, "total": sum(self.seconds.values())}
        return values


@dataclass(frozen=True, slots=True)
class Run:
    """What a run left behind: events in time order, losses of the steps that count."""

    events: tuple[Mapping[str, Any], ...]
    losses: Mapping[int, float]
    """Step -> the first loss of the framework's report, of the last generation that did it."""
    last_steps: Mapping[int, int]
    """Generation -> the last step it finished."""


def read_run(folders: Iterable[Path]) -> Run:
    """The run whose nodes wrote into `folders`.

    Raises:
        ConfigError: there is no event file.
    """
    events: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for folder in sorted(set(folders)):
        path = folder / "events.jsonl"
        if not path.is_file():
            raise ConfigError(f"{path}: missing; expected the run folder of an elastic job")
        events += _lines(path)
        if (folder / "losses.jsonl").is_file():
            rows += _lines(folder / "losses.jsonl")
    losses: dict[int, float] = {}
    last_steps: dict[int, int] = {}
    for row in sorted(rows, key=lambda row: (row["generation"], row["step"])):
        losses[row["step"]] = next(iter(row["losses"].values()))
        last_steps[row["generation"]] = row["step"]
    events.sort(key=lambda event: event["time"])
    return Run(tuple(events), dict(sorted(losses.items())), last_steps)


def summarise_changes(run: Run) -> tuple[ChangeReport, ...]:
    """Every change that led to a finished step, in order."""
    decided = {event["generation"]: event for event in run.events if event["kind"] == "decided"}
    finished = [g for g in sorted(decided) if _find(run, g, "first_step") is not None]
    return tuple(
        _change(run, decided, before, after) for before, after in itertools.pairwise(finished)
    )


def _change(
    run: Run, decided: Mapping[int, Mapping[str, Any]], before: int, after: int
) -> ChangeReport:
    moved = _find(run, after, "moved") or {}
    step = int(decided[after]["version"] or 0)
    marks = [
        _origin(run, before),
        _last(run, before, "detected"),
        _last(run, before, "stopped"),
        _last(run, after, "started"),
        _last(run, after, "built"),
        _last(run, after, "imported"),
        _last(run, after, "first_step"),
    ]
    seconds = {
        name: max(0.0, later - earlier)
        for name, earlier, later in zip(PHASES, marks, marks[1:], strict=False)
    }
    return ChangeReport(
        step=step,
        cause=str(decided[after]["cause"]),
        source=ParallelLayout.parse(decided[before]["layout"]),
        target=ParallelLayout.parse(decided[after]["layout"]),
        steps_lost=max(0, run.last_steps.get(before, step) - step),
        bytes_total=int(moved.get("bytes_total", 0)),
        bytes_moved=int(moved.get("bytes_moved", 0)),
        bytes_lower_bound=int(moved.get("bytes_lower_bound", 0)),
        seconds=seconds,
    )


def _origin(run: Run, generation: int) -> float:
    """When the change began: a kill somebody noted, ranks about to leave, or the first exit."""
    for kind in ("killed", "leaving"):
        found = _find(run, generation, kind)
        if found is not None:
            return float(found["time"])
    causes = [e["at"] for e in run.events if e["generation"] == generation and "at" in e]
    return float(min(causes, default=_last(run, generation, "detected")))


def _find(run: Run, generation: int, kind: str) -> Mapping[str, Any] | None:
    for event in run.events:
        if event["generation"] == generation and event["kind"] == kind:
            return event
    return None


def _last(run: Run, generation: int, kind: str) -> float:
    times = [
        event["time"]
        for event in run.events
        if event["generation"] == generation and event["kind"] == kind
    ]
    return float(max(times, default=0.0))


def unequal_tensors(run: Run) -> tuple[str, ...] | None:
    """Tensors whose fingerprint changed on the way into a planned change's new layout.

    None when no fingerprints were recorded (policy `audit.state`).
    """
    departures = {e["generation"]: e["tensors"] for e in run.events if e.get("when") == "departure"}
    arrivals = {e["generation"]: e["tensors"] for e in run.events if e.get("when") == "arrival"}
    pairs = [
        (before, arrivals[generation + 1])
        for generation, before in departures.items()
        if generation + 1 in arrivals
    ]
    if not pairs:
        return None
    return tuple(
        sorted(
            {name for before, after in pairs for name in before if before[name] != after.get(name)}
        )
    )


def largest_difference(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """The largest absolute difference over the steps of `one`.

    Raises:
        ConfigError: `other` lacks a step, so that nothing could be said.
    """
    missing = sorted(set(one) - set(other))
    if missing or not one:
        raise ConfigError(f"losses can't be compared: steps {missing or 'all'} are missing")
    return max(abs(value - other[step]) for step, value in one.items())


def read_samples(folder: Path, run: Run, *, batch_size: int) -> dict[int, tuple[int, ...]]:
    """Step -> the sample ids of its global batch, in the order the data loader dealt them.

    Recorded at every rank that read a micro-batch; the ranks of tensor rank 0 in the first
    pipeline stage are joined, micro-batch by micro-batch, data-parallel rank by rank.
    """
    batches: dict[int, tuple[int, ...]] = {}
    for event in run.events:
        if event["kind"] != "decided":
            continue
        generation = event["generation"]
        layout = ParallelLayout.parse(event["layout"])
        rows = [
            [ids for _, ids in _lines(folder / f"samples-{generation:04d}-{rank:05d}.jsonl")]
            for rank in range(layout.world_size)
            if layout.coordinates(rank) == Coordinates(dp=layout.coordinates(rank).dp)
            and (folder / f"samples-{generation:04d}-{rank:05d}.jsonl").is_file()
        ]
        dealt = [sample for turn in zip(*rows, strict=False) for ids in turn for sample in ids]
        first = int(event["version"] or 0) + 1
        for step in range(first, run.last_steps.get(generation, 0) + 1):
            low = (step - first) * batch_size
            batches[step] = tuple(dealt[low : low + batch_size])
    return batches


def _lines(path: Path) -> Sequence[Any]:
    """A worker that was killed may have left half a line at the end."""
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
