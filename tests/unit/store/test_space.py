import ctypes
import errno
import os
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import SpaceError
from tenplex_megatron.store import SnapshotStore, SnapshotWriter, check_space, free_bytes, space

SMALL_BYTES = 1 << 20


@pytest.fixture
def small_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on a file system of 1 MiB: a real one where mounting is allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = tmp_path / "small"
    place.mkdir(mode=0o700)
    options = f"size={SMALL_BYTES},mode=0700".encode()
    mounted = not libc.mount(b"tmpfs", bytes(place), b"tmpfs", 0, options)
    if not mounted:
        _pretend_small(monkeypatch)
    yield place
    if mounted:
        libc.umount2(bytes(place), 2)


def _pretend_small(monkeypatch: pytest.MonkeyPatch) -> None:
    statvfs = os.statvfs
    fallocate = os.posix_fallocate
    taken: dict[int, int] = {}

    def small_statvfs(path: Path) -> os.statvfs_result:
        values = list(statvfs(path))
        free = SMALL_BYTES - sum(taken.values())
        values[1], values[4] = 1, free
        return os.statvfs_result(values)

    def small_fallocate(descriptor: int, offset: int, nbytes: int) -> None:
        inode = os.fstat(descriptor).st_ino
        taken[inode] = offset + nbytes
        if sum(taken.values()) > SMALL_BYTES:
            del taken[inode]
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fallocate(descriptor, offset, nbytes)

    monkeypatch.setattr(os, "statvfs", small_statvfs)
    monkeypatch.setattr(os, "posix_fallocate", small_fallocate)


def open_writer(directory: Path, nbytes: int, rank: int = 0) -> SnapshotWriter:
    store = SnapshotStore(directory / "job" / "node", "job", "model").create()
    specs = {"weight": TensorSpec("weight", (nbytes,), "uint8")}
    boxes = [Box("weight", Region.full((nbytes,)))]
    return store.writer(rank, 8, generation=1, layout={}, specs=specs, boxes=boxes)


def test_a_tmpfs_that_is_too_small_is_refused_before_training_and_left_empty(
    small_directory: Path,
) -> None:
    with pytest.raises(SpaceError) as caught:
        open_writer(small_directory, 600_000)
    text = str(caught.value)
    assert str(small_directory) in text
    assert "snapshots need 1,20" in text
    assert "are missing" in text
    assert "snapshot.directory" in text
    assert "docker --shm-size" in text
    assert not list(small_directory.rglob("*.data"))
    open_writer(small_directory, 300_000).close()


def test_two_ranks_that_both_saw_room_do_not_die_later(
    small_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_writer(small_directory, 400_000).close()
    monkeypatch.setattr("tenplex_megatron.store.writer.check_space", lambda *_: None)
    with pytest.raises(SpaceError, match=r"can't reserve 400,000 bytes .*docker --shm-size"):
        open_writer(small_directory, 400_000, rank=1)
    assert {path.name[:10] for path in small_directory.rglob("*.data")} == {"rank-00000"}
    open_writer(small_directory, 50_000, rank=1).close()


def test_a_version_that_can_not_be_finished_for_space_spares_the_older(
    small_directory: Path,
) -> None:
    writer = open_writer(small_directory, 100_000)
    store = SnapshotStore(small_directory / "job" / "node", "job", "model")
    for version in (10, 20):
        writer.begin(version)
        writer.finish(version, {})
    writer.begin(30)
    too_much = partial(writer.finish, 30, {"blob": bytes(2 * SMALL_BYTES)})
    fail = too_much if small_directory.is_mount() else partial(_finish_without_space, writer)
    with pytest.raises(SpaceError, match=r"json: no space to write it"):
        fail()
    assert [held.version for held in store.inventory()] == [20]
    writer.finish(30, {"blob": b""})
    assert [held.version for held in store.inventory()] == [20, 30]


def _finish_without_space(writer: SnapshotWriter) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, old[1]))
    try:
        writer.finish(30, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_limit_on_file_size_is_named(tmp_path: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
    try:
        with pytest.raises(SpaceError, match=r"ulimit -f"):
            open_writer(tmp_path, 200_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_every_byte_of_both_slots_is_reserved(store_directory: Path) -> None:
    writer = open_writer(store_directory, 300_000)
    held = [path.stat().st_blocks * 512 for path in store_directory.rglob("*.data")]
    assert len(held) == 2
    assert min(held) >= 300_000 == writer.slot_bytes


def test_space_is_asked_of_the_nearest_directory_that_exists(store_directory: Path) -> None:
    assert free_bytes(store_directory / "not" / "yet") > 0
    check_space(store_directory / "not" / "yet", 1000)
    with pytest.raises(SpaceError, match="not/yet: snapshots need"):
        check_space(store_directory / "not" / "yet", 1 << 60)


def test_a_container_with_less_memory_than_its_tmpfs_is_refused(
    store_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "_is_in_memory", lambda _: True)
    monkeypatch.setattr(space, "_memory_limits", lambda: [5000, 1 << 60])
    with pytest.raises(SpaceError, match=r"5,000 bytes are free.*more memory"):
        check_space(store_directory, 6000)
    check_space(store_directory, 5000)


def test_limits_of_the_node_and_of_every_control_group_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {
        "/proc/meminfo": ["MemAvailable:    70 kB", "SwapFree:     10 kB"],
        "/proc/self/cgroup": ["0::/pod/task"],
        "/sys/fs/cgroup/pod/task/memory.max": ["max"],
        "/sys/fs/cgroup/pod/task/memory.current": ["7"],
        "/sys/fs/cgroup/pod/memory.max": ["5000"],
        "/sys/fs/cgroup/pod/memory.current": ["3000"],
        "/sys/fs/cgroup/pod/memory.stat": ["anon 1", "inactive_file 400"],
    }
    monkeypatch.setattr(space, "_lines", lambda path: content.get(str(path), []))
    assert list(space._memory_limits()) == [80 << 10, 2400]


def test_tmpfs_is_recognised() -> None:
    if Path("/dev/shm").is_mount():
        assert space._is_in_memory(Path("/dev/shm"))
    assert not space._is_in_memory(Path("/proc"))
