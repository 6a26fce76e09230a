"""How does a script's own call of DeepSpeed build this generation's layout?

What takes a configuration or a number of stages is wrapped: `deepspeed.initialize`, `zero.Init` and
`PipelineModule`.  The script says what is trained; how it is cut, the layout says.
"""

import copy
import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from tenplex_megatron.adapters.deepspeed.config import for_layout, read_config
from tenplex_megatron.adapters.deepspeed.place import global_batch_size, place_of
from tenplex_megatron.adapters.wrapping import wrap
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError

__all__ = ["Builder", "is_elastic", "set_elastic"]

logger = logging.getLogger(__name__)

_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu")
_MARK = "tenplex_is_elastic"


def is_elastic(engine: Any) -> bool:
    """Whether the script handed this engine to `elastic`."""
    return getattr(engine, _MARK, False)


def set_elastic(engine: Any) -> None:
    """The script handed this engine to `elastic`."""
    setattr(engine, _MARK, True)


class Builder:
    """Builds the engines of one process.

    Args:
        layout: of this generation.
        snapshot_follows: a snapshot will be imported into the engine that becomes elastic.
    """

    def __init__(self, layout: ParallelLayout, *, snapshot_follows: bool) -> None:
        self._layout = layout
        self._snapshot_follows = snapshot_follows
        self._configured: dict[int, int] = {}
        """Samples per step, by the identity of the engine."""

    def install(self) -> None:
        """Wrap what scripts call; arguments are passed through."""
        wrap(deepspeed, "initialize", self._initialize)
        wrap(deepspeed.zero.Init, "__init__", self._partition)
        pipe = importlib.import_module("deepspeed.runtime.pipe.module")
        wrap(pipe.PipelineModule, "__init__", self._cut_stages)

    def check(self, engine: Any) -> None:
        """Compare what was built with what should have been.

        Raises:
            ConfigError: the engine is of another layout, stage or batch.
        """
        configured = self._configured.get(id(engine))
        if configured is None:
            raise ConfigError(
                "elastic(engine): the engine was not built by deepspeed.initialize of this "
                "process; write `deepspeed.initialize(...)`, and leave modules that import the "
                "function itself out of `preload`"
            )
        layout, place = self._layout, place_of(engine)
        stage = engine.zero_optimization_stage()
        built = (place.tp_size, place.num_stages, place.dp_size, stage, global_batch_size(engine))
        wanted_stage = stage if layout.zero_stage is None else layout.zero_stage
        wanted = (layout.tp, layout.pp, layout.dp, wanted_stage, configured)
        if built != wanted:
            text = "TP{} PP{} DP{} with ZeRO {} and {} samples per step".format
            raise ConfigError(
                f"the script built an engine of {text(*built)}, expected {text(*wanted)}: layouts "
                "come from the policy and batches from the configuration file; leave out "
                "tp_model_init, meshes and batch sizes of the script, and PP in the policy where "
                "the model is no PipelineModule"
            )

    def _initialize(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Build the engine with the configuration of this layout."""
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        source = given.pop("config", None) or given.pop("config_params", None)
        script: Any = given.get("args")
        if source is None:
            source = getattr(script, "deepspeed_config", None)
        if source is None:
            raise ConfigError(
                "deepspeed.initialize: no configuration; expected config=... or "
                "args.deepspeed_config"
            )
        if getattr(script, "deepspeed_config", None) is not None:
            # DeepSpeed refuses two configurations.
            given["args"] = copy.copy(script)
            given["args"].deepspeed_config = None
        config = read_config(source)
        is_trained = given.get("optimizer") is not None or "optimizer" in config
        given["config"] = self._rewritten(config, is_trained=is_trained)
        try:
            built = original(**given)
        except (AssertionError, NotImplementedError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"deepspeed.initialize can't build {self._layout}: {reason}; change the DeepSpeed "
                "configuration, or the layouts of the policy"
            ) from error
        engine = built[0]
        if is_trained:
            self._configured[id(engine)] = config["train_batch_size"]
            wrap(engine, "_take_model_step", functools.partial(_refuse_unseen, engine=engine))
            wrap(engine, "load_checkpoint", functools.partial(self._load, engine=engine))
        return built

    def _rewritten(self, config: Mapping[str, Any], *, is_trained: bool) -> dict[str, Any]:
        """An engine that is not trained keeps its stage, and its batch where that is not whole."""
        if is_trained:
            return for_layout(config, self._layout)
        if any(name not in config for name in _BATCHES):
            return dict(config)
        return for_layout(config, replace(self._layout, zero_stage=None))

    def _load(
        self,
        original: Callable[..., Any],
        load_dir: str,
        *args: Any,
        engine: Any,
        **kwargs: Any,
    ) -> Any:
        """A snapshot is newer, and a ZeRO checkpoint may not even load on these ranks."""
        if is_elastic(engine):
            raise ConfigError(
                "engine.load_checkpoint after elastic(engine): snapshots would keep what was there "
                "before; load first, then call elastic"
            )
        if not self._snapshot_follows:
            return original(load_dir, *args, **kwargs)
        if dist.get_rank() == 0:
            logger.info("no checkpoint is loaded from %s: a newer snapshot follows", load_dir)
        # An engine that is only asked, a teacher say, gets no snapshot.
        put_off: list[Callable[[], Any]] = [functools.partial(original, load_dir, *args, **kwargs)]
        for name in ("forward", *(("eval_batch",) if isinstance(engine, PipelineEngine) else ())):
            wrap(engine, name, functools.partial(_loaded, engine=engine, put_off=put_off))
        # As where there is none.
        return None, None

    def _partition(
        self, original: Callable[..., None], context: Any, *args: Any, **kwargs: Any
    ) -> None:
        """`zero.Init` cuts weights as they are made, if the layout's stage is 3."""
        given = inspect.signature(original).bind(context, *args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        source = values.pop("config") or values["config_dict_or_path"]
        stage = self._layout.zero_stage
        if source is not None:
            config = read_config(source)
            is_trained = all(name in config for name in _BATCHES)
            values["config_dict_or_path"] = self._rewritten(config, is_trained=is_trained)
        values["enabled"] = values["enabled"] and stage in {None, 3}
        original(**values)

    def _cut_stages(
        self, original: Callable[..., None], module: Any, *args: Any, **kwargs: Any
    ) -> None:
        """A pipeline has the stages of this layout, whatever the script says."""
        layout = self._layout
        values = inspect.signature(original).bind(module, *args, **kwargs).arguments
        topology = values.get("topology")
        if topology is None:
            values["num_stages"] = layout.pp
        else:
            wanted = {"pipe": layout.pp, "data": layout.dp, "model": layout.tp}
            found = {axis: topology.get_dim(axis) for axis in topology.get_axis_names()}
            if {"model": 1} | found != wanted:
                raise ConfigError(
                    f"PipelineModule(topology=...) has the axes {found}, the layout of this "
                    f"generation is {layout}; expected num_stages alone, or a topology made from "
                    "the world and the stages of the layout"
                )
        original(**values)


def _refuse_unseen(original: Callable[..., Any], *args: Any, engine: Any, **kwargs: Any) -> Any:
    """An engine that trains unseen would be lost at the first change."""
    if not is_elastic(engine):
        raise ConfigError(
            "an engine is trained that was not handed to elastic(engine), so its state would be "
            "lost; add `engine = elastic(engine, sampler)` after deepspeed.initialize, or "
            "TenplexCallback(trainer) to a Trainer. Only one engine of a script can be elastic"
        )
    return original(*args, **kwargs)


def _loaded(
    original: Callable[..., Any],
    *args: Any,
    engine: Any,
    put_off: list[Callable[[], Any]],
    **kwargs: Any,
) -> Any:
    """Load what was put off, at the first use of an engine that no snapshot is for."""
    loads = [] if is_elastic(engine) else list(put_off)
    # First, since loading may call the engine.
    put_off.clear()
    for load in loads:
        load()
    return original(*args, **kwargs)
