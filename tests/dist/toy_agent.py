"""`tenplex run` with an adapter for the toy script."""

import sys


def main() -> int:
    # Late, because workers import the main module of their agent again.
    from toy_arguments import run_toy

    return run_toy(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
