"""Which tensors does a DeepSpeed optimizer update, and where in them lies each parameter?

One class per optimizer of DeepSpeed.  Each knows the same three things: the parameter groups, the
fragment of every parameter that this rank updates, and how the weights of the forward pass follow
from the masters.  Nothing is gathered or copied to find out.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import is_optimized_parameter
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from tenplex_megatron.adapters.deepspeed.fragments import Fragment, Group, Masters
from tenplex_megatron.adapters.deepspeed.model import owned_range
from tenplex_megatron.errors import UnsupportedLayoutError

__all__ = ["masters_of"]


def masters_of(optimizer: Any) -> Masters:
    """What an engine's optimizer updates.

    Raises:
        UnsupportedLayoutError: an optimizer class whose state is not described here.
    """
    if type(optimizer) is DeepSpeedZeroOptimizer:
        return _Partitioned(
            optimizer,
            optimizer.bit16_groups,
            optimizer.bit16_groups_flat,
            optimizer.single_partition_of_fp32_groups,
        )
    if type(optimizer) is BF16_Optimizer and optimizer.using_real_optimizer:
        return _Partitioned(
            optimizer,
            optimizer.bf16_groups,
            optimizer.bf16_groups_flat,
            optimizer.fp32_groups_flat_partition,
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
    """Torch's own optimizer updates the weights themselves: stage 0 in fp32.

    It is given the frozen and the empty parameters too, which DeepSpeed's optimizers leave out.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.base = optimizer
        self._trained = {
            id(parameter)
            for values in optimizer.param_groups
            for parameter in values["params"]
            if is_optimized_parameter(parameter)
        }

    def groups(self) -> tuple[Group, ...]:
        found = []
        for values in self.base.param_groups:
            trained = tuple(one for one in values["params"] if self._is_trained(one))
            if trained:
                found.append(Group(values, trained, trained))
        return tuple(found)

    def _is_trained(self, parameter: torch.nn.Parameter) -> bool:
        was = id(parameter) in self._trained
        if not was and is_optimized_parameter(parameter):
            raise UnsupportedLayoutError(
                f"a parameter of shape {tuple(parameter.shape)} was frozen when the engine became "
                "elastic and is trained now, which no snapshot has room for; choose what is "
                "trained before deepspeed.initialize, as the other stages of ZeRO ask for"
            )
        return was

    def fragments(self) -> Iterator[Fragment]:
        return _whole(self.groups())

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
        return _whole(self.groups())

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
    """Every group is one flat tensor, cut evenly over its data-parallel ranks: stages 1 and 2.

    The weights are views of the flat tensors, and only their place there says where the masters
    are: the order of a group is not that of its flat tensor with `round_robin_gradients`, nor do
    its parameters touch with `parameter_alignment`, and DeepSpeed's `_hp_mapping` has the order of
    the group (runtime/zero/stage_1_and_2.py).
    """

    def __init__(
        self,
        optimizer: Any,
        groups: Sequence[Sequence[torch.nn.Parameter]],
        flats: Sequence[torch.Tensor],
        partitions: Sequence[torch.Tensor],
    ) -> None:
        self.base = optimizer.optimizer
        self._optimizer = optimizer
        self._groups = groups
        self._flats = flats
        self._partitions = partitions

    def groups(self) -> tuple[Group, ...]:
        return _zip_groups(self.base, self._groups, [(flat,) for flat in self._partitions])

    def fragments(self) -> Iterator[Fragment]:
        for number, group in enumerate(self.groups()):
            flat, master = self._flats[number], group.masters[0]
            rank = dist.get_rank(self._optimizer.real_dp_process_group[number])
            first = rank * master.numel()
            for parameter in group.parameters:
                offset = _place_in(flat, parameter)
                low = max(offset, first)
                high = min(offset + parameter.numel(), first + master.numel())
                if low < high:
                    yield Fragment(parameter, low - offset, high - offset, master, low - first)

    def refresh(self) -> None:
        self._optimizer.update_lp_params()

    @property
    def scaler(self) -> Any:
        # Loading a checkpoint replaces it; the optimizer for bf16 alone has none.
        return vars(self._optimizer).get("loss_scaler")


class _Stage3(Masters):
    """Every parameter is cut over the data-parallel ranks by itself; sub-groups are flat."""

    def __init__(self, optimizer: Any) -> None:
        if optimizer.swap_optimizer or optimizer.params_in_nvme_and_cpu:
            raise UnsupportedLayoutError(
                "ZeRO stage 3 offloads to NVMe: its state can't be read in place; offload to the "
                "CPU, or save and load a checkpoint instead"
            )
        if optimizer.offload_optimizer and optimizer.partial_offload != 1.0:
            raise UnsupportedLayoutError(
                f"offload_optimizer.ratio is {optimizer.partial_offload}: a second optimizer keeps "
                "the state of the rest, which is not described; expected 1.0"
            )
        self.base = optimizer.optimizer
        self._optimizer = optimizer

    def groups(self) -> tuple[Group, ...]:
        optimizer = self._optimizer
        _check_groups(self.base, max(optimizer.sub_group_to_group_id.values()) + 1)
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


def _check_groups(base: torch.optim.Optimizer, number: int) -> None:
    if len(base.param_groups) != number:
        raise UnsupportedLayoutError(
            f"DeepSpeed made {type(base).__name__} anew with {len(base.param_groups)} parameter "
            f"group for {number}; under ZeRO give it one group"
        )


def _place_in(flat: torch.Tensor, parameter: torch.nn.Parameter) -> int:
    """How many elements of `flat` come before those of a parameter that is a view of it."""
    if parameter.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
        raise UnsupportedLayoutError(
            f"a parameter of shape {tuple(parameter.shape)} has left the memory that DeepSpeed "
            "keeps its group in, so its master can't be found; don't replace or offload weights "
            "before the engine becomes elastic"
        )
    return int(parameter.storage_offset()) - int(flat.storage_offset())


def _whole(groups: Sequence[Group]) -> Iterator[Fragment]:
    """Fragments of parameters with a master each."""
    for group in groups:
        for parameter, master in zip(group.parameters, group.masters, strict=True):
            yield Fragment(parameter, 0, parameter.numel(), master, 0)


def _zip_groups(
    base: torch.optim.Optimizer,
    parameters: Sequence[Sequence[torch.nn.Parameter]],
    masters: Sequence[Sequence[torch.Tensor]],
) -> tuple[Group, ...]:
    _check_groups(base, len(parameters))
    return tuple(
        Group(values, tuple(mine), tuple(theirs))
        for values, mine, theirs in zip(base.param_groups, parameters, masters, strict=True)
    )
