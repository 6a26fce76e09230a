"""Shares serve every demand, and the busiest sender could not send less."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplex_megatron.core.balance import Group, balance, spread
from tenplex_megatron.errors import LayoutError

SENDERS = "abcde"
groups = st.sets(st.sampled_from(SENDERS), min_size=1).map(lambda names: tuple(sorted(names)))
all_demands = st.dictionaries(groups, st.integers(0, 1000), max_size=12)


def best_busiest(demands: dict[Group, int]) -> Fraction:
    best = Fraction(0)
    for size in range(1, len(SENDERS) + 1):
        for chosen in itertools.combinations(SENDERS, size):
            inside = sum(amount for group, amount in demands.items() if set(group) <= set(chosen))
            best = max(best, Fraction(inside, size))
    return best


@given(all_demands)
def test_every_demand_is_served_by_its_own_senders(demands: dict[Group, int]) -> None:
    served = dict.fromkeys(demands, 0)
    for (group, sender), amount in balance(demands).items():
        assert amount > 0
        assert sender in group
        served[group] += amount
    assert served == demands


@given(all_demands)
def test_the_busiest_sender_sends_the_least_that_is_possible(demands: dict[Group, int]) -> None:
    load: dict[str, int] = {}
    for (_, sender), amount in balance(demands).items():
        load[sender] = load.get(sender, 0) + amount
    assert max(load.values(), default=0) < best_busiest(demands) + 1


@given(all_demands)
def test_shares_do_not_depend_on_the_order_of_demands(demands: dict[Group, int]) -> None:
    backwards = dict(reversed(demands.items()))
    assert list(balance(backwards).items()) == list(balance(demands).items())


def test_senders_below_the_limit_are_even_too() -> None:
    shares = balance({("a",): 100, ("b", "c"): 10, ("a", "b", "c"): 10})
    load = {name: sum(n for (_, by), n in shares.items() if by == name) for name in "abc"}
    assert load == {"a": 100, "b": 10, "c": 10}


def test_a_demand_without_senders_is_refused() -> None:
    with pytest.raises(LayoutError, match="5 units have no possible sender"):
        balance({(): 5})


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 5))
def test_spreading_fills_bins_to_within_the_largest_amount(amounts: list[int], bins: int) -> None:
    fill = [0] * bins
    for amount, chosen in zip(amounts, spread(amounts, bins), strict=True):
        fill[chosen] += amount
    assert max(fill) <= sum(amounts) / bins + max(amounts, default=0)
