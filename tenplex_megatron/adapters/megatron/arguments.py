"""What do Megatron's flags say about a job, and which flags build a layout or a strategy?

Only the flags named here are read; all others pass through untouched.  Nothing of Megatron is
imported, so that a launcher can ask before any worker exists.
"""

import argparse
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from tenplex_megatron.adapters.arguments import ArgumentAdapter
from tenplex_megatron.adapters.megatron.described import described_model, described_strategy
from tenplex_megatron.adapters.megatron.flags import by_flag, job_parser, read_flags
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.profile import ModelProfile
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
    "--step-batch-size-schedule": "layouts are cut for one batch; write --global-batch-size",
}
"""Flags that contradict what is appended for a layout, and what to do instead."""

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

    cpu_stand_in = "tenplex_megatron.cpu"

    def profile(self, argv: Sequence[str], *, is_rough: bool = False) -> ModelProfile:
        """See `ArgumentAdapter.profile`."""
        return described_model(argv, is_rough=is_rough)

    def strategy(self, argv: Sequence[str]) -> Strategy:
        """See `ArgumentAdapter.strategy`."""
        _check_flags(argv)
        return described_strategy(argv)

    def layout_arguments(
        self, argv: Sequence[str], layout: ParallelLayout, allowed: Sequence[ParallelLayout]
    ) -> list[str]:
        """See `ArgumentAdapter.layout_arguments`; argparse takes the last of equal flags."""
        _check_flags(argv)
        if layout.zero_stage is not None:
            raise ConfigError(
                f"layout {layout}: ZERO is for DeepSpeed; Megatron shards its optimizer as "
                "--use-distributed-optimizer says, in every layout"
            )
        found = read_flags(job_parser(), argv)
        if by_flag(argv).get("--dataloader-type") == ["cyclic"]:
            _check_micro_batches(found.micro_batch_size, (layout, *allowed))
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

    def device_arguments(self, device: str) -> list[str]:
        """See `ArgumentAdapter.device_arguments`."""
        return list(CPU_FLAGS) if device == "cpu" else []

    def identity(self, argv: Sequence[str]) -> str:
        """See `ArgumentAdapter.identity`: all flags but those that say where and how fast.

        The spelling (`--lr 1`, `--lr=1`) and the order of flags do not count.
        """
        kept = {
            flag: values
            for flag, values in by_flag(argv).items()
            if not any(fnmatchcase(flag, pattern) for pattern in SAME_TRAINING)
        }
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def _check_micro_batches(own: int | None, layouts: Sequence[ParallelLayout]) -> None:
    """Refuse several sizes; the cyclic loader draws another order for each (data_samplers.py)."""
    sizes = sorted({layout.micro_batch_size or own or 0 for layout in layouts})
    if len(sizes) > 1:
        raise ConfigError(
            "--dataloader-type cyclic: the order of samples depends on the micro-batch size, and "
            f"the policy allows micro-batches of {', '.join(map(str, sizes))}; leave MBS out of "
            "its layouts, or take --dataloader-type single"
        )


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


def _check_flags(argv: Sequence[str]) -> None:
    for flag in by_flag(argv):
        if flag in REFUSED_FLAGS:
            raise ConfigError(
                f"{flag}: not possible in a job whose layout changes; {REFUSED_FLAGS[flag]}"
            )


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
