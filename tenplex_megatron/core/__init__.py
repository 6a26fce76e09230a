"""Geometry of the training state and plans between layouts; standard library and numpy only."""

from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.mesh import Coordinates, ExpertCoordinates, ParallelLayout
from tenplex_megatron.core.plan import ReshardPlan, Topology, Transfer, plan_reshard
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec

__all__ = [
    "Box",
    "Coordinates",
    "ExpertCoordinates",
    "ParallelLayout",
    "Region",
    "ReshardPlan",
    "TensorCollection",
    "TensorSpec",
    "Topology",
    "Transfer",
    "plan_reshard",
]
