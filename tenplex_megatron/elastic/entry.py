"""What happens in a worker process between its fork and the training script?"""

import atexit
import dataclasses
import importlib
import io
import json
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import NoReturn, Protocol, Self, cast

from tenplex_megatron.elastic import warm
from tenplex_megatron.elastic.generation import GenerationSpec
from tenplex_megatron.elastic.lifeline import end_with_parent
from tenplex_megatron.elastic.records import HANDED_OVER, WRONG_INPUT
from tenplex_megatron.errors import ConfigError, TenplexError, TransportError

__all__ = ["WorkerTask", "read_failure", "run_script", "run_task", "worker_main"]

logger = logging.getLogger(__name__)

_INTERRUPTED = 128 + signal.SIGINT


class _Session(Protocol):
    """What a session module offers: hooks into the framework, and whether they were reached."""

    def install(self, spec: GenerationSpec) -> None: ...
    def was_used(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTask:
    """What one worker process runs."""

    script: str
    argv: tuple[str, ...]
    is_module: bool = False
    """The script is the name of a module, as with `python -m`."""
    stand_in: str | None = None
    """Module that makes the host stand in for CUDA; None where the devices are real."""
    session: str | None = None
    """Module that hooks into the framework; None for a script that does without."""
    preload: tuple[str, ...] = ()
    """Modules that should be there already; empty for a worker meant to start cold."""
    environment: tuple[tuple[str, str], ...] = ()
    stdout: str = ""
    stderr: str = ""
    agent: int = field(default_factory=os.getpid)
    """Process that must outlive this one."""

    def with_environment(self, environment: dict[str, str], stdout: str, stderr: str) -> Self:
        """The same task for one rank."""
        return dataclasses.replace(
            self, environment=tuple(environment.items()), stdout=stdout, stderr=stderr
        )


def run_task(task: WorkerTask) -> NoReturn:
    """Body of a worker process."""
    _end_with_agent(task.agent)
    os.environ.update(task.environment)
    _redirect(task.stdout, sys.stdout.fileno())
    _redirect(task.stderr, sys.stderr.fileno())
    # As torchrun's `python -u`: what was printed survives a kill.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    _report_cold_start(task.preload)
    # A fork server hands down its own way to start processes, by which the workers of data loaders
    # would import everything anew, or not find a dataset of the main script.
    multiprocessing.set_start_method(None, force=True)
    code = _guarded(lambda: worker_main(task))
    if code == HANDED_OVER:
        # The state is safe and the peers wait: nothing in the interpreter's shutdown is needed.
        _leave(code)
    # A forked process ends without these, and scripts may have registered some.
    vars(atexit)["_run_exitfuncs"]()
    sys.exit(code)


def worker_main(task: WorkerTask) -> None:
    """Prepare the framework and run the training script; its `sys.exit` passes through."""
    spec = GenerationSpec.from_environment()
    if task.stand_in is not None:
        importlib.import_module(task.stand_in).install()
    sys.argv = [task.script, *task.argv]
    session = _session(task.session)
    if session is not None and spec is not None:
        session.install(spec)
    run_script(task.script, is_module=task.is_module)
    if session is not None and not session.was_used():
        raise ConfigError(
            f"{task.script} ended without training under the elastic hooks; it must train through "
            "the framework the policy names"
        )


def read_failure(path: Path) -> str:
    """The first line of the failure a worker left behind."""
    try:
        message = json.loads(path.read_text())["message"]
    except (OSError, ValueError, KeyError):
        return ""
    text = message if isinstance(message, str) else str(message.get("message", ""))
    return text.strip().splitlines()[0] if text.strip() else ""


def _session(name: str | None) -> _Session | None:
    return None if name is None else cast("_Session", importlib.import_module(name))


def run_script(script: str, *, is_module: bool) -> None:
    """Run a training script, or a module as with `python -m`, as the main program."""
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    path = Path(script)
    if not path.is_file():
        raise ConfigError(f"training script {script} does not exist")
    sys.path.insert(0, str(path.resolve().parent))
    runpy.run_path(str(path), run_name="__main__")


def _guarded(body: Callable[[], None]) -> int:
    """Run `body`; the exit code a process should end with."""
    try:
        return _reported(body)
    except KeyboardInterrupt:
        # The agent sends on what the terminal has sent to every process already.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return _INTERRUPTED


def _reported(body: Callable[[], None]) -> int:
    try:
        body()
    except KeyboardInterrupt:
        raise
    except SystemExit as leaving:
        return _exit_code(leaving)
    except TransportError as error:
        _write_failure(str(error))
        sys.stderr.write(f"tenplex: {error}\n")
        return 1
    except TenplexError as error:
        # Every generation would meet the same input, layout or store.
        _write_failure(str(error))
        sys.stderr.write(f"tenplex: {error}\n")
        return WRONG_INPUT
    except BaseException as error:  # noqa: BLE001 - process boundary: reported, then the code says so
        _write_failure(f"{type(error).__name__}: {error}")
        traceback.print_exc()
        return 1
    return 0


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code
    _write_failure(str(leaving.code))
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def _write_failure(message: str) -> None:
    """In the form of torch's error files, where the agent and torch's own tools look."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"timestamp": str(int(time.time())), "py_callstack": traceback.format_exc()}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def _end_with_agent(agent: int) -> None:
    """Make the kernel end this process when the agent or its fork server ends.

    The fork server also ends when the last holder of its pipe closes it, and every worker inherits
    that pipe: workers let go of it, so that nothing keeps a fork server without an agent.
    """
    end_with_parent()
    server = vars(forkserver)["_forkserver"]
    pipe = server._forkserver_alive_fd
    if pipe is not None:
        server._forkserver_alive_fd = None
        os.close(pipe)
    with suppress(ProcessLookupError):
        os.kill(agent, 0)
        return
    _leave(1)


def _report_cold_start(preload: Sequence[str]) -> None:
    if warm.PRELOAD_VARIABLE not in os.environ:
        return  # there is no fork server, and the agent has said why
    missing = [name for name in preload if name not in sys.modules]
    if missing and os.environ.get("RANK") == "0":
        reasons = [f"{name} ({warm.failures.get(name, 'not preloaded')})" for name in missing]
        logger.warning("the fork server could not preload %s", ", ".join(reasons))


def _redirect(path: str, descriptor: int) -> None:
    if not path:
        return
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, descriptor)
    os.close(target)


def _leave(code: int) -> NoReturn:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)
