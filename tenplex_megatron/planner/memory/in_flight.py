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
    stage, chunk, pp, vpp, num_micro_batches = np.broadcast_arrays(
        stage, chunk, pp, vpp, num_micro_batches
    )
    later = pp - stage - 1
    counts: NDArray[np.int64] = np.minimum(num_micro_batches, later + 1)
    some = vpp > 1
    if some.any():
        later, chunk, pp, vpp = (column[some] for column in (later, chunk, pp, vpp))
        warm_up = 2 * later + (vpp - 1) * pp
        units = np.minimum(num_micro_batches[some] * vpp, warm_up + 1)
        rounds, rest = np.divmod(units, pp * vpp)
        counts[some] = rounds * pp + np.clip(rest - chunk * pp, 0, pp)
    return counts
