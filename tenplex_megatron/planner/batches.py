"""On how many data-parallel ranks does a global batch stay exact, and cut how?"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["BatchCut", "batch_cuts", "richer_batches"]


@dataclass(frozen=True, slots=True, order=True)
class BatchCut:
    """A global batch on so many ranks: micro-batches of `micro` samples, `accumulation` each."""

    ranks: int
    micro: int
    accumulation: int


def batch_cuts(batch: int, micros: Iterable[int], ranks: Iterable[int]) -> list[BatchCut]:
    """Every way to cut a batch without a rest, by ranks and micro-batch size.

    >>> batch_cuts(12, (1, 4), range(3, 6))
    [BatchCut(ranks=3, micro=1, accumulation=4), BatchCut(ranks=3, micro=4, accumulation=1), \
BatchCut(ranks=4, micro=1, accumulation=3)]
    """
    sizes = sorted(set(micros))
    return [
        BatchCut(count, micro, batch // (micro * count))
        for count in sorted(set(ranks))
        for micro in sizes
        if batch % (micro * count) == 0
    ]


def richer_batches(
    batch: int, micros: Sequence[int], ranks: Sequence[int], *, within: float = 0.25, most: int = 3
) -> list[tuple[int, int]]:
    """Batches near `batch` that run on more of the numbers of ranks, and on how many; best first.

    What DeepSpeed's elasticity configuration chose for a job (removed in DeepSpeed 0.19).

    >>> richer_batches(14, (1,), range(1, 9))
    [(12, 5), (16, 4), (18, 4)]
    """
    now = _worlds(batch, micros, ranks)
    near = range(max(1, round(batch * (1 - within))), round(batch * (1 + within)) + 1)
    found = [(other, _worlds(other, micros, ranks)) for other in near]
    better = [pair for pair in found if pair[1] > now]
    return sorted(better, key=lambda pair: (-pair[1], abs(pair[0] - batch)))[:most]


def _worlds(batch: int, micros: Sequence[int], ranks: Sequence[int]) -> int:
    return len({cut.ranks for cut in batch_cuts(batch, micros, ranks)})
