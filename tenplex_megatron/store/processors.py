"""How many processors does a rank have to itself, for work on bytes?"""

import os

__all__ = ["processors_per_rank"]

# More threads don't make the memory of one socket any faster.
_MOST = 4


def processors_per_rank() -> int:
    """Between 1 and 4: the processors this process may use, shared among the ranks of its node.

    torchrun's `LOCAL_WORLD_SIZE` says how many ranks a node has; without it there is one.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(len(os.sched_getaffinity(0)) // ranks, 1), _MOST)
