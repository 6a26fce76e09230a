import dataclasses
import itertools
import random

import pytest

from tenplex_megatron.store import RankSnapshot, WorldVersion, select_version, world_versions


def held(
    version: int, rank: int, *, world_size: int = 2, generation: int = 1, committed: bool = True
) -> RankSnapshot:
    return RankSnapshot(generation, version, rank, world_size, {"dp": 1}, committed, 8, "d")


def nothing_wrong(_: WorldVersion) -> tuple[str, ...]:
    return ()


def test_the_newest_complete_version_is_chosen() -> None:
    inventories = {"a": [held(10, 0), held(20, 0)], "b": [held(10, 1), held(20, 1)]}
    selection = select_version(inventories, nothing_wrong)
    assert selection.chosen is not None
    assert selection.chosen.version == 20
    assert selection.chosen.complete
    assert selection.chosen.nodes == {0: "a", 1: "b"}
    assert selection.rejected == ()


def test_a_version_that_one_rank_has_not_finished_is_skipped_with_the_rank() -> None:
    inventories = {"a": [held(10, 0), held(20, 0)], "b": [held(10, 1)]}
    selection = select_version(inventories, nothing_wrong)
    assert selection.chosen is not None
    assert selection.chosen.version == 10
    assert [r.reasons for r in selection.rejected] == [("no node holds ranks (1,)",)]


def test_a_damaged_version_is_named_and_the_older_is_used() -> None:
    inventories = {"a": [held(v, r) for v in (10, 20, 30) for r in (0, 1)]}
    damage = {30: ("weight is damaged",), 20: (), 10: ()}
    selection = select_version(inventories, lambda candidate: damage[candidate.version])
    assert selection.chosen is not None
    assert selection.chosen.version == 20
    assert selection.rejected[0].candidate.version == 30
    assert selection.rejected[0].reasons == ("weight is damaged",)


def test_nothing_is_chosen_when_every_version_is_damaged() -> None:
    inventories = {"a": [held(v, r) for v in (10, 20) for r in (0, 1)]}
    selection = select_version(inventories, lambda _: ("damaged",))
    assert selection.chosen is None
    assert [r.candidate.version for r in selection.rejected] == [20, 10]
    assert select_version({}, nothing_wrong).chosen is None


def test_a_newer_generation_comes_before_a_higher_version() -> None:
    """Generation 2 went on from 10 since 20 was damaged: its 15 is the job's history."""
    inventories = {
        "a": [held(20, r) for r in (0, 1)] + [held(15, 0, world_size=1, generation=2)],
    }
    chosen = select_version(inventories, nothing_wrong).chosen
    assert chosen is not None
    assert (chosen.generation, chosen.version, chosen.world_size) == (2, 15, 1)


def test_a_lost_node_is_offered_only_when_asked_for() -> None:
    inventories = {"a": [held(10, 0)]}
    assert select_version(inventories, nothing_wrong).chosen is None
    offered: list[WorldVersion] = []

    def covered(candidate: WorldVersion) -> tuple[str, ...]:
        offered.append(candidate)
        return ()

    chosen = select_version(inventories, covered, allow_missing=True).chosen
    assert chosen == offered[0]
    assert chosen.missing == (1,)
    assert not chosen.complete
    assert chosen.committed


def test_all_holders_of_a_rank_are_kept_in_order() -> None:
    inventories = {"b": [held(10, 0)], "a": [held(10, 0), held(10, 1, committed=False)]}
    (found,) = world_versions(inventories)
    assert found.holders == {0: ("a", "b"), 1: ("a",)}
    assert found.committed


def test_nodes_that_contradict_each_other_are_named_and_the_older_is_used() -> None:
    good = [held(10, 0), held(10, 1)]
    other_world = {"a": [*good, held(20, 0)], "b": [held(20, 1, world_size=4)]}
    selection = select_version(other_world, nothing_wrong)
    assert selection.chosen is not None
    assert selection.chosen.version == 10
    assert "rank 1 on b is of 4 ranks" in selection.rejected[0].reasons[0]
    changed = dataclasses.replace(held(20, 1), digest="e")
    other_bytes = {"a": [*good, held(20, 0), held(20, 1)], "b": [changed]}
    selection = select_version(other_bytes, nothing_wrong)
    assert selection.rejected[0].reasons == ("rank 1 differs on ('a', 'b')",)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_nodes_and_entries_does_not_matter(seed: int) -> None:
    entries = [held(v, r, generation=g) for v, r, g in itertools.product((1, 2), (0, 1), (1, 2))]
    random.Random(seed).shuffle(entries)
    shuffled = {"b": entries[:5], "a": entries[3:]}
    ordered = {"a": sorted(entries[3:], key=str), "b": sorted(entries[:5], key=str)}
    assert world_versions(shuffled) == world_versions(ordered)


def test_a_snapshot_survives_a_message_to_another_node() -> None:
    snapshot = held(10, 1, committed=False)
    assert RankSnapshot.from_json(snapshot.to_json()) == snapshot
