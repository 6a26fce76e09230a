import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"


def prepare(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_only_its_own_words_are_heard(tmp_path: Path) -> None:
    text = tmp_path / "some.txt"
    text.write_text("words\n")
    done = prepare("--output", tmp_path / "data", text)
    assert done.stderr == "0.00 MB of text read\n"
    assert done.stdout == f"{tmp_path / 'data'}.bin and .idx: 1 documents\n"


def test_an_error_of_its_own_is_still_heard(tmp_path: Path) -> None:
    done = prepare("--output", tmp_path / "data", tmp_path / "none.txt")
    assert done.returncode == 1
    assert done.stderr == f"prepare_data: {tmp_path / 'none.txt'} does not exist\n"
