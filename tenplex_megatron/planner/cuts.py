"""Which cuts of the layers into pipeline stages are worth a try, whatever the layout is?

Balanced ones: equal stages, or stages of which the first and the last give up layers to embedding
and loss. Interleaved stages are model chunks of equal size, but the first and the last, which share
what is missing in every possible way. All other cuts depend on the layout (see `layers`).
"""

from functools import lru_cache

from tenplex_megatron.errors import LayoutError
from tenplex_megatron.planner.columns import Cut

__all__ = ["balanced_cuts", "stage_sizes"]


@lru_cache(maxsize=1 << 14)
def balanced_cuts(num_layers: int, pp: int, vpp: int, *, uneven: bool) -> tuple[Cut, ...]:
    """Balanced cuts into `pp` stages of `vpp` chunks, the equal one first; maybe none.

    What is left over goes to late stages, which keep fewer micro-batches in flight, but not to the
    last, which has the loss.

    >>> [sizes for _, _, sizes in balanced_cuts(6, 4, 1, uneven=True)]
    [(1, 2, 2, 1), (2, 2, 2, 0)]
    >>> [sizes for _, _, sizes in balanced_cuts(6, 2, 2, uneven=True)]
    [(2, 2, 2, 0), (1, 2, 2, 1), (0, 2, 2, 2)]
    """
    parts = pp * vpp
    found: list[Cut] = []
    if num_layers % parts == 0:
        found.append((pp, vpp, None))
    if uneven and pp > 1:
        sizes = _uneven_stages(num_layers, pp) if vpp == 1 else _uneven_chunks(num_layers, parts)
        found += [(pp, vpp, one) for one in sizes]
    return tuple(found)


def _uneven_stages(num_layers: int, pp: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for embedding, loss in ((0, 0), (0, 1), (1, 1)):
        share, rest = divmod(num_layers + embedding + loss, pp)
        if share == 0:
            continue
        sizes = [share] * pp
        for stage in range(pp - 1 - rest, pp - 1):
            sizes[stage] += 1
        sizes[0] -= embedding
        sizes[-1] -= loss
        if len(set(sizes)) > 1 and tuple(sizes) not in found:
            found.append(tuple(sizes))
    return found


def _uneven_chunks(num_layers: int, parts: int) -> list[tuple[int, ...]]:
    size = num_layers // parts + 1
    missing = size * parts - num_layers
    return [
        (size - first, *(size,) * (parts - 2), size - (missing - first))
        for first in range(max(0, missing - size), min(missing, size) + 1)
    ]


@lru_cache(maxsize=1 << 14)
def stage_sizes(cut: Cut, num_layers: int) -> tuple[int, int, int]:
    """Layers of the first, the largest middle and the last stage.

    >>> stage_sizes((4, 1, (1, 2, 2, 1)), 6), stage_sizes((2, 1, None), 6)
    ((1, 2, 1), (3, 0, 3))

    Raises:
        LayoutError: the stages do not hold all layers.
    """
    pp, vpp, sizes = cut
    if sizes is None:
        each, rest = divmod(num_layers, pp * vpp)
        if rest:
            raise LayoutError(
                f"PP{pp}, VPP{vpp}: {num_layers} layers do not divide over {pp * vpp} stages; give "
                "the layers per stage"
            )
        return each * vpp, each * vpp if pp > 2 else 0, each * vpp
    if sum(sizes) != num_layers:
        raise LayoutError(
            f"PP{pp}: stage layers sum to {sum(sizes)}, the model has {num_layers}; give every "
            "layer to one stage"
        )
    stages = [sum(sizes[stage::pp]) for stage in range(pp)]
    return stages[0], max(stages[1:-1], default=0), stages[-1]
