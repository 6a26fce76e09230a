"""A real Megatron job that changes layout goes on exactly as if it had not."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tenplex_megatron.elastic.report import Run, largest_difference
from tests.end_to_end.megatron_jobs import Job

STEPS = 6
EXACT = 2e-5
DISTRIBUTED = "--use-distributed-optimizer"


@dataclass(frozen=True)
class Case:
    """Flags, the layouts of the legs, and how far losses may differ in the end."""

    name: str
    flags: tuple[str, ...]
    legs: tuple[tuple[str, int], ...]
    tolerance: float = EXACT
    optimizer_step: float | None = float(STEPS)


CASES = (
    Case(
        "every axis at once, distributed optimizer",
        (DISTRIBUTED,),
        (("TP2,PP2,DP1", 2), ("TP1,PP1,DP3", 4), ("TP2,PP1,DP2", STEPS)),
    ),
    Case("fp32 optimizer", (), (("TP1,PP1,DP2", 3), ("TP2,PP2,DP1", STEPS))),
    Case(
        "SGD and its momentum",
        ("--optimizer=sgd", "--sgd-momentum=0.9"),
        (("TP1,PP1,DP2", 3), ("TP2,PP1,DP1", STEPS)),
        optimizer_step=None,
    ),
    Case("bf16 and masters", ("--bf16",), (("TP1,PP2,DP1", 3), ("TP2,PP1,DP1", STEPS)), 2e-2),
    Case(
        "bf16, distributed, overlapped",
        ("--bf16", DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather"),
        (("TP1,PP2,DP2", 3), ("TP1,PP1,DP2", STEPS)),
        2e-2,
    ),
    Case(
        "fp16 and its loss scaler",
        ("--fp16", DISTRIBUTED, "--initial-loss-scale=64", "--loss-scale-window=2"),
        (("TP1,PP1,DP2", 3), ("TP1,PP2,DP1", STEPS)),
        2e-2,
    ),
    Case(
        "interleaved and uneven stages",
        (DISTRIBUTED,),
        (("PP2,VPP2", 2), ("PP2,STAGES3-1", 4), ("PP2,DP2,STAGES1-3", STEPS)),
    ),
    Case(
        "untied embeddings",
        (DISTRIBUTED, "--untie-embeddings-and-output-weights"),
        (("TP2,PP1,DP2", 3), ("TP1,PP2,DP1", STEPS)),
    ),
    Case(
        "mixture of experts",
        (
            DISTRIBUTED,
            "--num-experts=4",
            "--moe-router-topk=2",
            "--moe-token-dispatcher-type=alltoall",
            "--moe-ffn-hidden-size=64",
            "--moe-router-load-balancing-type=none",
        ),
        (("DP2,EP2", 3), ("DP4,EP4", STEPS)),
        # A token near the border between two experts may take the other one.
        2e-2,
    ),
)


def fingerprints(run: Run, generation: int, when: str) -> dict[str, int]:
    (found,) = (
        event["tensors"]
        for event in run.events
        if (event["kind"], event["generation"], event.get("when"))
        == ("fingerprint", generation, when)
    )
    return dict(found)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_job_goes_on_as_if_nothing_had_happened(
    case: Case, tmp_path: Path, store_directory: Path, dataset: Path
) -> None:
    def job(name: str) -> Job:
        return Job(tmp_path / name, store_directory / name, dataset, STEPS, case.flags)

    plain, elastic = job("plain"), job("elastic")
    expected = plain.run([(case.legs[0][0], STEPS)])
    found = elastic.run(case.legs)

    assert len(found.losses) == STEPS
    assert largest_difference(expected.losses, found.losses) <= case.tolerance
    assert elastic.samples(found) == plain.samples(expected)
    assert len(plain.samples(expected)[STEPS]) == 12
    for generation in range(1, len(case.legs)):
        left = fingerprints(found, generation, "departure")
        assert left
        assert fingerprints(found, generation + 1, "arrival") == left
    assert_same_progress(elastic.final_progress(), plain.final_progress(), case.optimizer_step)


def assert_same_progress(
    found: dict[str, Any], expected: dict[str, Any], optimizer_step: float | None
) -> None:
    """Step, schedule, samples, Adam's step, learning rates, scalers: equal, not almost equal."""
    for key in ("step", "counters", "schedule", "floating_point_operations"):
        assert found[key] == expected[key], key
    merged = [
        {
            name: values
            for entry in progress["optimizers"]
            for name, values in entry["groups"].items()
        }
        for progress in (found, expected)
    ]
    shared = merged[0].keys() & merged[1].keys()
    assert shared
    assert all(merged[0][name] == merged[1][name] for name in shared)
    steps, scalers = (
        [{repr(entry[key]) for entry in progress["optimizers"]} for progress in (found, expected)]
        for key in ("step", "scaler")
    )
    assert steps[0] == steps[1] == {repr(optimizer_step)}
    assert scalers[0] == scalers[1]


def test_random_streams_go_on_when_tensor_and_pipeline_sizes_stay(
    tmp_path: Path, store_directory: Path, dataset: Path
) -> None:
    flags = (DISTRIBUTED, "--hidden-dropout=0.2", "--attention-dropout=0.2")
    plain = Job(tmp_path / "plain", store_directory / "plain", dataset, 4, flags)
    elastic = Job(tmp_path / "elastic", store_directory / "elastic", dataset, 4, flags)
    expected = plain.run([("TP2,PP1,DP1", 4)])
    found = elastic.run([("TP2,PP1,DP1", 2), ("TP2,PP1,DP1", 4)])
    assert found.losses == expected.losses
