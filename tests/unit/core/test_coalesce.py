"""Both ends of every pair cut their traffic alike, into few bytes at a time."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplex_megatron.core import coalesce
from tenplex_megatron.core.coalesce import cut_into_messages, message_rounds
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.core.plan import ReshardPlan, Topology, Transfer, plan_reshard
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import TensorSpec
from tenplex_megatron.testing.generate import ModelShape, megatron_collection

DTYPES = ("uint8", "bfloat16", "float32", "int64")
layouts = st.builds(
    ParallelLayout, tp=st.sampled_from([1, 2]), pp=st.sampled_from([1, 2]), dp=st.integers(1, 3)
)
budgets = st.sampled_from([1, 16, 100, 1 << 20])


def random_plan(shapes: list[tuple[int, int, str, int, int]]) -> ReshardPlan:
    """Transfers of whole tensors between ranks that share no node."""
    specs = {
        f"t{n:03d}": TensorSpec(f"t{n:03d}", (rows, columns), dtype)
        for n, (rows, columns, dtype, _, _) in enumerate(shapes)
    }
    transfers = [
        Transfer(target, name, spec.region, sender, sender)
        for (name, spec), (_, _, _, sender, target) in zip(specs.items(), shapes, strict=True)
        if sender != target
    ]
    nodes = {rank: f"node{rank}" for rank in range(4)}
    return ReshardPlan(specs, Topology(nodes, nodes), tuple(sorted(transfers)))


tensors = st.tuples(
    st.integers(1, 40), st.integers(1, 40), st.sampled_from(DTYPES), *[st.integers(0, 3)] * 2
)
plans = st.lists(tensors, max_size=12).map(random_plan)


@given(plans, budgets)
def test_both_ends_of_a_pair_name_the_same_bytes_in_the_same_order(
    plan: ReshardPlan, budget: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coalesce, "SMALLEST_MESSAGE_BYTES", budget)
        rounds = {rank: list(message_rounds(plan, rank)) for rank in range(4)}
    for sender in range(4):
        for target in range(4):
            sent = [step.sends.get(target, ()) for step in rounds[sender]]
            received = [step.receives.get(sender, ()) for step in rounds[target]]
            shared = min(len(sent), len(received))
            assert sent[:shared] == received[:shared]
            assert not any(sent[shared:])
            assert not any(received[shared:])


@given(plans, budgets)
def test_every_remote_element_is_sent_once_and_no_round_holds_more_than_its_share(
    plan: ReshardPlan, budget: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coalesce, "SMALLEST_MESSAGE_BYTES", budget)
        rounds = [step for rank in range(4) for step in message_rounds(plan, rank)]
    found: Counter[tuple[int, str, tuple[int, ...]]] = Counter()
    for step in rounds:
        for target, row in step.sends.items():
            most = max(budget, plan.received_by_rank[target] // 8, 8)
            assert sum(map(plan.nbytes, row)) <= most
            for part in row:
                low, high = part.region.start, part.region.stop
                found.update(
                    (target, part.tensor, (i, j))
                    for i in range(low[0], high[0])
                    for j in range(low[1], high[1])
                )
    wanted = Counter(
        (one.target_rank, one.tensor, (i, j))
        for one in plan.transfers
        for i in range(one.region.stop[0])
        for j in range(one.region.stop[1])
    )
    assert found == wanted


@given(plans)
def test_every_part_of_a_message_starts_aligned_for_its_type(plan: ReshardPlan) -> None:
    for rank in range(4):
        for step in message_rounds(plan, rank):
            for row in step.sends.values():
                for message in cut_into_messages(row, plan.nbytes):
                    position = 0
                    for part in message:
                        assert position % plan.tensors[part.tensor].itemsize == 0
                        position += plan.nbytes(part)


@given(plans)
def test_large_transfers_are_messages_of_their_own(plan: ReshardPlan) -> None:
    for message in cut_into_messages(plan.transfers, plan.nbytes):
        is_large = [plan.nbytes(part) >= coalesce.ALONE_BYTES for part in message]
        assert is_large == [True] or not any(is_large)
    parts = [part for message in cut_into_messages(plan.transfers, plan.nbytes) for part in message]
    assert sorted(parts) == list(plan.transfers)


@given(layouts, layouts, st.sampled_from([1, 2, 4]))
def test_rounds_carry_what_the_plan_moves(
    old: ParallelLayout, new: ParallelLayout, num_nodes: int
) -> None:
    places = [f"node{rank % min(num_nodes, new.world_size)}" for rank in range(12)]
    topology = Topology(
        dict(enumerate(places[: old.world_size])), dict(enumerate(places[: new.world_size]))
    )
    model = ModelShape(num_layers=2)
    plan = plan_reshard(megatron_collection(model, old), megatron_collection(model, new), topology)
    sent = sum(
        plan.nbytes(part)
        for rank in range(new.world_size)
        for step in message_rounds(plan, rank)
        for row in step.sends.values()
        for part in row
    )
    assert sent == plan.bytes_moved


def test_a_plan_without_remote_bytes_has_no_rounds() -> None:
    spec = TensorSpec("weight", (4, 4), "float32")
    transfer = Transfer(0, "weight", spec.region, 0, 0)
    nodes = {0: "node0"}
    plan = ReshardPlan({"weight": spec}, Topology(nodes, nodes), (transfer,))
    assert list(message_rounds(plan, 0)) == []


def test_a_tensor_without_dims_is_one_part() -> None:
    spec = TensorSpec("step", (), "int64")
    nodes = {0: "node0", 1: "node1"}
    transfer = Transfer(1, "step", Region((), ()), 0, 0)
    plan = ReshardPlan({"step": spec}, Topology(nodes, nodes), (transfer,))
    (step,) = message_rounds(plan, 0)
    assert step.sends == {1: (transfer,)}
