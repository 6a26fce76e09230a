"""How fast and how large is each of many strategies, given as columns?

Joins the two cost models, `timing` and `memory`, which share nothing but the strategies.
"""

from dataclasses import fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.columns import ALL_LAYERS, PRECISIONS, Columns, Integers
from tenplex_megatron.planner.cuts import stage_sizes
from tenplex_megatron.planner.memory.predict import predict_memories
from tenplex_megatron.planner.memory.prices import Prices
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.strategy import Strategy
from tenplex_megatron.planner.timing.candidates import Candidates
from tenplex_megatron.planner.timing.predict import predict_times

__all__ = ["candidates", "memory_bytes", "step_times"]

type Floats = NDArray[np.float64]

_AXES = ("tp", "pp", "dp", "vpp", "cp", "ep", "micro_batch_size", "global_batch_size")
_CHOICES = (
    *("sequence_parallel", "zero_stage", "recompute", "is_flash"),
    *("overlaps_gradients", "overlaps_tensor_parallel", "loss_fusion"),
)


def candidates(model: ModelProfile, columns: Columns) -> Candidates:
    """The strategies as the formulas of time see them.

    Raises:
        LayoutError: the stages of a cut do not hold all layers.
    """
    sizes = np.array([stage_sizes(cut, model.num_layers) for cut in columns.cuts], dtype=np.float64)
    first, middle, last = sizes[columns.cut].T
    layers = columns.recompute_layers
    chosen = {name: getattr(columns, name).astype(np.float64) for name in (*_AXES, *_CHOICES)}
    chosen |= {
        "first_stage_layers": first,
        "middle_stage_layers": middle,
        "last_stage_layers": last,
        "recompute_layers": np.where(layers == ALL_LAYERS, model.num_layers, layers) * 1.0,
    }
    # What only model and precision decide.
    common = _common(model)
    for field in fields(Candidates):
        if field.name not in chosen:
            chosen[field.name] = getattr(common, field.name)[columns.precision]
    return Candidates(**chosen)


@lru_cache(maxsize=1 << 6)
def _common(model: ModelProfile) -> Candidates:
    layout = ParallelLayout(micro_batch_size=1)
    return Candidates.of(
        model,
        [Strategy(layout=layout, global_batch_size=1, precision=name) for name in PRECISIONS],
    )


def step_times(model: ModelProfile, cluster: ClusterProfile, columns: Columns) -> Floats:
    """Seconds of one step of every strategy."""
    return np.asarray(predict_times(cluster, candidates(model, columns)).step_s)


def memory_bytes(
    model: ModelProfile,
    cluster: ClusterProfile,
    columns: Columns,
    *,
    layouts: tuple[Columns, Prices, Integers] | None = None,
    recomputed: Integers | None = None,
) -> Floats:
    """Bytes that the fullest device of every strategy needs.

    Where strategies share layouts, `layouts` are those, their prices, and the layout of every
    strategy: prices are the same for all cuts and numbers of recomputed layers. With `recomputed`,
    `[variant, strategy]`, so is the result.
    """
    found = predict_memories(
        model, cluster, columns, layouts=layouts, recomputed=recomputed, is_decisive=True
    )
    return found.required_bytes
