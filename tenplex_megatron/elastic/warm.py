"""Imported by the fork server: imports what workers need, and remembers what could not be.

The fork server of the standard library drops import errors and dies of any other. Here every
failure is kept with its reason, so that a worker that starts cold can say why.
"""

import gc
import importlib
import logging
import os
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


if is_child_of_agent():
    # The fork server notices the end of its agent only between two forks, not while it imports.
    end_with_parent()
    _warm()
