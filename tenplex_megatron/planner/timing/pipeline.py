"""How do the times of pipeline stages add up to the time of one step's passes?

Stages hold equal layers up to the first and the last, which also hold embedding and loss, so the
first, the largest middle and the last stage decide.
"""

from dataclasses import dataclass

import numpy as np

from tenplex_megatron.planner.timing.candidates import Array, Candidates

_EXPOSED_SEND = 0.3
"""The part of a message that shows with interleaved stages, which send while they compute
(Megatron's `--overlap-p2p-communication`, on by default with virtual stages)."""

__all__ = ["StageTimes", "schedule_s", "stage_times"]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds per micro-batch, both passes, of the stages of every candidate."""

    first_s: Array
    middle_s: Array
    """The largest stage between the first and the last; 0 when there is none."""
    last_s: Array
    total_s: Array
    """All stages together: the way of one micro-batch through the pipeline and back."""

    @property
    def slowest_s(self) -> Array:
        """The stage that sets the pace."""
        return np.maximum(np.maximum(self.first_s, self.last_s), self.middle_s)


def stage_times(
    candidates: Candidates, *, layer_s: Array, recomputed_s: Array, edges: tuple[Array, Array]
) -> StageTimes:
    """Stages of layers that take `layer_s`, and `recomputed_s` more where they recompute.

    `edges` are the seconds of the embedding on the first and of the loss on the last stage.
    """
    c = candidates

    def layers_s(layers: Array) -> Array:
        recomputing = np.minimum(layers, c.recompute_layers * c.vpp)
        return layers * layer_s + recomputing * recomputed_s

    embedding_s, loss_s = edges
    is_single = c.pp == 1.0
    middle = layers_s(c.middle_stage_layers)
    first = layers_s(c.first_stage_layers) + embedding_s
    last = np.where(is_single, 0.0, layers_s(c.last_stage_layers) + loss_s)
    first = first + np.where(is_single, loss_s, 0.0)
    between = c.num_layers - c.first_stage_layers - np.where(is_single, 0.0, c.last_stage_layers)
    stages_between = np.maximum(c.pp - 2.0, 0.0)
    recomputing = np.minimum(between, c.recompute_layers * c.vpp * stages_between)
    total = first + last + between * layer_s + recomputing * recomputed_s
    return StageTimes(first, middle, last, total)


def schedule_s(candidates: Candidates, stages: StageTimes, send_s: Array) -> tuple[Array, Array]:
    """Busy time of the slowest stage and the bubble around it, of one step.

    1F1B: every micro-batch passes the slowest stage; filling and draining costs one pass through
    the others, shortened by the number of model chunks per stage. `send_s` is one message to a
    neighbour. Source: Narayanan et al., arXiv 2104.04473, section 2.2.
    """
    c = candidates
    exposed = np.where(c.vpp > 1.0, _EXPOSED_SEND, 1.0)
    sends = np.where(c.pp > 1.0, 2.0 * exposed * send_s * c.vpp, 0.0)
    busy = c.num_micro_batches * (stages.slowest_s + sends)
    bubble = (stages.total_s - stages.slowest_s) / c.vpp + (c.pp - 1.0) * 2.0 * send_s
    return busy, bubble
