"""Streams that a framework tracks travel as bytes, or are refused."""

import pytest
import torch

from tenplex_megatron.adapters.streams import export_tracked_streams, import_tracked_streams
from tenplex_megatron.errors import LayoutError

tracking = pytest.importorskip("megatron.core.tensor_parallel.random")


def test_tracked_streams_come_back_among_others() -> None:
    states = {name: torch.Generator().manual_seed(n).get_state() for n, name in enumerate("ab")}
    old, new = tracking.CudaRNGStatesTracker(), tracking.CudaRNGStatesTracker()
    old.set_states(states)
    streams = export_tracked_streams(old)
    assert all(state.dtype == torch.uint8 for state in streams.values())
    # A copy: the tracker goes on.
    states["a"].zero_()
    import_tracked_streams(new, {"torch": torch.get_rng_state(), **streams})
    found = new.get_states()
    assert found.keys() == {"a", "b"}
    assert torch.equal(found["a"], torch.Generator().manual_seed(0).get_state())
    assert torch.equal(found["b"], states["b"])


def test_a_stream_that_holds_no_bytes_is_refused() -> None:
    # What Megatron tracks where random streams are part of a CUDA graph.
    tracker = tracking.CudaRNGStatesTracker()
    tracker.set_states({"a": torch.Generator()})
    with pytest.raises(LayoutError, match="random stream a: state is a Generator, expected a"):
        export_tracked_streams(tracker)
