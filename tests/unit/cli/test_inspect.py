import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint

from tenplex_megatron.cli.main import main
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.store.shared import SnapshotStore, node_directory

SPECS = {"w": TensorSpec("w", (4, 6), "float32"), "step": TensorSpec("step", (), "int64")}
LAYOUT = {"tp": 2, "pp": 1, "dp": 1}


def boxes(rank: int) -> list[Box]:
    half = Region((2 * rank, 0), (2 * rank + 2, 6))
    return [Box("step", Region((), ())), Box("w", half)]


def write(root: Path, node: str, rank: int, *, versions: tuple[int, ...] = (1, 2)) -> SnapshotStore:
    store = SnapshotStore(node_directory(root, "gpt", node), "gpt", "same").create()
    writer = store.writer(rank, 2, generation=1, layout=LAYOUT, specs=SPECS, boxes=boxes(rank))
    for version in versions:
        for view in writer.begin(version):
            view[:] = bytes([version]) * view.nbytes
        writer.finish(version, {"step": version})
    writer.close()
    store.commit(versions[0], generation=1, ranks=[rank])
    return store


@pytest.fixture
def root(store_directory: Path) -> Path:
    for rank, node in enumerate(("a", "b")):
        write(store_directory, node, rank)
    return store_directory


def inspect(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, Any]:
    code = main(["inspect", "--json", *map(str, arguments)])
    return code, json.loads(capsys.readouterr().out)


def flip(root: Path, pattern: str) -> Path:
    (path,) = root.glob(pattern)
    content = bytearray(path.read_bytes())
    content[64] ^= 1
    path.write_bytes(content)
    return path


def test_all_versions_of_all_nodes_are_listed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, values = inspect(capsys, root)
    (job,) = values["jobs"]
    assert (code, values["sound"], job["job"], sorted(job["nodes"])) == (0, True, "gpt", ["a", "b"])
    newest, older = job["versions"]
    assert (newest["version"], newest["committed"], older["committed"]) == (2, False, True)
    assert newest["ranks"] == {"0": ["a"], "1": ["b"]}
    assert newest["layout"] == "TP2,PP1,DP1"
    assert newest["bytes"] == 2 * (48 + 8)
    assert newest["digests"] == "ok"
    assert job["newest_complete"] == 2


@pytest.mark.parametrize("where", ["", "gpt", "gpt/a"])
def test_the_root_a_job_and_a_node_may_be_named(
    root: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    code, values = inspect(capsys, root / where)
    (job,) = values["jobs"]
    missing = [1] if where == "gpt/a" else []
    assert (code, job["versions"][0]["missing_ranks"]) == (0, missing)


def test_a_job_is_found_by_its_name(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, values = inspect(capsys, root, "--job", "gpt")
    assert (code, values["path"]) == (0, str(root / "gpt"))


def test_tensors_are_listed_with_regions_and_holders(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, values = inspect(capsys, root, "--tensors")
    step, w = values["jobs"][0]["tensors"]
    assert (step["name"], step["shape"], step["regions"], step["holders"]) == (
        "step",
        [],
        1,
        [0, 1],
    )
    assert (w["shape"], w["dtype"], w["bytes"]) == ([4, 6], "float32", 96)
    assert (w["regions"], w["holders"]) == (2, [0, 1])


def test_a_flipped_bit_is_found_and_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = flip(root, "gpt/b/gen-0001/rank-00001.slot1.data")
    code, values = inspect(capsys, root)
    newest, older = values["jobs"][0]["versions"]
    assert (code, newest["digests"], older["digests"]) == (1, "damaged", "ok")
    (problem,) = newest["problems"]
    assert str(path) in problem
    assert "w [2:4, 0:6]" in problem


def test_without_digests_a_flipped_bit_is_not_found(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(root, "gpt/b/gen-0001/rank-00001.slot1.data")
    code, values = inspect(capsys, root, "--no-verify")
    assert (code, values["jobs"][0]["versions"][0]["digests"]) == (0, "not read")


def test_a_torn_index_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = flip(root, "gpt/a/gen-0001/rank-00000.slot1.json")
    code, values = inspect(capsys, root)
    (job,) = values["jobs"]
    (file,) = job["damaged_files"]
    assert (code, file["node"], file["file"]) == (1, "a", str(path))
    assert (job["versions"][0]["missing_ranks"], job["newest_complete"]) == ([0], 1)


def test_what_a_job_took_out_of_use_is_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(root, "c", 1).quarantine(2, generation=1, rank=1)
    code, values = inspect(capsys, root)
    (file,) = values["jobs"][0]["damaged_files"]
    assert (code, file["node"]) == (1, "c")
    assert file["file"].endswith("rank-00001.slot1.damaged")


@pytest.mark.parametrize("width", [40, 120])
def test_a_person_reads_the_same_on_any_terminal(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    path = flip(root, "gpt/b/gen-0001/rank-00001.slot1.data")
    assert main(["inspect", "--tensors", str(root)]) == 1
    lines = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= width
    text = "".join(lines)
    for expected in ("gpt", "TP2,PP1,DP1", path.name, "not sound", "4x6"):
        assert expected in text


def test_piped_every_tensor_is_one_line_with_its_whole_name(
    store_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "optimizer.state.exp_avg_sq.decoder.layers.self_attention.linear_qkv.weight" * 2
    specs = {name: TensorSpec(name, (4, 6), "float32")}
    store = SnapshotStore(node_directory(store_directory, "gpt", "a"), "gpt", "same").create()
    whole = [Box(name, Region((0, 0), (4, 6)))]
    layout = {"tp": 1, "pp": 1, "dp": 1}
    writer = store.writer(0, 1, generation=1, layout=layout, specs=specs, boxes=whole)
    for view in writer.begin(1):
        view[:] = bytes(view.nbytes)
    writer.finish(1, {"step": 1})
    writer.close()
    assert main(["inspect", "--tensors", str(store_directory)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if name in line]
    assert line.split() == [name, "4x6", "float32", "96", "B", "1", "1"]


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_folder_without_snapshots_is_wrong_input(
    store_directory: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (store_directory / "empty").mkdir(mode=0o700)
    assert main(["inspect", str(store_directory / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tenplex inspect: {store_directory / name}: ")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "iter_0000100"
    values = {"w": torch.ones(4, 6), "half": torch.zeros(8, dtype=torch.bfloat16), "lr": [0.1]}
    with pytest.warns(UserWarning, match="single process"):
        checkpoint.save(values, checkpoint_id=folder, no_dist=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


def test_a_checkpoint_is_listed(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, values = inspect(capsys, saved, "--tensors")
    half, w = values["tensors"]
    assert (code, values["kind"], values["objects"]) == (0, "torch_dist", 1)
    assert (half["dtype"], half["bytes"], w["shape"], w["chunks"]) == ("bfloat16", 16, [4, 6], 1)
    assert values["bytes"] == 16 + 96


def test_the_folder_of_a_run_means_its_newest_checkpoint(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "--tensors", str(saved.parent)]) == 0
    text = capsys.readouterr().out
    assert saved.name in text.replace("\n", "")
    assert "unpickled" in text


def test_a_truncated_data_file_is_named(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data,) = saved.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:10])
    code, values = inspect(capsys, saved)
    (file,) = values["damaged_files"]
    assert (code, file["file"]) == (1, str(data))
    assert "truncated to 10 bytes" in file["reason"]


def test_metadata_that_is_no_pickle_is_wrong_input(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved / ".metadata").write_bytes(b"nonsense")
    assert main(["inspect", str(saved)]) == 2
    assert str(saved / ".metadata") in capsys.readouterr().err


def test_a_tracker_that_names_nothing_is_wrong_input(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved.parent / "latest_checkpointed_iteration.txt").write_text("7")
    assert main(["inspect", str(saved.parent)]) == 2
    assert "iter_0000007" in capsys.readouterr().err
