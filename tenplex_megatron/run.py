"""The module to name where a launcher starts one process per device.

    deepspeed --num_accelerators 4 --no_local_rank --module tenplex_megatron.run \
        train.py --elastic-policy elastic.yaml --deepspeed_config ds.json

Launchers end everything when one of their processes fails.  So the first process of a node becomes
the agent, which starts the workers of every generation itself and outlives them; the others leave
at once, with success.  Options of `tenplex run` may stand before the script.
"""

import os
import sys
from collections.abc import Mapping, Sequence

from tenplex_megatron.cli.main import main as tenplex
from tenplex_megatron.errors import ConfigError

__all__ = ["main", "run_arguments"]

_FLAG = "--elastic-policy"
_LAUNCHERS = (
    ("LOCAL_RANK", "LOCAL_SIZE", "WORLD_SIZE"),
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    ("LOCAL_RANK", "WORLD_SIZE", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_SIZE"),
    ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"),
)
"""What DeepSpeed's own, torchrun, Open MPI, MVAPICH, MPICH and srun call the rank of a process on
its node, and the numbers of processes there and in all."""
_OF_ONE_WORKER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this node's agent, or leave; the exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    local_rank, _, _ = _seat(os.environ)
    if int(local_rank):
        return 0
    try:
        command = run_arguments(argv, os.environ)
    except ConfigError as error:
        sys.stderr.write(f"tenplex: {error}\n")
        return 2
    for name in _OF_ONE_WORKER:
        os.environ.pop(name, None)
    return tenplex(["run", *command])


def run_arguments(argv: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """What `tenplex run` is told, from the script's line and the launcher's variables.

    >>> run_arguments(["--local_rank=0", "t.py", "--elastic-policy", "p.yaml"], {"WORLD_SIZE": "2"})
    ['--elastic-policy=p.yaml', '--nproc-per-node=2', '--standalone', 't.py']

    Raises:
        ConfigError: there is no policy, or nobody says where several nodes meet.
    """
    kept, policy = _take_policy([word for word in argv if not word.startswith("--local_rank")])
    nodes = int(environment.get("CROSS_SIZE", "1"))
    _, per_node, total = _seat(environment)
    if nodes == 1 and per_node != total:
        raise ConfigError(
            f"a launcher started {total} processes on several nodes and does not say where these "
            "meet; expected the deepspeed launcher with a hostfile, or `tenplex run --nnodes N "
            "--rdzv-backend c10d --rdzv-endpoint HOST:PORT`, which takes torchrun's options, once "
            "on every node"
        )
    if nodes == 1:
        place = ["--standalone"]
    else:
        endpoint = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        place = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
        place.append(f"--node-name=node-{environment['CROSS_RANK']}")
    return [f"{_FLAG}={policy}", f"--nproc-per-node={per_node}", *place, *kept]


def _seat(environment: Mapping[str, str]) -> tuple[str, str, str]:
    """The rank of this process on its node, and the numbers of processes there and in all."""
    for rank, here, everywhere in _LAUNCHERS:
        if rank in environment and here in environment:
            return environment[rank], environment[here], environment.get(everywhere, "")
    alone = environment.get("WORLD_SIZE", "1")
    return environment.get("LOCAL_RANK", "0"), alone, alone


def _take_policy(argv: Sequence[str]) -> tuple[list[str], str]:
    """The words without the policy, and its path; the last one counts."""
    kept: list[str] = []
    policy = ""
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in (_FLAG, _FLAG.replace("elastic-", "elastic_")):
            kept.append(word)
        else:
            policy = value if equals else next(words, "")
    if not policy:
        raise ConfigError(f"expected {_FLAG} FILE after the script, got none")
    return kept, policy


if __name__ == "__main__":
    sys.exit(main())
