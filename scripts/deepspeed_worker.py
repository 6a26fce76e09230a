"""A rank of the jobs that bench_deepspeed.py kills; imports no more than a training script does.

The third rank marks every step it has finished.
"""

import argparse
import json
import os
import time
from pathlib import Path

import deepspeed
import torch


def main() -> None:
    """Train until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker")
    parser.add_argument("--load")
    parser.add_argument("--width", type=int)
    parser.add_argument("--layers", type=int)
    given = deepspeed.add_config_arguments(parser).parse_args()
    if given.worker == "universal":
        # DeepSpeed would compile a kernel for CPU collectives first.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    folder = Path(given.deepspeed_config).parent
    config = json.loads(Path(given.deepspeed_config).read_text())
    given.deepspeed_config = None
    if given.load:
        config["checkpoint"] = {"load_universal": True}
    torch.manual_seed(1)
    width = given.width
    net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(given.layers)))
    engine, *_ = deepspeed.initialize(
        args=given, model=net, model_parameters=net.parameters(), config=config
    )
    if given.worker == "elastic":
        from tenplex_megatron.deepspeed import elastic

        engine = elastic(engine)
    elif given.load:
        engine.load_checkpoint(str(folder / "checkpoint"), tag=given.load)
    while engine.global_steps < 100000:
        engine.backward(engine(torch.ones(1, width)).square().mean())
        before = engine.global_steps
        engine.step()
        if engine.global_steps == before:
            continue
        if torch.distributed.get_rank() == 2:
            world = torch.distributed.get_world_size()
            row = {"world": world, "time": time.time(), "pid": os.getpid()}
            with (folder / "marks.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        if given.worker == "universal":
            engine.save_checkpoint(str(folder / "checkpoint"), tag=f"step{engine.global_steps}")


if __name__ == "__main__":
    main()
