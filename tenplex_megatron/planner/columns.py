"""How are many strategies written down at once, so that numpy works on all of them?

One array per choice, one entry per strategy. How layers are cut into stages is a place in a list,
because many strategies share a cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self, overload

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.planner.strategy import LossFusion, Precision, Recompute, Strategy

__all__ = [
    "ALL_LAYERS",
    "FUSIONS",
    "PRECISIONS",
    "RECOMPUTES",
    "Columns",
    "Cut",
    "Integers",
    "Strategies",
    "distinct",
    "repeated",
]

type Integers = NDArray[np.int64]
type Cut = tuple[int, int, tuple[int, ...] | None]
"""PP, VPP and the layers of each (virtual) stage in model order, None where all are equal."""

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "fp8")
FUSIONS: tuple[LossFusion, ...] = ("none", "native", "te")
ALL_LAYERS = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Strategies; flags are 0 or 1, kinds are places in the lists above."""

    tp: Integers
    pp: Integers
    dp: Integers
    vpp: Integers
    cp: Integers
    ep: Integers
    micro_batch_size: Integers
    global_batch_size: Integers
    sequence_parallel: Integers
    zero_stage: Integers
    recompute: Integers
    recompute_layers: Integers
    """As in `Strategy`, ALL_LAYERS for None."""
    precision: Integers
    is_flash: Integers
    loss_fusion: Integers
    overlaps_gradients: Integers
    overlaps_tensor_parallel: Integers
    cut: Integers
    """Place in `cuts`."""
    cuts: Sequence[Cut]

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def num_micro_batches(self) -> Integers:
        """Micro-batches of one step and replica."""
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @classmethod
    def of(cls, strategies: Sequence[Strategy]) -> Self:
        """The same strategies as columns."""
        cuts: dict[Cut, int] = {}
        rows = [_row(strategy, cuts) for strategy in strategies]
        table = np.array(rows, dtype=np.int64).reshape(len(rows), len(fields(cls)) - 1)
        names = [field.name for field in fields(cls)][:-1]
        return cls(**dict(zip(names, table.T.copy(), strict=True)), cuts=tuple(cuts))

    def at(self, places: Integers) -> Self:
        """Some of them."""
        names = [field.name for field in fields(self)][:-1]
        return type(self)(**{name: getattr(self, name)[places] for name in names}, cuts=self.cuts)

    @classmethod
    def joined(cls, parts: Sequence[Self], cuts: Sequence[Cut]) -> Self:
        """All of them, whose cuts are places in `cuts`."""
        names = [field.name for field in fields(cls)][:-1]
        columns = {name: np.concatenate([getattr(one, name) for one in parts]) for name in names}
        return cls(**columns, cuts=cuts)

    def strategy(self, place: int) -> Strategy:
        """One of them as a value."""
        pp, vpp, stage_layers = self.cuts[self.cut[place]]
        layers = int(self.recompute_layers[place])
        return Strategy(
            layout=ParallelLayout(
                int(self.tp[place]),
                pp,
                int(self.dp[place]),
                vpp,
                int(self.cp[place]),
                int(self.ep[place]),
                int(self.micro_batch_size[place]),
                stage_layers,
            ),
            global_batch_size=int(self.global_batch_size[place]),
            sequence_parallel=bool(self.sequence_parallel[place]),
            zero_stage=int(self.zero_stage[place]),
            recompute=RECOMPUTES[self.recompute[place]],
            recompute_layers=None if layers == ALL_LAYERS else layers,
            precision=PRECISIONS[self.precision[place]],
            is_flash=bool(self.is_flash[place]),
            loss_fusion=FUSIONS[self.loss_fusion[place]],
            overlaps_gradients=bool(self.overlaps_gradients[place]),
            overlaps_tensor_parallel=bool(self.overlaps_tensor_parallel[place]),
        )


class Strategies(Sequence[Strategy]):
    """Strategies as columns, which become values when they are asked for."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, index: int) -> Strategy: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Strategy]: ...
    def __getitem__(self, index: int | slice) -> Strategy | Sequence[Strategy]:
        if isinstance(index, slice):
            return Strategies(self.columns.at(np.arange(len(self))[index]))
        return self.columns.strategy(range(len(self))[index])

    def with_layout(self, layout: ParallelLayout) -> list[int]:
        """Places of the strategies of this layout."""
        columns = self.columns
        cut = (layout.pp, layout.vpp, layout.stage_layers)
        known = [place for place, one in enumerate(columns.cuts) if one == cut]
        same = np.isin(columns.cut, known) & (columns.tp == layout.tp) & (columns.dp == layout.dp)
        same &= (columns.cp == layout.cp) & (columns.ep == layout.ep)
        same &= columns.micro_batch_size == (layout.micro_batch_size or 0)
        places = np.flatnonzero(same)
        return [int(place) for place in places]


def distinct(*columns: Integers) -> tuple[list[tuple[int, ...]], Integers]:
    """The different rows of some columns, and which of them each row is.

    >>> distinct(np.array([3, 1, 3]), np.array([4, 4, 4]))
    ([(1, 4), (3, 4)], array([1, 0, 1]))
    """
    key = columns[0]
    for column in columns[1:]:
        key = key * (int(column.max(initial=0)) + 1) + column
    _, places, row = np.unique(key, return_index=True, return_inverse=True)
    return list(zip(*(column[places].tolist() for column in columns), strict=True)), row


def repeated(start: Integers, count: Integers) -> tuple[Integers, Integers]:
    """For runs of numbers: which run each one is of, and the number.

    >>> repeated(np.array([5, 0]), np.array([2, 3]))
    (array([0, 0, 1, 1, 1]), array([5, 6, 0, 1, 2]))
    """
    run = np.repeat(np.arange(len(count)), count)
    return run, np.arange(len(run)) + (start - np.cumsum(count) + count)[run]


_RECOMPUTE = {kind: index for index, kind in enumerate(RECOMPUTES)}
_PRECISION = {kind: index for index, kind in enumerate(PRECISIONS)}
_FUSION = {kind: index for index, kind in enumerate(FUSIONS)}


def _row(strategy: Strategy, cuts: dict[Cut, int]) -> tuple[int, ...]:
    layout, layers = strategy.layout, strategy.recompute_layers
    return (
        layout.tp,
        layout.pp,
        layout.dp,
        layout.vpp,
        layout.cp,
        layout.ep,
        strategy.micro_batch_size,
        strategy.global_batch_size,
        strategy.sequence_parallel,
        strategy.zero_stage,
        _RECOMPUTE[strategy.recompute],
        ALL_LAYERS if layers is None else layers,
        _PRECISION[strategy.precision],
        strategy.is_flash,
        _FUSION[strategy.loss_fusion],
        strategy.overlaps_gradients,
        strategy.overlaps_tensor_parallel,
        cuts.setdefault((layout.pp, layout.vpp, layout.stage_layers), len(cuts)),
    )
