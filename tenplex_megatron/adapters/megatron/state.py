"""The live state of one Megatron rank as boxes of global tensors.

Tensors are named `<kind>/<key>`: the key is Megatron's own, the kind says which of a parameter's
tensors it is: `master` (the value the optimizer updates), the optimizer's own names for its state,
`param` for what no optimizer updates (buffers, frozen weights), and `random/...` for streams.
16-bit weights do not appear: they are the masters, rounded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import update_num_microbatches

from tenplex_megatron.adapters.base import Piece, Progress, TrainingState
from tenplex_megatron.adapters.megatron import optimizer as optimizers
from tenplex_megatron.adapters.megatron import randomness
from tenplex_megatron.adapters.megatron.model import ModelTensors, describe_model
from tenplex_megatron.adapters.parts import pieces_of
from tenplex_megatron.adapters.streams import CarriedStreams
from tenplex_megatron.core.tensors import TensorSpec
from tenplex_megatron.errors import LayoutError, UnsupportedLayoutError

__all__ = ["MegatronState"]

PROGRESS_KEYS = (
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
)
MUST_AGREE = ("global_batch_size", "seq_length", "seed", "padded_vocab_size")


class MegatronState(TrainingState):
    """Boxes and progress of a model, its optimizer and its schedule.

    Args:
        model: the model chunks Megatron trains.
        optimizer: Megatron's optimizer, or None when nothing is trained.
        scheduler: Megatron's OptimizerParamScheduler.
        args: Megatron's parsed arguments; the live progress counters are read from and written to
            this namespace, as Megatron itself does.
    """

    def __init__(
        self, model: Sequence[torch.nn.Module], optimizer: Any, scheduler: Any, args: Any
    ) -> None:
        self._model = list(model)
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._args = args
        self._streams = CarriedStreams(randomness.export_streams, randomness.import_streams)
        self._order: Progress | None = None
        """Of the training samples; None until data was seen, or a snapshot that knows it."""
        self.step = 0
        self.floating_point_operations = 0.0
        optimizers.prepare_state(optimizer)
        self._tensors: ModelTensors = describe_model(self._model, _metadata())
        self._fixed = tuple(sorted(self._describe(), key=lambda piece: piece.box))

    @property
    def global_batch_size(self) -> int:
        """See `TrainingState.global_batch_size`."""
        return int(self._args.global_batch_size)

    def pieces(self, stored: Mapping[str, TensorSpec] | None = None) -> tuple[Piece, ...]:
        """See `TrainingState.pieces`; masters and moments are views, random streams are copies."""
        place = randomness.coordinate_name(self._args.data_parallel_random_init)
        streams = self._streams.pieces(place, stored)
        return tuple(sorted((*self._fixed, *streams), key=lambda piece: piece.box))

    def refresh(self) -> None:
        """See `TrainingState.refresh`."""
        self._streams.refresh()

    def _describe(self) -> Iterator[Piece]:
        parts = self._tensors.by_identity()
        seen: set[int] = set()
        for owned in optimizers.owned_parameters(self._optimizer):
            if id(owned.parameter) not in parts:
                raise UnsupportedLayoutError(
                    f"a parameter of shape {tuple(owned.parameter.shape)} is trained but is not in "
                    "the model's sharded_state_dict(); its place in the model is unknown"
                )
            seen.add(id(owned.parameter))
            for part in parts[id(owned.parameter)]:
                for kind, flat in owned.states.items():
                    yield from pieces_of(kind, part, flat, owned.start, owned.stop)
        trained = {
            id(parameter)
            for chunk in self._model
            for parameter in chunk.parameters()
            if parameter.requires_grad
        }
        for tensor, tensor_parts in self._tensors.tensors:
            # With the distributed optimizer other ranks own the rest of a trained parameter.
            if id(tensor) in seen or id(tensor) in trained:
                continue
            flat = tensor.detach().view(-1)
            changes_early = not isinstance(tensor, torch.nn.Parameter)
            for part in tensor_parts:
                for piece in pieces_of("param", part, flat, 0, flat.numel()):
                    yield replace(piece, is_early=changes_early)

    def progress(self) -> Progress:
        """See `TrainingState.progress`."""
        counters: Progress = {key: getattr(self._args, key) for key in PROGRESS_KEYS}
        agree: Progress = {key: getattr(self._args, key) for key in self._agreed()}
        return {
            "step": self.step,
            "floating_point_operations": self.floating_point_operations,
            "counters": counters,
            "must_agree": agree,
            "order": self._order,
            "schedule": dict(self._scheduler.state_dict()),
            "optimizers": optimizers.optimizer_progress(self._optimizer),
        }

    def _agreed(self) -> tuple[str, ...]:
        """Arguments on which the order of samples and the losses depend."""
        by_micro_batch = self._args.dataloader_type == "cyclic"
        return (*MUST_AGREE, "micro_batch_size") if by_micro_batch else MUST_AGREE

    def load_progress(self, progress: Sequence[Progress]) -> int:
        """See `TrainingState.load_progress`."""
        stored = list(progress)
        first = stored[0]
        for key in ("step", "floating_point_operations", "counters", "schedule"):
            if any(other[key] != first[key] for other in stored):
                raise LayoutError(f"ranks of the snapshot disagree on {key}")
        for key in self._agreed():
            mine, theirs = getattr(self._args, key), first["must_agree"][key]
            if mine != theirs:
                flag = "--" + key.replace("_", "-")
                raise LayoutError(
                    f"{flag}: the snapshot was taken with {theirs}, this run has {mine}; the loss "
                    f"curve could not go on as before. Keep {flag} at {theirs}"
                )
        self._order = next((entry["order"] for entry in stored if entry.get("order")), None)
        self.step = int(first["step"])
        self.floating_point_operations = first["floating_point_operations"]
        for key, value in first["counters"].items():
            setattr(self._args, key, value)
        self._args.iteration = self.step
        self._args.num_floating_point_operations_so_far = self.floating_point_operations
        update_num_microbatches(consumed_samples=self._args.consumed_train_samples, verbose=False)
        # The schedule first: it rewrites the learning rates that the stored groups then set.
        try:
            self._scheduler.load_state_dict(dict(first["schedule"]))
        except AssertionError as error:
            raise LayoutError(
                f"the schedule of the snapshot is another one: {error}; keep the flags of the "
                "learning rate and --train-iters, or add --override-opt_param-scheduler"
            ) from error
        optimizers.load_optimizer_progress(
            self._optimizer, [entry["optimizers"] for entry in stored]
        )
        return self.step

    def keep_order(self, order: Progress) -> None:
        """Note the order of this run's samples (`loaders.order_of`), for snapshots.

        Raises:
            LayoutError: the state was imported, and its samples came in another order.
        """
        before = self._order
        if before and before["phase"] == order["phase"] and before["digest"] != order["digest"]:
            raise LayoutError(
                f"--train-iters: this run asks the data for {order['samples']} samples, the "
                f"snapshot's asked for {before['samples']}, and that gives another order from the "
                "first sample on: some would repeat, some be left out. Keep --train-iters (or "
                "--train-samples) and the data itself, or train on from a checkpoint as another job"
            )
        self._order = order

    def finish_import(self) -> None:
        """See `TrainingState.finish_import`; random streams follow with `resume_streams`."""
        optimizers.refresh_model(self._optimizer, self._model)
        self._streams.keep()

    def resume_streams(self) -> None:
        """Set the imported random streams; right before the first step."""
        args = self._args
        self._streams.resume(
            lambda: randomness.reseed(args.seed, self.step, args.data_parallel_random_init)
        )


def _metadata() -> dict[str, object]:
    """Metadata under which `sharded_state_dict` keys and offsets are the same for all layouts."""
    return {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }
