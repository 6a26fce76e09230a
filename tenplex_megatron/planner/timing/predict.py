"""How long does one training step take under a strategy?

Closed formulas over columns of candidates; every formula is a pure function with its source. The
pieces per layer and per stage are public, so that a search can choose per layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.strategy import Strategy
from tenplex_megatron.planner.timing import collectives, communication, compute, pipeline
from tenplex_megatron.planner.timing.candidates import FULL, SELECTIVE, Array, Candidates

__all__ = [
    "LayerTimes",
    "TimePrediction",
    "TimePredictions",
    "edge_times",
    "layer_times",
    "outside_passes",
    "predict_time",
    "predict_times",
    "stage_parameters",
]

_OVERLAP = 3.0
"""Power of the mean of device and host time: the larger, the more of the shorter one hides."""
_OVERLAP_WITH_TENSOR_PARALLEL = 2.0
"""The same with collectives inside the layer: whoever is late there holds up all ranks, so no host
runs far ahead of its device."""


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer per micro-batch, communication inside it and host time included."""

    forward_s: Array
    backward_s: Array
    full_recompute_s: Array
    """What recomputing the whole layer adds."""
    selective_recompute_s: Array
    """What recomputing the attention core adds."""


@dataclass(frozen=True, slots=True)
class TimePredictions:
    """Step times of many candidates."""

    step_s: Array
    parts: Mapping[str, Array]
    """What the step consists of; the parts sum to `step_s`."""


@dataclass(frozen=True, slots=True)
class TimePrediction:
    """The step time of one strategy."""

    step_s: float
    parts: Mapping[str, float]
    """What the step consists of; the parts sum to `step_s`."""


def predict_time(
    model: ModelProfile, cluster: ClusterProfile, strategy: Strategy
) -> TimePrediction:
    """Seconds of one step of `model` under `strategy`."""
    found = predict_times(cluster, Candidates.of(model, [strategy]))
    parts = {name: float(values[0]) for name, values in found.parts.items()}
    return TimePrediction(float(found.step_s[0]), parts)


def predict_times(cluster: ClusterProfile, candidates: Candidates) -> TimePredictions:
    """Seconds of one step of every candidate."""
    c = candidates
    layer = layer_times(cluster, c)
    recomputed = np.where(c.recompute == FULL, layer.full_recompute_s, 0.0) + np.where(
        c.recompute == SELECTIVE, layer.selective_recompute_s, 0.0
    )
    stages = pipeline.stage_times(
        c,
        layer_s=layer.forward_s + layer.backward_s,
        recomputed_s=recomputed,
        edges=edge_times(cluster, c),
    )
    busy, bubble = pipeline.schedule_s(c, stages, communication.send_s(cluster, c))
    last_backward = _layers_per_stage(c) * (layer.backward_s + recomputed)
    parts = {
        "passes": busy,
        "bubble": bubble,
        **outside_passes(cluster, c, busy_s=busy, last_backward_s=last_backward),
    }
    return TimePredictions(np.sum(list(parts.values()), axis=0), parts)


def outside_passes(
    cluster: ClusterProfile, candidates: Candidates, *, busy_s: Array, last_backward_s: Array
) -> dict[str, Array]:
    """What a step takes besides its passes and their bubble.

    `busy_s` is the time of all passes of the slowest stage, `last_backward_s` that of its backward
    pass for one micro-batch.
    """
    c = candidates
    parameters = stage_parameters(c)
    return {
        "data_parallel": communication.data_parallel_s(cluster, c, parameters, last_backward_s),
        "weight_gathering": communication.weight_gathering_s(cluster, c, parameters, busy_s),
        "tied_embedding": communication.tied_embedding_s(cluster, c),
        "optimizer": _optimizer_s(cluster, c, parameters),
        "fixed": np.full(len(c), cluster.fixed_s),
    }


def edge_times(cluster: ClusterProfile, candidates: Candidates) -> tuple[Array, Array]:
    """What the first stage does for the embedding and the last for the loss, per micro-batch."""
    return compute.embedding_s(cluster, candidates), _loss_s(cluster, candidates)


def layer_times(cluster: ClusterProfile, candidates: Candidates) -> LayerTimes:
    """One layer: what device and host need for it, which overlap.

    The host launches the kernels of small layers more slowly than the device runs them; the longer
    of the two dominates. Some kernels are bound by one and some by the other, so the longer one
    grows by a part of the shorter, which a power mean describes.
    """
    c = candidates
    device = compute.layer_compute(cluster, c)
    forward_comm, backward_comm = communication.layer_communication_s(cluster, c)
    slowest = 1.0 + cluster.launch_spread * np.log2(c.tp)
    power = np.where(c.tp > 1.0, _OVERLAP_WITH_TENSOR_PARALLEL, _OVERLAP)

    def overlapped(device_s: Array, host_s: float) -> Array:
        return np.power(device_s**power + (host_s * slowest) ** power, 1.0 / power)

    forward = overlapped(device.forward_s + forward_comm, cluster.launch_forward_s)
    backward = overlapped(device.backward_s + backward_comm, cluster.launch_backward_s)
    return LayerTimes(forward, backward, forward, device.attention_core_s)


def stage_parameters(candidates: Candidates) -> tuple[Array, Array]:
    """Parameters of the largest stage on one rank, biases and norms left out: dense and experts.

    The dense ones are replicated over dp x cp ranks, an expert's over the ep-th part of them.
    """
    c = candidates
    h = c.hidden_size
    mlp = (1.0 + c.mlp_width) * h
    routed = mlp * c.shared_expert_ffn_size + h * c.num_experts
    latent = c.query_rank * (h + c.score_size) + c.position_size * h
    latent += c.kv_rank * (h + c.query_size + c.value_size)
    into = np.where(c.kv_rank > 0.0, latent, h * (c.query_size + c.kv_size))
    dense = mlp * c.ffn_size
    layer = into + h * c.value_size + dense + c.expert_layers * (routed - dense)
    tables = np.where((c.pp == 1.0) & (c.is_tied == 0.0), 2.0, 1.0)
    layers = _layers_per_stage(c)
    experts = c.expert_layers * c.num_experts / c.ep * mlp * c.expert_ffn_size
    return (layers * layer + tables * c.vocab_size * h) / c.tp, layers * experts / c.tp


def _layers_per_stage(candidates: Candidates) -> Array:
    c = candidates
    return np.maximum(np.maximum(c.first_stage_layers, c.last_stage_layers), c.middle_stage_layers)


def _loss_s(cluster: ClusterProfile, candidates: Candidates) -> Array:
    """The loss with its reductions: maximum, target and sum of the scores, all fp32 per token."""
    c = candidates
    link = collectives.group_link(cluster, c.tp, np.ones_like(c.tp))
    return compute.loss_s(cluster, c) + 3.0 * collectives.all_reduce_s(link, 4.0 * c.tokens)


def _optimizer_s(
    cluster: ClusterProfile, candidates: Candidates, parameters: tuple[Array, Array]
) -> Array:
    """One pass over gradients, moments and main weights, a share of them when sharded."""
    c = candidates
    dense, experts = parameters
    replicas = c.dp * c.cp
    sharded = (dense + experts * c.ep) / replicas
    updated = np.where(c.zero_stage > 0.0, sharded, dense + experts)
    size_bytes = cluster.optimizer_bytes_per_parameter * updated
    return size_bytes / (cluster.memory_bandwidth * cluster.memory_efficiency)
