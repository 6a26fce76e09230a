"""The layout that finishes most steps until the next change wins, moves and hysteresis included."""

from dataclasses import replace

import numpy as np
import pytest

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.allowed import Job
from tenplex_megatron.planner.choose import Outlook, choose, decide, placement_of
from tenplex_megatron.planner.moves import Placement, StateSizes
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.search import Evaluated, search
from tenplex_megatron.planner.strategy import Strategy
from tests.unit.planner.clusters import A100

GB = 1e9
CLUSTER = A100
MODEL = ModelProfile(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_query_groups=32,
    head_size=128,
    ffn_size=16384,
    seq_length=2048,
    vocab_size=51200,
)
OUTLOOK = Outlook(next_change_s=1000.0, restart_s=10.0, least_gain=0.05)


def nodes(*counts: int) -> dict[str, tuple[int, ...]]:
    return {f"n{number}": tuple(range(count)) for number, count in enumerate(counts)}


def strategy(text: str) -> Strategy:
    layout = replace(ParallelLayout.parse(text), micro_batch_size=1)
    return Strategy(layout=layout, global_batch_size=64, zero_stage=1)


def evaluated(**seconds: float) -> Evaluated:
    """Strategies such as TP2_PP1 with their step times, all of 1 GB."""
    found = tuple(strategy(name.replace("_", ",")) for name in seconds)
    return Evaluated(found, np.array(list(seconds.values())), np.full(len(found), GB))


def placement(text: str, devices: dict[str, tuple[int, ...]]) -> Placement:
    names = [node for node, numbers in devices.items() for _ in numbers]
    layout = strategy(text).layout
    return Placement(layout, dict(enumerate(names[: layout.world_size])))


def test_without_a_past_the_fastest_that_fits_is_taken() -> None:
    found = evaluated(TP2=1.0, TP1_DP2=0.5, TP1_PP2=0.7)
    choice = decide(MODEL, CLUSTER, found, nodes(2), outlook=OUTLOOK)
    assert str(choice.best.strategy.layout) == "TP1,PP1,DP2,MBS1"
    assert choice.best.move_s == 0
    assert [why for _, why in choice.runners_up] == [
        "40.0% slower per step",
        "100.0% slower per step",
    ]
    assert choice.reason == "predicted 0.5 s per step and 1 GB per device on 2 of 2 devices"


def test_what_does_not_fit_is_not_taken_and_nothing_fitting_is_said() -> None:
    found = replace(evaluated(TP2=1.0, TP1_DP2=0.5), memory_bytes=np.array([70 * GB, 90 * GB]))
    choice = decide(MODEL, CLUSTER, found, nodes(2), outlook=OUTLOOK)
    assert choice.best.strategy.layout.tp == 2
    small = replace(CLUSTER, memory_bytes=60 * GB)
    with pytest.raises(ConfigError, match=r"none of 2 strategies on 2 devices fits 60 GB.*70 GB"):
        decide(MODEL, small, found, nodes(2))
    with pytest.raises(ConfigError, match="no layout can train the model on 2 devices"):
        decide(MODEL, CLUSTER, Evaluated((), np.empty(0), np.empty(0)), nodes(2))


def test_a_running_layout_is_left_only_for_a_gain() -> None:
    devices = nodes(2)
    current = placement("TP2", devices)
    for faster, leaves in ((0.99, False), (0.90, True)):
        found = evaluated(TP2=1.0, TP1_DP2=faster)
        choice = decide(
            MODEL,
            CLUSTER,
            found,
            devices,
            current=current,
            running=found.strategies[0],
            outlook=OUTLOOK,
        )
        assert (choice.best.strategy.layout != current.layout) is leaves
        assert choice.best.moved_bytes == 0.0  # one node holds everything
        assert (10.0 < choice.best.move_s < 11.0) if leaves else (choice.best.move_s == 0.0)
    assert decide(
        MODEL,
        CLUSTER,
        found,
        devices,
        current=current,
        running=found.strategies[0],
        outlook=OUTLOOK,
    ) == decide(
        MODEL,
        CLUSTER,
        found,
        devices,
        current=current,
        running=found.strategies[0],
        outlook=OUTLOOK,
    )


def test_no_two_layouts_each_think_the_other_better() -> None:
    devices = nodes(2)
    for first, second in ((1.0, 0.97), (1.0, 0.8), (1.0, 1.0)):
        found = evaluated(TP2=first, TP1_DP2=second)
        layouts = [
            decide(
                MODEL,
                CLUSTER,
                found,
                devices,
                current=placement(text, devices),
                running=found.strategies[0],
                outlook=OUTLOOK,
            ).best.strategy.layout
            for text in ("TP2", "TP1,DP2")
        ]
        leaves = [layouts[0].tp != 2, layouts[1].tp != 1]
        assert not all(leaves)


def test_a_faster_layout_that_moves_too_much_loses() -> None:
    devices = nodes(1, 1)
    source = placement("TP1,PP2", devices)  # each node holds half of the layers
    found = evaluated(TP1_PP2=1.0, TP2=0.99)
    slow = replace(CLUSTER, network_bandwidth=0.1 * GB)
    choice = decide(MODEL, slow, found, devices, current=source, outlook=OUTLOOK)
    assert choice.best.strategy.layout == source.layout
    assert choice.best.moved_bytes == 0.0
    assert 10.0 < choice.best.move_s < 11.0  # copied inside each node
    ((other, why),) = choice.runners_up
    layers = MODEL.num_layers * StateSizes.of(MODEL).layer
    assert other.moved_bytes > layers / 2
    assert why.startswith("is faster, but moves ")
    long = replace(OUTLOOK, next_change_s=1e6, least_gain=0.0)
    choice = decide(MODEL, slow, found, devices, current=source, outlook=long)
    assert choice.best.strategy.layout.tp == 2


@pytest.mark.parametrize("counts", [(8, 7), (8, 3, 1), (5,), (1, 1, 1)])
def test_any_set_of_survivors_gets_a_layout_with_tensor_groups_inside_nodes(
    counts: tuple[int, ...],
) -> None:
    devices = nodes(*counts)
    found = search(
        MODEL,
        CLUSTER,
        devices=sum(counts),
        devices_per_node=counts,
        global_batch_size=64,
    )
    choice = decide(MODEL, CLUSTER, found, devices, outlook=OUTLOOK)
    layout, ranks = choice.best.strategy.layout, choice.best.ranks
    assert 1 <= layout.world_size == len(ranks) == len(set(ranks)) <= sum(counts)
    assert all(device in devices[node] for node, device in ranks)
    for group in layout.groups("tp"):
        assert len({ranks[rank][0] for rank in group}) == 1
    assert choice.best.strategy.global_batch_size == 64
    assert 64 % (layout.dp * choice.best.strategy.micro_batch_size) == 0
    assert choice.best.memory_bytes <= CLUSTER.memory_bytes


def test_the_state_counts_masters_and_moments_of_every_parameter() -> None:
    sizes = StateSizes.of(MODEL)
    hidden, layers = MODEL.hidden_size, MODEL.num_layers
    matrices = 4 * hidden * hidden + 2 * hidden * MODEL.ffn_size
    assert sizes.layer == pytest.approx(12 * matrices, rel=0.01)
    assert sizes.input == 12 * hidden * (MODEL.vocab_size + MODEL.seq_length)
    assert sizes.experts == 0
    sparse = replace(MODEL, num_experts=8, expert_ffn_size=1024, num_dense_layers=8)
    experts = 8 * 2 * hidden * 1024 * (layers - 8) / layers
    assert StateSizes.of(sparse).experts == pytest.approx(12 * experts, rel=0.01)


def test_of_an_unknown_model_more_devices_and_a_smaller_bubble_win() -> None:
    job = Job(model=None, base=strategy("TP1"), layouts=("PP4", "TP1", "PP2"))
    choice = choose(job, CLUSTER, nodes(4))
    assert str(job.layout(choice.best.strategy)) == "TP1,PP1,DP4"
    assert choice.reason.startswith("uses 4 of 4 devices; no profile of the model")
    state = placement_of(job.strategy(ParallelLayout(pp=4)), dict.fromkeys(range(4), "n0"))
    assert choose(job, CLUSTER, nodes(5), current=state).best.strategy == choice.best.strategy
    few = replace(OUTLOOK, least_gain=0.2)
    kept = choose(job, CLUSTER, nodes(4), current=state, outlook=few)
    assert str(job.layout(kept.best.strategy)) == "TP1,PP4,DP1"  # little is gained by leaving


@pytest.mark.parametrize(
    ("layouts", "total", "said"),
    [
        (("TP3,PP2",), 4, "; numbers that do: 6, 12, 18, 24, 36; TP3,PP2,DP1 would fit 6"),
        (("TP2,DP2", "TP2,DP4"), 3, "; numbers that do: 4, 8; TP2,PP1,DP2 would fit 4"),
        (("TP8,PP3,DP1",), 8, "is pinned to 24 devices); TP8,PP3,DP1 would fit 24"),
        (
            ("DP5",),
            5,
            "12 does not divide by micro batch 1 x DP5); none would fit any other number",
        ),
        (("TP1,MBS5",), 4, "none would fit any other number"),
    ],
)
def test_where_nothing_is_legal_the_numbers_that_are_legal_are_said(
    layouts: tuple[str, ...], total: int, said: str
) -> None:
    base = replace(strategy("TP1"), global_batch_size=12)
    with pytest.raises(ConfigError) as caught:
        choose(Job(model=None, base=base, layouts=layouts), CLUSTER, nodes(total))
    assert str(caught.value).endswith(said)


def test_a_batch_that_no_number_of_devices_divides_is_told_which_do() -> None:
    layout = ParallelLayout(micro_batch_size=4)
    job = Job(model=None, base=replace(strategy("TP1"), layout=layout, global_batch_size=21))
    with pytest.raises(ConfigError) as caught:
        choose(job, CLUSTER, nodes(4))
    assert str(caught.value).endswith(
        "none would fit any other number; batches nearby that run: 24 on 3 numbers of ranks, "
        "16 on 3 numbers of ranks, 20 on 1 numbers of ranks"
    )
