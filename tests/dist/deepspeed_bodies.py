"""What single ranks do in the tests of DeepSpeed's state, besides `deepspeed_worlds`."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed_engines import build
from deepspeed_models import BATCH, WIDTH, Job, micro_batches
from deepspeed_worlds import prepare_rank, train, unlike_masters

from tenplex_megatron.adapters.sampler import ElasticSampler
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import LayoutError, TenplexError


def boxes_beside_deepspeed(rank: int, job: Job) -> list[str]:
    """Every box of a master or moment that is not DeepSpeed's own slice of the whole tensor."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from tenplex_megatron.adapters.deepspeed.state import DeepSpeedState

    prepare_rank(rank)
    engine = build(job, seed=1)
    state = DeepSpeedState(engine)
    train(engine, 2)
    wholes = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and name != "left_out":
            wholes[f"master/{name}"] = safe_get_full_fp32_param(parameter)
            for kind in ("exp_avg", "exp_avg_sq"):
                wholes[f"{kind}/{name}"] = safe_get_full_optimizer_state(parameter, kind)
    wrong, seen = [], set()
    for piece in state.pieces():
        if piece.box.tensor in wholes:
            seen.add(piece.box.tensor)
            whole = wholes[piece.box.tensor].view(piece.spec.shape)
            if not torch.equal(whole[piece.box.region.slices()], piece.as_box()):
                wrong.append(str(piece.box))
    if job.layout.world_size == 1 and seen != wholes.keys():
        wrong.extend(sorted(wholes.keys() - seen))
    return wrong


def unlike_fresh_masters(rank: int, jobs: Sequence[Job]) -> list[str]:
    """Weights of this rank that are not their masters, right after the start of an engine."""
    prepare_rank(rank)
    wrong = []
    for job in jobs:
        engine = build(job, seed=1)
        wrong.extend(f"{job.name}: {weights}" for weights in unlike_masters(engine))
        engine.destroy()
    return wrong


def first_samples(rank: int, job: Job) -> list[int]:
    """What this rank reads in the first step."""
    from tenplex_megatron.adapters.deepspeed.state import DeepSpeedState

    prepare_rank(rank)
    engine = build(job, seed=1)
    sampler = ElasticSampler(2 * BATCH, shuffle=False)
    DeepSpeedState(engine, sampler)
    batches = itertools.islice(sampler.batches(), engine.gradient_accumulation_steps())
    return [sample for batch in batches for sample in batch]


def scales_around_a_checkpoint(rank: int, folder: Path) -> tuple[float, float, float]:
    """The loss scale as it is saved, after another step, and after it was loaded."""
    from tenplex_megatron.adapters.deepspeed.masters import masters_of
    from tenplex_megatron.adapters.deepspeed.optimizer import optimizer_progress

    prepare_rank(rank)
    engine = build(Job(ParallelLayout(zero_stage=1), precision="fp16"), seed=1)
    masters = masters_of(engine.optimizer)
    keys = {id(parameter): name for parameter, name in engine.param_names.items()}

    def scale() -> float:
        return optimizer_progress(masters, keys)["scale"]["cur_scale"]

    train(engine, 1)
    saved = scale()
    engine.save_checkpoint(folder)
    train(engine, 1)
    before = scale()
    engine.load_checkpoint(folder)
    return saved, before, scale()


def snapshot_within_window(rank: int, job: Job) -> tuple[str, int]:
    """What an export after the first of several micro-batches says, and the step it then has."""
    from tenplex_megatron.adapters.deepspeed.state import DeepSpeedState

    prepare_rank(rank)
    engine = build(job, seed=1)
    state = DeepSpeedState(engine)
    train(engine, 1)
    micro = engine.train_micro_batch_size_per_gpu()
    message = ""
    for words, next_words in micro_batches(1, micro, rank, job.layout.dp):
        try:
            state.progress()
        except LayoutError as error:
            message = str(error)
        engine.backward(engine(words, next_words))
        engine.step()
    return message, state.progress()["counters"]["global_steps"]


class SplitInTwo:
    """What a script with tensor parallelism of its own tells DeepSpeed."""

    def get_model_parallel_world_size(self) -> int:
        return 2


def with_stranger(engine: torch.nn.Module) -> None:
    engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


def with_partial_offload(engine: torch.nn.Module) -> None:
    engine.optimizer.offload_optimizer = True
    engine.optimizer.partial_offload = 0.5


def with_transposed(engine: torch.nn.Module) -> None:
    engine.module.frozen.data = engine.module.frozen.data.t().contiguous().t()


def with_expanded(engine: torch.nn.Module) -> None:
    engine.module.block.scale = torch.ones(()).expand(WIDTH)


def with_moved(engine: torch.nn.Module) -> None:
    engine.module.temperature.data = engine.module.temperature.data.clone()


def with_sharded_lora(engine: torch.nn.Module) -> None:
    from deepspeed.linear import LoRAConfig, OptimizedLinear

    layer = OptimizedLinear(4, 4, lora_config=LoRAConfig(lora_r=2), dtype=torch.float32)
    layer.zero_shards = 2
    engine.module.adapted = layer


def with_autocast(engine: torch.nn.Module) -> None:
    engine._config.torch_autocast_enabled = True
    engine._config.torch_autocast_dtype = torch.float16


def with_twice_the_batch(progress: dict[str, Any]) -> None:
    progress["global_batch_size"] = 2 * BATCH


def with_mixed_groups(progress: dict[str, Any]) -> None:
    first, second = (group["parameters"] for group in progress["optimizer"]["groups"])
    first[0], second[0] = second[0], first[0]


ENGINES: dict[str, tuple[int, Callable[[Any], None]]] = {
    "no optimizer": (1, lambda engine: setattr(engine, "optimizer", None)),
    "random_ltd": (1, lambda engine: setattr(engine, "random_ltd_enabled", lambda: True)),
    "autocast": (1, with_autocast),
    "nvme": (3, lambda engine: setattr(engine.optimizer, "swap_optimizer", True)),
    "partial offload": (3, with_partial_offload),
    "transposed": (1, with_transposed),
    "expanded": (0, with_expanded),
    "moved": (2, with_moved),
    "sharded": (1, with_sharded_lora),
    "stranger": (0, with_stranger),
    "mpu": (1, lambda engine: setattr(engine, "mpu", SplitInTwo())),
    "sequences": (1, lambda engine: setattr(engine, "sequence_parallel_size", 2)),
}
"""The stage of an engine, and what becomes of it."""
PROGRESS: dict[str, Callable[[dict[str, Any]], None]] = {
    "batch": with_twice_the_batch,
    "group": with_mixed_groups,
}
"""What becomes of the progress of a rank."""


def refusals(rank: int, changes: Sequence[str]) -> dict[str, str]:
    """What a state says about engines, or about progress, that it can't continue."""
    prepare_rank(rank)
    return {change: _refusal(change) for change in changes}


def _refusal(change: str) -> str:
    from tenplex_megatron.adapters.deepspeed.state import DeepSpeedState

    stage, spoil = ENGINES.get(change, (1, id))
    engine = build(Job(ParallelLayout(zero_stage=stage)), seed=1)
    spoil(engine)
    try:
        state = DeepSpeedState(engine)
        progress = state.progress()
        PROGRESS.get(change, id)(progress)
        state.load_progress([progress])
    except TenplexError as error:
        return str(error)
    return "nothing"
