"""`tenplex plan --from`: what would a job get on other devices?  Predicted; nothing is built."""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

from tenplex_megatron.adapters.megatron.arguments import MegatronArguments
from tenplex_megatron.cli.counts import count, counts
from tenplex_megatron.cli.what_if_text import print_answer
from tenplex_megatron.cli.what_if_values import KEYS, answer_values
from tenplex_megatron.config import cluster_file, load_profile
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.allowed import Job, allowed_strategies
from tenplex_megatron.planner.choose import Outlook
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.fleet import Fleet
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.search import Evaluated, evaluate, search
from tenplex_megatron.planner.space import Scope
from tenplex_megatron.planner.strategy import Recompute, Strategy
from tenplex_megatron.planner.what_if import Situation, answer, running

__all__ = ["build_parser", "is_what_if", "what_if"]

_MOST_DEVICES = 1 << 17
_CAN_NOT = 2
"""Exit code where state is missing, as that of an exact plan."""
_MICRO_BATCHES = (1, 2, 4, 8)
# Fused attention keeps no scores that could be computed again.
_RECOMPUTES: tuple[Recompute, ...] = ("none", "full")

_DESCRIPTION = """Predicts what a job would get on other devices, in about a second, without a
script and without the framework.

The layout is the one that finishes most steps until the next change.  With Megatron's flags
everything but the layout stays as they say.  With --model the job is taken to train as fast as
--from can, and micro-batch, recomputation and sequence parallelism are chosen anew.

Devices are filled node by node: n0:0, n0:1, ...  A node without a device left is gone, and what
only its memory held is missing.  A node that keeps one device keeps the state of all its ranks.

Exit codes: 0 there is an answer, 2 wrong input, or state is missing: only a checkpoint has it.

A change pays off after as many steps as it takes the new layout to have done as many as the
alternative: (pause - pause of the alternative) / (its seconds per step - the new ones).  The
alternative is to go on as it is, where the job keeps all its devices; else the same layout with
fewer data-parallel replicas; where that is chosen, or does not fit, the best runner-up.
A pause is the restart and the time of the busiest node, each of whose ranks has its device's share
of the network (--cluster: network_bandwidth x network_efficiency) for what arrives and for what
leaves, and of the links in the node (node_bandwidth x node_efficiency) for what stays."""
_EXAMPLES = """examples:
  three of 64 GPUs are lost:
    tenplex plan --from TP2,PP4,DP8 --gpus 61 --model configs/model/llama3_8b.yaml \\
        --cluster h100 --global-batch-size 512
  two known ones and a whole node, with the flags of the job:
    tenplex plan --from TP4,PP2,DP4 --lost n0:3,n1:7,n3 --cluster a100_selene -- \\
        --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 \\
        --vocab-size 51200 --micro-batch-size 1 --global-batch-size 256 --bf16
  nodes of different sizes:
    tenplex plan --from TP2,PP2,DP5 --gpus 17 --devices-per-node 8,8,5 ...
"""


def is_what_if(words: Sequence[str]) -> bool:
    """Whether a command line is a what-if: it says where the job runs, or on how many GPUs."""
    before = words[: words.index("--")] if "--" in words else words
    return any(word.partition("=")[0] in ("--from", "--gpus", "--lost") for word in before)


def what_if(arguments: Sequence[str]) -> int:
    """Answer and print."""
    given = build_parser().parse_args(arguments)
    started = time.monotonic()
    layout = ParallelLayout.parse(given.source)
    cluster = load_profile(ClusterProfile, cluster_file(given.cluster, Path()))
    fleet = _fleet(given, layout, cluster)
    largest = max(map(len, fleet.before.values()))
    cluster = replace(cluster, devices_per_node=min(largest, cluster.devices_per_node))
    situation, found = _searched(given, layout, cluster, fleet)
    outlook = replace(Outlook(), next_change_s=given.next_change)
    result = answer(situation, found, outlook)
    values = answer_values(situation, result, fleet, outlook)
    values["seconds"] = round(time.monotonic() - started, 3)
    if given.json:
        print(json.dumps(values))
    else:
        print_answer(values)
    return _CAN_NOT if values["missing_bytes"] >= 1 else 0


def _searched(
    given: argparse.Namespace, layout: ParallelLayout, cluster: ClusterProfile, fleet: Fleet
) -> tuple[Situation, Evaluated]:
    """The situation, and the strategies to choose from."""
    if (given.model is None) == (not given.flags):
        raise ConfigError(
            "the model: expected --model FILE or Megatron's flags after --, got "
            + ("both" if given.flags else "neither")
        )
    if given.model is None:
        return _searched_for_job(given, layout, cluster, fleet)
    if given.global_batch_size is None:
        raise ConfigError("--global-batch-size: expected beside --model, got none")
    model, batch = load_profile(ModelProfile, given.model), given.global_batch_size
    sizes = _MICRO_BATCHES if layout.micro_batch_size is None else (layout.micro_batch_size,)
    base = Strategy(layout=layout, global_batch_size=batch)
    one = layout.dp * layout.cp == 1
    candidates = [
        replace(
            base,
            layout=replace(layout, micro_batch_size=micro),
            sequence_parallel=with_sp,
            zero_stage=zero_stage,
            recompute=recompute,
        )
        for micro in sizes
        for with_sp in ((False, True) if layout.tp > 1 else (False,))
        for zero_stage in ((0,) if one else (0, 1))
        for recompute in _RECOMPUTES
    ]
    now = running(model, cluster, candidates)
    counts = [len(devices) for devices in fleet.after.values()]
    found = search(
        model,
        cluster,
        devices=sum(counts),
        devices_per_node=counts,
        global_batch_size=batch,
        micro_batch_sizes=sorted({*_MICRO_BATCHES, *sizes}),
        scope=Scope(
            recompute=_RECOMPUTES,
            zero_stages=(0, 1) if one else (now.strategies[0].zero_stage,),
        ),
    )
    return _situation(model, cluster, now, fleet), found


def _searched_for_job(
    given: argparse.Namespace, layout: ParallelLayout, cluster: ClusterProfile, fleet: Fleet
) -> tuple[Situation, Evaluated]:
    """The same with Megatron's flags, of which only the layout changes."""
    flags = list(given.flags)
    if given.global_batch_size is not None:
        flags.append(f"--global-batch-size={given.global_batch_size}")
    arguments = MegatronArguments()
    model = arguments.profile(flags)
    job = Job(model=model, base=arguments.strategy(flags))
    now = running(model, cluster, [job.strategy(layout)])
    strategies, _ = allowed_strategies(job, fleet.after)
    return _situation(model, cluster, now, fleet), evaluate(model, cluster, strategies)


def _situation(
    model: ModelProfile, cluster: ClusterProfile, now: Evaluated, fleet: Fleet
) -> Situation:
    return Situation(
        model=model, cluster=cluster, running=now, before=fleet.before, left=fleet.after
    )


def _fleet(given: argparse.Namespace, layout: ParallelLayout, cluster: ClusterProfile) -> Fleet:
    if given.gpus is None and not given.lost:
        raise ConfigError("--gpus: expected how many devices the job will have, or --lost")
    if given.gpus is not None and given.gpus < 1:
        raise ConfigError(f"--gpus: expected at least 1 device, got {given.gpus}")
    used = layout.world_size
    most = max(used, given.gpus or 0)
    name = f"--from {layout}" if used == most else f"--gpus {given.gpus}"
    if most > _MOST_DEVICES:
        raise ConfigError(f"{name}: expected at most {_MOST_DEVICES} devices, got {most}")
    sizes = given.devices_per_node or [cluster.devices_per_node]
    if len(sizes) == 1:
        sizes *= -(-most // sizes[0])
    if sum(sizes) < most:
        raise ConfigError(
            f"{name}: needs {most} devices, --devices-per-node has {sum(sizes)} in all"
        )
    return Fleet.of(sizes, used=used, wanted=given.gpus, lost=given.lost)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text}")
    return seconds


class _Parser(argparse.ArgumentParser):
    """Says which words belong to the other mode of the command."""

    def parse_known_args(  # type: ignore[override]  # typeshed has overloads
        self,
        args: Sequence[str] | None = None,
        namespace: Any = None,  # noqa: ANN401 - argparse's own
    ) -> tuple[Any, list[str]]:
        given, rest = super().parse_known_args(args, namespace)
        if rest:
            _refuse(rest[0])
        if given.flags and not given.flags[0].startswith("-"):
            _refuse(given.flags[0])
        return given, []


def _refuse(word: str) -> Never:
    raise ConfigError(
        f"{word}: --from asks what a job would get, and takes neither SOURCE TARGET nor a script; "
        "write Megatron's flags after --, or drop --from for the plan between two layouts"
    )


def build_parser() -> argparse.ArgumentParser:
    """The options of the mode."""
    keys = "\n".join(f"  {name:<23} {meaning}" for name, meaning in KEYS.items())
    parser = _Parser(
        prog="tenplex plan",
        usage="tenplex plan --from LAYOUT --gpus N --cluster C (--model FILE | -- FLAGS ...)",
        description=_DESCRIPTION,
        epilog=f"{_EXAMPLES}\nkeys of --json, bytes and seconds:\n{keys}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--from", dest="source", required=True, metavar="LAYOUT", help="such as TP2,PP4,DP8")
    add("--gpus", type=int, metavar="N", help="devices it will have (default: all but the lost)")
    add(
        "--lost",
        type=lambda text: text.split(","),
        default=[],
        metavar="n3:5,n4",
        help="lost devices and nodes (default: the last ones of the last nodes)",
    )
    add("--cluster", required=True, metavar="C", help="a name or a file, see configs/cluster")
    add("--model", type=Path, metavar="FILE", help="a profile, see configs/model")
    add("--global-batch-size", type=count, metavar="B", help="(default: that of the flags)")
    add(
        "--devices-per-node",
        type=counts,
        metavar="D[,D...]",
        help="of every node, or of each (default: the cluster's)",
    )
    add(
        "--next-change",
        type=_seconds,
        default=Outlook().next_change_s,
        metavar="S",
        help="seconds until the devices change again (default %(default)g)",
    )
    add("--json", action="store_true", help="one JSON object")
    add("flags", nargs="*", help="Megatron's flags, after --")
    return parser
