"""Which numbers of a model and its strategies do the cost formulas see?

Formulas work on columns: one float64 array per quantity, one entry per candidate. A single
prediction is the case of one entry, so there is one implementation of every formula.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import LayoutError
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.strategy import Strategy

__all__ = ["FULL", "SELECTIVE", "Array", "Candidates"]

type Array = NDArray[np.float64]

SELECTIVE = 1.0
FULL = 2.0
_RECOMPUTE = {"none": 0.0, "selective": SELECTIVE, "full": FULL}
_LOSS_FUSION = {"none": 0.0, "native": 1.0, "te": 2.0}
_ELEMENT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Columns of shape [candidates]; flags are 0 or 1, sizes are counts of elements."""

    num_layers: Array
    hidden_size: Array
    num_heads: Array
    query_size: Array
    """Channels of all heads together."""
    score_size: Array
    """Channels in which all queries meet keys: with latent attention those of positions too."""
    value_size: Array
    """Channels of the values as all heads see them."""
    kv_size: Array
    """Channels of all keys and values that attention reads."""
    query_rank: Array
    """Channels of the latent queries are made of; 0 without latent attention."""
    kv_rank: Array
    """Channels of the latent keys and values are made of, their positions not counted."""
    ffn_size: Array
    seq_length: Array
    vocab_size: Array
    is_gated: Array
    is_tied: Array
    num_experts: Array
    expert_layers: Array
    """The part of the layers that have experts."""
    experts_per_token: Array
    expert_ffn_size: Array
    shared_expert_ffn_size: Array
    tp: Array
    pp: Array
    dp: Array
    vpp: Array
    cp: Array
    ep: Array
    micro_batch_size: Array
    first_stage_layers: Array
    middle_stage_layers: Array
    """Layers of the largest stage between the first and the last; 0 when there is none."""
    last_stage_layers: Array
    global_batch_size: Array
    sequence_parallel: Array
    zero_stage: Array
    recompute: Array
    """0, SELECTIVE or FULL."""
    recompute_layers: Array
    """Layers per model chunk that recompute fully; as many as the model has for all of them."""
    element_bytes: Array
    """Bytes of an activation and of a weight in the forward pass."""
    gradient_bytes: Array
    """Bytes of a gradient as it is reduced: fp32 main gradients except with fp16 (Megatron's
    `--accumulate-allreduce-grads-in-fp32`, implied by `--bf16`)."""
    loss_fusion: Array
    """0: none, 1: native, 2: Transformer Engine's."""
    is_fp8: Array
    is_flash: Array
    overlaps_gradients: Array
    overlaps_tensor_parallel: Array

    @classmethod
    def of(cls, model: ModelProfile, strategies: Iterable[Strategy]) -> Self:
        """The candidate strategies of one model."""
        rows = [_strategy_sizes(model, each) for each in strategies]
        sizes = [np.full(len(rows), size, dtype=np.float64) for size in _model_sizes(model)]
        return cls._of_columns([*sizes, *_columns(rows, len(fields(cls)) - len(sizes))])

    @classmethod
    def of_pairs(cls, pairs: Iterable[tuple[ModelProfile, Strategy]]) -> Self:
        """Candidates of different models, one pair each."""
        rows = [_model_sizes(model) + _strategy_sizes(model, each) for model, each in pairs]
        return cls._of_columns(_columns(rows, len(fields(cls))))

    @classmethod
    def _of_columns(cls, columns: Iterable[Array]) -> Self:
        names = [field.name for field in fields(cls)]
        return cls(**dict(zip(names, columns, strict=True)))

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def tokens(self) -> Array:
        """Tokens of one micro-batch on one context-parallel rank."""
        return self.micro_batch_size * self.seq_length / self.cp

    @property
    def num_micro_batches(self) -> Array:
        """Micro-batches of one step and replica."""
        return np.ceil(self.global_batch_size / (self.micro_batch_size * self.dp))

    @property
    def position_size(self) -> Array:
        """Channels of the positions that the keys of all heads share; 0 without latents."""
        return (self.score_size - self.query_size) / self.num_heads

    @property
    def mlp_width(self) -> Array:
        """Columns of the first matrix of the MLP over its `ffn_size`: 2 when gated."""
        return 1.0 + self.is_gated


def _columns(rows: Sequence[tuple[float, ...]], count: int) -> Iterable[Array]:
    """The `count` columns of a table given by rows."""
    flat = np.fromiter(itertools.chain.from_iterable(rows), np.float64, count * len(rows))
    return np.ascontiguousarray(flat.reshape(len(rows), count).T)


def _model_sizes(model: ModelProfile) -> tuple[float, ...]:
    return (
        model.num_layers,
        model.hidden_size,
        model.num_heads,
        *_attention_sizes(model),
        model.ffn_size,
        model.seq_length,
        model.vocab_size,
        model.is_gated,
        model.is_tied,
        model.num_experts,
        1.0 - model.num_dense_layers / model.num_layers if model.num_experts else 0.0,
        model.experts_per_token,
        model.expert_ffn_size,
        model.shared_expert_ffn_size,
    )


def _attention_sizes(model: ModelProfile) -> tuple[float, ...]:
    """Channels of queries, scores, values, keys with values, and of both latents."""
    query, latent = model.num_heads * model.head_size, model.latent
    if latent is None:
        return query, query, query, 2 * model.num_query_groups * model.head_size, 0, 0
    score = query + model.num_heads * latent.rope_head_size
    value = model.num_heads * latent.value_head_size
    return query, score, value, score + value, latent.query_rank, latent.key_value_rank


def _strategy_sizes(model: ModelProfile, strategy: Strategy) -> tuple[float, ...]:
    layout = strategy.layout
    layers = strategy.recompute_layers
    precision = strategy.precision
    return (
        layout.tp,
        layout.pp,
        layout.dp,
        layout.vpp,
        layout.cp,
        layout.ep,
        strategy.micro_batch_size,
        *_stage_layers(layout, model.num_layers),
        strategy.global_batch_size,
        strategy.sequence_parallel,
        strategy.zero_stage,
        _RECOMPUTE[strategy.recompute],
        model.num_layers if layers is None else layers,
        _ELEMENT_BYTES[precision],
        2.0 if precision == "fp16" else 4.0,
        _LOSS_FUSION[strategy.loss_fusion],
        precision == "fp8",
        strategy.is_flash,
        strategy.overlaps_gradients,
        strategy.overlaps_tensor_parallel,
    )


def _stage_layers(layout: ParallelLayout, num_layers: int) -> tuple[float, float, float]:
    """Layers of the first, the largest middle and the last stage."""
    pp = layout.pp
    if layout.stage_layers is None:
        each, rest = divmod(num_layers, pp)
        if rest:
            raise LayoutError(
                f"{layout}: {num_layers} layers do not divide over {pp} stages; "
                "give the layers per stage"
            )
        return each, (each if pp > 2 else 0), each
    sizes = layout.stage_layers
    if sum(sizes) != num_layers:
        raise LayoutError(
            f"{layout}: stage layers sum to {sum(sizes)}, the model has {num_layers}; "
            "give every layer to one stage"
        )
    stages = [sum(sizes[stage::pp]) for stage in range(pp)]
    return stages[0], max(stages[1:-1], default=0), stages[-1]
