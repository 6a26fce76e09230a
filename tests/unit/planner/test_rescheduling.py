import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from tenplex_megatron.errors import LayoutError
from tenplex_megatron.planner.tensoropt.mesh import PARTIAL, REPLICATED, DeviceMesh, Layout, Tensor
from tenplex_megatron.planner.tensoropt.rescheduling import Rescheduler, Step
from tests.unit.planner.clusters import A100

CLUSTER = replace(A100, devices_per_node=4)
SIZES = (24, 16)


def layouts(mesh: DeviceMesh, sizes: tuple[int, ...]) -> list[Layout]:
    """Every layout a tensor of these sizes can have."""
    return [
        layout
        for layout in itertools.product([0, 1, REPLICATED, PARTIAL], repeat=len(mesh.sizes))
        if all(r < 0 or mesh.can_split(sizes[r], axis) for axis, r in enumerate(layout))
    ]


def rescheduler(num_devices: int) -> Rescheduler:
    return Rescheduler(DeviceMesh.over(num_devices), CLUSTER)


class Devices:
    """A tensor on simulated devices, with each dim's index written as digits.

    A dim of size s has one digit per mesh axis, as far as their product divides s, and a rest; so
    a split over an axis holds one value of that axis's digit and a collective is a concatenation
    or a cut along one numpy axis.
    """

    def __init__(self, mesh: DeviceMesh, sizes: tuple[int, ...]) -> None:
        self.mesh = mesh
        self.digits: dict[tuple[int, int], int] = {}
        self.shape: list[int] = []
        for dim, size in enumerate(sizes):
            rest = size
            for axis, ways in enumerate(mesh.sizes):
                if mesh.can_split(size, axis):
                    self.digits[dim, axis] = len(self.shape)
                    self.shape.append(ways)
                    rest //= ways
            self.shape.append(rest)

    def place(self, whole: np.ndarray, layout: Layout) -> dict[tuple[int, ...], np.ndarray]:
        """What each device holds; the addends of a partial sum differ and may be negative."""
        held = {}
        for device in np.ndindex(*self.mesh.sizes):
            piece = whole.reshape(self.shape)
            for axis, role in enumerate(layout):
                if role >= 0:
                    digit = self.digits[role, axis]
                    piece = piece.take([device[axis]], axis=digit)
                elif role == PARTIAL:
                    ways, rank = self.mesh.sizes[axis], device[axis]
                    # Unequal addends, none of them zero, that sum to the whole.
                    weights = [1 - ways * (ways - 1), *range(2, 2 * ways, 2)]
                    piece = piece * weights[rank]
            held[device] = piece
        return held

    def run(
        self, step: Step, held: dict[tuple[int, ...], np.ndarray]
    ) -> dict[tuple[int, ...], np.ndarray]:
        """The step, as one collective per axis."""
        for axis in step.axes:
            held = {device: self._receive(step, axis, device, held) for device in held}
        return held

    def _receive(
        self,
        step: Step,
        axis: int,
        device: tuple[int, ...],
        held: dict[tuple[int, ...], np.ndarray],
    ) -> np.ndarray:
        ways, rank = self.mesh.sizes[axis], device[axis]
        if step.target >= 0:
            return self._receive_parts(step, axis, device, held)
        peers = [(*device[:axis], peer, *device[axis + 1 :]) for peer in range(ways)]
        pieces = [held[peer] for peer in peers]
        match step.kind:
            case "all_reduce":
                return sum(pieces[1:], start=pieces[0])
            case "mask":
                return held[device] * (rank == 0)
            case "pad":
                gathered = [p * (peer == rank) for peer, p in enumerate(pieces)]
                return np.concatenate(gathered, axis=self.digits[step.source, axis])
        assert step.kind == "all_gather"
        return np.concatenate(pieces, axis=self.digits[step.source, axis])

    def _receive_parts(
        self,
        step: Step,
        axis: int,
        device: tuple[int, ...],
        held: dict[tuple[int, ...], np.ndarray],
    ) -> np.ndarray:
        rank, digit = device[axis], self.digits[step.target, axis]
        peers = [(*device[:axis], p, *device[axis + 1 :]) for p in range(self.mesh.sizes[axis])]
        parts = [held[peer].take([rank], axis=digit) for peer in peers]
        if step.kind == "slice":
            return parts[rank]
        if step.kind == "reduce_scatter":
            return sum(parts[1:], start=parts[0])
        assert step.kind == "all_to_all"
        return np.concatenate(parts, axis=self.digits[step.source, axis])

    def total(self, held: dict[tuple[int, ...], np.ndarray], layout: Layout) -> dict:
        """Partial sums added up, so that only what they mean is compared."""
        for axis, role in enumerate(layout):
            if role == PARTIAL:
                held = self.run(Step("all_reduce", (axis,), PARTIAL, REPLICATED), held)
        return held


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 6, 8])
def test_the_steps_of_every_conversion_reach_exactly_the_target(num_devices: int) -> None:
    planner = rescheduler(num_devices)
    mesh = planner.mesh
    whole = np.arange(math.prod(SIZES), dtype=np.int64)
    devices, tensor = Devices(mesh, SIZES), Tensor(SIZES, 1e6)
    pairs = list(itertools.product(layouts(mesh, SIZES), repeat=2))
    # All pairs of up to 6 devices; a stride prime to the number of layouts through those of 8.
    for source, target in pairs if num_devices < 8 else pairs[::7]:
        held, layout = devices.place(whole, source), source
        for step in planner.steps(tensor, source, target):
            assert {layout[axis] for axis in step.axes} == {step.source}
            layout = tuple(step.target if a in step.axes else r for a, r in enumerate(layout))
            held = devices.run(step, held)
        assert layout == target
        got = devices.total(held, target)
        wanted = devices.total(devices.place(whole, target), target)
        for device in got:
            np.testing.assert_array_equal(got[device], wanted[device])


@pytest.mark.parametrize("num_devices", [2, 3, 6, 8])
@pytest.mark.parametrize("size_bytes", [1.0, 1e5, 1e10])
def test_cost_is_zero_iff_layouts_agree_and_a_detour_never_pays(
    num_devices: int, size_bytes: float
) -> None:
    planner = rescheduler(num_devices)
    every = layouts(planner.mesh, SIZES)
    times = planner.times(Tensor(SIZES, size_bytes), every, every)
    assert np.isfinite(times).all()
    np.testing.assert_array_equal(times == 0, np.eye(len(every), dtype=bool))
    detours = (times[:, :, None] + times[None, :, :]).min(axis=1)
    assert (times <= detours * (1 + 1e-12)).all()


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_cost_grows_with_the_tensor(num_devices: int) -> None:
    planner = rescheduler(num_devices)
    every = layouts(planner.mesh, SIZES)
    small, large = (planner.times(Tensor(SIZES, size), every, every) for size in (1e6, 2e6))
    assert (small <= large).all()
    assert (large <= 2 * small).all()


def test_the_steps_cost_what_the_table_says() -> None:
    planner, tensor = rescheduler(8), Tensor(SIZES, 1e8)
    every = layouts(planner.mesh, SIZES)
    times = planner.times(tensor, every, every)
    for (row, source), (column, target) in itertools.product(enumerate(every), repeat=2):
        layout, total = source, 0.0
        for step in planner.steps(tensor, source, target):
            after = tuple(step.target if a in step.axes else r for a, r in enumerate(layout))
            total += planner.time(tensor, layout, after)
            layout = after
        assert total == pytest.approx(times[row, column], rel=1e-9)


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        ((0,), (REPLICATED,), ["all_gather"]),
        ((0,), (1,), ["all_to_all"]),
        ((PARTIAL,), (0,), ["reduce_scatter"]),
        ((REPLICATED,), (1,), ["slice"]),
        ((REPLICATED,), (PARTIAL,), ["mask"]),
        ((0,), (PARTIAL,), ["pad"]),
        ((0,), (0,), []),
    ],
)
def test_two_devices_convert_in_the_one_collective_that_exists_for_it(
    source: Layout, target: Layout, kinds: list[str]
) -> None:
    steps = rescheduler(2).steps(Tensor(SIZES, 1e8), source, target)
    assert [step.kind for step in steps] == kinds


def test_a_sum_that_cannot_be_split_is_reduced_whole() -> None:
    odd, planner = Tensor((5, 7), 1e8), rescheduler(8)
    [whole] = planner.steps(odd, (PARTIAL,) * 3, (REPLICATED,) * 3)
    assert (whole.kind, whole.axes) == ("all_reduce", (0, 1, 2))


def test_a_conversion_across_nodes_takes_longer_than_the_same_within_one() -> None:
    planner, tensor = rescheduler(8), Tensor(SIZES, 1e8)
    across = planner.time(tensor, (0, REPLICATED, REPLICATED), (REPLICATED,) * 3)
    within = planner.time(Tensor(SIZES, 1e8), (REPLICATED, 0, REPLICATED), (REPLICATED,) * 3)
    assert across > 3 * within


@pytest.mark.parametrize(
    ("layout", "message"),
    [((0, 0, 0), "no digit"), ((0, 0), "expected a dim"), ((2, 0, 0), "expected a dim")],
)
def test_a_layout_the_tensor_cannot_have_is_refused(layout: Layout, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        rescheduler(8).time(Tensor((12, 8), 1e6), layout, (REPLICATED,) * 3)


def test_a_mesh_needs_a_device() -> None:
    with pytest.raises(LayoutError, match="at least 1"):
        DeviceMesh.over(0)


@pytest.mark.parametrize("num_devices", range(1, 33))
def test_a_mesh_has_every_device_once_and_prime_axes(num_devices: int) -> None:
    sizes = DeviceMesh.over(num_devices).sizes
    assert math.prod(sizes) == num_devices
    assert all(size % divisor for size in sizes for divisor in range(2, size))


@pytest.mark.parametrize(
    ("num_devices", "axes", "members"),
    [(16, (0,), 1), (16, (3,), 2), (16, (0, 1, 2, 3), 8), (12, (0,), 1), (12, (1, 2), 4)],
)
def test_the_group_that_nodes_split_worst_counts(
    num_devices: int, axes: tuple[int, ...], members: int
) -> None:
    """Of 12 devices, 8 in the first node, some groups along the first axis have two in it."""
    assert DeviceMesh.over(num_devices).members_per_node(axes, 8) == members
