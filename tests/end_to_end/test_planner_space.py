"""Megatron itself judges what the planner's rules allow and what they refuse.

One process builds rank 0 of every sampled world: arguments, configuration, process groups that do
nothing, its first model chunk, and the pipeline schedule up to the end of the first forward pass.
"""

import contextlib
import io
import logging
import math
import multiprocessing
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import pytest

from tenplex_megatron.adapters.megatron.arguments import CPU_FLAGS, MegatronArguments
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import LayoutError
from tenplex_megatron.planner.profile import LatentAttention, ModelProfile
from tenplex_megatron.planner.space import EVERYTHING, broken_rules, strategies
from tenplex_megatron.planner.strategy import Strategy

ARGUMENTS = MegatronArguments()
BATCH = 24
NUM_LEGAL = 36
"""Of every model."""
NUM_DRAWS = 15_000
NUMBERS = ("none", "one", "several")
NUM_BORDER = {"none": 90, "several": 40}
NUM_OF_EVERY_RULE = 6
TIMEOUT_S = 240
COMMON = (
    *("--max-position-embeddings=48", "--vocab-size=90", "--make-vocab-size-divisible-by=8"),
    *("--train-iters=1", "--lr=1e-3", "--seq-length=48", "--hidden-size=48"),
    *("--tokenizer-type=NullTokenizer", "--mock-data"),
)
MODELS = {
    "dense": ("--num-layers=6", "--num-attention-heads=12", "--ffn-hidden-size=54"),
    "grouped": (
        *("--num-layers=4", "--num-attention-heads=12", "--group-query-attention"),
        *(
            "--num-query-groups=3",
            "--swiglu",
            "--ffn-hidden-size=72",
            "--kv-channels=6",
            "--normalization=RMSNorm",
        ),
        *("--disable-bias-linear", "--untie-embeddings-and-output-weights"),
        *("--position-embedding-type=rope", "--padded-vocab-size=104", "--attention-dropout=0"),
    ),
    "one group": (
        *("--num-layers=5", "--num-attention-heads=6", "--group-query-attention"),
        *("--kv-channels=4", "--ffn-hidden-size=36", "--use-rotary-position-embeddings"),
    ),
    "odd head": (
        *("--num-layers=2", "--num-attention-heads=4", "--group-query-attention"),
        *("--kv-channels=5", "--ffn-hidden-size=36", "--hidden-dropout=0"),
    ),
    "experts": (
        *("--num-layers=6", "--num-attention-heads=8", "--num-experts=6", "--swiglu"),
        *("--moe-ffn-hidden-size=24", "--disable-bias-linear"),
        "--moe-shared-expert-intermediate-size=36",
    ),
    "late experts": (
        *("--num-layers=4", "--num-attention-heads=4", "--num-experts=4", "--ffn-hidden-size=20"),
        *("--moe-layer-freq=([0]*1+[1]*3)", "--moe-ffn-hidden-size=22", "--moe-router-topk=3"),
        "--disable-bias-linear",
    ),
    # Without Transformer Engine the ranks below are split too; with it they need not divide.
    "latent": (
        *("--num-layers=4", "--num-attention-heads=3", "--multi-latent-attention", "--swiglu"),
        *("--q-lora-rank=12", "--kv-lora-rank=22", "--qk-head-dim=5", "--v-head-dim=7"),
        *("--qk-pos-emb-head-dim=2", "--position-embedding-type=rope", "--rope-type=rope"),
        *("--disable-bias-linear", "--ffn-hidden-size=60"),
    ),
    "biased experts": ("--num-layers=2", "--num-attention-heads=4", "--num-experts=4"),
}

CHOICES: dict[str, tuple[Any, ...]] = {
    "sequence_parallel": (False, True),
    "recompute": ("none", "selective", "full"),
    "recompute_layers": (None, 1, 2),
    "loss_fusion": ("none", "native", "te"),
    "precision": ("fp32", "fp16", "bf16"),
    "is_flash": (False, True),
    "overlaps_gradients": (False, True),
    "overlaps_tensor_parallel": (False, True),
}
LARGEST = {
    "tp": 12, "dp": 12, "ep": 12, "pp": 6, "cp": 5, "micro_batch_size": 5, "vpp": 3,
    "stage_layers": 3,
}  # fmt: skip
SIZES = (1, 2, 3, 4, 5, 6, 8, 12)


@dataclass(frozen=True)
class Case:
    """A model, and a strategy to train it with."""

    model: str
    strategy: Strategy

    @property
    def rules(self) -> list[str]:
        return broken_rules(profile(self.model), self.strategy)


@dataclass(frozen=True)
class Verdict:
    """Why Megatron refuses a case, or what it understood of it."""

    refusal: str | None = None
    strategy: Strategy | None = None
    profile: ModelProfile | None = None


@cache
def profile(model: str) -> ModelProfile:
    return ARGUMENTS.profile([*COMMON, *MODELS[model]])


@cache
def legal_cases() -> list[Case]:
    """A seeded sample of all that runs on up to 23 devices in nodes of 8."""
    draw = random.Random(7)
    cases = []
    for model in MODELS:
        found = strategies(
            profile(model),
            devices=23,
            devices_per_node=8,
            global_batch_size=BATCH,
            micro_batch_sizes=(1, 2, 3),
            scope=replace(EVERYTHING, zero_stages=(0, 1, 2, 3)),
        )
        # Small worlds outnumber no others: every number of devices is drawn as often.
        by_size: dict[int, list[Strategy]] = {}
        for one in found:
            by_size.setdefault(one.layout.world_size, []).append(one)
        sizes = sorted(by_size)
        cases += [
            Case(model, draw.choice(by_size[sizes[index % len(sizes)]]))
            for index in range(NUM_LEGAL)
        ]
    return cases


def border_cases(legal: Sequence[Case]) -> list[Case]:
    """Strategies one or two changes away from legal ones: a few of each kind."""
    draw = random.Random(11)
    kinds: dict[str, dict[Case, None]] = {}
    for _ in range(NUM_DRAWS):
        case = draw.choice(legal)
        with contextlib.suppress(LayoutError):
            for _ in range(draw.randint(1, 2)):
                case = Case(case.model, changed(case.strategy, draw))
            if has_layers_first(case):
                known = kinds.setdefault(kind(case), {})
                if len(known) < NUM_BORDER.get(kind(case), NUM_OF_EVERY_RULE):
                    known[case] = None
    return [case for known in kinds.values() for case in known]


def kind(case: Case) -> str:
    """The one rule that a case breaks, without its numbers; or none, or several."""
    rules = case.rules
    return re.sub(r"\(.*?\)|\d+", "#", rules[0]) if len(rules) == 1 else NUMBERS[min(len(rules), 2)]


def has_layers_first(case: Case) -> bool:
    """Whether the first rank, the only one that is built, meets the rules of every layer."""
    model, layout = profile(case.model), case.strategy.layout
    stages = layout.stage_layers
    parts = layout.pp * layout.vpp
    if stages is None:
        first = model.num_layers // parts
    else:
        first = stages[0] if len(stages) == parts else stages[0] // layout.vpp
    return first > model.num_dense_layers


def changed(strategy: Strategy, draw: random.Random) -> Strategy:
    axis = draw.choice([*LARGEST, *CHOICES])
    if axis in CHOICES:
        return replace(strategy, **{axis: draw.choice(CHOICES[axis])})
    layout = strategy.layout
    if axis == "stage_layers":
        cut = tuple(draw.randint(0, LARGEST[axis]) for _ in range(layout.pp * layout.vpp))
        return replace(strategy, layout=replace(layout, stage_layers=draw.choice([None, cut])))
    size = draw.choice([size for size in SIZES if size <= LARGEST[axis]])
    stage_layers = None if axis in {"pp", "vpp"} else layout.stage_layers
    sizes = {axis: size, "stage_layers": stage_layers}
    changed = replace(strategy, layout=replace(layout, **sizes))
    # With experts no tensor parallelism is legal without the other.
    return replace(changed, sequence_parallel=size > 1) if axis == "tp" else changed


@pytest.fixture(scope="module")
def judged() -> dict[Case, Verdict]:
    legal = legal_cases()
    cases = list(dict.fromkeys([*legal, *border_cases(legal)]))
    context = multiprocessing.get_context("forkserver")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=judge, args=(cases, sending))
    process.start()
    sending.close()
    try:
        assert receiving.poll(TIMEOUT_S), f"no verdicts within {TIMEOUT_S} s"
        verdicts = receiving.recv()
    finally:
        process.kill()
        process.join()
    return dict(zip(cases, verdicts, strict=True))


def test_megatron_runs_what_the_planner_proposes(judged: dict[Case, Verdict]) -> None:
    legal = legal_cases()
    assert len(set(legal)) > 220
    refused = {case: judged[case].refusal for case in legal if judged[case].refusal}
    assert refused == {}


def test_megatron_refuses_what_breaks_a_rule_and_nothing_else(
    judged: dict[Case, Verdict],
) -> None:
    broken = {case for case in judged if case.rules}
    too_strict = {case: case.rules for case in broken if not judged[case].refusal}
    assert too_strict == {}
    too_lax = {c: v.refusal for c, v in judged.items() if v.refusal and c not in broken}
    assert too_lax == {}


RULES = """
# attention heads do not divide by TP#
# query groups are neither a multiple nor a divisor of TP#
# rows of queries, keys and values do not divide by TP#
# hidden channels of the MLP do not divide by TP#
# hidden channels of the experts do not divide by TP#
# hidden channels of the shared expert do not divide by TP#
# rows of the vocabulary do not divide by TP#
sequences of # do not divide into # x CP# pieces
# tokens of a sequence do not divide by TP#
sequence parallelism needs more than TP#
VPP# needs more than one pipeline stage
# layers do not divide into # pipeline parts
stages of # layers do not make # layers
global batch # does not divide by micro batch # x DP#
# micro batches do not divide by PP#, as VPP# needs
EP# needs a model with experts
# experts do not divide by EP#
experts with biases do not run with TP#
experts with TP# need sequence parallelism
a number of layers to recompute needs full recomputation, not none
a number of layers to recompute needs full recomputation, not selective
the fused loss of Transformer Engine is switched off in Megatron; native is not
collectives of TP# hide behind products only with sequence parallelism
"""


def test_every_rule_alone_makes_megatron_refuse(judged: dict[Case, Verdict]) -> None:
    alone = {kind(case) for case in judged if judged[case].refusal}
    assert alone - {*NUMBERS} == set(RULES.strip().splitlines())


def test_megatron_understands_the_strategy_as_it_was_meant(judged: dict[Case, Verdict]) -> None:
    for case, verdict in judged.items():
        if verdict.refusal is None:
            assert verdict.strategy == without_defaults(case.strategy), case


def test_the_profile_is_what_megatron_would_build(judged: dict[Case, Verdict]) -> None:
    seen = set()
    for case, verdict in judged.items():
        if verdict.refusal is None:
            assert verdict.profile == profile(case.model), case
            seen.add(case.model)
    assert seen == set(MODELS)


def without_defaults(strategy: Strategy) -> Strategy:
    """The strategy with every stage spelled out, as Megatron's configuration has them."""
    layout = strategy.layout
    stages = layout.stage_layers
    if stages is not None and len(stages) == layout.pp:
        stages = tuple(count // layout.vpp for count in stages) * layout.vpp
    return replace(strategy, layout=replace(layout, stage_layers=stages))


def judge(cases: Sequence[Case], answer: Connection) -> None:
    """Body of the process that is rank 0 of one world after the other."""
    os.environ.update(TENPLEX_CPU="force", RANK="0", LOCAL_RANK="0")
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = prepare_megatron()
        answer.send([verdict(case, run) for case in cases])


def verdict(case: Case, run: Callable[[Case], tuple[Any, Any]]) -> Verdict:
    try:
        args, config = run(case)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any of them is a refusal
        return Verdict(refusal=f"{type(error).__name__}: {error}")
    understood = understood_strategy(args, config)
    if understood.sequence_parallel != case.strategy.sequence_parallel:
        return Verdict(refusal="sequence parallelism is turned off without a word")
    elif understood.overlaps_tensor_parallel != case.strategy.overlaps_tensor_parallel:
        return Verdict(refusal="overlapping is turned off without a word")
    elif understood.recompute_layers != case.strategy.recompute_layers:
        return Verdict(refusal="the number of layers to recompute is left out")
    return Verdict(None, understood, understood_profile(args, config))


def prepare_megatron() -> Callable[[Case], tuple[Any, Any]]:
    """Stand in for CUDA, for a world, and for what Transformer Engine would do."""
    import argparse

    import torch
    from torch import distributed

    from tenplex_megatron import cpu

    cpu.install()
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.training import arguments

    torch.set_num_threads(1)
    c10d: Any = distributed.distributed_c10d
    original = c10d.new_group
    for module in (c10d, distributed):
        # Groups are asked for with gloo or nccl; members of one that never was can't connect.
        vars(module)["new_group"] = lambda ranks=None, *_, **__: original(ranks, backend="fake")
    # Building Megatron's parser takes longer than all else.
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    arguments.add_megatron_arguments = lambda _: parser

    class Values(torch.nn.Module):
        """Attention that any context parallelism can run: local attention knows none."""

        def __init__(self, v_channels: int | None = None, **_: object) -> None:
            super().__init__()
            self.channels = v_channels

        def forward(self, query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            wide = query.new_zeros(*query.shape[:-1], self.channels or query.shape[-1])
            return wide.flatten(2)

    backends.LocalSpecProvider.core_attention = lambda _: Values
    # So is its norm without sequence parallelism.
    backends.LocalSpecProvider.layer_norm = lambda *_, **__: IdentityOp
    gpt_layer_specs.LNImpl = IdentityOp
    # Tokens can't go to experts of ranks that never were.
    MoELayer.route = reached
    return run_first_rank


class ReachedError(Exception):
    """The first forward pass came as far as one rank alone can."""


def reached(*_: object, **__: object) -> NoReturn:
    raise ReachedError


def run_first_rank(case: Case) -> tuple[Any, Any]:
    """What the first rank does until it needs another one; its arguments and configuration."""
    from megatron.training import arguments

    layout, zero = case.strategy.layout, case.strategy.zero_stage
    os.environ["WORLD_SIZE"] = str(layout.world_size)
    # Each of the two ways to shard asks for its own setting.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if zero > 1 else "1"
    # A model leaves the kind of its attention in the environment, and the next may differ.
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]
    chosen = ARGUMENTS.strategy_arguments(case.strategy)
    local = [flag for flag in CPU_FLAGS if not flag.startswith("--attention-backend")]
    sys.argv = ["script", *COMMON, *MODELS[case.model], *local, *chosen]
    args = arguments.parse_args()
    arguments.validate_args(args, {})
    config = arguments.core_transformer_config_from_args(args)
    with first_rank(args):
        run_schedule(args, config)
    return args, config


@contextlib.contextmanager
def first_rank(args: Any) -> Iterator[None]:  # noqa: ANN401 - Megatron's arguments have no type
    from megatron.core import num_microbatches_calculator, parallel_state, tensor_parallel
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world_size)
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        num_microbatches_calculator.init_num_microbatches_calculator(
            0,
            global_batch_size=args.global_batch_size,
            micro_batch_size=args.micro_batch_size,
            data_parallel_size=args.data_parallel_size,
        )
        yield
    finally:
        num_microbatches_calculator.destroy_num_microbatches_calculator()
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


def run_schedule(args: Any, config: Any) -> None:  # noqa: ANN401 - likewise
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.pipeline_parallel import get_forward_backward_func

    num_chunks = args.virtual_pipeline_model_parallel_size
    chunk = None if num_chunks is None else 0
    chunks = [
        GPTModel(
            config,
            get_gpt_decoder_block_spec(
                config, False, normalization=args.normalization, vp_stage=chunk
            ),
            padded_rows(args),
            args.max_position_embeddings,
            post_process=args.pipeline_model_parallel_size == 1,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            vp_stage=chunk,
        ).to(config.params_dtype)
    ] * (num_chunks or 1)

    def forward(_: object, model: torch.nn.Module) -> NoReturn:
        shape = args.micro_batch_size, args.seq_length // args.context_parallel_size
        tokens = torch.zeros(shape, dtype=torch.int64)
        model(tokens, tokens, None)
        raise ReachedError

    with contextlib.suppress(ReachedError):
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[None] * len(chunks),
            model=chunks,
            num_microbatches=get_num_microbatches(),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
        )


def padded_rows(args: Any) -> int:  # noqa: ANN401 - likewise
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding

    return args.padded_vocab_size or vocab_size_with_padding(args.vocab_size, args)


def understood_strategy(args: Any, config: Any) -> Strategy:  # noqa: ANN401 - likewise
    cut = config.pipeline_model_parallel_layout
    vpp = args.virtual_pipeline_model_parallel_size or 1
    stages = None
    if cut is not None:
        stages = tuple(
            sum(part.name == "decoder" for part in cut.layout[pp][chunk])
            for chunk in range(vpp)
            for pp in range(args.pipeline_model_parallel_size)
        )
    zero = 1 if args.use_distributed_optimizer else 0
    if args.use_megatron_fsdp:
        zero = {"optim_grads": 2, "optim_grads_params": 3}[args.data_parallel_sharding_strategy]
    assert args.overlap_param_gather == bool(zero and args.overlap_grad_reduce)
    return Strategy(
        layout=ParallelLayout(
            tp=config.tensor_model_parallel_size,
            pp=config.pipeline_model_parallel_size,
            dp=args.data_parallel_size,
            vpp=vpp,
            cp=config.context_parallel_size,
            ep=config.expert_model_parallel_size,
            micro_batch_size=args.micro_batch_size,
            stage_layers=stages,
        ),
        global_batch_size=args.global_batch_size,
        sequence_parallel=config.sequence_parallel,
        zero_stage=zero,
        recompute=config.recompute_granularity or "none",
        recompute_layers=config.recompute_num_layers
        if config.recompute_method == "block"
        else None,
        precision="bf16" if config.bf16 else "fp16" if config.fp16 else "fp32",
        is_flash=args.attention_backend.name == "auto",
        loss_fusion=config.cross_entropy_fusion_impl
        if config.cross_entropy_loss_fusion
        else "none",
        overlaps_gradients=args.overlap_grad_reduce,
        overlaps_tensor_parallel=config.tp_comm_overlap,
    )


def understood_profile(args: Any, config: Any) -> ModelProfile:  # noqa: ANN401 - likewise
    experts = config.num_moe_experts or 0
    frequency = config.moe_layer_freq
    latent = args.multi_latent_attention and LatentAttention(
        query_rank=config.q_lora_rank,
        key_value_rank=config.kv_lora_rank,
        rope_head_size=config.qk_pos_emb_head_dim,
        value_head_size=config.v_head_dim,
    )
    rows = args.padded_vocab_size
    if rows is None:
        divisor = args.make_vocab_size_divisible_by
        rows = math.ceil(args.vocab_size / divisor) * divisor
    return ModelProfile(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        head_size=config.qk_head_dim if latent else config.kv_channels,
        ffn_size=config.ffn_hidden_size,
        seq_length=args.seq_length,
        vocab_size=rows,
        pads_vocab=args.padded_vocab_size is None,
        is_gated=config.gated_linear_unit,
        has_bias=config.add_bias_linear,
        has_learned_positions=args.position_embedding_type == "learned_absolute",
        is_tied=not args.untie_embeddings_and_output_weights,
        has_rms_norm=config.normalization == "RMSNorm",
        dropout=max(config.attention_dropout, config.hidden_dropout) > 0,
        num_experts=experts,
        experts_per_token=config.moe_router_topk if experts else 1,
        expert_ffn_size=config.moe_ffn_hidden_size if experts else 0,
        shared_expert_ffn_size=config.moe_shared_expert_intermediate_size or 0,
        num_dense_layers=frequency.count(0) if isinstance(frequency, list) else 0,
        latent=latent or None,
    )
