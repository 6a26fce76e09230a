"""`tenplex frontier`: which strategies are worth running, from the smallest to the fastest?"""

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tenplex_megatron.adapters.megatron.arguments import MegatronArguments
from tenplex_megatron.cli.batches import FLAG, batches
from tenplex_megatron.cli.counts import count, counts
from tenplex_megatron.cli.frontier_plot import draw
from tenplex_megatron.cli.frontier_text import print_page, print_summary
from tenplex_megatron.config import cluster_file, load_profile
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.frontier import Frontier
from tenplex_megatron.planner.modes import profiling
from tenplex_megatron.planner.nearest import enough_devices, nearest_miss, nothing_runs
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.search import Evaluated, search
from tenplex_megatron.planner.space import Scope

__all__ = ["build_parser", "frontier"]

_LEAST_WIDTH = 120
_PICTURES = (".png", ".pdf", ".svg")
_EPILOG = """examples:
  tenplex frontier --model configs/model/gpt3_175b.yaml --gpus 1024 --global-batch-size 1536 \\
      --cluster a100_selene --plot frontier.png
  tenplex frontier --cluster h100 --gpus 1:64 --global-batch-size 512 \\
      -- --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 \\
      --vocab-size 51200
  tenplex frontier --deepspeed-config ds.json --gpus 1:16
      (on how many GPUs a ZeRO job keeps its batch exact; add --help for its options)
"""


def frontier(arguments: Sequence[str]) -> int:
    """Search and print: one table per number of devices, and one that compares them."""
    if any(word.partition("=")[0] == FLAG for word in arguments):
        return batches(arguments)
    given = build_parser().parse_args(arguments)
    counts = _device_counts(given.gpus)
    model = _model(given.model, given.flags)
    cluster = load_profile(ClusterProfile, cluster_file(given.cluster, Path()))
    scope = Scope(precision=given.precision, is_flash=not given.no_flash)

    def look(devices: int, scope: Scope = scope) -> Evaluated:
        return search(
            model,
            cluster,
            devices=devices,
            global_batch_size=given.global_batch_size,
            micro_batch_sizes=given.micro_batch_sizes,
            scope=scope,
        )

    broken = nothing_runs(model, given.global_batch_size, given.micro_batch_sizes)
    pages = []
    for devices in counts:
        started = time.monotonic()
        found = look(devices)
        if not len(found):
            raise ConfigError(f"no strategy runs on {devices} devices: {'; '.join(broken)}")
        pages.append(_page(found, cluster, devices, model, time.monotonic() - started))
    _compare(pages, cluster)
    if given.plot is not None:
        draw(pages, cluster, given.plot)
    if given.json:
        print(json.dumps({"cluster": cluster.name, "frontiers": pages}))
    else:
        _print(pages, cluster, given)
    if not any(page["fitting"] for page in pages):
        enough = enough_devices(counts[-1], cluster.memory_bytes, scope, look)
        raise ConfigError(
            nearest_miss(model, cluster, found, counts[-1])
            + (f"; {enough} devices are enough" if enough else "; no more devices help")
        )
    return 0


def _print(
    pages: Sequence[dict[str, Any]], cluster: ClusterProfile, given: argparse.Namespace
) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    for page in pages:
        print_page(console, page, cluster, top=given.top)
    if len(pages) > 1:
        print_summary(console, pages)
    if given.plot is not None:
        console.print(f"written: {given.plot}")


def _model(path: Path | None, flags: Sequence[str]) -> ModelProfile:
    if (path is None) == (not flags):
        raise ConfigError(
            "the model: expected --model FILE or Megatron's flags after --, got "
            + ("both" if flags else "neither")
        )
    return MegatronArguments().profile(flags) if path is None else load_profile(ModelProfile, path)


def _device_counts(text: str) -> list[int]:
    """`N`, or `N:M` for every doubling of N up to M.

    >>> _device_counts("8"), _device_counts("1:6")
    ([8], [1, 2, 4, 6])
    """
    first, colon, last = text.partition(":")
    if not first.isdigit() or (colon and not last.isdigit()) or int(first) < 1:
        raise ConfigError(f"--gpus: expected N or N:M with N from 1, got {text!r}")
    low, high = int(first), int(last or first)
    if high < low:
        raise ConfigError(f"--gpus: expected the smaller number first, got {text!r}")
    doublings = [low << step for step in range((high // low).bit_length())]
    return [*doublings, *([high] if doublings[-1] < high else [])]


def _page(
    found: Evaluated,
    cluster: ClusterProfile,
    devices: int,
    model: ModelProfile,
    seconds: float,
) -> dict[str, Any]:
    """Plain values of one frontier; what does not fit is there too, and marked."""
    rows = [_row(found, index, cluster, model) for index in found.frontier()]
    for row in [row for row in rows if row["fits"]][-1:]:
        row["is_fastest"] = True  # a frontier gets faster as it grows
    return {
        "devices": devices,
        "searched": len(found),
        "fitting": len(found.fastest(cluster.memory_bytes)),
        "seconds": seconds,
        "points": rows,
    }


def _row(
    found: Evaluated, index: int, cluster: ClusterProfile, model: ModelProfile
) -> dict[str, Any]:
    strategy = found.strategies[index]
    step_s, memory = float(found.step_s[index]), float(found.memory_bytes[index])
    tokens = strategy.global_batch_size * model.seq_length / step_s
    stages = strategy.layout.stage_layers
    return {
        "layout": str(strategy.layout),
        "axes": str(replace(strategy.layout, stage_layers=None)),
        "devices": strategy.layout.world_size,
        "sequence_parallel": strategy.sequence_parallel,
        "zero_stage": strategy.zero_stage,
        "recompute": strategy.recompute,
        "recompute_layers": strategy.recompute_layers,
        "stage_layers": None if stages is None else list(stages),
        "step_s": step_s,
        "memory_bytes": memory,
        "fits": memory <= cluster.memory_bytes,
        "tokens_per_s_per_device": tokens / strategy.layout.world_size,
        "is_fastest": False,
        "flags": shlex.join(MegatronArguments().strategy_arguments(strategy)),
    }


def _compare(pages: Sequence[dict[str, Any]], cluster: ClusterProfile) -> None:
    """Add to every page how its best compares with that of the fewest devices that have one."""
    frontiers = {
        page["devices"]: Frontier.of(
            [row["memory_bytes"] for row in page["points"]],
            [row["step_s"] for row in page["points"]],
        )
        for page in pages
    }
    profiled = profiling(frontiers, devices=frontiers, memory_limit=cluster.memory_bytes)
    for page, one in zip(pages, profiled, strict=True):
        page["best_step_s"] = None if one.selected is None else one.selected.time
        page["speedup"] = one.speedup
        page["least_memory_bytes"] = one.least_memory


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in _PICTURES or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"expected a file such as frontier.png in a folder that exists, got {text}"
        )
    return path


def build_parser() -> argparse.ArgumentParser:
    """The options of `tenplex frontier`."""
    parser = argparse.ArgumentParser(
        prog="tenplex frontier",
        description="Predicts time and memory of every strategy Megatron offers for a model on a "
        "number of devices, and prints those that no other one beats in both: layouts, stages of "
        "any sizes, and how many layers each stage recomputes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="FILE", help="a profile, see configs/model")
    parser.add_argument(
        "--cluster", required=True, metavar="NAME", help="a name or file, see configs/cluster"
    )
    parser.add_argument(
        "--gpus", required=True, metavar="N[:M]", help="devices; N:M for every doubling of N"
    )
    parser.add_argument("--global-batch-size", type=count, required=True, metavar="B")
    parser.add_argument(
        "--micro-batch-sizes",
        type=counts,
        default=[1, 2, 4, 8],
        metavar="B,...",
        help="to be tried (default 1,2,4,8)",
    )
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16", "fp8"), default="bf16")
    parser.add_argument("--no-flash", action="store_true", help="attention keeps its scores")
    parser.add_argument(
        "--top", type=count, default=10, metavar="N", help="rows shown (default 10)"
    )
    parser.add_argument("--plot", type=_picture, metavar="PNG", help="time against memory")
    parser.add_argument("--json", action="store_true", help="everything, as one line")
    parser.add_argument("flags", nargs="*", help="Megatron's flags of the model, after --")
    return parser
