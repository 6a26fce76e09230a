"""How do the workers of a generation start within milliseconds, and end with their agent?

A fork server per agent imports the training stack once; workers are forked from it. Where that is
impossible, workers are spawned cold and a warning says why.
"""

import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import LogsSpecs, PContext, RunProcsResult

from tenplex_megatron.elastic import entry
from tenplex_megatron.elastic.entry import WorkerTask
from tenplex_megatron.elastic.lifeline import AGENT_VARIABLE
from tenplex_megatron.elastic.warm import PRELOAD_VARIABLE

__all__ = ["ForkServer", "WorkerProcesses"]

logger = logging.getLogger(__name__)

_Context = ForkServerContext | SpawnContext


class ForkServer:
    """Starts processes; warm as long as the fork server works."""

    def __init__(self, preload: Sequence[str], *, start_method: str = "forkserver") -> None:
        self._preload = tuple(preload)
        self._context: _Context = (
            multiprocessing.get_context("forkserver")
            if start_method == "forkserver"
            else multiprocessing.get_context("spawn")
        )

    @property
    def is_warm(self) -> bool:
        """Whether workers are forked from a process that has imported the training stack."""
        return isinstance(self._context, ForkServerContext)

    def warm_up(self) -> None:
        """Start importing in the background; call it before anything slow."""
        # Children inherit the environment of this moment, so these lines come first.
        os.environ[AGENT_VARIABLE] = str(os.getpid())
        # Otherwise asking whether there is a GPU initialises CUDA, which forks can't use then.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        if not isinstance(self._context, ForkServerContext):
            return
        os.environ[PRELOAD_VARIABLE] = ":".join(self._preload)
        self._context.set_forkserver_preload(["tenplex_megatron.elastic.warm", entry.__name__])
        from multiprocessing import forkserver  # noqa: PLC0415 - unavailable where there is no fork

        try:
            forkserver.ensure_running()
        except OSError as error:
            self._go_cold(error)

    def start(self, name: str, task: WorkerTask) -> BaseProcess:
        """Start one worker."""
        if isinstance(self._context, ForkServerContext):
            process = self._context.Process(target=entry.run_task, args=(task,), name=name)
            try:
                process.start()
            except (OSError, EOFError) as error:
                self._go_cold(error)
            else:
                return process
        cold = self._context.Process(target=entry.run_task, args=(task,), name=name)
        cold.start()
        return cold

    def _go_cold(self, error: BaseException) -> None:
        logger.warning(
            "the fork server can't be used (%s: %s); workers start cold from now on",
            type(error).__name__,
            str(error) or "it ended",
        )
        os.environ.pop(PRELOAD_VARIABLE, None)
        self._context = multiprocessing.get_context("spawn")


class WorkerProcesses(PContext):
    """The worker processes of one generation on one node.

    torch's own context ends every process as soon as one failed, with a signal that a worker
    blocked in a collective ignores. Here each process is waited for by itself: a worker that hands
    over is no failure, and the order of deaths tells which device is broken.
    """

    def __init__(
        self,
        server: ForkServer,
        tasks: dict[int, WorkerTask],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        *,
        line_prefixes: dict[int, str] | None = None,
        stdout_filters: list[str] | None = None,
        stderr_filters: list[str] | None = None,
    ) -> None:
        args: dict[int, tuple[Any, ...]] = dict.fromkeys(tasks, ())
        super().__init__(
            "tenplex",
            entry.run_task,
            args,
            envs,
            logs_specs,
            line_prefixes,
            stdout_filters,
            stderr_filters,
        )
        self._server = server
        self._tasks = tasks
        self._processes: dict[int, BaseProcess] = {}
        self._reported: set[int] = set()

    def _start(self) -> None:
        for index, task in self._tasks.items():
            ready = task.with_environment(
                self.envs[index], self.stdouts[index], self.stderrs[index]
            )
            self._processes[index] = self._server.start(f"worker-{index}", ready)

    def wait_for_exit(self, timeout_s: float) -> bool:
        """Wait until a worker that was not reported yet ends; whether one did."""
        sentinels = [
            process.sentinel
            for index, process in self._processes.items()
            if index not in self._reported
        ]
        if not sentinels:
            time.sleep(timeout_s)
        return bool(sentinels and connection.wait(sentinels, timeout_s))

    def exits(self) -> Iterator[tuple[int, int, str]]:
        """Index, exit code and error message of every worker that ended since the last call."""
        for index, process in self._processes.items():
            if index not in self._reported and process.exitcode is not None:
                self._reported.add(index)
                yield index, process.exitcode, self._message(index)

    def kill(self, timeout_s: float) -> None:
        """End what runs with SIGKILL and wait for it.

        A worker that has already died by itself is left to `exits`; the others are not reported.
        """
        for index, process in self._processes.items():
            if index in self._reported or process.pid is None or _is_dead(process.pid):
                continue
            self._reported.add(index)
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self._join(timeout_s)

    def pids(self) -> dict[int, int]:
        """Process ids by index."""
        return {index: process.pid or -1 for index, process in self._processes.items()}

    def _poll(self) -> RunProcsResult | None:
        alive = any(process.exitcode is None for process in self._processes.values())
        return None if alive else RunProcsResult()

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        if death_sig != signal.SIGKILL:
            for process in self._processes.values():
                if process.exitcode is None and process.pid is not None:
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, death_sig)
            self._join(timeout)
        self.kill(timeout)
        for process in self._processes.values():
            if process.exitcode is not None:
                process.close()
        self._processes.clear()

    def _join(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        waiting = {p.sentinel: p for p in self._processes.values() if p.exitcode is None}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in connection.wait(list(waiting), left):
                assert isinstance(ready, int)
                if waiting[ready].exitcode is not None:
                    del waiting[ready]

    def _message(self, index: int) -> str:
        path = Path(self.error_files[index])
        return entry.read_failure(path) if path.is_file() else ""


def _is_dead(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return sys.platform == "linux"
    return state in (b"Z", b"X")
