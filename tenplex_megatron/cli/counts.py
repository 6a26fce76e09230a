"""How are counts written on a command line?"""

import argparse

__all__ = ["count", "counts"]


def count(text: str) -> int:
    """A number from 1, for argparse.

    >>> count("8")
    8
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a count from 1, got {text}")
    return number


def counts(text: str) -> list[int]:
    """Numbers from 1 with commas between them, for argparse.

    >>> counts("8,8,5")
    [8, 8, 5]
    """
    return [count(part) for part in text.split(",")]
