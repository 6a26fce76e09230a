"""In which ways can one operator run on all devices?

An operator is a loop nest over named dims. A configuration gives every axis of the device mesh one
dim to split, or lets the axis repeat the same work. The layouts of all tensors follow: a tensor
that has the dim is split; an input or parameter that lacks it is replicated and its gradient is a
partial sum; an output that lacks it (the dim is summed over) is a partial sum and its gradient is
replicated. This is the parallelization configuration of TensorOpt, arXiv 2004.10856.

Pruned are configurations that differ only in which axes of equal product split which dim (the one
in the order of `Operator.dims`, outermost axis first, stands for all), those that split more than
`breadth` dims besides the first, and repeated work where an operator has arithmetic to share. What
is left and can't be worth having beside its neighbours, `dominance` takes away.
"""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Literal

from tenplex_megatron.planner.tensoropt.mesh import REPLICATED, DeviceMesh, Layout, Tensor

__all__ = [
    "ELEMENT_BYTES",
    "REPEATED",
    "Configuration",
    "Dim",
    "Operand",
    "Operator",
    "addition",
    "attention_core",
    "configurations",
    "convolution",
    "elementwise",
    "embedding",
    "loss",
    "matrix_product",
    "normalisation",
    "pooling",
]

type Configuration = tuple[str, ...]
"""For every mesh axis the name of the dim it splits, or `REPEATED`."""

REPEATED = ""
ELEMENT_BYTES = 2
_FLASH_BACKWARD = 2.5
"""Five matrix products instead of two. Source: Dao et al., arXiv 2205.14135, section 3.1."""
_PRODUCT_BACKWARD = 2.0
_TRAFFIC_BACKWARD = 1.7


@dataclass(frozen=True, slots=True)
class Dim:
    """A dim of an operator's loop nest; `size` counts what may be told apart by a split."""

    name: str
    size: int
    is_splittable: bool = True


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor an operator reads or writes; `depth` elements for every index of its dims."""

    dims: tuple[str, ...]
    depth: int = 1
    kept_bytes: float = 0.0
    """Bytes of an element that stay in memory until the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator, forward and backward, on the whole batch."""

    dims: tuple[Dim, ...]
    """The dim that data parallelism splits comes first."""
    inputs: tuple[Operand, ...] = ()
    parameters: tuple[Operand, ...] = ()
    output: Operand | None = None
    statistics: tuple[Operand, ...] = ()
    """Sums in fp32 that all devices need when a dim they lack is split."""
    flops: float = 0.0
    """Floating-point operations of the forward pass."""
    rate: Literal["gemm", "flash", "memory"] = "memory"
    """What bounds the operator besides memory traffic."""
    backward: float = _TRAFFIC_BACKWARD
    """Backward over forward time."""
    may_repeat: bool = False

    def size(self, name: str) -> int:
        """Size of the dim `name`."""
        return next(dim.size for dim in self.dims if dim.name == name)

    def elements(self, operand: Operand) -> int:
        """Elements of the whole operand."""
        return math.prod(self.size(name) for name in operand.dims) * operand.depth

    def tensor(self, operand: Operand, element_bytes: float = ELEMENT_BYTES) -> Tensor:
        """What re-scheduling needs to know of the operand."""
        sizes = tuple(self.size(name) for name in operand.dims)
        return Tensor(sizes, self.elements(operand) * element_bytes)

    def layout(self, operand: Operand, configuration: Configuration, *, lacking: int) -> Layout:
        """Roles of the mesh axes for the operand; `lacking` where it lacks the split dim."""
        return tuple(
            REPLICATED
            if name == REPEATED
            else operand.dims.index(name)
            if name in operand.dims
            else lacking
            for name in configuration
        )


def configurations(
    operator: Operator, mesh: DeviceMesh, *, breadth: int = 2
) -> tuple[Configuration, ...]:
    """Ways to run the operator on the whole mesh, data parallelism first where it is possible."""
    names = [dim.name for dim in operator.dims if dim.is_splittable]
    if operator.may_repeat:
        names.append(REPEATED)
    best: dict[tuple[int, ...], tuple[int, Configuration]] = {}
    for order in itertools.product(range(len(names)), repeat=len(mesh.sizes)):
        split = tuple(names[place] for place in order)
        if len({*order} - {0}) > breadth or not _divides(operator, mesh, split):
            continue
        factors = tuple(
            mesh.group_size([axis for axis, other in enumerate(order) if other == place])
            for place in range(len(names))
        )
        inversions = sum(before > after for before, after in itertools.combinations(order, 2))
        best[factors] = min(best.get(factors, (inversions, split)), (inversions, split))
    if not best:
        return configurations(replace(operator, may_repeat=True), mesh, breadth=breadth)
    return tuple(best[factors][1] for factors in sorted(best, reverse=True))


def _divides(operator: Operator, mesh: DeviceMesh, split: Configuration) -> bool:
    return all(
        name == REPEATED or mesh.can_split(operator.size(name), axis)
        for axis, name in enumerate(split)
    )


def matrix_product(
    leading: tuple[Dim, ...],
    inputs: Dim,
    outputs: Dim,
    *,
    input_width: int = 1,
    output_width: int = 1,
) -> Operator:
    """A linear layer on tensors of `leading` + features; `width` features for every index.

    Only the first of the leading dims is split: a split of another costs the same or more. Biases
    are left out: they are a thousandth of what the weight is.
    """
    outputs, inputs = replace(outputs, name="out"), replace(inputs, name="in")
    rows = tuple(dim.name for dim in leading)
    columns = outputs.size * output_width
    return Operator(
        dims=(*_first_only(leading), outputs, inputs),
        inputs=(Operand((*rows, "in"), input_width, ELEMENT_BYTES),),
        parameters=(Operand(("in", "out"), input_width * output_width),),
        output=Operand((*rows, "out"), output_width),
        flops=2.0 * math.prod(dim.size for dim in leading) * inputs.size * input_width * columns,
        rate="gemm",
        backward=_PRODUCT_BACKWARD,
    )


def _first_only(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return (dims[0], *(replace(dim, is_splittable=False) for dim in dims[1:]))


def convolution(
    batch: Dim, inputs: int, outputs: int, *, kernel: int, height: int, width: int
) -> Operator:
    """A convolution that keeps height and width; images are not cut.

    Its ReLU keeps nothing of its own and is applied where the result is read.
    """
    pixels = height * width
    return Operator(
        dims=(batch, Dim("out", outputs), Dim("in", inputs)),
        inputs=(Operand((batch.name, "in"), pixels, ELEMENT_BYTES),),
        parameters=(Operand(("in", "out"), kernel * kernel),),
        output=Operand((batch.name, "out"), pixels),
        flops=2.0 * batch.size * pixels * kernel * kernel * inputs * outputs,
        rate="gemm",
        backward=_PRODUCT_BACKWARD,
    )


def elementwise(dims: tuple[Dim, ...], *, width: int = 1, output_width: int = 1) -> Operator:
    """A nonlinear function at each index of `dims`, such as GELU; keeps its input.

    `width` is the elements it reads there, of which `output_width` come out: 2 and 1 for SwiGLU.
    """
    names = tuple(dim.name for dim in dims)
    return Operator(
        dims=dims,
        inputs=(Operand(names, width, ELEMENT_BYTES),),
        output=Operand(names, output_width),
        may_repeat=True,
    )


def addition(dims: tuple[Dim, ...], *, dropout: bool = False) -> Operator:
    """The sum of a new tensor and the residual; dropout on the new one keeps a mask, a byte each.

    The last dim holds features and is not split: norms on both sides need whole ones.
    """
    operator = elementwise(_whole_features(dims))
    names = operator.inputs[0].dims
    new = Operand(names, kept_bytes=1.0 if dropout else 0.0)
    return replace(operator, inputs=(new, Operand(names)))


def normalisation(dims: tuple[Dim, ...]) -> Operator:
    """A layer norm over the last dim, with gain and offset; keeps its input."""
    operator = elementwise(_whole_features(dims))
    return replace(operator, parameters=(Operand((dims[-1].name,), 2),))


def _whole_features(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return (*dims[:-1], replace(dims[-1], is_splittable=False))


def pooling(batch: Dim, channels: int, *, height: int, width: int) -> Operator:
    """Pooling of 2 x 2 pixels to one; keeps which of the four was taken, a byte each."""
    dims = (batch.name, "channels")
    return Operator(
        dims=(batch, Dim("channels", channels)),
        inputs=(Operand(dims, height * width),),
        output=Operand(dims, height * width // 4, 1.0),
        may_repeat=True,
    )


def embedding(leading: tuple[Dim, ...], vocabulary: int, features: Dim) -> Operator:
    """A table look-up: a matrix product by one-hot rows, of which only the traffic costs."""
    rows = tuple(dim.name for dim in leading)
    return Operator(
        dims=(*_first_only(leading), replace(features, name="out"), Dim("vocabulary", vocabulary)),
        parameters=(Operand(("vocabulary", "out")),),
        output=Operand((*rows, "out")),
    )


def attention_core(
    batch: Dim, sequence: Dim, heads: Dim, *, query_width: int, input_width: int, is_causal: bool
) -> Operator:
    """Fused attention; `heads` counts the parts (query groups) that share no key or value.

    `input_width` is the features of queries, keys and values of one part, `query_width` those of
    its queries and of the result. The input is kept, the result by whoever reads it; the scores
    never exist as a whole.
    """
    names = (batch.name, sequence.name, heads.name)
    scores = batch.size * sequence.size**2 * (0.5 if is_causal else 1.0)
    return Operator(
        dims=(batch, replace(sequence, is_splittable=False), heads),
        inputs=(Operand(names, input_width, ELEMENT_BYTES),),
        output=Operand(names, query_width),
        flops=4.0 * scores * heads.size * query_width,
        rate="flash",
        backward=_FLASH_BACKWARD,
    )


def loss(leading: tuple[Dim, ...], classes: Dim) -> Operator:
    """Cross entropy; keeps the probabilities in fp32.

    Split over classes it needs three sums per row: maximum, denominator, the target's logit.
    """
    rows = tuple(dim.name for dim in leading)
    return Operator(
        dims=(*_first_only(leading), replace(classes, name="classes")),
        inputs=(Operand((*rows, "classes"), 1, 4.0),),
        statistics=(Operand(rows, 3),),
        may_repeat=True,
    )
