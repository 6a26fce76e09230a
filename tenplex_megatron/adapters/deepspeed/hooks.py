"""Where does a DeepSpeed training loop call us?

The engine's own methods are wrapped when the script hands it over with `elastic`.  All wrappers
pass every argument through.
"""

import importlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from tenplex_megatron.adapters.base import FrameworkAdapter, StepObserver
from tenplex_megatron.adapters.deepspeed.building import Builder, is_elastic, set_elastic
from tenplex_megatron.adapters.deepspeed.state import DeepSpeedState, bind_sampler
from tenplex_megatron.adapters.sampler import ElasticSampler
from tenplex_megatron.adapters.wrapping import add_policy_flag, wrap
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.store.values import encode_value

__all__ = ["DeepSpeedAdapter", "elastic", "imports_state"]


@dataclass(slots=True)
class _Launch:
    """What an elastic launcher installed in this process, and whether the script has used it."""

    observer: StepObserver
    builder: Builder
    has_engine: bool = False


_launches: list[_Launch] = []
"""At most one."""


class DeepSpeedAdapter(FrameworkAdapter):
    """DeepSpeed engines of scripts that call `elastic`."""

    def install(self, observer: StepObserver, layout: ParallelLayout) -> None:
        """See `FrameworkAdapter.install`."""
        _skip_compilation()
        # As DeepSpeed's launcher says it; its CPU accelerator counts devices by it.
        os.environ["LOCAL_SIZE"] = os.environ.get("LOCAL_WORLD_SIZE", "1")
        builder = Builder(layout, snapshot_follows=observer.imports_state)
        builder.install()
        _launches[:] = [_Launch(observer, builder)]
        wrap(deepspeed, "add_config_arguments", add_policy_flag)


def imports_state() -> bool:
    """Whether `elastic` will set the state of a snapshot, so that no checkpoint is needed."""
    return any(launch.observer.imports_state for launch in _launches)


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
        client_state: plain values of the script that travel along, as numbers, text, lists and
            dicts of Python; those of rank 0 count, and replace the others in place at an import.

    Returns:
        The same engine.

    Raises:
        ConfigError: the engine is elastic already, is not built for this generation's layout, or
            reads data whose position could not be kept.
        StoreError: `client_state` holds what is no plain value.
    """
    if is_elastic(engine):
        raise ConfigError("elastic(engine): this engine is elastic already; call it once")
    if not _launches:
        set_elastic(engine)
        bind_sampler(engine, sampler)
        return engine
    (launch,) = _launches
    if launch.has_engine:
        raise ConfigError(
            "elastic(engine): another engine of this script is elastic; the state of one engine "
            "can be kept"
        )
    if engine.training_dataloader is not None and sampler is None:
        raise ConfigError(
            "deepspeed.initialize(training_data=...) deals samples in an order that depends on "
            "the number of ranks and begins anew at every change; expected a DataLoader of the "
            "script with ElasticSampler(data), given to elastic(engine, sampler)"
        )
    launch.builder.check(engine)
    state = DeepSpeedState(engine, sampler, client_state)
    # What can't be kept is said now, not when it is needed.
    encode_value(state.progress())
    set_elastic(engine)
    launch.has_engine = True
    if sampler is not None and launch.observer.audits_samples:
        _audit_samples(sampler, launch.observer)
    launch.observer.on_built(state)
    _Loop(engine, state, launch.observer, steps).hook()
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
        wrap(self._engine, "_take_model_step", self._update)
        if isinstance(self._engine, PipelineEngine):
            wrap(self._engine, "train_batch", self._train_batch)
        else:
            wrap(self._engine, "forward", self._forward)
            wrap(self._engine, "backward", self._backward)
            wrap(self._engine, "step", self._step)

    def _update(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._observer.before_update()
        return original(*args, **kwargs)

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._state.resume_streams()
        return original(*args, **kwargs)

    def _backward(
        self, original: Callable[..., Any], loss: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        # Scripts that divide by the accumulation themselves say so: backward(loss, retain_graph,
        # scale_wrt_gas), whose decorator hides its signature.
        is_scaled = not kwargs.get("scale_wrt_gas", args[1] if len(args) > 1 else True)
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

    wrap(sampler, "micro_batches", audited)


def _skip_compilation() -> None:
    """DeepSpeed would compile a kernel for CPU collectives at its first start, for minutes."""
    compatible: dict[str, bool] = importlib.import_module("deepspeed.ops").__compatible_ops__
    compatible["deepspeed_shm_comm"] = False
