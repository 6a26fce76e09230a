"""What single ranks do in the tests of DeepSpeed's state, besides `deepspeed_worlds`."""

import torch
from deepspeed_models import BATCH, Job, build, micro_batches
from deepspeed_worlds import prepare_rank, train

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


def refusal_of(rank: int, change: str) -> str:
    """What a state says about an engine, or about progress, that it can't continue."""
    from tenplex_megatron.adapters.deepspeed.state import DeepSpeedState

    prepare_rank(rank)
    engine = build(Job(ParallelLayout(zero_stage=1)), seed=1)
    try:
        if change == "no optimizer":
            engine.optimizer = None
        if change == "random_ltd":
            engine.random_ltd_enabled = lambda: True
        if change == "autocast":
            engine._config.torch_autocast_enabled = True
            engine._config.torch_autocast_dtype = torch.float16
        state = DeepSpeedState(engine)
        progress = state.progress()
        if change == "batch":
            progress["global_batch_size"] = 2 * BATCH
        if change == "group":
            first, second = progress["optimizer"]["groups"]
            first["parameters"][0], second["parameters"][0] = (
                second["parameters"][0],
                first["parameters"][0],
            )
        state.load_progress([progress])
    except TenplexError as error:
        return str(error)
    return "nothing"
