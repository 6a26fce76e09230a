"""Where in its layout does a DeepSpeed rank stand, and how many samples make a step?"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.utils import groups

from tenplex_megatron.errors import UnsupportedLayoutError

__all__ = ["Place", "global_batch_size", "place_of"]


@dataclass(frozen=True, slots=True)
class Place:
    """Ranks and sizes of the three axes, as DeepSpeed numbers them."""

    pp: int
    num_stages: int
    tp: int
    tp_size: int
    dp: int
    dp_size: int

    def __str__(self) -> str:
        return (
            f"pp{self.pp}of{self.num_stages}.tp{self.tp}of{self.tp_size}"
            f".dp{self.dp}of{self.dp_size}"
        )


def place_of(engine: Any) -> Place:
    """The place of this rank.

    Raises:
        UnsupportedLayoutError: the model or its sequences are split in a way not described here.
    """
    if engine.sequence_parallel_size > 1:
        raise UnsupportedLayoutError(
            f"sequences are split over {engine.sequence_parallel_size} ranks, and no layout says "
            "so; train without sequence parallelism, or save and load a checkpoint instead"
        )
    tp, tp_size = 0, 1
    if engine.autotp_size() > 1:
        tp = groups.get_tensor_model_parallel_rank()
        tp_size = groups.get_tensor_model_parallel_world_size()
    elif (split := _own_split(engine)) > 1:
        raise UnsupportedLayoutError(
            f"the model is split over {split} ranks by an mpu of its own, and nothing says how; "
            "expected DeepSpeed's tensor_parallel configuration; save and load a checkpoint instead"
        )
    pp, num_stages = 0, 1
    if isinstance(engine.module, PipelineModule):
        pp, num_stages = engine.stage_id, engine.num_stages
    group = engine.seq_data_parallel_group
    return Place(pp, num_stages, tp, tp_size, dist.get_rank(group), dist.get_world_size(group))


def _own_split(engine: Any) -> int:
    """How many ranks hold one layer, as the script's own object says."""
    if isinstance(engine.module, PipelineModule):
        return int(engine.grid.get_slice_parallel_world_size())
    return 1 if engine.mpu is None else int(engine.mpu.get_model_parallel_world_size())


def global_batch_size(engine: Any) -> int:
    """Samples per step over all ranks.

    DeepSpeed's own count has the ranks of a tensor-parallel group several times
    (runtime/config.py).
    """
    micro, accumulation = (
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    )
    return int(micro * accumulation * engine.dp_world_size)
