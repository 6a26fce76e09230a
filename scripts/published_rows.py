"""What do the rows of published tables say, in the planner's terms?

Tables come in the format of tests/golden/measured_tables.yaml. One function per table: its sentence
says what the source states about the runs besides the columns.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from published_models import functional_model, gpt, nemo_model, simumax_model

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import TenplexError
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.strategy import Strategy
from tenplex_megatron.planner.timing.calibrate import Measurement

type Fields = Mapping[str, Any]


class UnreadableError(Exception):
    """A row that says too little, or something the planner has no words for."""


@dataclass(frozen=True)
class Row:
    """One published iteration."""

    model: ModelProfile
    strategy: Strategy
    step_s: float | None = None
    memory_bytes: float | None = None
    """Most that was allocated at once on a rank."""
    is_last_rank: bool = False
    """Whether `memory_bytes` is the last rank's and not the largest."""
    name: str = ""
    kind: str = ""
    """What sets some rows of its table apart."""
    contradiction: str | None = None
    """Why the row's own columns can't all be right."""

    def __post_init__(self) -> None:
        for what, value in (("seconds", self.step_s), ("bytes", self.memory_bytes)):
            if value is not None and not 0.0 < value < math.inf:
                raise UnreadableError(f"{what} of {value}")

    @property
    def group(self) -> tuple[object, ...]:
        """Rows of one group differ in their layout only."""
        return self.model, self.strategy.layout.world_size, self.strategy.global_batch_size

    @property
    def measurement(self) -> Measurement:
        """The row as calibration takes it."""
        assert self.step_s is not None
        return Measurement(self.model, self.strategy, self.step_s)


def strategy(
    model: ModelProfile, row: Fields, stages: tuple[int, ...] | None = None, **choices: Any
) -> Strategy:
    """The strategy of a row: absent axes are 1, DP fills the GPUs."""
    tp, pp, cp, ep = (int(row.get(axis) or 1) for axis in ("tp", "pp", "cp", "ep"))
    dp = int(row.get("dp") or row["gpus"] // (tp * pp * cp))
    vpp = int(row.get("vpp") or 1)
    layout = ParallelLayout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=ep,
        vpp=vpp,
        micro_batch_size=int(row["mbs"]),
        stage_layers=stages or _stage_layers(model.num_layers, pp * vpp),
    )
    if row.get("gpus") is not None and layout.world_size != row["gpus"]:
        raise UnreadableError(f"{layout} on {row['gpus']} devices")
    return Strategy(layout=layout, global_batch_size=int(row["gbs"]), **choices)


def _stage_layers(layers: int, chunks: int) -> tuple[int, ...] | None:
    """None where layers divide; else embedding and loss count as one each, or the first hold more.

    The former is Megatron's `--account-for-embedding-in-pipeline-split` and its twin for the loss.
    """
    least, more = divmod(layers, chunks)
    if not more:
        return None
    if (layers + 2) % chunks == 0:
        each = (layers + 2) // chunks
        return (each - 1, *[each] * (chunks - 2), each - 1)
    return tuple(least + (chunk < more) for chunk in range(chunks))


OLD_MEGATRON: Mapping[str, Any] = {
    "precision": "fp16",
    "is_flash": False,
    "overlaps_gradients": False,
}


def sc21_table1(row: Fields) -> Row:
    """Fully recomputed; torch's DDP overlaps in the four rows without pipeline up to 18B."""
    model = gpt(row["layers"], row["hidden"], row["heads"], seq=2048)
    choices = {**OLD_MEGATRON, "recompute": "full", "overlaps_gradients": row["pp"] == 1}
    return Row(model, strategy(model, row, **choices), row["iter_s_derived"], name=row["model"])


def sc21_table2(row: Fields) -> Row:
    """GPT of 175B and 530B; the model-parallel ways of PTD-P are TP 8 x PP."""
    sizes = (96, 12288, 96) if row["params_b"] < 300 else (105, 20480, 128)
    model = gpt(*sizes, seq=2048)
    choices: dict[str, Any] = {**OLD_MEGATRON, "recompute": "full"}
    layout = {"tp": 8, "pp": row["model_parallel"] // 8}
    if row["scheme"] == "zero3":
        choices, layout = {**choices, "zero_stage": 3}, {}
    chosen = strategy(model, {**row, **layout}, **choices)
    return Row(model, chosen, row["iter_s_derived"], kind=row["scheme"])


def readme_gpt3(row: Fields) -> Row:
    """Micro-batches of 1, fully recomputed (Megatron-LM examples/pretrain_gpt3_175B.sh)."""
    model = gpt(96, 12288, 96, seq=row["seq"])
    chosen = strategy(model, {**row, "mbs": 1}, **OLD_MEGATRON, recompute="full")
    return Row(model, chosen, row["iter_s"], name=row["model"])


def vtrain(row: Fields) -> Row:
    """Megatron-DeepSpeed with full recomputation."""
    model = gpt(row["layers"], row["hidden"], row["heads"], seq=row["seq"])
    chosen = strategy(model, row, **OLD_MEGATRON, recompute="full")
    return Row(model, chosen, row["iter_ms"] / 1e3)


def sailor(row: Fields) -> Row:
    """Megatron-DeepSpeed without recomputation.

    In the plan files beside the measurements (`layers_per_stage`) the first stage holds the
    embedding and three layers fewer than those between, the last stage the head and one fewer.
    The plan file of GPT-NEO on 16 devices with TP4 and DP4 lists the 26 layers of OPT-350, with
    embedding and head, and not GPT-NEO's 34: its time and memory are another model's.
    """
    model = gpt(row["layers"], row["hidden"], row["heads"], seq=2048, vocab=row["vocab"])
    stages, (each, rest) = None, divmod(row["layers"] + 4, row["pp"])
    if row["pp"] > 1 and not rest:
        stages = (each - 3, *[each] * (row["pp"] - 2), each - 1)
    chosen = strategy(model, row, stages, **OLD_MEGATRON)
    memory, least, why = row.get("max_mem_bytes"), least_bytes(model, chosen), None
    if memory is not None and memory < least:
        why = (
            f"memory of {memory / 1e9:.1f} GB is less than the {least / 1e9:.1f} GB of weights, "
            "optimizer and one micro-batch of this size"
        )
    return Row(model, chosen, row["iter_s"], memory, name=row["model"], contradiction=why)


def least_bytes(model: ModelProfile, chosen: Strategy) -> float:
    """Weights and Adam's state of a fp16 model and one micro-batch's activations on a rank.

    Source: Korthikanti et al., arXiv 2205.05198, equation 2, and 16 bytes per parameter.
    """
    layout, h, s = chosen.layout, model.hidden_size, model.seq_length
    parameters = model.num_layers / layout.pp * 12 * h * h / layout.tp
    scores = 5 * model.num_heads * s / (h * layout.tp)
    per_layer = s * chosen.micro_batch_size * h * (10 + 24 / layout.tp + scores)
    return 16 * parameters + model.num_layers / layout.pp * per_layer


def simumax(row: Fields) -> Row:
    """Sequence parallel, distributed optimizer, Transformer Engine's fused cross entropy."""
    model = simumax_model(row["model"], layers=row["layers"], seq=row["seq"])
    if model is None:
        raise UnreadableError(f"model {row['model']} is not described")
    gbs = row["mbs"] * row["dp"] * row["num_microbatches"]
    chosen = strategy(
        model,
        {**row, "gbs": gbs},
        sequence_parallel=row["tp"] > 1,
        zero_stage=1,
        loss_fusion="te",
    )
    memory = row["alloc_gib_max"] * 2**30
    kind = "dense" if model.latent is None else "latent attention and experts"
    time_s = row["iter_ms"] / 1e3
    return Row(model, chosen, time_s, memory, name=row["case"], kind=kind)


def h100(row: Fields) -> Row:
    """NeMo and MLPerf runs in FP8 with every overlap on and no recomputation."""
    name, seq = row.get("model", "GPT3-175B"), row.get("seq") or 2048
    model = nemo_model(name, seq)
    if model is None:
        raise UnreadableError(f"model {name} is not described")
    chosen = strategy(
        model,
        # MLPerf's script interleaves 12 chunks (config_common.sh).
        {**row, "vpp": row["vpp"] if "model" in row else row["vpp"] or 12},
        sequence_parallel=row["tp"] > 1,
        overlaps_tensor_parallel=row["tp"] > 1,
        zero_stage=1,
        precision="fp8",
    )
    tokens = row["tokens_per_s_per_gpu"] * row["gpus"] if "model" in row else row["tokens_per_s"]
    return Row(model, chosen, row["gbs"] * seq / tokens, name=name)


def bridge(row: Fields) -> Row:
    """Pre-training in FP8 on H100; other systems, types and FSDP have no profile or no layout."""
    is_fp8 = row["precision"] is None or str(row["precision"]).startswith("FP8")
    if row["task"] != "Pre-Training" or row["system"] != "DGX-H100" or not is_fp8:
        raise UnreadableError(f"{row['task']} on {row['system']} in {row['precision']}")
    if row["fsdp"]:
        raise UnreadableError("FSDP")
    return h100(row)


_OTHER_MODELS = ("deepseek", "nemotron", "mtp", "_moe_", "ep4_etp1", "frozen")
"""Functional tests of models that a profile does not describe."""
_UNFUSED_ATTENTION = ("bert", "fim_dataset", "no_mmap", "overlap_optimizer", "vp1_tunable")
_NATIVE_LOSS = ("loss_fusion", "defer_embedding")


def functional(row: Fields) -> Row:
    """Memory of the last rank; what the columns leave out is in the tests' recipes."""
    name = row["test"]
    if any(part in name for part in _OTHER_MODELS):
        raise UnreadableError("a model that is not described")
    # The share of the optimizer's state follows from the number of devices.
    if row["gpus"] is None and row["dist_opt"]:
        raise UnreadableError("a distributed optimizer over an unknown number of devices")
    model = functional_model(row)
    chosen = strategy(
        model,
        {**row, "gpus": row["gpus"] or row["tp"] * row["pp"] * row["cp"]},
        sequence_parallel=row["sp"],
        zero_stage=int(row["dist_opt"]),
        recompute=row["recompute"] or "none",
        precision="fp16" if "bert_release" in name else "bf16",
        is_flash=not any(part in name for part in _UNFUSED_ATTENTION),
        loss_fusion="native" if any(part in name for part in _NATIVE_LOSS) else "none",
    )
    memory = row["mem_max_allocated_bytes"]
    return Row(model, chosen, None, memory, is_last_rank=True, name=name)


READERS: Mapping[str, Callable[[Fields], Row]] = {
    "megatron_sc21_table1": sc21_table1,
    "megatron_sc21_table2_zero3_vs_ptdp": sc21_table2,
    "megatron_readme_gpt3_175b_1024": readme_gpt3,
    "vtrain_multi_node_a100": vtrain,
    "vtrain_single_node_a100": vtrain,
    "simumax_b200_time_and_memory": simumax,
    "sailor_gh200_time_and_memory": sailor,
    "megatron_functional_test_memory": functional,
    "nemo_24_07_h100_fp8_pretrain": h100,
    "mlperf_v3_0_gpt3_175b_h100_fp8": h100,
    "megatron_bridge_performance": bridge,
}


def read_rows(name: str, table: Fields) -> tuple[list[Row], dict[str, list[int]]]:
    """The rows of a table that can be read, and the numbers of the others by what is wrong."""
    rows: list[Row] = []
    unread: dict[str, list[int]] = {}
    for number, values in enumerate(table["rows"], 1):
        try:
            fields = dict(zip(table["columns"], values, strict=True))
            fields.setdefault("seq", table.get("seq"))
            rows.append(READERS[name](fields))
        except (UnreadableError, TenplexError) as error:
            unread.setdefault(str(error), []).append(number)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            unread.setdefault(f"{type(error).__name__}: {error}", []).append(number)
    return rows, unread
