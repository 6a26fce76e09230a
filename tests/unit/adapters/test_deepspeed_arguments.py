"""What a DeepSpeed configuration says, and what it says for another layout."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
from deepspeed.runtime.zero.config import get_zero_config

from tenplex_megatron.adapters.deepspeed.arguments import DeepSpeedArguments
from tenplex_megatron.adapters.deepspeed.config import for_layout, read_config
from tenplex_megatron.config import load_policy
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.elastic.planning import rules_of
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.allowed import allowed_layouts, allowed_strategies
from tenplex_megatron.planner.strategy import Strategy
from tenplex_megatron.run import main as run
from tenplex_megatron.run import run_arguments

ARGUMENTS = DeepSpeedArguments()
CONFIG: dict[str, Any] = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "bf16": {"enabled": True},
    "tensor_parallel": {"partition_config": {}},
}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in CONFIG.items() if name != key}


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    return ["--lr", "0.1", "--deepspeed_config", str(path)]


def layout(text: str) -> ParallelLayout:
    return ParallelLayout.parse(text)


@pytest.mark.parametrize(
    ("text", "accumulation"),
    [("DP1", 12), ("DP3", 4), ("DP4", 3), ("DP12", 1), ("DP3,MBS4", 2), ("PP2,DP2,ZERO1", 6)],
)
def test_the_global_batch_is_the_same_in_every_layout(text: str, accumulation: int) -> None:
    chosen = layout(text)
    found = for_layout(CONFIG, chosen)
    micro = found["train_micro_batch_size_per_gpu"]
    assert found["gradient_accumulation_steps"] == accumulation
    assert micro * accumulation * chosen.dp == found["train_batch_size"] == 24


TRAINER = "tenplex_megatron.adapters.huggingface.callback"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--deepspeed", "ds.json"], True),
        (["--lr=1", "--deepspeed=ds.json"], True),
        (["--deepspeed", "--deepspeed_config", "ds.json"], False),
        (["--deepspeed_config=ds.json", "--deepspeed"], False),
    ],
)
def test_a_script_with_the_flag_of_the_trainer_finds_it_imported(
    words: list[str], expected: bool
) -> None:
    modules = ARGUMENTS.modules(words)
    assert (TRAINER in modules) == expected
    assert modules[: len(ARGUMENTS.preload)] == ARGUMENTS.preload


def test_a_layout_may_say_the_stage() -> None:
    assert for_layout(CONFIG, layout("DP2"))["zero_optimization"]["stage"] == 2
    found = for_layout(CONFIG, layout("DP2,ZERO3"))["zero_optimization"]
    assert found == {"stage": 3, "overlap_comm": True}
    assert CONFIG["zero_optimization"]["stage"] == 2


def test_tensor_parallelism_is_switched_on_and_off() -> None:
    assert "tensor_parallel" not in for_layout(CONFIG, layout("DP2"))
    found = for_layout(CONFIG, layout("TP2,DP3"))
    assert found["tensor_parallel"] == {"partition_config": {}, "autotp_size": 2}
    # DeepSpeed itself would multiply by TP as well.
    assert "train_batch_size" not in found
    assert found["gradient_accumulation_steps"] == 4


@pytest.mark.parametrize(
    ("config", "text", "said"),
    [
        (
            CONFIG,
            "DP5",
            "24 does not divide by .* 2 x DP5; it does by DP1, DP2, DP3, DP4, DP6, DP1",
        ),
        (CONFIG, "DP24", "does not divide"),
        (
            {**CONFIG, "train_batch_size": 7},
            "DP1",
            "7 does not .* 2 x DP1; expected a multiple of 2",
        ),
        (without("train_batch_size"), "DP1", "train_batch_size: expected a count, got None; the"),
        ({**CONFIG, "train_batch_size": "auto"}, "DP1", "expected a count, got 'auto'"),
        (without("tensor_parallel"), "TP2", "no 'tensor_parallel' block that says how TP splits"),
        (CONFIG, "PP2", "pipelines run with ZeRO 0 or 1, got stage 2"),
        ({**CONFIG, "tensor_parallel": None}, "TP2", "no 'tensor_parallel' block that says how"),
        (
            {**CONFIG, "tensor_parallel": 2},
            "TP2",
            "tensor_parallel: expected keys and values, got 2",
        ),
        (CONFIG, "CP2", "DeepSpeed has no CP"),
        (CONFIG, "PP2,VPP2,ZERO1", "DeepSpeed has no VPP"),
        (CONFIG, "TP2,PP2,ZERO1", "trains no TP with PP; expected one of the two"),
        (CONFIG, "PP2,STAGES3-5,ZERO1", "the script cuts the stages .* leave STAGES out"),
        (CONFIG, "DP2,EP2", r"the model decides EP \(ep_size of its MoE layers\); leave it out"),
    ],
)
def test_what_can_not_be_built_is_one_sentence(
    config: dict[str, Any], text: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        for_layout(config, layout(text))


def test_the_flags_describe_the_strategy(flags: list[str]) -> None:
    found = ARGUMENTS.strategy(flags)
    assert (found.global_batch_size, found.micro_batch_size, found.zero_stage) == (24, 2, 2)
    assert (found.precision, found.overlaps_gradients) == ("bf16", True)
    assert ARGUMENTS.profile(flags) is None
    assert ARGUMENTS.layout_arguments(flags, layout("DP3"), [layout("TP2")]) == []
    with pytest.raises(ConfigError, match="ZeRO 0 or 1"):
        ARGUMENTS.layout_arguments(flags, layout("DP3"), [layout("PP2")])


@pytest.mark.parametrize("spelling", ["--deepspeed_config={}", "--deepspeed={}"])
def test_every_spelling_of_the_flag_is_read(flags: list[str], spelling: str) -> None:
    again = [*flags[:2], spelling.format(flags[3])]
    assert ARGUMENTS.strategy(again) == ARGUMENTS.strategy(flags)
    assert ARGUMENTS.strategy(["--deepspeed", *flags]) == ARGUMENTS.strategy(flags)


def test_a_missing_or_broken_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--deepspeed_config is missing .* add"):
        ARGUMENTS.strategy(["--deepspeed"])
    with pytest.raises(ConfigError, match=r"none\.json can't be read"):
        ARGUMENTS.strategy([f"--deepspeed_config={tmp_path}/none.json"])
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected keys and values"):
        read_config(tmp_path / "list.json")


def test_the_identity_is_what_is_trained_not_how_fast(flags: list[str], tmp_path: Path) -> None:
    other = tmp_path / "other.json"

    def identity(**changes: Any) -> str:  # noqa: ANN401 - keys of a configuration
        other.write_text(json.dumps({**CONFIG, **changes}))
        return ARGUMENTS.identity([*flags[:2], f"--deepspeed_config={other}", "--local_rank=3"])

    assert identity() == ARGUMENTS.identity(flags)
    assert identity(train_micro_batch_size_per_gpu=1) == ARGUMENTS.identity(flags)
    assert identity(zero_optimization={"stage": 3}) == ARGUMENTS.identity(flags)
    assert identity(train_batch_size=12) != ARGUMENTS.identity(flags)
    assert identity(bf16={"enabled": False}) != ARGUMENTS.identity(flags)
    assert ARGUMENTS.identity(["--lr", "0.2", *flags[2:]]) != ARGUMENTS.identity(flags)


@pytest.mark.parametrize(
    "name",
    [
        *("steps", "max_steps", "max-steps", "train_iters", "num_train_epochs", "epochs"),
        *("max_train_steps", "num_iterations", "total_steps", "elastic-policy", "local_rank"),
        *("output_dir", "output-path", "logging_steps", "log_interval", "log-dir", "log"),
        *("report_to", "run_name", "wandb_project", "tensorboard_dir", "print_every", "log_every"),
        *("save", "save_steps", "save-interval", "save_strategy", "checkpoint_interval"),
        *("eval_steps", "eval-interval", "eval_iters", "eval_strategy", "evaluation_strategy"),
        *("per_device_train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu"),
        *("gradient_accumulation_steps", "eval_batch_size", "logging_dir", "log_every_n_steps"),
    ],
)
def test_place_and_duration_do_not_change_what_is_trained(flags: list[str], name: str) -> None:
    same = ARGUMENTS.identity(flags)
    assert ARGUMENTS.identity([*flags, f"--{name}", "7"]) == same
    assert ARGUMENTS.identity([f"--{name}=8", *flags]) == same


@pytest.mark.parametrize(
    "name",
    [
        *("warmup_steps", "num_warmup_steps", "warmup-iters", "warmup_epochs", "lr_decay_steps"),
        *("lr_decay_iters", "lr_scheduler_steps", "decay_steps", "num_cycles", "inner_steps"),
        *("output_dim", "output_size", "logit_scale", "logits", "log_alpha", "saved_model"),
        *("train_batch_size", "evaluator_weight", "validation_split", "eval_ratio", "seed"),
        *("checkpoint", "max_length", "num_layers", "step_size", "epoch_length"),
    ],
)
def test_schedule_and_model_change_it(flags: list[str], name: str) -> None:
    found = {ARGUMENTS.identity([*flags, f"--{name}", value]) for value in "78"}
    assert len({ARGUMENTS.identity(flags), *found}) == 3


def test_a_layout_that_no_configuration_expresses_is_refused_before_anything_starts(
    flags: list[str],
) -> None:
    assert ARGUMENTS.layout_arguments(flags, layout("DP2"), [layout("TP2,DP2,ZERO3")]) == []
    with pytest.raises(ConfigError, match="no TP with PP"):
        ARGUMENTS.layout_arguments(flags, layout("DP2"), [layout("TP2,PP2,ZERO1")])


def read_as(tmp_path: Path, text: str) -> Strategy:
    (tmp_path / "ds.json").write_text(text)
    return ARGUMENTS.strategy([f"--deepspeed_config={tmp_path / 'ds.json'}"])


def test_a_file_is_read_as_deepspeed_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """{
      # the batch
      "train_batch_size": 24, // of all ranks
      train_micro_batch_size_per_gpu: 2,
      "zero_optimization": {"stage": 1,},
    }"""
    theirs = DeepSpeedConfig(base64.urlsafe_b64encode(text.encode()).decode())
    assert read_as(tmp_path, text).zero_stage == theirs.zero_optimization_stage == 1
    assert read_config(tmp_path / "ds.json") == theirs._param_dict
    with pytest.raises(ConfigError, match="can't be read: train_batch_size is written twice"):
        read_as(tmp_path, '{"train_batch_size": 24, "train_batch_size": 48}')
    monkeypatch.setattr("tenplex_megatron.adapters.deepspeed.config.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="can't be read: Expecting property name"):
        read_as(tmp_path, text)
    assert read_as(tmp_path, json.dumps(CONFIG)).zero_stage == 2


@pytest.mark.parametrize("value", [True, False, {}, *({"stage": n} for n in ("auto", 3, "2", 1.0))])
def test_a_stage_is_read_as_deepspeed_reads_it(tmp_path: Path, value: Any) -> None:  # noqa: ANN401
    config = {**CONFIG, "zero_optimization": value}
    assert read_as(tmp_path, json.dumps(config)).zero_stage == get_zero_config(config).stage
    assert get_zero_config(for_layout(config, layout("DP2"))).stage == get_zero_config(config).stage
    assert get_zero_config(for_layout(config, layout("DP2,ZERO1"))).stage == 1


@pytest.mark.parametrize("enabled", [True, False, "auto", "true", 1, 0])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_precision_is_read_as_deepspeed_reads_it(
    tmp_path: Path,
    enabled: Any,  # noqa: ANN401
    name: str,
) -> None:
    other = {"bf16": "fp16", "fp16": "bf16"}[name]
    config = {**CONFIG, other: {"enabled": "auto"}, name: {"enabled": enabled}}
    blocks = {"bf16": get_bfloat16_config(config), "fp16": get_float16_config(config)}
    (expected,) = [one for one, block in blocks.items() if block.enabled] or ["fp32"]
    assert read_as(tmp_path, json.dumps(config)).precision == expected


def test_what_a_trainer_fills_in_is_read_from_its_flags(tmp_path: Path) -> None:
    config = {**CONFIG, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    words = [f"--deepspeed={tmp_path / 'ds.json'}"]
    assert ARGUMENTS.strategy([*words, "--bf16"]).precision == "bf16"
    assert ARGUMENTS.strategy([*words, "--fp16", "True"]).precision == "fp16"
    assert ARGUMENTS.strategy([*words, "--bf16=False"]).precision == "fp32"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"zero_optimization": None}, "zero_optimization: expected keys and values, got None"),
        ({"zero_optimization": 2}, "zero_optimization: expected keys and values, got 2"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: expected 0 to 3, got 4"),
        ({"zero_optimization": {"stage": "two"}}, "expected 0 to 3, got 'two'"),
        ({"bf16": True}, "bf16: expected keys and values, got True"),
        ({"bf16": {}, "fp16": None}, "fp16: expected keys and values, got None"),
        ({"tensor_parallel": {"autotp_size": -2}}, "autotp_size: expected a count, got -2"),
        (
            {"elasticity": {"enabled": True}},
            r"no elasticity, and refuses .* `tenplex frontier --deepspeed-config \S+ds.json --gpus",
        ),
    ],
)
def test_a_value_that_deepspeed_refuses_is_one_sentence(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({**CONFIG, **changes}))
    words = [f"--deepspeed_config={tmp_path / 'ds.json'}"]
    with pytest.raises(ConfigError, match=said) as caught:
        ARGUMENTS.strategy(words) and ARGUMENTS.usual_layouts(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("block", "worlds"),
    [
        ({}, {1: "TP1,PP1,DP1", 4: "TP1,PP1,DP4", 5: "TP1,PP1,DP4"}),
        ({"tensor_parallel": {"autotp_size": 2}}, {2: "TP2,PP1,DP1", 7: "TP2,PP1,DP3"}),
    ],
)
def test_a_known_model_is_trained_as_the_configuration_splits_it(
    tmp_path: Path, block: dict[str, Any], worlds: dict[int, str]
) -> None:
    config = {**without("tensor_parallel"), **block}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    words = [f"--deepspeed_config={tmp_path / 'ds.json'}"]
    path = tmp_path / "p.yaml"
    model = Path(__file__).parents[3] / "configs/model/llama3_8b.yaml"
    path.write_text(f"framework: deepspeed\nplanner: {{model: {model}, cluster: h100}}\n")
    rules = rules_of(load_policy(path), path, ARGUMENTS, words, devices_per_node=8)
    assert rules.job.model is not None
    allowed = allowed_layouts(rules.job, 8)
    for world, expected in worlds.items():
        ((found,), _) = allowed_strategies(rules.job, {"a": tuple(range(world))})
        assert str(rules.job.layout(found)) == expected
        assert ARGUMENTS.layout_arguments(words, found.layout, allowed) == []


def test_several_nodes_of_a_launcher_meet_where_it_says() -> None:
    environment = {"CROSS_SIZE": "2", "CROSS_RANK": "1", "LOCAL_SIZE": "4", "WORLD_SIZE": "8"}
    environment |= {"LOCAL_RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    words = ["--job", "j", "t.py", "--elastic-policy=p.yaml", "--lr", "1"]
    assert run_arguments(words, environment) == [
        *("--elastic-policy=p.yaml", "--nproc-per-node=4", "--nnodes=2", "--rdzv-backend=c10d"),
        *("--rdzv-endpoint=host:29500", "--node-name=node-1", "--job", "j", "t.py", "--lr", "1"),
    ]
    with pytest.raises(ConfigError, match="expected --elastic-policy FILE"):
        run_arguments(["t.py"], {})


LAUNCHERS = {
    "torchrun": ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    "MPICH or Intel MPI of DeepSpeed": ("LOCAL_RANK", "LOCAL_SIZE", "WORLD_SIZE"),
    "Open MPI": ("_LOCAL_RANK", "_LOCAL_SIZE", "_SIZE"),
    "MVAPICH": ("_LOCAL_RANK", "_LOCAL_SIZE", "_SIZE"),
    "MPICH": ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_SIZE"),
    "srun": ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"),
}
PREFIXES = {"Open MPI": "OMPI_COMM_WORLD", "MVAPICH": "MV2_COMM_WORLD"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_process_of_every_launcher_becomes_the_agent(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [PREFIXES.get(launcher, "") + name for name in LAUNCHERS[launcher]]
    words = ["t.py", "--elastic-policy=p.yaml"]
    started: list[Sequence[str]] = []
    monkeypatch.setattr("tenplex_megatron.run.tenplex", lambda told: started.append(told) or 0)
    for rank in range(4):
        with monkeypatch.context() as patch:
            for name, value in zip(names, (rank, 4, 4), strict=True):
                patch.setenv(name, str(value))
            assert run(words) == 0
    assert started == [["run", *run_arguments(words, {"WORLD_SIZE": "4"})]]
    more = dict(zip(names, ("0", "4(x2)" if launcher == "srun" else "4", "8"), strict=True))
    with pytest.raises(ConfigError, match=r"started 8 .* several nodes .* once on every node"):
        run_arguments(words, more)


def test_flags_of_the_script_that_repeat_the_layout_follow_it(flags: list[str]) -> None:
    chosen = layout("DP2,ZERO3,MBS4")
    assert ARGUMENTS.layout_arguments(flags, chosen, [chosen]) == []
    given = [
        *flags,
        "--zero-stage",
        "1",
        "--pipeline-model-parallel-size=2",
        "--micro-batch-size=1",
    ]
    assert ARGUMENTS.layout_arguments(given, chosen, [chosen]) == [
        "--pipeline-model-parallel-size=1",
        "--zero-stage=3",
        "--micro-batch-size=4",
    ]
    assert ARGUMENTS.layout_arguments(given, layout("DP2"), [chosen]) == [
        "--pipeline-model-parallel-size=1",
        "--micro-batch-size=2",
    ]
