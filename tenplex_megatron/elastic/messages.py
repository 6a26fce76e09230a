"""How do agents write changes, reports and decisions to each other?

Canonical JSON: sorted keys, no spaces. Only agents of one version of this package speak to each
other, so there is no versioning here.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.elastic.records import (
    Change,
    Ending,
    Ledger,
    NextGeneration,
    NodeReport,
    Source,
    StepTime,
    WorkerExit,
)
from tenplex_megatron.store.base import RankSnapshot

__all__ = [
    "dump_change",
    "dump_decision",
    "dump_report",
    "load_change",
    "load_decision",
    "load_report",
    "step_time",
    "step_time_json",
]

_Json = dict[str, Any]


def _dump(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def dump_change(change: Change) -> str:
    """The JSON of a change."""
    return _dump(dataclasses.asdict(change))


def load_change(text: str | bytes) -> Change:
    """The change in JSON `text`."""
    return Change(**json.loads(text))


def dump_report(report: NodeReport) -> str:
    """The JSON of a node's report."""
    return _dump(
        {
            "node": report.node,
            "devices": report.devices,
            "snapshots": [part.to_json() for part in report.snapshots],
            "exits": [dataclasses.asdict(done) for done in report.exits],
        }
    )


def load_report(text: str | bytes) -> NodeReport:
    """The report in JSON `text`."""
    data = json.loads(text)
    return NodeReport(
        data["node"],
        data["devices"],
        tuple(RankSnapshot.from_json(part) for part in data["snapshots"]),
        tuple(WorkerExit(**done) for done in data["exits"]),
    )


def step_time_json(row: StepTime) -> _Json:
    """Plain values of a step time."""
    return {
        "identity": row.identity,
        "generation": row.generation,
        "layout": row.layout.to_json(),
        "steps": row.steps,
        "step_s": row.step_s,
    }


def step_time(data: _Json) -> StepTime:
    """The step time in plain values."""
    layout = ParallelLayout.from_json(data["layout"])
    steps, step_s = int(data["steps"]), float(data["step_s"])
    return StepTime(str(data["identity"]), int(data["generation"]), layout, steps, step_s)


def dump_decision(decision: NextGeneration | Ending) -> str:
    """The JSON of a decision."""
    if isinstance(decision, Ending):
        return _dump({"ending": dataclasses.asdict(decision)})
    return _dump(
        {
            "ledger": _ledger_json(decision.ledger),
            "change": dataclasses.asdict(decision.change),
            "layout": decision.layout.to_json(),
            "ranks": decision.ranks,
            "source": _source_json(decision.source),
            "reason": decision.reason,
            "predicted_step_s": decision.predicted_step_s,
            "rejected": decision.rejected,
            "totals": dict(decision.totals),
            "master": decision.master,
        }
    )


def load_decision(text: str | bytes) -> NextGeneration | Ending:
    """The decision in JSON `text`."""
    data: _Json = json.loads(text)
    if "ending" in data:
        return Ending(**data["ending"])
    return NextGeneration(
        ledger=_ledger(data["ledger"]),
        change=Change(**data["change"]),
        layout=ParallelLayout.from_json(data["layout"]),
        ranks=tuple((node, device) for node, device in data["ranks"]),
        source=_source(data["source"]),
        reason=data["reason"],
        predicted_step_s=data["predicted_step_s"],
        rejected=tuple((layout, why) for layout, why in data["rejected"]),
        totals=data["totals"],
        master=(data["master"][0], data["master"][1]),
    )


def _ledger_json(ledger: Ledger) -> _Json:
    return {
        "generation": ledger.generation,
        "allotted": dict(ledger.allotted),
        "lost": dict(ledger.lost),
        "failures": ledger.failures,
        "repeated": ledger.repeated,
        "layout": ledger.layout and ledger.layout.to_json(),
        "memory_limit": ledger.memory_limit,
    }


def _ledger(data: _Json) -> Ledger:
    return Ledger(
        generation=data["generation"],
        allotted=_devices(data["allotted"]),
        lost=_devices(data["lost"]),
        failures=data["failures"],
        repeated=tuple(data["repeated"]),
        layout=None if data["layout"] is None else ParallelLayout.from_json(data["layout"]),
        memory_limit=data["memory_limit"],
    )


def _devices(data: Mapping[str, list[int]]) -> dict[str, tuple[int, ...]]:
    return {node: tuple(devices) for node, devices in data.items()}


def _source_json(source: Source | None) -> _Json | None:
    if source is None:
        return None
    nodes = {str(rank): node for rank, node in source.nodes.items()}
    return {
        "version": source.version,
        "generation": source.generation,
        "world_size": source.world_size,
        "nodes": nodes,
    }


def _source(data: _Json | None) -> Source | None:
    if data is None:
        return None
    nodes = {int(rank): node for rank, node in data["nodes"].items()}
    return Source(data["version"], data["generation"], data["world_size"], nodes)
