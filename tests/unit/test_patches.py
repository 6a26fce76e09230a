"""The patches carry one import and nothing of upstream's text."""

import hashlib
import os
import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = ROOT / "patches"
COMPAT = ROOT / "tenplex_megatron/adapters/megatron/compat.py"
IMPORT = "    import tenplex_megatron.auto"
LINE = re.compile(r"core_v(\d+\.\d+)")
ADDITION = re.compile(r"@@ -\d+,0 \+\d+,\d+ @@")
HUNK = re.compile(r"@@ -(\d+),0 \+(\d+) @@")
MEGATRON = os.environ.get("MEGATRON_LM_DIR", "")


def patches() -> list[Path]:
    return sorted(PATCHES.glob("core_v*.patch"))


def test_the_patch_of_the_fork_holds_no_line_of_it() -> None:
    head, index, old, new, *lines = (PATCHES / "megatron_deepspeed.patch").read_text().splitlines()
    assert head == "diff --git a/megatron/training.py b/megatron/training.py"
    assert re.fullmatch(r"index [0-9a-f]{40}\.\.[0-9a-f]{40} 100644", index)
    assert (old, new) == ("--- a/megatron/training.py", "+++ b/megatron/training.py")
    assert all(line.startswith("+") or ADDITION.fullmatch(line) for line in lines)
    compile(textwrap.dedent("\n".join(line[1:] for line in lines[-6:])), "patch", "exec")


@pytest.mark.parametrize("patch", patches(), ids=lambda path: path.stem)
def test_a_patch_adds_one_line_and_holds_no_other(patch: Path) -> None:
    head, index, old, new, hunk, line = patch.read_text().splitlines()
    assert head == "diff --git a/pretrain_gpt.py b/pretrain_gpt.py"
    assert re.fullmatch(r"index [0-9a-f]{40}\.\.[0-9a-f]{40} 100644", index)
    assert (old, new) == ("--- a/pretrain_gpt.py", "+++ b/pretrain_gpt.py")
    place = HUNK.fullmatch(hunk)
    assert place is not None
    assert int(place[2]) == int(place[1]) + 1
    assert line == f"+{IMPORT}"


def test_the_table_names_every_patch_once_and_the_supported_lines_have_one() -> None:
    rows = re.findall(
        r"^\| (core_v\S+\.patch) \| (.+?) \|", (PATCHES / "README.md").read_text(), re.M
    )
    assert sorted(name for name, _ in rows) == [path.name for path in patches()]
    for name, tags in rows:
        assert {LINE.match(tag)[0] for tag in tags.split(", ")} == {name.removesuffix(".patch")}  # type: ignore[index] # a tag without a version fails here
    # Importing the module would import Megatron.
    supported = re.search(r"^SUPPORTED_VERSIONS = \((.*)\)$", COMPAT.read_text(), re.M)
    assert supported is not None
    lines = re.findall(r"[\d.]+", supported[1])
    assert lines
    assert {f"core_v{line}.patch" for line in lines} <= {path.name for path in patches()}


@pytest.mark.skipif(not MEGATRON, reason="MEGATRON_LM_DIR names no Megatron-LM checkout")
def test_a_patch_applies_to_the_checkout(tmp_path: Path) -> None:
    script = tmp_path / "pretrain_gpt.py"
    shutil.copyfile(Path(MEGATRON) / script.name, script)
    found = blob(script)
    fitting = [patch for patch in patches() if f"index {found}.." in patch.read_text()]
    assert fitting, f"no patch is made for {MEGATRON}/pretrain_gpt.py (blob {found})"
    apply = ["git", "apply", "--unidiff-zero", str(fitting[0])]
    subprocess.run([*apply, "--check"], cwd=tmp_path, check=True)
    subprocess.run(apply, cwd=tmp_path, check=True)
    lines = script.read_text().splitlines()
    assert lines[lines.index(IMPORT) - 1] == 'if __name__ == "__main__":'
    assert f"..{blob(script)} " in fitting[0].read_text()
    compile(script.read_text(), str(script), "exec")


def blob(path: Path) -> str:
    """Git's name for the content of a file."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
