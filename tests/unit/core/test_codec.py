"""Text of values: canonical, versioned, and the same whatever the order of dicts and hashes."""

import json
import os
import random
import subprocess
import sys

import pytest

from tenplex_megatron.core.codec import (
    FORMAT,
    canonical,
    decode,
    encode,
    plan_to_json,
    region_from_json,
    region_to_json,
    specs_from_json,
    specs_to_json,
)
from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.core.plan import ReshardPlan, Topology, plan_reshard
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import TensorSpec
from tenplex_megatron.errors import LayoutError, StoreError
from tenplex_megatron.testing.generate import ModelShape, megatron_collection, topology_of

MODEL = ModelShape(vocab=101, divisible_by=8, pad_by_tp=True)
OLD, NEW = ParallelLayout(tp=2, pp=2, dp=2), ParallelLayout(tp=4, dp=2)


def plan_of(source: TensorCollection, target: TensorCollection, topology: Topology) -> str:
    return encode(plan_reshard(source, target, topology))


def shuffled[K, V](table: dict[K, V], seed: int) -> dict[K, V]:
    items = list(table.items())
    random.Random(seed).shuffle(items)
    return dict(items)


def shuffled_collection(held: TensorCollection, seed: int) -> TensorCollection:
    holdings = {}
    for rank, boxes in shuffled(dict(held.holdings), seed).items():
        mixed = list(boxes)
        random.Random(seed + rank).shuffle(mixed)
        holdings[rank] = tuple(mixed)
    return TensorCollection(shuffled(dict(held.tensors), seed), holdings)


@pytest.mark.parametrize("seed", range(3))
def test_plans_do_not_depend_on_the_order_of_anything(seed: int) -> None:
    source, target = megatron_collection(MODEL, OLD), megatron_collection(MODEL, NEW)
    where = topology_of(8, 8, 4)
    mixed = Topology(
        shuffled(dict(where.source_nodes), seed), shuffled(dict(where.target_nodes), seed)
    )
    assert plan_of(
        shuffled_collection(source, seed), shuffled_collection(target, seed + 1), mixed
    ) == plan_of(source, target, where)


def test_plans_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from tenplex_megatron.core.codec import encode\n"
        "from tenplex_megatron.core.mesh import ParallelLayout\n"
        "from tenplex_megatron.core.plan import plan_reshard\n"
        "from tenplex_megatron.testing.generate import *\n"
        "model = ModelShape(vocab=101, divisible_by=8, pad_by_tp=True)\n"
        "old, new = (ParallelLayout.parse(text) for text in ('TP2,PP2,DP2', 'TP4,DP2'))\n"
        "ends = [megatron_collection(model, layout) for layout in (old, new)]\n"
        "print(encode(plan_reshard(*ends, topology_of(8, 8, 4))))\n"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=50,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    here = plan_of(
        megatron_collection(MODEL, OLD), megatron_collection(MODEL, NEW), topology_of(8, 8, 4)
    )
    assert texts == {here}


def test_values_read_back_equal_and_write_the_same_text() -> None:
    source, target = megatron_collection(MODEL, OLD), megatron_collection(MODEL, NEW)
    made = plan_reshard(source, target, topology_of(8, 8, 2))
    assert made.created
    assert decode(encode(made), ReshardPlan) == made
    assert decode(encode(source), TensorCollection) == source
    assert decode(encode(NEW), ParallelLayout) == NEW
    assert encode(decode(encode(made), ReshardPlan)) == encode(made)


def test_parts_read_back_equal() -> None:
    region = Region((1, 2), (3, 4))
    assert region_from_json(json.loads(canonical(region_to_json(region)))) == region
    assert region_from_json(region_to_json(Region((), ()))) == Region((), ())
    specs = {"a": TensorSpec("a", (2, 3), "bfloat16", padded=True)}
    assert specs_from_json(json.loads(canonical(specs_to_json(specs)))) == specs


def test_text_is_sorted_and_compact() -> None:
    text = encode(NEW)
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))


def test_another_format_version_is_refused_with_both_numbers() -> None:
    text = encode(NEW).replace(f'"format":{FORMAT}', '"format":99')
    with pytest.raises(StoreError, match=f"written in format 99, .* reads format {FORMAT} only"):
        decode(text, ParallelLayout)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON"),
        ("[]", "written in format None"),
        (encode(ParallelLayout()), "got that of a 'layout'"),
        (canonical({"format": FORMAT, "kind": "plan"}), "missing or malformed"),
        (canonical({"format": FORMAT, "kind": "plan", "value": []}), "missing or malformed"),
    ],
)
def test_damaged_or_foreign_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        decode(text, ReshardPlan)


def test_contradictions_inside_a_text_stay_layout_errors() -> None:
    text = encode(NEW).replace('"tp":4', '"tp":0')
    with pytest.raises(LayoutError, match="size of at least 1"):
        decode(text, ParallelLayout)


def test_other_types_have_no_text() -> None:
    with pytest.raises(TypeError, match="int has no JSON form"):
        encode(3)  # type: ignore[arg-type]


def test_a_plan_names_its_tensors_nodes_and_counts() -> None:
    held = megatron_collection(ModelShape(), ParallelLayout())
    found = plan_to_json(plan_reshard(held, held, topology_of(1, 1, 1)))
    assert sorted(found) == [
        "bytes_lower_bound",
        "created",
        "source_nodes",
        "target_nodes",
        "tensors",
        "transfers",
        "unused",
    ]
