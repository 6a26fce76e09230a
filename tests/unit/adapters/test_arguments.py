"""What Megatron's flags say, and whether Megatron accepts what is appended to them."""

import json
import os
import re
import subprocess
import sys

import pytest

from tenplex_megatron.adapters.megatron.arguments import REFUSED_FLAGS, MegatronArguments
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError

ARGUMENTS = MegatronArguments()
MODEL = [
    *("--num-layers=8", "--num-attention-heads=16", "--global-batch-size=32"),
    *("--micro-batch-size=2", "--hidden-size=64", "--seq-length=32"),
]
LAYOUTS = tuple(ParallelLayout(tp=tp) for tp in (1, 2, 4, 8))
VOCABULARIES = ((50257, 128), (50257, 101), (101, 8), (256, 64), (32000, 1), (50304, 48))


def appended(text: str, *extra: str) -> list[str]:
    layout = ParallelLayout.parse(text)
    return ARGUMENTS.layout_arguments([*MODEL, *extra], layout, [layout])


def test_both_spellings_say_the_same() -> None:
    apart = [part for flag in MODEL for part in flag.split("=")]
    found = ARGUMENTS.profile(MODEL, is_rough=True)
    assert found == ARGUMENTS.profile(apart, is_rough=True)
    assert (found.num_layers, found.num_heads, found.num_query_groups) == (8, 16, 16)
    assert ARGUMENTS.strategy(MODEL) == ARGUMENTS.strategy(apart)
    assert ARGUMENTS.strategy(MODEL).global_batch_size == 32
    assert ARGUMENTS.strategy(MODEL).micro_batch_size == 2
    assert ARGUMENTS.identity(MODEL) == ARGUMENTS.identity(apart)


def test_every_layout_of_a_known_model_can_be_built() -> None:
    assert ARGUMENTS.usual_layouts(MODEL) is None


def test_the_last_of_equal_flags_counts_as_in_megatron() -> None:
    assert ARGUMENTS.profile([*MODEL, "--num-layers", "4"], is_rough=True).num_layers == 4


@pytest.mark.parametrize(
    ("flags", "groups"),
    [
        ([], 16),
        (["--num-query-groups=4"], 16),
        (["--group-query-attention"], 1),
        (["--group-query-attention", "--num-query-groups=4"], 4),
    ],
)
def test_query_groups_count_only_with_their_switch(flags: list[str], groups: int) -> None:
    assert ARGUMENTS.profile([*MODEL, *flags], is_rough=True).num_query_groups == groups


@pytest.mark.parametrize("number", range(len(MODEL)))
def test_a_missing_size_is_named(number: int) -> None:
    left = MODEL[:number] + MODEL[number + 1 :]
    flag = MODEL[number].split("=")[0]
    read = ARGUMENTS.strategy if "batch" in flag else ARGUMENTS.profile
    with pytest.raises(ConfigError, match=f"^{flag} is missing .* add {flag} N$"):
        read(left)


@pytest.mark.parametrize("value", ["many", "0", "-2"])
def test_a_size_that_is_no_count_is_named(value: str) -> None:
    with pytest.raises(ConfigError, match=rf"--num-layers.*{value}"):
        ARGUMENTS.profile([*MODEL, f"--num-layers={value}"], is_rough=True)


@pytest.mark.parametrize("flag", REFUSED_FLAGS)
def test_a_flag_that_would_fix_the_layout_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}: not possible in a job whose layout changes"):
        ARGUMENTS.strategy([*MODEL, f"{flag}=2"])


@pytest.mark.parametrize(
    "flags",
    [
        ["--tensor-model-parallel-size=2", "--pipeline-model-parallel-size", "2"],
        ["--context-parallel-size=2", "--expert-model-parallel-size=2", "--sequence-parallel"],
        ["--micro-batch-size=1"],
        ["--train-iters=7", "--exit-interval", "3", "--exit-duration-in-mins=5"],
        ["--save", "a", "--save-interval=10", "--load", "a", "--data-cache-path", "c"],
        ["--log-interval", "1", "--tensorboard-dir=x", "--wandb-project", "y"],
        ["--elastic-policy", "p.yaml"],
    ],
)
def test_place_and_duration_do_not_change_what_is_trained(flags: list[str]) -> None:
    same = ARGUMENTS.identity(MODEL)
    assert ARGUMENTS.identity([*MODEL, *flags]) == same
    assert ARGUMENTS.identity([*flags, *MODEL]) == same


@pytest.mark.parametrize(
    "flags",
    [
        ["--num-layers=9"],
        ["--lr=1e-3"],
        ["--swiglu"],
        ["--seed=1"],
        ["--global-batch-size=64"],
        ["--data-path", "0.5", "a", "0.5", "b"],
        ["--lr-decay-iters=3"],
        ["--make-vocab-size-divisible-by=64"],
    ],
)
def test_model_data_and_schedule_change_it(flags: list[str]) -> None:
    assert ARGUMENTS.identity([*MODEL, *flags]) != ARGUMENTS.identity(MODEL)


def test_one_of_several_values_changes_it() -> None:
    with_paths = [[*MODEL, "--data-path", "0.5", "a", "0.5", last] for last in "bc"]
    assert len({ARGUMENTS.identity(flags) for flags in with_paths}) == 2


def divisor(flags: list[str]) -> int:
    (found,) = (flag for flag in flags if flag.startswith("--make-vocab-size-divisible-by="))
    return int(found.partition("=")[2])


@pytest.mark.parametrize("base", [128, 1024, 8, 101])
def test_padding_stays_the_least_that_every_allowed_layout_can_split(base: int) -> None:
    argv = [*MODEL, f"--make-vocab-size-divisible-by={base}"]
    multiples = {
        layout.tp * divisor(ARGUMENTS.layout_arguments(argv, layout, LAYOUTS)) for layout in LAYOUTS
    }
    assert multiples == {base if base % 8 == 0 else base * 8}


def test_a_padded_size_that_a_layout_can_not_split_is_refused() -> None:
    argv = [*MODEL, "--padded-vocab-size=50258"]
    assert ARGUMENTS.layout_arguments(argv, LAYOUTS[1], LAYOUTS[:2])
    with pytest.raises(ConfigError, match="--padded-vocab-size 50258 does not divide by TP4"):
        ARGUMENTS.layout_arguments(argv, LAYOUTS[1], LAYOUTS)


CYCLIC = ("--dataloader-type=cyclic", "--no-data-sharding")


@pytest.mark.parametrize(
    ("layouts", "sizes"),
    [
        (("TP1", "TP2,MBS2"), None),
        (("TP1,MBS4", "TP2,MBS4"), None),
        (("TP1", "TP2,MBS4"), "2, 4"),
        (("TP1,MBS1", "TP2,MBS4"), "1, 4"),
    ],
)
def test_an_order_drawn_by_micro_batch_needs_one_size(
    layouts: tuple[str, ...], sizes: str | None
) -> None:
    allowed = [ParallelLayout.parse(text) for text in layouts]
    for layout in allowed:
        assert ARGUMENTS.layout_arguments(MODEL, layout, allowed)
        if sizes is None:
            assert ARGUMENTS.layout_arguments([*MODEL, *CYCLIC], layout, allowed)
            continue
        with pytest.raises(ConfigError, match=f"cyclic: .* micro-batches of {sizes}; .* MBS"):
            ARGUMENTS.layout_arguments([*MODEL, *CYCLIC], layout, allowed)


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("PP2,STAGES3-5", "--pipeline-model-parallel-layout=Ettt|tttttL"),
        ("PP2,VPP2,STAGES2-6", "--pipeline-model-parallel-layout=Et|ttt|t|tttL"),
        ("PP2,VPP2,STAGES1-2-2-3", "--pipeline-model-parallel-layout=Et|tt|tt|tttL"),
        ("PP2,VPP2", "--num-virtual-stages-per-pipeline-rank=2"),
        ("DP2,EP2", "--expert-model-parallel-size=2"),
        ("TP2,CP2", "--context-parallel-size=2"),
        ("TP2,MBS1", "--micro-batch-size=1"),
    ],
)
def test_every_axis_has_its_flag(text: str, flag: str) -> None:
    assert flag in appended(text)


EXPERTS = (
    "--num-experts=4",
    "--moe-ffn-hidden-size=64",
    "--sequence-parallel",
    "--disable-bias-linear",
)
TRANSFORMER_ENGINE = ("--transformer-impl=transformer_engine",)
ACCEPTED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("TP2,PP2,DP2", ()),
    ("TP8,PP1,DP1", ()),
    ("PP2,VPP2,DP2", ()),
    ("PP2,STAGES3-5", ()),
    ("PP2,VPP2,STAGES2-6", ()),
    ("PP2,VPP2,STAGES1-2-2-3", ()),
    ("TP2,DP4,EP4", EXPERTS),
    ("TP2,CP2,DP2", TRANSFORMER_ENGINE),
    ("TP1,PP2,DP2,MBS4", ()),
)
PROGRAM = """
import json, os, sys
from tenplex_megatron import cpu
cpu.install()
from megatron.core.tokenizers.utils import build_tokenizer
from megatron.training import arguments, vocab_utils

cases, vocabularies = json.loads(sys.stdin.read())
# Parsing ends with tokenizers and loggers, which belong to a training run.
arguments.set_global_variables = lambda args: None
answers = []
for world_size, argv in cases:
    os.environ["WORLD_SIZE"] = str(world_size)
    sys.argv = ["script", *argv]
    args = arguments.parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = arguments.core_transformer_config_from_args(args)
    answers.append({
        "tp": args.tensor_model_parallel_size,
        "pp": args.pipeline_model_parallel_size,
        "dp": args.data_parallel_size,
        "cp": args.context_parallel_size,
        "ep": args.expert_model_parallel_size,
        "vpp": args.virtual_pipeline_model_parallel_size or 1,
        "mbs": args.micro_batch_size,
        "stages": getattr(config.pipeline_model_parallel_layout, "layout", None) and [
            [sum(part.name == "decoder" for part in chunk) for chunk in stage]
            for stage in config.pipeline_model_parallel_layout.layout
        ],
    })
padded = []
for size, divisor, tp in vocabularies:
    args.make_vocab_size_divisible_by, args.tensor_model_parallel_size = divisor, tp
    padded.append([
        build_tokenizer.vocab_size_with_padding(size, args),
        vocab_utils.calculate_padded_vocab_size(size, divisor, tp, logging_enabled=False),
    ])
sys.stderr.write("ANSWER " + json.dumps([answers, padded]) + "\\n")
"""


@pytest.fixture(scope="module")
def megatron() -> tuple[list[dict[str, object]], list[list[int]]]:
    """Megatron's own answers to every layout of `ACCEPTED` and every vocabulary, in one process."""
    cases = []
    for text, extra in ACCEPTED:
        layout = ParallelLayout.parse(text)
        argv = [*MODEL, "--max-position-embeddings=32", "--vocab-size=256", "--train-iters=1"]
        argv += ["--lr=1e-3", "--position-embedding-type=rope", "--attention-dropout=0"]
        flags = [*ARGUMENTS.device_arguments("cpu"), *appended(text)]
        cases.append((layout.world_size, [*argv, *flags, *extra]))
    vocabularies = [
        (size, divisor(ARGUMENTS.layout_arguments(argv, layout, LAYOUTS)), layout.tp)
        for size, base in VOCABULARIES
        for argv in [[*MODEL, f"--make-vocab-size-divisible-by={base}"]]
        for layout in LAYOUTS
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        input=json.dumps([cases, vocabularies]),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=os.environ | {"TENPLEX_CPU": "force", "RANK": "0"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"^ANSWER (.*)$", done.stderr, re.MULTILINE)
    assert found is not None
    answers, padded = json.loads(found[1])
    return answers, padded


def test_megatron_accepts_every_kind_of_layout_and_understands_it(
    megatron: tuple[list[dict[str, object]], list[list[int]]],
) -> None:
    for (text, _), answer in zip(ACCEPTED, megatron[0], strict=True):
        layout = ParallelLayout.parse(text)
        stages = layout.stage_layers
        if stages is not None and len(stages) == layout.pp:
            stages = tuple(count // layout.vpp for count in stages) * layout.vpp
        assert answer == {
            "tp": layout.tp,
            "pp": layout.pp,
            "dp": layout.dp,
            "cp": layout.cp,
            "ep": layout.ep,
            "vpp": layout.vpp,
            "mbs": layout.micro_batch_size or 2,
            # Megatron lists the chunks of each rank; the layers are named in model order.
            "stages": stages and [list(stages[rank :: layout.pp]) for rank in range(layout.pp)],
        }, text


def test_megatron_pads_a_vocabulary_to_one_size_under_every_tensor_size(
    megatron: tuple[list[dict[str, object]], list[list[int]]],
) -> None:
    rows = iter(megatron[1])
    for size, base in VOCABULARIES:
        found = {padded for _ in LAYOUTS for padded in next(rows)}
        assert len(found) == 1, (size, base)
        (padded,) = found
        assert padded >= size
        assert padded % base == 0
        # Never more than a layout of TP8 alone would take.
        assert padded <= -(-size // (base * 8)) * base * 8


def test_a_zero_stage_in_a_layout_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"ZERO3: ZERO is for DeepSpeed; .*-distributed-optimizer"
    ):
        appended("DP2,ZERO3")


def test_flags_of_a_deepspeed_script_are_told_from_megatrons() -> None:
    with pytest.raises(ConfigError, match="has to say: framework: deepspeed"):
        MegatronArguments().strategy(["--deepspeed_config", "ds.json"])
