"""A plain DeepSpeed training loop; the three lines that make it elastic are those of the README."""

import argparse

import deepspeed
import torch
from torch.utils.data import DataLoader, TensorDataset

from tenplex_megatron.deepspeed import ElasticSampler, elastic

SAVED_STEP = 2
SAMPLES = 50  # no multiple of the batch: passes begin inside of batches


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(7, 13)
        self.norm = torch.nn.LayerNorm(13)
        self.outer = torch.nn.Linear(13, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(torch.tanh(self.norm(self.inner(inputs))))
        return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mode", default="plain", choices=("plain", "twice", "never"))
    parser.add_argument("--save", default="", help="keep a checkpoint here, and start from it")
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args()
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 7), torch.randn(SAMPLES, 3))
    net = Net()
    engine, *_ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())
    if args.save:
        engine.load_checkpoint(args.save)
    sampler = ElasticSampler(data, seed=1)
    if args.mode != "never":
        engine = elastic(engine, sampler, steps=args.steps)
    if args.mode == "twice":
        engine = elastic(engine, sampler, steps=args.steps)
    loader = DataLoader(data, batch_sampler=sampler.batches())
    while engine.global_steps < args.steps:
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            if args.save and engine.global_steps == SAVED_STEP:
                engine.save_checkpoint(args.save)
            if engine.global_steps == args.steps:
                break


if __name__ == "__main__":
    main()
