"""What the planner says that a rank holds is what Megatron allocates, byte for byte.

Run as a program, this file builds every rank of every case with the training script and prints
the bytes; nothing is trained.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from tenplex_megatron.adapters.megatron.arguments import MegatronArguments
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.memory.parameters import stage_elements
from tenplex_megatron.planner.memory.predict import predict_memory
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.strategy import Precision, Strategy

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_gpt.py"
CLUSTER = ClusterProfile(
    name="any",
    devices_per_node=8,
    memory_bytes=80e9,
    peak_flops=1e15,
    memory_bandwidth=1e12,
    node_bandwidth=1e11,
    network_bandwidth=1e10,
)
TINY = ModelProfile(
    num_layers=4,
    hidden_size=48,
    num_heads=4,
    num_query_groups=4,
    head_size=12,
    ffn_size=80,
    seq_length=32,
    vocab_size=264,
)
"""Its sizes are no multiples of 64, so that buffers have gaps."""
LLAMA = replace(
    TINY,
    num_query_groups=2,
    is_gated=True,
    has_bias=False,
    has_learned_positions=False,
    is_tied=False,
    has_rms_norm=True,
)
LARGE = replace(LLAMA, hidden_size=1024, num_heads=8, head_size=128, ffn_size=5632)
"""Large enough for several buckets."""
MIXTURE = replace(LLAMA, num_experts=4, experts_per_token=2, expert_ffn_size=72)
SHARED = replace(MIXTURE, is_tied=True, shared_expert_ffn_size=40)
CASES: list[tuple[str, ModelProfile, Precision, int]] = [
    ("TP1,PP1,DP1", TINY, "bf16", 0),
    ("TP2,PP1,DP2", TINY, "bf16", 0),
    ("TP1,PP1,DP3", TINY, "bf16", 1),
    ("TP1,PP2,DP3", TINY, "bf16", 1),
    ("TP2,PP2,DP2,VPP2", TINY, "bf16", 1),
    ("TP1,PP2,DP5", LLAMA, "bf16", 1),
    ("TP4,PP1,DP2", LLAMA, "bf16", 1),
    ("TP1,PP2,DP3,STAGES1-3", LLAMA, "bf16", 1),
    ("TP1,PP4,DP2", replace(LLAMA, is_tied=True), "fp32", 1),
    ("TP2,PP2,DP1", replace(LLAMA, has_bias=True), "fp32", 0),
    ("TP1,PP1,DP2", replace(TINY, has_rms_norm=True), "fp16", 1),
    ("TP1,PP1,DP3", LARGE, "bf16", 1),
    ("TP1,PP1,DP4,EP2", MIXTURE, "bf16", 1),
    ("TP1,PP2,DP4,EP4", SHARED, "bf16", 1),
    ("TP1,PP1,DP2", MIXTURE, "bf16", 0),
]


def flags(model: ModelProfile, precision: Precision, zero_stage: int) -> list[str]:
    """Megatron's flags without a layout."""
    sizes = {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden_size,
        "num-attention-heads": model.num_heads,
        "num-query-groups": model.num_query_groups,
        "kv-channels": model.head_size,
        "ffn-hidden-size": model.ffn_size,
        "seq-length": model.seq_length,
        "max-position-embeddings": model.seq_length,
        "padded-vocab-size": model.vocab_size,
        "vocab-size": model.vocab_size,
        "position-embedding-type": "learned_absolute" if model.has_learned_positions else "rope",
        "normalization": "RMSNorm" if model.has_rms_norm else "LayerNorm",
        "global-batch-size": 60,
        "micro-batch-size": 1,
        "train-iters": 2,
        "lr": "1e-2",
        "tokenizer-type": "NullTokenizer",
        "num-workers": 0,
        "eval-iters": 0,
    }
    if model.num_experts:
        sizes |= {
            "num-experts": model.num_experts,
            "moe-router-topk": model.experts_per_token,
            "moe-ffn-hidden-size": model.expert_ffn_size,
            "moe-token-dispatcher-type": "alltoall",
        }
    if model.shared_expert_ffn_size:
        sizes["moe-shared-expert-intermediate-size"] = model.shared_expert_ffn_size
    switches = {
        "--group-query-attention": True,
        "--mock-data": True,
        "--swiglu": model.is_gated,
        "--disable-bias-linear": not model.has_bias,
        "--untie-embeddings-and-output-weights": not model.is_tied,
        "--bf16": precision == "bf16",
        "--fp16": precision == "fp16",
        "--use-distributed-optimizer": zero_stage == 1,
        "--overlap-grad-reduce": zero_stage == 1,
    }
    return [
        *(f"--{name}={value}" for name, value in sizes.items()),
        *(name for name, wanted in switches.items() if wanted),
    ]


@pytest.fixture(scope="module")
def built() -> dict[str, list[dict[str, int]]]:
    """Case -> bytes of every rank."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TENPLEX_CPU": "force"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    values: dict[str, list[dict[str, int]]] = json.loads(done.stdout)
    return values


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case[0] for case in CASES])
def test_the_bytes_of_a_rank_are_those_of_megatron(
    built: dict[str, list[dict[str, int]]], index: int
) -> None:
    text, model, precision, zero_stage = CASES[index]
    layout = ParallelLayout.parse(f"{text},MBS1")
    strategy = Strategy(
        layout=layout, global_batch_size=60, precision=precision, zero_stage=zero_stage
    )
    found = predict_memory(model, CLUSTER, strategy)
    elements = stage_elements(model, layout, is_sharded=zero_stage == 1, is_bucketed=True)
    per_element = 8 if precision == "fp32" else 12
    ranks = built[str(index)]
    assert len(ranks) == layout.world_size
    for rank, real in enumerate(ranks):
        place = layout.coordinates(rank)
        stage = found.stages[place.pp]
        owned = elements[place.pp].owned
        # Context ranks come before data ranks in the group that shares the optimizer's state.
        expected = {
            "parameters": stage.parameters,
            "gradients": stage.gradients,
            "optimizer": owned[(place.dp * layout.cp + place.cp) % len(owned)] * per_element,
        }
        assert real == expected, f"rank {rank}"
    for number, stage in enumerate(found.stages):
        fullest = max(
            real["optimizer"]
            for rank, real in enumerate(ranks)
            if layout.coordinates(rank).pp == number
        )
        assert stage.optimizer == fullest


def measure() -> None:
    """Build every rank of every case in a process of its own, and print the bytes."""
    for name in MegatronArguments.preload:
        importlib.import_module(name)
    found: dict[str, list[dict[str, int]]] = {}
    for index, (text, *_) in enumerate(CASES):
        found[str(index)] = [
            in_a_child(index, rank) for rank in range(ParallelLayout.parse(text).world_size)
        ]
    sys.stdout.write(json.dumps(found))


def in_a_child(index: int, rank: int) -> dict[str, int]:
    """The bytes of one rank."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        build(index, rank, sender)
    os.close(sender)
    with os.fdopen(receiver) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"case {index}, rank {rank}"
    values: dict[str, int] = json.loads(text)
    return values


def build(index: int, rank: int, answer: int) -> NoReturn:
    """Run the training script up to its first step, send what it has built, and end."""
    from megatron.training import training

    from tenplex_megatron.adapters.megatron import optimizer as optimizers
    from tenplex_megatron.cli.single_rank import _pretend_world
    from tenplex_megatron.elastic.entry import run_script

    text, model, precision, zero_stage = CASES[index]
    layout = ParallelLayout.parse(text)
    _pretend_world(rank, layout.world_size)
    original = training.setup_model_and_optimizer

    def leave(*arguments: object, **named: object) -> NoReturn:
        chunks, optimizer, _ = original(*arguments, **named)
        optimizers.prepare_state(optimizer)
        parameters = storages(p for chunk in chunks for p in chunk.parameters())
        gradients = storages(
            buffer.grad_data
            for chunk in chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        )
        states = storages(
            state
            for owned in optimizers.owned_parameters(optimizer)
            for state in owned.states.values()
        )
        values = {
            "parameters": sum(parameters.values()),
            "gradients": sum(gradients.values()),
            "optimizer": sum(size for at, size in states.items() if at not in parameters),
        }
        os.write(answer, json.dumps(values).encode())
        os._exit(0)

    vars(training)["setup_model_and_optimizer"] = leave
    given = flags(model, precision, zero_stage)
    arguments = MegatronArguments()
    sys.argv = [
        str(SCRIPT),
        *given,
        *arguments.device_arguments("cpu"),
        *arguments.layout_arguments(given, layout, [layout]),
    ]
    run_script(str(SCRIPT), is_module=False)
    raise AssertionError("the script ended without building a model")


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address -> bytes of every memory that the tensors lie in."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found


if __name__ == "__main__":
    measure()
