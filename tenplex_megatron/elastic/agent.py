"""What does the agent of a node do, from the first rendezvous to the end of the job?

One agent per node on torch's elastic machinery: its rendezvous, signals, log files and error files.
What is different is that a change of devices starts the next generation of workers without another
rendezvous. Decisions are pure functions elsewhere; this module carries them out.
"""

import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined] # re-exported by star
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException

from tenplex_megatron.elastic.board import Board
from tenplex_megatron.elastic.calibration import Calibration
from tenplex_megatron.elastic.control import ask, fresh_folder, read_accepted
from tenplex_megatron.elastic.desk import RequestDesk
from tenplex_megatron.elastic.events import EventLog
from tenplex_megatron.elastic.forkserver import ForkServer, WorkerProcesses
from tenplex_megatron.elastic.generation import ENVIRONMENT_VARIABLE, GenerationSpec
from tenplex_megatron.elastic.job import JobSettings
from tenplex_megatron.elastic.machine import (
    Accepted,
    AllDone,
    ChangeSeen,
    Event,
    Exited,
    Finish,
    PostChange,
    PostDone,
    Reconfigure,
    Stopped,
    StopWorkers,
    Tick,
    advance,
    begin,
)
from tenplex_megatron.elastic.membership import decide
from tenplex_megatron.elastic.records import (
    Change,
    Ending,
    Ledger,
    NextGeneration,
    NodeReport,
    WorkerExit,
)
from tenplex_megatron.elastic.seats import seat
from tenplex_megatron.elastic.step_times import read_step_times
from tenplex_megatron.errors import ConfigError, LayoutError, TransportError

__all__ = ["ElasticAgent"]

logger = logging.getLogger(__name__)

_KILL_S = 30.0


class ElasticAgent(LocalElasticAgent):
    """Runs generation after generation of workers on one node."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *,
        settings: JobSettings,
        server: ForkServer,
        line_prefix: str | None = None,
        shutdown_timeout: int = 2,
    ) -> None:
        super().__init__(spec, logs_specs)
        self._shutdown_timeout = shutdown_timeout
        self.ending = Ending(1, "the job was interrupted")
        self._settings = settings
        self._server = server
        self._line_prefix = line_prefix
        self._events = EventLog(settings.run_dir / "events.jsonl", settings.node)
        self._desk = RequestDesk(settings.run_dir, settings.rules)
        self._calibration = Calibration(settings.rules, settings.run_dir, settings.identity)
        self._present: NextGeneration | None = None
        self._exits: list[WorkerExit] = []
        self._times: dict[str, float] = {}
        self._accepted = False
        self._posted = False
        self._speaks = False
        self._control = settings.run_dir
        self._worker_store: TCPStore | None = None

    @property
    def has_started(self) -> bool:
        """Whether any generation was started here."""
        return self._present is not None

    def _invoke_run(self, role: str = "default") -> RunResult:
        group = self._worker_group
        self._rendezvous(group)
        # torch declares these as always None.
        place: Any = group
        board = Board(place.store, place.group_rank, place.group_world_size)
        self._speaks = place.group_rank == 0
        try:
            self.ending = self._run_job(board)
        except SignalException:
            self._leave_job(board)
            raise
        self._desk.close(f"the job ended: {self.ending.reason}")
        self._calibration.close()
        group.spec.rdzv_handler.shutdown()
        board.part()
        self._log("finished", code=self.ending.code, reason=self.ending.reason)
        state = WorkerState.SUCCEEDED if self.ending.code == 0 else WorkerState.FAILED
        return RunResult(state, {worker.global_rank: None for worker in group.workers})

    def _assign_worker_ranks(self, *_: object, **__: object) -> list[Worker]:
        """Ranks belong to a generation, not to the rendezvous."""
        return []

    def _run_job(self, board: Board) -> Ending:
        settings, timeouts = self._settings, self._settings.rules.policy.timeouts
        board.exchange_names(settings.node, timeouts.rendezvous_s)
        change = Change("start", "the job starts", time.time(), settings.node)
        ledger = Ledger()
        while True:
            begun = time.monotonic()
            decision = self._agree(board, ledger, change)
            if isinstance(decision, Ending):
                return decision
            if settings.node not in decision.totals:
                return Ending(1, f"node {settings.node} was given up by the others")
            ledger, old, self._present = decision.ledger, self._present, decision
            self._say_decided(decision, time.monotonic() - begun)
            board.turn(list(decision.totals))
            self._start_generation(decision)
            if old is not None:
                self._desk.turned(old, decision)
            outcome = self._watch(board, decision)
            self._compare(decision)
            if isinstance(outcome, Ending):
                return outcome
            change = outcome

    def _agree(self, board: Board, ledger: Ledger, change: Change) -> NextGeneration | Ending:
        """The same decision on every node, about what follows `change`."""
        report = NodeReport(
            self._settings.node,
            self._worker_group.spec.local_world_size,
            self._settings.store.examine().snapshots,
            tuple(self._exits),
        )

        def decide_here(reports: Sequence[NodeReport]) -> NextGeneration | Ending:
            if len(reports) < self._settings.min_nodes:
                return Ending(
                    1,
                    f"{len(reports)} nodes are left of at least {self._settings.min_nodes} "
                    f"(--nnodes); last: {change.cause}",
                )
            try:
                rules = replace(self._settings.rules, cluster=self._calibration.cluster)
                decision = decide(ledger, change, reports, rules)
            except (ConfigError, LayoutError) as error:
                return Ending(2, str(error))
            if isinstance(decision, NextGeneration):
                return replace(decision, master=self._open_worker_store())
            return decision

        try:
            timeout_s = self._settings.rules.policy.timeouts.rendezvous_s
            return board.agree(report, decide_here, timeout_s)
        except TransportError as error:
            return Ending(1, f"{error}; last: {change.cause}")

    def _open_worker_store(self) -> tuple[str, int]:
        """A new store for the workers of one generation.

        torch lets all generations of workers use one store without a prefix of their own; they then
        meet the addresses of dead processes.
        """
        place: Any = self._worker_group
        first = place.group_rank == 0
        host = place.master_addr if first else place.spec.local_addr or socket.getfqdn()
        self._worker_store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._worker_store.port

    def _start_generation(self, decision: NextGeneration) -> None:
        self._times["started"] = time.time()
        self._exits = []
        self._accepted = False
        self._control = self._new_control(decision.ledger.generation)
        workers = self._local_workers(decision)
        self._worker_group.workers = workers
        for device, pid in self._start_workers(self._worker_group).items():
            next(worker for worker in workers if worker.local_rank == device).id = pid
        self._worker_group.state = WorkerState.HEALTHY
        self._log(
            "started",
            pids={worker.global_rank: worker.id for worker in workers},
            devices={worker.global_rank: worker.local_rank for worker in workers},
            seconds=time.time() - self._times["started"],
        )

    def _local_workers(self, decision: NextGeneration) -> list[Worker]:
        world = len(decision.ranks)
        return [
            Worker(device, rank, rank, world, world)
            for rank, (node, device) in enumerate(decision.ranks)
            if node == self._settings.node
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers = worker_group.workers
        envs = {index: self._environment(worker) for index, worker in enumerate(workers)}
        if not workers:
            return {}
        self._setup_local_watchdog(envs=envs)
        self._setup_healthcheck()
        spec, task = worker_group.spec, self._settings.task
        present = self._generation()
        flags = tuple(self._settings.layout_flags(present.layout))
        task = replace(task, argv=(*task.argv, *flags))
        processes = WorkerProcesses(
            self._server,
            dict.fromkeys(envs, task),
            envs,
            self._logs_specs,
            line_prefixes=self._line_prefixes(workers),
            stdout_filters=getattr(spec, "duplicate_stdout_filters", None),
            stderr_filters=getattr(spec, "duplicate_stderr_filters", None),
        )
        processes.start()
        self._pcontext = processes
        return {workers[index].local_rank: pid for index, pid in processes.pids().items()}

    def _environment(self, worker: Worker) -> dict[str, str]:
        """Torchrun's variables, and the generation."""
        group, spec = self._worker_group, self._worker_group.spec
        present = self._generation()
        variables = {
            "RANK": worker.global_rank,
            **seat(
                worker.local_rank,
                [other.local_rank for other in group.workers],
                os.environ.get("CUDA_VISIBLE_DEVICES"),
            ),
            "WORLD_SIZE": worker.world_size,
            "LOCAL_WORLD_SIZE": len(group.workers),
            "GROUP_RANK": group.group_rank,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "ROLE_RANK": worker.role_rank,
            "ROLE_NAME": spec.role,
            "ROLE_WORLD_SIZE": worker.role_world_size,
            "MASTER_ADDR": present.master[0],
            "MASTER_PORT": present.master[1],
            # Before 2.14, torch put the process groups' keys under this count.
            "TORCHELASTIC_RESTART_COUNT": present.ledger.generation,
            "TORCHELASTIC_MAX_RESTARTS": self._settings.rules.policy.max_failures,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            # All workers are clients: an agent hosts the store.
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            ENVIRONMENT_VARIABLE: self._generation_spec().to_json(),
        }
        return {name: str(value) for name, value in variables.items()}

    def _generation_spec(self) -> GenerationSpec:
        present, settings = self._generation(), self._settings
        return GenerationSpec(
            job=settings.job,
            identity=settings.identity,
            generation=present.ledger.generation,
            cause=present.change.cause,
            layout=present.layout,
            gpus=present.ledger.gpus,
            node=settings.node,
            nodes=tuple(node for node, _ in present.ranks),
            store=settings.store_path,
            policy=settings.policy_path,
            rundir=settings.run_dir,
            control=self._control,
            source=present.source,
            times={"event": present.change.time, **self._times},
        )

    def _new_control(self, number: int) -> Path:
        folder = self._settings.run_dir / "nodes" / self._settings.node / "control"
        return fresh_folder(folder / f"generation-{number}")

    def _line_prefixes(self, workers: Sequence[Worker]) -> dict[int, str] | None:
        if not self._line_prefix:
            return None
        return {
            index: Template(self._line_prefix).safe_substitute(
                role_name=self._worker_group.spec.role,
                rank=worker.global_rank,
                local_rank=worker.local_rank,
                hostname=self._settings.node,
            )
            for index, worker in enumerate(workers)
        }

    def _watch(self, board: Board, decision: NextGeneration) -> Change | Ending:
        """Feed the state machine until this generation is over, and do what it says."""
        ranks = frozenset(worker.global_rank for worker in self._worker_group.workers)
        stop_s = self._settings.rules.policy.timeouts.stop_s
        state, actions = begin(self._settings.node, ranks, stop_s)
        events: deque[Event] = deque()
        while True:
            for action in actions:
                match action:
                    case PostChange(change):
                        self._log("event", change=change.kind, cause=change.cause, at=change.time)
                        board.post_change(change)
                        self._posted = True
                    case PostDone():
                        board.post_done()
                    case StopWorkers():
                        self._kill_workers()
                        events.append(Stopped())
                    case Reconfigure(change):
                        self._stopped(change)
                        return change
                    case Finish():
                        return Ending(0, "training finished on all ranks")
            if not events:
                events.extend(self._collect(board, decision))
            state, actions = advance(state, events.popleft())

    def _collect(self, board: Board, decision: NextGeneration) -> list[Event]:
        """What happened within one interval."""
        events: list[Event] = []
        processes, interval = self._processes(), self._worker_group.spec.monitor_interval
        if processes is None:
            time.sleep(0.0 if self._posted else interval)
        elif processes.wait_for_exit(0.0 if self._posted else interval):
            events.extend(Exited(done) for done in self._new_exits())
        self._posted = False
        if self._leads(decision) and not self._accepted:
            accepted = read_accepted(self._control, self._settings.node)
            if accepted is not None:
                self._accepted = True
                # Before the exits: what left, left because of this.
                events.insert(0, Accepted(accepted))
        board.beat()
        if board.has_news():
            events.extend(self._read_board(board, decision))
        self._desk.look(board, decision)
        self._calibration.look()
        return [*events, Tick(time.time())]

    def _leads(self, decision: NextGeneration) -> bool:
        """Whether global rank 0 runs here."""
        return decision.ranks[0][0] == self._settings.node

    def _read_board(self, board: Board, decision: NextGeneration) -> list[Event]:
        change = board.change()
        if change is not None:
            self._times = {"event": change.time, "detected": time.time()}
            self._log("detected", change=change.kind, cause=change.cause)
            return [ChangeSeen(change)]
        if board.all_done():
            return [AllDone()]
        request = board.request()
        if request is not None and self._leads(decision):
            ask(self._control, request)
        return []

    def _new_exits(self) -> list[WorkerExit]:
        processes, workers = self._processes(), self._worker_group.workers
        if processes is None:
            return []
        now = time.time()
        found = [
            WorkerExit(workers[index].global_rank, workers[index].local_rank, code, now, message)
            for index, code, message in processes.exits()
        ]
        self._exits.extend(found)
        return found

    def _kill_workers(self) -> None:
        processes = self._processes()
        if processes is not None:
            self._new_exits()
            processes.kill(_KILL_S)
            self._new_exits()

    def _stopped(self, change: Change) -> None:
        self._times["stopped"] = time.time()
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGKILL)
            self._pcontext = None
        seconds = self._times["stopped"] - change.time
        self._log("stopped", seconds=seconds, exits=[(e.rank, e.code) for e in self._exits])

    def _processes(self) -> WorkerProcesses | None:
        assert self._pcontext is None or isinstance(self._pcontext, WorkerProcesses)
        return self._pcontext

    def _generation(self) -> NextGeneration:
        assert self._present is not None, "no generation was decided yet"
        return self._present

    def _leave_job(self, board: Board) -> None:
        """A signal ends this node: the others should not have to find out."""
        with suppress(RuntimeError):
            node = self._settings.node
            board.leave()
            board.post_change(Change("leave", f"node {node} was stopped", time.time(), node))
        self._desk.close("the job was stopped")

    def _say_decided(self, decision: NextGeneration, seconds: float) -> None:
        ledger, source = decision.ledger, decision.source
        self._log(
            "decided",
            layout=str(decision.layout),
            gpus=ledger.gpus,
            cause=decision.change.cause,
            reason=decision.reason,
            predicted_step_s=decision.predicted_step_s,
            rejected=decision.rejected,
            lost=ledger.lost,
            nodes=[node for node, _ in decision.ranks],
            version=None if source is None else source.version,
            seconds=seconds,
        )
        if self._speaks:
            logger.info(
                "generation %s: %s on %s devices from %s (%s; %s), decided in %.3f s",
                ledger.generation,
                decision.layout,
                len(decision.ranks),
                "the start" if source is None else f"step {source.version}",
                decision.change.cause,
                decision.reason,
                seconds,
            )

    def _compare(self, decision: NextGeneration) -> None:
        """How long steps took beside what was predicted, where rank 0 ran."""
        if not self._leads(decision):
            return
        number = decision.ledger.generation
        times = read_step_times(self._settings.run_dir, self._settings.identity)
        for row in (row for row in times if row.generation == number):
            predicted_s = decision.predicted_step_s
            error = "not predicted"
            if predicted_s is not None:
                percent = 100.0 * (predicted_s / row.step_s - 1.0)
                error = f"predicted {predicted_s:.3g} s ({percent:+.0f} %)"
            self._log(
                "measured",
                layout=str(row.layout),
                steps=row.steps,
                step_s=row.step_s,
                predicted_step_s=predicted_s,
            )
            logger.info(
                "generation %s: %s took %.3g s per step, %s",
                *(number, row.layout, row.step_s, error),
            )

    def _log(self, kind: str, **fields: object) -> None:
        number = 0 if self._present is None else self._present.ledger.generation
        self._events.append(kind, number, **fields)
