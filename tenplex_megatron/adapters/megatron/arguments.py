"""What do Megatron's flags say about a job, and which flags build a layout?

Only the flags named here are read; all others pass through untouched.  Nothing of Megatron is
imported, so that a launcher can ask before any worker exists.
"""

import argparse
import hashlib
import json
import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

from tenplex_megatron.adapters.base import ArgumentAdapter
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.choose import ModelLimits

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
        flags = [
            f"--tensor-model-parallel-size={layout.tp}",
            f"--pipeline-model-parallel-size={layout.pp}",
            f"--context-parallel-size={layout.cp}",
            f"--expert-model-parallel-size={layout.ep}",
            f"--make-vocab-size-divisible-by={_vocab_divisor(found, layout, allowed)}",
        ]
        if layout.micro_batch_size is not None:
            flags.append(f"--micro-batch-size={layout.micro_batch_size}")
        if layout.stage_layers is not None:
            flags.append(f"--pipeline-model-parallel-layout={_stages(layout)}")
        elif layout.vpp > 1:
            flags.append(f"--num-virtual-stages-per-pipeline-rank={layout.vpp}")
        return flags

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


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    for flag in _by_flag(argv):
        if flag in REFUSED_FLAGS:
            raise ConfigError(
                f"{flag}: not possible in a job whose layout changes; {REFUSED_FLAGS[flag]}"
            )
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
    try:
        found, _ = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(f"the training script's flags: {error}") from error
    for name, value in vars(found).items():
        if value is not None and not isinstance(value, bool) and value < 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"the training script's flags: {flag}: expected from 1, got {value}")
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
