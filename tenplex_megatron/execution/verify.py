"""Does the live state of all ranks have the fingerprint it had before the change?"""

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tenplex_megatron.core.codec import canonical, collection_from_json, collection_to_json
from tenplex_megatron.core.collection import TensorCollection, merge_specs
from tenplex_megatron.core.fingerprint import add_fingerprints, fingerprint_part, owned_parts
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.execution.executor import Target
from tenplex_megatron.transport.base import Transport

__all__ = ["fingerprint_state", "gather_collection"]

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def gather_collection(
    specs: dict[str, TensorSpec], boxes: Sequence[Box], transport: Transport, *, timeout_s: float
) -> TensorCollection:
    """What every rank holds; collective.

    Raises:
        LayoutError: two ranks describe one tensor differently.
    """
    mine = canonical(collection_to_json(TensorCollection(specs, {0: tuple(boxes)})))
    merged: dict[str, TensorSpec] = {}
    holdings: dict[int, tuple[Box, ...]] = {}
    for rank, row in enumerate(transport.gather(mine.encode(), timeout_s=timeout_s)):
        part = collection_from_json(json.loads(row))
        merge_specs(merged, part.tensors)
        holdings[rank] = part.holdings[0]
    return TensorCollection(merged, holdings)


def fingerprint_state(
    collection: TensorCollection,
    rank: int,
    targets: Sequence[Target],
    transport: Transport,
    *,
    timeout_s: float,
) -> dict[str, int]:
    """Tensor name -> fingerprint over all ranks; collective, equal on every rank."""
    mine: dict[str, int] = {}
    for part in owned_parts(collection, rank):
        spec = collection.tensors[part.tensor]
        for target in targets:
            whole = target.box.region
            if target.box.tensor == part.tensor and whole.contains(part.region):
                shaped = target.flat.detach().cpu().view(whole.shape)
                piece = shaped[part.region.relative_to(whole).slices()].contiguous()
                value = fingerprint_part(spec, part.region, _bits(piece))
                mine = add_fingerprints(mine, {part.tensor: value})
                break
    rows = transport.gather(json.dumps(mine).encode(), timeout_s=timeout_s)
    return add_fingerprints(*(json.loads(row) for row in rows))


def _bits(tensor: torch.Tensor) -> npt.NDArray[np.unsignedinteger]:
    raw = tensor.reshape(-1).view(torch.uint8).numpy()
    return raw.view(_BITS[tensor.element_size()]).reshape(tensor.shape)
