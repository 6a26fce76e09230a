"""Given who is alive and what they hold, what does the next generation look like?

Pure: `decide` maps the ledger of the job, the change that ended a generation, and one report per
node to the next generation, or to the end of the job. The same arguments give the same answer on
every node; nothing here reads a clock, a file or the environment.
"""

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tenplex_megatron.config import ElasticPolicy
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.elastic.records import (
    HANDED_OVER,
    SNAPSHOT_DAMAGED,
    WRONG_INPUT,
    Change,
    Ending,
    Ledger,
    NextGeneration,
    NodeReport,
    Source,
    WorkerExit,
)
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.allowed import Job
from tenplex_megatron.planner.choose import Choice, Outlook, choose, placement_of
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.moves import Placement
from tenplex_megatron.planner.placement import pick_devices
from tenplex_megatron.planner.search import evaluate
from tenplex_megatron.store.selection import WorldVersion, select_version

__all__ = ["Rules", "check_target", "culprits", "decide", "newest_complete"]

_OUT_OF_MEMORY = "out of memory"
"""In the message of torch's OutOfMemoryError."""
_SMALLER = 0.02
"""By so much a layout must be smaller than one that ran out of memory."""
_FAILURE_WINDOW_S = 1.0
_SAME_FAILURES = 3
# Before anything was trained, a script that fails twice is to blame, and not two devices.
_SAME_FAILURES_AT_FIRST = 2
# Peers of a dead process raise an exception or abort; only what nobody does to itself is a cause.
_CONSEQUENCES = (-int(signal.SIGABRT), -int(signal.SIGTERM))
_FROM_OUTSIDE = (-int(signal.SIGKILL), -int(signal.SIGTERM))


@dataclass(frozen=True, slots=True)
class Rules:
    """What does not change during a job."""

    policy: ElasticPolicy
    job: Job
    cluster: ClusterProfile

    def choose(
        self,
        devices: Mapping[str, tuple[int, ...]],
        *,
        current: Placement | None = None,
        memory_limit: float | None = None,
        must_run: bool = False,
    ) -> Choice:
        """The layout for these devices, of less than `memory_limit`; see `planner.choose`.

        Raises:
            ConfigError: none is legal, or none fits.
        """
        planner, cluster = self.policy.planner, self.cluster
        if memory_limit is not None:
            cluster = replace(cluster, memory_bytes=min(cluster.memory_bytes, memory_limit))
        return choose(
            self.job,
            cluster,
            devices,
            current=current,
            outlook=Outlook(next_change_s=planner.next_change_s, least_gain=planner.least_gain),
            must_run=must_run,
        )

    def memory_bytes(self, layout: ParallelLayout) -> float | None:
        """What a layout is predicted to need per device; None of an unknown model."""
        if self.job.model is None:
            return None
        found = evaluate(self.job.model, self.cluster, [self.job.strategy(layout)])
        return float(found.memory_bytes[0])


def decide(
    ledger: Ledger, change: Change, reports: Sequence[NodeReport], rules: Rules
) -> NextGeneration | Ending:
    """The next generation after `change`, or why there is none.

    Raises:
        ConfigError: the policy allows no layout for the devices that are left.
    """
    before = ledger
    wrong = _wrong_input(change, reports)
    if wrong:
        return Ending(WRONG_INPUT, wrong)
    totals = {report.node: report.devices for report in sorted(reports, key=lambda r: r.node)}
    source = newest_complete(reports)
    gone = sorted(set(ledger.allotted) - set(totals))
    if gone and change.kind == "failure":
        change = replace(change, cause=f"lost {', '.join(gone)}; first seen: {change.cause}")
    failed = culprits(reports, only_kills=change.kind != "failure" or bool(gone))
    ledger = _number(ledger, reports)
    if change.kind == "start":
        _check_schedule(totals, rules)
    if change.kind == "failure":
        ledger = _count_failure(ledger, failed, source)
        ending = _exhausted(ledger, change, rules.policy)
        if ending is not None:
            return ending
    ledger = _blame(ledger, failed, rules)
    ledger = _allot(ledger, change, totals, rules.policy)
    if not ledger.gpus:
        return Ending(1, f"no device is left; last: {change.cause}")
    # What trained before the change would go on if its devices were all there: it is kept unless
    # another layout is worth the move. A generation that never trained holds nothing to move.
    lies_in_last = source is not None and source.generation == before.generation
    current = None
    if lies_in_last and source is not None and before.layout is not None:
        nodes = {rank: node for rank, node in source.nodes.items() if node in totals}
        current = placement_of(rules.job.strategy(before.layout), nodes)
    try:
        chosen = rules.choose(
            ledger.allotted,
            current=current,
            memory_limit=ledger.memory_limit,
            # Whoever has trained already must not be stopped by a prediction.
            must_run=change.kind != "start" or source is not None,
        )
    except ConfigError as error:
        raise ConfigError(f"{error} (after: {change.cause}){_kept(source)}") from None
    layout = rules.job.layout(chosen.best.strategy)
    return NextGeneration(
        replace(ledger, layout=layout),
        change,
        layout,
        chosen.best.ranks,
        source,
        chosen.reason,
        chosen.best.step_s if rules.job.model is not None else None,
        _why_not(rules.job, chosen),
        totals,
    )


def _kept(source: Source | None) -> str:
    if source is None:
        return ""
    return f"; the snapshot of step {source.version} is kept: start the job again under its name"


def _why_not(job: Job, chosen: Choice) -> tuple[tuple[str, str], ...]:
    others = ((str(job.layout(other.strategy)), why) for other, why in chosen.runners_up)
    return (*chosen.illegal, *others)


def check_target(gpus: int, totals: Mapping[str, int], rules: Rules) -> ParallelLayout:
    """The layout a planned change to `gpus` devices would choose.

    Raises:
        ConfigError: there are not so many devices, or no layout fits them.
    """
    total = sum(totals.values())
    if not 1 <= gpus <= total:
        raise ConfigError(
            f"expected 1 to {total} devices ({', '.join(f'{n}: {c}' for n, c in totals.items())}), "
            f"got {gpus}"
        )
    devices = {node: tuple(range(count)) for node, count in totals.items()}
    return rules.job.layout(rules.choose(pick_devices(devices, gpus)).best.strategy)


def newest_complete(reports: Iterable[NodeReport]) -> Source | None:
    """The newest version of which the reports hold every rank's part.

    A committed version with missing parts is better than none: replicas may cover it, and the plan
    of the exchange refuses it where they do not.
    """
    held = {report.node: report.snapshots for report in reports}
    best = (
        select_version(held, lambda _: ()).chosen
        or select_version(held, _uncommitted, allow_missing=True).chosen
    )
    if best is None:
        return None
    return Source(best.version, best.generation, best.world_size, best.nodes)


def _uncommitted(version: WorldVersion) -> tuple[str, ...]:
    return () if version.committed else ("no node knows it as committed",)


def culprits(
    reports: Iterable[NodeReport], *, only_kills: bool = False
) -> tuple[tuple[str, WorkerExit], ...]:
    """The processes that failed by themselves, not because a peer did.

    Processes killed within a second of the first failure are all causes. Without one, only the
    first failure is: the others saw its connection break. Where peers leave at slightly different
    times, or a whole node is gone, exceptions mean nothing and `only_kills` count.
    """
    exits = sorted(
        (
            (report.node, done)
            for report in reports
            for done in report.exits
            if done.code not in (0, HANDED_OVER, SNAPSHOT_DAMAGED)
        ),
        key=lambda item: (item[1].time, item[0], item[1].rank),
    )
    if not exits:
        return ()
    window = exits[0][1].time + _FAILURE_WINDOW_S
    killed = tuple(
        item
        for item in exits
        if item[1].code < 0 and item[1].code not in _CONSEQUENCES and item[1].time <= window
    )
    if killed or only_kills:
        return killed
    return (exits[0],)


def _wrong_input(change: Change, reports: Iterable[NodeReport]) -> str:
    """What is wrong, if a worker said so; a peer that lost its connection may have ended first."""
    if change.kind == "invalid":
        return change.cause
    told = sorted(
        (done.time, done.rank, done.message)
        for report in reports
        for done in report.exits
        if done.code == WRONG_INPUT and change.kind == "failure"
    )
    return (told[0][2] or change.cause) if told else ""


def _check_schedule(totals: Mapping[str, int], rules: Rules) -> None:
    """What can't be done hours later is refused now."""
    for step, gpus in sorted(rules.policy.schedule.items()):
        try:
            check_target(gpus, totals, rules)
        except ConfigError as error:
            where = rules.policy.place(f"schedule.{step}")
            if rules.job.layouts and gpus <= sum(totals.values()):
                where += f" contradicts {rules.policy.place('layouts')}"
            raise ConfigError(f"{where}: {error}") from None


def _number(ledger: Ledger, reports: Iterable[NodeReport]) -> Ledger:
    """Generations of an earlier run of the job count too: their files must stay apart."""
    seen = [part.generation for report in reports for part in report.snapshots]
    return replace(ledger, generation=max([ledger.generation, *seen]) + 1)


def _count_failure(
    ledger: Ledger, failed: Sequence[tuple[str, WorkerExit]], source: Source | None
) -> Ledger:
    code = failed[0][1].code if failed else 0
    version = source.version if source else -1
    alike = ledger.repeated[:2] == (version, code)
    count = 0 if code in _FROM_OUTSIDE else ledger.repeated[2] + 1 if alike else 1
    return replace(ledger, failures=ledger.failures + 1, repeated=(version, code, count))


def _exhausted(ledger: Ledger, change: Change, policy: ElasticPolicy) -> Ending | None:
    version, code, count = ledger.repeated
    if count >= (_SAME_FAILURES if version >= 0 else _SAME_FAILURES_AT_FIRST):
        where = f"after step {version}" if version >= 0 else "before the first snapshot"
        return Ending(
            1, f"{count} generations failed {where} with exit code {code}; last: {change.cause}"
        )
    if ledger.failures > policy.max_failures:
        return Ending(
            1,
            f"{ledger.failures} failures, the policy allows {policy.max_failures} "
            f"(max_failures); last: {change.cause}",
        )
    return None


def _blame(ledger: Ledger, failed: Sequence[tuple[str, WorkerExit]], rules: Rules) -> Ledger:
    """Give up what is at fault: the size of the layout that ran out of memory, or devices."""
    if any(_OUT_OF_MEMORY in done.message for _, done in failed):
        needed = rules.memory_bytes(ledger.layout) if ledger.layout is not None else None
        return replace(ledger, memory_limit=needed and needed * (1 - _SMALLER))
    return _lose(ledger, failed) if rules.policy.failed_device == "drop" else ledger


def _lose(ledger: Ledger, failed: Iterable[tuple[str, WorkerExit]]) -> Ledger:
    lost = {node: set(devices) for node, devices in ledger.lost.items()}
    for node, done in failed:
        lost.setdefault(node, set()).add(done.device)
    allotted = {
        node: tuple(device for device in devices if device not in lost.get(node, ()))
        for node, devices in ledger.allotted.items()
    }
    return replace(
        ledger,
        lost={node: tuple(sorted(devices)) for node, devices in sorted(lost.items())},
        allotted=allotted,
    )


def _allot(
    ledger: Ledger, change: Change, totals: Mapping[str, int], policy: ElasticPolicy
) -> Ledger:
    """Which devices the job may use now, over the nodes that are here."""
    lost = {node: devices for node, devices in ledger.lost.items() if node in totals and devices}
    wanted = policy.schedule.get(0) if change.kind == "start" else None
    if change.kind == "planned":
        wanted = change.gpus
    if change.kind != "start" and wanted is None:
        kept = {node: ledger.allotted.get(node, ()) for node in totals}
        return replace(ledger, lost=lost, allotted=kept)
    if wanted is not None and wanted > sum(totals.values()) - sum(map(len, lost.values())):
        lost = {}
    free = {
        node: tuple(device for device in range(count) if device not in lost.get(node, ()))
        for node, count in totals.items()
    }
    return replace(ledger, lost=lost, allotted=pick_devices(free, wanted))
