from multiprocessing import get_context
from pathlib import Path

import pytest

from tenplex_megatron.elastic.entry import WorkerTask, run_task

INTERRUPT = "import signal; signal.raise_signal(signal.SIGINT)"
SCRIPTS = {
    "once": INTERRUPT,
    "again on the way out": f"try:\n    {INTERRUPT}\nfinally:\n    {INTERRUPT}",
    "again at exit": f"import atexit\natexit.register(lambda: exec({INTERRUPT!r}))\n{INTERRUPT}",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_an_interrupted_worker_ends_without_a_word(script: str, tmp_path: Path) -> None:
    path, said, failure = tmp_path / "script.py", tmp_path / "said", tmp_path / "error.json"
    path.write_text(script)
    task = WorkerTask(
        script=str(path),
        argv=(),
        environment=(("TORCHELASTIC_ERROR_FILE", str(failure)),),
        stdout=str(said),
        stderr=str(said),
    )
    process = get_context("spawn").Process(target=run_task, args=(task,))
    process.start()
    process.join()
    assert process.exitcode == 130
    assert said.read_text() == ""
    assert not failure.exists()
