"""A flipped byte in a snapshot is named, never trained on, and the older version is used."""

from pathlib import Path

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.elastic.records import SNAPSHOT_DAMAGED, Source
from tenplex_megatron.elastic.report import read_run
from tenplex_megatron.store.selection import world_versions
from tenplex_megatron.store.shared import SnapshotStore
from tests.end_to_end.megatron_jobs import Job

STEPS = 4
DISTRIBUTED = "--use-distributed-optimizer"


def test_a_flipped_byte_leads_to_the_older_version(
    tmp_path: Path, store_directory: Path, dataset: Path
) -> None:
    plain = Job(tmp_path / "plain", store_directory / "plain", dataset, STEPS, (DISTRIBUTED,))
    expected = plain.run([("DP2", STEPS)])
    job = Job(tmp_path / "job", store_directory / "job", dataset, STEPS, (DISTRIBUTED,))
    job.folder.mkdir(mode=0o700)
    layout, single = ParallelLayout.parse("DP2"), ParallelLayout()
    nodes = {0: "here", 1: "here"}

    first = job.spec(1, layout, 3, source=None, last=False)
    job.generation(first, [layout, single])
    store = SnapshotStore(job.store, "test", "test").open_existing()
    flip_a_byte(store, version=3)

    second = job.spec(2, single, STEPS, source=Source(3, 1, 2, nodes), last=True)
    assert job.generation(second, [layout, single]) == [SNAPSHOT_DAMAGED]
    assert "is damaged: expected digest" in job.errors(2)
    complete = [v.version for v in world_versions({"here": store.inventory()}) if v.complete]
    assert complete == [2]

    third = job.spec(3, single, STEPS, source=Source(2, 1, 2, nodes), last=True)
    assert job.generation(third, [layout, single]) == [0]
    found = read_run([job.folder]).losses
    assert max(abs(found[step] - expected.losses[step]) for step in expected.losses) <= 2e-5


def flip_a_byte(store: SnapshotStore, version: int) -> None:
    """In the middle of the largest box of rank 1."""
    reader = store.reader(version)
    box = max(reader.boxes(1), key=lambda stored: stored.nbytes)
    directory = store.directory / "gen-0001"
    for path in sorted(directory.glob("rank-00001.slot?.json")):
        if f'"version":{version}' in path.read_text():
            with path.with_suffix(".data").open("r+b") as file:
                file.seek(box.offset + box.nbytes // 2)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))
            return
    raise AssertionError(f"version {version} of rank 1 has no index in {directory}")
