"""Which rank holds which box of which tensor: the Parallelizable Tensor Collection.

The words of the paper: a tensor is *sliced* into regions, the regions are *partitioned* into what
one rank holds, and a partition is *allocated* to every rank that holds it. Here all three are read
off one table, rank -> boxes, which an adapter fills from what its framework knows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tenplex_megatron.core.region import Region, missing_parts
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import LayoutError

__all__ = ["TensorCollection", "join_names", "merge_specs"]


@dataclass(frozen=True, slots=True)
class TensorCollection:
    """Global tensors and the boxes of them that every rank holds.

    Both tables, and the boxes of a rank, are kept sorted, so that equal collections are equal
    values whatever order they were described in. A rank may hold nothing, or overlapping boxes.
    """

    tensors: Mapping[str, TensorSpec]
    holdings: Mapping[int, tuple[Box, ...]]

    def __post_init__(self) -> None:
        for name, spec in self.tensors.items():
            if name != spec.name:
                raise LayoutError(f"tensor {spec.name!r} is filed under the name {name!r}")
        holdings = {rank: tuple(sorted(self.holdings[rank])) for rank in sorted(self.holdings)}
        tensors = {name: self.tensors[name] for name in sorted(self.tensors)}
        object.__setattr__(self, "tensors", tensors)
        object.__setattr__(self, "holdings", holdings)

    @classmethod
    def build(
        cls, tensors: Iterable[TensorSpec], holdings: Iterable[tuple[int, Box]]
    ) -> "TensorCollection":
        """A collection out of (rank, box) pairs in any order.

        Raises:
            LayoutError: when one name is given two different specs.
        """
        specs: dict[str, TensorSpec] = {}
        for spec in tensors:
            if specs.setdefault(spec.name, spec) != spec:
                raise LayoutError(f"{spec.name}: described as {specs[spec.name]} and as {spec}")
        boxes: dict[int, list[Box]] = {}
        for rank, box in holdings:
            boxes.setdefault(rank, []).append(box)
        return cls(specs, {rank: tuple(held) for rank, held in boxes.items()})

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of the table, also those that hold nothing."""
        return tuple(self.holdings)

    @property
    def total_bytes(self) -> int:
        """Bytes of the state when every global tensor counts once."""
        return sum(spec.nbytes for spec in self.tensors.values())

    def nbytes(self, rank: int) -> int:
        """Bytes of all boxes of one rank; a box held twice counts twice."""
        return sum(box.region.numel * self.tensors[box.tensor].itemsize for box in self._held(rank))

    def holders(self, tensor: str) -> tuple[tuple[int, Region], ...]:
        """The distinct (rank, region) pairs that hold parts of `tensor`, sorted."""
        self._spec(tensor)
        return self.all_holders().get(tensor, ())

    def all_holders(self) -> dict[str, tuple[tuple[int, Region], ...]]:
        """The holders of every tensor that is held at all, by name."""
        table: dict[str, dict[tuple[int, Region], None]] = {}
        for rank, boxes in self.holdings.items():
            for box in boxes:
                table.setdefault(box.tensor, {})[rank, box.region] = None
        return {name: tuple(table[name]) for name in sorted(table)}

    def slice(self, tensor: str) -> tuple[Region, ...]:
        """The distinct regions a tensor is cut into, sorted."""
        return tuple(sorted({region for _, region in self.holders(tensor)}))

    def partition(self, rank: int) -> tuple[Box, ...]:
        """The distinct boxes one rank holds, sorted."""
        return tuple(dict.fromkeys(self._held(rank)))

    def allocate(self, box: Box) -> tuple[int, ...]:
        """The ranks whose holdings contain exactly this box, sorted."""
        return tuple(rank for rank, region in self.holders(box.tensor) if region == box.region)

    def missing(self) -> tuple[Box, ...]:
        """Disjoint, sorted boxes of all tensors that no rank holds."""
        table = self.all_holders()
        gaps: dict[tuple[object, ...], tuple[Region, ...]] = {}
        missing: list[Box] = []
        for name, spec in self.tensors.items():
            regions = tuple(sorted({region for _, region in table.get(name, ())}))
            key = (spec.shape, regions)
            if key not in gaps:
                gaps[key] = missing_parts(spec.region, regions)
            missing.extend(Box(name, region) for region in gaps[key])
        return tuple(missing)

    def validate(self) -> None:
        """Checks that boxes fit their tensors and that every element is held.

        Raises:
            LayoutError: naming the boxes that do not fit, or that nobody holds.
        """
        for rank, boxes in self.holdings.items():
            for box in boxes:
                self._check_inside(rank, box)
        missing = self.missing()
        if missing:
            raise LayoutError(f"no rank holds {join_names(map(str, missing))}")

    def restrict(self, ranks: Iterable[int]) -> "TensorCollection":
        """What is left when only `ranks` survive, with all of its elements.

        Raises:
            LayoutError: naming the boxes that lost every holder.
        """
        left = self.survivors(ranks)
        missing = left.missing()
        if missing:
            raise LayoutError(
                f"ranks {left.ranks} hold nothing of {join_names(map(str, missing))}; "
                "restore from a copy or a checkpoint"
            )
        return left

    def survivors(self, ranks: Iterable[int]) -> "TensorCollection":
        """What is left when only `ranks` survive, complete or not."""
        kept = {rank: self._held(rank) for rank in ranks}
        return TensorCollection(self.tensors, kept)

    def _held(self, rank: int) -> tuple[Box, ...]:
        if rank not in self.holdings:
            raise LayoutError(f"rank {rank} is not in this collection of ranks {self.ranks}")
        return self.holdings[rank]

    def _spec(self, tensor: str) -> TensorSpec:
        if tensor not in self.tensors:
            raise LayoutError(f"{tensor!r} is not among the {len(self.tensors)} known tensors")
        return self.tensors[tensor]

    def _check_inside(self, rank: int, box: Box) -> None:
        if box.tensor not in self.tensors:
            raise LayoutError(f"rank {rank} holds {box}, which has no tensor spec")
        spec = self.tensors[box.tensor]
        if box.region.ndim != len(spec.shape) or not spec.region.contains(box.region):
            raise LayoutError(
                f"rank {rank} holds {box}, which does not fit the tensor's shape {spec.shape}"
            )


def merge_specs(known: dict[str, TensorSpec], more: Mapping[str, TensorSpec]) -> None:
    """Add the tensors that another rank or node describes.

    Raises:
        LayoutError: a tensor is described differently.
    """
    for name, spec in more.items():
        if known.setdefault(name, spec) != spec:
            raise LayoutError(f"{name}: described as {known[name]} and as {spec}")


def join_names(names: Iterable[str], limit: int = 5) -> str:
    """Some names for a message, and how many more there are.

    >>> join_names(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    shown = list(names)
    rest = len(shown) - limit
    return ", ".join(shown[:limit]) + (f" and {rest} more" if rest > 0 else "")
