"""How are Megatron's flags read without Megatron?

Only the flags named here are known; all others pass through untouched.
"""

import argparse
from collections.abc import Sequence

from tenplex_megatron.errors import ConfigError

__all__ = ["by_flag", "job_parser", "read_flags", "required"]


def by_flag(argv: Sequence[str]) -> dict[str, list[str]]:
    """The values of every flag; the last of equal flags counts, as in argparse.

    >>> by_flag(["--lr", "1", "--split=98,1,1", "--data-path", "0.5", "a", "--lr=2"])
    {'--lr': ['2'], '--split': ['98,1,1'], '--data-path': ['0.5', 'a']}
    """
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for token in argv:
        if token.startswith("--"):
            flag, equals, value = token.partition("=")
            values = found[flag] = [value] if equals else []
        else:
            values.append(token)
    return found


def job_parser() -> argparse.ArgumentParser:
    """What decides which layouts can exist."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("layers", "attention-heads"):
        parser.add_argument(f"--num-{flag}", type=int)
    for flag in ("global", "micro"):
        parser.add_argument(f"--{flag}-batch-size", type=int)
    # These are Megatron's own defaults.
    parser.add_argument("--num-query-groups", type=int, default=1)
    parser.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    parser.add_argument("--padded-vocab-size", type=int)
    parser.add_argument("--group-query-attention", action="store_true")
    return parser


def read_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The flags `parser` knows.

    Raises:
        ConfigError: a value is of the wrong kind, or a count is below 1; the script is not
            Megatron's.
    """
    if any(token.startswith("--deepspeed") for token in argv):
        raise ConfigError(
            "the training script's flags are those of a DeepSpeed script (--deepspeed...), which "
            "the policy has to say: framework: deepspeed; `tenplex plan` between two layouts and "
            "`tenplex frontier` by flags are for Megatron alone"
        )
    try:
        found, _ = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(f"the training script's flags: {error}") from error
    for name, value in vars(found).items():
        # No experts is how some scripts ask for a dense model.
        least = 0 if name == "num_experts" else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"the training script's flags: {flag}: expected from {least}, got {value}"
            )
    return found


def required(value: int | None, flag: str) -> int:
    """A value that has no default.

    Raises:
        ConfigError: it is missing.
    """
    if value is None:
        raise ConfigError(
            f"{flag} is missing from the training script's flags; the layouts that can exist "
            f"depend on it: add {flag} N"
        )
    return value
