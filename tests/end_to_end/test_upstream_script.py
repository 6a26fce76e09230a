"""Megatron-LM's own pretrain_gpt.py: unmodified under `tenplex run`, patched under torchrun."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.torchrun_jobs import STOP, Place, assert_same_course

CHECKOUT = Path(os.environ.get("MEGATRON_LM_DIR", ""))
PATCH = Path(__file__).parents[2] / "patches/core_v0.19.patch"
IS_THERE = "MEGATRON_LM_DIR" in os.environ and (CHECKOUT / "pretrain_gpt.py").is_file()
LAYOUTS = ("TP2,PP2,DP1", "TP1,PP1,DP2")

pytestmark = pytest.mark.skipif(
    not IS_THERE, reason="MEGATRON_LM_DIR names no checkout of Megatron-LM (core_v0.19.0)"
)


@pytest.fixture
def place(tmp_path: Path, store_directory: Path, dataset: Path) -> Place:
    return Place(tmp_path, store_directory, dataset)


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """Upstream's script and the modules beside it, without the package."""
    folder = tmp_path / "upstream"
    folder.mkdir()
    for path in CHECKOUT.glob("*.py"):
        shutil.copy(path, folder)
    return folder


def test_the_unmodified_script_changes_layout_on_the_same_course(
    place: Place, scripts: Path
) -> None:
    script = scripts / "pretrain_gpt.py"
    calm = place.policy("calm", LAYOUTS, {})
    place.tenplex_run("whole", 4, script, calm)
    shrinks = place.policy("shrinks", LAYOUTS, {STOP: 2})
    said = place.tenplex_run("shrinks", 4, script, shrinks)
    assert f"TP1,PP1,DP2 on 2 devices from step {STOP}" in said
    assert_same_course(place, "shrinks", "whole")


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_the_installed_megatron_is_used_beside_another_and_a_warning_says_so(
    place: Place, scripts: Path, start_method: str
) -> None:
    beside = scripts / "megatron/training"
    beside.mkdir(parents=True)
    (beside / "__init__.py").write_text("raise RuntimeError('the wrong megatron')\n")
    policy = place.policy("policy", LAYOUTS[1:], {})
    options = (f"--start-method={start_method}", "--redirects=0", "--nproc-per-node=2")
    said = place.tenplex_run("beside", 2, scripts / "pretrain_gpt.py", policy, *options)
    assert f"not from {scripts / 'megatron'} beside the script" in said


def test_the_patched_script_goes_on_under_torchrun(place: Place, scripts: Path) -> None:
    apply = ["git", "apply", "--unidiff-zero", str(PATCH)]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(scripts.parent)}
    subprocess.run(apply, cwd=scripts, check=True, env=environment)
    script = scripts / "pretrain_gpt.py"
    policy = place.policy("policy", ("TP2,PP1,DP1", "TP1,PP2,DP2"), {})
    place.torchrun("whole", 2, script, policy)
    place.torchrun("split", 2, script, policy, "--exit-interval", str(STOP))
    place.torchrun("split", 4, script, policy)
    assert_same_course(place, "split", "whole")
