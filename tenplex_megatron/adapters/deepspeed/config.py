"""What does a DeepSpeed configuration say, and how is it written for another layout?

Pure: plain JSON in, plain JSON out; nothing of DeepSpeed is imported.
"""

import copy
import importlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.batches import batch_cuts
from tenplex_megatron.planner.strategy import Precision, Strategy

__all__ = [
    "check_layout",
    "described_strategy",
    "for_layout",
    "read_config",
    "refuse_elasticity",
    "tensor_parallel_size",
]

type Config = Mapping[str, Any]

_BATCH = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
_ZERO = "zero_optimization"
_TENSOR = "tensor_parallel"
_TENSOR_SIZE = "autotp_size"
_MOST_NAMED = 16


def read_config(source: str | Path | Config) -> dict[str, Any]:
    """The configuration in a file, or one that is plain values already.

    DeepSpeed reads files as Hjson, with comments and trailing commas (runtime/config.py); without
    it, which DeepSpeed needs itself, a file is plain JSON.

    Raises:
        ConfigError: the file can't be read, or holds no keys and values.
    """
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    parser = importlib.import_module("hjson" if find_spec("hjson") else "json")
    try:
        found = parser.loads(Path(source).read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError) as error:
        raise ConfigError(f"DeepSpeed configuration {source} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"DeepSpeed configuration {source}: expected keys and values")
    return found


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key} is written twice")
        found[key] = value
    return found


def described_strategy(config: Config) -> Strategy:
    """What a configuration says besides the layout, which is one rank here.

    Raises:
        ConfigError: a batch size is missing; without both the batch could not be kept exact.
    """
    micro, stage = _size(config, _MICRO), _stage(config)
    overlaps = _zero(config).get("overlap_comm")
    return Strategy(
        layout=ParallelLayout(micro_batch_size=micro),
        global_batch_size=_size(config, _BATCH),
        zero_stage=stage,
        precision=_precision(config),
        # What is left open, DeepSpeed decides by the stage (runtime/zero/config.py).
        overlaps_gradients=stage == 3 if overlaps in (None, "auto") else bool(overlaps),
    )


def tensor_parallel_size(config: Config) -> int:
    """Over how many ranks a configuration splits tensors by itself.

    >>> tensor_parallel_size({"tensor_parallel": {"autotp_size": 2}}), tensor_parallel_size({})
    (2, 1)
    """
    size = _block(config, _TENSOR).get(_TENSOR_SIZE, 0) if config.get(_TENSOR) is not None else 0
    if size in (0, "auto"):
        return 1
    if isinstance(size, int) and size > 0:
        return size
    raise ConfigError(
        f"DeepSpeed configuration: {_TENSOR}.{_TENSOR_SIZE}: expected a count, got {size!r}"
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
    if rest:
        raise ConfigError(
            f"{_BATCH} {batch} does not divide by {_MICRO} {micro} x DP{layout.dp}; "
            f"{_other_sizes(batch, micro)}"
        )
    found |= {_BATCH: batch, _MICRO: micro, _ACCUMULATION: accumulation}
    if layout.zero_stage is not None:
        found[_ZERO] = {**_zero(config), "stage": layout.zero_stage}
    if layout.tp == 1:
        found.pop(_TENSOR, None)
    else:
        found[_TENSOR] = {**_block(config, _TENSOR), _TENSOR_SIZE: layout.tp}
        # DeepSpeed multiplies micro-batch and accumulation by all ranks, tensor-parallel ones too
        # (runtime/config.py), and would refuse the right batch.
        del found[_BATCH]
    return found


def _other_sizes(batch: int, micro: int) -> str:
    """What would divide instead."""
    sizes = [cut.ranks for cut in batch_cuts(batch, (micro,), range(1, batch // micro + 1))]
    if not sizes:
        return f"expected a multiple of {micro}"
    more = ", ..." if len(sizes) > _MOST_NAMED else ""
    named = ", ".join(f"DP{size}" for size in sizes[:_MOST_NAMED])
    return f"it does by {named}{more}: expected as many ranks, or another layout in the policy"


def check_layout(config: Config, layout: ParallelLayout) -> None:
    """Refuse what no configuration can express.

    Raises:
        ConfigError: the layout splits what DeepSpeed does not, or was not told how to.
    """
    for is_asked, reason in (
        (layout.cp > 1, "DeepSpeed has no CP; leave it out"),
        (layout.vpp > 1, "DeepSpeed has no VPP; leave it out"),
        (layout.ep > 1, "the model decides EP (ep_size of its MoE layers); leave it out"),
        (
            layout.stage_layers is not None,
            "the script cuts the stages (partition_method of PipelineModule); leave STAGES out",
        ),
    ):
        if is_asked:
            raise ConfigError(f"layout {layout}: {reason}")
    if layout.tp > 1 and config.get(_TENSOR) is None:
        raise ConfigError(
            f"layout {layout}: the DeepSpeed configuration has no {_TENSOR!r} block that says how "
            "TP splits the model; add one (partition_config), or leave TP out of the policy"
        )
    if layout.tp > 1 and layout.pp > 1:
        raise ConfigError(
            f"layout {layout}: DeepSpeed splits tensors with data-parallel groups that reach over "
            "all pipeline stages, so it trains no TP with PP; expected one of the two"
        )
    if layout.pp > 1 and _stage(config, layout) > 1:
        raise ConfigError(
            f"layout {layout}: DeepSpeed's pipelines run with ZeRO 0 or 1, got stage "
            f"{_stage(config, layout)}"
        )


def refuse_elasticity(config: Config, path: Path) -> None:
    """A job that relied on DeepSpeed's own elasticity, which 0.19 removed and refuses.

    Raises:
        ConfigError: there is such a block, and what takes its place.
    """
    if "elasticity" in config:
        raise ConfigError(
            f"DeepSpeed configuration {path}: DeepSpeed 0.19 has no elasticity, and refuses the "
            f"block; drop it and write {_BATCH} and {_MICRO}: the policy decides the rest, and "
            f"`tenplex frontier --deepspeed-config {path} --gpus 1:N` shows on which numbers of "
            "GPUs that batch runs"
        )


def _block(config: Config, name: str) -> Config:
    """A part of the configuration; absent is empty."""
    found = config.get(name, {})
    if isinstance(found, Mapping):
        return found
    raise ConfigError(f"DeepSpeed configuration: {name}: expected keys and values, got {found!r}")


def _zero(config: Config) -> Config:
    """A switch instead of a block is an old spelling of stage 1, or of none."""
    switch = config.get(_ZERO)
    return {"stage": int(switch)} if isinstance(switch, bool) else _block(config, _ZERO)


def _stage(config: Config, layout: ParallelLayout | None = None) -> int:
    if layout is not None and layout.zero_stage is not None:
        return layout.zero_stage
    stage = _zero(config).get("stage", 0)
    if stage == "auto":  # DeepSpeed then takes its default
        return 0
    if str(stage) in ("0", "1", "2", "3"):
        return int(stage)
    raise ConfigError(f"DeepSpeed configuration: {_ZERO}.stage: expected 0 to 3, got {stage!r}")


def _precision(config: Config) -> Precision:
    # null is as if it was not there, but for "fp16", which DeepSpeed refuses.
    name = "bfloat16" if config.get("bf16") is None else "bf16"
    if config.get(name) is not None and _is_on(_block(config, name)):
        return "bf16"
    return "fp16" if _is_on(_block(config, "fp16")) else "fp32"


def _is_on(block: Config) -> bool:
    """What is left open ("auto") is off, unless a Trainer fills it in."""
    return str(block.get("enabled", False)).lower() in ("true", "1")


def _size(config: Config, name: str) -> int:
    value = config.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ConfigError(
        f"DeepSpeed configuration: {name}: expected a count, got {value!r}; the batch can be kept "
        f"exact over all numbers of devices only if {_BATCH} and {_MICRO} are written"
    )
