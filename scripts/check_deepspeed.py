#!/usr/bin/env python3
"""Does the live state of a DeepSpeed job survive every change of ZeRO stage, world and layout?

Real engines on CPU with gloo.  Each source trains 3 steps, takes a snapshot and trains on; each
target starts from other weights, imports the snapshot and trains on.  A pair is exact when every
fp32 master, moment, buffer and frozen weight has the same bits after the import, and the next 5
losses are those of the source within 2e-5 (16-bit: the bits are the same, and the next loss is
near).
"""

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from deepspeed_engines import OPTIMIZERS
from deepspeed_models import Job
from deepspeed_worlds import AFTER, Outcome, run_sources, run_targets

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.testing.spawn import RankError, run_ranks

__all__ = ["PRELOAD", "Check", "Pair", "Report", "all_checks", "run_check"]

type Pair = tuple[Job, Job]

TIMEOUT_S = 600.0
say = functools.partial(print, file=sys.stderr, flush=True)  # progress, apart from the result
PRELOAD = (
    "deepspeed.runtime.engine",
    "deepspeed.runtime.pipe.engine",
    # DeepSpeed imports it at the first start of an engine, with all of torch's compiler.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    # With tensor parallelism it asks whether inputs are of this package, where it is installed.
    "transformers.cache_utils",
    "tenplex_megatron.adapters.deepspeed.state",
)
"""What the ranks have imported when they are forked."""
STAGES, WORLDS = range(4), range(1, 5)


@dataclass(frozen=True)
class Check:
    """Pairs that must be exact; `tolerance` is that of the first `steps` losses."""

    title: str
    pairs: tuple[Pair, ...]
    tolerance: float = 2e-5
    steps: int = AFTER


@dataclass(frozen=True)
class Report:
    """What a check found: reasons by pair, and the largest difference of a loss."""

    check: Check
    failed: dict[str, str]
    largest_difference: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Counts and seconds."""
        return {
            "pairs": len(self.check.pairs),
            "exact": len(self.check.pairs) - len(self.failed),
            "tolerance": self.check.tolerance,
            "largest_difference": self.largest_difference,
            "seconds": round(self.seconds, 1),
        }


def all_checks(*, quick: bool, compiled: bool = False) -> tuple[Check, ...]:
    """Every check; quick ones cover every pair of stages and every pair of worlds once.

    DeepSpeed compiles its own optimizers at their first use, for minutes.
    """
    if compiled:
        return tuple(
            Check(f"{own} {precision}", _optimizer_pairs({own, other}, precision), *exactness)
            for own, other in (("cpu-adam", "adamw"), ("fused-adam", "cpu-adam"))
            for precision, exactness in (("fp32", ()), ("bf16", (0.02, 1)))
        )
    return (
        Check("ZeRO fp32", _zero_pairs("fp32", quick=quick)),
        Check("ZeRO bf16", _zero_pairs("bf16", quick=quick), 0.02, 1),
        Check("ZeRO fp16", _zero_pairs("fp16", quick=True), 0.02, 1),
        Check("BF16 optimizer", _bf16_optimizer_pairs(), 0.02, 1),
        Check("optimizers", _torch_pairs(quick=quick)),
        Check("pipelines", _pipeline_pairs(quick=quick)),
        Check("tensor parallel", _tensor_pairs(quick=quick)),
        Check("experts", _expert_pairs(quick=quick)),
    )


def _zero(stage: int, world: int, **more: str) -> Job:
    return Job(ParallelLayout(dp=world, zero_stage=stage), **more)


def _zero_pairs(precision: str, *, quick: bool) -> tuple[Pair, ...]:
    kinds = tuple(itertools.product(STAGES, WORLDS))
    return tuple(
        (_zero(*source, precision=precision), _zero(*target, precision=precision))
        for source, target in itertools.product(kinds, kinds)
        # One target per source: its stage and world are swapped, which covers both kinds of pairs.
        if not quick or target == (source[1] - 1, source[0] + 1)
    )


def _bf16_optimizer_pairs() -> tuple[Pair, ...]:
    """Stage 1 with gradients in fp32, which has an optimizer class of its own."""
    own = [_zero(1, world, precision="bf16-fp32-grads") for world in (2, 3)]
    others = [_zero(stage, 2, precision="bf16") for stage in (0, 2, 3)]
    return (
        (own[0], own[1]),
        *((other, own[1]) for other in others),
        *((own[1], other) for other in others),
    )


def _torch_pairs(*, quick: bool) -> tuple[Pair, ...]:
    """Every optimizer of torch from every stage to every stage; quick: from one to one."""
    every = [_optimizer_pairs({name}, "fp32") for name in OPTIMIZERS]
    if quick:
        every = [pairs[5 * number % len(pairs) :][:1] for number, pairs in enumerate(every)]
    return tuple(itertools.chain.from_iterable(every))


def _optimizer_pairs(names: Collection[str], precision: str) -> tuple[Pair, ...]:
    """Each of some optimizers from every stage to every stage of each."""
    kinds = sorted(itertools.product(STAGES, names))
    one, other = (
        [_zero(stage, world, precision=precision, optimizer=name) for stage, name in kinds]
        for world in (2, 3)
    )
    return tuple(itertools.product(one, other))


def _pipeline_pairs(*, quick: bool) -> tuple[Pair, ...]:
    """Two stages to one to three, and back; uneven stages, tied layers, several replicas."""
    shapes = ({"pp": 2}, {"pp": 1, "dp": 3}, {"pp": 3}, {"pp": 2, "dp": 2}, {"pp": 1})
    return _rings("pipeline", shapes, ((0, 1, 1, 0, 1), (0,) * 5, (1,) * 5), quick=quick)


def _tensor_pairs(*, quick: bool) -> tuple[Pair, ...]:
    """Two ranks to one to four, and back; fused and uneven layers, with and without ZeRO."""
    shapes = ({"tp": 2}, {"tp": 1}, {"tp": 4}, {"tp": 2, "dp": 2})
    return _rings("split", shapes, ((1, 3, 0, 3), (0,) * 4, (1,) * 4, (3,) * 4), quick=quick)


def _expert_pairs(*, quick: bool) -> tuple[Pair, ...]:
    """Four experts over one, two and four ranks, with and without replicas."""
    shapes = ({"ep": 2, "dp": 2}, {"ep": 1}, {"ep": 4, "dp": 4}, {"ep": 2, "dp": 4})
    return _rings("mixture", shapes, ((1, 2, 0, 2), (0,) * 4, (1,) * 4), quick=quick)


def _rings(
    model: str,
    shapes: Sequence[dict[str, int]],
    stages: Sequence[Sequence[int]],
    *,
    quick: bool,
) -> tuple[Pair, ...]:
    """From every shape to the next one and from the last to the first, with these ZeRO stages."""
    pairs = []
    for row in stages[:1] if quick else stages:
        jobs = [
            Job(ParallelLayout(**shape, zero_stage=stage), model=model)
            for shape, stage in zip(shapes, row, strict=True)
        ]
        pairs.extend(itertools.pairwise([*jobs, jobs[0]]))
    return tuple(pairs)


def run_check(check: Check, folder: Path) -> Report:
    """Train all sources of a check, then import them into all targets."""
    started = time.monotonic()
    failed: dict[str, str] = {}
    sources: dict[Job, Outcome] = {}
    for world, jobs in _by_world(source for source, _ in check.pairs):
        try:
            rows = run_ranks(run_sources, world, TIMEOUT_S, folder, jobs)
        except (RankError, TimeoutError) as error:
            lost = [pair for pair in check.pairs if pair[0] in jobs]
            failed.update({name_of(pair): f"source: {first_line(error)}" for pair in lost})
            continue
        sources.update(zip(jobs, rows[0], strict=True))
        say(f"{check.title}: {len(jobs)} sources of {world} ranks have trained")
    largest = 0.0
    for world, jobs in _by_world(target for _, target in check.pairs):
        pairs = [pair for pair in check.pairs if pair[1] in jobs and pair[0] in sources]
        try:
            rows = run_ranks(run_targets, world, TIMEOUT_S, folder, pairs, check.steps)
        except (RankError, TimeoutError) as error:
            failed.update({name_of(pair): first_line(error) for pair in pairs})
            continue
        for pair, outcome in zip(pairs, rows[0], strict=True):
            difference = difference_of(sources[pair[0]], outcome)
            largest = max(largest, difference)
            reason = reason_of(sources[pair[0]], outcome)
            if reason is None and not difference <= check.tolerance:
                reason = f"losses differ by {difference:.2g}"
            if reason is not None:
                failed[name_of(pair)] = reason
        say(f"{check.title}: {len(pairs)} imports into {world} ranks, {len(failed)} failed")
    return Report(check, failed, largest, time.monotonic() - started)


def _by_world(jobs: Iterator[Job]) -> Iterator[tuple[int, list[Job]]]:
    """Jobs that the same processes can run one after the other: DeepSpeed's groups are global."""

    def world(job: Job) -> tuple[int, ...]:
        layout = job.layout
        return layout.world_size, layout.tp, layout.pp, layout.ep

    unique = sorted(set(jobs), key=lambda job: (world(job), job.name))
    for key, group in itertools.groupby(unique, key=world):
        yield key[0], list(group)


def name_of(pair: Pair) -> str:
    """A pair, for a person."""
    return f"{pair[0].name} -> {pair[1].name}"


def difference_of(source: Outcome, target: Outcome) -> float:
    """The largest difference of a loss, over the steps that both have."""
    return max(abs(a - b) for a, b in zip(source.losses, target.losses, strict=False))


def reason_of(source: Outcome, target: Outcome) -> str | None:
    """Which tensors are not the same bits, or which loss scale; None when all are right."""
    names = sorted(source.fingerprint.keys() | target.fingerprint.keys())
    wrong = [name for name in names if source.fingerprint.get(name) != target.fingerprint.get(name)]
    if wrong:
        return f"{len(wrong)} of {len(names)} tensors differ: {', '.join(wrong[:5])}"
    if source.scale != target.scale:
        return f"loss scale {target.scale} instead of {source.scale}"
    return None


def first_line(error: Exception) -> str:
    """What an error says, without the traceback of its rank."""
    return str(error).partition("\n")[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks in a folder of their own on tmpfs, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="examples:\n  scripts/check_deepspeed.py --quick\n"
        "  scripts/check_deepspeed.py --json > check.json\n"
        "  TORCH_EXTENSIONS_DIR=/tmp/extensions scripts/check_deepspeed.py --compiled\n\n"
        "The last one needs g++ and ninja, and several minutes the first time.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a covering subset of the pairs")
    parser.add_argument(
        "--compiled", action="store_true", help="DeepSpeed's own optimizers instead; see below"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument(
        "--only", metavar="TITLE", default="", help="checks whose title holds this text"
    )
    given = parser.parse_args(argv)
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    forkserver.ensure_running()
    folder = Path(tempfile.mkdtemp(prefix="tenplex-check-", dir="/dev/shm"))
    try:
        every = all_checks(quick=given.quick, compiled=given.compiled)
        chosen = [one for one in every if given.only in one.title]
        reports = [run_check(check, folder / check.title.replace(" ", "-")) for check in chosen]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    failed = {name: why for report in reports for name, why in report.failed.items()}
    pairs = sum(len(report.check.pairs) for report in reports)
    result = {
        "pairs": pairs,
        "exact": pairs - len(failed),
        "failed": failed,
        "checks": {report.check.title: report.to_json() for report in reports},
    }
    print(json.dumps(result, indent=None if given.json else 2))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
