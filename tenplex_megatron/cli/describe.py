"""What would the ranks of a layout hold?  Asks the framework itself, one process per rank.

Nothing here knows a model: the user's training script builds every rank alone, see `single_rank`.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from tenplex_megatron.adapters.registry import argument_adapter
from tenplex_megatron.cli.single_rank import RankTask, read_description, send_description
from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.elastic.forkserver import ForkServer
from tenplex_megatron.errors import ConfigError

__all__ = ["Describer", "Script"]

_MOST_AT_ONCE = 8
_OWN_MODULES = ("tenplex_megatron.cpu", "tenplex_megatron.cli.single_rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The training script of a job, with its own flags."""

    framework: str
    path: str
    argv: tuple[str, ...]
    is_module: bool = False


class Describer:
    """Builds the ranks of layouts, a few at a time; a context manager for the main thread.

    Within it SIGTERM raises SystemExit, so that no process and no folder is left behind.

    Args:
        script: what trains.
        allowed: layouts whose padded sizes must agree; see `ArgumentAdapter.layout_arguments`.
        timeout_s: how long building one rank may take.
        on_rank: told after each rank that was built.
    """

    def __init__(
        self,
        script: Script,
        allowed: Sequence[ParallelLayout],
        *,
        timeout_s: float = 600.0,
        on_rank: Callable[[], None] = lambda: None,
    ) -> None:
        self._script = script
        self._allowed = tuple(allowed)
        self._timeout_s = timeout_s
        self._on_rank = on_rank
        self._arguments = argument_adapter(script.framework)
        self._at_once = min(_MOST_AT_ONCE, len(os.sched_getaffinity(0)))
        self._logs = Path()
        self._running: dict[Connection, _Running] = {}
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        try:
            allow_exit = self._opened.enter_context(_sigterm_exits())
            self._logs = self._opened.enter_context(_folder_for_logs())
            self._opened.callback(self._stop)
            # Frameworks warn of optional kernels they miss, which does not matter here.
            os.environ.setdefault("PYTHONWARNINGS", "ignore")
            with _errors_to(self._logs / "imports.log"):
                modules = self._arguments.modules(self._script.argv)
                ForkServer((*_OWN_MODULES, *modules)).warm_up()
            allow_exit()
        except BaseException:
            self._opened.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def describe(
        self, layout: ParallelLayout, stored: Mapping[str, TensorSpec] | None = None
    ) -> TensorCollection:
        """What every rank of `layout` holds.

        Args:
            layout: the layout to build.
            stored: tensors of the snapshot the ranks would import; None: what they would store.

        Raises:
            ConfigError: the script or the framework refuses the layout, or takes too long.
        """
        specs: list[TensorSpec] = []
        holdings: list[tuple[int, Box]] = []
        waiting = deque(range(layout.world_size))
        while waiting or self._running:
            while waiting and len(self._running) < self._at_once:
                self._start(layout, waiting.popleft(), stored)
            for part in self._finished(layout):
                specs.extend(part.tensors.values())
                holdings.extend((rank, box) for rank in part.ranks for box in part.partition(rank))
                self._on_rank()
        return TensorCollection.build(specs, holdings)

    def _start(
        self, layout: ParallelLayout, rank: int, stored: Mapping[str, TensorSpec] | None
    ) -> None:
        argv = self._script.argv
        task = RankTask(
            framework=self._script.framework,
            script=self._script.path,
            is_module=self._script.is_module,
            argv=(
                *argv,
                *self._arguments.device_arguments("cpu"),
                *self._arguments.layout_arguments(argv, layout, self._allowed),
            ),
            rank=rank,
            world_size=layout.world_size,
            stored=None if stored is None else dict(stored),
            log=str(self._logs / f"{layout}-rank-{rank}.log"),
        )
        context = get_context("forkserver")
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=send_description, args=(task, sending))
        # Noted before it runs, so that a signal at any moment finds it.
        self._running[receiving] = _Running(process, task, time.monotonic() + self._timeout_s)
        process.start()
        sending.close()

    def _finished(self, layout: ParallelLayout) -> list[TensorCollection]:
        first = min(one.deadline for one in self._running.values())
        ready = connection.wait(list(self._running), max(0.0, first - time.monotonic()))
        if not ready:
            raise ConfigError(f"{layout}: building a rank took more than {self._timeout_s:g} s")
        parts = []
        for end in ready:
            assert isinstance(end, Connection)
            one = self._running[end]
            try:
                parts.append(read_description(end.recv_bytes()))
            except EOFError:
                raise ConfigError(
                    f"{layout}: rank {one.task.rank} can't be built: {_last_line(one.task.log)} "
                    f"(what it printed: {one.task.log})"
                ) from None
            finally:
                end.close()
            one.process.join()
            del self._running[end]
        return parts

    def _stop(self) -> None:
        for one in self._running.values():
            if one.process.pid is not None:
                one.process.kill()
                one.process.join()
        self._running.clear()


@contextmanager
def _sigterm_exits() -> Iterator[Callable[[], None]]:
    """Let SIGTERM unwind this process once, as an interrupt does.

    It waits until what is yielded is called: a folder that is just being made would stay.
    """
    early: list[int] = []

    def leave(number: int, _: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    def allow_exit() -> None:
        signal.signal(signal.SIGTERM, leave)
        if early:
            leave(early[0], None)

    former = signal.signal(signal.SIGTERM, lambda number, _: early.append(number))
    try:
        yield allow_exit
    finally:
        signal.signal(signal.SIGTERM, former)


@contextmanager
def _folder_for_logs() -> Iterator[Path]:
    """A folder that stays only when something failed, for whoever looks for the reason."""
    folder = Path(tempfile.mkdtemp(prefix="tenplex-plan-"))
    try:
        yield folder
    except Exception:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _errors_to(log: Path) -> Iterator[None]:
    """Let processes started meanwhile write their errors to a file instead of the terminal."""
    sys.stderr.flush()
    descriptor = sys.stderr.fileno()
    kept = os.dup(descriptor)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, descriptor)
    os.close(target)
    try:
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)


@dataclass(frozen=True, slots=True)
class _Running:
    process: BaseProcess
    task: RankTask
    deadline: float


def _last_line(log: str) -> str:
    path = Path(log)
    text = path.read_text(errors="replace").strip() if path.exists() else ""
    return text.splitlines()[-1].strip() if text else "it ended without a word"
