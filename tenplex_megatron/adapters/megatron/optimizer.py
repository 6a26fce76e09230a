"""Where do the fp32 masters and moments of this rank lie, and what else does an optimizer keep?

Covers Megatron's distributed optimizer (a flat range of each parameter per data-parallel rank),
its ordinary mixed-precision optimizer and its fp32 optimizer, alone or chained
(megatron/core/optimizer/optimizer.py, distrib_optimizer.py).  Nothing is gathered or copied.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
    param_group_identifier_keys,
)

from tenplex_megatron.adapters.groups import (
    common_step,
    group_values,
    merged_groups,
    plain,
    set_value,
)
from tenplex_megatron.adapters.parts import OwnedParameter, states_of
from tenplex_megatron.errors import LayoutError, UnsupportedLayoutError

__all__ = [
    "chain",
    "load_optimizer_progress",
    "optimizer_progress",
    "owned_parameters",
    "prepare_state",
    "refresh_model",
]


def chain(optimizer: MegatronOptimizer) -> tuple[MegatronOptimizer, ...]:
    """The optimizers that really update parameters, in Megatron's order.

    Raises:
        UnsupportedLayoutError: an optimizer class whose state is not described here.
    """
    members = (
        tuple(optimizer.chained_optimizers)
        if isinstance(optimizer, ChainedOptimizer)
        else (optimizer,)
    )
    known = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)
    for member in members:
        if type(member) not in known:
            raise UnsupportedLayoutError(
                f"optimizer {type(member).__name__}: only "
                f"{', '.join(kind.__name__ for kind in known)} can change layout live; "
                "reload from a checkpoint"
            )
        if getattr(member.config, "use_precision_aware_optimizer", False):
            raise UnsupportedLayoutError(
                "--use-precision-aware-optimizer: its state is held by the fused kernel and cannot "
                "be read in place; drop the flag or reload from a checkpoint"
            )
    return tuple(member for member in members if not member.is_stub_optimizer)


def prepare_state(optimizer: MegatronOptimizer) -> None:
    """Give every parameter the state it would get in its first step, all zero.

    Optimizers create their state lazily; the memory must exist before it can be imported into.
    torch's Adam decides by an empty state dict, so its `step` has to be there as well.
    """
    for member in chain(optimizer):
        inner = member.optimizer
        if member.init_state_fn is not None:
            member.init_state_fn(inner, member.config)
        else:
            _prepare_momentum(inner)
        if isinstance(inner, torch.optim.Adam):
            for state in inner.state.values():
                state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))


def _prepare_momentum(inner: torch.optim.Optimizer) -> None:
    """Torch's SGD starts its momentum as the first gradient: as zero plus that gradient."""
    if type(inner) is not torch.optim.SGD:
        raise UnsupportedLayoutError(
            f"optimizer {type(inner).__name__}: its state is not known before its first step; "
            "expected Adam, Lion or torch's SGD; reload from a checkpoint"
        )
    for group in inner.param_groups:
        if group["momentum"] and group["dampening"]:
            raise UnsupportedLayoutError(
                "SGD with dampening: its first step is unlike later ones; reload from a checkpoint"
            )
        if group["momentum"]:
            for parameter in group["params"]:
                inner.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def owned_parameters(optimizer: MegatronOptimizer) -> Iterator[OwnedParameter]:
    """What this rank's optimizers own, in Megatron's order."""
    for member in chain(optimizer):
        if isinstance(member, DistributedOptimizer):
            yield from _distributed(member)
        elif isinstance(member, Float16OptimizerWithFloat16Params):
            for models, masters in zip(
                member.float16_groups, member.fp32_from_float16_groups, strict=True
            ):
                for parameter, master in zip(models, masters, strict=True):
                    yield _whole(member, parameter, master)
            for group in member.fp32_from_fp32_groups:
                for parameter in group:
                    yield _whole(member, parameter, parameter)
        else:
            for group in member.optimizer.param_groups:
                for parameter in group["params"]:
                    yield _whole(member, parameter, parameter)


def _distributed(member: DistributedOptimizer) -> Iterator[OwnedParameter]:
    for buffer in member.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    tensors = member._get_main_param_and_optimizer_states(parameter)
                    master = tensors.pop("param")
                    yield OwnedParameter(
                        parameter,
                        ranges["param"].start,
                        ranges["param"].end,
                        states_of(master, tensors),
                    )


def _whole(
    member: MegatronOptimizer, parameter: torch.nn.Parameter, master: torch.Tensor
) -> OwnedParameter:
    states = states_of(master, member.optimizer.state[master])
    return OwnedParameter(parameter, 0, parameter.numel(), states)


def optimizer_progress(optimizer: MegatronOptimizer) -> list[Any]:
    """Per chained optimizer: loss scaler, parameter-group values and Adam's step.

    A rank whose shard is empty has no step; the ranks' answers are merged at import.
    """
    progress: list[Any] = []
    for member in chain(optimizer):
        groups: dict[str, Any] = {}
        for group in member.optimizer.param_groups:
            groups[_group_name(group)] = group_values(group)
        scaler = getattr(member, "grad_scaler", None)
        progress.append(
            {
                "groups": groups,
                "step": common_step(member.optimizer),
                "scaler": _scaler_state(scaler) if scaler else None,
            }
        )
    return progress


def _group_name(group: Mapping[str, Any]) -> str:
    values = [group.get(key, group.get(f"pre_{key}")) for key in param_group_identifier_keys]
    return repr([plain(value) for value in values])


def _scaler_state(scaler: Any) -> Any:
    return {key: plain(value) for key, value in scaler.state_dict().items()}


def load_optimizer_progress(
    optimizer: MegatronOptimizer, progress: Sequence[Sequence[Mapping[str, Any]]]
) -> None:
    """Set loss scalers, parameter-group values and steps.

    Args:
        optimizer: the optimizer of this rank.
        progress: `optimizer_progress` of every rank of the snapshot.

    Raises:
        LayoutError: ranks of the snapshot disagree, or lack a parameter group.
    """
    stored = [entry for rank in progress for entry in rank]
    steps = {entry["step"] for entry in stored if entry["step"] is not None}
    if len(steps) > 1:
        raise LayoutError(f"optimizer steps differ between ranks: {sorted(steps)}; expected one")
    step = steps.pop() if steps else None
    groups = merged_groups(entry["groups"] for entry in stored)
    scalers = [entry["scaler"] for entry in stored if entry["scaler"] is not None]
    for member in chain(optimizer):
        for group in member.optimizer.param_groups:
            _load_group(group, groups)
        for state in member.optimizer.state.values():
            if step is not None and "step" in state:
                set_value(state, "step", step)
        scaler = getattr(member, "grad_scaler", None)
        if scaler and scalers:
            if any(other != scalers[0] for other in scalers):
                raise LayoutError(f"loss scalers differ between ranks: {scalers}")
            _load_scaler(scaler, scalers[0])


def _load_group(group: dict[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> None:
    name = _group_name(group)
    if name not in groups:
        raise LayoutError(
            f"parameter group {name} is not in the snapshot, which holds {sorted(groups)}; "
            "the optimizer's flags must stay the same"
        )
    for key, value in groups[name].items():
        if key != "params" and key in group | {"step": None}:
            set_value(group, key, value)


def _load_scaler(scaler: Any, values: Mapping[str, Any]) -> None:
    current = scaler.state_dict()
    loaded = {
        key: torch.as_tensor(value, dtype=current[key].dtype, device=current[key].device).view(
            current[key].shape
        )
        if isinstance(current.get(key), torch.Tensor)
        else value
        for key, value in values.items()
    }
    scaler.load_state_dict(loaded)


def refresh_model(optimizer: MegatronOptimizer, chunks: Sequence[torch.nn.Module]) -> None:
    """Derive the model's weights from the imported masters, on every data-parallel rank."""
    distributed = False
    for member in chain(optimizer):
        if isinstance(member, DistributedOptimizer):
            distributed = True
            member._copy_main_params_to_model_params()
        elif isinstance(member, Float16OptimizerWithFloat16Params):
            member._copy_main_params_to_model_params()
    if distributed:
        for chunk in chunks:
            wrapped: Any = chunk
            wrapped.start_param_sync(force_sync=True)
