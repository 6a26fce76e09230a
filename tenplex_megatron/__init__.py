"""Changes the parallel layout of a running Megatron-LM or DeepSpeed job.

Importing this package loads neither torch nor a training framework: what is here describes state
and plans moves, and never touches data.
"""

from importlib.metadata import version

from tenplex_megatron.config import ElasticPolicy
from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.core.plan import ReshardPlan, Topology, Transfer, plan_reshard
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec

__all__ = [
    "Box",
    "ElasticPolicy",
    "ParallelLayout",
    "Region",
    "ReshardPlan",
    "TensorCollection",
    "TensorSpec",
    "Topology",
    "Transfer",
    "__version__",
    "plan_reshard",
]

__version__ = version("tenplex-megatron")
