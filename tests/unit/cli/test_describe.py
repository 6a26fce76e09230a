import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FLAGS = ["--num-layers=4", "--num-attention-heads=4", "--global-batch-size=8"]
FLAGS += ["--micro-batch-size=2", "--hidden-size=64", "--seq-length=32"]
EXPECTED_EXIT = 128 + signal.SIGTERM


def test_a_terminated_plan_leaves_no_folder(tmp_path: Path) -> None:
    command = ["-m", "tenplex_megatron.cli.main", "plan", "TP1", "TP2", "none.py", *FLAGS]
    process = subprocess.Popen(
        [sys.executable, *command],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not list(tmp_path.glob("tenplex-plan-*/imports.log")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.terminate()
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, said) == (EXPECTED_EXIT, "")
    assert not [*tmp_path.glob("tenplex-plan-*"), *tmp_path.glob("pymp-*")]
