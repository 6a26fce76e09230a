"""What does one worker do for elasticity, from a built model to its last step?

It imports the state when there is a snapshot to go on from, takes snapshots, agrees with all ranks
after every step on what is committed and whether to leave, and writes down what was measured.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tenplex_megatron.adapters.base import Piece, StepObserver, TrainingState
from tenplex_megatron.adapters.registry import framework_adapter
from tenplex_megatron.config import ElasticPolicy, load_policy
from tenplex_megatron.core.mesh import Coordinates
from tenplex_megatron.elastic.control import StepControl
from tenplex_megatron.elastic.events import EventLog
from tenplex_megatron.elastic.generation import GenerationSpec
from tenplex_megatron.elastic.records import HANDED_OVER, SNAPSHOT_DAMAGED
from tenplex_megatron.elastic.restore import DamagedSnapshotError, Restored, Site, restore_state
from tenplex_megatron.elastic.snapshot import Snapshotter
from tenplex_megatron.elastic.step_times import StepClock
from tenplex_megatron.execution.executor import Target
from tenplex_megatron.execution.verify import fingerprint_state, gather_collection
from tenplex_megatron.store.shared import SnapshotStore
from tenplex_megatron.transport.process_group import ProcessGroupTransport

__all__ = ["ElasticSession", "install", "was_used"]

logger = logging.getLogger(__name__)

_sessions: list["ElasticSession"] = []


def install(spec: GenerationSpec, *, plans_changes: bool = True) -> None:
    """Hook this process into its framework; once, before the training script runs.

    Args:
        spec: the generation this process belongs to.
        plans_changes: whether somebody starts the next generation after a planned change.
    """
    if _sessions:
        return
    policy = load_policy(spec.policy)
    rank = int(os.environ["RANK"])
    control = StepControl(spec, policy) if rank == 0 and plans_changes else None
    session = ElasticSession(spec, rank, policy, control)
    framework_adapter(policy.framework).install(session, spec.layout)
    _sessions.append(session)


def was_used() -> bool:
    """Whether the training script ever reached the hooks of this process."""
    return any(session.was_used for session in _sessions)


class ElasticSession(StepObserver):
    """The elastic life of one rank in one generation.

    Args:
        spec: what the agent decided for this generation.
        rank: this rank.
        policy: the policy of the job.
        control: asks for planned changes; used by rank 0 alone.
    """

    def __init__(
        self, spec: GenerationSpec, rank: int, policy: ElasticPolicy, control: StepControl | None
    ) -> None:
        self._spec = spec
        self._rank = rank
        self._policy = policy
        self._control = control
        self._store = SnapshotStore(spec.store, spec.job, spec.identity)
        self._site = Site(rank, spec.nodes, spec.source.nodes if spec.source else {})
        self._events = EventLog(spec.rundir / "events.jsonl", spec.node)
        self._losses = _LossLog(spec, rank)
        self._clock = StepClock(spec) if rank == 0 else None
        self._samples = _SampleLog(spec, rank)
        self._transport: ProcessGroupTransport | None = None
        self._snapshots: Snapshotter | None = None
        self._committed: int | None = None
        self._steps = 0
        self._audit: _StateAudit | None = None
        self._exit_code: int | None = None
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tenplex-commit")

    @property
    def exit_code(self) -> int | None:
        """See `StepObserver.exit_code`."""
        return self._exit_code

    @property
    def imports_state(self) -> bool:
        """See `StepObserver.imports_state`."""
        return self._spec.source is not None

    @property
    def audits_samples(self) -> bool:
        """See `StepObserver.audits_samples`."""
        return self._policy.audit.samples

    @property
    def was_used(self) -> bool:
        """Whether the training script ever reached the hooks."""
        return self._transport is not None

    def on_built(self, state: TrainingState) -> None:
        """See `StepObserver.on_built`."""
        self._mark("built")
        self._transport = ProcessGroupTransport.open(self._policy.timeouts.exchange_s)
        if self._spec.source is not None:
            self._import(state)
        pieces = state.pieces()
        layout: Any = self._spec.layout.to_json()
        writer = self._store.create().writer(
            self._rank,
            len(self._spec.nodes),
            generation=self._spec.generation,
            layout=layout,
            specs={piece.spec.name: piece.spec for piece in pieces},
            boxes=[piece.box for piece in pieces],
        )
        self._snapshots = Snapshotter(state, pieces, writer)
        if self._policy.audit.state:
            self._audit = _StateAudit(state, pieces, self._rank, self._transport, self._policy)
            self._mark("fingerprint", tensors=self._audit.fingerprint(), when="arrival")
        self._mark("imported" if self._spec.source else "ready", batch_size=state.global_batch_size)

    def before_update(self) -> None:
        """See `StepObserver.before_update`."""
        if self._snapshots is not None:
            self._snapshots.fence()

    def on_samples(self, first_batch: int, ids: Sequence[int]) -> None:
        """See `StepObserver.on_samples`."""
        self._samples.add(first_batch, ids)

    def on_step(
        self, step: int, losses: Mapping[str, float] | None, *, is_last: bool = False
    ) -> bool:
        """See `StepObserver.on_step`."""
        snapshots, transport = self._snapshots, self._transport
        if snapshots is None or transport is None:
            return False
        if self._steps == 0:
            self._mark("first_step", step=step)
        self._steps += 1
        if self._clock is not None:
            self._clock.step()
        self._losses.add(step, losses)
        change = self._control.pending(step) if self._control is not None else None
        timeout_s = self._policy.timeouts.exchange_s
        leaves, behind = transport.agree(
            (change is not None, -snapshots.poll()), timeout_s=timeout_s
        )
        self._commit(-behind)
        if leaves:
            self._mark("leaving", step=step)
            if self._audit is not None:
                self._mark("fingerprint", tensors=self._audit.fingerprint(), when="departure")
            if not self._commit_now(step, snapshots, transport):
                logger.warning("no change after step %s: its snapshot is not complete", step)
                return False
            if change is not None and self._control is not None:
                self._control.accept(change)
            self._exit_code = HANDED_OVER
            self._mark("handed_over", step=step)
            snapshots.close()
            self._background.shutdown()
        elif is_last:
            # A later start, with other devices or more steps, goes on from here.
            self._commit_now(step, snapshots, transport)
        elif step % self._policy.snapshot.every_steps == 0:
            snapshots.start(step, self._committed)
        return bool(leaves)

    def _commit_now(
        self, step: int, snapshots: Snapshotter, transport: ProcessGroupTransport
    ) -> bool:
        """Snapshot this step and wait for all ranks; False when one could not write its part."""
        snapshots.start(step, self._committed)
        (behind,) = transport.agree(
            (-snapshots.wait(),), timeout_s=self._policy.timeouts.exchange_s
        )
        self._commit(-behind)
        return -behind == step

    def _import(self, state: TrainingState) -> None:
        source = self._spec.source
        assert source is not None
        assert self._transport is not None
        here = self._site.node in self._site.source_nodes.values()
        reader = None
        if here:
            reader = self._store.open_existing().reader(
                source.version, generation=source.generation
            )
        try:
            restored = restore_state(
                state,
                self._site,
                reader=reader,
                transport=self._transport,
                timeout_s=self._policy.timeouts.exchange_s,
            )
        except DamagedSnapshotError as error:
            for rank in error.ranks:
                self._store.quarantine(source.version, generation=source.generation, rank=rank)
            logger.warning("%s; an older version is used instead", error)
            # The first rank that leaves gets the others killed: none leaves before all are done.
            self._transport.agree((0,), timeout_s=self._policy.timeouts.exchange_s)
            raise SystemExit(SNAPSHOT_DAMAGED) from error
        if reader is not None:
            reader.close()
        self._report(restored)

    def _report(self, restored: Restored) -> None:
        """Bytes of all ranks, counted by the transports, in one event."""
        assert self._transport is not None
        moved = restored.movement
        row = json.dumps([moved.local_bytes, moved.sent_bytes, moved.received_bytes])
        rows = [
            json.loads(other)
            for other in self._transport.gather(
                row.encode(), timeout_s=self._policy.timeouts.exchange_s
            )
        ]
        local, sent, received = (sum(column) for column in zip(*rows, strict=True))
        self._mark(
            "moved",
            step=restored.step,
            bytes_total=restored.plan.bytes_total,
            bytes_local=local,
            bytes_sent=sent,
            bytes_moved=received,
            bytes_lower_bound=restored.plan.bytes_lower_bound,
            seconds=dict(restored.seconds),
        )

    def _commit(self, version: int) -> None:
        """Every rank has finished `version`: it counts from now on, and older generations go."""
        if version <= (-1 if self._committed is None else self._committed):
            return
        first = self._committed is None
        self._committed = version
        if self._site.speaks_for_node:
            self._background.submit(self._record, version, first).add_done_callback(_log_failure)

    def _record(self, version: int, first: bool) -> None:
        here = [rank for rank, node in enumerate(self._spec.nodes) if node == self._site.node]
        self._store.commit(version, generation=self._spec.generation, ranks=here)
        if first:
            self._store.prune(self._spec.generation)

    def _mark(self, kind: str, **values: object) -> None:
        if self._rank == 0:
            self._events.append(kind, self._spec.generation, **values)


def _log_failure(done: Future[None]) -> None:
    """A manifest that could not be written costs nothing: versions count by their indexes."""
    error = done.exception()
    if error is not None:
        logger.warning("a snapshot could not be recorded as committed: %s", error)


class _StateAudit:
    """Fingerprints of what every layout shares: masters, moments and buffers; no random streams."""

    def __init__(
        self,
        state: TrainingState,
        pieces: Sequence[Piece],
        rank: int,
        transport: ProcessGroupTransport,
        policy: ElasticPolicy,
    ) -> None:
        self._state = state
        shared = [piece for piece in pieces if not piece.is_local]
        self._targets = [Target(piece.box, piece.flat) for piece in shared]
        self._rank, self._transport = rank, transport
        self._timeout_s = policy.timeouts.exchange_s
        self._collection = gather_collection(
            {piece.spec.name: piece.spec for piece in shared},
            [piece.box for piece in shared],
            transport,
            timeout_s=self._timeout_s,
        )

    def fingerprint(self) -> dict[str, int]:
        self._state.refresh()
        return fingerprint_state(
            self._collection,
            self._rank,
            self._targets,
            self._transport,
            timeout_s=self._timeout_s,
        )


class _LossLog:
    """Losses per step, written by one rank of the last pipeline stage."""

    def __init__(self, spec: GenerationSpec, rank: int) -> None:
        self._generation = spec.generation
        place = spec.layout.coordinates(rank)
        writes = place == Coordinates(pp=spec.layout.pp - 1)
        self._path = spec.rundir / "losses.jsonl" if writes else None

    def add(self, step: int, losses: Mapping[str, float] | None) -> None:
        if self._path is None or losses is None:
            return
        row = {"step": step, "generation": self._generation, "losses": dict(losses)}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


class _SampleLog:
    """Sample ids per micro-batch of this rank."""

    def __init__(self, spec: GenerationSpec, rank: int) -> None:
        self._path = spec.rundir / f"samples-{spec.generation:04d}-{rank:05d}.jsonl"

    def add(self, number: int, ids: Sequence[int]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([number, list(ids)]) + "\n")
