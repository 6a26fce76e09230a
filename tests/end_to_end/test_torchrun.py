"""Plain torchrun with the flag: the policy gives every start its layout, the store its state."""

from pathlib import Path

import pytest

from tests.end_to_end.torchrun_jobs import STEPS, STOP, Place, assert_same_course

SCRIPT = Path(__file__).parents[2] / "scripts/pretrain_gpt.py"


@pytest.fixture
def place(tmp_path: Path, store_directory: Path, dataset: Path) -> Place:
    return Place(tmp_path, store_directory, dataset)


def test_a_second_start_with_other_ranks_goes_on_where_the_first_left(place: Place) -> None:
    policy = place.policy("policy", ["TP2,PP1,DP1", "TP1,PP2,DP2"], {2: 4})
    place.torchrun("whole", 2, SCRIPT, policy)
    first = place.torchrun("split", 2, SCRIPT, policy, "--exit-interval", str(STOP))
    assert "schedule needs `tenplex run`" in first
    assert max(place.run("split").losses) == STOP
    second = place.torchrun("split", 4, SCRIPT, policy)
    assert f"job split: TP1,PP2,DP2 from step {STOP} of 2 ranks" in second
    assert_same_course(place, "split", "whole")
    again = place.torchrun("split", 2, SCRIPT, policy)
    assert f"step {STEPS} of {STEPS} is done already, nothing is left to train" in again
    other = place.torchrun("split", 2, SCRIPT, policy, "--lr=1", code=1)
    assert "holds snapshots of job 'split'" in other
    assert "TENPLEX_JOB names the job" in other
    # torchrun itself reports failed ranks with a trace of its own; the ranks have none.
    assert "tenplex_megatron/auto.py" not in other
