"""What a Trainer must not be told when its devices may change, and what its settings become."""

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tenplex_megatron.testing.spawn import run_ranks

if TYPE_CHECKING:
    from transformers import Trainer

pytest.importorskip("transformers")

ZERO = {"zero_optimization": {"stage": 1}}
BATCH = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, **ZERO}
CONFIGURED = {"use_configured_state": True}
# What is wrong -> (settings, DeepSpeed configuration, what is said).
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "no DeepSpeed": ({}, None, r"is no DeepSpeed configuration; expected TrainingArguments\(deep"),
    "no batch": ({}, {**BATCH, "train_batch_size": "auto"}, "train_batch_size: expected a count"),
    "no micro-batch": ({}, {"train_batch_size": 12, **ZERO}, "train_micro_batch_size_per_gpu: exp"),
    "no whole steps": ({}, {**BATCH, "train_batch_size": 7}, "7 does not divide by .* 2 x DP1"),
    "tensor parallel": (
        {},
        {**BATCH, "tensor_parallel": {"autotp_size": 2}},
        "splits its model or sequences over TP2; expected data parallelism alone",
    ),
    "samples by length": (
        {"train_sampling_strategy": "group_by_length"},
        BATCH,
        "train_sampling_strategy='group_by_length' groups samples by how a batch is cut",
    ),
    "rebalanced": ({"train_sampling_strategy": "batch_rebalance"}, BATCH, "'batch_rebalance' gro"),
    "a batch that fits": ({"auto_find_batch_size": True}, BATCH, "batch must not depend on what"),
    "tokens of a rank": (
        {"average_tokens_across_devices": False},
        BATCH,
        "average_tokens_across_devices=False: every rank would average .*; expected True",
    ),
    "the best at the end": (
        {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"},
        BATCH,
        "only on as many devices as saved it; load the best after training; expected False",
    ),
    "split batches": (
        {"accelerator_config": {**CONFIGURED, "split_batches": True}},
        BATCH,
        "split_batches and dispatch_batches deal a batch in another way",
    ),
    "dispatched batches": (
        {"accelerator_config": {**CONFIGURED, "dispatch_batches": True}},
        BATCH,
        "split_batches and dispatch_batches deal a batch in another way",
    ),
}
# What is done to the Trainer after its callback was made -> what is said when it trains.
MISUSED = {
    "own loader": "reads its data from a DataLoader that its train sampler has no part in",
    "own sampler": "Own deals its samples in an order of its own, which would be lost",
    "endless data": "reads its data from a DataLoader.* that its train sampler has no part in",
    "other batch size": "takes batches of 5 from a ElasticSampler; expected batches of 2",
    "other accumulation": "accumulates 6 micro-batches of 2, the Trainer 3 of 2",
}


def make_trainer(config: dict[str, Any] | None, settings: dict[str, Any]) -> "Trainer":
    """A Trainer of a tiny model in a process that stands in for one of a launcher."""
    import deepspeed
    import torch
    from accelerate.state import AcceleratorState, PartialState
    from torch.utils.data import TensorDataset
    from transformers import Trainer, TrainingArguments

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 1)

        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.linear(inputs).square().mean()}

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    AcceleratorState._reset_state(reset_partial_state=True)
    if config is not None:
        settings = {"accelerator_config": CONFIGURED, **settings}
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        del os.environ["ACCELERATE_USE_DEEPSPEED"]
    quiet = {"report_to": [], "save_strategy": "no", "dataloader_pin_memory": False}
    args = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        deepspeed=config,
        **{**quiet, "disable_tqdm": True, **settings},
    )
    data = TensorDataset(torch.randn(50, 3))
    return Trainer(
        model=Net(),
        args=args,
        train_dataset=data,
        eval_dataset=data,
        data_collator=lambda rows: {"inputs": torch.stack([row for (row,) in rows])},
    )


def as_launched(rank: int, size: int = 1) -> None:
    """What a launcher tells a process; before the frameworks are imported."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ |= {"HF_HUB_OFFLINE": "1"}


def said_by(action: Callable[[], object]) -> str:
    from tenplex_megatron.errors import ConfigError

    try:
        action()
    except ConfigError as error:
        return str(error)
    return "nothing"


def refuse(rank: int) -> dict[str, str]:
    as_launched(rank)
    from tenplex_megatron.adapters.huggingface.callback import TenplexCallback

    said = {}
    for name, (settings, config, _) in REFUSED.items():
        trainer = make_trainer(config, settings)
        said[name] = said_by(lambda trainer=trainer: TenplexCallback(trainer))
    return said


def misuse(rank: int) -> dict[str, str]:
    as_launched(rank)
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    from tenplex_megatron.adapters.huggingface.callback import TenplexCallback

    class Endless(IterableDataset[tuple[torch.Tensor]]):
        def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
            while True:
                yield (torch.ones(3),)

    said = {}
    for name in MISUSED:
        trainer = make_trainer(BATCH, {"max_steps": 2})
        if name == "own loader":
            loader = DataLoader(trainer.train_dataset, batch_size=2)
            trainer.get_train_dataloader = lambda loader=loader: loader
        if name == "own sampler":

            class Own(type(trainer)):  # type: ignore[misc]  # the class is a value here
                def _get_train_sampler(self, dataset: object = None) -> None:
                    del dataset

            trainer.__class__ = Own
            said[name] = said_by(lambda trainer=trainer: TenplexCallback(trainer))
            continue
        trainer.add_callback(TenplexCallback(trainer))
        if name == "endless data":
            trainer.train_dataset = Endless()
        elif name == "other batch size":
            trainer._train_batch_size = 5
        elif name == "other accumulation":
            trainer.args.gradient_accumulation_steps = 3
        said[name] = said_by(trainer.train)
    return said


def too_few_seen(rank: int) -> str:
    as_launched(rank, 2)
    from accelerate.state import AcceleratorState
    from transformers import TrainingArguments

    from tenplex_megatron.adapters.huggingface.callback import TenplexCallback

    trainer = make_trainer(BATCH, {})
    AcceleratorState._reset_state(reset_partial_state=True)
    trainer.args = TrainingArguments(output_dir=tempfile.gettempdir(), deepspeed=BATCH)
    return said_by(lambda: TenplexCallback(trainer))


def settle(rank: int) -> dict[str, Any]:
    """The settings of a Trainer whose own contradict its configuration, and its steps."""
    as_launched(rank, 2)
    from tenplex_megatron.adapters.huggingface.callback import TenplexCallback

    asked = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 5}
    config = {**BATCH, "gradient_accumulation_steps": "auto", "train_batch_size": 24}
    trainer = make_trainer(config, {**asked, "num_train_epochs": 2, "learning_rate": 1.0})
    callback = TenplexCallback(trainer)
    trainer.add_callback(callback)
    trainer.train()
    engine, before = trainer.deepspeed, trainer.lr_scheduler.last_epoch
    moved = []
    for skipped in (0, 1):
        # As if the step of a snapshot had been skipped, or not.
        callback._bookkeeping["skipped_steps"] = engine.skipped_steps - skipped
        callback._bookkeeping["schedule"] = trainer.lr_scheduler.state_dict()
        callback._take_up(trainer.state)
        moved.append(trainer.lr_scheduler.last_epoch - before)
    return {
        "micro": trainer.args.per_device_train_batch_size,
        "accumulation": trainer.args.gradient_accumulation_steps,
        "samples": engine.global_samples,
        "steps": trainer.state.global_step,
        "schedule moved": moved,
    }


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    (refused,), (misused,) = run_ranks(refuse, 1, 170), run_ranks(misuse, 1, 170)
    return refused | misused


@pytest.mark.parametrize("name", [*REFUSED, *MISUSED])
def test_what_depends_on_the_number_of_devices_is_refused(name: str, said: dict[str, str]) -> None:
    expected = MISUSED[name] if name in MISUSED else REFUSED[name][2]
    assert re.search(expected, said[name]), said[name]


def test_processes_that_accelerate_does_not_see_are_noticed() -> None:
    for said in run_ranks(too_few_seen, 2, 170):
        assert "sees 1 of 2 processes" in said


def test_the_batch_of_a_step_is_the_configured_one_whatever_the_arguments_say() -> None:
    for found in run_ranks(settle, 2, 170):
        assert found == {
            "micro": 2,
            "accumulation": 6,
            # 50 samples fill three batches of 24, and that twice.
            "steps": 6,
            "samples": 6 * 24,
            # One step on after a step that was done; none after one that was skipped.
            "schedule moved": [1, 1],
        }
