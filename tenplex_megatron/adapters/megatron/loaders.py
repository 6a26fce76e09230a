"""Which of Megatron's data loaders deal the same global batches to any number of ranks?

`MegatronPretrainingSampler` ("single") does.  `MegatronPretrainingRandomSampler` ("cyclic") does
where it is not sharded, every order it draws has the same length, and all are drawn for the same
micro-batch size (megatron/training/datasets/data_samplers.py, 0.19).
"""

from collections.abc import Iterator
from typing import Any

from megatron.training.datasets import data_samplers

from tenplex_megatron.adapters.base import StepObserver
from tenplex_megatron.errors import ConfigError

__all__ = ["audit_samples", "check_orders", "check_train_data", "refuse_dealing_by_rank"]


def refuse_dealing_by_rank(args: Any) -> None:
    """Only loaders that deal a global batch the same way for every DP size can change layout.

    Raises:
        ConfigError: the loader shuffles per data-parallel rank.
    """
    if args.dataloader_type == "cyclic" and args.data_sharding:
        raise ConfigError(
            "--dataloader-type cyclic shuffles per data-parallel rank, so another number of ranks "
            "would read other samples; expected --dataloader-type single, or add --no-data-sharding"
        )


def check_train_data(args: Any, data: Any) -> None:
    """Refuse data over which the cyclic loader depends on the number of ranks.

    Raises:
        ConfigError: see `check_orders`.
    """
    if data is not None and args.dataloader_type == "cyclic":
        needed = args.train_samples or args.train_iters * args.global_batch_size
        check_orders(len(data), args.global_batch_size, needed)


def check_orders(length: int, batch: int, needed: int) -> None:
    """Refuse several passes over `length` samples that global batches of `batch` do not divide.

    A pass ends where micro-batches of all ranks no longer fit, which is elsewhere for other ranks.

    Raises:
        ConfigError: training needs more samples than the first pass surely has.
    """
    whole = length - length % batch
    if whole < length and needed > whole:
        raise ConfigError(
            f"--dataloader-type cyclic: training reads {needed} samples, and the {length} of the "
            f"data are no multiple of the global batch of {batch}, so from the second pass on the "
            f"order would depend on the number of ranks; expected {whole} samples, another "
            "--global-batch-size, one pass, or --dataloader-type single"
        )


def audit_samples(observer: StepObserver) -> None:
    """Report the sample ids of every micro-batch at the place Megatron decides them."""
    sampler = data_samplers.MegatronPretrainingSampler
    original = sampler.__iter__

    def audited(self: Any) -> Iterator[list[int]]:
        for number, ids in enumerate(original(self)):
            observer.on_samples(number, ids)
            yield ids

    sampler.__iter__ = audited
