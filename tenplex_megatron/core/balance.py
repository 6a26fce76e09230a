"""How much each of several possible senders sends, so that the busiest one sends the least.

A demand is an amount that any member of a group of senders may serve, split freely. The busiest
sender can't send less than the densest set of senders must: all demand that only the set can serve,
divided by its size. That set is found with a few maximum flows, fixed, and taken out; the rest is
balanced in the same way. Amounts stay integers, so shares are best up to rounding by one.
"""

from collections import deque
from collections.abc import Iterable, Mapping

from tenplex_megatron.errors import LayoutError

__all__ = ["Group", "balance", "spread"]

type Group = tuple[str, ...]
type Shares = dict[tuple[Group, str], int]


def balance(demands: Mapping[Group, int]) -> Shares:
    """The amount every sender serves of every group's demand; zero amounts are left out.

    Only the busiest sender's amount is a law; the recursion also keeps the others even.

    >>> for (group, sender), amount in balance({("a", "b"): 6, ("a",): 4}).items():
    ...     print(group, sender, amount)
    ('a',) a 4
    ('a', 'b') a 1
    ('a', 'b') b 5

    Raises:
        LayoutError: when a demand has no possible sender.
    """
    left: dict[Group, Group] = {group: group for group in sorted(demands) if demands[group]}
    if () in left:
        raise LayoutError(f"{demands[()]} units have no possible sender")
    shares: Shares = {}
    while left:
        flow = _densest(left, demands)
        settled = [group for group, senders in left.items() if flow.limited.issuperset(senders)]
        for group in settled:
            for sender in left.pop(group):
                if amount := flow.amount(group, sender):
                    shares[group, sender] = amount
        left = {
            group: tuple(sender for sender in senders if sender not in flow.limited)
            for group, senders in left.items()
        }
    return dict(sorted(shares.items()))


def spread(amounts: Iterable[int], bins: int) -> list[int]:
    """The bin of every amount, so that the fullest bin is nearly as empty as it can be.

    The largest goes first, each into the emptiest bin, and ties into the first one.

    >>> spread([3, 1, 2, 2], 2)
    [0, 0, 1, 1]
    """
    sizes = list(amounts)
    fill = [0] * bins
    chosen = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        chosen[index] = fill.index(min(fill))
        fill[chosen[index]] += sizes[index]
    return chosen


def _densest(groups: Mapping[Group, Group], demands: Mapping[Group, int]) -> "_Flow":
    """The flow under the lowest limit that serves all, and the senders that set the limit."""
    everyone = {sender for senders in groups.values() for sender in senders}
    total = sum(demands[group] for group in groups)
    limited, inside = everyone, total
    while True:
        flow = _Flow(groups, demands, limit=-(-inside // len(limited)))
        tight = flow.overloaded()
        if not tight:
            flow.limited = limited
            return flow
        limited = tight
        inside = sum(demands[group] for group in groups if tight.issuperset(groups[group]))


class _Flow:
    """A maximum flow from groups to senders, none of which takes more than `limit`."""

    def __init__(
        self, groups: Mapping[Group, Group], demands: Mapping[Group, int], *, limit: int
    ) -> None:
        self.limited: set[str] = set()
        self._senders = groups
        self._unserved = {group: demands[group] for group in groups}
        senders = sorted({sender for found in groups.values() for sender in found})
        self._room = dict.fromkeys(senders, limit)
        self._served: dict[str, dict[Group, int]] = {sender: {} for sender in self._room}
        for group in groups:
            self._fill(group)
        for group in groups:
            while self._unserved[group] and self._augment(group):
                pass

    def amount(self, group: Group, sender: str) -> int:
        """What `sender` serves of `group`."""
        return self._served[sender].get(group, 0)

    def overloaded(self) -> set[str]:
        """The senders that unserved demand can reach: together they are short of room."""
        tight: set[str] = set()
        for group, unserved in self._unserved.items():
            if unserved:
                tight.update(self._search(group)[0])
        return tight

    def _fill(self, group: Group) -> None:
        for sender in self._senders[group]:
            self._give(group, sender, min(self._unserved[group], self._room[sender]))

    def _give(self, group: Group, sender: str, amount: int) -> None:
        if amount:
            self._unserved[group] -= amount
            self._room[sender] -= amount
            self._served[sender][group] = self.amount(group, sender) + amount

    def _search(self, start: Group) -> tuple[dict[str, tuple[Group, str | None]], str | None]:
        """How unserved demand of `start` reaches senders, and the first one that has room."""
        origin: dict[str, tuple[Group, str | None]] = {}
        seen = {start}
        queue: deque[tuple[Group, str | None]] = deque([(start, None)])
        while queue:
            group, freed = queue.popleft()
            for sender in self._senders[group]:
                if sender in origin:
                    continue
                origin[sender] = (group, freed)
                if self._room[sender]:
                    return origin, sender
                for other in sorted(self._served[sender]):
                    if other not in seen:
                        seen.add(other)
                        queue.append((other, sender))
        return origin, None

    def _augment(self, start: Group) -> bool:
        """Moves load along one path that ends in free room; False when there is none."""
        origin, sender = self._search(start)
        if sender is None:
            return False
        path: list[tuple[Group, str, str | None]] = []
        step: str | None = sender
        while step is not None:
            group, freed = origin[step]
            path.append((group, step, freed))
            step = freed
        amount = min(self._unserved[start], self._room[sender])
        for group, _, freed in path:
            if freed is not None:
                amount = min(amount, self.amount(group, freed))
        self._unserved[start] -= amount
        self._room[sender] -= amount
        for group, taker, freed in path:
            self._served[taker][group] = self.amount(group, taker) + amount
            if freed is not None:
                rest = self.amount(group, freed) - amount
                if rest:
                    self._served[freed][group] = rest
                else:
                    del self._served[freed][group]
        return True
