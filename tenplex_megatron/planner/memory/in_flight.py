"""How many micro-batches of every model chunk are in flight when a stage keeps most?

In flight is what has run forward and not yet backward when the first backward pass starts: at
that moment a stage keeps most.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["chunks_in_flight"]


def chunks_in_flight(
    stage: ArrayLike, chunk: ArrayLike, pp: ArrayLike, vpp: ArrayLike, num_micro_batches: ArrayLike
) -> NDArray[np.int64]:
    """Micro-batches in flight of a chunk of a stage when its first backward pass starts.

    Interleaved, each stage runs `pp` micro-batches of one chunk, then as many of the next
    (megatron/core/pipeline_parallel/schedules.py, `get_pp_rank_microbatches`).

    >>> chunks_in_flight(0, [0], 4, 1, 8), chunks_in_flight(0, [0, 1], 4, 2, 8)
    (array([4]), array([7, 4]))
    """
    later = np.subtract(pp, stage) - 1
    warm_up = np.where(np.equal(vpp, 1), later, 2 * later + np.subtract(vpp, 1) * pp)
    units = np.minimum(np.multiply(num_micro_batches, vpp), warm_up + 1)
    rounds, rest = np.divmod(units, np.multiply(pp, vpp))
    counts: NDArray[np.int64] = rounds * pp + np.clip(rest - np.multiply(chunk, pp), 0, pp)
    return counts
