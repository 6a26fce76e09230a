"""The script that measures the planner finds it exact, and says all it measured."""

import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import planner_speed

    return planner_speed


def test_a_quick_run_finds_no_error_and_keeps_far_from_the_limits(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plot = tmp_path / "growth.png"
    monkeypatch.setattr("sys.argv", ["planner_speed.py", "--quick", "--json", "--plot", str(plot)])
    assert script.main() == 0
    measured = json.loads(capsys.readouterr().out)
    assert plot.read_bytes().startswith(b"\x89PNG")
    graphs, worlds = (measured["exactness"][name] for name in ("graphs", "megatron"))
    assert (graphs["graphs"], graphs["wrong"]) == (50, 0)
    assert worlds["missed"] == 0
    assert worlds["limits"] > 50
    # Several times what an idle core takes: other tests may share it.
    for name, limit in script.LIMITS_S.items():
        assert measured[name]["strategies"] >= 10_000
        assert measured[name]["best_s"] < 5 * limit
    assert all(len(rows) > 0 for rows in measured["growth"].values())
    said = script.text(measured)
    assert said.count("strategies: best ") == 4
    assert "exact: 50 of 50 random graphs" in said
