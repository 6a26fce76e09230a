"""`tenplex run`: torchrun's command line with a policy."""

import argparse
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.run import get_args_parser

from tenplex_megatron.adapters.registry import argument_adapter
from tenplex_megatron.elastic.launch import LaunchOptions, run_node
from tenplex_megatron.elastic.requests import default_run_dir

__all__ = ["build_parser", "parse_options", "run"]

_POLL_S = "0.02"
_DESCRIPTION = """Trains SCRIPT under a policy. Start it once on every node, like torchrun, whose
options keep their meaning; here --max-restarts overrides max_failures of the policy."""
_EPILOG = """examples:
  one node, eight GPUs:
    tenplex run --elastic-policy elastic.yaml --standalone --nproc-per-node 8 pretrain_gpt.py ...
  two nodes, the same line on both:
    tenplex run --elastic-policy elastic.yaml --nnodes 2 --nproc-per-node 8 --job gpt \\
        --rdzv-backend c10d --rdzv-endpoint node0:29500 pretrain_gpt.py ...
  two agents on one machine play two nodes:
    tenplex run ... --node-name a ... &  tenplex run ... --node-name b ...

exit codes: 0 training finished, 2 wrong input, 1 anything else.
"""


def run(arguments: Sequence[str]) -> int:
    """Run this node's part of a job."""
    logging.basicConfig(format="%(asctime)s %(levelname).1s tenplex: %(message)s")
    logging.getLogger("tenplex_megatron").setLevel(logging.INFO)
    options, torchrun = parse_options(arguments)
    return run_node(options, torchrun, argument_adapter)


def parse_options(arguments: Sequence[str]) -> tuple[LaunchOptions, argparse.Namespace]:
    """This package's options, and torchrun's."""
    given = build_parser().parse_args(arguments)
    job = given.job or (given.rdzv_id if given.rdzv_id != "none" else None)
    job = job or Path(given.training_script).stem
    run_dir = given.run_dir or default_run_dir(job)
    options = LaunchOptions(
        policy=given.elastic_policy,
        node=given.node_name or socket.gethostname().partition(".")[0],
        job=job,
        run_dir=run_dir,
        store_dir=given.store_dir,
        keep_store=given.keep_store,
    )
    if given.log_dir is None:
        given.log_dir = str(run_dir / "nodes" / options.node / "logs")
    return options, given


def build_parser() -> argparse.ArgumentParser:
    """Torchrun's parser with this package's options."""
    parser = get_args_parser()
    parser.prog = "tenplex run"
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    ours = parser.add_argument_group("elastic")
    ours.add_argument(
        "--elastic-policy",
        "--elastic_policy",
        type=Path,
        required=True,
        metavar="YAML",
        help="what the job may do; see configs/elastic/default.yaml",
    )
    ours.add_argument("--job", help="name of the job (default: --rdzv-id, or the script's name)")
    ours.add_argument("--node-name", help="name of this node (default: its host name)")
    ours.add_argument(
        "--run-dir", type=Path, help="folder for events, logs and requests (default: by job)"
    )
    ours.add_argument(
        "--store-dir", type=Path, help="folder on tmpfs for snapshots (default: the policy's)"
    )
    ours.add_argument(
        "--keep-store", action="store_true", help="keep the snapshots when training has finished"
    )
    changed = {"start_method": "forkserver", "monitor_interval": float(_POLL_S)}
    for name, value in changed.items():
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: value})
    return parser
