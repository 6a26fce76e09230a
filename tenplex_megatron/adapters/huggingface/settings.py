"""Which settings of a Trainer hold at any number of devices, and what do the others become?"""

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from transformers import Trainer

from tenplex_megatron.adapters.deepspeed.config import for_layout, read_config
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError

__all__ = ["check_engine", "check_trainer", "cut_batch", "note_stage"]

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_STRATEGIES = ("random", "sequential")
_EXPECTED = {
    "auto_find_batch_size": (False, "the batch must not depend on what fits a device"),
    "load_best_model_at_end": (
        False,
        "a checkpoint loads only on as many devices as saved it; load the best after training",
    ),
    "average_tokens_across_devices": (
        True,
        "every rank would average over its own tokens, so the loss would depend on their number",
    ),
}
"""Switch -> how it must be, and why."""


def check_trainer(trainer: Any) -> None:
    """Refuse a Trainer that trains something else on another number of devices.

    Raises:
        ConfigError: what would depend on the devices, and what to do about it.
    """
    reason = next(_reasons(trainer, trainer.args), None)
    if reason is not None:
        raise ConfigError(f"TenplexCallback: {reason}")


def _reasons(trainer: Any, args: Any) -> Iterator[str]:
    if not args.deepspeed:
        yield "there is no DeepSpeed configuration; expected TrainingArguments(deepspeed=...)"
    if dist.is_initialized() and dist.get_world_size() != args.world_size:
        yield (
            f"the Trainer sees {args.world_size} of {dist.get_world_size()} processes, because "
            "accelerate found no device for them. On CPU, set ACCELERATE_USE_DEEPSPEED=true, call "
            "accelerate.PartialState(backend='gloo') first, and give TrainingArguments("
            "accelerator_config={'use_configured_state': True})"
        )
    parts = {"TP": trainer.get_tp_size(), "CP": trainer.get_cp_size(), "SP": trainer.get_sp_size()}
    for axis, size in parts.items():
        if size > 1:
            yield (
                f"the Trainer splits its model or sequences over {axis}{size}; expected data "
                "parallelism alone (ZeRO 0 to 3)"
            )
    if type(trainer)._get_train_sampler is not Trainer._get_train_sampler:
        yield (
            f"{type(trainer).__name__} deals its samples in an order of its own, which would be "
            "lost; expected a Trainer that leaves _get_train_sampler as it is"
        )
    if args.train_sampling_strategy not in _STRATEGIES:
        yield (
            f"train_sampling_strategy={args.train_sampling_strategy!r} groups samples by how a "
            f"batch is cut, so other devices would read others; expected one of {_STRATEGIES}"
        )
    for name, (expected, reason) in _EXPECTED.items():
        if getattr(args, name) != expected:
            yield f"{name}={not expected}: {reason}; expected {expected}"
    if args.accelerator_config.split_batches or args.accelerator_config.dispatch_batches:
        yield (
            "accelerator_config: split_batches and dispatch_batches deal a batch in another way at "
            "every number of devices; drop them"
        )


def cut_batch(trainer: Any) -> None:
    """Set micro-batch and accumulation so that a step has the configured batch, over all ranks.

    `TrainingArguments` multiplies its own by the number of ranks, which makes another batch.

    Raises:
        ConfigError: the configuration names no batch, or one that does not divide.
    """
    args = trainer.args
    config = for_layout(read_config(args.deepspeed), ParallelLayout(dp=args.world_size))
    args.per_device_train_batch_size = config["train_micro_batch_size_per_gpu"]
    args.gradient_accumulation_steps = config["gradient_accumulation_steps"]
    trainer._train_batch_size = args.train_batch_size
    known = args.hf_deepspeed_config
    known.config.update({name: config[name] for name in _BATCH})
    # What contradicted the batch before is settled; everything else is compared again.
    known.mismatches.clear()
    known.trainer_config_process(args)


def check_engine(engine: Any, args: Any) -> None:
    """Refuse an engine that steps at other times than the Trainer.

    Raises:
        ConfigError: micro-batches or accumulation differ.
    """
    built = (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps())
    wanted = (args.per_device_train_batch_size, args.gradient_accumulation_steps)
    if built != wanted:
        raise ConfigError(
            f"the engine accumulates {built[1]} micro-batches of {built[0]}, the Trainer "
            f"{wanted[1]} of {wanted[0]}; expected no micro-batch size in the policy's layouts, "
            "and none that changes after TenplexCallback(trainer)"
        )


def note_stage(trainer: Any, stage: int) -> None:
    """Tell the Trainer the engine's ZeRO stage: it saves by that of the configuration."""
    plugin = trainer.accelerator.state.deepspeed_plugin
    plugin.deepspeed_config.setdefault("zero_optimization", {})["stage"] = stage
    plugin.zero_stage = stage
    trainer.args.hf_deepspeed_config.set_stage_and_offload()
