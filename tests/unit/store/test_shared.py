import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import StoreError
from tenplex_megatron.store import (
    SnapshotStore,
    SnapshotWriter,
    TensorStore,
    WorldVersion,
    default_root,
    node_directory,
    read_job,
    select_version,
)
from tenplex_megatron.store.index import seal
from tenplex_megatron.testing.contracts import StoreContract

SPECS = {
    "layer.weight": TensorSpec("layer.weight", (4, 6), "float32"),
    "layer.bias": TensorSpec("layer.bias", (6,), "bfloat16"),
    "step": TensorSpec("step", (), "float32"),
    "none": TensorSpec("none", (0, 3), "int64"),
}
BOXES = (
    Box("layer.weight", Region((2, 0), (4, 6))),
    Box("layer.bias", Region((0,), (6,))),
    Box("step", Region((), ())),
    Box("none", Region((0, 0), (0, 3))),
)


class TestSnapshotStore(StoreContract):
    @pytest.fixture
    def store(self, store_directory: Path) -> TensorStore:
        return SnapshotStore(store_directory / "job" / "node", "job", "model").create()


@pytest.fixture
def store(store_directory: Path) -> SnapshotStore:
    return SnapshotStore(store_directory / "job" / "node", "job", "model").create()


def open_writer(store: SnapshotStore, rank: int = 0, *, generation: int = 1) -> SnapshotWriter:
    return store.writer(rank, 2, generation=generation, layout={}, specs=SPECS, boxes=BOXES)


def write(writer: SnapshotWriter, version: int) -> None:
    for box_index, view in enumerate(writer.begin(version)):
        view[:] = bytes((version + box_index + at) % 251 for at in range(len(view)))
    writer.finish(version, {"step": version})


def write_two(store: SnapshotStore) -> None:
    """Versions 10 and 20 of both ranks, in slots 0 and 1, both committed."""
    for rank in range(2):
        writer = open_writer(store, rank)
        write(writer, 10)
        write(writer, 20)
        writer.close()
    store.commit(20, generation=1, ranks=[0, 1])


def path_of(store: SnapshotStore, name: str) -> Path:
    return store.directory / "gen-0001" / name


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def choose(store: SnapshotStore) -> tuple[int | None, str]:
    """The version to start from, and what was said of the newer ones."""

    def check(candidate: WorldVersion) -> tuple[str, ...]:
        return store.reader(candidate.version, generation=candidate.generation).problems()

    selection = select_version({"node": store.inventory()}, check)
    said = " ".join(reason for r in selection.rejected for reason in r.reasons)
    return (selection.chosen.version if selection.chosen else None), said


# Reports 8, 9, 34 and 35 of what others lost runs to.


def test_a_flipped_byte_in_a_replica_is_detected_and_the_older_version_is_used(
    store: SnapshotStore,
) -> None:
    write_two(store)
    flip(path_of(store, "rank-00001.slot1.data"), 7)
    version, said = choose(store)
    assert version == 10
    assert "rank-00001.slot1.data: layer.weight [2:4, 0:6] of version 20 is damaged" in said
    flip(path_of(store, "rank-00000.slot0.data"), 7)
    version, said = choose(store)
    assert version is None
    assert "rank-00000.slot0.data" in said


def test_a_bit_flip_in_any_byte_of_a_shard_never_loads_silently(store: SnapshotStore) -> None:
    write_two(store)
    path = path_of(store, "rank-00000.slot1.data")
    reader = store.reader(20)
    for index, box in enumerate(reader.boxes(0)):
        for offset in range(box.offset, box.offset + box.nbytes):
            flip(path, offset)
            with pytest.raises(StoreError, match=box.tensor):
                reader.verify(0, index)
            flip(path, offset)
            reader.verify(0, index)


def test_a_version_does_not_move_on_before_every_shard_is_written(store: SnapshotStore) -> None:
    """Reports of `latest` naming zero-byte shards, or 123 of 128: no such state is ever chosen."""
    write_two(store)
    writer = open_writer(store, 0)
    write(writer, 30)
    assert choose(store) == (20, "no node holds ranks (1,)")
    path_of(store, "rank-00001.slot1.data").write_bytes(b"")
    assert choose(store)[0] is None  # rank 0 overwrote 10 only after all had committed 20
    assert store.committed_version(1) == 20


def test_a_missing_job_record_is_an_error_and_not_a_fresh_start(store: SnapshotStore) -> None:
    write_two(store)
    (store.directory / "job.json").unlink()
    with pytest.raises(StoreError, match=r"job.json: missing; there are no snapshots here"):
        store.open_existing()


def test_reading_while_the_next_version_is_written_gives_the_old_bytes(
    store: SnapshotStore,
) -> None:
    write_two(store)
    reader = store.reader(20)
    writer = open_writer(store)
    for view in writer.begin(30):
        view[:] = bytes(len(view))
    assert reader.problems() == ()
    writer.close()
    assert reader.problems() == ()


# Damage


@pytest.mark.parametrize("size", [0, 1, 64, 75])
def test_a_truncated_data_file_is_reported_and_never_mapped(
    store: SnapshotStore, size: int
) -> None:
    write_two(store)
    reader = store.reader(20)
    path = path_of(store, "rank-00001.slot1.data")
    with path.open("r+b") as file:
        file.truncate(size)
    (damaged,) = store.examine().damaged
    assert f"truncated to {size} bytes, expected" in damaged.reason
    with pytest.raises(StoreError, match=f"slot1.data: truncated to {size} bytes"):
        reader.verify(1, 0)
    assert choose(store)[0] == 10


def test_a_missing_data_file_is_reported(store: SnapshotStore) -> None:
    write_two(store)
    reader = store.reader(20)
    path_of(store, "rank-00001.slot1.data").unlink()
    with pytest.raises(StoreError, match=r"slot1.data: missing"):
        reader.verify(1, 0)
    assert "truncated to 0 bytes" in store.examine().damaged[0].reason


def test_an_index_cut_or_flipped_anywhere_is_skipped_and_reported(store: SnapshotStore) -> None:
    write_two(store)
    path = path_of(store, "rank-00001.slot1.json")
    good = path.read_bytes()
    broken = [good[:cut] for cut in range(0, len(good), 37)]
    for at in range(0, len(good), 5):
        changed = bytearray(good)
        changed[at] ^= 0x10
        broken.append(bytes(changed))
    broken += [b"{}", b"[]", b"null", b"\xff\xfe", good + b"\n", good[:-1] + b" }"]
    for content in broken:
        path.write_bytes(content)
        inventory = store.examine()
        assert [d.path for d in inventory.damaged] == [str(path)], content
        assert len(inventory.snapshots) == 3
    assert choose(store)[0] == 10


def test_a_damaged_manifest_only_loses_the_mark(store: SnapshotStore) -> None:
    write_two(store)
    flip(path_of(store, "manifest-000000000020.json"), 20)
    inventory = store.examine()
    assert len(inventory.damaged) == 1
    assert not any(held.committed for held in inventory.snapshots)
    assert choose(store) == (20, "")


def test_an_index_of_another_job_or_generation_is_skipped(store: SnapshotStore) -> None:
    write_two(store)
    other = SnapshotStore(store.directory.parent / "other", "other", "model").create()
    write(open_writer(other), 30)
    for kind in ("json", "data"):
        name = f"rank-00000.slot0.{kind}"
        shutil.copyfile(other.directory / "gen-0001" / name, path_of(store, name))
    (damaged,) = store.examine().damaged
    assert "belongs to job 'other' generation 1, expected job 'job' generation 1" in damaged.reason


def test_a_writer_overwrites_what_is_damaged(store: SnapshotStore) -> None:
    write_two(store)
    path_of(store, "rank-00000.slot1.json").write_bytes(b"{")
    path_of(store, "rank-00000.slot0.data").write_bytes(b"")
    writer = open_writer(store)
    assert writer.newest is None
    write(writer, 30)
    write(writer, 40)
    assert [held.version for held in store.inventory() if held.rank == 0] == [30, 40]


# Whose snapshots


def test_another_job_or_identity_is_refused_with_both_names(store: SnapshotStore) -> None:
    for job, identity in (("other", "model"), ("job", "larger model")):
        intruder = SnapshotStore(store.directory, job, identity)
        for action in (intruder.create, intruder.open_existing):
            with pytest.raises(StoreError, match=rf"job 'job' \(model\), expected job '{job}'"):
                action()
        with pytest.raises(StoreError, match="expected job"):
            intruder.remove()
    assert read_job(store.directory).identity == "model"


def test_another_format_is_refused_by_its_number(store: SnapshotStore) -> None:
    write_two(store)
    index = path_of(store, "rank-00000.slot1.json")
    for path in (index, store.directory / "job.json"):
        record = json.loads(path.read_bytes())
        del record["digest"]
        path.write_bytes(seal(record | {"format": 2})[0])
    (damaged,) = store.examine().damaged
    assert "written in format 2, expected format 1" in damaged.reason
    with pytest.raises(StoreError, match=r"job.json: written in format 2, expected format 1"):
        store.open_existing()


@pytest.mark.parametrize("name", ["", "..", ".", "a/b", "-x", ".hidden", "a\0b", "x" * 101, "ü"])
def test_a_name_that_could_leave_its_directory_is_refused(name: str) -> None:
    with pytest.raises(StoreError, match="job name"):
        node_directory(default_root(), name, "node")
    with pytest.raises(StoreError, match="node name"):
        node_directory(default_root(), "job", name)


def test_the_default_place_is_shared_memory_of_this_user() -> None:
    path = node_directory(default_root(), "job-1", "host.example")
    assert path.parts[:3] == ("/", "dev", "shm")
    assert path.parts[-2:] == ("job-1", "host.example")


def test_everything_a_job_writes_is_for_its_owner_only(store: SnapshotStore) -> None:
    write_two(store)
    for path in (store.directory, *store.directory.rglob("*")):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_removing_leaves_nothing_of_this_job_and_everything_of_others(
    store: SnapshotStore,
) -> None:
    write_two(store)
    other = SnapshotStore(store.directory.parent / "other", "job", "model").create()
    store.remove()
    assert not store.directory.exists()
    assert other.open_existing() is other
    with pytest.raises(StoreError):
        store.remove()


CREATE_AND_WRITE = """
import sys
from pathlib import Path
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.store import SnapshotStore

rank = int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
store = SnapshotStore(Path(sys.argv[1]), "job", "model").create()
writer = store.writer(
    rank,
    2,
    generation=1,
    layout={},
    specs={"w": TensorSpec("w", (4,), "float32")},
    boxes=[Box("w", Region((0,), (4,)))],
)
writer.begin(10)
writer.finish(10, {})
"""


def test_several_processes_may_create_the_store_at_once(store_directory: Path) -> None:
    directory = store_directory / "root" / "job" / "node"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CREATE_AND_WRITE, str(directory), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=30)
        assert process.returncode == 0
    store = SnapshotStore(directory, "job", "model").open_existing()
    assert [held.rank for held in store.inventory()] == [0, 1]


# Writers and readers


def test_a_rank_has_one_writer(store: SnapshotStore) -> None:
    writer = open_writer(store)
    with pytest.raises(StoreError, match="another process is writing it"):
        open_writer(store)
    writer.close()
    open_writer(store, 1)


def test_a_new_writer_of_the_same_generation_goes_on(store: SnapshotStore) -> None:
    write_two(store)
    writer = open_writer(store)
    assert writer.newest == 20
    writer.begin(30)
    held = [snapshot.version for snapshot in store.inventory() if snapshot.rank == 0]
    assert held == [20]


def test_other_boxes_need_a_new_generation(store: SnapshotStore) -> None:
    write_two(store)
    with pytest.raises(StoreError, match=r"holds other boxes.*use a new generation"):
        store.writer(0, 2, generation=1, layout={}, specs=SPECS, boxes=BOXES[:1])
    assert choose(store)[0] == 20
    with pytest.raises(StoreError, match="rank 2 is outside"):
        open_writer(store, 2)


def test_no_version_begins_while_another_is_being_finished(store: SnapshotStore) -> None:
    writer = open_writer(store)
    writer.begin(10)
    with writer._lock, pytest.raises(StoreError, match="20 can't begin while another"):
        writer.begin(20)


def test_the_memory_of_a_slot_stays_where_it_is(store: SnapshotStore) -> None:
    writer = open_writer(store)
    places = [writer.address(slot) for slot in (0, 1)]
    buffers = writer.buffers
    for version in range(1, 7):
        views = writer.begin(version)
        start = np.frombuffer(views[0], np.uint8).ctypes.data
        assert start in places
        assert all(
            (np.frombuffer(view, np.uint8).ctypes.data - start) % 64 == 0
            for view in views
            if len(view)
        )
        writer.finish(version, {})
    assert places == [writer.address(slot) for slot in (0, 1)]
    assert all(old is new for old, new in zip(buffers, writer.buffers, strict=True))


def test_entering_pages_ahead_changes_no_byte(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_two(store)
    monkeypatch.setattr("tenplex_megatron.store.pages._CHUNK_BYTES", 4096)
    open_writer(store).close()
    writer = open_writer(store)
    writer.close()
    assert store.reader(10).problems() == store.reader(20).problems() == ()


def test_a_reader_copies_nothing(store: SnapshotStore) -> None:
    write_two(store)
    reader = store.reader(20)
    first = np.frombuffer(reader.view(0, 0), np.uint8)
    assert np.shares_memory(first, np.frombuffer(reader.view(0, 0), np.uint8))
    path = path_of(store, "rank-00000.slot1.data")
    assert not np.shares_memory(first, np.frombuffer(reader.view(1, 0), np.uint8))
    before = int(first[3])
    flip(path, 3)
    assert int(first[3]) == before ^ 0x10
    reader.close()
    assert int(first[3]) == before ^ 0x10  # a view outlives its reader


def test_digests_are_the_same_for_any_number_of_threads(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenplex_megatron.store.writer._PARALLEL_DIGEST_BYTES", 1)
    writer = open_writer(store)
    views = writer.begin(10)
    for view in views:
        view[:] = bytes(range(len(view)))
    assert writer.finish(10, {}) == tuple(xxhash.xxh3_128_hexdigest(view) for view in views)


def test_ranks_that_contradict_each_other_are_refused(store: SnapshotStore) -> None:
    write(open_writer(store), 10)
    writer = store.writer(1, 2, generation=1, layout={"tp": 2}, specs=SPECS, boxes=BOXES)
    write(writer, 10)
    with pytest.raises(StoreError, match="rank 1 was written in layout"):
        store.reader(10)
    with pytest.raises(StoreError, match="rank 1 was written in layout"):
        store.commit(10, generation=1, ranks=[0, 1])


def test_ranks_that_describe_a_tensor_differently_are_refused(store: SnapshotStore) -> None:
    write(open_writer(store), 10)
    specs = SPECS | {"step": TensorSpec("step", (), "float64")}
    writer = store.writer(1, 2, generation=1, layout={}, specs=specs, boxes=BOXES)
    write(writer, 10)
    with pytest.raises(StoreError, match=r"rank 1 says .*step"):
        store.reader(10)


def test_a_manifest_of_a_rewritten_index_does_not_count(store: SnapshotStore) -> None:
    write_two(store)
    kept = path_of(store, "manifest-000000000020.json").read_bytes()
    other = open_writer(store, 0, generation=2)
    for view in other.begin(20):
        view[:] = bytes(len(view))
    other.finish(20, {})
    content = json.loads(kept)
    del content["digest"]
    target = store.directory / "gen-0002" / "manifest-000000000020.json"
    target.write_bytes(seal(content | {"generation": 2})[0])
    target.chmod(0o600)
    marks = {(h.generation, h.rank): h.committed for h in store.inventory() if h.version == 20}
    assert marks == {(1, 0): True, (1, 1): True, (2, 0): False}
