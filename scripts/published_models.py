"""Which models do published tables name, and what are their sizes?"""

from collections.abc import Mapping
from typing import Any

from tenplex_megatron.planner.profile import LatentAttention, ModelProfile

LLAMA: Mapping[str, Any] = {
    "is_gated": True,
    "has_bias": False,
    "has_learned_positions": False,
    "is_tied": False,
    "has_rms_norm": True,
    "dropout": False,
}
"""SwiGLU, RMS norm, rotary positions, no bias, untied embeddings."""


def gpt(layers: int, hidden: int, heads: int, *, seq: int, vocab: int = 51200) -> ModelProfile:
    """A GPT as in the SC'21 paper: GELU, ffn 4h, tied embeddings."""
    return ModelProfile(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_query_groups=heads,
        head_size=hidden // heads,
        ffn_size=4 * hidden,
        seq_length=seq,
        vocab_size=vocab,
    )


def llama(layers: int, hidden: int, heads: int, **sizes: int) -> ModelProfile:
    """A Llama of `groups` key and value heads, with `ffn`, `seq` and `vocab`."""
    return ModelProfile(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_query_groups=sizes["groups"],
        head_size=hidden // heads,
        ffn_size=sizes["ffn"],
        seq_length=sizes["seq"],
        vocab_size=sizes["vocab"],
        **LLAMA,
    )


_LATENT = LatentAttention(
    query_rank=1536, key_value_rank=512, rope_head_size=64, value_head_size=128
)
_NARROWED: Mapping[str, Mapping[str, Any]] = {
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
        "latent": _LATENT,
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
        "latent": _LATENT,
    },
}


def simumax_model(name: str, *, layers: int, seq: int) -> ModelProfile | None:
    """A model of SimuMax's configs/models, cut to `layers`; None for a name it does not have."""
    sizes = _NARROWED.get(name)
    if sizes is None:
        return None
    return ModelProfile(num_layers=layers, seq_length=seq, head_size=128, **sizes, **LLAMA)


_GPTS = {
    "GPT3-5B": (24, 4096, 32),
    "GPT3-20B": (44, 6144, 48),
    "GPT3-175B": (96, 12288, 96),
}
_LLAMAS: Mapping[str, tuple[tuple[int, int, int], Mapping[str, int]]] = {
    "LLAMA2-7B": ((32, 4096, 32), {"groups": 32, "ffn": 11008, "vocab": 32000}),
    "LLAMA2-13B": ((40, 5120, 40), {"groups": 40, "ffn": 13824, "vocab": 32000}),
    "LLAMA2-70B": ((80, 8192, 64), {"groups": 8, "ffn": 28672, "vocab": 32000}),
    "LLAMA3-8B": ((32, 4096, 32), {"groups": 8, "ffn": 14336, "vocab": 128256}),
    "LLAMA3-70B": ((80, 8192, 64), {"groups": 8, "ffn": 28672, "vocab": 128256}),
    "LLAMA3.1-405B": ((126, 16384, 128), {"groups": 8, "ffn": 53248, "vocab": 128256}),
}


def nemo_model(name: str, seq: int) -> ModelProfile | None:
    """A model of NVIDIA's tables; None for one that is no plain GPT or Llama."""
    name = name.replace("_", "-")
    if name in _GPTS:
        return gpt(*_GPTS[name], seq=seq)
    if name in _LLAMAS:
        shape, sizes = _LLAMAS[name]
        return llama(*shape, **sizes, seq=seq)
    return None


def functional_model(row: Mapping[str, Any]) -> ModelProfile:
    """The model of one of Megatron's functional tests, whose name says what the columns do not."""
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
        vocab_size=_functional_vocabulary(name, row["tp"]),
        is_gated=is_gated,
        has_bias="disable_bias" not in name,
        has_learned_positions="rope" not in name,
        is_tied="_7b_" not in name and "untied" not in name,
        has_rms_norm="weekly" in name,
    )


def _functional_vocabulary(name: str, tp: int) -> int:
    """Rows of the tests' tokenizers, padded to a multiple of 128 x TP."""
    rows = {"bert": 30522, "_7b_": 131073}
    found = next((size for part, size in rows.items() if part in name), 50257)
    return -(-found // (128 * tp)) * 128 * tp
