"""What do Megatron's flags say about a job, and which flags build a layout or a strategy?

Only the flags named here are read; all others pass through untouched.  Nothing of Megatron is
imported, so that a launcher can ask before any worker exists.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from tenplex_megatron.adapters.base import ArgumentAdapter
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.choose import ModelLimits
from tenplex_megatron.planner.profile import LatentAttention, ModelProfile
from tenplex_megatron.planner.strategy import Precision, Strategy

__all__ = ["MegatronArguments"]

REFUSED_FLAGS = {
    "--num-layers-per-virtual-pipeline-stage": "write VPP into the policy's layouts",
    "--num-virtual-stages-per-pipeline-rank": "write VPP into the policy's layouts",
    "--pipeline-model-parallel-layout": "write STAGES into the policy's layouts",
    "--decoder-first-pipeline-num-layers": "write STAGES into the policy's layouts",
    "--decoder-last-pipeline-num-layers": "write STAGES into the policy's layouts",
    "--account-for-embedding-in-pipeline-split": "write STAGES into the policy's layouts",
    "--account-for-loss-in-pipeline-split": "write STAGES into the policy's layouts",
    "--use-mp-args-from-checkpoint-args": "the policy decides the layout, not a checkpoint",
    "--yaml-cfg": "Megatron then ignores every flag; write the model as flags",
}
"""Flags that would keep one layout whatever is appended, and what to do instead."""

SAME_TRAINING = (
    # where the model lies
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--sequence-parallel",
    "--micro-batch-size",
    # how long it trains, and where it writes and reads
    "--elastic-policy",
    "--train-iters",
    "--train-samples",
    "--use-checkpoint-opt*scheduler",
    "--override-opt*scheduler",
    "--exit-*",
    "--eval-*",
    "--data-cache-path",
    "--num-workers",
    "--num-dataset-builder-threads",
    "--save",
    "--save-*",
    "--load",
    "--no-save-*",
    "--no-load-*",
    "--ckpt-*",
    "--async-save",
    # what it says
    "--log-*",
    "--logging-level",
    "--timing-log-*",
    "--tensorboard-*",
    "--wandb-*",
    "--profile",
    "--profile-*",
    # how fast it is
    "--distributed-timeout-*",
    "--overlap-*",
    "--recompute-*",
    "--tp-comm-*",
)
"""Patterns of flags that do not change what is trained."""

CPU_FLAGS = (
    "--distributed-backend=gloo",
    "--transformer-impl=local",
    "--use-cpu-initialization",
    "--attention-backend=unfused",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-persist-layer-norm",
    "--no-rope-fusion",
)
"""Flags that keep Megatron on operations that exist without CUDA."""

OTHER_MODELS = (
    "--hybrid-layer-pattern",
    "--hybrid-override-pattern",
    "--heterogeneous-layers-config-path",
    "--heterogeneous-layers-config-encoded-json",
    "--experimental-attention-variant",
    "--mtp-num-layers",
)
"""Flags of models whose layers differ in other ways than `ModelProfile` can say."""

PRECISION_FLAGS: Mapping[Precision, tuple[str, ...]] = {
    "fp32": (),
    "fp16": ("--fp16",),
    "bf16": ("--bf16",),
    "fp8": ("--bf16", "--fp8-format=hybrid"),
}

ZERO_FLAGS = {
    0: (),
    1: ("--use-distributed-optimizer",),
    2: ("--use-megatron-fsdp", "--data-parallel-sharding-strategy=optim_grads"),
    3: ("--use-megatron-fsdp", "--data-parallel-sharding-strategy=optim_grads_params"),
}


class MegatronArguments(ArgumentAdapter):
    """Megatron-LM's flags, core_v0.12 and newer."""

    preload = (
        "torch",
        "megatron.core",
        "megatron.training",
        "megatron.training.training",
        "megatron.training.checkpointing",
        "megatron.core.models.gpt",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.datasets.gpt_dataset",
        "megatron.core.datasets.blended_megatron_dataset_builder",
        "megatron.core.models.mimo.optimizer",
        "megatron.core.optimizer",
        "megatron.core.tokenizers.text.text_tokenizer",
        "tenplex_megatron.adapters.megatron.warm",
        "tenplex_megatron.adapters.megatron.hooks",
        "tenplex_megatron.elastic.session",
    )

    def limits(self, argv: Sequence[str]) -> ModelLimits:
        """See `ArgumentAdapter.limits`."""
        found = _parse(argv)
        heads = _required(found.num_attention_heads, "--num-attention-heads")
        groups = found.num_query_groups if found.group_query_attention else heads
        return ModelLimits(
            num_layers=_required(found.num_layers, "--num-layers"),
            num_heads=heads,
            num_query_groups=groups,
            global_batch_size=_required(found.global_batch_size, "--global-batch-size"),
            micro_batch_size=_required(found.micro_batch_size, "--micro-batch-size"),
        )

    def layout_arguments(
        self, argv: Sequence[str], layout: ParallelLayout, allowed: Sequence[ParallelLayout]
    ) -> list[str]:
        """See `ArgumentAdapter.layout_arguments`; argparse takes the last of equal flags."""
        found = _parse(argv)
        divisor = _vocab_divisor(found, layout, allowed)
        return [*_layout_flags(layout), f"--make-vocab-size-divisible-by={divisor}"]

    def strategy_arguments(self, strategy: Strategy) -> list[str]:
        """The flags that, appended to those of a model, train it with `strategy`.

        Flags that can't be taken back by another must not be among those: switches such as
        --sequence-parallel, and other ways to split stages.
        """
        flags = [
            *_layout_flags(strategy.layout),
            f"--global-batch-size={strategy.global_batch_size}",
            f"--attention-backend={'auto' if strategy.is_flash else 'unfused'}",
            *PRECISION_FLAGS[strategy.precision],
            *ZERO_FLAGS[strategy.zero_stage],
        ]
        if strategy.zero_stage > 1:
            # Megatron-FSDP builds on the distributed optimizer and writes no other checkpoint.
            flags += ["--use-distributed-optimizer", "--ckpt-format=fsdp_dtensor"]
        if strategy.loss_fusion != "none":
            flags.append("--cross-entropy-loss-fusion")
            flags.append(f"--cross-entropy-fusion-impl={strategy.loss_fusion}")
        if strategy.sequence_parallel:
            flags.append("--sequence-parallel")
        if strategy.overlaps_tensor_parallel:
            flags.append("--tp-comm-overlap")
        if strategy.recompute != "none":
            flags.append(f"--recompute-granularity={strategy.recompute}")
        if strategy.recompute == "full":
            layers = strategy.recompute_layers
            # Uniform recomputes all layers, here one at a time; block only the first of a stage.
            flags.append(f"--recompute-method={'uniform' if layers is None else 'block'}")
            flags.append(f"--recompute-num-layers={1 if layers is None else layers}")
        if strategy.overlaps_gradients:
            flags.append("--overlap-grad-reduce")
            if strategy.zero_stage:
                flags.append("--overlap-param-gather")
        return flags

    def profile(self, argv: Sequence[str]) -> ModelProfile:
        """The model these flags describe, whatever they say about its layout.

        The vocabulary is padded as for one tensor-parallel rank, unless its padded size is given.

        Raises:
            ConfigError: a size is missing, or there are other kinds of layers.
        """
        for flag in _by_flag(argv):
            if flag in OTHER_MODELS:
                raise ConfigError(
                    f"{flag}: no profile is known of such a model; expected a decoder whose layers "
                    "are alike, or dense first and with experts then"
                )
        found = _read(_model_parser(), argv)
        layers, hidden, heads, sequence = (
            _required(vars(found)[name.replace("-", "_")], f"--{name}")
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
            has_learned_positions=found.position_embedding_type == "learned_absolute"
            and not is_rotary,
            is_tied=not found.untie_embeddings_and_output_weights,
            has_rms_norm=found.normalization == "RMSNorm",
            dropout=max(found.attention_dropout, found.hidden_dropout) > 0,
            num_experts=found.num_experts or 0,
            experts_per_token=found.moe_router_topk if found.num_experts else 1,
            expert_ffn_size=(found.moe_ffn_hidden_size or ffn) if found.num_experts else 0,
            shared_expert_ffn_size=found.moe_shared_expert_intermediate_size or 0,
            num_dense_layers=_dense_layers(found.moe_layer_freq, layers)
            if found.num_experts
            else 0,
            latent=latent,
        )

    def device_arguments(self, device: str) -> list[str]:
        """See `ArgumentAdapter.device_arguments`."""
        return list(CPU_FLAGS) if device == "cpu" else []

    def identity(self, argv: Sequence[str]) -> str:
        """See `ArgumentAdapter.identity`: all flags but those that say where and how fast.

        The spelling (`--lr 1`, `--lr=1`) and the order of flags do not count.
        """
        kept = {
            flag: values
            for flag, values in _by_flag(argv).items()
            if not any(fnmatchcase(flag, pattern) for pattern in SAME_TRAINING)
        }
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def _by_flag(argv: Sequence[str]) -> dict[str, list[str]]:
    """The values of every flag; the last of equal flags counts, as in argparse.

    >>> _by_flag(["--lr", "1", "--split=98,1,1", "--data-path", "0.5", "a", "--lr=2"])
    {'--lr': ['2'], '--split': ['98,1,1'], '--data-path': ['0.5', 'a']}
    """
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for token in argv:
        if token.startswith("--"):
            flag, equals, value = token.partition("=")
            values = found[flag] = [value] if equals else []
        else:
            values.append(token)
    return found


def _vocab_divisor(
    found: argparse.Namespace, layout: ParallelLayout, allowed: Sequence[ParallelLayout]
) -> int:
    """Keep the padded vocabulary the same size under every allowed TP.

    Megatron pads to a multiple of divisor x TP; padding rows take part in the softmax, so another
    number of them would change the loss (256 rows padded to 512 raised it by ln 2).
    """
    sizes = {layout.tp, *(other.tp for other in allowed)}
    for size in sorted(sizes):
        if found.padded_vocab_size is not None and found.padded_vocab_size % size:
            raise ConfigError(
                f"--padded-vocab-size {found.padded_vocab_size} does not divide by TP{size}, which "
                "the policy allows; take a multiple of it, or leave the flag out"
            )
    return math.lcm(found.make_vocab_size_divisible_by, *sizes) // layout.tp


def _layout_flags(layout: ParallelLayout) -> list[str]:
    flags = [
        f"--tensor-model-parallel-size={layout.tp}",
        f"--pipeline-model-parallel-size={layout.pp}",
        f"--context-parallel-size={layout.cp}",
        f"--expert-model-parallel-size={layout.ep}",
    ]
    if layout.micro_batch_size is not None:
        flags.append(f"--micro-batch-size={layout.micro_batch_size}")
    if layout.stage_layers is not None:
        flags.append(f"--pipeline-model-parallel-layout={_stages(layout)}")
    elif layout.vpp > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank={layout.vpp}")
    return flags


def _vocab_rows(found: argparse.Namespace) -> int:
    """Megatron's `vocab_size_with_padding` (core/tokenizers/utils/build_tokenizer.py) for TP1."""
    if found.padded_vocab_size is not None:
        return int(found.padded_vocab_size)
    rows = _required(found.vocab_size, "--vocab-size")
    divisor = 1 if found.no_pad_vocab_size else found.make_vocab_size_divisible_by
    return int(math.ceil(rows / divisor) * divisor)


def _latent_attention(found: argparse.Namespace) -> LatentAttention:
    return LatentAttention(
        query_rank=_required(found.q_lora_rank, "--q-lora-rank"),
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


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    for flag in _by_flag(argv):
        if flag in REFUSED_FLAGS:
            raise ConfigError(
                f"{flag}: not possible in a job whose layout changes; {REFUSED_FLAGS[flag]}"
            )
    return _read(_job_parser(), argv)


def _job_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("layers", "attention-heads"):
        parser.add_argument(f"--num-{flag}", type=int)
    for flag in ("global", "micro"):
        parser.add_argument(f"--{flag}-batch-size", type=int)
    # These are Megatron's own defaults.
    parser.add_argument("--num-query-groups", type=int, default=1)
    parser.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    parser.add_argument("--padded-vocab-size", type=int)
    parser.add_argument("--group-query-attention", action="store_true")
    return parser


def _model_parser() -> argparse.ArgumentParser:
    """All that decides the shape of a model, with Megatron's own defaults."""
    parser = _job_parser()
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


def _read(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The flags `parser` knows.

    Raises:
        ConfigError: a value is of the wrong kind, or a count is below 1.
    """
    try:
        found, _ = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(f"the training script's flags: {error}") from error
    for name, value in vars(found).items():
        # No experts is how some scripts ask for a dense model.
        least = 0 if name == "num_experts" else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"the training script's flags: {flag}: expected from {least}, got {value}"
            )
    return found


def _required(value: int | None, flag: str) -> int:
    if value is None:
        raise ConfigError(
            f"{flag} is missing from the training script's flags; the layouts that can exist "
            f"depend on it: add {flag} N"
        )
    return value


def _stages(layout: ParallelLayout) -> str:
    """Megatron's layout string: E embedding, t layer, L loss, | between stages, in model order.

    >>> _stages(ParallelLayout(pp=2, stage_layers=(1, 2)))
    'Et|ttL'
    """
    layers = layout.stage_layers or ()
    if len(layers) == layout.pp:
        layers = tuple(count // layout.vpp for count in layers) * layout.vpp
    stages = ["t" * count for count in layers]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return "|".join(stages)
