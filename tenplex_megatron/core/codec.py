"""How layouts, collections and plans are written as JSON, and read back.

The text is canonical: keys sorted, no spaces, every list in the order of the value itself. Equal
values give equal text on every rank, so that ranks may compare digests instead of plans.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.core.plan import ReshardPlan, Topology, Transfer
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import StoreError

__all__ = [
    "FORMAT",
    "canonical",
    "collection_from_json",
    "collection_to_json",
    "decode",
    "encode",
    "plan_from_json",
    "plan_to_json",
    "region_from_json",
    "region_to_json",
    "specs_from_json",
    "specs_to_json",
]

FORMAT = 1
"""The version of everything this module writes; another one is refused."""

type Json = Any


def canonical(value: Json) -> str:
    """The one text of a JSON value.

    >>> canonical({"b": [1, 2], "a": None})
    '{"a":null,"b":[1,2]}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def encode(value: ParallelLayout | TensorCollection | ReshardPlan) -> str:
    """The canonical text of a layout, a collection or a plan.

    >>> encode(ParallelLayout(tp=2))[:34]
    '{"format":1,"kind":"layout","value'
    """
    kind, write, _ = _coder(type(value))
    return canonical({"format": FORMAT, "kind": kind, "value": write(value)})


def decode[T: (ParallelLayout, TensorCollection, ReshardPlan)](text: str, wanted: type[T]) -> T:
    """The value of type `wanted` in a text that `encode` wrote.

    Raises:
        StoreError: when the text is damaged, of another format version, or of another kind.
    """
    kind, _, read = _coder(wanted)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise StoreError(f"{kind}: expected JSON, got {text[:40]!r}: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        version = found.get("format") if isinstance(found, dict) else None
        raise StoreError(
            f"{kind}: written in format {version!r}, this version reads format {FORMAT} only; "
            "use the version that wrote it"
        )
    if found.get("kind") != kind:
        raise StoreError(f"expected the text of a {kind}, got that of a {found.get('kind')!r}")
    try:
        return cast(T, read(found["value"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{kind}: fields are missing or malformed: {error!r}") from error


def region_to_json(region: Region) -> Json:
    """A region as its start and stop.

    >>> region_to_json(Region((0, 1), (2, 3)))
    [[0, 1], [2, 3]]
    """
    return [list(region.start), list(region.stop)]


def region_from_json(value: Json) -> Region:
    """The region that `region_to_json` wrote."""
    start, stop = value
    return Region(tuple(map(int, start)), tuple(map(int, stop)))


def specs_to_json(specs: Mapping[str, TensorSpec]) -> Json:
    """Specs by name."""
    return {
        name: {"shape": list(spec.shape), "dtype": spec.dtype, "padded": spec.padded}
        for name, spec in specs.items()
    }


def specs_from_json(value: Json) -> dict[str, TensorSpec]:
    """The specs that `specs_to_json` wrote."""
    return {
        name: TensorSpec(name, tuple(map(int, one["shape"])), one["dtype"], bool(one["padded"]))
        for name, one in value.items()
    }


def collection_to_json(collection: TensorCollection) -> Json:
    """Specs by name, and boxes by rank as [tensor, start, stop]."""
    return {
        "tensors": specs_to_json(collection.tensors),
        "holdings": {
            str(rank): [[box.tensor, *region_to_json(box.region)] for box in boxes]
            for rank, boxes in collection.holdings.items()
        },
    }


def collection_from_json(value: Json) -> TensorCollection:
    """The collection that `collection_to_json` wrote."""
    holdings = {
        int(rank): tuple(Box(name, region_from_json(bounds)) for name, *bounds in boxes)
        for rank, boxes in value["holdings"].items()
    }
    return TensorCollection(specs_from_json(value["tensors"]), holdings)


def plan_to_json(plan: ReshardPlan) -> Json:
    """Every field; transfers as [target, tensor, start, stop, source, sender]."""
    return {
        "tensors": specs_to_json(plan.tensors),
        "source_nodes": _nodes_to_json(plan.topology.source_nodes),
        "target_nodes": _nodes_to_json(plan.topology.target_nodes),
        "transfers": [
            [one.target_rank, one.tensor, *region_to_json(one.region), *_ends(one)]
            for one in plan.transfers
        ],
        "created": [[rank, box.tensor, *region_to_json(box.region)] for rank, box in plan.created],
        "bytes_lower_bound": plan.bytes_lower_bound,
        "unused": list(plan.unused),
    }


def plan_from_json(value: Json) -> ReshardPlan:
    """The plan that `plan_to_json` wrote."""
    return ReshardPlan(
        tensors=specs_from_json(value["tensors"]),
        topology=Topology(
            _nodes_from_json(value["source_nodes"]), _nodes_from_json(value["target_nodes"])
        ),
        transfers=tuple(
            Transfer(target, tensor, region_from_json((start, stop)), source, sender)
            for target, tensor, start, stop, source, sender in value["transfers"]
        ),
        created=tuple(
            (rank, Box(tensor, region_from_json(bounds)))
            for rank, tensor, *bounds in value["created"]
        ),
        bytes_lower_bound=int(value["bytes_lower_bound"]),
        unused=tuple(value["unused"]),
    )


def _ends(transfer: Transfer) -> tuple[int, int]:
    return transfer.source_rank, transfer.sender_rank


def _nodes_to_json(nodes: Mapping[int, str]) -> Json:
    return {str(rank): node for rank, node in nodes.items()}


def _nodes_from_json(value: Json) -> dict[int, str]:
    return {int(rank): str(node) for rank, node in value.items()}


type Coder = tuple[str, Callable[[Json], Json], Callable[[Json], object]]

_CODERS: dict[type, Coder] = {
    ParallelLayout: ("layout", ParallelLayout.to_json, ParallelLayout.from_json),
    TensorCollection: ("collection", collection_to_json, collection_from_json),
    ReshardPlan: ("plan", plan_to_json, plan_from_json),
}


def _coder(kind: type) -> Coder:
    if kind not in _CODERS:
        raise TypeError(
            f"{kind.__name__} has no JSON form; known are {[k.__name__ for k in _CODERS]}"
        )
    return _CODERS[kind]
