import os
import stat
from pathlib import Path

import pytest

from tenplex_megatron.errors import StoreError
from tenplex_megatron.store import files


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_directories_and_files_are_for_their_owner_only_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        files.make_private_directory(tmp_path / "a" / "b" / "c")
        files.write_atomically(tmp_path / "a" / "b" / "c" / "file", b"x")
    finally:
        os.umask(old)
    found = {mode(tmp_path / part) for part in ("a", "a/b", "a/b/c")}
    assert found == {0o700}
    assert mode(tmp_path / "a/b/c/file") == 0o600


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 4321)
    with pytest.raises(StoreError, match=r"belongs to user \d+, expected user \d+"):
        files.check_private_directory(tmp_path)


def test_a_directory_below_one_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "theirs" / "node"
    files.make_private_directory(inner)
    lstat = Path.lstat

    def theirs(path: Path) -> os.stat_result:
        values = list(lstat(path))
        if path.name == "theirs":
            values[stat.ST_UID] += 4321
        return os.stat_result(values)

    monkeypatch.setattr(Path, "lstat", theirs)
    with pytest.raises(StoreError, match=r"theirs: belongs to user"):
        files.check_private_directory(inner)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_link_at_any_of_our_levels_is_refused(tmp_path: Path, depth: int) -> None:
    real = tmp_path / "real" / "job" / "node"
    files.make_private_directory(real)
    link = tmp_path / "link"
    link.symlink_to(real.parents[depth - 1] if depth else real)
    path = link.joinpath(*real.parts[-depth:]) if depth else link
    with pytest.raises(StoreError, match="link: expected a real directory"):
        files.make_private_directory(path)


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    files.make_private_directory(tmp_path / "node")
    (tmp_path / "node").chmod(0o750)
    with pytest.raises(StoreError, match=r"mode 0750.*chmod 700"):
        files.check_private_directory(tmp_path / "node")


def test_a_directory_in_which_others_may_swap_entries_is_refused(tmp_path: Path) -> None:
    files.make_private_directory(tmp_path / "open" / "node")
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(StoreError, match="open: others may replace"):
        files.check_private_directory(tmp_path / "open" / "node")
    (tmp_path / "open").chmod(0o1777)  # as /dev/shm is
    files.check_private_directory(tmp_path / "open" / "node")


def test_a_relative_or_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="absolute"):
        files.check_private_directory(Path("here"))
    with pytest.raises(StoreError, match="No such file"):
        files.check_private_directory(tmp_path / "missing")


def test_a_directory_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="file"):
        files.make_private_directory(tmp_path / "file" / "node")


def test_a_file_that_is_a_link_or_open_to_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_atomically(path, b"x")
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(StoreError, match="link: can't open it"):
        files.read_private(tmp_path / "link")
    path.chmod(0o640)
    with pytest.raises(StoreError, match=r"mode 0600, got user .* mode 0640"):
        files.read_private(path)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.write_atomically(path, b"x")
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with pytest.raises(StoreError, match="expected a file of user 4321"):
        files.read_private(path)


def test_a_write_replaces_the_whole_file_and_leaves_no_other(tmp_path: Path) -> None:
    assert files.write_atomically(tmp_path / "file", b"long content")
    assert files.write_atomically(tmp_path / "file", b"new")
    assert not files.write_atomically(tmp_path / "file", b"other", exclusive=True)
    assert files.read_private(tmp_path / "file") == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_atomically(tmp_path / "file", b"old")

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(StoreError, match="file: can't write it: Permission denied"):
        files.write_atomically(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert files.read_private(tmp_path / "file") == b"old"


def test_removing_a_tree_also_sweeps_what_a_killed_removal_left(tmp_path: Path) -> None:
    for name in ("gen-0001", "gen-0002", ".trash-gen-0000-17"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x")
    files.remove_tree(tmp_path / "gen-0001")
    files.remove_tree(tmp_path / "gen-0001")
    assert [path.name for path in tmp_path.iterdir()] == ["gen-0002"]


def test_what_can_not_be_removed_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="folder: can't remove it"):
        files.remove_private(tmp_path / "folder")
