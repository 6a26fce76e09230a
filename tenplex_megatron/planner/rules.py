"""Which strategies does Megatron-core refuse, and by which rule?

The rules are the framework's own (megatron-core 0.19): what breaks one is refused by its argument
validation, its configuration, the construction of the model, or the first micro-batch, and nothing
else is. A rule needs only the axes it speaks of, so that a search can prune before it has the rest.
Megatron adds rows to a vocabulary until TP divides them, and splits experts by TP as all else.
"""

from collections.abc import Iterator

from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.strategy import Strategy

__all__ = [
    "batch_rules",
    "broken_rules",
    "expert_rules",
    "holds",
    "sequence_rules",
    "stage_rules",
    "tensor_rules",
]


def broken_rules(model: ModelProfile, strategy: Strategy) -> list[str]:
    """What Megatron would refuse, one sentence each; empty for a strategy that runs."""
    layout, batch, micro = strategy.layout, strategy.global_batch_size, strategy.micro_batch_size
    with_sp = strategy.sequence_parallel
    return [
        *tensor_rules(model, layout.tp),
        *sequence_rules(model, layout.tp, layout.cp, with_sp=with_sp),
        *stage_rules(model, layout.pp, layout.vpp, layout.stage_layers),
        *batch_rules(batch, micro, layout.dp, layout.pp, layout.vpp),
        *expert_rules(model, layout.tp, layout.ep, with_sp=with_sp),
        *_choice_rules(strategy),
    ]


def tensor_rules(model: ModelProfile, tp: int) -> Iterator[str]:
    """transformer_config.py, `TransformerConfig.__post_init__`; the rest where layers are built."""
    if model.num_heads % tp:
        yield f"{model.num_heads} attention heads do not divide by TP{tp}"
    groups = model.num_query_groups
    if groups % tp and tp % groups:
        yield f"{groups} query groups are neither a multiple nor a divisor of TP{tp}"
    elif (rows := (model.num_heads + 2 * groups) * model.head_size) % tp and not model.latent:
        yield f"{rows} rows of queries, keys and values do not divide by TP{tp}"
    for name, size in _hidden_sizes(model):
        if size % tp:
            yield f"{size} hidden channels of the {name} do not divide by TP{tp}"
    if not model.pads_vocab and model.vocab_size % tp:
        yield f"{model.vocab_size} rows of the vocabulary do not divide by TP{tp}"


def _hidden_sizes(model: ModelProfile) -> Iterator[tuple[str, int]]:
    if model.num_experts:
        yield "experts", model.expert_ffn_size
        yield "shared expert", model.shared_expert_ffn_size
    if not model.num_experts or model.num_dense_layers:
        yield "MLP", model.ffn_size


def sequence_rules(model: ModelProfile, tp: int, cp: int, *, with_sp: bool) -> Iterator[str]:
    """training/arguments.py, `validate_args`; core/tensor_parallel/mappings.py for the last."""
    if cp > 1 and model.seq_length % (2 * cp):
        yield f"sequences of {model.seq_length} do not divide into 2 x CP{cp} pieces"
    elif with_sp and tp > 1 and model.seq_length // cp % tp:
        yield f"{model.seq_length // cp} tokens of a sequence do not divide by TP{tp}"
    if with_sp and tp == 1:
        yield "sequence parallelism needs more than TP1"


def stage_rules(
    model: ModelProfile, pp: int, vpp: int, stage_layers: tuple[int, ...] | None
) -> Iterator[str]:
    """transformer_block.py, `get_num_layers_to_build`; pipeline_parallel_layer_layout.py."""
    if vpp > 1 and pp == 1:
        yield f"VPP{vpp} needs more than one pipeline stage"
    if stage_layers is None and model.num_layers % (pp * vpp):
        yield f"{model.num_layers} layers do not divide into {pp * vpp} pipeline parts"
    if stage_layers is not None and sum(stage_layers) != model.num_layers:
        yield f"stages of {stage_layers} layers do not make {model.num_layers} layers"


def batch_rules(batch: int, micro: int, dp: int, pp: int, vpp: int) -> Iterator[str]:
    """num_microbatches_calculator.py; schedules.py for interleaved stages."""
    if batch % (micro * dp):
        yield f"global batch {batch} does not divide by micro batch {micro} x DP{dp}"
    elif vpp > 1 and (count := batch // (micro * dp)) % pp:
        yield f"{count} micro batches do not divide by PP{pp}, as VPP{vpp} needs"


def expert_rules(model: ModelProfile, tp: int, ep: int, *, with_sp: bool) -> Iterator[str]:
    """validate_args, TransformerConfig and moe_layer.py; experts are split by TP as all else."""
    if ep > 1 and not model.num_experts:
        yield f"EP{ep} needs a model with experts"
    elif ep > 1 and model.num_experts % ep:
        yield f"{model.num_experts} experts do not divide by EP{ep}"
    if model.num_experts and tp > 1:
        if model.has_bias:
            yield f"experts with biases do not run with TP{tp}"
        if not with_sp:
            yield f"experts with TP{tp} need sequence parallelism"


def _choice_rules(strategy: Strategy) -> Iterator[str]:
    """TransformerConfig and `validate_args`."""
    if strategy.recompute_layers is not None and strategy.recompute != "full":
        yield f"a number of layers to recompute needs full recomputation, not {strategy.recompute}"
    if strategy.overlaps_tensor_parallel and not strategy.sequence_parallel:
        tp = strategy.layout.tp
        yield f"collectives of TP{tp} hide behind products only with sequence parallelism"
    if strategy.loss_fusion == "te":
        yield "the fused loss of Transformer Engine is switched off in Megatron; native is not"


def holds(rules: Iterator[str]) -> bool:
    """Whether none of the rules is broken."""
    return next(rules, None) is None
