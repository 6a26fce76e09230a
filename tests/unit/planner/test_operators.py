import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from tenplex_megatron.errors import LayoutError
from tenplex_megatron.planner.tensoropt.costs import STATE_BYTES, OperatorCost
from tenplex_megatron.planner.tensoropt.mesh import PARTIAL, REPLICATED, DeviceMesh, Tensor, shares
from tenplex_megatron.planner.tensoropt.operators import (
    ELEMENT_BYTES,
    REPEATED,
    Configuration,
    Dim,
    Operator,
    addition,
    attention_core,
    configurations,
    convolution,
    elementwise,
    embedding,
    loss,
    matrix_product,
    normalisation,
    pooling,
)
from tests.unit.planner.clusters import A100

CLUSTER = A100
BATCH, SEQUENCE = Dim("batch", 48), Dim("sequence", 96)
LEADING = (BATCH, SEQUENCE)
FEATURES, HEADS = Dim("feature", 768), Dim("heads", 48)
OPERATORS = {
    "matrix product": matrix_product(LEADING, FEATURES, HEADS, output_width=48),
    "convolution": convolution(BATCH, 48, 96, kernel=3, height=8, width=8),
    "element-wise": elementwise((BATCH, FEATURES)),
    "addition": addition((*LEADING, FEATURES), dropout=True),
    "normalisation": normalisation((*LEADING, FEATURES)),
    "pooling": pooling(BATCH, 96, height=8, width=8),
    "embedding": embedding(LEADING, 960, FEATURES),
    "attention": attention_core(*LEADING, HEADS, query_width=16, input_width=48, is_causal=True),
    "loss": loss(LEADING, Dim("classes", 960)),
}
DEVICES = [1, 2, 3, 4, 6, 8, 12, 16]
each_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
each_number = pytest.mark.parametrize("num_devices", DEVICES)


@functools.cache
def costs_of(num_devices: int) -> OperatorCost:
    return OperatorCost(DeviceMesh.over(num_devices), CLUSTER)


@functools.cache
def compute_of(num_devices: int) -> OperatorCost:
    """The same with all of the gradients' reduction hidden."""
    return OperatorCost(DeviceMesh.over(num_devices), replace(CLUSTER, overlap=1.0))


def ways_of(configuration: Configuration, mesh: DeviceMesh) -> dict[str, int]:
    names = dict.fromkeys(configuration)
    return {n: mesh.group_size([a for a, m in enumerate(configuration) if m == n]) for n in names}


@each_operator
@each_number
def test_configurations_use_all_devices_once_each_and_data_parallel_comes_first(
    operator: Operator, num_devices: int
) -> None:
    mesh = DeviceMesh.over(num_devices)
    ways = configurations(operator, mesh)
    factors = [tuple(sorted(ways_of(way, mesh).items())) for way in ways]
    assert len(set(factors)) == len(ways)
    assert all(math.prod(n for _, n in named) == num_devices for named in factors)
    assert {*ways[0]} <= {"batch"}
    for way in ways:
        for name, count in ways_of(way, mesh).items():
            assert name == REPEATED or operator.size(name) % count == 0


@each_operator
@each_number
def test_every_factorisation_has_a_configuration(operator: Operator, num_devices: int) -> None:
    mesh = DeviceMesh.over(num_devices)
    names = [dim.name for dim in operator.dims if dim.is_splittable]
    names += [REPEATED] if operator.may_repeat else []
    divisors = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
    wanted = {
        factors
        for factors in itertools.product(divisors, repeat=len(names))
        if math.prod(factors) == num_devices
    }
    found = {
        tuple(ways_of(way, mesh).get(name, 1) for name in names)
        for way in configurations(operator, mesh, breadth=len(names))
    }
    assert found == wanted


@each_number
def test_breadth_bounds_the_dims_that_are_split_besides_the_first(num_devices: int) -> None:
    operator, mesh = OPERATORS["matrix product"], DeviceMesh.over(num_devices)
    all_of_them = configurations(operator, mesh, breadth=2)
    for breadth in (0, 1, 2):
        kept = configurations(operator, mesh, breadth=breadth)
        assert kept == tuple(way for way in all_of_them if len({*way} - {"batch"}) <= breadth)


def test_an_operator_that_nothing_divides_is_repeated() -> None:
    odd = matrix_product((Dim("batch", 5),), Dim("in", 7), Dim("out", 9))
    assert configurations(odd, DeviceMesh.over(4)) == ((REPEATED, REPEATED),)


@pytest.mark.parametrize(
    ("split", "source", "weight", "result"),
    [
        ("batch", (0, 0), (REPLICATED, PARTIAL), (0, 0)),
        ("out", (REPLICATED, PARTIAL), (1, 1), (2, 2)),
        ("in", (2, 2), (0, 0), (PARTIAL, REPLICATED)),
        (REPEATED, (REPLICATED,) * 2, (REPLICATED,) * 2, (REPLICATED,) * 2),
    ],
)
def test_a_split_dim_decides_the_layouts_of_tensors_and_of_their_gradients(
    split: str, source: tuple[int, int], weight: tuple[int, int], result: tuple[int, int]
) -> None:
    product = OPERATORS["matrix product"]
    assert product.output is not None
    for operand, roles, lacking in (
        (product.inputs[0], source, (REPLICATED, PARTIAL)),
        (product.parameters[0], weight, (REPLICATED, PARTIAL)),
        (product.output, result, (PARTIAL, REPLICATED)),
    ):
        found = [product.layout(operand, (split,), lacking=role) for role in lacking]
        assert found == [(role,) for role in roles]


@pytest.mark.parametrize("way", configurations(OPERATORS["matrix product"], DeviceMesh.over(8)))
def test_a_matrix_product_split_this_way_computes_the_whole(way: Configuration) -> None:
    mesh = DeviceMesh.over(8)
    ways = {"batch": 1, "in": 1, "out": 1} | ways_of(way, mesh)
    rng = np.random.default_rng(0)
    left, right = rng.integers(-9, 9, (8, 16)), rng.integers(-9, 9, (16, 24))
    blocks = [
        [
            sum(
                rows @ columns
                for rows, columns in zip(
                    np.array_split(part, ways["in"], axis=1),
                    np.array_split(piece, ways["in"]),
                    strict=True,
                )
            )
            for piece in np.array_split(right, ways["out"], axis=1)
        ]
        for part in np.array_split(left, ways["batch"])
    ]
    np.testing.assert_array_equal(np.block(blocks), left @ right)


@each_operator
@each_number
def test_on_one_device_nothing_is_communicated_and_on_n_no_memory_is_missing(
    operator: Operator, num_devices: int
) -> None:
    mesh = DeviceMesh.over(num_devices)
    alone = costs_of(1).node(operator, ())
    costs = costs_of(num_devices)
    for way in configurations(operator, mesh):
        memory, time = costs.node(operator, way)
        assert alone[0] / num_devices <= memory * (1 + 1e-12)
        assert memory <= alone[0] * (1 + 1e-12)
        assert time * num_devices >= alone[1] * (1 - 1e-12)


@each_operator
@pytest.mark.parametrize("num_devices", [2, 4, 8, 16])
def test_data_parallelism_replicates_parameters_and_reduces_their_gradients(
    operator: Operator, num_devices: int
) -> None:
    axes = len(DeviceMesh.over(num_devices).sizes)
    costs = costs_of(num_devices)
    way = ("batch",) * axes
    parameters = sum(map(operator.elements, operator.parameters))
    alone = costs_of(1).node(operator, ())[0]
    memory, time = costs.node(operator, way)
    kept = alone - parameters * STATE_BYTES
    assert memory == pytest.approx(parameters * STATE_BYTES + kept / num_devices)
    compute = compute_of(num_devices).node(operator, way)[1]
    # A ring's reduce-scatter and all-gather of fp32 gradients.
    bandwidth = CLUSTER.node_bandwidth * CLUSTER.node_efficiency
    if num_devices > CLUSTER.devices_per_node:
        network = CLUSTER.network_bandwidth * CLUSTER.network_efficiency
        bandwidth = min(bandwidth, network * CLUSTER.devices_per_node)
    ring = 2 * (num_devices - 1) / num_devices * parameters * 4 / bandwidth
    assert time - compute == pytest.approx((1 - CLUSTER.overlap) * ring, rel=1e-6, abs=1e-15)


@each_operator
def test_an_axis_that_repeats_work_saves_nothing(operator: Operator) -> None:
    repeated = costs_of(4).node(operator, (REPEATED,) * 2)
    assert repeated == costs_of(1).node(operator, ())


def test_column_then_row_parallel_products_meet_without_communication() -> None:
    """The pair of Shoeybi et al., arXiv 1909.08053, section 3."""
    hidden = Dim("hidden", 3072)
    up, down = (
        matrix_product(LEADING, FEATURES, hidden),
        matrix_product(LEADING, hidden, FEATURES),
    )
    costs = costs_of(4)
    column, row = ("out", "out"), ("in", "in")
    [[between]] = costs.edge((up, [column]), (down, [row]), 0)
    assert between == 0
    [[after]] = costs.edge((down, [row]), (up, [column]), 0)
    tensor = Tensor((48, 96, 768), 48 * 96 * 768 * ELEMENT_BYTES)
    all_reduce = costs.activations.time(tensor, (PARTIAL,) * 2, (REPLICATED,) * 2)
    assert after == pytest.approx(2 * all_reduce)


@each_number
def test_an_edge_costs_nothing_iff_the_tensor_and_its_gradient_stay_where_they_are(
    num_devices: int,
) -> None:
    mesh = DeviceMesh.over(num_devices)
    costs, source, target = (
        costs_of(num_devices),
        OPERATORS["element-wise"],
        matrix_product((BATCH,), FEATURES, FEATURES),
    )
    assert source.output is not None
    produced, consumed = (configurations(operator, mesh) for operator in (source, target))
    times = costs.edge((source, produced), (target, consumed), 0)
    for (row, way), (column, other) in itertools.product(enumerate(produced), enumerate(consumed)):
        agree = [
            source.layout(source.output, way, lacking=made)
            == target.layout(target.inputs[0], other, lacking=read)
            for made, read in ((PARTIAL, REPLICATED), (REPLICATED, PARTIAL))
        ]
        assert (times[row, column] == 0) == all(agree)


def test_an_edge_between_different_tensors_is_refused() -> None:
    costs = costs_of(2)
    product, other = OPERATORS["matrix product"], OPERATORS["loss"]
    for producer in (product, other):
        with pytest.raises(LayoutError, match="same sizes"):
            costs.edge((producer, [("batch",)]), (other, [("batch",)]), 0)


@pytest.mark.parametrize("num_devices", DEVICES)
def test_shares_times_held_is_the_whole(num_devices: int) -> None:
    mesh = DeviceMesh.over(num_devices)
    product = OPERATORS["matrix product"]
    for way in configurations(product, mesh):
        layout = product.layout(product.parameters[0], way, lacking=PARTIAL)
        assert shares(mesh, layout) * ways_of(way, mesh).get("batch", 1) == num_devices


@each_operator
@pytest.mark.parametrize("num_devices", [2, 4, 8, 16])
def test_dims_take_the_axes_in_their_order_outermost_first(
    operator: Operator, num_devices: int
) -> None:
    order = [*(dim.name for dim in operator.dims), REPEATED]
    for way in configurations(operator, DeviceMesh.over(num_devices)):
        places = [order.index(name) for name in way]
        assert places == sorted(places)


@pytest.mark.parametrize(
    ("name", "passes", "efficiency"),
    [
        ("matrix product", 3.0, CLUSTER.gemm_efficiency),
        ("convolution", 3.0, CLUSTER.gemm_efficiency),
        ("attention", 3.5, CLUSTER.flash_efficiency),
    ],
)
def test_arithmetic_takes_three_passes_and_fused_attention_half_a_pass_more(
    name: str, passes: float, efficiency: float
) -> None:
    """A device so fast at everything else that only arithmetic is left."""
    operator = OPERATORS[name]
    cluster = replace(CLUSTER, memory_bandwidth=1e30)
    _, time = OperatorCost(DeviceMesh.over(1), cluster).node(operator, ())
    assert time == pytest.approx(passes * operator.flops / (CLUSTER.peak_flops * efficiency))


@each_operator
def test_an_optimizer_step_reads_and_writes_the_parameters_a_device_holds(
    operator: Operator,
) -> None:
    per_parameter = CLUSTER.optimizer_bytes_per_parameter
    slower = replace(CLUSTER, optimizer_bytes_per_parameter=2 * per_parameter)
    twice = OperatorCost(DeviceMesh.over(4), slower)
    rate = CLUSTER.memory_bandwidth * CLUSTER.memory_efficiency
    for way in configurations(operator, DeviceMesh.over(4)):
        held = sum(
            operator.elements(weight)
            / shares(DeviceMesh.over(4), operator.layout(weight, way, lacking=REPLICATED))
            for weight in operator.parameters
        )
        update = twice.node(operator, way)[1] - costs_of(4).node(operator, way)[1]
        assert update == pytest.approx(per_parameter * held / rate, abs=1e-12)


def test_a_loss_split_over_classes_reduces_three_sums_per_row() -> None:
    whole, costs = OPERATORS["loss"], costs_of(4)
    silent = replace(whole, statistics=())
    rows = Tensor((48, 96), 48 * 96 * 3 * 4)
    way = ("classes", "classes")
    extra = costs.node(whole, way)[1] - costs.node(silent, way)[1]
    assert extra == pytest.approx(costs.activations.time(rows, (PARTIAL,) * 2, (REPLICATED,) * 2))
    split = ("batch", "batch")
    assert costs.node(whole, split) == costs.node(silent, split)


def test_an_operator_works_in_what_is_not_kept_and_in_gradients() -> None:
    product = matrix_product((Dim("batch", 8),), Dim("in", 16), Dim("out", 32))
    # The input is kept and has a gradient; the output is neither kept nor without one.
    assert costs_of(1).working_bytes(product, ()) == 2 * (8 * 16 + 2 * 8 * 32)
    assert costs_of(2).working_bytes(product, ("in",)) == 2 * (8 * 16 / 2 + 2 * 8 * 32)
    assert costs_of(2).working_bytes(product, ("out",)) == 2 * (8 * 16 + 2 * 8 * 32 / 2)


def test_dropout_keeps_its_mask_for_the_new_tensor_and_none_for_the_residual() -> None:
    assert [operand.kept_bytes for operand in OPERATORS["addition"].inputs] == [1, 0]
    without = addition((*LEADING, FEATURES))
    assert [operand.kept_bytes for operand in without.inputs] == [0, 0]
