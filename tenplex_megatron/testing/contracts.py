"""What must every implementation of an interface do? One suite of tests per interface.

The test file of an implementation subclasses the suite and gives it a fixture.
"""
# ruff: noqa: D102  # the names of these tests are sentences

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pytest

from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import StoreError
from tenplex_megatron.store.base import TensorReader, TensorStore, TensorWriter
from tenplex_megatron.store.values import PlainValue

__all__ = ["StoreContract"]

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
