"""What does the command line of a DeepSpeed script say about its job?

Nothing of DeepSpeed is imported, so that a launcher can ask before any worker exists.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tenplex_megatron.adapters.arguments import ArgumentAdapter
from tenplex_megatron.adapters.deepspeed.config import (
    check_layout,
    described_strategy,
    for_layout,
    read_config,
    refuse_elasticity,
    tensor_parallel_size,
)
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.strategy import Strategy

__all__ = ["DeepSpeedArguments"]

_CONFIG_FLAGS = ("--deepspeed_config", "--deepspeed-config", "--deepspeed")
"""The script's own flag, and that of the Transformers Trainer."""
_WHERE_AND_HOW_FAST = (
    *("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "tensor_parallel"),
    *("steps_per_print", "wall_clock_breakdown", "dump_state", "comms_logger", "flops_profiler"),
    *("zero_optimization", "activation_checkpointing", "data_types", "memory_breakdown"),
    *("tensorboard", "wandb", "csv_monitor", "comet"),
)
"""Keys of the configuration that do not change what is trained."""

_STEPS = "(steps|iters|iterations|epochs)"
_SAME_TRAINING = re.compile(
    rf"""
        deepspeed | deepspeed_config | local_rank | elastic_policy
        # How long it trains: not what only begins with such a word, or is a part of the schedule.
        | ((max|num|total|train|training)_)* {_STEPS}
        # Where it writes and what it says, and how often it does and is evaluated.
        | output(_(dir|path|folder|file))? | save(_.*)? | logging_.* | report_to | run_name
        | log(_?dir|_(path|folder|file|level|to|every_.*))? | (wandb|tensorboard)_.*
        | (log|print|report|checkpoint|ckpt|eval|evaluation|val|valid|validation|test)_
          ({_STEPS} | interval | every | freq | frequency | strategy | batch_size)
        # How a batch is cut.
        | .*micro.*batch.* | per_device_.* | grad(ient)?_accum.*
    """,
    re.VERBOSE,
)
"""Names of usual flags that do not change what is trained, with underscores for hyphens."""

_PRECISIONS = ("bf16", "fp16")


class DeepSpeedArguments(ArgumentAdapter):
    """Scripts that name their configuration with `--deepspeed_config`."""

    preload = (
        "torch",
        "deepspeed",
        "deepspeed.runtime.engine",
        "deepspeed.runtime.zero.stage3",
        "deepspeed.runtime.pipe.engine",
        # What the first engine of a process imports, 5 s of it torch's compiler.
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.runtime.superoffload.superoffload_stage3",
        "deepspeed.runtime.zero.muon.original_muon",
        "setuptools",
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "torch.distributed.tensor",
        "tenplex_megatron.adapters.deepspeed.hooks",
        "tenplex_megatron.elastic.session",
    )

    def modules(self, argv: Sequence[str]) -> tuple[str, ...]:
        """See `ArgumentAdapter.modules`; the Trainer of Transformers takes 6 s to be imported."""
        flags = " ".join(argv)
        is_trainer = re.search(r"(^|\s)--deepspeed[=\s][^-\s]", flags) is not None
        if is_trainer and find_spec("transformers") and find_spec("accelerate"):
            return (*self.preload, "tenplex_megatron.adapters.huggingface.callback")
        return self.preload

    def environment(self, device: str) -> dict[str, str]:
        """See `ArgumentAdapter.environment`; DeepSpeed looks for a device when it is imported."""
        return {"DS_ACCELERATOR": device}

    def profile(self, argv: Sequence[str], *, is_rough: bool = False) -> ModelProfile | None:
        """See `ArgumentAdapter.profile`; only the script knows the model."""

    def strategy(self, argv: Sequence[str]) -> Strategy:
        """See `ArgumentAdapter.strategy`."""
        config = _config(argv)
        for name in _PRECISIONS:
            block = config.get(name)
            if isinstance(block, dict) and block.get("enabled") == "auto":
                # The Trainer of Transformers fills in its own flags.
                block["enabled"] = _is_switched_on(argv, f"--{name}")
        return described_strategy(config)

    def usual_layouts(self, argv: Sequence[str]) -> tuple[str, ...]:
        """See `ArgumentAdapter.usual_layouts`; only the script knows whether it is a pipeline."""
        return (f"TP{tensor_parallel_size(_config(argv))}",)

    def layout_arguments(
        self, argv: Sequence[str], layout: ParallelLayout, allowed: Sequence[ParallelLayout]
    ) -> list[str]:
        """See `ArgumentAdapter.layout_arguments`.

        The worker rewrites the configuration; flags of the script that repeat it follow.
        """
        config = _config(argv)
        for other in allowed:
            check_layout(config, other)
        found = for_layout(config, layout)
        repeated = {
            "--pipeline-model-parallel-size": layout.pp,
            "--tensor-model-parallel-size": layout.tp,
            "--zero-stage": layout.zero_stage,
            "--micro-batch-size": found["train_micro_batch_size_per_gpu"],
        }
        given = {token.partition("=")[0] for token in argv}
        return [
            f"{flag}={value}"
            for flag, value in repeated.items()
            if flag in given and value is not None
        ]

    def device_arguments(self, device: str) -> list[str]:
        """See `ArgumentAdapter.device_arguments`."""
        return []

    def identity(self, argv: Sequence[str]) -> str:
        """See `ArgumentAdapter.identity`: the script's flags, and what is trained by how."""
        config = {
            key: value for key, value in _config(argv).items() if key not in _WHERE_AND_HOW_FAST
        }
        return hashlib.sha256(
            json.dumps([_kept(argv), config], sort_keys=True).encode()
        ).hexdigest()[:16]


def _config(argv: Sequence[str]) -> dict[str, Any]:
    path = _config_path(argv)
    if path is None:
        raise ConfigError(
            "--deepspeed_config is missing from the training script's flags; the batch of every "
            "layout is computed from that file: add --deepspeed_config FILE"
        )
    config = read_config(path)
    refuse_elasticity(config, path)
    return config


def _config_path(argv: Sequence[str]) -> Path | None:
    """The file of the last flag that names one; `--deepspeed` may also be a switch.

    >>> _config_path(["--deepspeed", "--deepspeed_config=a.json", "--lr", "1"])
    PosixPath('a.json')
    """
    found = None
    for number, token in enumerate(argv):
        name, equals, value = token.partition("=")
        if name not in _CONFIG_FLAGS:
            continue
        if not equals and number + 1 < len(argv) and not argv[number + 1].startswith("--"):
            value = argv[number + 1]
        if value:
            found = Path(value)
    return found


def _is_switched_on(argv: Sequence[str], flag: str) -> bool:
    """Whether a switch is given, and not with a value that switches it off.

    >>> [_is_switched_on(argv, "--bf16") for argv in (["--bf16"], ["--bf16=False"], [])]
    [True, False, False]
    """
    words = [*(word for token in argv for word in _split(token)), ""]
    found = [after for word, after in itertools.pairwise(words) if word == flag]
    return bool(found) and found[-1].lower() not in ("false", "f", "no", "n", "0")


def _kept(argv: Sequence[str]) -> list[str]:
    """The flags and values that say what is trained, however they are spelled.

    >>> _kept(["--lr=1", "--max_steps", "9", "--deepspeed_config", "a.json", "data"])
    ['--lr', '1', 'data']
    """
    path = str(_config_path(argv))
    words = [word for token in argv for word in _split(token)]
    kept: list[str] = []
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag = word.removeprefix("--").replace("-", "_")
        if word != path and not _SAME_TRAINING.fullmatch(flag):
            kept.append(word)
        elif not word.startswith("--"):
            flag = ""  # a flag of one value: what follows is not its own
    return kept


def _split(token: str) -> list[str]:
    name, equals, value = token.partition("=")
    return [name, value] if equals and name.startswith("--") else [token]
