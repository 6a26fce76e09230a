"""Changes the parallel layout of a running Megatron-LM or DeepSpeed job.

Importing this package loads neither torch nor a training framework: what is here describes state
and plans moves, and never touches data.
"""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("tenplex-megatron")
