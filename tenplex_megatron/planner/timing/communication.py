"""How long do ranks exchange within a layer, between stages and between replicas?

Times are seconds on one rank, what computation hides taken off. T is the number of tokens of a
micro-batch on the rank, h the hidden size.
"""

import numpy as np

from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.timing import collectives
from tenplex_megatron.planner.timing.candidates import FULL, Array, Candidates

__all__ = [
    "data_parallel_s",
    "layer_communication_s",
    "send_s",
    "tied_embedding_s",
    "weight_gathering_s",
]

_EXPOSED_TENSOR_PARALLEL = 0.5
"""The part of tensor-parallel communication that `--tp-comm-overlap` leaves visible."""
_LEAST_EXPOSED = 0.05
"""The part of a gradient reduction nothing hides: its last bucket is ready when the pass ends."""
_ZERO3_SERIAL = 0.15
"""The part of the shorter of computation and gathering that ZeRO-3 does not overlap."""


def layer_communication_s(cluster: ClusterProfile, candidates: Candidates) -> tuple[Array, Array]:
    """Tensor, context and expert parallel communication of one layer: forward and backward."""
    c = candidates
    tensor_forward, tensor_backward = _tensor_parallel_s(cluster, c)
    context = _context_parallel_s(cluster, c)
    experts = _expert_parallel_s(cluster, c)
    return (
        tensor_forward + context + experts,
        tensor_backward + 2.0 * context + experts,
    )


def _tensor_parallel_s(cluster: ClusterProfile, candidates: Candidates) -> tuple[Array, Array]:
    """Two all-reduces of the hidden states each way.

    With sequence parallelism they become reduce-scatters and all-gathers of the same volume, and
    the backward pass gathers the inputs of both blocks once more. Source: Korthikanti et al.,
    arXiv 2205.05198, section 4.2.2.
    """
    c = candidates
    link = collectives.group_link(cluster, c.tp, np.ones_like(c.tp))
    size_bytes = c.tokens * c.hidden_size * c.element_bytes
    reduce = collectives.all_reduce_s(link, size_bytes)
    gather = collectives.all_gather_s(link, size_bytes)
    exposed = np.where(c.overlaps_tensor_parallel > 0.0, _EXPOSED_TENSOR_PARALLEL, 1.0)
    forward = 2.0 * exposed * reduce
    gather = exposed * gather
    return forward, forward + np.where(c.sequence_parallel > 0.0, 2.0 * gather, 0.0)


def _context_parallel_s(cluster: ClusterProfile, candidates: Candidates) -> Array:
    """Keys and values of the other ranks, forward; the backward pass moves them and gradients.

    The exchange runs beside the attention it feeds, so only what is longer shows.
    """
    c = candidates
    if not np.any(c.cp > 1.0):
        return np.zeros(len(c))
    link = collectives.group_link(cluster, c.cp, c.tp)
    size_bytes = c.tokens * c.cp * c.kv_size / c.tp * c.element_bytes
    moved = collectives.all_gather_s(link, size_bytes)
    flops = c.tokens * c.seq_length * (c.score_size + c.value_size) / c.tp
    rate = cluster.peak_flops * cluster.gemm_efficiency * cluster.flash_efficiency
    attention = flops / rate
    return np.where(c.cp > 1.0, np.maximum(moved - attention, 0.0), 0.0)


def _expert_parallel_s(cluster: ClusterProfile, candidates: Candidates) -> Array:
    """Tokens to their experts and back: two all-to-alls."""
    c = candidates
    if not np.any(c.num_experts):
        return np.zeros(len(c))
    link = collectives.group_link(cluster, c.ep, c.tp)
    size_bytes = c.experts_per_token * c.tokens * c.hidden_size * c.element_bytes / c.tp
    once = collectives.all_to_all_s(cluster, link, c.tp, size_bytes)
    return 2.0 * c.expert_layers * once


def send_s(cluster: ClusterProfile, candidates: Candidates) -> Array:
    """The hidden states of one micro-batch to the next stage.

    Split over the tensor-parallel ranks with sequence parallelism, or when the framework does so
    without (arXiv 2104.04473, section 4.1).
    """
    c = candidates
    is_split = (c.sequence_parallel > 0.0) | cluster.scatters_sends
    shards = np.where(is_split, c.tp, 1.0)
    size_bytes = c.tokens * c.hidden_size * c.element_bytes / shards
    return collectives.send_s(cluster, c, size_bytes) + cluster.launch_send_s


def data_parallel_s(
    cluster: ClusterProfile,
    candidates: Candidates,
    parameters: tuple[Array, Array],
    last_backward_s: Array,
) -> Array:
    """Reducing the gradients over the replicas, less what hides behind the last backward pass.

    `parameters` are the dense ones of the rank and those of its experts, which have their own
    replicas. Up to ZeRO-2: an all-reduce, or a reduce-scatter of gradients and an all-gather of
    weights. Source: Rajbhandari et al., arXiv 1910.02054, section 7.
    """
    c = candidates
    replicas = c.dp * c.cp
    links = (
        collectives.group_link(cluster, replicas, c.tp),
        collectives.group_link(cluster, replicas / c.ep, c.tp * c.ep),
    )
    total = np.zeros(len(c))
    for count, link in zip(parameters, links, strict=True):
        gradients = collectives.all_gather_s(link, c.gradient_bytes * count)
        weights = collectives.all_gather_s(link, c.element_bytes * count)
        reduced = gradients + np.where(c.zero_stage > 0.0, weights, gradients)
        total += np.where(count > 0.0, reduced, 0.0)
    hidden = np.minimum(cluster.overlap * last_backward_s, (1.0 - _LEAST_EXPOSED) * total)
    exposed = total - np.where(c.overlaps_gradients > 0.0, hidden, 0.0)
    return np.where(c.zero_stage < 3.0, exposed, 0.0)


def weight_gathering_s(
    cluster: ClusterProfile,
    candidates: Candidates,
    parameters: tuple[Array, Array],
    busy_s: Array,
) -> Array:
    """What ZeRO-3's gathers of weights and scatters of gradients add to the passes.

    Each micro-batch gathers all weights forward, backward and for recomputation, and reduces the
    gradients. Each rank receives everything through its own network card: on the ZeRO-3 rows of
    Narayanan et al., arXiv 2104.04473, table 2, cards are not shared within a node.
    """
    c = candidates
    group = c.dp * c.cp
    crosses = group * c.tp > cluster.devices_per_node
    bandwidth = np.where(
        crosses,
        cluster.network_bandwidth * cluster.network_efficiency,
        cluster.node_bandwidth * cluster.node_efficiency,
    )
    passes = 3.0 + (c.recompute == FULL)
    size_bytes = passes * c.element_bytes * sum(parameters) * (group - 1.0) / group
    moved = c.num_micro_batches * size_bytes / bandwidth
    both = np.maximum(busy_s, moved) + _ZERO3_SERIAL * np.minimum(busy_s, moved)
    return np.where(c.zero_stage == 3.0, both - busy_s, 0.0)


def tied_embedding_s(cluster: ClusterProfile, candidates: Candidates) -> Array:
    """First and last stage reduce the gradients of the table they share."""
    c = candidates
    link = collectives.group_link(cluster, np.full_like(c.pp, 2.0), c.tp * c.cp * c.dp)
    size_bytes = c.gradient_bytes * c.vocab_size * c.hidden_size / c.tp
    reduced = collectives.all_reduce_s(link, size_bytes)
    return np.where((c.pp > 1.0) & (c.is_tied > 0.0), reduced, 0.0)
