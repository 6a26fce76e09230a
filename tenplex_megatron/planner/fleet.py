"""Which devices does a job have now, and which will it have?

Nodes are n0, n1 and so on, and their devices n0:0, n0:1; a job fills them in this order. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from tenplex_megatron.errors import ConfigError

__all__ = ["Fleet"]

type Devices = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Devices by node; nodes without any are left out."""

    before: Devices
    """Those the job has now."""
    after: Devices
    """Those it will have."""

    @classmethod
    def of(
        cls, sizes: Sequence[int], *, used: int, wanted: int | None, lost: Sequence[str] = ()
    ) -> Self:
        """A fleet of nodes of these sizes.

        Args:
            sizes: devices of each node.
            used: devices that the job has now, the first ones.
            wanted: devices that it will have, the first ones that are not lost; None: all of them.
            lost: devices such as n3:5, and whole nodes such as n3.

        >>> Fleet.of([2, 2], used=4, wanted=2, lost=["n0:1"]).after
        {'n0': (0,), 'n1': (0,)}

        Raises:
            ConfigError: there is no such device, or there are too few.
        """
        nodes = {f"n{number}": tuple(range(size)) for number, size in enumerate(sizes)}
        sound = _without(nodes, lost)
        total = sum(map(len, sound.values()))
        if total < (wanted or 1):
            raise ConfigError(
                f"{total} of {sum(sizes)} devices are left without {', '.join(lost) or 'losses'}; "
                f"expected {wanted or 'at least 1'}"
            )
        return cls(_first(nodes, used), _first(sound, total if wanted is None else wanted))

    @property
    def lost(self) -> list[str]:
        """Devices the job has and will not have."""
        return [
            f"{node}:{device}"
            for node, devices in self.before.items()
            for device in devices
            if device not in self.after.get(node, ())
        ]

    @property
    def lost_nodes(self) -> list[str]:
        """Nodes of which it will have no device."""
        return [node for node in self.before if node not in self.after]


def _without(nodes: Devices, lost: Sequence[str]) -> dict[str, tuple[int, ...]]:
    found = dict(nodes)
    for name in lost:
        node, colon, device = name.partition(":")
        known = [str(number) for number in nodes.get(node, ())]
        if not known or (colon and device not in known):
            devices = f" with devices {known[0]} to {known[-1]}" if known else ""
            raise ConfigError(
                f"lost {name!r}: expected a node such as n0 or a device such as n0:1, of "
                f"n0 to n{len(nodes) - 1}{devices}"
            )
        found[node] = tuple(one for one in found[node] if colon and str(one) != device)
    return found


def _first(nodes: Devices, count: int) -> dict[str, tuple[int, ...]]:
    found = {}
    for node, devices in nodes.items():
        if used := devices[:count]:
            found[node] = used
        count -= len(used)
    return found
