"""What every test gets: one thread per process, a mark and a time limit by folder, no leftovers."""

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch or numpy is imported: a test machine has few cores, and ranks share them.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
# Every process that a test starts inherits this, also one whose parent is gone.
RUN_MARK = f"PYTEST_RUN_MARK={os.getpid()}-{time.time_ns()}"
os.environ.update([RUN_MARK.split("=")])

settings.register_profile("same_on_every_run", derandomize=True, deadline=None, database=None)
settings.load_profile("same_on_every_run")

TESTS = Path(__file__).parent
MARK_AND_TIMEOUT_S = {
    "unit": ("unit", 120),
    "oracle": ("unit", 120),
    "golden": ("unit", 120),
    "dist": ("dist", 180),
    "end_to_end": ("slow", 900),
}
GRACE_S = 3.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        inside_tests = item.path.is_relative_to(TESTS)
        folder = item.path.relative_to(TESTS).parts[0] if inside_tests else "unit"
        mark, timeout_s = MARK_AND_TIMEOUT_S[folder]
        item.add_marker(mark)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(timeout_s))


def _is_running(process: Path) -> bool:
    try:
        return process.joinpath("stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _children() -> set[int]:
    listed = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended meanwhile
            listed.update(map(int, thread.joinpath("children").read_text().split()))
    return {pid for pid in listed if _is_running(Path(f"/proc/{pid}"))}


def _started_by_this_run() -> set[int]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            marked = RUN_MARK.encode() in process.joinpath("environ").read_bytes()
        except OSError:
            continue
        if marked and _is_running(process):
            found.add(int(process.name))
    return found


def _kept_for_the_session() -> set[int | None]:
    """The two servers of `multiprocessing`, which live as long as this process on purpose."""
    server = forkserver._forkserver  # type: ignore[attr-defined]  # no public way to its pid
    tracker = resource_tracker._resource_tracker
    return {server._forkserver_pid, tracker._pid}  # type: ignore[attr-defined]  # likewise


@pytest.fixture(autouse=True)
def no_process_left_alive(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that ends while a process it started still runs, and kills that process."""
    # Reading all of /proc costs milliseconds: too much for each of thousands of pure tests.
    starts_processes = request.node.get_closest_marker("unit") is None
    alive = _started_by_this_run if starts_processes else _children
    before = alive()
    yield
    multiprocessing.active_children()  # Joins the finished ones.
    give_up = time.monotonic() + GRACE_S
    while left := alive() - before - _kept_for_the_session():
        if time.monotonic() > give_up:
            break
        time.sleep(0.02)
    names = [f"{pid}: {_command(pid)}" for pid in sorted(left)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not names, f"processes still running {GRACE_S} s after the test: {names}"


def _command(pid: int) -> str:
    raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()


@pytest.fixture
def store_directory() -> Iterator[Path]:
    """An empty folder on tmpfs where snapshots may be written; gone after the test."""
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="tenplex-test-", dir=root))
    yield path
    shutil.rmtree(path, ignore_errors=True)
