"""How does a Trainer of Transformers go on when its devices change?

    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.add_callback(TenplexCallback(trainer))
    trainer.train()

The engine is DeepSpeed's, and its adapter carries weights, optimizer and position.  What is the
Trainer's own is here: how a batch is cut, in which order samples come, its counters and schedule.
"""

import time
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainerCallback
from transformers.optimization import GreedyLR
from transformers.trainer_callback import ExportableState

from tenplex_megatron.adapters.deepspeed import hooks
from tenplex_megatron.adapters.huggingface.settings import (
    check_engine,
    check_trainer,
    cut_batch,
    note_stage,
)
from tenplex_megatron.adapters.sampler import ElasticSampler
from tenplex_megatron.errors import ConfigError

__all__ = ["TenplexCallback"]

_CARRIED = (
    "total_flos",
    "num_input_tokens_seen",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Fields of `TrainerState` that follow from nothing else and are equal on all ranks."""


class TenplexCallback(TrainerCallback):  # type: ignore[misc]  # its package is not analysed
    """Makes one Trainer elastic; add it before `train()`.

    The batch of a step is that of the DeepSpeed configuration at any number of devices: the
    configuration names `train_batch_size` and `train_micro_batch_size_per_gpu`, and gradient
    accumulation follows.  A pass over the data is as many whole batches as hold it; the samples
    that fill up the last one are the first of the next order.

    Args:
        trainer: the Trainer this callback is added to.

    Raises:
        ConfigError: the Trainer's settings fix what changes with the devices.
    """

    def __init__(self, trainer: Any) -> None:
        check_trainer(trainer)
        self._trainer = trainer
        self._sampler: ElasticSampler | None = None
        self._bookkeeping: dict[str, Any] = {}
        cut_batch(trainer)
        self._build_loader = trainer.get_train_dataloader
        self._build_engine = trainer._prepare_for_training
        # The Trainer looks these up at itself whenever it trains.
        trainer._get_train_sampler = self._train_sampler
        trainer.get_train_dataloader = self._train_loader
        trainer._prepare_for_training = self._engine
        # Samples are not skipped: the sampler knows where it stands.
        trainer.args.ignore_data_skip = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Import the state, if there is one, and take up the Trainer's own."""
        del control
        trainer, loader = self._trainer, kwargs["train_dataloader"]
        sampler = self._checked_sampler(loader)
        engine = trainer.deepspeed
        check_engine(engine, trainer.args)
        hooks.elastic(engine, sampler, steps=state.max_steps, client_state=self._bookkeeping)
        note_stage(trainer, engine.zero_optimization_stage())
        if self._bookkeeping:
            self._take_up(state)
            self._end_step(args, state)
        if trainer.control.should_training_stop:
            # The Trainer asks for this after a step; without samples it does none.
            _batch_sampler(loader).sampler = ()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep what the snapshot of this step needs: how things stand before it.

        Snapshots are taken, and a job is left, within the engine's step.  What the Trainer does
        afterwards (schedule, logs, evaluations, checkpoints) is done by who goes on.
        """
        del args, control, kwargs
        trainer = self._trainer
        own_schedule = trainer.deepspeed.lr_scheduler is None
        self._bookkeeping |= {
            "state": {name: getattr(state, name) for name in _CARRIED},
            "callbacks": [callback.state()["attributes"] for callback in _stateful(trainer)],
            "schedule": trainer.lr_scheduler.state_dict() if own_schedule else None,
            "skipped_steps": int(trainer.deepspeed.skipped_steps),
        }

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer counts passes from where it was started."""
        del args, control, kwargs
        state.epoch = self._epoch(state.global_step)

    def _take_up(self, state: Any) -> None:
        """Set the Trainer to where the engine's step left it."""
        trainer, engine, kept = self._trainer, self._trainer.deepspeed, self._bookkeeping
        state.global_step = engine.global_steps
        state.epoch = self._epoch(state.global_step)
        for name, value in kept["state"].items():
            setattr(state, name, value)
        for callback, attributes in zip(_stateful(trainer), kept["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)
        # Averages over steps and times per step begin here.
        trainer._initial_global_step = trainer._globalstep_last_logged = state.global_step
        trainer._initial_num_input_tokens_seen = state.num_input_tokens_seen
        if kept["schedule"] is None:
            return
        trainer.lr_scheduler.load_state_dict(kept["schedule"])
        follows_steps = not isinstance(trainer.lr_scheduler, ReduceLROnPlateau | GreedyLR)
        if follows_steps and engine.skipped_steps == kept["skipped_steps"]:
            trainer.lr_scheduler.step()

    def _end_step(self, args: Any, state: Any) -> None:
        """Evaluate and save as the Trainer does after a step, and after the last of a pass."""
        trainer = self._trainer
        handler = trainer.callback_handler
        ends = [handler.on_step_end]
        if state.global_step % self._steps_of_pass() == 0:
            ends.append(handler.on_epoch_end)
        for end in ends:
            trainer.control = end(args, state, trainer.control)
            # The loss of the step went with the process that computed it.
            trainer._maybe_log_save_evaluate(
                torch.zeros(()), None, trainer.model_wrapped, None, state.epoch, None, time.time()
            )

    def _epoch(self, steps: int) -> float:
        passes, rest = divmod(steps, self._steps_of_pass())
        return passes + rest / self._steps_of_pass()

    def _steps_of_pass(self) -> int:
        assert self._sampler is not None
        accumulation: int = self._trainer.args.gradient_accumulation_steps
        return self._sampler.num_micro_batches // accumulation

    def _train_sampler(self, dataset: Any = None) -> ElasticSampler:
        """In place of the Trainer's own, whose order depends on the number of ranks."""
        args = self._trainer.args
        self._sampler = ElasticSampler(
            self._trainer.train_dataset if dataset is None else dataset,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.train_sampling_strategy == "random",
        )
        # The Trainer asks for the length of a pass before there is an engine to ask.
        self._sampler.bind(
            micro=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            rank=args.process_index,
            dp=args.world_size,
            consumed=lambda: 0,
        )
        return self._sampler

    def _train_loader(self) -> Any:
        """The Trainer's loader, its samples dealt to ranks once: by the sampler."""
        loader = self._build_loader()
        shard = loader.batch_sampler
        if isinstance(shard, BatchSamplerShard):
            shard.num_processes, shard.process_index = 1, 0
        return loader

    def _engine(self, max_steps: int, loader: Any, checkpoint: str | None) -> Any:
        """Build the engine, without a checkpoint where a snapshot follows.

        The snapshot is newer, and the checkpoint may be of another number of devices.
        """
        return self._build_engine(max_steps, loader, None if hooks.imports_state() else checkpoint)

    def _checked_sampler(self, loader: Any) -> ElasticSampler:
        """The sampler, if the loader reads from it as it should."""
        sampler, micro = self._sampler, self._trainer.args.per_device_train_batch_size
        if sampler is None or not isinstance(loader, DataLoaderShard):
            raise ConfigError(
                f"the Trainer reads its data from a {type(loader).__name__} that its train sampler "
                "has no part in, so the order of samples could not be kept; expected a dataset "
                "with a length, no dispatch_batches, and no get_train_dataloader of your own"
            )
        batches = _batch_sampler(loader)
        source: object = batches.sampler
        if source is not sampler or batches.batch_size != micro:
            raise ConfigError(
                f"the Trainer's data loader takes batches of {batches.batch_size} from a "
                f"{type(source).__name__}; expected batches of {micro} from the sampler "
                "of this callback: leave _get_train_sampler and the batch size to the Trainer"
            )
        return sampler


def _batch_sampler(loader: Any) -> Any:
    shard = loader.batch_sampler
    return shard.batch_sampler if isinstance(shard, BatchSamplerShard) else shard


def _stateful(trainer: Any) -> list[Any]:
    """The callbacks that keep a state, such as the patience of early stopping."""
    return [one for one in trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
