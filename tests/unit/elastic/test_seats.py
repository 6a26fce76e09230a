"""Local ranks count from 0, and every worker finds its own device under its number."""

import itertools

import pytest

from tenplex_megatron.elastic.seats import seat


@pytest.mark.parametrize("visible", [None, "4,5,6,7", "GPU-a,GPU-b,GPU-c,GPU-d"])
def test_a_worker_finds_its_device_under_its_local_rank(visible: str | None) -> None:
    names = visible.split(",") if visible else ["0", "1", "2", "3"]
    for count in range(1, 5):
        for devices in itertools.permutations(range(4), count):
            seats = [seat(device, devices, visible) for device in devices]
            ranks = [int(found["LOCAL_RANK"]) for found in seats]
            assert sorted(ranks) == list(range(count))
            for device, rank, found in zip(devices, ranks, seats, strict=True):
                seen = found.get("CUDA_VISIBLE_DEVICES", ",".join(names)).split(",")
                assert seen[rank] == names[device]


def test_nothing_is_hidden_where_no_device_before_the_last_rests() -> None:
    assert seat(1, [1, 0], "4,5,6") == {"LOCAL_RANK": "1"}
