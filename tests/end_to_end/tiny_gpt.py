"""Which flags describe the smallest GPT that has every kind of tensor and trains in seconds?"""

from pathlib import Path

__all__ = ["GLOBAL_BATCH_SIZE", "tiny_gpt_flags"]

GLOBAL_BATCH_SIZE = 12

_VALUES = {
    "num-layers": 4,
    "hidden-size": 64,
    "ffn-hidden-size": 96,
    "num-attention-heads": 4,
    "num-query-groups": 2,
    "seq-length": 32,
    "max-position-embeddings": 32,
    "global-batch-size": GLOBAL_BATCH_SIZE,
    "micro-batch-size": 1,
    "vocab-size": 256,
    "make-vocab-size-divisible-by": 64,
    "lr": "1e-2",
    "min-lr": "1e-3",
    "lr-decay-style": "cosine",
    "lr-decay-iters": 40,
    "lr-warmup-iters": 2,
    "weight-decay": "0.1",
    "attention-dropout": 0,
    "hidden-dropout": 0,
    "normalization": "RMSNorm",
    "position-embedding-type": "rope",
    "tokenizer-type": "NullTokenizer",
    "split": "100,0,0",
    "num-workers": 0,
    "eval-iters": 0,
    "eval-interval": 1000,
    "log-interval": 1,
    "seed": 1234,
}
_SWITCHES = ("swiglu", "group-query-attention", "disable-bias-linear")


def tiny_gpt_flags(data: Path, *, steps: int) -> list[str]:
    """Megatron's flags without those of a layout; `data` is the prefix of an indexed dataset."""
    own = {
        "train-iters": steps,
        "data-path": data,
        "data-cache-path": data.parent / "cache",
    }
    return [
        *(f"--{name}={value}" for name, value in {**_VALUES, **own}.items()),
        *(f"--{name}" for name in _SWITCHES),
    ]
