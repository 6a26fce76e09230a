"""The engines that train the tiny models, with every optimizer and configuration of a job."""

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed_models import BATCH, HEADS, PAIRS, Job, model_of

__all__ = ["OPTIMIZERS", "build"]

MICRO = {1: 6, 2: 3, 3: 2, 4: 3}
"""Samples of one micro-batch, by the number of data-parallel ranks."""
LINEAR = torch.nn.functional.linear
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "round-robin": {"round_robin_gradients": True},
    "aligned": {"parameter_alignment": True},
    "offloaded": {"offload_optimizer": {"device": "cpu"}},
}
"""What a configuration of ZeRO may have besides the stage."""

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {"weight_decay": 0.1}),
    "adamax": (torch.optim.Adamax, {}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {"lr": 0.1, "lambd": 0.01, "t0": 2.0}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "damped-sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
}
"""Torch's optimizers that update every element by itself."""


def build(job: Job, seed: int) -> Any:
    """An engine whose weights and buffers follow from the seed."""
    import deepspeed

    # ZeRO stage 3 replaces it for the whole process.
    torch.nn.functional.linear = LINEAR
    torch.manual_seed(seed)
    model = model_of(job)
    # The schedule is of the optimizer that was given, which is not that Adagrad.
    decay = 1.0 if job.optimizer == "adagrad" else 0.8
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=_groups(job, model),
        # Made by DeepSpeed, since tensor parallelism cuts the parameters first.
        optimizer=lambda groups: _optimizer(job.optimizer, groups),
        lr_scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: decay**step),
        config=config_of(job),
    )
    return engine


def _groups(job: Job, model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups of all that the script hands over, the frozen parameters too."""
    given = [one for name, one in model.named_parameters() if name != "left_out"]
    if job.optimizer == "adagrad":  # For ZeRO DeepSpeed makes it anew, with one group of all.
        return [{"name": "all", "params": given}]
    groups: list[dict[str, Any]] = [
        {"name": "matrices", "params": [one for one in given if one.dim() > 1]},
        {"name": "rest", "params": [one for one in given if one.dim() <= 1]},
    ]
    groups[1] |= {"weight_decay": 0.0, "lr": 0.02}
    if job.model == "mixture":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    return groups


def _optimizer(name: str, groups: Iterable[Any]) -> torch.optim.Optimizer:
    if name in OPTIMIZERS:
        kind, options = OPTIMIZERS[name]
        return kind(groups, **{"lr": 0.01, **options})
    # DeepSpeed's own, compiled at their first use.
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    kinds = {"cpu-adam": DeepSpeedCPUAdam, "fused-adam": FusedAdam}
    return kinds[name](groups, lr=0.01, weight_decay=0.1)


def config_of(job: Job) -> dict[str, Any]:
    """DeepSpeed's configuration of a job."""
    dp, stage = job.layout.dp, job.layout.zero_stage or 0
    # Tensor parallelism exchanges so much that every micro-batch of it takes long.
    micro = BATCH // dp if job.model in ("split", "vocabulary") else MICRO[dp]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": BATCH // (micro * dp),
        # Without a ZeRO optimizer a pipeline's norm is that of one stage alone.
        "gradient_clipping": 0.0 if job.model == "pipeline" else 0.5,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        # Torch's optimizers run on the CPU too.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            # Buckets of DeepSpeed's default sizes are gigabytes.
            "reduce_bucket_size": 4096,
            "allgather_bucket_size": 4096,
            "stage3_prefetch_bucket_size": 4096,
            # Some parameters stay whole, some are gathered for every use.
            "stage3_param_persistence_threshold": 20,
            **OPTIONS[job.options],
        },
    }
    if job.optimizer == "cpu-adam" and stage:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if job.precision.startswith("bf16"):
        config["bf16"] = {"enabled": True}
    if job.precision == "bf16-fp32-grads":  # stage 1 alone, with an optimizer class of its own
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if job.precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    if job.layout.tp > 1:
        config["tensor_parallel"] = {
            "autotp_size": job.layout.tp,
            "vocab_parallel_lm_head": job.model == "vocabulary",
            "partition_config": {"use_default_specs": False, "layer_specs": _SPLITS},
        }
    return config


_SPLITS = [
    {"patterns": [r".*fused\.weight$"], "partition_type": "column", "shape": [3, -1]},
    {
        "patterns": [r".*grouped\.weight$"],
        "partition_type": "column",
        "shape": [[HEADS, PAIRS, PAIRS], -1],
    },
    {"patterns": [r".*grow\.weight$"], "partition_type": "column"},
    {"patterns": [r".*(out|merge|shrink)\.weight$"], "partition_type": "row"},
]
