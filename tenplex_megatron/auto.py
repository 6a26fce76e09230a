"""The one import that makes a training script elastic, under torchrun as well as `tenplex run`.

    import tenplex_megatron.auto

as the first statement of a script's main block.  It does nothing unless `--elastic-policy` is among
the arguments.  Under `tenplex run` an agent has already decided everything; under plain torchrun
this module decides at start: the layout from the policy and the number of ranks, the state from the
newest complete snapshot in the nodes' stores.
"""

import importlib
import os
import sys
from pathlib import Path

from tenplex_megatron.errors import ConfigError

__all__ = ["install"]

FLAG = "--elastic-policy"


def policy_path(argv: list[str]) -> Path | None:
    """The value of the flag, if it is there.

    >>> policy_path(["--lr", "1", "--elastic-policy=a.yaml"])
    PosixPath('a.yaml')
    """
    for number, token in enumerate(argv):
        name, _, value = token.partition("=")
        if name != FLAG:
            continue
        if value:
            return Path(value)
        if number + 1 < len(argv):
            return Path(argv[number + 1])
        raise ConfigError(f"{FLAG}: expected a path, got nothing")
    return None


def install() -> None:
    """Make this process elastic if its arguments ask for it; idempotent."""
    path = policy_path(sys.argv[1:])
    if path is None:
        return
    if "TENPLEX_GENERATION" not in os.environ:
        # Imported late: a script without the flag must not pay for torch.
        standalone = importlib.import_module("tenplex_megatron.elastic.standalone")
        standalone.install_under_torchrun(path)


install()
