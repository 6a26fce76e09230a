"""A training script without a framework: sums over all ranks, steps, snapshots, hands over."""

import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist

from tenplex_megatron.config import load_policy
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.elastic.control import StepControl
from tenplex_megatron.elastic.events import EventLog
from tenplex_megatron.elastic.generation import GenerationSpec
from tenplex_megatron.store.shared import SnapshotStore

ROWS = 840  # divides by every world up to 8


def main() -> int:
    last, pause_s, mode = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    spec = GenerationSpec.from_environment()
    assert spec is not None
    events = EventLog(spec.rundir / "steps.jsonl", spec.node)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    events.append("entered", spec.generation, rank=rank)
    dist.init_process_group("gloo")
    events.append("joined", spec.generation, rank=rank)
    policy = load_policy(spec.policy)
    control = StepControl(spec, policy) if rank == 0 else None
    tensors = {"w": TensorSpec("w", (ROWS,), "float64")}
    part = ROWS // world
    box = Box("w", Region((rank * part,), ((rank + 1) * part,)))
    store = SnapshotStore(spec.store, spec.job, spec.identity).open_existing()
    writer = store.writer(
        rank,
        world,
        generation=spec.generation,
        layout=spec.layout.to_json(),
        specs=tensors,
        boxes=[box],
    )
    step = spec.source.version if spec.source is not None else 0
    if mode == "crash" and rank == 1:
        raise ValueError("device 1 is broken")
    local_ranks = [r for r, node in enumerate(spec.nodes) if node == spec.node]
    while step < last:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == world
        step += 1
        if rank == 0:
            events.append("step", spec.generation, step=step, world=world, layout=str(spec.layout))
        change = control.pending(step) if control is not None else None
        answer = [change]
        dist.broadcast_object_list(answer, src=0)
        if answer[0] is not None or step % policy.snapshot.every_steps == 0:
            view = writer.begin(step)[0]
            np.frombuffer(view, dtype=np.float64)[:] = step
            del view
            writer.finish(step, {"step": step})
            dist.barrier()
            if rank == local_ranks[0]:
                store.commit(step, generation=spec.generation, ranks=local_ranks)
            dist.barrier()
        if answer[0] is not None:
            if control is not None:
                control.accept(answer[0])
            return 85
        time.sleep(pause_s)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
