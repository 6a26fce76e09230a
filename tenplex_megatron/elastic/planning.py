"""What does the planner know about this job and the devices it runs on?"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tenplex_megatron.adapters.arguments import ArgumentAdapter
from tenplex_megatron.config import ElasticPolicy, cluster_file, known_clusters, load_profile
from tenplex_megatron.elastic.membership import Rules
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.allowed import Job
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.profile import ModelProfile

__all__ = ["rules_of"]


def rules_of(
    policy: ElasticPolicy,
    path: Path,
    arguments: ArgumentAdapter,
    argv: Sequence[str],
    *,
    devices_per_node: int,
) -> Rules:
    """All that choices are made by.

    Args:
        policy: the policy in the file `path`.
        path: clusters may be named by files next to it.
        arguments: knows the framework of the script.
        argv: the script's own flags.
        devices_per_node: as many as this job has, whatever the profile says.

    Raises:
        ConfigError: the flags or the policy are wrong, or no profile of the devices is known.
    """
    named = policy.planner.model
    model = (
        arguments.profile(argv, is_rough=True)
        if named is None
        else load_profile(ModelProfile, path.parent / named)
    )
    base = arguments.strategy(argv)
    job = Job(model=model, base=base, layouts=policy.layouts or arguments.usual_layouts(argv))
    name = policy.planner.cluster or _cluster_of(policy.device, policy)
    try:
        file = cluster_file(name, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{policy.place('planner.cluster')}: {error}") from None
    cluster = load_profile(ClusterProfile, file)
    memory_bytes = _memory_limit(policy, cluster, file)
    cluster = replace(cluster, devices_per_node=devices_per_node, memory_bytes=memory_bytes)
    return Rules(policy, job, cluster)


def _cluster_of(device: str, policy: ElasticPolicy) -> str:
    if device == "cpu":
        return "cpu"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found = _profile_of(gpu)
    if found is None:
        raise ConfigError(
            f"{policy.place('planner')}: no profile of the GPU {gpu!r} is known, only of "
            f"{', '.join(known_clusters())}; set planner.cluster to one of these or to the path "
            "of a copy with this GPU's numbers"
        )
    return found


def _profile_of(gpu: str) -> str | None:
    """The profile whose name begins with the model of a GPU.

    >>> _profile_of("NVIDIA H100 80GB HBM3"), _profile_of("NVIDIA GH200 480GB")
    ('h100', 'gh200')
    """
    words = gpu.lower().replace("-", " ").split()
    names = (name for name in known_clusters() if name.partition("_")[0] in words)
    return next(names, None)


def _memory_limit(policy: ElasticPolicy, cluster: ClusterProfile, file: Path) -> float:
    limit = policy.planner.memory_gb
    if limit is None:
        return cluster.memory_bytes
    if limit * 1e9 > cluster.memory_bytes:
        raise ConfigError(
            f"{policy.place('planner.memory_gb')}: expected at most the "
            f"{cluster.memory_bytes / 1e9:.4g} GB that memory_bytes in {file} says, got {limit}; "
            "correct one of them"
        )
    return limit * 1e9
