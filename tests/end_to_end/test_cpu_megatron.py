"""Run as a program, this file is what each rank starts: the stand-in, then the given script."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tenplex_megatron import cpu
from tenplex_megatron.adapters.megatron.arguments import MegatronArguments

SCRIPTS = Path(__file__).parents[2] / "scripts"
END_OF_DOCUMENT = 255
STEPS = 6
FLAGS = f"""
--num-layers 2 --hidden-size 64 --ffn-hidden-size 128
--num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu
--normalization RMSNorm --disable-bias-linear --position-embedding-type rope
--seq-length 32 --max-position-embeddings 32 --attention-dropout 0 --hidden-dropout 0
--global-batch-size 8 --micro-batch-size 2 --train-iters {STEPS} --lr 1e-2 --lr-warmup-iters 1
--tokenizer-type NullTokenizer --vocab-size 256 --make-vocab-size-divisible-by 64
--split 1,0,0 --num-workers 0 --eval-iters 0 --eval-interval 1000 --log-interval 1
--use-distributed-optimizer --tensor-model-parallel-size 2
""".split()


def run(*command: str | Path, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TENPLEX_CPU": "force"},
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for number in range(3):
        text = "".join(f"{number} times {i} is {number * i}\n" for i in range(200))
        (folder / f"table{number}.txt").write_text(text)
    prefix = folder / "tables"
    done = run(SCRIPTS / "prepare_data.py", "--suffix", ".txt", "--output", prefix, folder)
    assert done.returncode == 0, done.stderr
    return prefix


def test_a_dataset_holds_every_byte_and_closes_every_document(dataset: Path) -> None:
    texts = [path.read_bytes() for path in sorted(dataset.parent.glob("table*.txt"))]
    expected = b"".join(text + bytes([END_OF_DOCUMENT]) for text in texts)
    assert np.fromfile(f"{dataset}.bin", dtype=np.uint8).tobytes() == expected
    assert {path.suffix for path in dataset.parent.iterdir()} == {".txt", ".bin", ".idx"}


def test_two_ranks_train_a_gpt_without_cuda(dataset: Path, tmp_path: Path) -> None:
    done = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(__file__, SCRIPTS / "pretrain_gpt.py", *FLAGS),
        *(
            "--data-path",
            dataset,
            "--data-cache-path",
            tmp_path,
            *MegatronArguments().device_arguments("cpu"),
        ),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(np.log(256), abs=0.3)
    assert losses[-1] < losses[0] - 0.5
    assert done.stderr.count("CPU STAND-IN FOR CUDA IS ON") == 1


def test_finding_no_text_is_said_in_one_line_with_what_to_change(tmp_path: Path) -> None:
    done = run(SCRIPTS / "prepare_data.py", "--output", tmp_path / "none", tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(r"prepare_data: no text found in .*--suffix.*\n", done.stderr)
    assert not list(tmp_path.iterdir())


if __name__ == "__main__":
    cpu.install()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
