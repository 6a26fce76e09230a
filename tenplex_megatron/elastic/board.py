"""How do the agents of a job agree without meeting again?

Over the store of their one rendezvous. Every generation has a fresh prefix; a counter per prefix
changes with every message, so that a quiet agent asks for one number per poll.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

from tenplex_megatron.elastic.messages import (
    dump_change,
    dump_decision,
    dump_report,
    load_change,
    load_decision,
    load_report,
)
from tenplex_megatron.elastic.records import Change, Ending, NextGeneration, NodeReport
from tenplex_megatron.errors import ConfigError, TransportError

__all__ = ["Board"]

_POLL_S = 0.002
_OPERATION_S = 30.0
_BEAT_S = 1.0
_LOST_S = 10.0
_FAREWELL_S = 5.0
_LAST_LOOK_S = 0.3

type Decide = Callable[[Sequence[NodeReport]], NextGeneration | Ending]


class Board:
    """The messages of one generation; `turn` goes on to the next.

    Every method raises what the store raises when the node that hosts it is gone.
    """

    def __init__(self, store: Store, index: int, nodes: int) -> None:
        store.set_timeout(timedelta(seconds=_OPERATION_S))
        self._root = PrefixStore("tenplex", store)
        self._index = index
        self._members = tuple(range(nodes))
        self._names: dict[int, str] = {}
        self._turn = 0
        self._seen = 0
        self._next_beat = 0.0
        self._beats: dict[int, tuple[int, float]] = {}
        self._store = PrefixStore("0", self._root)

    def exchange_names(self, name: str, timeout_s: float) -> None:
        """Learn who takes part.

        Raises:
            ConfigError: two nodes have one name.
            TransportError: a node did not tell its name in time.
        """
        self._root.set(f"name/{self._index}", name)
        keys = [f"name/{index}" for index in self._members]
        deadline = time.monotonic() + timeout_s
        while not self._root.check(keys):
            _check_deadline(deadline, timeout_s, "the names of all nodes")
        values = [value.decode() for value in self._root.multi_get(keys)]
        self._names = dict(zip(self._members, values, strict=True))
        if len(set(values)) < len(values):
            raise ConfigError(
                f"nodes need different names, got {', '.join(values)}; "
                "give each its own with --node-name"
            )

    def turn(self, members: Sequence[str]) -> None:
        """Use the messages of the next generation, among the nodes that take part in it."""
        self._members = tuple(i for i in self._members if self._names[i] in members)
        self._turn += 1
        self._seen = 0
        self._store = PrefixStore(str(self._turn), self._root)

    def beat(self) -> None:
        """Show that this node lives; call it often, it speaks once a second."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + _BEAT_S
            self._root.add(f"beat/{self._index}", 1)

    def has_news(self) -> bool:
        """Whether any message of this generation was posted since the last call."""
        count = self._store.add("count", 0)
        news = count != self._seen
        self._seen = count
        return news

    def post_change(self, change: Change) -> None:
        """Propose the change that ends this generation; the first one wins."""
        self._post("change", dump_change(change))

    def change(self) -> Change | None:
        """The change that ends this generation, if any."""
        text = self._read("change")
        return None if text is None else load_change(text)

    def post_done(self) -> None:
        """Tell that the workers of this node finished."""
        self._store.add("done", 1)
        self._store.add("count", 1)

    def all_done(self) -> bool:
        """Whether the workers of every node finished."""
        return self._store.add("done", 0) >= len(self._members)

    def post_request(self, text: str) -> bool:
        """Ask rank 0 for a change; False when another request waits already."""
        return self._post("request", text) == text

    def request(self) -> str | None:
        """The request that waits for rank 0."""
        return self._read("request")

    def agree(
        self, report: NodeReport, decide: Decide, timeout_s: float
    ) -> NextGeneration | Ending:
        """Bring this node's report; the decision that all nodes obey.

        The first node that lives decides, once every node has reported or is lost.

        Raises:
            TransportError: there was no decision in time.
        """
        self._store.set(f"report/{self._index}", dump_report(report))
        deadline = time.monotonic() + timeout_s
        while (text := self._read("decision")) is None:
            self.beat()
            silent = [i for i in self._members if not self._store.check([f"report/{i}"])]
            lost = {index for index in silent if self._is_lost(index)}
            late = time.monotonic() > deadline - timeout_s / 10
            if late or lost.issuperset(silent):
                present = [i for i in self._members if i not in silent]
                if present[0] == self._index:
                    keys = [f"report/{index}" for index in present]
                    found = [load_report(value) for value in self._store.multi_get(keys)]
                    self._post("decision", dump_decision(decide(found)))
                    continue
            what = f"the reports of nodes {[self._names[i] for i in silent]} and the decision"
            _check_deadline(deadline, timeout_s, what)
        return load_decision(text)

    def leave(self) -> None:
        """Tell that this node goes; the others do not wait for it again."""
        self._root.set(f"gone/{self._index}", "")

    def part(self) -> None:
        """Stay until every node knows how the job ended, so that none loses the store before."""
        with suppress(RuntimeError):
            self._store.add("parted", 1)
            deadline = time.monotonic() + _FAREWELL_S
            while self._store.add("parted", 0) < len(self._members):
                if time.monotonic() > deadline:
                    return
                time.sleep(_POLL_S)
            # Nobody knows which node hosts the store; all leave when all have looked once more.
            time.sleep(_LAST_LOOK_S)

    def _is_lost(self, index: int) -> bool:
        if self._root.check([f"gone/{index}"]):
            return True
        count, now = self._root.add(f"beat/{index}", 0), time.monotonic()
        seen = self._beats.get(index)
        if seen is None or seen[0] != count:
            self._beats[index] = (count, now)
            return False
        return now - seen[1] > _LOST_S

    def _post(self, key: str, text: str) -> str:
        winner = self._store.compare_set(key, "", text).decode()
        self._store.add("count", 1)
        return winner

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None


def _check_deadline(deadline: float, timeout_s: float, what: str) -> None:
    # Waiting inside the store instead would keep signals from being handled.
    if time.monotonic() > deadline:
        raise TransportError(f"waited {timeout_s:g} s for {what}")
    time.sleep(_POLL_S)
