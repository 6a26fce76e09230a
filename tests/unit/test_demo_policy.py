"""The demo's own policy file says what the demo does."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("demo")


@pytest.mark.parametrize("name", ["FULL", "QUICK"])
def test_only_the_schedule_differs_and_no_comment_contradicts_it(
    demo: ModuleType, tmp_path: Path, name: str
) -> None:
    course = getattr(demo, name)
    path = demo.write_policy(tmp_path / "policy.yaml", course)
    original = yaml.safe_load((ROOT / "configs/elastic/demo.yaml").read_text())
    text = path.read_text()
    assert yaml.safe_load(text) == original | {"schedule": {course.shrink: 4}}
    assert "#" not in text


def test_without_a_course_nothing_changes(demo: ModuleType, tmp_path: Path) -> None:
    path = demo.write_policy(tmp_path / "calm.yaml", None)
    assert yaml.safe_load(path.read_text())["schedule"] == {}
