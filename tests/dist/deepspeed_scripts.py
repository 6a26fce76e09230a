"""What a script may do with its engines, on one rank, and who watches it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed_worlds import prepare_rank

from tenplex_megatron.adapters.base import StepObserver, TrainingState
from tenplex_megatron.adapters.deepspeed.hooks import DeepSpeedAdapter, elastic
from tenplex_megatron.adapters.sampler import ElasticSampler
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import TenplexError

SAMPLES = 24
CONFIG: dict[str, Any] = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
}

STILL: dict[str, Any] = {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}}


class Watcher(StepObserver):
    """An observer that imports nothing and leaves never."""

    def __init__(self, *, imports: bool = False) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []
        self._imports = imports
        self._state: TrainingState

    @property
    def imports_state(self) -> bool:
        return self._imports

    @property
    def audits_samples(self) -> bool:
        return False

    @property
    def exit_code(self) -> int | None:
        return None

    def on_built(self, state: TrainingState) -> None:
        state.pieces()
        self._state = state

    def before_update(self) -> None:
        pass

    def on_samples(self, first_batch: int, ids: Sequence[int]) -> None:
        pass

    def on_step(
        self, step: int, losses: Mapping[str, float] | None, *, is_last: bool = False
    ) -> bool:
        del is_last
        self._state.progress()
        self.losses.append((losses or {})["loss"])
        self.steps.append(step)
        return False


class Named(torch.nn.Linear):
    """A model with a method of the name of an engine's."""

    def train_batch(self) -> None:
        raise AssertionError


def build(model: torch.nn.Module | None = None, **more: object) -> Any:  # noqa: ANN401
    model = torch.nn.Linear(4, 2) if model is None else model
    wanted = {"config": CONFIG, "model_parameters": model.parameters(), **more}
    return deepspeed.initialize(model=model, **wanted)[0]


def train(engine: Any, steps: int) -> None:  # noqa: ANN401
    for _ in range(steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(3, 4)).sum())
        engine.step()


def data() -> torch.utils.data.Dataset[Any]:
    return torch.utils.data.TensorDataset(torch.ones(SAMPLES, 4))


def own_loader() -> None:
    elastic(build(training_data=data()))


def other_loader() -> None:
    engine = elastic(build(), ElasticSampler(SAMPLES))
    train(engine, 1)


def second_engine() -> None:
    elastic(build())
    elastic(build())


def unseen_engine() -> None:
    train(build(), 1)


def unseen_second_engine() -> None:
    elastic(build())
    train(build(), 1)


def checkpoint_afterwards() -> None:
    elastic(build()).load_checkpoint("anywhere")


def odd_client_state() -> None:
    elastic(build(), client_state={"best": np.float32(1)})


def other_batch() -> None:
    engine = build()
    engine.set_train_batch_size(24)
    elastic(engine)


def not_built_here() -> None:
    engine = deepspeed.initialize.__wrapped__(
        model=(model := torch.nn.Linear(4, 2)), model_parameters=model.parameters(), config=CONFIG
    )[0]
    elastic(engine)


def two_precisions() -> None:
    build(config=CONFIG | {"bf16": {"enabled": True}, "fp16": {"enabled": True}})


SCRIPTS: dict[str, tuple[Callable[[], None], str]] = {
    "own loader": (own_loader, "expected a DataLoader of the script with ElasticSampler(data)"),
    "other loader": (other_loader, "the engine has counted 12 samples, its sampler gave 0"),
    "second engine": (second_engine, "another engine of this script is elastic"),
    "unseen engine": (unseen_engine, "not handed to elastic(engine), so its state would be lost"),
    "unseen second engine": (unseen_second_engine, "Only one engine of a script can be elastic"),
    "checkpoint afterwards": (checkpoint_afterwards, "load first, then call elastic"),
    "odd client state": (odd_client_state, "numpy.float32"),
    "other batch": (other_batch, "and 24 samples per step, expected TP1 PP1 DP1 with ZeRO 0 and 1"),
    "what DeepSpeed refuses": (two_precisions, "initialize can't build TP1,PP1,DP1: "),
    "not built here": (not_built_here, "was not built by deepspeed.initialize of this process"),
}


def said_of(rank: int, name: str, layout: str) -> str:
    """What ends a script."""
    prepare_rank(rank)
    DeepSpeedAdapter().install(Watcher(), ParallelLayout.parse(layout))
    try:
        SCRIPTS[name][0]()
    except TenplexError as error:
        return str(error)
    return ""


def steps_of_named_model(rank: int) -> list[int]:
    """The steps seen of a model that has a method of an engine's name."""
    prepare_rank(rank)
    watcher = Watcher()
    DeepSpeedAdapter().install(watcher, ParallelLayout())
    train(elastic(build(Named(4, 2))), 3)
    return watcher.steps


def losses_seen(rank: int) -> list[float]:
    """The losses seen of three steps with equal data, whoever divides by the accumulation."""
    prepare_rank(rank)
    watcher = Watcher()
    DeepSpeedAdapter().install(watcher, ParallelLayout())
    engine = elastic(build(config=CONFIG | {"optimizer": STILL}))
    parts = engine.gradient_accumulation_steps()
    told: list[tuple[tuple[object, ...], dict[str, object], int]] = [
        ((), {}, 1),
        ((), {"scale_wrt_gas": False}, parts),
        ((False, False), {}, parts),
    ]
    for words, named, divisor in told:
        for _ in range(parts):
            engine.backward(engine(torch.ones(3, 4)).sum() / divisor, *words, **named)
            engine.step()
    return watcher.losses


def teacher_weights(rank: int, folder: Path, *, follows: bool, trains: bool) -> list[float]:
    """What a teacher says that loaded its checkpoint, beside an engine that is elastic."""
    prepare_rank(rank)
    DeepSpeedAdapter().install(Watcher(imports=follows), ParallelLayout())
    student = elastic(build())
    config = CONFIG if trains else {k: v for k, v in CONFIG.items() if k != "optimizer"}
    torch.manual_seed(2 + follows)
    given = {} if trains else {"model_parameters": None}
    teacher = build(config=config, **given)
    if follows:
        teacher.load_checkpoint(str(folder))
    said: list[float] = teacher(torch.ones(1, 4)).flatten().tolist()
    if not follows:
        teacher.save_checkpoint(str(folder))
    train(student, 1)
    return said


def stages_built(rank: int, layout: str) -> list[int]:
    """How many stages pipelines have, whatever and however the script says."""
    prepare_rank(rank)
    DeepSpeedAdapter().install(Watcher(), ParallelLayout.parse(layout))
    layers = [LayerSpec(torch.nn.Linear, 4, 4) for _ in range(4)]
    loss = torch.nn.functional.mse_loss
    return [
        PipelineModule(layers, 1, loss_fn=loss).num_stages,
        PipelineModule(layers, num_stages=4, loss_fn=loss).num_stages,
        PipelineModule(layers=layers, loss_fn=loss).num_stages,
    ]


def partitioned(rank: int, layout: str, stage: int) -> list[bool]:
    """Whether weights made under `zero.Init` are cut, and whether the engine trains them."""
    prepare_rank(rank)
    parsed = ParallelLayout.parse(layout)
    watcher = Watcher()
    DeepSpeedAdapter().install(watcher, parsed)
    config = CONFIG | {"zero_optimization": {"stage": stage}}
    torch.manual_seed(1)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Linear(4, 2)
    is_cut = hasattr(model.weight, "ds_tensor")
    engine = elastic(build(model, config=config))
    train(engine, 1)
    return [is_cut, watcher.steps == [1], engine.zero_optimization_stage() == 3]
