"""What did every change of layout cost, and is the loss curve that of an uninterrupted run?

Pure: reads the lines that agents and workers appended to the run folders, and computes.  A phase
lasts from the moment its predecessor was finished on the last node.  A job that is started again
under its name appends to the same files; every start of it is a run of its own.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tenplex_megatron.core.mesh import Coordinates, ParallelLayout
from tenplex_megatron.errors import ConfigError

__all__ = [
    "PHASES",
    "ChangeReport",
    "Run",
    "StepReport",
    "failure",
    "largest_difference",
    "read_run",
    "read_runs",
    "read_samples",
    "summarise_changes",
    "summarise_steps",
    "unequal_tensors",
]

PHASES = ("detect", "stop", "start", "build", "import", "first_step")

_START_CAUSES = ("the job starts", "torchrun started")
"""What agents and torchrun's workers give as the cause of a start's first generation."""

type _Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChangeReport:
    """One change: between which layouts, why, and what it cost; bytes over all ranks."""

    step: int
    """The step after which training resumed."""
    cause: str
    reason: str
    """Why this layout was chosen."""
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
class StepReport:
    """How long the steps of one generation took, beside what was predicted."""

    generation: int
    layout: str
    steps: int
    """So many steps were measured; the first of a generation never is."""
    measured_s: float
    """The median."""
    predicted_s: float | None
    """None where nothing is known of the model."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a run left behind: events in time order, losses of the steps that count."""

    events: tuple[_Event, ...]
    losses: Mapping[int, float]
    """Step -> the first loss of the framework's report, of the last generation that did it."""
    last_steps: Mapping[int, int]
    """Generation -> the last step it finished."""
    before: "Run | None" = None
    """The earlier start whose snapshot this one went on from."""
    turns: Mapping[int, int] = field(default_factory=dict)
    """Generations whose number other starts have too -> how many earlier ones finished a step."""

    @property
    def start_step(self) -> int:
        """The step of the snapshot from which the run went on; 0 for a fresh one."""
        versions = (event["version"] for event in self.events if event["kind"] == "decided")
        return int(next(versions, None) or 0)


def read_run(folders: Iterable[Path]) -> Run:
    """All starts of the job whose nodes wrote into `folders`, as one course.

    Raises:
        ConfigError: there is no event file.
    """
    events, files = _read(folders)
    return Run(tuple(events), *_course(itertools.chain.from_iterable(files)))


def read_runs(folders: Iterable[Path]) -> tuple[Run, ...]:
    """Every start of the job whose nodes wrote into `folders`, the oldest first; at least one.

    A start that went on from a snapshot has the losses up to there from the start before.

    Raises:
        ConfigError: there is no event file.
    """
    events, files = _read(folders)
    starts = _split_starts(events)
    stepped = [{e["generation"] for e in start if e["kind"] == "first_step"} for start in starts]
    dealt: list[list[_Event]] = [[] for _ in starts]
    for rows in files:
        for index, row in _deal(rows, stepped):
            dealt[index].append(row)
    runs: list[Run] = []
    before: Run | None = None
    for index, (start, rows) in enumerate(zip(starts, dealt, strict=True)):
        turns = {
            number: sum(number in earlier for earlier in stepped[:index])
            for number in stepped[index]
            if sum(number in numbers for numbers in stepped) > 1
        }
        losses, last_steps = _course(rows)
        run = Run(tuple(start), losses, last_steps, None, turns)
        if before is not None and run.start_step:
            kept = {step: loss for step, loss in before.losses.items() if step <= run.start_step}
            run = Run(run.events, {**kept, **losses}, last_steps, before, turns)
        if any(event["kind"] == "decided" for event in start):
            before = run
        runs.append(run)
    return tuple(runs)


def _read(folders: Iterable[Path]) -> tuple[list[_Event], list[Sequence[_Event]]]:
    """Events in time order; the rows of every loss file in the order they were written."""
    events: list[_Event] = []
    files: list[Sequence[_Event]] = []
    for folder in sorted(set(folders)):
        path = folder / "events.jsonl"
        if not path.is_file():
            raise ConfigError(f"{path}: missing; expected the run folder of an elastic job")
        events += _lines(path)
        if (folder / "losses.jsonl").is_file():
            files.append(_lines(folder / "losses.jsonl"))
    return sorted(events, key=lambda event: event["time"]), files


def _split_starts(events: Iterable[_Event]) -> list[list[_Event]]:
    """Events by start of the job.

    The numbers of generations do not tell starts apart: they go on while snapshots are there, and
    begin again otherwise.
    """
    starts: list[list[_Event]] = [[]]
    opened: list[_Event] = []
    for event in events:
        if _opens(event, starts[-1]):
            if opened and not _joins(event, opened):
                starts.append([])
                opened = []
            opened.append(event)
        starts[-1].append(event)
    return starts


def _opens(event: _Event, present: Sequence[_Event]) -> bool:
    """Whether a node says with it that the job starts, or that it ended before it started."""
    if event["kind"] == "decided":
        return event["cause"] in _START_CAUSES
    ended_at_once = event["kind"] == "finished" and event["generation"] == 0
    # A node that the others did not wait for ends so too, within their run.
    return ended_at_once and (not present or any(e["node"] == event["node"] for e in present))


def _joins(event: _Event, opened: Sequence[_Event]) -> bool:
    """Whether it is another node's word about the same start; each node says it once."""
    first, same = opened[0], ("kind", "generation", "layout", "nodes", "version")
    return event["node"] not in {other["node"] for other in opened} and all(
        event.get(name) == first.get(name) for name in same
    )


def _deal(rows: Iterable[_Event], stepped: Sequence[set[int]]) -> Iterator[tuple[int, _Event]]:
    """Every row of one loss file with the index of its start.

    Within a start, generations and their steps only go up.
    """
    index, last = 0, (0, 0)
    for row in rows:
        key = (row["generation"], row["step"])
        if key[0] not in stepped[index] or key <= last:
            later = (i for i in range(index + 1, len(stepped)) if key[0] in stepped[i])
            index = next(later, index)
        last = key
        yield index, row


def _course(rows: Iterable[_Event]) -> tuple[dict[int, float], dict[int, int]]:
    losses: dict[int, float] = {}
    last_steps: dict[int, int] = {}
    for row in sorted(rows, key=lambda row: (row["generation"], row["step"])):
        losses[row["step"]] = next(iter(row["losses"].values()))
        last_steps[row["generation"]] = row["step"]
    return dict(sorted(losses.items())), last_steps


def failure(run: Run) -> str | None:
    """Why the job failed, if it said so; None when any node saw it finish."""
    endings = [event for event in run.events if event["kind"] == "finished"]
    if not endings or any(event["code"] == 0 for event in endings):
        return None
    return "; ".join(dict.fromkeys(str(event["reason"]) for event in endings))


def summarise_changes(run: Run) -> tuple[ChangeReport, ...]:
    """Every change that led to a finished step, in order."""
    decided = {event["generation"]: event for event in run.events if event["kind"] == "decided"}
    finished = [g for g in sorted(decided) if _find(run, g, "first_step") is not None]
    return tuple(
        _change(run, decided, before, after) for before, after in itertools.pairwise(finished)
    )


def summarise_steps(run: Run) -> tuple[StepReport, ...]:
    """Every generation that trained long enough to be measured, in order."""
    return tuple(
        StepReport(
            generation=event["generation"],
            layout=event["layout"],
            steps=event["steps"],
            measured_s=event["step_s"],
            predicted_s=event["predicted_step_s"],
        )
        for event in run.events
        if event["kind"] == "measured"
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
        reason=str(decided[after].get("reason", "")),
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
    if run.before is not None:
        earlier = read_samples(folder, run.before, batch_size=batch_size)
        batches = {step: ids for step, ids in earlier.items() if step <= run.start_step}
    for event in run.events:
        if event["kind"] != "decided":
            continue
        generation = event["generation"]
        layout = ParallelLayout.parse(event["layout"])
        paths = [
            folder / f"samples-{generation:04d}-{rank:05d}.jsonl"
            for rank in range(layout.world_size)
            if layout.coordinates(rank) == Coordinates(dp=layout.coordinates(rank).dp)
        ]
        turn = run.turns.get(generation)
        rows = [_sample_ids(_lines(path), turn) for path in paths if path.is_file()]
        dealt = [sample for turn in zip(*rows, strict=False) for ids in turn for sample in ids]
        first = int(event["version"] or 0) + 1
        for step in range(first, run.last_steps.get(generation, 0) + 1):
            low = (step - first) * batch_size
            batches[step] = tuple(dealt[low : low + batch_size])
    return batches


def _sample_ids(rows: Iterable[tuple[int, list[int]]], turn: int | None) -> list[list[int]]:
    """The ids of every micro-batch, of one of the starts that share the generation's number."""
    found, last = -1, None
    ids: list[list[int]] = []
    for number, one in rows:
        found += last is None or number <= last
        last = number
        if turn in (None, found):
            ids.append(one)
    return ids


def _lines(path: Path) -> Sequence[Any]:
    """A worker that was killed may have left half a line at the end."""
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
