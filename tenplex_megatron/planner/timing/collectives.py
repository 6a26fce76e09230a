"""How long does a collective take, and over which link does it go?

Ranks follow Megatron's default order tp-cp-ep-dp-pp, so a group of n ranks that are `stride` apart
stays in one node exactly when n * stride devices fit into it. Sizes are bytes, times seconds.
"""

from dataclasses import dataclass

import numpy as np

from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.timing.candidates import Array, Candidates

__all__ = ["Link", "all_gather_s", "all_reduce_s", "all_to_all_s", "group_link", "send_s"]


@dataclass(frozen=True, slots=True)
class Link:
    """A group of ranks and the link its ring goes over."""

    size: Array
    """Ranks of the group."""
    bandwidth: Array
    """Bytes a second that one rank moves in one direction."""
    latency_s: Array
    """Seconds of one hop."""


def group_link(cluster: ClusterProfile, size: Array, stride: Array) -> Link:
    """The link of groups of `size` ranks that are `stride` apart.

    A ring that crosses nodes enters and leaves each node through as many network cards as it has
    ranks in the node: NCCL builds one channel per card. NVLink still bounds it.
    """
    crosses = size * stride > cluster.devices_per_node
    node = cluster.node_bandwidth * cluster.node_efficiency
    ranks_in_node = np.clip(cluster.devices_per_node / stride, 1.0, size)
    network = cluster.network_bandwidth * cluster.network_efficiency * ranks_in_node
    return Link(
        size,
        np.where(crosses, np.minimum(node, network), node),
        np.where(crosses, cluster.network_latency_s, cluster.node_latency_s),
    )


def all_reduce_s(link: Link, size_bytes: Array) -> Array:
    """Ring all-reduce: every byte passes each rank twice, less the share it starts with.

    Source: Thakur et al., Optimization of Collective Communication Operations in MPICH (2005);
    the latency is that of NCCL's trees, which grows with the logarithm of the group.
    """
    return 2.0 * all_gather_s(link, size_bytes)


def all_gather_s(link: Link, size_bytes: Array) -> Array:
    """Ring all-gather or reduce-scatter of `size_bytes`, the size of the gathered whole."""
    share = (link.size - 1.0) / link.size
    return share * size_bytes / link.bandwidth + np.log2(link.size) * link.latency_s


def all_to_all_s(cluster: ClusterProfile, link: Link, stride: Array, size_bytes: Array) -> Array:
    """All-to-all in which each rank sends `size_bytes`, spread evenly over the group.

    What stays in the node goes over NVLink while the rest leaves through the rank's own card.
    """
    in_node = np.clip(cluster.devices_per_node / stride, 1.0, link.size)
    node = cluster.node_bandwidth * cluster.node_efficiency
    network = cluster.network_bandwidth * cluster.network_efficiency
    near = (in_node - 1.0) / link.size * size_bytes / node
    far = (link.size - in_node) / link.size * size_bytes / network
    return np.maximum(near, far) + np.where(link.size > 1.0, link.latency_s, 0.0)


def send_s(cluster: ClusterProfile, candidates: Candidates, size_bytes: Array) -> Array:
    """One message between neighbouring pipeline stages; the slowest pair counts.

    Some pair sits in two nodes as soon as the world does not fit into one.
    """
    stride = candidates.tp * candidates.cp * candidates.dp
    crosses = stride * candidates.pp > cluster.devices_per_node
    bandwidth = np.where(
        crosses,
        cluster.network_bandwidth * cluster.network_efficiency,
        cluster.node_bandwidth * cluster.node_efficiency,
    )
    latency = np.where(crosses, cluster.network_latency_s, cluster.node_latency_s)
    return np.where(candidates.pp > 1.0, size_bytes / bandwidth + latency, 0.0)
