"""Every strategy of a small world, and what a search of it must find."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.cuts import balanced_cuts
from tenplex_megatron.planner.frontier import Frontier
from tenplex_megatron.planner.memory.predict import predict_memories
from tenplex_megatron.planner.profile import LatentAttention, ModelProfile
from tenplex_megatron.planner.space import Scope, layouts
from tenplex_megatron.planner.strategy import Recompute, Strategy
from tenplex_megatron.planner.timing.candidates import Candidates
from tenplex_megatron.planner.timing.predict import predict_times

__all__ = [
    "GPT",
    "MODELS",
    "every_cut",
    "every_strategy",
    "missed",
    "predicted",
    "random_world",
]

type Floats = NDArray[np.float64]


GPT = ModelProfile(
    num_layers=6,
    hidden_size=1024,
    num_heads=8,
    num_query_groups=4,
    head_size=128,
    ffn_size=4096,
    seq_length=2048,
    vocab_size=32000,
)
MIXTURE = replace(
    GPT, num_experts=4, experts_per_token=2, expert_ffn_size=1024, has_bias=False, is_gated=True
)
MODELS = {
    "tied": GPT,
    "large vocabulary": replace(GPT, vocab_size=256000, is_tied=False),
    "odd sizes": replace(
        GPT, hidden_size=72, num_heads=6, num_query_groups=3, head_size=12, ffn_size=290,
        vocab_size=1001,
    ),
    "wide": replace(GPT, num_layers=5, hidden_size=8192, num_heads=64, num_query_groups=64,
                    ffn_size=32768),
    "experts": MIXTURE,
    "leading layers": replace(MIXTURE, num_dense_layers=2, shared_expert_ffn_size=512),
    "latent": replace(
        GPT,
        latent=LatentAttention(
            query_rank=96, key_value_rank=64, rope_head_size=32, value_head_size=64
        ),
    ),
}  # fmt: skip
"""Small models that differ in what stages cost."""


def random_world(seed: int) -> tuple[ModelProfile, ClusterProfile, Scope, dict[str, Any]]:
    """A model, a cluster, what is worth a try, and the arguments of a search."""
    draw = np.random.default_rng(seed)
    model = replace(list(MODELS.values())[seed % len(MODELS)], num_layers=int(draw.integers(2, 8)))
    cluster = ClusterProfile(
        name="random",
        peak_flops=312e12,
        memory_bandwidth=2e12,
        node_bandwidth=300e9,
        devices_per_node=int(draw.choice([2, 8])),
        memory_bytes=float(10 ** draw.uniform(8.5, 11)),
        network_bandwidth=float(10 ** draw.uniform(8, 10.5)),
        launch_backward_s=float(draw.choice([0.0, 1.6e-3])),
        overlap=float(draw.choice([0.0, 0.7, 1.0])),
    )
    kinds: list[tuple[Recompute, ...]] = [
        ("none", "full"),
        ("none", "selective", "full"),
        ("full",),
        ("none",),
    ]
    scope = Scope(
        recompute=kinds[int(draw.integers(len(kinds)))],
        zero_stages=(0, 1, 2, 3) if draw.random() < 0.3 else (0, 1),
        some_layers=draw.random() < 0.8,
        uneven_stages=draw.random() < 0.8,
        is_flash=draw.random() < 0.6,
        fewer_replicas=draw.random() < 0.3,
        overlaps_gradients=draw.random() < 0.7,
        precision="fp16" if draw.random() < 0.3 else "bf16",
        max_virtual_stages=int(draw.choice([1, 4])),
    )
    arguments = {
        "devices": int(draw.integers(2, 6)),
        "devices_per_node": cluster.devices_per_node,
        "global_batch_size": int(draw.choice([1, 2, 6, 24, 96])),
        "micro_batch_sizes": (1, 2),
    }
    return model, cluster, scope, arguments


def every_strategy(
    model: ModelProfile, scope: Scope, arguments: Mapping[str, Any]
) -> Iterator[Strategy]:
    """Every layout with every cut that the search knows and every number of layers to recompute.

    `arguments` are those of `layouts`.
    """
    found = layouts(model, scope=scope, **arguments)
    for strategy in map(found.strategy, range(len(found))):
        pp, vpp = strategy.layout.pp, strategy.layout.vpp
        for cut in every_cut(model, pp, vpp, uneven=scope.uneven_stages):
            one = replace(strategy, layout=replace(strategy.layout, stage_layers=cut))
            for recompute in scope.recompute:
                # Fused attention keeps no scores that could be computed again.
                if recompute != "selective" or not scope.is_flash:
                    yield replace(one, recompute=recompute)
            if "full" in scope.recompute and scope.some_layers:
                for layers in range(1, max(cut or (model.num_layers // (pp * vpp),))):
                    yield replace(one, recompute="full", recompute_layers=layers)


def every_cut(
    model: ModelProfile, pp: int, vpp: int, *, uneven: bool
) -> set[tuple[int, ...] | None]:
    """Balanced cuts, and without interleaving all that give middle stages a layer at least."""
    layers = model.num_layers
    cuts = {cut for _, _, cut in balanced_cuts(layers, pp, vpp, uneven=uneven)}
    if not uneven or pp == 1 or vpp > 1:
        return cuts
    leading = model.num_dense_layers if model.num_experts else 0
    for first in range(leading, layers + 1):
        for middle in itertools.product(range(1, layers + 1), repeat=pp - 2):
            last = layers - first - sum(middle)
            if last >= 0:
                cuts.add((first, *middle, last))
    return cuts


def predicted(
    model: ModelProfile, cluster: ClusterProfile, strategies: Sequence[Strategy]
) -> tuple[Floats, Floats]:
    """Memory and time of strategies, all their stages looked at."""
    memory = predict_memories(model, cluster, strategies).required_bytes
    return memory, np.asarray(predict_times(cluster, Candidates.of(model, strategies)).step_s)


def missed(best: Frontier, found: Frontier, tolerance: float = 1e-9) -> int:
    """Under how many memory limits `best` has a better time than `found`."""
    count = 0
    for memory, time in zip(best.memory, best.time, strict=True):
        place = found.fastest_within(memory * (1 + tolerance))
        count += place is None or bool(found.time[place] > time * (1 + tolerance))
    return count
