"""A Trainer of Transformers on a tiny model; the line that makes it elastic is that of the README.

On machines without a GPU accelerate must be told that there are several processes.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch.utils.data import Dataset, Subset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from tenplex_megatron.huggingface import TenplexCallback

VOCABULARY, LENGTH = 64, 12


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random tokens; every sample counts another number of them."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=random)
        labels = tokens.clone()
        labels[2 + index % (LENGTH - 2) :] = -100
        return {"input_ids": tokens, "labels": labels}


def gpt2() -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2}
    dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, n_head=2))


def llama() -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


class Notes(TrainerCallback):
    """What the Trainer itself says of every step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **rest: object,
    ) -> None:
        del args, control, rest
        if state.is_world_process_zero:
            row = {"step": state.global_step, "epoch": state.epoch, **logs}
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", required=True)
    parser.add_argument("--model", default="gpt2", choices=("gpt2", "llama"))
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON")
    script = parser.parse_args()
    options = {name: json.loads(value) for name, value in (o.split("=") for o in script.option)}
    if not torch.cuda.is_available():
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        options["accelerator_config"] = {"use_configured_state": True}
    settings: dict[str, Any] = {
        "deepspeed": script.deepspeed,
        "output_dir": str(script.output),
        "num_train_epochs": script.epochs,
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "logging_steps": 1,
        "metric_for_best_model": "eval_loss",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 3,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "per_device_eval_batch_size": 1,
    }
    args = TrainingArguments(**{**settings, **options})
    torch.manual_seed(1)
    model = {"gpt2": gpt2, "llama": llama}[script.model]()
    notes = Notes(script.output / "notes.jsonl")
    data = Sentences(script.samples)
    # Of as many tokens each, and one at a time: the Trainer averages over what ranks evaluate
    # together, padding included, so other losses depend on their number.
    evaluated = Subset(data, range(LENGTH - 3, len(data), LENGTH - 2))
    trainer = Trainer(
        model=model, args=args, train_dataset=data, eval_dataset=evaluated, callbacks=[notes]
    )
    trainer.add_callback(TenplexCallback(trainer))
    patience = EarlyStoppingCallback(early_stopping_patience=99)
    trainer.add_callback(patience)
    # As the usual scripts do: an interrupted run goes on from what it finds.
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(script.output)))
    if trainer.is_world_process_zero():
        state = trainer.state
        done = [state.global_step, state.best_global_step, patience.early_stopping_patience_counter]
        (script.output / "done.json").write_text(json.dumps([*done, state.best_metric]))


if __name__ == "__main__":
    main()
