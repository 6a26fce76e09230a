"""What does a DeepSpeed configuration say, and how is it written for another layout?

Pure: plain JSON in, plain JSON out; nothing of DeepSpeed is imported.
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.strategy import Precision, Strategy

__all__ = ["check_layout", "described_strategy", "for_layout", "read_config"]

type Config = Mapping[str, Any]

_BATCH = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
_ZERO = "zero_optimization"
_TENSOR = "tensor_parallel"


def read_config(source: str | Path | Config) -> dict[str, Any]:
    """The configuration in a file, or one that is plain values already.

    Raises:
        ConfigError: the file can't be read, or is no JSON object.
    """
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    try:
        found = json.loads(Path(source).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"DeepSpeed configuration {source} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"DeepSpeed configuration {source}: expected keys and values")
    return found


def described_strategy(config: Config) -> Strategy:
    """What a configuration says besides the layout, which is one rank here.

    Raises:
        ConfigError: a batch size is missing; without both the batch could not be kept exact.
    """
    micro = _size(config, _MICRO)
    return Strategy(
        layout=ParallelLayout(micro_batch_size=micro),
        global_batch_size=_size(config, _BATCH),
        zero_stage=_stage(config),
        precision=_precision(config),
        overlaps_gradients=bool(config.get(_ZERO, {}).get("overlap_comm", False)),
    )


def for_layout(config: Config, layout: ParallelLayout) -> dict[str, Any]:
    """The configuration with which every rank builds its part of `layout`, the batch unchanged.

    Raises:
        ConfigError: the batch does not divide, or there is no way to split tensors.
    """
    check_layout(config, layout)
    found = copy.deepcopy(dict(config))
    batch = _size(config, _BATCH)
    micro = layout.micro_batch_size or _size(config, _MICRO)
    accumulation, rest = divmod(batch, micro * layout.dp)
    if rest or not accumulation:
        raise ConfigError(
            f"{_BATCH} {batch} does not divide by {_MICRO} {micro} x DP{layout.dp}; expected a "
            "multiple, or another layout in the policy"
        )
    found |= {_BATCH: batch, _MICRO: micro, _ACCUMULATION: accumulation}
    if layout.zero_stage is not None:
        found[_ZERO] = {**found.get(_ZERO, {}), "stage": layout.zero_stage}
    if layout.tp == 1:
        found.pop(_TENSOR, None)
    else:
        found[_TENSOR] = {**found[_TENSOR], "autotp_size": layout.tp}
        # DeepSpeed multiplies micro-batch and accumulation by all ranks, tensor-parallel ones too
        # (runtime/config.py), and would refuse the right batch.
        del found[_BATCH]
    return found


def check_layout(config: Config, layout: ParallelLayout) -> None:
    """Refuse what no configuration can express.

    Raises:
        ConfigError: the layout splits what DeepSpeed does not, or was not told how to.
    """
    if layout.tp > 1 and _TENSOR not in config:
        raise ConfigError(
            f"layout {layout}: the DeepSpeed configuration has no {_TENSOR!r} block that says how "
            "TP splits the model; add one (partition_config), or leave TP out of the policy"
        )
    if layout.pp > 1 and _stage(config, layout) > 1:
        raise ConfigError(
            f"layout {layout}: DeepSpeed's pipelines run with ZeRO 0 or 1, got stage "
            f"{_stage(config, layout)}"
        )
    for axis, size in (("CP", layout.cp), ("VPP", layout.vpp)):
        if size > 1:
            raise ConfigError(f"layout {layout}: DeepSpeed has no {axis}; leave it out")


def _stage(config: Config, layout: ParallelLayout | None = None) -> int:
    if layout is not None and layout.zero_stage is not None:
        return layout.zero_stage
    return int(config.get(_ZERO, {}).get("stage", 0))


def _precision(config: Config) -> Precision:
    if config.get("bf16", config.get("bfloat16", {})).get("enabled"):
        return "bf16"
    return "fp16" if config.get("fp16", {}).get("enabled") else "fp32"


def _size(config: Config, name: str) -> int:
    value = config.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ConfigError(
        f"DeepSpeed configuration: {name}: expected a count, got {value!r}; the batch can be kept "
        f"exact over all numbers of devices only if {_BATCH} and {_MICRO} are written"
    )
