"""How well does Calculon predict the same rows? For a comparison beside the planner.

Calculon (Isaev et al., SC'23, github.com/calculon-ai/calculon) is taken from the folder that the
environment variable CALCULON_DIR names, and used through its Python API. It gets the benefit of
every doubt: whichever of its own A100 descriptions and of two network bandwidths is nearest to the
measured rows, no limit of memory (all rows did run), and, if that helps, one factor from the rows
that calibrate the planner. Networks of the description have the size that the rows need.
"""

import importlib.util
import itertools
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from planner_score import Floats, Rows, Scored, Split
from published_rows import Row

SYSTEMS = ("a100_80g", "a100_80e")
"""Its two descriptions of an A100 with 80 GB."""
NETWORK_GBPS = (25, 12.5)
"""Its own value, 200 Gb/s per device, and the 800 Gb/s per node of vTrain's cluster."""
DEVICES_PER_NODE = 8


def compare(folder: Path, splits: Sequence[Split]) -> tuple[dict[str, Any], Scored]:
    """Calculon's best scores of the splits' rows, as the planner's are, and its predictions.

    Raises:
        ImportError: the folder holds no Calculon.
    """
    calculon = _load(folder)
    best: tuple[dict[str, Any], Scored] | None = None
    sizes = [row.strategy.layout.world_size for split in splits for row in split.scored]
    networks = NETWORK_GBPS if max(sizes, default=0) > DEVICES_PER_NODE else NETWORK_GBPS[:1]
    for name, bandwidth in itertools.product(SYSTEMS, networks):
        description = json.loads((folder / "systems" / f"{name}.json").read_text(encoding="utf-8"))
        description["mem1"]["GiB"] = 1e9
        description["networks"][1] |= {"bandwidth": bandwidth}
        times = _Times(calculon, description)
        for is_scaled in (False, True):
            scored = Scored.of(times.readable(splits), times.scaled if is_scaled else times.plain)
            found = {
                "system": f"{name}, {bandwidth} GB/s, " + ("one factor" if is_scaled else "as is"),
                "rows": len(scored.rows),
                "refused": len(times.refused),
                **scored.summary(),
            }
            if best is None or found["time_error_pct"]["mean"] < best[0]["time_error_pct"]["mean"]:
                best = found, scored
    assert best is not None
    return best


def _load(folder: Path) -> ModuleType:
    """The package in `folder`; its writer of tables imports pandas, which nothing here needs."""
    has_pandas = importlib.util.find_spec("pandas") is not None
    if not has_pandas:
        sys.modules["pandas"] = ModuleType("pandas")
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("calculon")
    finally:
        sys.path.remove(str(folder))
        if not has_pandas:
            del sys.modules["pandas"]


class _Times:
    """Seconds of rows on one system, each computed once."""

    def __init__(self, calculon: ModuleType, description: dict[str, Any]) -> None:
        self._calculon = calculon
        self._system = calculon.System(description)
        self._log = logging.getLogger("calculon")
        self._known: dict[int, float | None] = {}
        self.refused: set[int] = set()

    def readable(self, splits: Sequence[Split]) -> list[Split]:
        """The splits without the rows that Calculon refuses."""
        return [
            Split(self._accepted(split.calibrating), self._accepted(split.scored), split.draw)
            for split in splits
        ]

    def plain(self, _calibrating: Rows, scored: Rows) -> Floats:
        """As predicted."""
        return np.array([self._of(row) for row in scored], np.float64)

    def scaled(self, calibrating: Rows, scored: Rows) -> Floats:
        """Times the factor that is right for the median row that calibrates."""
        if not calibrating:
            return self.plain(calibrating, scored)
        measured = np.array([row.step_s for row in calibrating], np.float64)
        factor = np.median(measured / self.plain((), calibrating))
        return np.asarray(factor * self.plain((), scored), np.float64)

    def _accepted(self, rows: Rows) -> list[Row]:
        return [row for row in rows if self._of(row) is not None]

    def _of(self, row: Row) -> float | None:
        key = id(row)
        if key not in self._known:
            try:
                self._known[key] = self._run(row)
            except (self._calculon.llm.Llm.Error, AssertionError):
                self.refused.add(key)
                self._known[key] = None
        return self._known[key]

    def _run(self, row: Row) -> float:
        llm = self._calculon.llm.Llm
        model = llm(llm.Application(application(row)), self._log)
        model.compile(self._system, llm.Execution.from_json(execution(row)))
        model.run(self._system)
        return float(model.get_total_time())


def application(row: Row) -> dict[str, int]:
    """The model in Calculon's words."""
    model = row.model
    return {
        "hidden": model.hidden_size,
        "feedforward": model.ffn_size,
        "seq_size": model.seq_length,
        "attn_heads": model.num_heads,
        "attn_size": model.head_size,
        "num_blocks": model.num_layers,
    }


def execution(row: Row) -> dict[str, Any]:
    """The strategy in Calculon's words; a group uses the network that Megatron's order gives it."""
    layout = row.strategy.layout
    stride_of_stages = layout.tp * layout.dp
    return {
        "num_procs": layout.world_size,
        "tensor_par": layout.tp,
        "pipeline_par": layout.pp,
        "data_par": layout.dp,
        "tensor_par_net": int(layout.tp > DEVICES_PER_NODE),
        "pipeline_par_net": int(stride_of_stages * layout.pp > DEVICES_PER_NODE),
        "data_par_net": int(stride_of_stages > DEVICES_PER_NODE),
        "batch_size": row.strategy.global_batch_size,
        "microbatch_size": row.strategy.micro_batch_size,
        "datatype": "float16",
        "fused_activation": True,
        "attention_type": "multihead",
        "activation_recompute": row.strategy.recompute,
        "pipeline_interleaving": layout.vpp,
        "optimizer_sharding": False,
        "tensor_par_comm_type": "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": False,
        "data_par_overlap": False,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }
