"""Random streams of a DeepSpeed rank go on after an import, or start anew in every layout alike."""

import random

import numpy as np
import pytest
import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

from tenplex_megatron.adapters.deepspeed.randomness import (
    export_streams,
    import_streams,
    reseed,
)
from tenplex_megatron.adapters.streams import CarriedStreams
from tenplex_megatron.errors import LayoutError


def draw() -> list[float]:
    return [random.random(), random.gauss(), float(np.random.normal()), float(torch.rand(()))]


@pytest.fixture(autouse=True)
def streams_of_others_stay() -> object:
    before = export_streams()
    yield
    get_cuda_rng_tracker().reset()
    import_streams(before)


def test_imported_streams_go_on() -> None:
    draw()
    stored = export_streams()
    expected = [draw(), draw()]
    for seed in (1, 2):
        torch.manual_seed(seed)
        import_streams(stored)
        assert [draw(), draw()] == expected


def test_every_export_has_the_same_sizes() -> None:
    sizes = {name: state.numel() for name, state in export_streams().items()}
    draw()
    assert {name: state.numel() for name, state in export_streams().items()} == sizes


def test_new_streams_follow_from_the_seed_and_the_step() -> None:
    drawn = {}
    for seed in (1, 2):
        for step in (0, 3):
            torch.manual_seed(seed)
            draw()
            reseed(step)
            drawn[seed, step] = draw()
    assert len({tuple(values) for values in drawn.values()}) == 4
    torch.manual_seed(2)
    reseed(3)
    assert draw() == drawn[2, 3]


def draw_tracked(name: str) -> float:
    with get_cuda_rng_tracker().fork(name):
        return float(torch.rand(()))


def test_tracked_streams_go_on() -> None:
    get_cuda_rng_tracker().add("mine", 5)
    draw_tracked("mine")
    stored = export_streams()
    expected = [draw_tracked("mine"), *draw()]
    import_streams(stored)
    assert [draw_tracked("mine"), *draw()] == expected


def test_new_tracked_streams_follow_from_their_own_seed_and_the_step() -> None:
    drawn = {}
    for seed in (1, 2):
        for step in (0, 3):
            get_cuda_rng_tracker().reset()
            get_cuda_rng_tracker().add("mine", seed)
            drawn[seed] = draw_tracked("mine")
            reseed(step)
            drawn[seed, step] = draw_tracked("mine")
    assert len(set(drawn.values())) == 6
    torch.manual_seed(9)
    get_cuda_rng_tracker().reset()
    get_cuda_rng_tracker().add("mine", 2)
    reseed(3)
    assert draw_tracked("mine") == drawn[2, 3]


def test_copies_follow_the_streams_and_streams_that_come_later_are_refused() -> None:
    carried = CarriedStreams(export_streams, import_streams)
    copies = {piece.box.tensor: piece.flat for piece in carried.pieces("here", None)}
    draw()
    carried.refresh()
    now = {f"random/here/{name}": state for name, state in export_streams().items()}
    assert copies.keys() == now.keys()
    assert all(torch.equal(copies[name], state) for name, state in now.items())
    get_cuda_rng_tracker().add("late", 7)
    with pytest.raises(LayoutError, match=r"random streams: .*'tracker.late'.* now; expected"):
        carried.refresh()


def test_what_was_imported_is_set_once_before_the_first_step() -> None:
    draw()
    stored = export_streams()
    expected = draw()
    carried = CarriedStreams(export_streams, import_streams)
    pieces = carried.pieces("here", None)
    # Until something was imported nothing is touched.
    carried.resume(pytest.fail)
    for piece in carried.pieces("here", {piece.spec.name: piece.spec for piece in pieces}):
        piece.flat.copy_(stored[piece.spec.name.removeprefix("random/here/")])
    carried.keep()
    draw()
    carried.resume(pytest.fail)
    assert draw() == expected
    carried.resume(pytest.fail)
    assert draw() != expected


def test_streams_of_which_a_snapshot_lacks_one_are_derived() -> None:
    carried = CarriedStreams(export_streams, import_streams)
    first, *others = carried.pieces("here", None)
    assert carried.pieces("here", {piece.spec.name: piece.spec for piece in others}) == []
    carried.keep()
    torch.manual_seed(2)
    carried.resume(lambda: reseed(3))
    found = draw()
    torch.manual_seed(2)
    reseed(3)
    assert draw() == found
    assert first.is_local
