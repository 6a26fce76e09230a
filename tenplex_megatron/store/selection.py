"""Which version does the next generation start from?

The newest whose every byte is there and verifies. A damaged version is named and the next older is
tried; nothing here touches a file: inventories come in, the check is the caller's.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tenplex_megatron.store.base import RankSnapshot
from tenplex_megatron.store.values import PlainValue

__all__ = ["RejectedVersion", "Selection", "WorldVersion", "select_version", "world_versions"]


@dataclass(frozen=True, slots=True)
class WorldVersion:
    """One version over all nodes: who holds which rank of it, and which ranks nobody holds."""

    generation: int
    version: int
    world_size: int
    layout: Mapping[str, PlainValue]
    holders: Mapping[int, tuple[str, ...]]
    committed: bool
    contradictions: tuple[str, ...] = ()
    """Where nodes disagree about this version; it is never taken then."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of that world without an index on any node."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.holders)

    @property
    def complete(self) -> bool:
        """Whether every rank of that world is held somewhere."""
        return not self.missing

    @property
    def nodes(self) -> dict[int, str]:
        """One node for each held rank."""
        return {rank: names[0] for rank, names in self.holders.items()}


@dataclass(frozen=True, slots=True)
class RejectedVersion:
    """A newer version that was not taken, and all reasons."""

    candidate: WorldVersion
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """The version to start from, if there is one, and the newer ones that were refused."""

    chosen: WorldVersion | None
    rejected: tuple[RejectedVersion, ...]


def world_versions(
    inventories: Mapping[str, Sequence[RankSnapshot]],
) -> tuple[WorldVersion, ...]:
    """All versions any node holds something of, the newest first.

    A newer generation comes first even where its version is lower: it went on from the version
    that was chosen then, so it is the job's history.
    """
    groups: dict[tuple[int, int], list[tuple[str, RankSnapshot]]] = defaultdict(list)
    for node in sorted(inventories):
        for held in inventories[node]:
            groups[held.generation, held.version].append((node, held))
    return tuple(_merge(groups[key]) for key in sorted(groups, reverse=True))


def select_version(
    inventories: Mapping[str, Sequence[RankSnapshot]],
    check: Callable[[WorldVersion], Sequence[str]],
    *,
    allow_missing: bool = False,
) -> Selection:
    """The newest version that `check` finds nothing wrong with.

    Args:
        inventories: Node name -> what that node holds.
        check: Verifies every byte of a candidate; returns a sentence per damage, naming it.
        allow_missing: Also offer versions of which some ranks are held nowhere (their node is
            lost); `check` must then also prove that the others hold every box.
    """
    rejected: list[RejectedVersion] = []
    for candidate in world_versions(inventories):
        reasons = candidate.contradictions
        if candidate.missing and not allow_missing:
            reasons = (*reasons, f"no node holds ranks {candidate.missing}")
        if not reasons:
            reasons = tuple(check(candidate))
        if not reasons:
            return Selection(candidate, tuple(rejected))
        rejected.append(RejectedVersion(candidate, reasons))
    return Selection(None, tuple(rejected))


def _merge(entries: Sequence[tuple[str, RankSnapshot]]) -> WorldVersion:
    ordered = sorted(entries, key=lambda entry: (entry[1].rank, entry[0]))
    first_node, first = ordered[0]
    holders: dict[int, tuple[str, ...]] = {}
    digests: dict[int, str] = {}
    contradictions: list[str] = []
    for node, held in ordered:
        holders[held.rank] = (*holders.get(held.rank, ()), node)
        if (held.world_size, held.layout) != (first.world_size, first.layout):
            contradictions.append(
                f"rank {held.rank} on {node} is of {held.world_size} ranks in {held.layout}, rank "
                f"{first.rank} on {first_node} of {first.world_size} in {first.layout}"
            )
        if digests.setdefault(held.rank, held.digest) != held.digest:
            contradictions.append(f"rank {held.rank} differs on {holders[held.rank]}")
    return WorldVersion(
        generation=first.generation,
        version=first.version,
        world_size=first.world_size,
        layout=first.layout,
        holders=holders,
        committed=any(held.committed for _, held in entries),
        contradictions=tuple(contradictions),
    )
