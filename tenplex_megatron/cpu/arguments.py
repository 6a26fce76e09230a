"""Which Megatron-LM flags keep it on operations that exist without CUDA?"""

__all__ = ["megatron_arguments"]

_ARGUMENTS = (
    "--distributed-backend",
    "gloo",
    "--transformer-impl",
    "local",
    "--use-cpu-initialization",
    "--attention-backend",
    "unfused",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-persist-layer-norm",
    "--no-rope-fusion",
)


def megatron_arguments() -> list[str]:
    """The flags to append to a Megatron-LM command line; argparse lets the last one win.

    >>> megatron_arguments()[:2]
    ['--distributed-backend', 'gloo']
    """
    return list(_ARGUMENTS)
