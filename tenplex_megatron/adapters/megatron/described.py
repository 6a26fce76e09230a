"""Which model and which strategy do Megatron's flags describe?"""

import argparse
import ast
import contextlib
import logging
import math
from collections.abc import Sequence

from tenplex_megatron.adapters.megatron.flags import by_flag, job_parser, read_flags, required
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.profile import LatentAttention, ModelProfile
from tenplex_megatron.planner.strategy import LossFusion, Precision, Recompute, Strategy

__all__ = ["described_model", "described_strategy"]

logger = logging.getLogger(__name__)

OTHER_MODELS = (
    "--hybrid-layer-pattern",
    "--hybrid-override-pattern",
    "--heterogeneous-layers-config-path",
    "--heterogeneous-layers-config-encoded-json",
    "--experimental-attention-variant",
    "--mtp-num-layers",
)
"""Flags of models whose layers differ in other ways than `ModelProfile` can say."""


_USUAL_VOCABULARY = 50257
"""GPT-2's, for a rough profile of a model whose tokenizer knows the size."""


def described_model(argv: Sequence[str], *, is_rough: bool = False) -> ModelProfile:
    """The model these flags describe, whatever they say about its layout.

    The vocabulary is padded as for one tensor-parallel rank, unless its padded size is given. A
    rough profile takes a vocabulary or layers it can't know for usual ones.

    Raises:
        ConfigError: a size is missing, or there are other kinds of layers.
    """
    for flag in sorted(set(by_flag(argv)) & set(OTHER_MODELS)):
        problem = (
            f"{flag}: no profile is known of such a model; expected a decoder whose layers "
            "are alike, or dense first and with experts then"
        )
        if not is_rough:
            raise ConfigError(problem)
        logger.warning("%s: its step times are predicted as of one with dense layers", flag)
    found = read_flags(_model_parser(), argv)
    if is_rough and found.vocab_size is None:
        found.vocab_size = _USUAL_VOCABULARY
    layers, hidden, heads, sequence = (
        required(vars(found)[name.replace("-", "_")], f"--{name}")
        for name in ("num-layers", "hidden-size", "num-attention-heads", "seq-length")
    )
    latent = _latent_attention(found) if found.multi_latent_attention else None
    if latent is None and found.kv_channels is None and hidden % heads:
        raise ConfigError(
            f"--hidden-size {hidden} does not divide by --num-attention-heads {heads}; "
            "add --kv-channels N"
        )
    is_gated = found.swiglu or found.quick_geglu
    # Megatron's default: as many parameters as a plain MLP of 4 x hidden, in multiples of 64.
    wide = int(4 * hidden * 2 / 3 / 64) * 64 if found.swiglu else 4 * hidden
    ffn = found.ffn_hidden_size or wide
    is_rotary = found.use_rotary_position_embeddings
    return ModelProfile(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_query_groups=found.num_query_groups if found.group_query_attention else heads,
        head_size=found.qk_head_dim if latent else found.kv_channels or hidden // heads,
        ffn_size=ffn,
        seq_length=sequence,
        vocab_size=_vocab_rows(found),
        pads_vocab=found.padded_vocab_size is None and not found.no_pad_vocab_size,
        is_gated=is_gated,
        has_bias=not found.disable_bias_linear,
        has_learned_positions=found.position_embedding_type == "learned_absolute" and not is_rotary,
        is_tied=not found.untie_embeddings_and_output_weights,
        has_rms_norm=found.normalization == "RMSNorm",
        dropout=max(found.attention_dropout, found.hidden_dropout) > 0,
        num_experts=found.num_experts or 0,
        experts_per_token=found.moe_router_topk if found.num_experts else 1,
        expert_ffn_size=(found.moe_ffn_hidden_size or ffn) if found.num_experts else 0,
        shared_expert_ffn_size=found.moe_shared_expert_intermediate_size or 0,
        num_dense_layers=_dense_layers(found.moe_layer_freq, layers) if found.num_experts else 0,
        latent=latent,
    )


def described_strategy(argv: Sequence[str]) -> Strategy:
    """What these flags say about training besides the layout, which is one rank here.

    Raises:
        ConfigError: a batch size is missing.
    """
    found = read_flags(_strategy_parser(), argv)
    recompute: Recompute = found.recompute_granularity or "none"
    if found.recompute_activations:
        recompute = "selective"
    is_block = recompute == "full" and found.recompute_method == "block"
    fusion: LossFusion = found.cross_entropy_fusion_impl
    return Strategy(
        layout=ParallelLayout(
            micro_batch_size=required(found.micro_batch_size, "--micro-batch-size")
        ),
        global_batch_size=required(found.global_batch_size, "--global-batch-size"),
        sequence_parallel=found.sequence_parallel,
        zero_stage=_zero_stage(found),
        recompute=recompute,
        recompute_layers=found.recompute_num_layers if is_block else None,
        precision=_precision(found),
        is_flash=found.attention_backend != "unfused" and found.transformer_impl != "local",
        loss_fusion=fusion if found.cross_entropy_loss_fusion else "none",
        overlaps_gradients=found.overlap_grad_reduce,
        overlaps_tensor_parallel=found.tp_comm_overlap and found.sequence_parallel,
    )


def _zero_stage(found: argparse.Namespace) -> int:
    """Megatron-FSDP's sharding strategies, else the distributed optimizer or none."""
    sharded = {"optim_grads": 2, "optim_grads_params": 3}
    without = 1 if found.use_distributed_optimizer else 0
    if not found.use_megatron_fsdp:
        return without
    return sharded.get(found.data_parallel_sharding_strategy, without)


def _precision(found: argparse.Namespace) -> Precision:
    if found.fp8_format:
        return "fp8"
    return "bf16" if found.bf16 else "fp16" if found.fp16 else "fp32"


def _strategy_parser() -> argparse.ArgumentParser:
    """All that decides how fast a layout is and what it holds, with Megatron's own defaults."""
    parser = job_parser()
    for flag in (
        *("sequence-parallel", "use-distributed-optimizer", "recompute-activations", "fp16"),
        *("bf16", "cross-entropy-loss-fusion", "overlap-grad-reduce", "tp-comm-overlap"),
        "use-megatron-fsdp",
    ):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--recompute-granularity", choices=("selective", "full"))
    parser.add_argument("--recompute-method")
    parser.add_argument("--recompute-num-layers", type=int)
    parser.add_argument("--fp8-format")
    parser.add_argument("--data-parallel-sharding-strategy", default="no_shard")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--cross-entropy-fusion-impl", choices=("native", "te"), default="native")
    return parser


def _model_parser() -> argparse.ArgumentParser:
    """All that decides the shape of a model, with Megatron's own defaults."""
    parser = job_parser()
    for flag in (
        *("hidden-size", "kv-channels", "ffn-hidden-size", "seq-length", "vocab-size"),
        *("moe-ffn-hidden-size", "moe-shared-expert-intermediate-size", "num-experts"),
    ):
        parser.add_argument(f"--{flag}", type=int)
    for flag in ("attention", "hidden"):
        parser.add_argument(f"--{flag}-dropout", type=float, default=0.1)
    for flag in (
        *("swiglu", "quick-geglu", "disable-bias-linear", "untie-embeddings-and-output-weights"),
        *("use-rotary-position-embeddings", "no-pad-vocab-size", "multi-latent-attention"),
    ):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--moe-router-topk", type=int, default=2)
    parser.add_argument("--moe-layer-freq", default="1")
    parser.add_argument("--q-lora-rank", type=int)
    parser.add_argument("--kv-lora-rank", type=int, default=32)
    parser.add_argument("--qk-pos-emb-head-dim", type=int, default=64)
    for flag in ("qk-head-dim", "v-head-dim"):
        parser.add_argument(f"--{flag}", type=int, default=128)
    parser.add_argument("--normalization", default="LayerNorm")
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    return parser


def _vocab_rows(found: argparse.Namespace) -> int:
    """Megatron's `vocab_size_with_padding` (core/tokenizers/utils/build_tokenizer.py) for TP1."""
    if found.padded_vocab_size is not None:
        return int(found.padded_vocab_size)
    rows = required(found.vocab_size, "--vocab-size")
    divisor = 1 if found.no_pad_vocab_size else found.make_vocab_size_divisible_by
    return int(math.ceil(rows / divisor) * divisor)


def _latent_attention(found: argparse.Namespace) -> LatentAttention:
    return LatentAttention(
        query_rank=required(found.q_lora_rank, "--q-lora-rank"),
        key_value_rank=found.kv_lora_rank,
        rope_head_size=found.qk_pos_emb_head_dim,
        value_head_size=found.v_head_dim,
    )


def _dense_layers(frequency: str, num_layers: int) -> int:
    """The leading layers without experts.

    >>> _dense_layers("1", 4), _dense_layers("([0]*1+[1]*3)", 4)
    (0, 1)

    Raises:
        ConfigError: the pattern makes other models.
    """
    with contextlib.suppress(SyntaxError, ValueError):
        kinds = [1] * num_layers if frequency == "1" else _list(ast.parse(frequency, mode="eval"))
        if len(kinds) == num_layers and kinds == sorted(kinds) and {1} <= set(kinds) <= {0, 1}:
            return kinds.count(0)
    raise ConfigError(
        f"--moe-layer-freq {frequency}: expected 1, or a pattern of {num_layers} layers with the "
        f"dense ones first such as ([0]*1+[1]*{num_layers - 1})"
    )


def _list(node: ast.AST) -> list[int]:
    """The list that an expression of lists, + and * makes; Megatron evaluates it as Python."""
    match node:
        case ast.Expression(body=body):
            return _list(body)
        case ast.List(elts=parts):
            return [int(ast.unparse(part)) for part in parts]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _list(left) + _list(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(times))):
            return _list(left) * times
    raise ValueError(ast.unparse(node))
