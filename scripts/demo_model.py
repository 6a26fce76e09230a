"""Which Megatron flags describe the small GPT of the demo and the benchmarks?

SwiGLU, grouped-query attention, rotary positions, RMSNorm, tied embeddings, no dropout, fp32, the
distributed optimizer.  A global batch of 24 divides by every data-parallel size used here.
"""

from pathlib import Path

__all__ = ["model_flags"]


def model_flags(data: Path, *, steps: int) -> list[str]:
    """Megatron's flags without those of a layout.

    Args:
        data: path prefix of an indexed dataset, as scripts/prepare_data.py writes it.
        steps: training steps.
    """
    sizes = {
        "num-layers": 4,
        "hidden-size": 128,
        "ffn-hidden-size": 256,
        "num-attention-heads": 8,
        "num-query-groups": 4,
        "seq-length": 64,
        "max-position-embeddings": 64,
        "global-batch-size": 24,
        "micro-batch-size": 2,
        "vocab-size": 256,
        "make-vocab-size-divisible-by": 64,
        "train-iters": steps,
        "lr-warmup-iters": 5,
        "lr-decay-iters": 200,
        "num-workers": 0,
        "eval-iters": 0,
        "eval-interval": 1000000,
        "log-interval": 1,
        "seed": 1234,
    }
    values = {
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "tokenizer-type": "NullTokenizer",
        "lr-decay-style": "cosine",
        "lr": "3e-3",
        "min-lr": "3e-4",
        "weight-decay": "0.1",
        "clip-grad": "1.0",
        "adam-beta2": "0.95",
        "attention-dropout": "0",
        "hidden-dropout": "0",
        "split": "98,1,1",
        "data-path": str(data),
        "data-cache-path": str(data.parent / "cache"),
    }
    switches = ("swiglu", "group-query-attention", "disable-bias-linear")
    return [
        *(f"--{name}={value}" for name, value in {**sizes, **values}.items()),
        *(f"--{name}" for name in (*switches, "use-distributed-optimizer")),
    ]
