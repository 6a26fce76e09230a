"""A DeepSpeed pipeline; its weights are saved on the way, and loaded where there are some."""

import argparse

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch.utils.data import DataLoader, TensorDataset

from tenplex_megatron.deepspeed import ElasticSampler, elastic

SAMPLES, STAGES = 50, 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stages", choices=("number", "topology", "wrong"), default="number")
    parser.add_argument("--save", default="")
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 7), torch.randn(SAMPLES, 3))
    layers = [
        LayerSpec(torch.nn.Linear, 7, 13),
        torch.tanh,
        LayerSpec(torch.nn.LayerNorm, 13),
        LayerSpec(torch.nn.Linear, 13, 3),
    ]
    cut: dict[str, object] = {"num_stages": STAGES}
    if args.stages != "number":
        world = torch.distributed.get_world_size()
        stages = STAGES if args.stages == "topology" else 1
        cut = {"topology": PipeModelDataParallelTopology(stages, 1, world // stages)}
    # Without seeds of their own, layers start with other weights for other stages.
    net = PipelineModule(
        layers,
        loss_fn=torch.nn.functional.mse_loss,
        seed_layers=True,
        seed_fn=torch.manual_seed,
        **cut,
    )
    engine, *_ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())
    if args.save:
        engine.load_checkpoint(args.save)
    sampler = ElasticSampler(data, seed=1)
    engine = elastic(engine, sampler, steps=args.steps)
    batches = RepeatingLoader(DataLoader(data, batch_sampler=sampler.batches()))
    while engine.global_steps < args.steps:
        engine.train_batch(batches)
        if args.save and engine.global_steps == 2:
            engine.save_checkpoint(args.save)


if __name__ == "__main__":
    main()
