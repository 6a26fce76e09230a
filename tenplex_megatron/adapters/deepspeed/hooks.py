"""Where does a DeepSpeed training loop call us?

`deepspeed.initialize` is wrapped so that the engine is built for this generation's layout; the
engine's own methods are wrapped when the script hands it over with `elastic`. All wrappers pass
every argument through.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from tenplex_megatron.adapters.base import FrameworkAdapter, StepObserver
from tenplex_megatron.adapters.deepspeed.config import for_layout, read_config
from tenplex_megatron.adapters.deepspeed.state import DeepSpeedState
from tenplex_megatron.adapters.sampler import ElasticSampler
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError

__all__ = ["DeepSpeedAdapter", "elastic"]

_observers: list[StepObserver] = []


class DeepSpeedAdapter(FrameworkAdapter):
    """DeepSpeed engines of scripts that call `elastic`."""

    def install(self, observer: StepObserver, layout: ParallelLayout) -> None:
        """See `FrameworkAdapter.install`."""
        _skip_compilation()
        _observers[:] = [observer]
        _wrap(deepspeed, "initialize", functools.partial(_initialize, layout=layout))
        pipe = importlib.import_module("deepspeed.runtime.pipe.module")
        _wrap(pipe.PipelineModule, "__init__", functools.partial(_cut_stages, layout=layout))
        _wrap(deepspeed, "add_config_arguments", _add_flag)


def elastic(
    engine: Any,
    sampler: ElasticSampler | None = None,
    *,
    steps: int | None = None,
    client_state: dict[str, Any] | None = None,
) -> Any:
    """Make an engine elastic: its state is imported, kept safe, and handed over at changes.

    Call it once, after `deepspeed.initialize` and before the first batch is drawn. Without an
    elastic launcher the engine trains as always, and the sampler deals its batches.

    Args:
        engine: what `deepspeed.initialize` returned.
        sampler: deals the samples, so that they go on where they stopped.
        steps: how many steps will be trained; the last one is then kept for a later start.
        client_state: plain values of the script that travel along; replaced in place by an import.

    Returns:
        The same engine.

    Raises:
        ConfigError: the engine is elastic already.
    """
    if getattr(engine, "tenplex_state", None) is not None:
        raise ConfigError("elastic(engine): this engine is elastic already; call it once")
    state = DeepSpeedState(engine, sampler, client_state)
    engine.tenplex_state = state
    if not _observers:
        return engine
    observer = _observers[0]
    if sampler is not None and observer.audits_samples:
        _audit_samples(sampler, observer)
    observer.on_built(state)
    _Loop(engine, state, observer, steps).hook()
    return engine


class _Loop:
    """The training loop of one engine, as its methods are called."""

    def __init__(
        self, engine: Any, state: DeepSpeedState, observer: StepObserver, steps: int | None
    ) -> None:
        self._engine, self._state, self._observer = engine, state, observer
        self._last = steps
        self._losses: list[torch.Tensor] = []

    def hook(self) -> None:
        """Wrap the methods through which every loop goes."""
        _wrap(self._engine, "_take_model_step", self._update)
        if hasattr(self._engine, "train_batch"):
            _wrap(self._engine, "train_batch", self._train_batch)
        else:
            _wrap(self._engine, "forward", self._forward)
            _wrap(self._engine, "backward", self._backward)
            _wrap(self._engine, "step", self._step)

    def _update(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._observer.before_update()
        return original(*args, **kwargs)

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._state.resume_streams()
        return original(*args, **kwargs)

    def _backward(
        self, original: Callable[..., Any], loss: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        # Scripts that divide by the accumulation themselves say so.
        is_scaled = not kwargs.get("scale_wrt_gas", True)
        parts = self._engine.gradient_accumulation_steps() if is_scaled else 1
        self._losses.append(loss.detach() * parts)
        return original(loss, *args, **kwargs)

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self._engine.global_steps
        result = original(*args, **kwargs)
        # Within an accumulation window nothing is finished.
        if self._engine.global_steps != before:
            self._finish(self._mean_loss())
        return result

    def _train_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._state.resume_streams()
        loss = original(*args, **kwargs)
        self._finish({"loss": float(loss)})
        return loss

    def _mean_loss(self) -> dict[str, float] | None:
        """Over all micro-batches of all ranks; tensor-parallel ranks have the same."""
        if not self._losses:
            return None
        mean = torch.stack(self._losses).float().mean()
        self._losses = []
        dist.all_reduce(mean)
        return {"loss": float(mean) / dist.get_world_size()}

    def _finish(self, losses: dict[str, float] | None) -> None:
        step = int(self._engine.global_steps)
        is_last = self._last is not None and step >= self._last
        if self._observer.on_step(step, losses, is_last=is_last):
            raise SystemExit(self._observer.exit_code)


def _audit_samples(sampler: ElasticSampler, observer: StepObserver) -> None:
    """Report the samples of every micro-batch, counted over all passes."""
    numbers = itertools.count()

    def audited(original: Callable[..., Any]) -> Iterator[list[int]]:
        for ids in original():
            observer.on_samples(next(numbers), ids)
            yield ids

    _wrap(sampler, "micro_batches", audited)


def _initialize(
    original: Callable[..., Any], *args: Any, layout: ParallelLayout, **kwargs: Any
) -> Any:
    """Build the engine with the configuration of this layout."""
    source = kwargs.pop("config", None) or kwargs.pop("config_params", None)
    script: Any = args[0] if args else kwargs.get("args")
    if source is None:
        source = getattr(script, "deepspeed_config", None)
    if source is None:
        raise ConfigError(
            "deepspeed.initialize: no configuration; expected config=... or args.deepspeed_config"
        )
    if getattr(script, "deepspeed_config", None) is not None:
        # DeepSpeed refuses two configurations.
        script.deepspeed_config = None
    config = for_layout(read_config(source if isinstance(source, dict) else Path(source)), layout)
    return original(*args, config=config, **kwargs)


def _cut_stages(
    original: Callable[..., Any],
    module: Any,
    *args: Any,
    layout: ParallelLayout,
    num_stages: int | None = None,
    topology: Any = None,
    **kwargs: Any,
) -> None:
    """A pipeline has the stages of this layout, whatever the script says."""
    del num_stages
    if topology is not None:
        raise ConfigError(
            "PipelineModule(topology=...): expected num_stages alone; the policy decides how many "
            "ranks every axis has"
        )
    original(module, *args, num_stages=layout.pp, **kwargs)


def _add_flag(original: Callable[..., Any], parser: Any) -> Any:
    parser = original(parser)
    parser.add_argument(
        "--elastic-policy",
        metavar="PATH",
        default=None,
        help="YAML policy; the job changes its layout when its devices change",
    )
    return parser


def _skip_compilation() -> None:
    """DeepSpeed would compile a kernel for CPU collectives at its first start, for minutes."""
    compatible: dict[str, bool] = importlib.import_module("deepspeed.ops").__compatible_ops__
    compatible["deepspeed_shm_comm"] = False


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, wrapped)
