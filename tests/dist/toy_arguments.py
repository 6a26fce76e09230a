"""The toy script's command line, and an agent for it."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace

from tenplex_megatron.adapters.arguments import ArgumentAdapter
from tenplex_megatron.cli.run import parse_options
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.elastic.launch import run_node
from tenplex_megatron.errors import ConfigError, StoreError, TenplexError
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.strategy import Strategy


class ToyArguments(ArgumentAdapter):
    preload = (
        "torch",
        "torch.distributed",
        "tenplex_megatron.elastic.control",
        "tenplex_megatron.elastic.events",
        "tenplex_megatron.store.shared",
    )

    def profile(self, argv: Sequence[str], *, is_rough: bool = False) -> ModelProfile:
        return ModelProfile(
            num_layers=8,
            hidden_size=64,
            num_heads=8,
            num_query_groups=8,
            head_size=8,
            ffn_size=256,
            seq_length=32,
            vocab_size=256,
        )

    def strategy(self, argv: Sequence[str]) -> Strategy:
        return Strategy(
            layout=ParallelLayout(micro_batch_size=1), global_batch_size=840, precision="fp32"
        )

    def layout_arguments(
        self, argv: Sequence[str], layout: ParallelLayout, allowed: Sequence[ParallelLayout]
    ) -> list[str]:
        return ["--layout", str(layout)]

    def device_arguments(self, device: str) -> list[str]:
        return []

    def identity(self, argv: Sequence[str]) -> str:
        return "toy"


def run_toy(arguments: Sequence[str]) -> int:
    logging.basicConfig(format="%(asctime)s %(levelname).1s tenplex: %(message)s")
    logging.getLogger("tenplex_megatron").setLevel(logging.INFO)
    options, torchrun = parse_options(arguments)
    try:
        toy = ToyArguments()
        if "touch_cuda" in torchrun.training_script_args:
            toy.preload = (*toy.preload, "toy_touches_cuda")
        return run_node(replace(options, session=None), torchrun, lambda _: toy)
    except (ConfigError, StoreError) as error:
        sys.stderr.write(f"tenplex run: {error}\n")
        return 2
    except TenplexError as error:
        sys.stderr.write(f"tenplex run: {error}\n")
        return 1
