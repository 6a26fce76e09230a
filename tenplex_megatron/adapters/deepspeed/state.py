"""The live state of one DeepSpeed rank as boxes of global tensors.

Tensors are named `<kind>/<parameter>`: the kind is `master` (the value the optimizer updates), the
optimizer's own names for its state, `param` for what no optimizer updates (frozen weights,
buffers), and `random/...` for streams.  16-bit weights do not appear: they are the masters,
rounded.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from tenplex_megatron.adapters.base import Piece, Progress, TrainingState
from tenplex_megatron.adapters.deepspeed import randomness
from tenplex_megatron.adapters.deepspeed.masters import masters_of
from tenplex_megatron.adapters.deepspeed.model import describe_model
from tenplex_megatron.adapters.deepspeed.optimizer import (
    load_optimizer_progress,
    optimizer_progress,
    owned_parameters,
    prepare_state,
)
from tenplex_megatron.adapters.deepspeed.place import global_batch_size, place_of
from tenplex_megatron.adapters.deepspeed.schedule import load_schedule, schedule_progress
from tenplex_megatron.adapters.parts import pieces_of
from tenplex_megatron.adapters.sampler import ElasticSampler
from tenplex_megatron.adapters.streams import CarriedStreams
from tenplex_megatron.core.tensors import TensorSpec
from tenplex_megatron.errors import LayoutError, UnsupportedLayoutError

__all__ = ["DeepSpeedState", "bind_sampler"]

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class DeepSpeedState(TrainingState):
    """Boxes and progress of an engine: model, optimizer, schedule, samples and client state.

    Args:
        engine: what `deepspeed.initialize` returned.
        sampler: deals the samples of the training loop; None where the script does.
        client_state: plain values of the script that travel along; read at every snapshot, and
            replaced in place by those of the snapshot's rank 0.

    Raises:
        UnsupportedLayoutError: the engine has state that is not described here.
    """

    def __init__(
        self,
        engine: Any,
        sampler: ElasticSampler | None = None,
        client_state: dict[str, Any] | None = None,
    ) -> None:
        _check(engine)
        self._engine = engine
        self._sampler = sampler
        self._client_state = {} if client_state is None else client_state
        self._place = place_of(engine)
        # What DeepSpeed counts samples by.
        engine._config.train_batch_size = global_batch_size(engine)
        self._masters = masters_of(engine.optimizer)
        prepare_state(self._masters)
        trained = {id(one) for group in self._masters.groups() for one in group.parameters}
        self._model = describe_model(engine, self._place.tp, trained)
        described = (*self._describe_trained(), *self._describe_untrained())
        self._needed = tuple(piece for _, piece in described)
        self._given = tuple(piece for counts, piece in described if counts)
        self._streams = CarriedStreams(randomness.export_streams, randomness.import_streams)
        bind_sampler(engine, sampler)

    @property
    def global_batch_size(self) -> int:
        """See `TrainingState.global_batch_size`."""
        return global_batch_size(self._engine)

    def pieces(self, stored: Mapping[str, TensorSpec] | None = None) -> tuple[Piece, ...]:
        """See `TrainingState.pieces`; buffers and random streams are copies, the rest is views."""
        streams = self._streams.pieces(str(self._place), stored)
        pieces = (*(self._given if stored is None else self._needed), *streams)
        return tuple(sorted(pieces, key=lambda piece: piece.box))

    def refresh(self) -> None:
        """See `TrainingState.refresh`."""
        self._model.buffers.refresh()
        self._streams.refresh()

    def _describe_trained(self) -> Iterator[tuple[bool, Piece]]:
        """Pieces of masters and their state, and whether their values count."""
        for owned in owned_parameters(self._masters):
            counts = id(owned.parameter) not in self._model.followers
            for part in self._parts(owned.parameter):
                for kind, flat in owned.states.items():
                    for piece in pieces_of(kind, part, flat, owned.start, owned.stop):
                        yield counts, piece

    def _describe_untrained(self) -> Iterator[tuple[bool, Piece]]:
        for held in self._model.untrained:
            for part in held.parts:
                for piece in pieces_of("param", part, held.flat, held.start, held.stop):
                    yield held.counts, piece

    def _parts(self, parameter: torch.nn.Parameter) -> tuple[Any, ...]:
        if id(parameter) not in self._model.parts:
            raise UnsupportedLayoutError(
                f"a parameter of shape {tuple(parameter.shape)} is trained but is not one of the "
                "engine's module; its place in the model is unknown"
            )
        return self._model.parts[id(parameter)]

    def progress(self) -> Progress:
        """See `TrainingState.progress`.

        Raises:
            LayoutError: gradients are being accumulated, which no snapshot holds.
        """
        engine = self._engine
        _check_boundary(engine)
        return {
            "counters": {name: int(getattr(engine, name)) for name in _COUNTERS},
            "global_batch_size": self.global_batch_size,
            "schedule": schedule_progress(engine.lr_scheduler),
            "optimizer": optimizer_progress(self._masters, self._model.keys),
            "sampler": self._sampler.state_dict() if self._sampler is not None else None,
            "client": copy.deepcopy(self._client_state),
        }

    def load_progress(self, progress: Sequence[Progress]) -> int:
        """See `TrainingState.load_progress`."""
        engine, stored = self._engine, list(progress)
        first = stored[0]
        for key in ("counters", "global_batch_size", "sampler"):
            if any(other[key] != first[key] for other in stored):
                raise LayoutError(f"ranks of the snapshot disagree on {key}")
        if first["global_batch_size"] != self.global_batch_size:
            raise LayoutError(
                f"train_batch_size: the snapshot was taken with {first['global_batch_size']}, this "
                f"run has {self.global_batch_size}; the loss curve could not go on as before. Keep "
                f"micro-batch x accumulation x data-parallel ranks at {first['global_batch_size']}"
            )
        for name in _COUNTERS:
            setattr(engine, name, first["counters"][name])
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
        # The schedule first: some write the learning rates that the stored groups then set.
        load_schedule(engine.lr_scheduler, [entry["schedule"] for entry in stored])
        load_optimizer_progress(
            self._masters, self._model.keys, [entry["optimizer"] for entry in stored]
        )
        self._client_state.clear()
        self._client_state.update(copy.deepcopy(first["client"]))
        if self._sampler is not None and first["sampler"] is not None:
            self._sampler.load_state_dict(dict(first["sampler"]))
        bind_sampler(engine, self._sampler)
        return int(engine.global_steps)

    def finish_import(self) -> None:
        """See `TrainingState.finish_import`; random streams follow with `resume_streams`."""
        self._masters.refresh()
        self._model.buffers.restore()
        self._streams.keep()

    def resume_streams(self) -> None:
        """Set the imported random streams; right before the first step."""
        self._streams.resume(lambda: randomness.reseed(int(self._engine.global_steps)))


def bind_sampler(engine: Any, sampler: ElasticSampler | None) -> None:
    """Let the sampler deal the engine's micro-batches, from the samples it has finished."""
    if sampler is not None:
        group = engine.seq_data_parallel_group
        is_inner = isinstance(engine, PipelineEngine) and not (
            engine.is_first_stage() or engine.is_last_stage()
        )
        sampler.bind(
            micro=engine.train_micro_batch_size_per_gpu(),
            accumulation=engine.gradient_accumulation_steps(),
            rank=dist.get_rank(group),
            dp=dist.get_world_size(group),
            consumed=lambda: int(engine.global_samples),
            reads=not is_inner,
        )


def _check(engine: Any) -> None:
    """Refuse engines that keep more than is described."""
    if engine.optimizer is None:
        raise UnsupportedLayoutError(
            "the engine has no optimizer, so nothing is trained; give deepspeed.initialize an "
            "optimizer"
        )
    kept = {
        "random_ltd": engine.random_ltd_enabled(),
        "curriculum_learning": engine.curriculum_learning_enabled(),
        "zero_quantized_nontrainable_weights": engine.zero_quantized_nontrainable_weights(),
        "torch_autocast in float16": engine.torch_autocast_enabled()
        and engine.torch_autocast_dtype() == torch.float16,
    }
    for name, is_on in kept.items():
        if is_on:
            raise UnsupportedLayoutError(
                f"{name}: it keeps state of its own that is not carried; drop it from the "
                "DeepSpeed configuration, or save and load a checkpoint instead"
            )


def _check_boundary(engine: Any) -> None:
    accumulation = engine.gradient_accumulation_steps()
    done = engine.micro_steps % accumulation
    if not engine.managed_gradient_accumulation():
        done = engine._unmanaged_backward_count
    # A loop that sets the boundaries itself may put any number of micro-batches between two.
    if done and engine._is_gradient_accumulation_boundary is None:
        raise LayoutError(
            f"a snapshot was asked for after {done} of {accumulation} micro-batches of step "
            f"{engine.global_steps + 1}; gradients are not part of it: ask after engine.step() has "
            "finished a step"
        )
