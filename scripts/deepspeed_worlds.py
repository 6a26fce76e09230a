"""Tiny DeepSpeed jobs that stop in one world and go on in another, through real snapshots.

Every function that starts with `run_` is the body of one rank.  A source trains, takes a snapshot
of each engine and trains on; a target builds engines of another world, imports the snapshots one
after the other and trains on.  What both return is compared by the caller.
"""

import gc
import hashlib
import os
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed_engines import build
from deepspeed_models import BATCH, Job, micro_batches

from tenplex_megatron.adapters.base import TrainingState
from tenplex_megatron.elastic.restore import Site, restore_state
from tenplex_megatron.elastic.snapshot import Snapshotter
from tenplex_megatron.execution.executor import Target
from tenplex_megatron.execution.verify import fingerprint_state, gather_collection
from tenplex_megatron.store.shared import SnapshotStore
from tenplex_megatron.transport.process_group import ProcessGroupTransport

__all__ = [
    "AFTER",
    "BEFORE",
    "Outcome",
    "prepare_rank",
    "run_sources",
    "run_targets",
    "train",
    "unlike_masters",
]

BEFORE, AFTER = 3, 5
"""Steps before the snapshot, and after it."""
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """What one rank knows of one job: state at the snapshot, and losses of the steps after it.

    `scale` is what DeepSpeed counts for the loss scale in fp16, `streams` a digest of this rank's
    random streams.
    """

    fingerprint: dict[str, int]
    losses: tuple[float, ...]
    scale: tuple[object, ...] = ()
    streams: str = ""


def train(engine: Any, steps: int) -> list[float]:
    """The mean loss of every step, over all samples of all ranks."""
    return [_step(engine) for _ in range(steps)]


def _step(engine: Any) -> float:
    step = engine.global_steps
    if step < BEFORE:
        _set_buffers(engine.module, step)
    group, micro = engine.data_parallel_group, engine.train_micro_batch_size_per_gpu()
    mine = micro_batches(step, micro, dist.get_rank(group), dist.get_world_size(group))
    if hasattr(engine, "train_batch"):
        return float(engine.train_batch(mine))
    total = torch.zeros(())
    for words, next_words in mine:
        loss = engine(words, next_words)
        engine.backward(loss)
        engine.step()
        total += loss.detach().float() * len(words) / BATCH
    dist.all_reduce(total, group=group)
    return float(total)


def _set_buffers(model: torch.nn.Module, step: int) -> None:
    """What a resumed run can know from the snapshot alone, in the same memory and in other."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name == "scale":
                buffer.fill_(1.0 + 0.1 * step)
            if name == "shift":
                setattr(module, name, torch.full_like(buffer, 1.0 + 0.1 * step))


def prepare_rank(rank: int) -> None:
    """What DeepSpeed expects of a process, and silence."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger

    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    logger.setLevel("ERROR")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    # Torch computes in fp16 on any CPU; DeepSpeed asks for instructions that make it fast.
    get_accelerator().is_fp16_supported = lambda: True
    # DeepSpeed collects garbage at every start; what is imported by now stays anyway.
    gc.freeze()


def site_of(source: Job, job: Job, rank: int) -> Site:
    """Two nodes where the target has two ranks, so that a part of every state travels."""
    names = ("first", "second") if job.layout.world_size > 1 else ("first",)
    nodes = tuple(names[rank % len(names)] for rank in range(job.layout.world_size))
    source_nodes = {rank: names[rank % len(names)] for rank in range(source.layout.world_size)}
    return Site(rank, nodes, source_nodes)


def store_of(folder: Path, job: Job) -> SnapshotStore:
    """Where the snapshots of a job lie; one folder stands for the stores of all nodes."""
    return SnapshotStore(folder / job.name, "job", job.model)


def run_sources(rank: int, folder: Path, jobs: Sequence[Job]) -> list[Outcome]:
    """Train every job, take a snapshot, train on; all jobs have the size of this world."""
    from tenplex_megatron.adapters.deepspeed.state import DeepSpeedState

    prepare_rank(rank)
    transport = ProcessGroupTransport.open(TIMEOUT_S)
    outcomes = []
    for job in jobs:
        engine = build(job, seed=1)
        _seed(rank)
        state = DeepSpeedState(engine, client_state={"note": "of the source"})
        train(engine, BEFORE)
        # Without ZeRO DeepSpeed 0.19.8 scales no loss, so that nothing overflows.
        if engine.fp16_enabled() and engine.zero_optimization() and not engine.skipped_steps:
            raise RuntimeError(f"{job.name}: no gradient has overflowed, so no scale has changed")
        _snapshot(state, store_of(folder, job), job, rank)
        outcomes.append(_outcome(engine, state, rank, transport, AFTER))
        engine.destroy()
    return outcomes


def _snapshot(state: TrainingState, store: SnapshotStore, job: Job, rank: int) -> None:
    pieces = state.pieces()
    writer = store.create().writer(
        rank,
        job.layout.world_size,
        generation=1,
        layout=job.layout.to_json(),
        specs={piece.spec.name: piece.spec for piece in pieces},
        boxes=[piece.box for piece in pieces],
    )
    snapshots = Snapshotter(state, pieces, writer)
    snapshots.start(BEFORE, None)
    if snapshots.wait() != BEFORE:
        raise RuntimeError(f"rank {rank} could not write its snapshot of {job.name}")
    snapshots.close()


def run_targets(
    rank: int, folder: Path, pairs: Sequence[tuple[Job, Job]], steps: int
) -> list[Outcome]:
    """Import every source into its target and train on; all targets have the size of this world."""
    from tenplex_megatron.adapters.deepspeed.state import DeepSpeedState

    prepare_rank(rank)
    transport = ProcessGroupTransport.open(TIMEOUT_S)
    outcomes = []
    for source, job in pairs:
        engine = build(job, seed=2)
        client: dict[str, Any] = {}
        state = DeepSpeedState(engine, client_state=client)
        _restore(state, store_of(folder, source), site_of(source, job, rank), transport)
        if client != {"note": "of the source"} or engine.global_samples != BEFORE * BATCH:
            raise RuntimeError(f"{source.name} -> {job.name}: progress was not imported")
        if wrong := unlike_masters(engine):
            raise RuntimeError(f"{source.name} -> {job.name}: weights are not {wrong}")
        state.resume_streams()
        outcomes.append(_outcome(engine, state, rank, transport, steps))
        engine.destroy()
    return outcomes


def _restore(
    state: TrainingState, store: SnapshotStore, site: Site, transport: ProcessGroupTransport
) -> None:
    reader = None
    if site.node in site.source_nodes.values():
        reader = store.open_existing().reader(BEFORE, generation=1)
    restore_state(state, site, reader=reader, transport=transport, timeout_s=TIMEOUT_S)
    if reader is not None:
        reader.close()


def _seed(rank: int) -> None:
    """Streams of its own for every rank, as a script with dropout would have them."""
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)


def _outcome(
    engine: Any, state: TrainingState, rank: int, transport: ProcessGroupTransport, steps: int
) -> Outcome:
    """Where a job stands, and what it does next."""
    fingerprint = fingerprint_of(state, rank, transport)
    digest = hashlib.sha256()
    for piece in state.pieces():
        if piece.is_local:
            digest.update(piece.as_bytes().numpy().tobytes())
    scale = _scale_of(engine.optimizer) if engine.fp16_enabled() else ()
    return Outcome(fingerprint, tuple(train(engine, steps)), scale, digest.hexdigest())


def _scale_of(optimizer: Any) -> tuple[object, ...]:
    owner = optimizer if hasattr(optimizer, "loss_scale_config") else None
    counts = vars(owner.loss_scale_config if owner else optimizer.loss_scaler)
    return tuple(counts[name] for name in ("cur_scale", "cur_iter", "last_overflow_iter"))


def unlike_masters(engine: Any) -> list[str]:
    """What is not, in this rank's weights, its master in the type of the weight."""
    from tenplex_megatron.adapters.deepspeed.masters import masters_of

    return [
        f"{engine.param_names[one.parameter]}[{one.start}:{one.stop}]"
        for one in masters_of(engine.optimizer).fragments()
        for weights in _weights(one.parameter, one.start, one.stop)
        if not torch.equal(
            one.master.detach().view(-1)[one.offset :][: one.stop - one.start].to(weights.dtype),
            weights,
        )
    ]


def _weights(parameter: Any, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Elements of a parameter as this rank has them: in its partition, whole, or both."""
    if hasattr(parameter, "ds_tensor"):
        yield parameter.ds_tensor.view(-1)[: stop - start]
    if parameter.numel() or not hasattr(parameter, "ds_tensor"):
        yield parameter.detach().view(-1)[start:stop]


def fingerprint_of(
    state: TrainingState, rank: int, transport: ProcessGroupTransport
) -> dict[str, int]:
    """Tensor -> fingerprint over all ranks, of everything but random streams."""
    state.refresh()
    pieces = [piece for piece in state.pieces() if not piece.is_local]
    collection = gather_collection(
        {piece.spec.name: piece.spec for piece in pieces},
        [piece.box for piece in pieces],
        transport,
        timeout_s=TIMEOUT_S,
    )
    targets = [Target(piece.box, piece.flat) for piece in pieces]
    return fingerprint_state(collection, rank, targets, transport, timeout_s=TIMEOUT_S)
