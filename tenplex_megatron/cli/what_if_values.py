"""What is said about a job on other devices, in plain values?"""

from dataclasses import replace
from typing import Any

from tenplex_megatron.adapters.megatron.arguments import MegatronArguments
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.planner.choose import Outlook
from tenplex_megatron.planner.fleet import Fleet
from tenplex_megatron.planner.moves import Moves
from tenplex_megatron.planner.strategy import Strategy
from tenplex_megatron.planner.what_if import Answer, Situation, Way, batch_note, pays_off_after

__all__ = ["KEYS", "answer_values"]

_STRATEGY = {
    "layout": "as a policy would name it",
    "devices": "that it uses",
    "micro_batch_size": "samples of one micro-batch",
    "sequence_parallel": "true or false",
    "zero_stage": "1 with the distributed optimizer, else 0",
    "recompute": "none, selective or full",
    "recompute_layers": "of a stage that recompute fully, null for all",
    "step_s": "predicted seconds of a step",
    "memory_bytes": "predicted for the fullest device",
}
KEYS = {
    **{f"from_{key}": f"now: {meaning}" for key, meaning in _STRATEGY.items()},
    "gpus": "devices the job will have",
    "devices_per_node": "of every node that is left",
    "lost": "devices it had and will not have, as n7:5",
    "lost_nodes": "nodes it had of which no device is left",
    "cluster": "name of the cluster's profile",
    "global_batch_size": "samples of one step",
    **_STRATEGY,
    "memory_limit_bytes": "memory of a device",
    "flags": "of Megatron, for the new layout",
    "reason": "of the choice",
    "stays": "whether the job goes on as it is, without a pause",
    "moved_bytes": "that pass between nodes",
    "within_bytes": "copied inside nodes",
    "missing_bytes": "wanted, and held by no node with a rank: only a checkpoint has them",
    "nodes": "rows: node, ranks, and bytes: arriving_, leaving_, within_ and missing_bytes",
    "links": "rows: source, target, bytes; the largest first",
    "slowest_node": "the node that is busy longest",
    "slowest_direction": "arriving, leaving or within",
    "move_s": "seconds it is busy",
    "restart_s": "seconds a change takes besides",
    "pause_s": "both together",
    "next_change_s": "expected seconds until the next change",
    "baseline": "layout of the alternative, null for none",
    "baseline_kind": "stay, fewer replicas or runner-up",
    "baseline_step_s": "its seconds per step",
    "baseline_pause_s": "its pause",
    "pays_off_after_steps": "see above; 0 at once, null never",
    "overtaken_after_steps": "steps after which the alternative has done as many; null never",
    "runners_up": "rows: keys from layout to memory_bytes, moved_bytes, pause_s, why_not",
    "batch_note": "a global batch that would let more replicas of from_layout run, or null",
    "seconds": "that the answer took",
}
"""What `--json` holds."""


def answer_values(
    situation: Situation, found: Answer, fleet: Fleet, outlook: Outlook
) -> dict[str, Any]:
    """The answer in plain values; `KEYS` says what each is."""
    best, before = found.best, situation.strategy
    strategy, moves = best.option.strategy, best.moves
    baseline = found.baseline
    return {
        **_strategy_values("from_", before),
        "from_step_s": float(situation.running.step_s[0]),
        "from_memory_bytes": float(situation.running.memory_bytes[0]),
        "gpus": sum(map(len, fleet.after.values())),
        "devices_per_node": [len(devices) for devices in fleet.after.values()],
        "lost": fleet.lost,
        "lost_nodes": fleet.lost_nodes,
        "cluster": situation.cluster.name,
        "global_batch_size": strategy.global_batch_size,
        **_strategy_values("", strategy),
        "step_s": best.option.step_s,
        "memory_bytes": best.option.memory_bytes,
        "memory_limit_bytes": situation.cluster.memory_bytes,
        "flags": " ".join(MegatronArguments().strategy_arguments(strategy)),
        "reason": found.reason,
        "stays": moves is None,
        "moved_bytes": moves.moved_bytes if moves else 0.0,
        "within_bytes": float(moves.within.sum()) if moves else 0.0,
        "missing_bytes": float(moves.missing.sum()) if moves else 0.0,
        "nodes": _node_values(moves) if moves else [],
        "links": _link_values(moves) if moves else [],
        "slowest_node": best.slowest.node if best.slowest else None,
        "slowest_direction": best.slowest.direction if best.slowest else None,
        "move_s": best.slowest.seconds if best.slowest else 0.0,
        "restart_s": outlook.restart_s if moves else 0.0,
        "pause_s": best.pause_s,
        "next_change_s": outlook.next_change_s,
        "baseline": _shown(baseline.option.strategy.layout) if baseline else None,
        "baseline_kind": found.baseline_kind if baseline else None,
        "baseline_step_s": baseline.option.step_s if baseline else None,
        "baseline_pause_s": baseline.pause_s if baseline else None,
        "pays_off_after_steps": pays_off_after(best, baseline) if baseline else None,
        "overtaken_after_steps": _overtaken_after(best, baseline),
        "runners_up": [_runner_up(way, why) for way, why in found.runners_up],
        "batch_note": batch_note(situation),
    }


def _overtaken_after(best: Way, other: Way | None) -> int | None:
    """Steps after which the alternative has done as many, where it starts later."""
    return pays_off_after(other, best) if other and other.pause_s > best.pause_s else None


def _strategy_values(prefix: str, strategy: Strategy) -> dict[str, Any]:
    layout = strategy.layout
    return {
        f"{prefix}layout": _shown(layout),
        f"{prefix}devices": layout.world_size,
        f"{prefix}micro_batch_size": layout.micro_batch_size,
        f"{prefix}sequence_parallel": strategy.sequence_parallel,
        f"{prefix}zero_stage": strategy.zero_stage,
        f"{prefix}recompute": strategy.recompute,
        f"{prefix}recompute_layers": strategy.recompute_layers,
    }


def _shown(layout: ParallelLayout) -> str:
    return str(replace(layout, micro_batch_size=None))


def _node_values(moves: Moves) -> list[dict[str, Any]]:
    arriving = moves.arriving - moves.missing
    columns = (moves.ranks, arriving, moves.leaving, moves.within, moves.missing)
    return [
        {
            "node": node,
            "ranks": int(ranks),
            "arriving_bytes": float(arrives),
            "leaving_bytes": float(leaves),
            "within_bytes": float(within),
            "missing_bytes": float(missing),
        }
        for node, ranks, arrives, leaves, within, missing in zip(moves.nodes, *columns, strict=True)
    ]


def _link_values(moves: Moves) -> list[dict[str, Any]]:
    found = sorted(moves.between().items(), key=lambda item: -item[1])
    return [
        {"source": source, "target": target, "bytes": nbytes}
        for (source, target), nbytes in found
        if nbytes >= 1
    ]


def _runner_up(way: Way, why: str) -> dict[str, Any]:
    return {
        **_strategy_values("", way.option.strategy),
        "step_s": way.option.step_s,
        "memory_bytes": way.option.memory_bytes,
        "moved_bytes": way.moves.moved_bytes if way.moves else 0.0,
        "pause_s": way.pause_s,
        "why_not": why,
    }
