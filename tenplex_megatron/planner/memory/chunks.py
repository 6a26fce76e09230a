"""Which layers does every model chunk of every pipeline stage hold, for many cuts at once?

Only some stages can be the fullest. Stages between the first and the last that hold the same need
less the later they come, because fewer micro-batches are in flight; so the first of each kind
stands for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.planner.columns import Cut, Integers, repeated
from tenplex_megatron.planner.profile import ModelProfile

__all__ = ["Chunks", "CutTable"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunks:
    """Model chunks of stages of strategies; those of one stage follow each other."""

    strategy: Integers
    """Place of the strategy in its columns."""
    stage: Integers
    number: Integers
    """Which chunk of its stage, from 0."""
    dense: Integers
    """Layers without experts."""
    experts: Integers
    """Layers with experts."""
    has_embedding: Integers
    has_output: Integers
    stages: Integers
    """Where each stage begins."""

    def __len__(self) -> int:
        return len(self.stage)

    def of(self, strategy: Integers) -> Self:
        """The same chunks as those of other strategies."""
        return replace(self, strategy=strategy)

    def at(self, kept: NDArray[np.bool_]) -> Self:
        """The chunks of some strategies, all of each."""
        names = [field.name for field in fields(self)][:-1]
        columns = {name: getattr(self, name)[kept] for name in names}
        return type(self)(**columns, stages=np.flatnonzero(columns["number"] == 0))


@dataclass(frozen=True, slots=True, eq=False)
class CutTable:
    """The chunks of some cuts."""

    columns: Integers
    """The columns of `Chunks` from `stage` to `has_output`, `[column, chunk]`."""
    starts: Integers
    """Where each cut begins, and where the last one ends."""

    @classmethod
    def of(cls, model: ModelProfile, cuts: Sequence[Cut], *, is_decisive: bool) -> Self:
        """The chunks of all stages, or of those alone that can be the fullest."""
        dense = model.num_dense_layers if model.num_experts else model.num_layers
        parts = [_chunks_of_cut(model.num_layers, dense, cut, is_decisive) for cut in cuts]
        counts = [part.shape[1] for part in parts]
        return cls(np.concatenate(parts, axis=1), np.cumsum([0, *counts]))

    def chunks(self, cut: Integers) -> Chunks:
        """The chunks of strategies with these cuts."""
        strategy, place = repeated(self.starts[cut], self.starts[cut + 1] - self.starts[cut])
        stage, number, *rest = self.columns[:, place]
        return Chunks(
            strategy=strategy,
            stage=stage,
            number=number,
            dense=rest[0],
            experts=rest[1],
            has_embedding=rest[2],
            has_output=rest[3],
            stages=np.flatnonzero(number == 0),
        )


@lru_cache(maxsize=1 << 15)
def _chunks_of_cut(num_layers: int, num_dense: int, cut: Cut, is_decisive: bool) -> Integers:
    pp, vpp, stage_layers = cut
    total = pp * vpp
    if stage_layers is None:
        layers = np.full(total, num_layers // total)
    elif len(stage_layers) == pp:
        layers = np.tile(np.array(stage_layers) // vpp, vpp)
    else:
        layers = np.array(stage_layers)
    before = np.cumsum(layers) - layers
    dense = np.clip(num_dense - before, 0, layers)
    number, stage = np.divmod(np.arange(total), pp)
    columns = np.zeros((6, total), dtype=np.int64)
    columns[:4] = stage, number, dense, layers - dense
    columns[4, 0] = columns[5, -1] = 1
    kept = _decisive(columns[2:4], pp, vpp) if is_decisive else np.arange(pp)
    # Chunks of a stage are `pp` apart.
    return columns[:, (kept[:, None] + np.arange(vpp) * pp).ravel()]


def _decisive(layers: Integers, pp: int, vpp: int) -> Integers:
    """Stages that can be the fullest."""
    kinds: dict[bytes, int] = {}
    by_stage = layers.reshape(2, vpp, pp)
    for stage in range(1, pp - 1):
        kinds.setdefault(by_stage[:, :, stage].tobytes(), stage)
    return np.unique([0, *kinds.values(), pp - 1])
