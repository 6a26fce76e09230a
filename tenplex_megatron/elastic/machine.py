"""What must an agent do when something happens to its workers or its peers?

A pure state machine, `advance(state, event) -> (state, actions)`, for the life of one generation on
one node. Time comes in with events, so tests run it on a virtual clock; the agent carries the
actions out and feeds their results back as events.
"""

from dataclasses import dataclass, replace
from enum import Enum

from tenplex_megatron.elastic.records import HANDED_OVER, WRONG_INPUT, Change, WorkerExit

__all__ = [
    "Accepted",
    "Action",
    "AllDone",
    "ChangeSeen",
    "Event",
    "Exited",
    "Finish",
    "NodeState",
    "Phase",
    "PostChange",
    "PostDone",
    "Reconfigure",
    "StopWorkers",
    "Stopped",
    "Tick",
    "advance",
    "begin",
]


class Phase(Enum):
    """Where a node stands in the life of a generation."""

    RUNNING = "running"
    STOPPING = "stopping"
    """A change is known; workers are leaving or being killed."""
    DONE = "done"
    """Every worker of this node finished its training."""
    OVER = "over"
    """The next generation, or the end of the job, is somebody else's business."""


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker ended by itself."""

    exit: WorkerExit


@dataclass(frozen=True, slots=True)
class Accepted:
    """Rank 0 of this node told that the workers hand over."""

    change: Change


@dataclass(frozen=True, slots=True)
class ChangeSeen:
    """The change that ends this generation, read from the store."""

    change: Change


@dataclass(frozen=True, slots=True)
class AllDone:
    """Every node's workers finished."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """No worker is left here, after `StopWorkers`."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing but time passed."""

    now: float


Event = Exited | Accepted | ChangeSeen | AllDone | Stopped | Tick


@dataclass(frozen=True, slots=True)
class PostChange:
    """Post this change; the first one posted by any node wins."""

    change: Change


@dataclass(frozen=True, slots=True)
class PostDone:
    """Tell the other nodes that this node's workers finished."""


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """Kill what still runs here, at once."""


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """No worker is left here: report, and wait for the decision."""

    change: Change


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is done."""


Action = PostChange | PostDone | StopWorkers | Reconfigure | Finish


@dataclass(frozen=True, slots=True)
class NodeState:
    """One node in one generation."""

    node: str
    stop_s: float
    live: frozenset[int]
    """Ranks that still run here."""
    phase: Phase = Phase.RUNNING
    change: Change | None = None
    deadline: float | None = None
    """When workers that should leave by themselves are killed."""


def begin(node: str, ranks: frozenset[int], stop_s: float) -> tuple[NodeState, tuple[Action, ...]]:
    """The state after the workers of a generation started; a node without workers is done."""
    state = NodeState(node, stop_s, ranks)
    if ranks:
        return state, ()
    return replace(state, phase=Phase.DONE), (PostDone(),)


def advance(state: NodeState, event: Event) -> tuple[NodeState, tuple[Action, ...]]:
    """The next state, and what the agent must do now."""
    if state.phase is Phase.OVER:
        return state, ()
    match event:
        case Exited(done):
            reached = _exited(state, done)
        case Accepted(change):
            reached = state, (() if state.change else (PostChange(change),))
        case ChangeSeen(change):
            reached = _change_seen(state, change)
        case AllDone():
            reached = replace(state, phase=Phase.OVER), (Finish(),)
        case Stopped():
            reached = _reconfigure_when_empty(replace(state, live=frozenset()))
        case Tick(now):
            reached = _tick(state, now)
    return reached


def _exited(state: NodeState, done: WorkerExit) -> tuple[NodeState, tuple[Action, ...]]:
    state = replace(state, live=state.live - {done.rank})
    if state.phase is Phase.STOPPING:
        return _reconfigure_when_empty(state)
    if done.code == 0:
        if state.live or state.deadline is not None:
            return state, ()
        return replace(state, phase=Phase.DONE), (PostDone(),)
    if done.code == HANDED_OVER:
        # The change is posted by the node of rank 0, perhaps a moment later.
        deadline = state.deadline if state.deadline is not None else done.time + state.stop_s
        return replace(state, deadline=deadline), ()
    if state.deadline is not None:
        # A peer that left at the step boundary breaks connections of those who are still leaving.
        return state, ()
    return state, (PostChange(_failure(state.node, done)),)


def _failure(node: str, done: WorkerExit) -> Change:
    kind = "invalid" if done.code == WRONG_INPUT else "failure"
    ended = f"signal {-done.code}" if done.code < 0 else f"exit code {done.code}"
    cause = f"rank {done.rank} (device {done.device} of node {node}) ended with {ended}"
    if done.message:
        cause = done.message if kind == "invalid" else f"{cause}: {done.message}"
    return Change(kind, cause, done.time, node)


def _change_seen(state: NodeState, change: Change) -> tuple[NodeState, tuple[Action, ...]]:
    if state.change is not None:
        return state, ()
    state = replace(state, phase=Phase.STOPPING, change=change)
    if not state.live:
        return _reconfigure_when_empty(state)
    if change.kind == "planned":
        deadline = state.deadline if state.deadline is not None else change.time + state.stop_s
        return replace(state, deadline=deadline), ()
    return state, (StopWorkers(),)


def _reconfigure_when_empty(state: NodeState) -> tuple[NodeState, tuple[Action, ...]]:
    if state.live or state.change is None:
        return state, ()
    return replace(state, phase=Phase.OVER), (Reconfigure(state.change),)


def _tick(state: NodeState, now: float) -> tuple[NodeState, tuple[Action, ...]]:
    if state.deadline is None or now < state.deadline:
        return state, ()
    if state.change is None:
        # Workers handed over, yet nobody said to what: go on with the same devices.
        cause = "the workers handed over without a request"
        again = replace(state, deadline=now + state.stop_s)
        return again, (PostChange(Change("planned", cause, now, state.node)),)
    return replace(state, deadline=None), (StopWorkers(),) if state.live else ()
