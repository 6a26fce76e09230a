"""Devices are counted node by node, and what is lost is lost."""

import itertools

import pytest

from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.fleet import Fleet


def test_without_names_the_last_devices_are_lost() -> None:
    sizes = [8, 8, 5]
    places = [f"n{node}:{device}" for node, size in enumerate(sizes) for device in range(size)]
    for used, wanted in itertools.product(range(1, 22), repeat=2):
        fleet = Fleet.of(sizes, used=used, wanted=wanted)
        for devices, count in ((fleet.before, used), (fleet.after, wanted)):
            found = [f"{node}:{device}" for node, all_of in devices.items() for device in all_of]
            assert found == places[:count]
        assert fleet.lost == places[wanted:used]
        assert fleet.lost_nodes == [node for node in fleet.before if node not in fleet.after]


def test_named_devices_and_nodes_are_lost() -> None:
    fleet = Fleet.of([2, 2, 2], used=6, wanted=None, lost=["n0:1", "n2"])
    assert fleet.after == {"n0": (0,), "n1": (0, 1)}
    assert (fleet.lost, fleet.lost_nodes) == (["n0:1", "n2:0", "n2:1"], ["n2"])
    assert Fleet.of([2, 2], used=4, wanted=2, lost=["n0:1"]).after == {"n0": (0,), "n1": (0,)}


@pytest.mark.parametrize(
    ("wanted", "lost", "said"),
    [
        (2, ["n0"], "1 of 3 devices are left without n0; expected 2"),
        (None, ["n0", "n1"], "0 of 3 devices are left without n0, n1; expected at least 1"),
        (None, ["n9"], "lost 'n9': expected a node such as n0 or a device such as n0:1, of n0 to"),
        (None, ["n0:7"], "of n0 to n1 with devices 0 to 1"),
        (9, [], "3 of 3 devices are left without losses; expected 9"),
    ],
)
def test_what_can_not_be_lost_is_said(wanted: int | None, lost: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Fleet.of([2, 1], used=3, wanted=wanted, lost=lost)
