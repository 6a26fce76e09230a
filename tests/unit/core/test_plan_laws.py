"""Laws of plans, enumerated over pairs of layouts and checked element by element."""

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.core.plan import ReshardPlan, Topology, plan_reshard
from tenplex_megatron.core.region import Region
from tenplex_megatron.errors import LayoutError
from tenplex_megatron.testing.generate import (
    ModelShape,
    fill,
    megatron_collection,
    run_plan,
    topology_of,
)

MODEL = ModelShape(parts=("input_norm", "qkv", "mlp"), states=("master",))
SQUARE = tuple(
    f"TP{tp},PP{pp},DP{dp},VPP{vpp}"
    for tp, pp, dp, vpp in itertools.product((1, 2), repeat=4)
    if pp > 1 or vpp == 1
)
OTHERS = (
    "TP4",
    "TP8",
    "PP4",
    "PP8,STAGES0-1-1-1-1-0-0-0",
    "DP4",
    "DP8",
    "DP3",
    "TP4,DP2",
    "TP2,DP4",
    "TP2,PP4",
    "PP4,DP2",
    "PP3,DP2,STAGES1-2-1",
    "PP2,STAGES1-3",
    "TP2,DP3",
)
NODES = (1, 2, 4)
ALL_NODES = [(old, new, n) for old, new in itertools.product(SQUARE, repeat=2) for n in NODES]
ONE_NODES = [
    (old, new, NODES[index % len(NODES)])
    for index, (old, new) in enumerate(itertools.product(SQUARE + OTHERS, repeat=2))
    if old in OTHERS or new in OTHERS
]


@functools.cache
def collection(layout: str) -> TensorCollection:
    made = megatron_collection(MODEL, ParallelLayout.parse(layout))
    made.validate()
    return made


@dataclass(frozen=True)
class Elements:
    """All elements of all tensors in one row: the brute-force view of collections."""

    index: dict[str, npt.NDArray[np.int64]]
    itemsize: npt.NDArray[np.int64]

    def mask(self, held: TensorCollection, rank: int) -> npt.NDArray[np.bool_]:
        mask = np.zeros(len(self.itemsize), dtype=np.bool_)
        for box in held.holdings[rank]:
            mask[self.at(box.tensor, box.region)] = True
        return mask

    def at(self, tensor: str, region: Region) -> npt.NDArray[np.int64]:
        return np.asarray(self.index[tensor][region.slices()]).reshape(-1)


@functools.cache
def elements() -> Elements:
    specs = collection("TP1").tensors
    index, sizes, total = {}, [], 0
    for name, spec in specs.items():
        index[name] = np.arange(total, total + spec.numel).reshape(spec.shape)
        sizes.append(np.full(spec.numel, spec.itemsize, dtype=np.int64))
        total += spec.numel
    return Elements(index, np.concatenate(sizes))


@functools.cache
def masks(layout: str) -> npt.NDArray[np.bool_]:
    held = collection(layout)
    return np.stack([elements().mask(held, rank) for rank in held.ranks])


def plan_pair(old: str, new: str, num_nodes: int) -> ReshardPlan:
    source, target = collection(old), collection(new)
    return plan_reshard(source, target, topology(old, new, num_nodes))


def topology(old: str, new: str, num_nodes: int) -> Topology:
    return topology_of(len(collection(old).ranks), len(collection(new).ranks), num_nodes)


def held_by_node(layout: str, nodes: dict[int, str]) -> dict[str, npt.NDArray[np.bool_]]:
    table: dict[str, npt.NDArray[np.bool_]] = {}
    for rank, node in nodes.items():
        table[node] = table.get(node, False) | masks(layout)[rank]
    return table


def best_busiest_node(
    remote: list[tuple[str, npt.NDArray[np.bool_]]],
    holders: dict[str, npt.NDArray[np.bool_]],
) -> float:
    """The least that the busiest node can send: the densest set of nodes, tried one by one."""
    names = sorted(holders)
    pattern = sum(holders[name].astype(np.int64) << bit for bit, name in enumerate(names))
    demand = np.zeros(1 << len(names))
    for _, need in remote:
        weights = elements().itemsize[need]
        demand += np.bincount(pattern[need], weights=weights, minlength=len(demand))
    best = 0.0
    for chosen in range(1, len(demand)):
        inside = [part for part in range(1, len(demand)) if part & ~chosen == 0]
        best = max(best, demand[inside].sum() / chosen.bit_count())
    return best


def check_pair(old: str, new: str, num_nodes: int) -> None:
    plan = plan_pair(old, new, num_nodes)
    where = topology(old, new, num_nodes)
    old_nodes, new_nodes = dict(where.source_nodes), dict(where.target_nodes)
    wanted, held = masks(new), masks(old)
    filled = np.zeros(wanted.shape, dtype=np.int64)
    for one in plan.transfers:
        at = elements().at(one.tensor, one.region)
        filled[one.target_rank, at] += 1
        assert held[one.source_rank, at].all(), f"{one} reads what its source lacks"
        assert old_nodes[one.source_rank] == new_nodes[one.sender_rank], one
        assert one.is_local == (old_nodes[one.source_rank] == new_nodes[one.target_rank]), one
    assert (filled == wanted).all()
    assert not plan.created

    holders = held_by_node(old, old_nodes)
    nothing = np.zeros(wanted.shape[1], dtype=np.bool_)
    remote = [
        (node, wanted[rank] & ~holders.get(node, nothing)) for rank, node in new_nodes.items()
    ]
    lower_bound = sum(int(elements().itemsize[need].sum()) for _, need in remote)
    assert plan.bytes_moved == plan.bytes_lower_bound == lower_bound
    assert plan.bytes_total == (wanted * elements().itemsize).sum()

    usable = {node: mask for node, mask in holders.items() if node in new_nodes.values()}
    best = best_busiest_node(remote, usable)
    largest_element = 8
    assert max(plan.sent_by_node.values()) <= 1.1 * best + largest_element


def is_readable(old: str, new: str, num_nodes: int) -> bool:
    where = topology(old, new, num_nodes)
    holders = held_by_node(old, dict(where.source_nodes))
    usable = [mask for node, mask in holders.items() if node in where.target_nodes.values()]
    return bool(np.any(usable, axis=0).all()) if usable else False


def check_readable_pair(old: str, new: str, num_nodes: int) -> None:
    if is_readable(old, new, num_nodes):
        check_pair(old, new, num_nodes)
    else:
        with pytest.raises(LayoutError, match="no new rank runs on nodes"):
            plan_pair(old, new, num_nodes)


@pytest.mark.parametrize("old", SQUARE)
@pytest.mark.parametrize("num_nodes", NODES)
def test_two_way_layouts_are_filled_once_with_least_bytes_and_even_senders(
    old: str, num_nodes: int
) -> None:
    for new in SQUARE:
        check_readable_pair(old, new, num_nodes)


@pytest.mark.parametrize("old", SQUARE + OTHERS)
def test_wide_and_uneven_layouts_are_filled_once_with_least_bytes_and_even_senders(
    old: str,
) -> None:
    for one, new, num_nodes in ONE_NODES:
        if one == old:
            check_readable_pair(old, new, num_nodes)


@pytest.mark.parametrize("layout", SQUARE + OTHERS)
@pytest.mark.parametrize("num_nodes", NODES)
def test_the_identity_plan_moves_nothing(layout: str, num_nodes: int) -> None:
    plan = plan_pair(layout, layout, num_nodes)
    assert plan.bytes_moved == 0
    assert plan.bytes_total == sum(map(collection(layout).nbytes, collection(layout).ranks))


@pytest.mark.parametrize("old", ["TP2,PP2,DP2", "TP8", "DP3", "PP2,STAGES1-3"])
@pytest.mark.parametrize("new", ["TP1", "TP4,DP2", "PP2,DP2,VPP2", "DP8", "TP2,DP3"])
def test_there_and_back_restores_every_byte(old: str, new: str) -> None:
    before = fill(collection(old))
    between = run_plan(plan_pair(old, new, 1), before, collection(new))
    after = run_plan(plan_pair(new, old, 1), between, collection(old))
    assert before.keys() == after.keys()
    for key, array in before.items():
        np.testing.assert_array_equal(after[key], array)


@pytest.mark.parametrize("layout", ["TP2,PP2,DP2", "DP4", "TP2,DP2", "PP2,DP2"])
def test_survivors_are_refused_exactly_when_an_element_lost_every_holder(layout: str) -> None:
    held = collection(layout)
    for count in range(1, len(held.ranks) + 1):
        for ranks in itertools.combinations(held.ranks, count):
            complete = masks(layout)[list(ranks)].any(axis=0).all()
            if complete:
                held.restrict(ranks).validate()
                continue
            with pytest.raises(LayoutError, match="hold nothing of"):
                held.restrict(ranks)


@pytest.mark.parametrize("layout", ["TP2,PP2,DP2", "PP2,DP2"])
def test_replicas_without_a_distributed_optimizer_survive_any_loss_that_spares_one(
    layout: str,
) -> None:
    parsed = ParallelLayout.parse(layout)
    model = ModelShape(parts=("qkv",), states=("master",), distributed_optimizer=False)
    held = megatron_collection(model, parsed)
    for dead in held.ranks:
        left = held.restrict(rank for rank in held.ranks if rank != dead)
        one_replica = megatron_collection(model, ParallelLayout(tp=parsed.tp, pp=parsed.pp))
        nodes = dict.fromkeys(held.ranks, "node")
        plan = plan_reshard(left, one_replica, Topology(nodes, nodes))
        assert all(one.source_rank != dead for one in plan.transfers)


def test_the_enumeration_covers_every_pair_it_promises() -> None:
    assert len(ALL_NODES) == len(SQUARE) ** 2 * len(NODES) == 432
    pairs = {(old, new) for old, new, _ in ONE_NODES + ALL_NODES}
    assert len(pairs) == len(SQUARE + OTHERS) ** 2
