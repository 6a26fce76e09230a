"""What do Megatron's flags say about a job, and which flags build a layout?

Only the flags named here are read; all others pass through untouched.  Nothing of Megatron is
imported, so that a launcher can ask before any worker exists.
"""

import argparse
import hashlib
import json
import math
from collections.abc import Sequence

from tenplex_megatron.adapters.base import ArgumentAdapter
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.choose import ModelLimits

__all__ = ["MegatronArguments"]

LAYOUT_FLAGS = {
    "--tensor-model-parallel-size": 1,
    "--pipeline-model-parallel-size": 1,
    "--num-layers-per-virtual-pipeline-stage": 1,
    "--num-virtual-stages-per-pipeline-rank": 1,
    "--context-parallel-size": 1,
    "--expert-model-parallel-size": 1,
    "--micro-batch-size": 1,
    "--make-vocab-size-divisible-by": 1,
    "--pipeline-model-parallel-layout": 1,
    "--decoder-first-pipeline-num-layers": 1,
    "--decoder-last-pipeline-num-layers": 1,
    "--elastic-policy": 1,
    "--data-cache-path": 1,
    "--save": 1,
    "--load": 1,
    "--train-iters": 1,
    "--log-interval": 1,
    "--tensorboard-dir": 1,
}
"""Flags that do not change what is trained, with their number of values."""

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
        "megatron.core.optimizer",
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
            num_query_groups=groups or heads,
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
            f"--make-vocab-size-divisible-by={self._vocab_divisor(found, layout, allowed)}",
        ]
        if layout.ep > 1:
            flags.append(f"--expert-model-parallel-size={layout.ep}")
        if layout.vpp > 1:
            flags.append(f"--num-virtual-stages-per-pipeline-rank={layout.vpp}")
        if layout.micro_batch_size is not None:
            flags.append(f"--micro-batch-size={layout.micro_batch_size}")
        if layout.stage_layers is not None:
            flags.append(f"--pipeline-model-parallel-layout={_stages(layout.stage_layers)}")
        return flags

    def device_arguments(self, device: str) -> list[str]:
        """See `ArgumentAdapter.device_arguments`."""
        return list(CPU_FLAGS) if device == "cpu" else []

    def identity(self, argv: Sequence[str]) -> str:
        """See `ArgumentAdapter.identity`: all flags but those that say where and how fast."""
        kept, skip = [], 0
        for token in argv:
            flag, _, value = token.partition("=")
            if flag in LAYOUT_FLAGS:
                skip = 0 if value else LAYOUT_FLAGS[flag]
            elif skip:
                skip -= 1
            else:
                kept.append(token)
        return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]

    @staticmethod
    def _vocab_divisor(
        found: argparse.Namespace, layout: ParallelLayout, allowed: Sequence[ParallelLayout]
    ) -> int:
        """Keep the padded vocabulary the same size under every allowed TP.

        Megatron pads to a multiple of divisor x TP; padding rows take part in the softmax, so
        another number of them would change the loss (256 rows padded to 512 raised it by ln 2).
        """
        sizes = {layout.tp, *(other.tp for other in allowed)}
        return int(found.make_vocab_size_divisible_by) * math.lcm(*sizes) // layout.tp


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in (
        "--num-layers",
        "--num-attention-heads",
        "--num-query-groups",
        "--global-batch-size",
        "--micro-batch-size",
    ):
        parser.add_argument(flag, type=int)
    parser.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    parser.add_argument("--group-query-attention", action="store_true")
    try:
        found, _ = parser.parse_known_args(list(argv))
    except SystemExit as error:
        raise ConfigError(
            "the training script's flags could not be read; see the line above"
        ) from error
    return found


def _required(value: int | None, flag: str) -> int:
    if value is None:
        raise ConfigError(
            f"{flag} is missing from the training script's flags; the layouts that can exist "
            f"depend on it: add {flag} N"
        )
    return value


def _stages(layers: Sequence[int]) -> str:
    """Megatron's layout string: E embedding, t layer, L loss, | between stages.

    >>> _stages((1, 2))
    'Et|ttL'
    """
    stages = ["t" * count for count in layers]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return "|".join(stages)
