"""How does one test run as N ranks of a gloo process group, and how does it fail as one?

Invariants: when `run_ranks` returns or raises, no process it started is alive and its files are
gone; the error raised is the earliest one of any rank, not the first one somebody noticed.
"""

import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankError", "run_ranks"]

# A peer's death reaches its neighbours within milliseconds; their errors must not hide its own.
_DRAIN_S = 0.2
_EXIT_S = 5.0
# Imported once, before the ranks are forked: the module of a test imports pytest, when it is there.
_PRELOAD = (__name__, "pytest")


class RankError(Exception):
    """One rank failed: its own error is the cause, its traceback part of the message."""

    def __init__(self, rank: int, num_ranks: int, reason: str) -> None:
        super().__init__(f"rank {rank} of {num_ranks}: {reason}")
        self.rank = rank


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What one rank needs to know, in the form that crosses the process border."""

    rank: int
    num_ranks: int
    timeout_s: float
    folder: Path
    call: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """An error as it crosses the process border; `at` is the monotonic clock of the machine."""

    at: float
    traceback: str
    error: bytes | None


@dataclass(slots=True)
class _World:
    """The processes of one run and what they have reported so far."""

    folder: Path
    timeout_s: float
    may_die: Collection[int]
    processes: list[ForkServerProcess] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, _Failure] = field(default_factory=dict)


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    timeout_s: float,
    *args: object,
    may_die: Collection[int] = (),
) -> list[Any]:
    """What `fn(rank, *args)` returns on each rank of a fresh gloo process group, in rank order.

    `fn` and `args` are pickled, so `fn` is a function of a module. Every rank has one thread, and
    none leaves its process group before all have returned.

    Args:
        fn: The body, called on every rank inside the process group.
        num_ranks: How many processes there are.
        timeout_s: After this time all ranks are killed; also the timeout of the process group.
        *args: Passed to every rank.
        may_die: Ranks whose death is part of the test; each gives None when it dies.

    Raises:
        RankError: a rank raised or died; the earliest one when several did.
        TimeoutError: ranks still ran after `timeout_s`; the message shows where each one stood.
    """
    call = pickle.dumps((fn, args))
    with _running_world(timeout_s, may_die) as world:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOAD))
        for rank in range(num_ranks):
            job = _Job(
                rank=rank, num_ranks=num_ranks, timeout_s=timeout_s, folder=world.folder, call=call
            )
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_rank, args=(job, theirs), name=f"rank-{rank}")
            process.start()
            theirs.close()
            world.processes.append(process)
            world.connections.append(ours)
        _collect(world)
        for connection in world.connections:
            _release(connection)
        for process in world.processes:
            process.join(_EXIT_S)
        return [world.results.get(rank) for rank in range(num_ranks)]


@contextmanager
def _running_world(timeout_s: float, may_die: Collection[int]) -> Iterator[_World]:
    world = _World(Path(tempfile.mkdtemp(prefix="tenplex-ranks-")), timeout_s, may_die)
    try:
        yield world
    finally:
        for process in world.processes:
            process.kill()
            process.join()
        for connection in world.connections:
            connection.close()
        shutil.rmtree(world.folder, ignore_errors=True)


def _collect(world: _World) -> None:
    """Waits until every rank has returned, or raises for the earliest that did not."""
    deadline = time.monotonic() + world.timeout_s
    open_ranks = dict(enumerate(world.connections))
    while open_ranks:
        until = min([deadline, *(f.at + _DRAIN_S for f in world.failures.values())])
        ready = wait(list(open_ranks.values()), timeout=max(0.0, until - time.monotonic()))
        for rank in [rank for rank, connection in open_ranks.items() if connection in ready]:
            _receive(world, rank)
            del open_ranks[rank]
        if world.failures and (not open_ranks or time.monotonic() >= until):
            _raise_earliest(world)
        if open_ranks and time.monotonic() >= deadline:
            raise TimeoutError(_where_they_stand(world, sorted(open_ranks)))


def _receive(world: _World, rank: int) -> None:
    try:
        message = pickle.loads(world.connections[rank].recv_bytes())
    except (EOFError, ConnectionResetError):
        if rank in world.may_die:
            return
        world.processes[rank].join(_EXIT_S)
        code = world.processes[rank].exitcode
        died = f"died without an error, exit code {code}"
        if code is not None and code < 0:
            died = f"died of {signal.Signals(-code).name}"
        message = _Failure(at=time.monotonic(), traceback=died, error=None)
    if isinstance(message, _Failure):
        world.failures[rank] = message
    else:
        (world.results[rank],) = message


def _raise_earliest(world: _World) -> None:
    rank = min(world.failures, key=lambda rank: world.failures[rank].at)
    failure = world.failures[rank]
    cause = pickle.loads(failure.error) if failure.error else None
    raise RankError(rank, len(world.processes), failure.traceback) from cause


def _where_they_stand(world: _World, ranks: list[int]) -> str:
    for rank in ranks:
        pid = world.processes[rank].pid
        if pid is not None and world.processes[rank].is_alive():
            os.kill(pid, signal.SIGUSR1)
    time.sleep(_DRAIN_S)
    stacks = [f"rank {rank}:\n{_stack_file(world.folder, rank).read_text()}" for rank in ranks]
    text = "\n".join(stacks)
    return f"ranks {ranks} of {len(world.processes)} ran past {world.timeout_s} s; killed.\n{text}"


def _release(connection: Connection) -> None:
    try:
        connection.send_bytes(b"all have returned")
    except BrokenPipeError:
        return


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.stack"


def _run_rank(job: _Job, connection: Connection) -> None:
    """The life of one process: join, call, report, wait for the others, leave."""
    stack = _stack_file(job.folder, job.rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stack)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{job.folder}/rendezvous",
            rank=job.rank,
            world_size=job.num_ranks,
            timeout=timedelta(seconds=job.timeout_s),
        )
        fn, args = pickle.loads(job.call)
        message = pickle.dumps((fn(job.rank, *args),))
    except BaseException as error:  # noqa: BLE001 - the process border: the parent raises it
        message = pickle.dumps(_failure_of(error))
    connection.send_bytes(message)
    try:
        connection.recv_bytes()
    except EOFError:
        return
    if dist.is_initialized():
        dist.destroy_process_group()


def _failure_of(error: BaseException) -> _Failure:
    at = time.monotonic()
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # noqa: BLE001 - an error that cannot travel still has its traceback
        packed = None
    text = "".join(traceback.format_exception(error))
    return _Failure(at=at, traceback=f"{type(error).__name__}: {error}\n{text}", error=packed)
