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

from tenplex_megatron.errors import ConfigError, TenplexError

__all__ = ["install"]

FLAG = "--elastic-policy"


def install() -> None:
    """Make this process elastic if its arguments ask for it; idempotent.

    Raises:
        SystemExit: code 2, after one sentence on stderr: the policy, the flags or the store are
            wrong.
    """
    try:
        path = _policy_path(sys.argv[1:])
        if path is not None and "TENPLEX_GENERATION" not in os.environ:
            # Imported late: a script without the flag must not pay for torch.
            standalone = importlib.import_module("tenplex_megatron.elastic.standalone")
            standalone.install_under_torchrun(path)
    except TenplexError as error:
        # Every rank has the same reason; torchrun reports the exit codes of the others.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write(f"tenplex: {error}\n")
        raise SystemExit(2) from None


def _policy_path(argv: list[str]) -> Path | None:
    """The value of the flag, if it is there; the last one counts.

    >>> _policy_path(["--lr", "1", "--elastic-policy=a.yaml"])
    PosixPath('a.yaml')
    """
    found = None
    for number, token in enumerate(argv):
        name, equals, value = token.partition("=")
        if name != FLAG:
            continue
        if not equals and number + 1 < len(argv):
            value = argv[number + 1]
        if not value or (not equals and value.startswith("--")):
            raise ConfigError(f"{FLAG}: expected the path of a policy, got {value or 'nothing'}")
        found = Path(value)
    return found


install()
