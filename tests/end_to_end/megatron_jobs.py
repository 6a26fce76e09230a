"""Runs a Megatron job in legs of different layouts, without agents: each leg is one generation.

Processes are forked from a server that has imported Megatron, as `tenplex run` does it.
"""

import importlib
import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tenplex_megatron.adapters.megatron.arguments import MegatronArguments
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.elastic.generation import GenerationSpec
from tenplex_megatron.elastic.records import HANDED_OVER, Source
from tenplex_megatron.elastic.report import Run, read_run, read_samples
from tenplex_megatron.store.shared import SnapshotStore
from tests.end_to_end.tiny_gpt import GLOBAL_BATCH_SIZE, tiny_gpt_flags

SCRIPT = Path(__file__).parents[2] / "scripts/pretrain_gpt.py"
ANOTHER_NUMBER = 99
"""Devices the schedule asks for, so that every leg but the last hands over."""
TIMEOUT_S = 240


@dataclass(frozen=True)
class Job:
    """One training job and where it leaves its traces."""

    folder: Path
    store: Path
    data: Path
    steps: int
    flags: tuple[str, ...] = ()

    def model_flags(self) -> list[str]:
        """Megatron's flags without a layout."""
        return [*tiny_gpt_flags(self.data, steps=self.steps), *self.flags]

    def run(self, legs: Sequence[tuple[str, int]]) -> Run:
        """Train in legs of (layout, last step); every leg imports what the one before left."""
        self.folder.mkdir(mode=0o700)
        layouts = [ParallelLayout.parse(text) for text, _ in legs]
        source = None
        for number, (layout, (_, until)) in enumerate(zip(layouts, legs, strict=True), start=1):
            last = number == len(legs)
            spec = self.spec(number, layout, until, source=source, last=last)
            codes = self.generation(spec, layouts)
            expected = 0 if last else HANDED_OVER
            assert codes == [expected] * layout.world_size, self.errors(number)
            nodes = dict.fromkeys(range(layout.world_size), "here")
            source = Source(until, number, layout.world_size, nodes)
        return read_run([self.folder])

    def samples(self, run: Run) -> dict[int, tuple[int, ...]]:
        """Step -> ids of its global batch."""
        return read_samples(self.folder, run, batch_size=GLOBAL_BATCH_SIZE)

    def final_progress(self) -> dict[str, Any]:
        """What rank 0 wrote with its last snapshot."""
        store = SnapshotStore(self.store, "test", "test").open_existing()
        return store.reader(self.steps).progress(0)

    def spec(
        self, number: int, layout: ParallelLayout, until: int, *, source: Source | None, last: bool
    ) -> GenerationSpec:
        """What an agent would tell the workers of generation `number`."""
        policy = self.folder / f"policy-{number}.yaml"
        values = {
            "device": "cpu",
            "snapshot": {"every_steps": 1},
            "schedule": {} if last else {until: ANOTHER_NUMBER},
            "audit": {"samples": True, "state": True},
        }
        policy.write_text(yaml.safe_dump(values))
        control = self.folder / f"control-{number}"
        control.mkdir()
        return GenerationSpec(
            job="test",
            identity="test",
            generation=number,
            cause="test",
            layout=layout,
            gpus=layout.world_size,
            node="here",
            nodes=("here",) * layout.world_size,
            store=self.store,
            policy=policy,
            rundir=self.folder,
            control=control,
            source=source,
        )

    def generation(self, spec: GenerationSpec, allowed: Sequence[ParallelLayout]) -> list[int]:
        """Run one generation; the exit codes of its ranks."""
        arguments = MegatronArguments()
        flags = self.model_flags()
        argv = [
            *flags,
            *arguments.device_arguments("cpu"),
            *arguments.layout_arguments(flags, spec.layout, allowed),
        ]
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        context = multiprocessing.get_context("forkserver")
        processes = [
            context.Process(target=train_rank, args=(spec.to_json(), rank, port, argv))
            for rank in range(spec.layout.world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(TIMEOUT_S)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        _note_decision(spec)
        return [-1 if code is None else code for code in codes]

    def errors(self, number: int) -> str:
        """The ends of what the ranks of a generation wrote."""
        logs = sorted(self.folder.glob(f"rank-{number}-*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in logs)


def _note_decision(spec: GenerationSpec) -> None:
    """What an agent would have noted, for the report."""
    from tenplex_megatron.elastic.events import EventLog

    version = None if spec.source is None else spec.source.version
    EventLog(spec.rundir / "events.jsonl", spec.node).append(
        "decided", spec.generation, layout=str(spec.layout), version=version, cause=spec.cause
    )


def train_rank(text: str, rank: int, port: int, argv: list[str]) -> None:
    """Body of one process."""
    spec = GenerationSpec.from_json(text)
    log = os.open(
        spec.rundir / f"rank-{spec.generation}-{rank}.log", os.O_WRONLY | os.O_CREAT, 0o600
    )
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(len(spec.nodes)),
        "LOCAL_WORLD_SIZE": str(len(spec.nodes)),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    importlib.import_module("tenplex_megatron.cpu").install()
    session = importlib.import_module("tenplex_megatron.elastic.session")
    session.install(spec)
    sys.argv = [str(SCRIPT), *argv]
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert session.was_used()
