"""The fork Megatron-DeepSpeed changes stages, ranks and ZeRO stage on the same course."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from tenplex_megatron.elastic.report import largest_difference, read_run

CHECKOUT = Path(os.environ.get("MEGATRON_DEEPSPEED_DIR", ""))
PATCH = Path(__file__).parents[2] / "patches/megatron_deepspeed.patch"
IMPORTED = ("einops", "pybind11", "regex", "six", "torchvision")
MISSING = [name for name in IMPORTED if importlib.util.find_spec(name) is None]
STEPS = 8
FLAGS = f"""
--deepspeed --zero-stage 1 --pipeline-model-parallel-size 2 --micro-batch-size 1
--global-batch-size 12 --train-iters {STEPS} --lr 0.01 --lr-decay-style cosine --lr-warmup-iters 2
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --tokenizer-type NullTokenizer --vocab-size 256 --data-impl mmap
--split 100,0,0 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0 --num-workers 0
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
--no-gradient-accumulation-fusion --distributed-backend gloo
""".split()

pytestmark = [
    pytest.mark.skipif(
        "MEGATRON_DEEPSPEED_DIR" not in os.environ or bool(MISSING),
        reason=f"MEGATRON_DEEPSPEED_DIR names no checkout, or the fork lacks {MISSING}",
    ),
    pytest.mark.timeout(400),
]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The patched fork, its dataset helpers compiled for this Python."""
    folder = tmp_path / "fork"
    shutil.copytree(CHECKOUT, folder, ignore=shutil.ignore_patterns(".git", "*.so"))
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path)}
    apply = ["git", "apply", "--unidiff-zero", str(PATCH)]
    subprocess.run(apply, cwd=folder, check=True, env=environment)
    import pybind11

    data = folder / "megatron/data"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    includes = [f"-I{sysconfig.get_paths()['include']}", f"-I{pybind11.get_include()}"]
    compiler = ["g++", "-O2", "-shared", "-std=c++17", "-fPIC", *includes]
    target = data / f"helpers{suffix}"
    subprocess.run([*compiler, str(data / "helpers.cpp"), "-o", str(target)], check=True)
    return folder


def run(folder: Path, script: Path, dataset: Path, policy: dict[str, object]) -> Path:
    folder.mkdir()
    config = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 1}
    config |= {"zero_optimization": {"stage": 1}, "gradient_clipping": 1.0}  # type: ignore[dict-item]
    (folder / "ds.json").write_text(json.dumps(config))
    common = {"framework": "deepspeed", "device": "cpu"}
    (folder / "policy.yaml").write_text(yaml.safe_dump(common | policy))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [
        *(sys.executable, "-m", "tenplex_megatron.cli.main", "run", "--standalone"),
        *("--nproc-per-node=4", f"--elastic-policy={folder / 'policy.yaml'}", "--redirects=3"),
        *(f"--run-dir={folder / 'run'}", f"--store-dir={folder / 'store'}", str(script), *FLAGS),
        *(f"--deepspeed_config={folder / 'ds.json'}", f"--data-path={dataset}"),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def test_the_fork_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, checkout: Path, dataset: Path
) -> None:
    script = checkout / "pretrain_gpt.py"
    calm = read_run([run(tmp_path / "calm", script, dataset, {"layouts": ["PP2,DP2,ZERO1"]})])
    layouts = ["PP2,DP2,ZERO1", "PP1,DP3,ZERO0"]
    policy: dict[str, object] = {"layouts": layouts, "schedule": {3: 3}}
    found = read_run([run(tmp_path / "elastic", script, dataset, policy)])
    assert found.last_steps == {1: 3, 2: STEPS}
    assert sorted(calm.losses) == list(range(1, STEPS + 1))
    assert largest_difference(calm.losses, found.losses) <= 2e-5
