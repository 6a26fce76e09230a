"""Which operators is a network made of, and which graph of costs does tracking walk for it?

A network is a list of operators and of the tensors between them. Priced on a number of devices it
becomes the graph of TensorOpt (arXiv 2004.10856): one node per operator with the cost of each of
its configurations, one edge per tensor with the cost of each pair.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.tensoropt.costs import OperatorCost
from tenplex_megatron.planner.tensoropt.mesh import DeviceMesh
from tenplex_megatron.planner.tensoropt.operators import Configuration, Operator, configurations
from tenplex_megatron.planner.timing.candidates import Array
from tenplex_megatron.planner.tracking import Edge, Node, OperatorGraph

__all__ = ["Link", "Network", "PricedNetwork", "price"]


@dataclass(frozen=True, slots=True)
class Link:
    """The output of `source` is input `slot` of `target`."""

    source: str
    target: str
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Network:
    """Operators in the order they run, and the tensors between them."""

    name: str
    operators: Mapping[str, Operator]
    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class PricedNetwork:
    """The graph of a network on some devices, and what its choices stand for."""

    network: Network
    mesh: DeviceMesh
    graph: OperatorGraph
    configurations: Mapping[str, tuple[Configuration, ...]]
    working_bytes: Mapping[str, Array]
    """What each operator needs while it runs, by configuration [K]; see `OperatorCost`."""

    def cost(self, strategy: Mapping[str, int]) -> tuple[float, float]:
        """Peak bytes of one device, while its largest operator runs, and seconds of a step."""
        memory, time = self.graph.cost(strategy)
        working = (self.working_bytes[name][choice] for name, choice in strategy.items())
        return memory + float(max(working)), time

    def data_parallel(self) -> dict[str, int]:
        """The strategy that splits nothing but the batch.

        Raises:
            ConfigError: when some operator's batch does not divide by the devices.
        """
        for name, ways in self.configurations.items():
            batch = self.network.operators[name].dims[0]
            if {*ways[0]} - {batch.name}:
                raise ConfigError(
                    f"{name}: {batch.name} of {batch.size} does not divide over all devices, got "
                    f"{ways[0]} at best; take a multiple of their number"
                )
        return dict.fromkeys(self.configurations, 0)


def price(
    network: Network, num_devices: int, cluster: ClusterProfile, *, breadth: int = 2
) -> PricedNetwork:
    """The graph of the network on `num_devices` devices.

    `breadth` is how many dims an operator may split besides its first. Equal operators share
    their arrays, and so do equal pairs of them.
    """
    mesh = DeviceMesh.over(num_devices)
    costs = OperatorCost(mesh, cluster)
    ways: dict[Operator, tuple[Configuration, ...]] = {}
    nodes: dict[Operator, Node] = {}
    working: dict[Operator, Array] = {}
    for operator in dict.fromkeys(network.operators.values()):
        ways[operator] = configurations(operator, mesh, breadth=breadth)
        memory, time = np.transpose([costs.node(operator, way) for way in ways[operator]]).copy()
        nodes[operator] = Node(memory=memory, time=time)
        working[operator] = np.array([costs.working_bytes(operator, way) for way in ways[operator]])
    pairs: dict[tuple[Operator, Operator, int], Array] = {}
    edges = []
    for link in network.links:
        source, target = (network.operators[name] for name in (link.source, link.target))
        key = (source, target, link.slot)
        if key not in pairs:
            pairs[key] = costs.edge((source, ways[source]), (target, ways[target]), link.slot)
        seconds = pairs[key]
        edges.append(Edge(link.source, link.target, np.zeros_like(seconds), seconds))
    named = network.operators.items()
    return PricedNetwork(
        network,
        mesh,
        OperatorGraph({name: nodes[operator] for name, operator in named}, edges),
        {name: ways[operator] for name, operator in named},
        {name: working[operator] for name, operator in named},
    )
