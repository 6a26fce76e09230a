"""What does a worker know about the generation it belongs to?

The agent writes it as JSON into one environment variable; nothing else is handed to workers.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.elastic.records import Source

__all__ = ["ENVIRONMENT_VARIABLE", "GenerationSpec"]

ENVIRONMENT_VARIABLE = "TENPLEX_GENERATION"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """One generation, as the workers of one node see it."""

    job: str
    identity: str
    """Fingerprint of what is trained; a store with another one belongs to another training."""
    generation: int
    cause: str
    layout: ParallelLayout
    gpus: int
    """Devices the job may use; the layout may use fewer."""
    node: str
    nodes: tuple[str, ...]
    """Node of every rank."""
    store: Path
    policy: Path
    rundir: Path
    control: Path
    """Folder through which rank 0 and its agent speak, new for every generation."""
    source: Source | None
    times: Mapping[str, float] = field(default_factory=dict)
    """Unix times of event, detected, stopped and started of the change that led here."""

    def to_json(self) -> str:
        """The text for the environment variable."""
        values = {
            "job": self.job,
            "identity": self.identity,
            "generation": self.generation,
            "cause": self.cause,
            "layout": self.layout.to_json(),
            "gpus": self.gpus,
            "node": self.node,
            "nodes": self.nodes,
            "store": str(self.store),
            "policy": str(self.policy),
            "rundir": str(self.rundir),
            "control": str(self.control),
            "source": None if self.source is None else asdict(self.source),
            "times": dict(self.times),
        }
        return json.dumps(values, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The generation `to_json` wrote."""
        values = json.loads(text)
        source = values["source"]
        if source is not None:
            source["nodes"] = {int(rank): node for rank, node in source["nodes"].items()}
        values["layout"] = ParallelLayout.from_json(values["layout"])
        values["nodes"] = tuple(values["nodes"])
        for name in ("store", "policy", "rundir", "control"):
            values[name] = Path(values[name])
        values["source"] = None if source is None else Source(**source)
        return cls(**values)

    @classmethod
    def from_environment(cls) -> Self | None:
        """The generation of this process, None when no agent started it."""
        text = os.environ.get(ENVIRONMENT_VARIABLE)
        return None if text is None else cls.from_json(text)
