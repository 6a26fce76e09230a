"""What does each way to run an operator cost, and each pair of ways for two that share a tensor?

The sums over all operators and edges count as memory and time of a strategy (TensorOpt, arXiv
2004.10856). What lives for one operator only, such as the other copy of a re-scheduled tensor, and
the fixed cost of a step are left out.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tenplex_megatron.errors import LayoutError
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.tensoropt.mesh import PARTIAL, REPLICATED, DeviceMesh, shares
from tenplex_megatron.planner.tensoropt.operators import (
    ELEMENT_BYTES,
    REPEATED,
    Configuration,
    Operand,
    Operator,
)
from tenplex_megatron.planner.tensoropt.rescheduling import Rescheduler
from tenplex_megatron.planner.timing.candidates import Array

__all__ = ["STATE_BYTES", "OperatorCost"]

_GRADIENT_BYTES = 4
_STATISTIC_BYTES = 4
STATE_BYTES = ELEMENT_BYTES + _GRADIENT_BYTES + 12
"""Bytes of a parameter in mixed precision: itself, its gradient in fp32, and Adam's master copy and
two moments in fp32. Source: Rajbhandari et al., ZeRO, arXiv 1910.02054, section 3.1."""


class OperatorCost:
    """Node and edge costs on one mesh of one cluster."""

    def __init__(self, mesh: DeviceMesh, cluster: ClusterProfile) -> None:
        self.mesh = mesh
        self.cluster = cluster
        self.activations = Rescheduler(mesh, cluster)
        # Gradients are reduced in buckets of many parameters, whose latency is nothing to one.
        self.gradients = Rescheduler(
            mesh, replace(cluster, node_latency_s=0.0, network_latency_s=0.0)
        )

    def node(self, operator: Operator, configuration: Configuration) -> tuple[float, float]:
        """Bytes one device holds between steps or for the backward pass; seconds of a step."""
        operands = _operands(operator)
        parameters = sum(
            self._held(operator, operand, configuration) for operand in operator.parameters
        )
        held = [self._held(operator, operand, configuration) for operand in operands]
        kept = sum(size * operand.kept_bytes for size, operand in zip(held, operands, strict=True))
        memory_rate = self.cluster.memory_bandwidth * self.cluster.memory_efficiency
        traffic = (parameters + sum(held)) * ELEMENT_BYTES / memory_rate
        forward = max(traffic, self._arithmetic_s(operator, configuration))
        # As much of the reduction hides behind the backward pass as the cluster's profile says.
        reduction = (1.0 - self.cluster.overlap) * _reduction_s(
            operator, operator.parameters, configuration, self.gradients, _GRADIENT_BYTES
        )
        statistics = _reduction_s(
            operator, operator.statistics, configuration, self.activations, _STATISTIC_BYTES
        )
        update = parameters * self.cluster.optimizer_bytes_per_parameter / memory_rate
        time = (1.0 + operator.backward) * forward + reduction + statistics + update
        return parameters * STATE_BYTES + kept, time

    def working_bytes(self, operator: Operator, configuration: Configuration) -> float:
        """Bytes one device needs while the operator runs: what is not kept, and gradients.

        No part of the sum over all operators; the largest one of a strategy comes on top of it.
        """
        # A partial sum is as large as a replica: values and gradients take the same.
        return ELEMENT_BYTES * sum(
            self._held(operator, operand, configuration) * (1 if operand.kept_bytes else 2)
            for operand in _operands(operator)
        )

    def edge(
        self,
        source: tuple[Operator, Sequence[Configuration]],
        target: tuple[Operator, Sequence[Configuration]],
        slot: int,
    ) -> Array:
        """Seconds to re-schedule input `slot` of `target` and its gradient, float64 [S, T].

        Memory is none: a tensor is counted by the operator that keeps it, in the layout it reads.

        Raises:
            LayoutError: when the output of `source` is not the input of `target`.
        """
        (producer, produced), (consumer, consumed) = source, target
        output, operand = producer.output, consumer.inputs[slot]
        if output is None or producer.tensor(output) != consumer.tensor(operand):
            made = None if output is None else producer.tensor(output)
            raise LayoutError(
                f"input {slot}: expected {consumer.tensor(operand)}, got {made} from its producer; "
                "give both operators the same sizes"
            )
        tensor = producer.tensor(output)
        forward = self.activations.times(
            tensor,
            [producer.layout(output, way, lacking=PARTIAL) for way in produced],
            [consumer.layout(operand, way, lacking=REPLICATED) for way in consumed],
        )
        backward = self.activations.times(
            tensor,
            [consumer.layout(operand, way, lacking=PARTIAL) for way in consumed],
            [producer.layout(output, way, lacking=REPLICATED) for way in produced],
        )
        return np.asarray(forward + backward.T)

    def _held(self, operator: Operator, operand: Operand, configuration: Configuration) -> float:
        """Elements of the operand that one device holds."""
        layout = operator.layout(operand, configuration, lacking=REPLICATED)
        return operator.elements(operand) / shares(self.mesh, layout)

    def _arithmetic_s(self, operator: Operator, configuration: Configuration) -> float:
        """Forward seconds of the device's share of the arithmetic."""
        if operator.rate == "memory":
            return 0.0
        parts = self.mesh.group_size([a for a, n in enumerate(configuration) if n != REPEATED])
        efficiency = {
            "gemm": self.cluster.gemm_efficiency,
            "flash": self.cluster.flash_efficiency,
        }[operator.rate]
        return operator.flops / (parts * self.cluster.peak_flops * efficiency)


def _operands(operator: Operator) -> list[Operand]:
    """What the operator reads and writes, without parameters."""
    return [*operator.inputs, *([] if operator.output is None else [operator.output])]


def _reduction_s(
    operator: Operator,
    operands: Sequence[Operand],
    configuration: Configuration,
    rescheduler: Rescheduler,
    element_bytes: int,
) -> float:
    """Seconds until every holder of the operands has the sum over what the others found."""
    return sum(
        rescheduler.time(
            operator.tensor(operand, element_bytes),
            operator.layout(operand, configuration, lacking=PARTIAL),
            operator.layout(operand, configuration, lacking=REPLICATED),
        )
        for operand in operands
    )
