"""How long does one transformer layer, the embedding and the loss keep one device busy?

Times are seconds per micro-batch and rank, without communication. T is the number of tokens of a
micro-batch on the rank, h the hidden size, t the tensor-parallel size.
"""

from dataclasses import dataclass

import numpy as np

from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.timing.candidates import Array, Candidates

__all__ = ["LayerCompute", "embedding_s", "gemm_s", "layer_compute", "loss_s"]

_ELEMENTWISE_BACKWARD = 1.7
"""Backward over forward traffic of norms, residuals, dropout and activation functions."""
_FLASH_BACKWARD = 2.5
"""Backward over forward FLOPs of fused attention, which recomputes the scores: 5 matrix products
instead of 2. Source: Dao et al., FlashAttention, arXiv 2205.14135, section 3.1."""

_LOGIT_BYTES = np.array([52.0, 32.0, 10.0])
"""Memory traffic of the cross entropy per logit, both passes. Without fusion: a copy in fp32 (6
bytes read and written), maximum (4), difference (8), exponential (8), sum (4), quotient (8),
product with the incoming gradient (8), and its copy in 2 bytes (6). The native fusion joins
difference, exponential and sum (8 for 20), and the last two (6 for 14). Transformer Engine reads
the 2-byte logits twice, overwrites them with gradients (6) and scales those (4). Source:
Megatron-core tensor_parallel/cross_entropy.py and fusions/fused_cross_entropy.py."""


@dataclass(frozen=True, slots=True)
class LayerCompute:
    """One layer: its passes, and what of the forward pass selective recomputation repeats."""

    forward_s: Array
    backward_s: Array
    attention_core_s: Array


def gemm_s(cluster: ClusterProfile, candidates: Candidates, m: Array, n: Array, k: Array) -> Array:
    """Product of an (m, k) by a (k, n) matrix: bound by arithmetic or by memory.

    A product is computed in waves of one tile per multiprocessor, the last of which is half full
    on average. Source: NVIDIA, Matrix Multiplication Background User's Guide, wave quantization.
    """
    result = m * n
    peak = cluster.peak_flops * np.where(candidates.is_fp8 > 0.0, cluster.fp8_speedup, 1.0)
    flops = 2.0 * (result + 0.5 * cluster.gemm_wave) * k
    size_bytes = candidates.element_bytes * (m * k + k * n + result)
    return np.maximum(flops / (peak * cluster.gemm_efficiency), _traffic_s(cluster, size_bytes))


def _traffic_s(cluster: ClusterProfile, size_bytes: Array) -> Array:
    return size_bytes / (cluster.memory_bandwidth * cluster.memory_efficiency)


def layer_compute(cluster: ClusterProfile, candidates: Candidates) -> LayerCompute:
    """The passes of one transformer layer.

    The backward pass of a matrix product is two products of the same size (by weight and by
    input). Source: Narayanan et al., arXiv 2104.04473, appendix.
    """
    core_forward, core_backward = _attention_core_s(cluster, candidates)
    elementwise = _elementwise_s(cluster, candidates)
    gemm = _attention_gemm_s(cluster, candidates) + _mlp_gemm_s(cluster, candidates)
    return LayerCompute(
        forward_s=gemm + core_forward + elementwise,
        backward_s=2.0 * gemm + core_backward + _ELEMENTWISE_BACKWARD * elementwise,
        attention_core_s=np.where(candidates.is_flash > 0.0, 0.0, core_forward),
    )


def _attention_gemm_s(cluster: ClusterProfile, candidates: Candidates) -> Array:
    """Projections to queries, keys and values, and back.

    With latent attention every rank projects down, and tensor parallelism splits the way up.
    Source: DeepSeek-AI, arXiv 2405.04434, section 2.1; Megatron-core
    transformer/multi_latent_attention.py.
    """
    c = candidates

    def product(outputs: Array, inputs: Array) -> Array:
        return gemm_s(cluster, c, c.tokens, outputs, inputs)

    back = product(c.hidden_size, c.value_size / c.tp)
    direct = product((c.query_size + c.kv_size) / c.tp, c.hidden_size)
    if not np.any(c.kv_rank):
        return direct + back
    down = product(c.query_rank, c.hidden_size)
    down += product(c.kv_rank + c.position_size, c.hidden_size)
    up = product(c.score_size / c.tp, c.query_rank) + product(
        (c.query_size + c.value_size) / c.tp, c.kv_rank
    )
    return np.where(c.kv_rank > 0.0, down + up, direct) + back


def _mlp_gemm_s(cluster: ClusterProfile, candidates: Candidates) -> Array:
    """The two products of the MLP, or of the experts a rank holds with balanced routing.

    Of a model with both kinds of layers, the mean.
    """
    c = candidates

    def both(tokens: Array, width: Array) -> Array:
        return gemm_s(cluster, c, tokens, c.mlp_width * width / c.tp, c.hidden_size) + gemm_s(
            cluster, c, tokens, c.hidden_size, width / c.tp
        )

    dense = both(c.tokens, c.ffn_size)
    if not np.any(c.num_experts):
        return dense
    experts = np.maximum(c.num_experts, 1.0)
    tokens_per_expert = np.maximum(c.tokens * c.experts_per_token * c.ep / experts, 1.0)
    routed = experts / c.ep * both(tokens_per_expert, np.maximum(c.expert_ffn_size, 1.0))
    shared = np.where(
        c.shared_expert_ffn_size > 0.0,
        both(c.tokens, np.maximum(c.shared_expert_ffn_size, 1.0)),
        0.0,
    )
    return dense + c.expert_layers * (routed + shared - dense)


def _attention_core_s(cluster: ClusterProfile, candidates: Candidates) -> tuple[Array, Array]:
    """Scores, softmax and weighted values: forward and backward.

    Fused kernels skip the masked half of the scores; without them the scores go through memory.
    """
    c = candidates
    flops = 2.0 * c.tokens * c.seq_length * (c.score_size + c.value_size) / c.tp
    rate = cluster.peak_flops * cluster.gemm_efficiency
    fused = 0.5 * flops / (rate * cluster.flash_efficiency)
    scores = c.tokens * c.seq_length * c.num_heads / c.tp
    unfused = flops / (rate * cluster.attention_efficiency) + _traffic_s(
        cluster, scores * cluster.score_bytes * c.element_bytes / 2.0
    )
    is_flash = c.is_flash > 0.0
    return (
        np.where(is_flash, fused, unfused),
        np.where(is_flash, _FLASH_BACKWARD * fused, 2.0 * unfused),
    )


def _elementwise_s(cluster: ClusterProfile, candidates: Candidates) -> Array:
    """Traffic of two norms, two residuals, biases and the activation function, forward.

    Norms and residuals see whole tokens, a t-th of them with sequence parallelism; the rest is
    split by tensor parallelism. Source: Korthikanti et al., arXiv 2205.05198, sections 4.1, 4.2.
    Latents have norms of their own. Every copy of a token for an expert is read and written four
    times: sorted by rank and by expert, and back (Megatron-core
    transformer/moe/token_dispatcher.py).
    """
    c = candidates
    routed = c.expert_ffn_size * c.experts_per_token + c.shared_expert_ffn_size
    ffn = c.ffn_size + c.expert_layers * (routed - c.ffn_size)
    whole = 10.0 * c.hidden_size / np.where(c.sequence_parallel > 0.0, c.tp, 1.0)
    latents = 2.0 * (c.query_rank + c.kv_rank)
    copies = 8.0 * c.expert_layers * c.experts_per_token * c.hidden_size / c.tp
    split = (2.0 * (c.score_size + c.kv_size) + (3.0 + c.is_gated) * ffn) / c.tp
    elements = c.tokens * (whole + latents + copies + split)
    return _traffic_s(cluster, c.element_bytes * elements)


def embedding_s(cluster: ClusterProfile, candidates: Candidates) -> Array:
    """Looking up tokens, adding positions, and the scattered gradient: traffic only."""
    c = candidates
    shards = np.where(c.sequence_parallel > 0.0, c.tp, 1.0)
    return _traffic_s(cluster, 6.0 * c.tokens * c.hidden_size * c.element_bytes / shards)


def loss_s(cluster: ClusterProfile, candidates: Candidates) -> Array:
    """Output projection, forward and twice backward, and the cross entropy."""
    c = candidates
    columns = c.vocab_size / c.tp
    gemm = gemm_s(cluster, c, c.tokens, columns, c.hidden_size)
    logit_bytes = _LOGIT_BYTES[c.loss_fusion.astype(np.int64)]
    return 3.0 * gemm + _traffic_s(cluster, logit_bytes * c.tokens * columns)
