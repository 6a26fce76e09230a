"""`tenplex`: which command was asked for?

Imports a command only when it is asked for, so that workers, which import the main module of their
agent again, pay nothing for it.
"""

import argparse
import sys
from collections.abc import Sequence

from tenplex_megatron import __version__
from tenplex_megatron.errors import ConfigError, StoreError, TenplexError

__all__ = ["main"]

_COMMANDS = {
    "run": "train under a policy, on this node",
    "resize": "change the number of devices of a running job",
    "report": "show what every change of a run cost",
    "inspect": "show what snapshots or a checkpoint hold, and whether they are sound",
    "frontier": "show which layouts are worth running on a number of devices",
    "plan": "show what a change of layout would move, without moving it",
}
_EPILOG = """examples:
  tenplex run --elastic-policy elastic.yaml --nnodes 2 --nproc-per-node 4 \\
      --rdzv-backend c10d --rdzv-endpoint host:29500 pretrain_gpt.py --num-layers 8 ...
  tenplex resize --gpus 4 --job my-job
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 2 wrong input, 1 anything else."""
    parser = argparse.ArgumentParser(
        prog="tenplex",
        description="Changes the parallelism of a running training job.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tenplex {__version__}")
    commands = "; ".join(f"{name}: {what}" for name, what in _COMMANDS.items())
    parser.add_argument("command", choices=_COMMANDS, help=commands)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see tenplex COMMAND --help")
    given = parser.parse_args(argv)
    try:
        return _run(given.command, given.arguments)
    except (ConfigError, StoreError) as error:
        sys.stderr.write(f"tenplex {given.command}: {error}\n")
        return 2
    except TenplexError as error:
        sys.stderr.write(f"tenplex {given.command}: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 1


def _run(command: str, arguments: Sequence[str]) -> int:
    if command == "run":
        from tenplex_megatron.cli.run import run

        return run(arguments)
    if command == "report":
        from tenplex_megatron.cli.report import report

        return report(arguments)
    if command == "inspect":
        from tenplex_megatron.cli.inspect import inspect

        return inspect(arguments)
    if command == "frontier":
        from tenplex_megatron.cli.frontier import frontier

        return frontier(arguments)
    if command == "plan":
        return _plan(arguments)
    from tenplex_megatron.cli.resize import resize

    return resize(arguments)


def _plan(arguments: Sequence[str]) -> int:
    """A prediction needs neither torch nor a framework, and should not wait for them."""
    from tenplex_megatron.cli.what_if import is_what_if, what_if

    if is_what_if(arguments):
        return what_if(arguments)
    from tenplex_megatron.cli.plan import plan

    return plan(arguments)


if __name__ == "__main__":
    sys.exit(main())
