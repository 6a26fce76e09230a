"""What do the rows of published tables say, in the planner's terms?

One function per table: its sentence says what the source states about the runs besides the columns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.strategy import Strategy
from tenplex_megatron.planner.timing.calibrate import Measurement

type Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One published iteration."""

    measurement: Measurement
    memory_bytes: float | None = None
    contradiction: str | None = None
    """Why the row's own columns can't all be right."""

    @property
    def group(self) -> tuple[object, ...]:
        """Rows of one group differ in their layout only."""
        strategy = self.measurement.strategy
        return self.measurement.model, strategy.layout.world_size, strategy.global_batch_size


def gpt(layers: int, hidden: int, heads: int, *, seq: int, vocab: int = 51200) -> ModelProfile:
    """A GPT as in the SC'21 paper: GELU, ffn 4h, tied embeddings."""
    return ModelProfile(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_query_groups=heads,
        head_size=hidden // heads,
        ffn_size=4 * hidden,
        seq_length=seq,
        vocab_size=vocab,
    )


def llama(layers: int, hidden: int, heads: int, **sizes: int) -> ModelProfile:
    """A Llama: SwiGLU, RMS norm, rotary positions, no bias, untied embeddings."""
    return ModelProfile(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_query_groups=sizes["groups"],
        head_size=hidden // heads,
        ffn_size=sizes["ffn"],
        seq_length=sizes["seq"],
        vocab_size=sizes["vocab"],
        is_gated=True,
        has_bias=False,
        has_learned_positions=False,
        is_tied=False,
        has_rms_norm=True,
        dropout=False,
    )


def strategy(model: ModelProfile, row: Fields, **choices: Any) -> Strategy:
    """The strategy of a row: absent axes are 1, DP fills the GPUs, uneven stages start fuller."""
    tp, pp, cp = (int(row.get(axis) or 1) for axis in ("tp", "pp", "cp"))
    dp = int(row.get("dp") or row["gpus"] // (tp * pp * cp))
    least, more = divmod(model.num_layers, pp)
    layout = ParallelLayout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        vpp=int(row.get("vpp") or 1),
        micro_batch_size=int(row["mbs"]),
        stage_layers=tuple(least + (stage < more) for stage in range(pp)) if more else None,
    )
    return Strategy(layout=layout, global_batch_size=int(row["gbs"]), **choices)


OLD_MEGATRON = {"precision": "fp16", "is_flash": False, "overlaps_gradients": False}


def sc21_table1(row: Fields) -> Row:
    """Fully recomputed; torch's DDP overlaps in the four rows without pipeline up to 18B."""
    model = gpt(row["layers"], row["hidden"], row["heads"], seq=2048)
    choices = {**OLD_MEGATRON, "recompute": "full", "overlaps_gradients": row["pp"] == 1}
    return Row(Measurement(model, strategy(model, row, **choices), row["iter_s_derived"]))


def sc21_table2(row: Fields) -> Row:
    """GPT of 175B and 530B; the model-parallel ways of PTD-P are TP 8 x PP."""
    sizes = (96, 12288, 96) if row["params_b"] < 300 else (105, 20480, 128)
    model = gpt(*sizes, seq=2048)
    choices: dict[str, Any] = {**OLD_MEGATRON, "recompute": "full"}
    layout = {"tp": 8, "pp": row["model_parallel"] // 8}
    if row["scheme"] == "zero3":
        choices, layout = {**choices, "zero_stage": 3}, {}
    chosen = strategy(model, {**row, **layout}, **choices)
    return Row(Measurement(model, chosen, row["iter_s_derived"]))


def vtrain(row: Fields) -> Row:
    """Megatron-DeepSpeed with full recomputation."""
    model = gpt(row["layers"], row["hidden"], row["heads"], seq=row["seq"])
    chosen = strategy(model, row, **OLD_MEGATRON, recompute="full")
    return Row(Measurement(model, chosen, row["iter_ms"] / 1e3))


def sailor(row: Fields) -> Row:
    """Megatron-DeepSpeed without recomputation."""
    model = gpt(row["layers"], row["hidden"], row["heads"], seq=2048, vocab=row["vocab"])
    chosen = strategy(model, row, **OLD_MEGATRON)
    least = least_bytes(model, chosen)
    contradiction = None
    if row["max_mem_bytes"] < least:
        contradiction = (
            f"memory of {row['max_mem_bytes'] / 1e9:.1f} GB is less than the {least / 1e9:.1f} GB "
            "of weights, optimizer and one micro-batch of this size"
        )
    return Row(Measurement(model, chosen, row["iter_s"]), row["max_mem_bytes"], contradiction)


def least_bytes(model: ModelProfile, chosen: Strategy) -> float:
    """Weights and Adam's state of a fp16 model and one micro-batch's activations on a rank.

    Source: Korthikanti et al., arXiv 2205.05198, equation 2, and 16 bytes per parameter.
    """
    layout, h, s = chosen.layout, model.hidden_size, model.seq_length
    parameters = model.num_layers / layout.pp * 12 * h * h / layout.tp
    scores = 5 * model.num_heads * s / (h * layout.tp)
    per_layer = s * chosen.micro_batch_size * h * (10 + 24 / layout.tp + scores)
    return 16 * parameters + model.num_layers / layout.pp * per_layer


B200_MODELS = {
    "llama3-70b": {"hidden": 8192, "heads": 64, "groups": 8, "ffn": 28672},
    "llama3-405b": {"hidden": 16384, "heads": 128, "groups": 16, "ffn": 53248},
}


def simumax(row: Fields) -> Row | None:
    """Dense rows; multi-head latent attention of the others is no operator of the model yet."""
    if row["model"] not in B200_MODELS:
        return None
    model = llama(row["layers"], **B200_MODELS[row["model"]], seq=row["seq"], vocab=128256)
    gbs = row["mbs"] * row["dp"] * row["num_microbatches"]
    chosen = strategy(
        model,
        {**row, "gbs": gbs},
        sequence_parallel=row["tp"] > 1,
        zero_stage=1,
        loss_fusion="te",
    )
    return Row(Measurement(model, chosen, row["iter_ms"] / 1e3), row["alloc_gib_max"] * 2**30)


H100_MODELS: dict[str, Callable[[int], ModelProfile]] = {
    "GPT3-5B": lambda seq: gpt(24, 4096, 32, seq=seq),
    "GPT3-20B": lambda seq: gpt(44, 6144, 48, seq=seq),
    "GPT3-175B": lambda seq: gpt(96, 12288, 96, seq=seq),
    "LLAMA2-7B": lambda seq: llama(32, 4096, 32, groups=32, ffn=11008, seq=seq, vocab=32000),
    "LLAMA2-13B": lambda seq: llama(40, 5120, 40, groups=40, ffn=13824, seq=seq, vocab=32000),
    "LLAMA2-70B": lambda seq: llama(80, 8192, 64, groups=8, ffn=28672, seq=seq, vocab=32000),
    "LLAMA3-8B": lambda seq: llama(32, 4096, 32, groups=8, ffn=14336, seq=seq, vocab=128256),
    "LLAMA3-70B": lambda seq: llama(80, 8192, 64, groups=8, ffn=28672, seq=seq, vocab=128256),
}


def h100(row: Fields) -> Row | None:
    """NeMo and MLPerf runs in FP8 with every overlap on and no recomputation."""
    name, seq = row.get("model", "GPT3-175B"), row.get("seq", 2048)
    if name not in H100_MODELS:
        return None
    model = H100_MODELS[name](seq)
    chosen = strategy(
        model,
        # MLPerf's script interleaves 12 chunks (config_common.sh).
        {**row, "vpp": row["vpp"] or 12},
        sequence_parallel=row["tp"] > 1,
        overlaps_tensor_parallel=row["tp"] > 1,
        zero_stage=1,
        precision="fp8",
    )
    tokens = row["tokens_per_s_per_gpu"] * row["gpus"] if "model" in row else row["tokens_per_s"]
    return Row(Measurement(model, chosen, row["gbs"] * seq / tokens))
