"""`tenplex frontier --deepspeed-config`: on how many GPUs can a ZeRO job keep its batch exact?

What DeepSpeed's elasticity configuration computed before it was removed: the valid numbers of GPUs
and micro-batches of a batch.  With a model and a cluster each number has its fastest cut that fits.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tenplex_megatron.adapters.deepspeed.config import (
    described_strategy,
    read_config,
    tensor_parallel_size,
)
from tenplex_megatron.cli.counts import counts
from tenplex_megatron.config import cluster_file, load_profile
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.batches import BatchCut, batch_cuts, richer_batches
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.search import evaluate
from tenplex_megatron.planner.strategy import Strategy

__all__ = ["FLAG", "batches", "build_parser"]

FLAG = "--deepspeed-config"
_EPILOG = """examples:
  tenplex frontier --deepspeed-config ds.json --gpus 1:16
  tenplex frontier --deepspeed-config ds.json --gpus 8:64 --micro-batch-sizes 1,2,4 \\
      --model configs/model/llama3_8b.yaml --cluster h100
"""


def batches(arguments: Sequence[str]) -> int:
    """Print a row for every number of GPUs on which the batch stays exact."""
    given = build_parser().parse_args(arguments)
    config = read_config(given.deepspeed_config)
    tp = tensor_parallel_size(config)
    base = described_strategy(config)
    base = replace(base, layout=replace(base.layout, tp=tp))
    gpus = _range(given.gpus)
    ranks = [count // tp for count in gpus if count % tp == 0]
    micros = given.micro_batch_sizes or [base.micro_batch_size]
    rows = _rows(base, batch_cuts(base.global_batch_size, micros, ranks), given)
    richer = richer_batches(base.global_batch_size, micros, ranks)
    if given.json:
        nearby = [{"train_batch_size": batch, "numbers_of_gpus": count} for batch, count in richer]
        print(json.dumps({"cuts": rows, "batches_that_run_on_more": nearby}))
        return 0
    if not rows:
        raise ConfigError(
            f"train_batch_size {base.global_batch_size} with micro-batches of {micros} divides on "
            f"none of {gpus[0]} to {gpus[-1]} GPUs{f' with TP{tp}' if tp > 1 else ''}; "
            f"{_offer(richer) or 'try other sizes'}"
        )
    _print(base, rows)
    if richer:
        print(_offer(richer))
    return 0


def _rows(
    base: Strategy, cuts: Sequence[BatchCut], given: argparse.Namespace
) -> list[dict[str, Any]]:
    if (given.model is None) != (given.cluster is None):
        raise ConfigError("predictions need both --model and --cluster, got one of them")
    rows = [{"gpus": cut.ranks * base.layout.tp, **asdict(cut)} for cut in cuts]
    if given.model is None or not cuts:
        return rows
    model = load_profile(ModelProfile, given.model)
    cluster = load_profile(ClusterProfile, cluster_file(given.cluster, Path()))
    found = evaluate(
        model,
        cluster,
        [
            replace(base, layout=replace(base.layout, dp=cut.ranks, micro_batch_size=cut.micro))
            for cut in cuts
        ],
    )
    return [
        row
        | {
            "step_s": float(found.step_s[index]),
            "memory_bytes": float(found.memory_bytes[index]),
            "fits": bool(found.memory_bytes[index] <= cluster.memory_bytes),
        }
        for index, row in enumerate(rows)
    ]


def _print(base: Strategy, rows: Sequence[dict[str, Any]]) -> None:
    is_predicted = "step_s" in rows[0]
    tp = f", TP{base.layout.tp}" if base.layout.tp > 1 else ""
    table = Table(title=f"train_batch_size {base.global_batch_size}, ZeRO {base.zero_stage}{tp}")
    for name in ("GPUs", "micro-batch", "accumulation"):
        table.add_column(name, justify="right")
    if is_predicted:
        for name in ("s per step", "GB per GPU", ""):
            table.add_column(name, justify="right")
    for row in rows:
        cells = [str(row[name]) for name in ("gpus", "micro", "accumulation")]
        if is_predicted:
            fits = "" if row["fits"] else "does not fit"
            cells += [f"{row['step_s']:.3g}", f"{row['memory_bytes'] / 1e9:.3g}", fits]
        table.add_row(*cells)
    Console(highlight=False).print(table)


def _offer(richer: Sequence[tuple[int, int]]) -> str:
    """Near batches with more freedom."""
    offers = [f"{batch} on {count} numbers of GPUs" for batch, count in richer]
    return f"batches nearby that run on more: {', '.join(offers)}" if offers else ""


def _range(text: str) -> range:
    """Every number of `N`, or of `N:M`.

    >>> _range("3"), _range("2:5")
    (range(3, 4), range(2, 6))
    """
    first, colon, last = text.partition(":")
    if not first.isdigit() or (colon and not last.isdigit()):
        raise ConfigError(f"--gpus: expected N or N:M, got {text!r}")
    low, high = int(first), int(last or first)
    if not 1 <= low <= high:
        raise ConfigError(f"--gpus: expected the smaller number first, from 1, got {text!r}")
    return range(low, high + 1)


def build_parser() -> argparse.ArgumentParser:
    """The options of this face of `tenplex frontier`."""
    parser = argparse.ArgumentParser(
        prog="tenplex frontier",
        description="Shows on how many GPUs a DeepSpeed job keeps its batch exact, and how it is "
        "cut there: micro-batch x accumulation x GPUs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(FLAG, type=Path, required=True, metavar="JSON", help="the job's configuration")
    add("--gpus", required=True, metavar="N[:M]", help="every number from N to M")
    add("--micro-batch-sizes", type=counts, metavar="B,...", help="default: the configuration's")
    add("--model", type=Path, metavar="FILE", help="predict for a profile, see configs/model")
    add("--cluster", metavar="NAME", help="on a name or file, see configs/cluster")
    add("--json", action="store_true", help="everything, as one line")
    return parser
