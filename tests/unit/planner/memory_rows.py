"""Published measurements of memory as models and strategies; sources are in the golden table."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.planner.profile import LatentAttention, ModelProfile
from tenplex_megatron.planner.strategy import Strategy

TABLES = Path(__file__).parents[2] / "golden" / "measured_tables.yaml"
LLAMA: Mapping[str, Any] = {
    "is_gated": True,
    "has_bias": False,
    "has_learned_positions": False,
    "is_tied": False,
    "has_rms_norm": True,
    "dropout": False,
}
LATENT = LatentAttention(
    query_rank=1536, key_value_rank=512, rope_head_size=64, value_head_size=128
)
B200_MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama3-70b": {
        "hidden_size": 8192,
        "num_heads": 64,
        "num_query_groups": 8,
        "ffn_size": 28672,
        "vocab_size": 128256,
    },
    "llama3-405b": {
        "hidden_size": 16384,
        "num_heads": 128,
        "num_query_groups": 16,
        "ffn_size": 53248,
        "vocab_size": 128256,
    },
    "deepseekv2": {
        "hidden_size": 5120,
        "num_heads": 128,
        "num_query_groups": 128,
        "ffn_size": 12288,
        "vocab_size": 102400,
        "num_experts": 160,
        "experts_per_token": 6,
        "expert_ffn_size": 1536,
        "shared_expert_ffn_size": 3072,
        "num_dense_layers": 1,
        "latent": LATENT,
    },
    "deepseekv3": {
        "hidden_size": 7168,
        "num_heads": 128,
        "num_query_groups": 128,
        "ffn_size": 18432,
        "vocab_size": 129280,
        "num_experts": 256,
        "experts_per_token": 8,
        "expert_ffn_size": 2048,
        "shared_expert_ffn_size": 2048,
        "num_dense_layers": 1,
        "latent": LATENT,
    },
}
OTHER_MODELS = ("deepseek", "nemotron", "mtp", "_moe_", "ep4_etp1", "frozen")
"""Functional tests of models that a profile does not describe."""


class MemoryRow(NamedTuple):
    """One measured row."""

    name: str
    model: ModelProfile
    strategy: Strategy
    measured_bytes: float


def table(name: str) -> Iterator[dict[str, Any]]:
    """Rows as column -> value."""
    content = yaml.safe_load(TABLES.read_text())["tables"][name]
    for values in content["rows"]:
        yield dict(zip(content["columns"], values, strict=True))


def b200_rows() -> Iterator[MemoryRow]:
    """Allocated at most over all ranks; Transformer Engine's fused cross entropy."""
    for row in table("simumax_b200_time_and_memory"):
        model = ModelProfile(
            num_layers=row["layers"],
            head_size=128,
            seq_length=row["seq"],
            **B200_MODELS[row["model"]],
            **LLAMA,
        )
        axes = {axis: row[axis] for axis in ("tp", "pp", "cp", "ep", "dp")}
        strategy = Strategy(
            layout=ParallelLayout(**axes, micro_batch_size=row["mbs"]),
            global_batch_size=row["mbs"] * row["dp"] * row["num_microbatches"],
            sequence_parallel=True,
            zero_stage=1,
            overlaps_gradients=False,
            loss_fusion="te",
        )
        yield MemoryRow(row["case"], model, strategy, row["alloc_gib_max"] * 2**30)


def functional_rows() -> Iterator[MemoryRow]:
    """Allocated at most on the last rank; what the columns leave out is in the tests' recipes."""
    for row in table("megatron_functional_test_memory"):
        # The share of the optimizer's state follows from the number of devices.
        is_known = row["gpus"] is not None or not row["dist_opt"]
        if is_known and not any(part in row["test"] for part in OTHER_MODELS):
            model = functional_model(row)
            strategy = functional_strategy(row)
            yield MemoryRow(row["test"], model, strategy, row["mem_max_allocated_bytes"])


def functional_model(row: Mapping[str, Any]) -> ModelProfile:
    """The model of a functional test."""
    name, hidden = row["test"], row["hidden"]
    is_gated = "swiglu" in name
    # Megatron's default (arguments.py): two thirds of 4h with SwiGLU, in steps of 64.
    ffn = int(4 * hidden * 2 / 3 / 64) * 64 if is_gated else 4 * hidden
    return ModelProfile(
        num_layers=row["layers"],
        hidden_size=hidden,
        num_heads=row["heads"],
        num_query_groups=row["kv_groups"] or row["heads"],
        head_size=hidden // row["heads"],
        ffn_size=ffn,
        seq_length=row["seq"],
        vocab_size=functional_vocabulary(name, row["tp"]),
        is_gated=is_gated,
        has_bias="disable_bias" not in name,
        has_learned_positions="rope" not in name,
        is_tied="_7b_" not in name and "untied" not in name,
        has_rms_norm="weekly" in name,
    )


def functional_vocabulary(name: str, tp: int) -> int:
    """Rows of the tests' tokenizers, padded to a multiple of 128 x TP."""
    rows = {"bert": 30522, "_7b_": 131073}
    found = next((size for part, size in rows.items() if part in name), 50257)
    return -(-found // (128 * tp)) * 128 * tp


def functional_strategy(row: Mapping[str, Any]) -> Strategy:
    """The strategy of a functional test."""
    name = row["test"]
    replica = row["tp"] * row["pp"] * row["cp"]
    dp = (row["gpus"] or replica) // replica
    unfused = ("bert", "fim_dataset", "no_mmap", "overlap_optimizer", "vp1_tunable")
    native = ("loss_fusion", "defer_embedding")
    return Strategy(
        layout=ParallelLayout(
            tp=row["tp"],
            pp=row["pp"],
            dp=dp,
            cp=row["cp"],
            ep=row["ep"],
            vpp=row["vpp"],
            micro_batch_size=row["mbs"],
        ),
        global_batch_size=row["gbs"],
        sequence_parallel=row["sp"],
        zero_stage=int(row["dist_opt"]),
        recompute=row["recompute"] or "none",
        precision="fp16" if "bert_release" in name else "bf16",
        is_flash=not any(part in name for part in unfused),
        loss_fusion="native" if any(part in name for part in native) else "none",
    )
