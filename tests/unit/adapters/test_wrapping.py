"""A wrapped function is called through the wrapper, wherever it was looked up."""

import argparse
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tenplex_megatron.adapters.wrapping import add_policy_flag, wrap


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int, *, times: int = 1) -> int:
        """Add a number."""
        self.count += number * times
        return self.count


def negated(original: Callable[..., int], *args: object, **kwargs: object) -> int:
    return -original(*args, **kwargs)


def of_a_class() -> Counter:
    class Own(Counter):
        pass

    wrap(Own, "add", negated)
    return Own()


def of_an_object() -> Counter:
    counter = Counter()
    wrap(counter, "add", negated)
    return counter


@pytest.mark.parametrize("made", [of_a_class, of_an_object])
def test_calls_go_through_the_wrapper_with_all_arguments(made: Callable[[], Counter]) -> None:
    counter = made()
    assert counter.add(2, times=3) == -6
    assert counter.count == 6
    assert counter.add.__doc__ == "Add a number."


def test_wrappers_of_a_function_stand_around_each_other() -> None:
    module = SimpleNamespace(double=lambda number: 2 * number)
    wrap(module, "double", lambda original, number: original(number) + 1)
    wrap(module, "double", lambda original, number: original(number) * 10)
    assert module.double(3) == 70


def test_the_flag_of_the_policy_is_added_to_what_the_framework_adds() -> None:
    def own(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--own")
        return parser

    parser = add_policy_flag(own, argparse.ArgumentParser())
    given = parser.parse_args(["--own", "1", "--elastic-policy", "p.yaml"])
    assert vars(given) == {"own": "1", "elastic_policy": "p.yaml"}
    assert parser.parse_args([]).elastic_policy is None
