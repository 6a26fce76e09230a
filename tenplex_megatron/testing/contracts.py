"""What must every implementation of an interface do? One suite of tests per interface.

The test file of an implementation subclasses the suite and gives it a fixture.
"""
# ruff: noqa: D102  # the names of these tests are sentences

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
import torch

from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import StoreError, TransportError
from tenplex_megatron.store.base import TensorReader, TensorStore, TensorWriter
from tenplex_megatron.store.values import PlainValue
from tenplex_megatron.transport.base import Transport

__all__ = ["RankDiesError", "StoreContract", "TransportContract", "TransportWorld"]

_SPECS = MappingProxyType(
    {
        "weight": TensorSpec("weight", (6, 5), "float32"),
        "half": TensorSpec("half", (3,), "bfloat16"),
        "scale": TensorSpec("scale", (), "float64"),
        "empty": TensorSpec("empty", (0, 4), "int64"),
    }
)
_BOXES = (
    Box("weight", Region((2, 1), (5, 4))),
    Box("half", Region((0,), (3,))),
    Box("scale", Region((), ())),
    Box("empty", Region((0, 0), (0, 4))),
    Box("weight", Region((0, 0), (1, 5))),
)
_LAYOUT: Mapping[str, PlainValue] = MappingProxyType({"tp": 2, "dp": 1})


def _bytes_of(version: int, rank: int, box_index: int, nbytes: int) -> bytes:
    return bytes((version * 31 + rank * 17 + box_index * 7 + at) % 251 for at in range(nbytes))


def _open(
    store: TensorStore, rank: int = 0, *, generation: int = 1, boxes: Sequence[Box] = _BOXES
) -> TensorWriter:
    return store.writer(rank, 2, generation=generation, layout=_LAYOUT, specs=_SPECS, boxes=boxes)


def _write(writer: TensorWriter, version: int, rank: int = 0) -> tuple[str, ...]:
    for box_index, view in enumerate(writer.begin(version)):
        view[:] = _bytes_of(version, rank, box_index, len(view))
    return writer.finish(version, {"step": version, "rank": rank})


def _assert_holds(reader: TensorReader, version: int, rank: int = 0) -> None:
    assert reader.version == version
    for box_index, box in enumerate(reader.boxes(rank)):
        reader.verify(rank, box_index)
        view = reader.view(rank, box_index)
        assert view == _bytes_of(version, rank, box_index, box.nbytes)
    assert reader.progress(rank) == {"step": version, "rank": rank}


class StoreContract:
    """Every `TensorStore`; subclasses give the fixture `store`, empty and of any job."""

    def test_what_was_written_is_read_with_its_boxes_and_progress(self, store: TensorStore) -> None:
        digests = _write(_open(store), 10)
        reader = store.reader(10)
        assert reader.ranks == (0,)
        assert (reader.generation, reader.world_size, reader.layout) == (1, 2, _LAYOUT)
        assert tuple(stored.box for stored in reader.boxes(0)) == _BOXES
        assert tuple(stored.digest for stored in reader.boxes(0)) == digests
        assert reader.specs == _SPECS
        _assert_holds(reader, 10)

    def test_a_view_has_the_size_of_its_box(self, store: TensorStore) -> None:
        views = _open(store).begin(1)
        assert [len(view) for view in views] == [36, 6, 8, 0, 20]
        assert all(view.format == "B" and not view.readonly for view in views)

    def test_what_is_read_can_not_be_written(self, store: TensorStore) -> None:
        _write(_open(store), 10)
        view = store.reader(10).view(0, 0)
        assert view.readonly
        with pytest.raises(TypeError):
            view[0] = 1

    def test_equal_bytes_have_equal_digests_on_every_rank(self, store: TensorStore) -> None:
        found = set()
        for rank in range(2):
            writer = _open(store, rank)
            for view in writer.begin(4):
                view[:] = bytes(len(view))
            found.add(writer.finish(4, {}))
        assert len(found) == 1

    def test_a_begun_version_does_not_exist(self, store: TensorStore) -> None:
        _open(store).begin(10)
        assert store.inventory() == ()
        with pytest.raises(StoreError, match="10"):
            store.reader(10)

    def test_the_two_newest_versions_are_kept(self, store: TensorStore) -> None:
        writer = _open(store)
        for version in (10, 20, 30, 40):
            _write(writer, version)
        assert [held.version for held in store.inventory()] == [30, 40]
        _assert_holds(store.reader(30), 30)
        _assert_holds(store.reader(40), 40)

    def test_beginning_a_version_spares_the_newest(self, store: TensorStore) -> None:
        writer = _open(store)
        _write(writer, 10)
        _write(writer, 20)
        for view in writer.begin(30):
            view[:] = bytes(len(view))
        assert [held.version for held in store.inventory()] == [20]
        _assert_holds(store.reader(20), 20)

    def test_beginning_a_version_spares_the_committed_one_even_if_older(
        self, store: TensorStore
    ) -> None:
        writer = _open(store)
        _write(writer, 10)
        store.commit(10, generation=1, ranks=[0])
        _write(writer, 20)  # another rank died before it finished this one
        writer.begin(30)
        assert [held.version for held in store.inventory()] == [10]
        _assert_holds(store.reader(10), 10)

    def test_an_unfinished_version_is_overwritten_first(self, store: TensorStore) -> None:
        writer = _open(store)
        _write(writer, 10)
        writer.begin(20)
        _write(writer, 30)
        assert [held.version for held in store.inventory()] == [10, 30]

    @pytest.mark.parametrize("version", [5, 10, -1])
    def test_a_version_that_is_not_newer_is_refused(self, store: TensorStore, version: int) -> None:
        writer = _open(store)
        _write(writer, 10)
        with pytest.raises(StoreError, match=str(version)):
            writer.begin(version)
        _assert_holds(store.reader(10), 10)

    def test_only_the_begun_version_can_be_finished(self, store: TensorStore) -> None:
        writer = _open(store)
        with pytest.raises(StoreError, match="none was begun"):
            writer.finish(10, {})
        writer.begin(10)
        with pytest.raises(StoreError, match="10 was begun"):
            writer.finish(20, {})

    def test_a_closed_writer_refuses_and_its_versions_stay(self, store: TensorStore) -> None:
        writer = _open(store)
        _write(writer, 10)
        writer.close()
        with pytest.raises(StoreError, match="closed"):
            writer.begin(20)
        _assert_holds(store.reader(10), 10)

    def test_a_box_outside_of_its_tensor_is_refused(self, store: TensorStore) -> None:
        with pytest.raises(StoreError, match=r"weight.*outside"):
            _open(store, boxes=[Box("weight", Region((0, 0), (7, 5)))])
        with pytest.raises(StoreError, match=r"bias.*no tensor"):
            _open(store, boxes=[Box("bias", Region((0,), (7,)))])

    def test_a_rank_may_hold_nothing(self, store: TensorStore) -> None:
        writer = _open(store, boxes=())
        assert writer.begin(10) == []
        assert writer.finish(10, {"step": 10}) == ()
        reader = store.reader(10)
        assert reader.boxes(0) == ()
        assert reader.progress(0) == {"step": 10}

    def test_a_commit_marks_all_ranks_of_the_node(self, store: TensorStore) -> None:
        for rank in range(2):
            _write(_open(store, rank), 10, rank)
        assert [held.committed for held in store.inventory()] == [False, False]
        store.commit(10, generation=1, ranks=[0, 1])
        store.commit(10, generation=1, ranks=[0, 1])
        assert [(held.rank, held.committed) for held in store.inventory()] == [(0, True), (1, True)]

    def test_a_commit_without_a_finished_rank_is_refused(self, store: TensorStore) -> None:
        _write(_open(store), 10)
        with pytest.raises(StoreError, match=r"10 can't be committed.*1"):
            store.commit(10, generation=1, ranks=[0, 1])
        assert not store.inventory()[0].committed

    def test_an_older_generation_stays_until_the_newer_has_committed(
        self, store: TensorStore
    ) -> None:
        _write(_open(store), 10)
        store.commit(10, generation=1, ranks=[0])
        writer = _open(store, generation=2)
        _write(writer, 20)
        with pytest.raises(StoreError, match="2 has not committed"):
            store.prune(2)
        _assert_holds(store.reader(10), 10)
        store.commit(20, generation=2, ranks=[0])
        assert store.prune(2) == (1,)
        assert store.prune(2) == ()
        assert [held.generation for held in store.inventory()] == [2]

    def test_the_newest_generation_is_read_unless_one_is_named(self, store: TensorStore) -> None:
        _write(_open(store), 10)
        _write(_open(store, generation=2), 10)
        assert store.reader(10).generation == 2
        assert store.reader(10, generation=1).generation == 1
        with pytest.raises(StoreError, match="of generation 3"):
            store.reader(10, generation=3)

    def test_a_rank_that_is_not_held_is_named(self, store: TensorStore) -> None:
        _write(_open(store), 10)
        with pytest.raises(StoreError, match="rank 5 is not held"):
            store.reader(10).boxes(5)

    def test_a_refused_progress_value_leaves_the_version_unfinished(
        self, store: TensorStore
    ) -> None:
        writer = _open(store)
        writer.begin(10)
        with pytest.raises(StoreError, match=r"progress\['object'\]"):
            writer.finish(10, {"object": object()})  # type: ignore[dict-item]  # the error's point
        assert store.inventory() == ()
        writer.finish(10, {"object": None})
        assert [held.version for held in store.inventory()] == [10]


class RankDiesError(Exception):
    """Raised by the body of a rank that is to die without a word at this point."""


class TransportWorld(ABC):
    """Starts ranks that have a transport between them."""

    @abstractmethod
    def run(
        self, body: Callable[..., Any], num_ranks: int, *args: object, may_die: Sequence[int] = ()
    ) -> list[Any]:
        """What `body(rank, transport, *args)` returns on each rank; None for a rank that dies.

        `body` is a function of a module. The first error of any rank is raised.
        """


class TransportContract:
    """Every `Transport`; subclasses give the fixture `world`."""

    def test_every_message_arrives_in_order_and_unchanged(self, world: TransportWorld) -> None:
        for got in world.run(_exchange_numbered, 3, (5, 1, 1 << 20)):
            assert got == "as sent"

    def test_empty_messages_and_empty_exchanges_pass(self, world: TransportWorld) -> None:
        for got in world.run(_exchange_numbered, 2, (0, 3, 0)):
            assert got == "as sent"
        for got in world.run(_exchange_numbered, 2, ()):
            assert got == "as sent"

    def test_a_pair_may_exchange_while_others_do_nothing(self, world: TransportWorld) -> None:
        assert world.run(_one_pair, 3) == [0, 1000, 0]

    def test_many_rounds_reuse_the_same_memory(self, world: TransportWorld) -> None:
        assert world.run(_many_rounds, 3, 200) == [True, True, True]

    def test_counted_bytes_are_the_bytes_that_were_sent(self, world: TransportWorld) -> None:
        rows = world.run(_traffic, 3)
        assert [sent for sent, _, _ in rows] == [2 * 10, 2 * 110, 2 * 210]
        assert [received for _, received, _ in rows] == [110 + 210, 10 + 210, 10 + 110]
        assert [messages for _, _, messages in rows] == [2, 2, 2]

    def test_payloads_of_unequal_size_are_gathered_in_rank_order(
        self, world: TransportWorld
    ) -> None:
        for payloads in ((b"a", b"", b"ccc"), (b"", b"", b""), (b"x" * 70_000, b"y", b"")):
            assert world.run(_gather, 3, payloads) == [list(payloads)] * 3

    def test_all_ranks_agree_on_the_largest_values(self, world: TransportWorld) -> None:
        rows = [(1, -5, 1 << 47), (0, -7, -(1 << 47)), (2, -9, 0)]
        assert world.run(_agree, 3, rows) == [[2, -5, 1 << 47]] * 3

    def test_one_rank_alone_talks_to_itself(self, world: TransportWorld) -> None:
        assert world.run(_gather, 1, (b"mine",)) == [[b"mine"]]
        assert world.run(_agree, 1, [(3, -4)]) == [[3, -4]]

    @pytest.mark.parametrize("operation", ["exchange", "gather", "agree"])
    def test_a_dead_peer_is_an_error_at_once(self, world: TransportWorld, operation: str) -> None:
        (text, seconds), dead = world.run(_meet_a_dead_peer, 2, operation, may_die=[1])
        assert dead is None
        assert "rank 0 of 2" in text
        assert seconds < 10

    @pytest.mark.parametrize("operation", ["exchange", "gather", "agree"])
    def test_a_silent_peer_is_an_error_in_time(self, world: TransportWorld, operation: str) -> None:
        text, seconds = world.run(_meet_a_silent_peer, 2, operation)[0]
        assert "rank 0 of 2" in text
        assert 0.3 < seconds < 10


_TIMEOUT_S = 60.0


def _numbered(sender: int, receiver: int, index: int, nbytes: int) -> torch.Tensor:
    start = sender * 7 + receiver * 31 + index * 3
    return (torch.arange(start, start + nbytes) % 251).to(torch.uint8)


def _exchange_numbered(rank: int, transport: Transport, sizes: Sequence[int]) -> str:
    peers = range(len(transport.gather(b"", timeout_s=_TIMEOUT_S)))
    others = [peer for peer in peers if peer != rank]
    sends = {
        peer: [_numbered(rank, peer, index, nbytes) for index, nbytes in enumerate(sizes)]
        for peer in others
    }
    receives = {peer: [torch.zeros(n, dtype=torch.uint8) for n in sizes] for peer in others}
    transport.exchange(sends, receives, timeout_s=_TIMEOUT_S)
    for peer, row in receives.items():
        for index, tensor in enumerate(row):
            expected = _numbered(peer, rank, index, sizes[index])
            assert torch.equal(tensor, expected), f"message {index} of rank {peer} is wrong"
    return "as sent"


def _one_pair(rank: int, transport: Transport) -> int:
    landing = torch.zeros(1000, dtype=torch.uint8)
    sends = {1: [torch.ones(1000, dtype=torch.uint8)]} if rank == 0 else {}
    receives = {0: [landing]} if rank == 1 else {}
    transport.exchange(sends, receives, timeout_s=_TIMEOUT_S)
    return int(landing.sum())


def _many_rounds(rank: int, transport: Transport, rounds: int) -> bool:
    after, before = (rank + 1) % 3, (rank - 1) % 3
    leaving = torch.empty(100, dtype=torch.uint8)
    landing = torch.empty(100, dtype=torch.uint8)
    for number in range(rounds):
        leaving.fill_((number + rank) % 256)
        landing.fill_(255)
        transport.exchange({after: [leaving]}, {before: [landing]}, timeout_s=_TIMEOUT_S)
        if not bool((landing == (number + before) % 256).all()):
            return False
    return True


def _traffic(rank: int, transport: Transport) -> tuple[int, int, int]:
    peers = [peer for peer in range(3) if peer != rank]
    transport.gather(b"not counted", timeout_s=_TIMEOUT_S)
    transport.exchange(
        {peer: [torch.zeros(100 * rank + 10, dtype=torch.uint8)] for peer in peers},
        {peer: [torch.zeros(100 * peer + 10, dtype=torch.uint8)] for peer in peers},
        timeout_s=_TIMEOUT_S,
    )
    traffic = transport.traffic
    return traffic.sent_bytes, traffic.received_bytes, traffic.messages


def _gather(rank: int, transport: Transport, payloads: Sequence[bytes]) -> list[bytes]:
    return transport.gather(payloads[rank], timeout_s=_TIMEOUT_S)


def _agree(rank: int, transport: Transport, rows: Sequence[Sequence[int]]) -> list[int]:
    return transport.agree(rows[rank], timeout_s=_TIMEOUT_S)


def _call(transport: Transport, operation: str, timeout_s: float) -> None:
    if operation == "exchange":
        landing = torch.zeros(8, dtype=torch.uint8)
        transport.exchange({}, {1: [landing]}, timeout_s=timeout_s)
    elif operation == "gather":
        transport.gather(b"from rank 0", timeout_s=timeout_s)
    else:
        transport.agree([1], timeout_s=timeout_s)


def _expect_error(transport: Transport, operation: str, timeout_s: float) -> tuple[str, float]:
    started = time.monotonic()
    try:
        _call(transport, operation, timeout_s)
    except TransportError as error:
        return str(error), time.monotonic() - started
    return "no error", time.monotonic() - started


def _meet_a_dead_peer(rank: int, transport: Transport, operation: str) -> tuple[str, float]:
    transport.gather(b"both are here", timeout_s=_TIMEOUT_S)
    if rank == 1:
        raise RankDiesError
    return _expect_error(transport, operation, _TIMEOUT_S)


def _meet_a_silent_peer(rank: int, transport: Transport, operation: str) -> tuple[str, float]:
    transport.gather(b"both are here", timeout_s=_TIMEOUT_S)
    if rank == 1:
        time.sleep(1.5)
        return "", 0.0
    return _expect_error(transport, operation, 0.4)
