"""Which tensors does a DeepSpeed optimizer update, and where in them lies each parameter?

One class per optimizer of DeepSpeed.  Each knows the same three things: the parameter groups, the
fragment of every parameter that this rank updates, and how the weights of the forward pass follow
from the masters.  Nothing is gathered or copied to find out.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from tenplex_megatron.adapters.deepspeed.model import owned_range
from tenplex_megatron.errors import UnsupportedLayoutError

__all__ = ["Fragment", "Group", "Masters", "masters_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """Elements `[start, stop)` of a flattened local parameter, as this rank updates them.

    They lie at `[offset, offset + stop - start)` of the flattened `master`, which is what the
    optimizer underneath calls its parameter.
    """

    parameter: torch.nn.Parameter
    start: int
    stop: int
    master: torch.Tensor
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One parameter group.

    `values` is the optimizer's own dict, `parameters` are the model's, `masters` is what this rank
    updates for them.
    """

    values: dict[str, Any]
    parameters: tuple[torch.nn.Parameter, ...]
    masters: tuple[torch.Tensor, ...]


class Masters(ABC):
    """What one of DeepSpeed's optimizers updates."""

    base: torch.optim.Optimizer
    """The optimizer underneath, which keeps the moments."""

    @abstractmethod
    def groups(self) -> tuple[Group, ...]:
        """Every parameter group that holds a parameter, in the optimizer's order."""

    @abstractmethod
    def fragments(self) -> Iterator[Fragment]:
        """What this rank updates of every parameter."""

    @abstractmethod
    def refresh(self) -> None:
        """Derive the weights of the forward pass from new masters; collective."""

    @property
    def scaler(self) -> Any:
        """Who keeps the loss scale, or None where none is kept."""
        return None


def masters_of(optimizer: Any) -> Masters:
    """What an engine's optimizer updates.

    Raises:
        UnsupportedLayoutError: an optimizer class whose state is not described here.
    """
    if type(optimizer) is DeepSpeedZeroOptimizer:
        return _Partitioned(
            optimizer,
            optimizer.bit16_groups,
            optimizer.single_partition_of_fp32_groups,
            optimizer.loss_scaler,
        )
    if type(optimizer) is BF16_Optimizer and optimizer.using_real_optimizer:
        return _Partitioned(
            optimizer, optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, None
        )
    if type(optimizer) is DeepSpeedZeroOptimizer_Stage3:
        return _Stage3(optimizer)
    if type(optimizer) is FP16_UnfusedOptimizer:
        return _Paired(optimizer)
    if type(optimizer) is FP16_Optimizer:
        return _Flat(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        return _Plain(optimizer)
    raise UnsupportedLayoutError(
        f"optimizer {type(optimizer).__name__}: its state is not described; expected DeepSpeed's "
        "ZeRO stage 1 to 3, BF16 or FP16 optimizer around one of torch's, or a plain torch "
        "optimizer; save and load a checkpoint instead"
    )


class _Plain(Masters):
    """Torch's own optimizer updates the weights themselves: stage 0 in fp32."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.base = optimizer

    def groups(self) -> tuple[Group, ...]:
        return tuple(
            Group(values, tuple(values["params"]), tuple(values["params"]))
            for values in self.base.param_groups
        )

    def fragments(self) -> Iterator[Fragment]:
        for group in self.groups():
            for parameter in group.parameters:
                yield Fragment(parameter, 0, parameter.numel(), parameter, 0)

    def refresh(self) -> None:
        """The masters are the weights."""


class _Paired(Masters):
    """One fp32 master per 16-bit weight: stage 0."""

    def __init__(self, optimizer: Any) -> None:
        self.base = optimizer.optimizer
        self._optimizer = optimizer

    def groups(self) -> tuple[Group, ...]:
        return _zip_groups(self.base, self._optimizer.fp16_groups, self._optimizer.fp32_groups)

    def fragments(self) -> Iterator[Fragment]:
        for group in self.groups():
            for parameter, master in zip(group.parameters, group.masters, strict=True):
                yield Fragment(parameter, 0, parameter.numel(), master, 0)

    def refresh(self) -> None:
        for fragment in self.fragments():
            fragment.parameter.data.copy_(fragment.master.data)

    @property
    def scaler(self) -> Any:
        return self._optimizer.loss_scale_config


class _Flat(Masters):
    """All fp32 masters of a group one after the other: stage 0 with a fused optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.base = optimizer.optimizer
        self._optimizer = optimizer

    def groups(self) -> tuple[Group, ...]:
        flats = [(flat,) for flat in self._optimizer.fp32_groups_flat]
        return _zip_groups(self.base, self._optimizer.fp16_groups, flats)

    def fragments(self) -> Iterator[Fragment]:
        for group in self.groups():
            offset = 0
            for parameter in group.parameters:
                yield Fragment(parameter, 0, parameter.numel(), group.masters[0], offset)
                offset += parameter.numel()

    def refresh(self) -> None:
        for low, high in zip(
            self._optimizer.fp16_groups_flat, self._optimizer.fp32_groups_flat, strict=True
        ):
            low.data.copy_(high.data)

    @property
    def scaler(self) -> Any:
        return self._optimizer.loss_scale_config


class _Partitioned(Masters):
    """Every group is one flat range, cut over the data-parallel ranks: stages 1 and 2."""

    def __init__(
        self,
        optimizer: Any,
        groups: Sequence[Sequence[torch.nn.Parameter]],
        partitions: Sequence[torch.Tensor],
        scaler: Any,
    ) -> None:
        self.base = optimizer.optimizer
        self._optimizer = optimizer
        self._groups = groups
        self._partitions = partitions
        self._scaler = scaler

    def groups(self) -> tuple[Group, ...]:
        return _zip_groups(self.base, self._groups, [(flat,) for flat in self._partitions])

    def fragments(self) -> Iterator[Fragment]:
        for group in self.groups():
            for parameter in group.parameters:
                # DeepSpeed links every parameter to its part of this rank's partition, if any.
                mapping: Any = vars(parameter)["_hp_mapping"]
                if mapping is not None:
                    here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                    yield Fragment(
                        parameter,
                        here.start,
                        here.start + here.numel,
                        group.masters[0],
                        there.start,
                    )

    def refresh(self) -> None:
        self._optimizer.update_lp_params()

    @property
    def scaler(self) -> Any:
        return self._scaler


class _Stage3(Masters):
    """Every parameter is cut over the data-parallel ranks by itself; sub-groups are flat."""

    def __init__(self, optimizer: Any) -> None:
        if optimizer.swap_optimizer or optimizer.params_in_nvme_and_cpu:
            raise UnsupportedLayoutError(
                "ZeRO stage 3 offloads to NVMe: its state can't be read in place; offload to the "
                "CPU, or save and load a checkpoint instead"
            )
        self.base = optimizer.optimizer
        self._optimizer = optimizer

    def groups(self) -> tuple[Group, ...]:
        optimizer = self._optimizer
        held: dict[int, tuple[list[torch.nn.Parameter], list[torch.Tensor]]] = {}
        for number, parameters in enumerate(optimizer.fp16_groups):
            mine = held.setdefault(optimizer.sub_group_to_group_id[number], ([], []))
            mine[0].extend(parameters)
            mine[1].append(optimizer.fp32_partitioned_groups_flat[number])
        return tuple(
            Group(self.base.param_groups[number], tuple(parameters), tuple(masters))
            for number, (parameters, masters) in sorted(held.items())
        )

    def fragments(self) -> Iterator[Fragment]:
        optimizer = self._optimizer
        for parameters, master in zip(
            optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True
        ):
            offset = 0
            for parameter in parameters:
                start, stop = owned_range(parameter)
                if start < stop:
                    yield Fragment(parameter, start, stop, master, offset)
                offset += parameter.partition_numel()

    def refresh(self) -> None:
        optimizer = self._optimizer
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        persistent = optimizer.persistent_parameters
        if persistent:
            # Small parameters stay whole on every rank: drop the old whole, gather the new.
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)
        optimizer.invalidate_secondary_tensor()

    @property
    def scaler(self) -> Any:
        return self._optimizer.loss_scaler


def _zip_groups(
    base: torch.optim.Optimizer,
    parameters: Sequence[Sequence[torch.nn.Parameter]],
    masters: Sequence[Sequence[torch.Tensor]],
) -> tuple[Group, ...]:
    return tuple(
        Group(values, tuple(mine), tuple(theirs))
        for values, mine, theirs in zip(base.param_groups, parameters, masters, strict=True)
    )
