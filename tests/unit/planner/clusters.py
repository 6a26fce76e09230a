"""Which cluster do tests of the planner predict for, when its numbers do not matter?"""

from tenplex_megatron.planner.cluster import ClusterProfile

__all__ = ["A100"]

A100 = ClusterProfile(
    name="test",
    devices_per_node=8,
    memory_bytes=80e9,
    peak_flops=312e12,
    memory_bandwidth=2e12,
    node_bandwidth=300e9,
    network_bandwidth=25e9,
)
