"""Does the planner order the layouts of the demo model as they really run on this machine?

Every layout trains the demo model on 4 CPU ranks, as an elastic job whose policy allows nothing
else. The three pure ones (TP4, PP4, DP4) calibrate the profile of this machine; the others are
predicted, and compared with what the job itself measured: the median of its steps.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from demo import ROOT, SCRIPTS, prepare_data, tenplex
from demo_model import model_flags
from rich.console import Console
from scipy.stats import spearmanr

from tenplex_megatron.adapters.megatron.arguments import MegatronArguments
from tenplex_megatron.config import load_profile
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.elastic.step_times import read_step_times
from tenplex_megatron.planner.allowed import Job
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.timing.calibrate import Measurement, calibrate
from tenplex_megatron.planner.timing.candidates import Candidates
from tenplex_megatron.planner.timing.predict import predict_times

console = Console(stderr=True, highlight=False)
WORK = Path(f"/dev/shm/tenplex-layouts-{os.getuid()}")
RANKS = 4
LIMIT_S = 240
PURE = ("TP4", "PP4", "DP4")
"""One layout per axis: what a person would measure first."""
OTHERS = (
    *("TP2,PP2", "TP2,DP2", "PP2,DP2", "TP2,PP2,MBS1", "TP2,DP2,MBS1", "DP4,MBS1"),
    *("TP4,MBS1", "PP4,MBS1", "TP4,MBS6", "TP2,DP2,MBS6", "PP2,DP2,MBS6", "DP4,MBS6"),
    *("PP2,DP2,VPP2", "TP2,PP2,VPP2", "TP4,MBS12", "PP4,MBS4"),
)
QUICK = OTHERS[:6]


@dataclass(frozen=True)
class Times:
    """Seconds per step of every layout, in the same order."""

    layouts: tuple[str, ...]
    measured: list[float]
    rough: list[float]
    """As the profile in configs/cluster has it."""
    calibrated: list[float]


def main() -> int:
    """Measure, calibrate, predict, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  .venv/bin/python scripts/bench_layouts.py --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} layouts, fewer steps")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    given = parser.parse_args()
    others = QUICK if given.quick else OTHERS
    steps = 10 if given.quick else 18
    data = prepare_data(ROOT / "out/data/stdlib")
    measured = {}
    for layout in (*PURE, *others):
        measured[layout] = measure(layout, data, steps=steps)
        console.print(f"{layout:>14} {measured[layout]:.3f} s per step")
    times = predict(measured, others, model_flags(data, steps=steps))
    found = scores(times)
    if given.json:
        print(json.dumps(found | {"layouts": vars(times)}))
    else:
        show(times, found)
    return 0


def measure(layout: str, data: Path, *, steps: int) -> float:
    """The median step of a job in this layout.

    Raises:
        SystemExit: the job failed.
    """
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(mode=0o700)
    try:
        policy = WORK / "policy.yaml"
        policy.write_text(
            f'device: cpu\nlayouts: ["{layout}"]\nsnapshot: {{every_steps: {10 * steps}}}\n'
        )
        command = tenplex(
            *("run", f"--elastic-policy={policy}", "--standalone", f"--nproc-per-node={RANKS}"),
            *(f"--run-dir={WORK / 'run'}", f"--store-dir={WORK / 'store'}", "--redirects=3"),
            *(str(SCRIPTS / "pretrain_gpt.py"), *model_flags(data, steps=steps)),
        )
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=LIMIT_S, check=False
        )
        if done.returncode:
            raise SystemExit(f"{layout}: the job ended with {done.returncode}\n{done.stderr}")
        identity = MegatronArguments().identity(model_flags(data, steps=steps))
        (row,) = read_step_times(WORK / "run", identity)
        return row.step_s
    finally:
        shutil.rmtree(WORK, ignore_errors=True)


def predict(measured: dict[str, float], others: Sequence[str], flags: Sequence[str]) -> Times:
    """Step times of the other layouts, by the profile as it is and calibrated with the pure."""
    adapter = MegatronArguments()
    job = Job(model=adapter.profile(flags), base=adapter.strategy(flags))
    strategies = {name: job.strategy(ParallelLayout.parse(name)) for name in measured}
    profile = load_profile(ClusterProfile, ROOT / "configs/cluster/cpu.yaml")
    rows = [Measurement(job.model, strategies[name], measured[name]) for name in PURE]
    candidates = Candidates.of(job.model, [strategies[name] for name in others])
    rough, fitted = (
        predict_times(cluster, candidates).step_s.tolist()
        for cluster in (profile, calibrate(profile, rows))
    )
    return Times(tuple(others), [measured[name] for name in others], rough, fitted)


def scores(times: Times) -> dict[str, float | int]:
    """How well the calibrated prediction orders and hits what was measured."""
    measured, predicted = np.array(times.measured), np.array(times.calibrated)
    return {
        "rows": len(measured),
        "calibration_rows": len(PURE),
        "spearman": float(spearmanr(measured, predicted).statistic),
        "spearman_uncalibrated": float(spearmanr(measured, times.rough).statistic),
        "mean_error_pct": float(100.0 * np.abs(predicted / measured - 1.0).mean()),
        "regret_pct": float(100.0 * (measured[predicted.argmin()] / measured.min() - 1.0)),
    }


def show(times: Times, found: dict[str, float | int]) -> None:
    """A line per layout, fastest first, and the scores."""
    print(f"{'layout':>14}  measured  predicted  error")
    rows = zip(times.layouts, times.measured, times.calibrated, strict=True)
    for layout, measured, predicted in sorted(rows, key=lambda row: row[1]):
        error = 100.0 * (predicted / measured - 1.0)
        print(f"{layout:>14}  {measured:6.3f} s   {predicted:6.3f} s  {error:+4.0f} %")
    print(
        f"{found['rows']} layouts ordered with Spearman {found['spearman']:.2f} after "
        f"{found['calibration_rows']} calibrated (before: {found['spearman_uncalibrated']:.2f}); "
        f"mean error {found['mean_error_pct']:.0f} %, regret {found['regret_pct']:.1f} %"
    )


if __name__ == "__main__":
    sys.exit(main())
