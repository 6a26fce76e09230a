"""Imported by the fork server: imports what workers need, and remembers what could not be.

The fork server of the standard library drops import errors and dies of any other. Here every
failure is kept with its reason, so that a worker that starts cold can say why.
"""

import gc
import importlib
import logging
import os
import signal
import sys
import warnings

from tenplex_megatron.elastic.lifeline import end_with_parent, is_child_of_agent

__all__ = ["PRELOAD_VARIABLE", "failures", "loaded"]

PRELOAD_VARIABLE = "TENPLEX_PRELOAD"
"""Names of the modules to import, separated by colons."""

failures: dict[str, str] = {}
loaded: list[str] = []


def _warm() -> None:
    # Which optional kernels are missing is only worth saying in a worker that starts cold.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _import_all()
    if _has_touched_cuda():
        # Ends the fork server; the agent then starts workers cold, and says so.
        sys.exit(
            "the fork server can't be used: a module it imported has initialised CUDA, which no "
            "forked process can use; keep CUDA calls out of what a script imports"
        )
    # Collections in workers then leave the shared pages alone, which keeps them shared.
    gc.collect()
    gc.freeze()


def _import_all() -> None:
    for name in filter(None, os.environ.get(PRELOAD_VARIABLE, "").split(":")):
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a worker reports it and imports by itself
            failures[name] = f"{type(error).__name__}: {error}"
        else:
            loaded.append(name)


def _has_touched_cuda() -> bool:
    """Whether CUDA would refuse to work in a fork of this process; only a fork can tell.

    Asking for devices counts as touching them; where there are none, nothing is lost by it.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    probe = os.fork()
    if probe == 0:
        os._exit(bool(torch.cuda._is_in_bad_fork()))
    refuses = os.waitstatus_to_exitcode(os.waitpid(probe, 0)[1]) != 0
    return refuses and torch.cuda.device_count() > 0


if is_child_of_agent():
    # The fork server notices the end of its agent only between two forks, not while it imports.
    end_with_parent()
    # Ctrl-C while importing ends it quietly: there is nothing to say that the agent does not say.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _warm()
    signal.signal(signal.SIGINT, signal.default_int_handler)
