"""Which random streams does a rank carry, as bytes, and how are they derived when none fits?

A stream belongs to a coordinate (pipeline, tensor, expert rank of their sizes), not to a rank: two
layouts with equal TP, PP and EP continue the same streams whatever their DP.  When TP, PP or EP
change no stored stream fits; the new ones are derived from (seed, step), equal on every run.
"""

from collections.abc import Mapping

import torch
from megatron.core import mpu, tensor_parallel
from megatron.training.initialize import _set_random_seed

from tenplex_megatron.adapters.streams import (
    derived_seed,
    export_process_streams,
    export_tracked_streams,
    import_process_streams,
    import_tracked_streams,
)

__all__ = ["coordinate_name", "export_streams", "import_streams", "reseed"]


def coordinate_name(data_parallel_random_init: bool) -> str:
    """The place whose streams this rank carries, e.g. "pp0of2.tp1of2.ep0of1"."""
    parts = [
        f"pp{mpu.get_pipeline_model_parallel_rank()}of{mpu.get_pipeline_model_parallel_world_size()}",
        f"tp{mpu.get_tensor_model_parallel_rank()}of{mpu.get_tensor_model_parallel_world_size()}",
        f"ep{mpu.get_expert_model_parallel_rank()}of{mpu.get_expert_model_parallel_world_size()}",
    ]
    if data_parallel_random_init:
        rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        parts.append(f"dp{rank}of{size}")
    return ".".join(parts)


def export_streams() -> dict[str, torch.Tensor]:
    """Every stream of this process as 1-D uint8."""
    return {
        **export_process_streams(),
        "device": torch.cuda.get_rng_state().clone(),
        **export_tracked_streams(tensor_parallel.get_cuda_rng_tracker()),
    }


def import_streams(streams: Mapping[str, torch.Tensor]) -> None:
    """Set every stream of this process from `export_streams`."""
    import_process_streams(streams)
    torch.cuda.set_rng_state(streams["device"])
    import_tracked_streams(tensor_parallel.get_cuda_rng_tracker(), streams)


def reseed(seed: int, step: int, data_parallel_random_init: bool) -> None:
    """Fresh streams from (seed, step), Megatron's own per-rank offsets added."""
    _set_random_seed(derived_seed(seed, step), data_parallel_random_init)
