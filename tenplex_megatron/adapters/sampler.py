"""Which samples come next, whatever the number of data-parallel ranks?

The samples of a job are one endless stream: the data in one order, then in another, and so on.
Every global batch takes the next samples of the stream, also where one order ends and another
begins: nothing is left out, doubled or padded.  Micro-batch `m` of data-parallel rank `r` takes
positions `[(m * dp + r) * micro, (m * dp + r + 1) * micro)` of its global batch.  How many samples
are done is asked of the engine: workers of data loaders run ahead, and what they fetched does not
count.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.utils.data import Sampler

from tenplex_megatron.errors import ConfigError, LayoutError

__all__ = ["ElasticSampler"]

logger = logging.getLogger(__name__)

CHUNK = 4096
"""Samples looked up at once: enough to hide the cost of a call, few enough to cost no memory."""
ROUNDS = 12
"""Even, and enough that all orders of a few samples are equally likely."""
WORD = (1 << 64) - 1
WEYL = 0x9E3779B97F4A7C15
"""The odd step of Steele, Lea and Flood's SplitMix64, as are the constants of `_mix`."""

type _Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _Deal:
    """How a global batch is cut: into micro-batches of ranks."""

    micro: int
    accumulation: int
    rank: int
    dp: int

    def __post_init__(self) -> None:
        if min(self.micro, self.accumulation, self.dp) < 1 or not 0 <= self.rank < self.dp:
            raise ConfigError(
                f"a batch of {self.dp} ranks x {self.accumulation} x {self.micro} samples for rank "
                f"{self.rank}: expected sizes of at least 1, and a rank below {self.dp}"
            )

    @property
    def global_batch(self) -> int:
        return self.micro * self.accumulation * self.dp

    def positions(self, start: int, first: int, last: int) -> npt.NDArray[np.int64]:
        """Micro-batches `[first, last)` of this rank, counted from `start`; one row each."""
        turns = np.arange(first, last, dtype=np.int64)[:, None]
        return start + (turns * self.dp + self.rank) * self.micro + np.arange(self.micro)


class ElasticSampler(Sampler[int]):
    """The same samples in the same order at any number of ranks, resumable to the sample.

    For `DataLoader(data, sampler=sampler, batch_size=engine.train_micro_batch_size_per_gpu())`, or
    for `DataLoader(data, batch_sampler=sampler.batches())`, where no batch size can be wrong.

    One pass is the fewest whole global batches that hold as many samples as the data: the same
    number of steps at any layout.  The first pass of a resumed job is the rest of the one that was
    interrupted; a pass may begin when the engine has finished the one before.  There is no
    `set_epoch`: the order follows from the position in the stream.

    Samples are computed where they are needed, about 0.3 microseconds each.  A table of one order
    of 100 million samples would take 400 MB and 7 s in every rank, at every start and epoch.

    Args:
        data: the data, or its number of samples.
        seed: not negative; another one gives other orders.
        shuffle: whether the data comes in another order every time.
    """

    def __init__(self, data: Sized | int, *, seed: int = 0, shuffle: bool = True) -> None:
        if not isinstance(data, int | Sized):
            raise ConfigError(
                f"a {type(data).__name__} has no length, and a stream can't be resumed to the "
                "sample; expected data with a length, or the number of its samples"
            )
        self._length = data if isinstance(data, int) else len(data)
        if self._length < 1 or seed < 0:
            raise ConfigError(
                f"{self._length} samples with seed {seed}: expected at least one sample and a seed "
                "that is not negative"
            )
        self._seed = seed
        self._shuffle = shuffle
        self._bound: _Deal | None = None
        self._count: Callable[[], int] | None = None
        self._position = 0
        self._given = 0
        """One past the last position that was handed out since the sampler was bound."""
        self._ended = 0
        """The same for the last pass that was handed out to its end."""
        self._began = 0
        """Samples that were done when the sampler was bound."""
        self._reads = True

    def bind(
        self,
        *,
        micro: int,
        accumulation: int,
        rank: int,
        dp: int,
        consumed: Callable[[], int],
        reads: bool = True,
    ) -> None:
        """Deal to one rank of a layout; called by an adapter, before the data is iterated.

        Args:
            micro: samples of one micro-batch.
            accumulation: micro-batches of one rank in one step.
            rank: data-parallel rank of this process.
            dp: number of data-parallel ranks.
            consumed: how many samples all ranks have finished since training began; asked at the
                start of every pass and for every snapshot.
            reads: whether this process reads samples; inner stages of a pipeline do not.
        """
        self._bound = _Deal(micro, accumulation, rank, dp)
        self._count = consumed
        self._given = 0
        self._ended = 0
        self._began = consumed()
        self._reads = reads

    @property
    def consumed(self) -> int:
        """Samples of the stream that are done, over all ranks."""
        return self._position if self._count is None else self._count()

    @property
    def epoch(self) -> int:
        """The pass that the next sample belongs to."""
        return self.consumed // self._pass_length(self._deal())

    def batches(self) -> Sampler[list[int]]:
        """The micro-batches of this rank, for `DataLoader(batch_sampler=...)`."""
        return _MicroBatches(self)

    def samples_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Samples at positions of the stream; any shape."""
        if not self._shuffle:
            return positions % self._length
        return _shuffled(positions.reshape(-1), self._length, self._seed).reshape(positions.shape)

    def micro_batches(self) -> Iterator[list[int]]:
        """This rank's micro-batches from the next sample to the end of the pass.

        Raises:
            ConfigError: the sampler was bound while this iterator was in use, or the engine counts
                samples that this sampler did not give.
        """
        self._check_count()
        bound, deal, start = self._bound, self._deal(), self.consumed
        if start < self._ended and deal.rank == 0:
            logger.warning(
                "a pass begins at sample %s, but the one before gave all up to %s: those between "
                "come again. This is right if that pass was left early; if not, batch_size is not "
                "the engine's micro-batch size, or a prefetcher began the pass too early",
                start,
                self._ended,
            )
        left = self._pass_length(deal) - start % self._pass_length(deal)
        turns = -(-left // deal.global_batch) * deal.accumulation
        ahead = max(1, CHUNK // deal.micro)
        for first in range(0, turns, ahead):
            positions = deal.positions(start, first, min(first + ahead, turns))
            for turn, samples in enumerate(self.samples_at(positions).tolist(), first + 1):
                if self._bound is not bound:
                    raise ConfigError(
                        "the data loader was iterated before its sampler was bound to the engine; "
                        "wrap the engine first, then start to iterate"
                    )
                self._given = max(self._given, start + turn * deal.micro * deal.dp)
                yield samples
        self._ended = start + turns * deal.micro * deal.dp
        if self._count is None:
            self._position = self._ended

    def __iter__(self) -> Iterator[int]:
        """This rank's samples from the next one to the end of the pass."""
        for samples in self.micro_batches():
            yield from samples

    def __len__(self) -> int:
        """Samples of one rank in a whole pass, also where only a part of it is left."""
        deal = self._deal()
        return self._pass_length(deal) // deal.dp

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one rank in a whole pass."""
        return len(self) // self._deal().micro

    def state_dict(self) -> dict[str, Any]:
        """What a resumed job must know and agree on; JSON."""
        self._check_count()
        return {**self._data(), "consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where another sampler of the same data stood.

        Raises:
            LayoutError: the data, the seed or the shuffling is another one.
        """
        mine = self._data()
        theirs = {key: state[key] for key in mine}
        if mine != theirs:
            raise LayoutError(
                f"the snapshot was taken with samples of {theirs}, this run has {mine}; the order "
                "could not go on as before. Keep data, seed and shuffle as they were"
            )
        self._position = int(state["consumed"])

    def _data(self) -> dict[str, Any]:
        return {"length": self._length, "seed": self._seed, "shuffle": self._shuffle}

    def _deal(self) -> _Deal:
        """Without an engine every rank takes every `world size`-th sample."""
        if self._bound is not None:
            return self._bound
        if dist.is_available() and dist.is_initialized():
            return _Deal(1, 1, dist.get_rank(), dist.get_world_size())
        return _Deal(1, 1, 0, 1)

    def _pass_length(self, deal: _Deal) -> int:
        return -(-self._length // deal.global_batch) * deal.global_batch

    def _check_count(self) -> None:
        """An engine that is ahead of the sampler was fed smaller micro-batches, or other data."""
        is_bound = self._count is not None and self._reads
        if not is_bound or self.consumed <= max(self._given, self._began):
            return
        raise ConfigError(
            f"the engine has counted {self.consumed} samples, its sampler gave {self._given}: "
            "expected the data loader's batch_size to be the engine's micro-batch size, and no "
            "other loader; use batch_sampler=sampler.batches()"
        )


class _MicroBatches(Sampler[list[int]]):
    """The micro-batches of a sampler, of the size it is bound to when they are asked for."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return self._sampler.micro_batches()

    def __len__(self) -> int:
        return self._sampler.num_micro_batches


def _shuffled(positions: npt.NDArray[np.int64], length: int, seed: int) -> npt.NDArray[np.int64]:
    """Samples at positions of a stream of permutations of `length` samples.

    The data lies in a table barely larger than itself, whose columns are rotated, each by an amount
    of its own, then its rows, and so on (a Feistel network over two moduli: Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002).  What lands outside of the data goes on until it
    is inside.
    """
    rows = np.uint64(isqrt(length - 1) + 1)
    columns = np.uint64(-(-length // int(rows)))
    epoch, value = np.divmod(positions.astype(np.uint64), np.uint64(length))
    first = int(epoch.min())
    key = (epoch - np.uint64(first)).astype(np.intp)
    keys = _keys(seed, first, int(epoch.max()) + 1)
    todo = np.arange(value.size)
    while todo.size:
        row, column = np.divmod(value[todo], columns)
        chosen = keys[:, key[todo]]
        for turn in range(0, ROUNDS, 2):
            row = (row + _mix(column ^ chosen[turn]) % rows) % rows
            column = (column + _mix(row ^ chosen[turn + 1]) % columns) % columns
        value[todo] = row * columns + column
        todo = todo[value[todo] >= length]
    return value.astype(np.int64)


def _keys(seed: int, first: int, last: int) -> _Words:
    """Random words of shape (ROUNDS, last - first) for permutations `[first, last)`."""
    base = int(_mix(np.array([(seed + 1) * WEYL & WORD], np.uint64))[0])
    numbers = np.arange(first * ROUNDS, last * ROUNDS, dtype=np.uint64)
    words = _mix(np.array([base], np.uint64) + numbers * np.array([WEYL], np.uint64))
    return np.ascontiguousarray(words.reshape(last - first, ROUNDS).T)


def _mix(words: _Words) -> _Words:
    """A bijection of 64-bit words under which one changed bit changes half of all."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
