"""Which of Megatron's data loaders go on with the same samples, in whatever layout?

`MegatronPretrainingSampler` ("single") deals the same global batches to any number of ranks.
`MegatronPretrainingRandomSampler` ("cyclic") does where it is not sharded, every order it draws has
the same length, and all are drawn for the same micro-batch size
(megatron/training/datasets/data_samplers.py, 0.19).  What a place in that order means is up to the
data set, which may order its samples by how many are asked for
(megatron/core/datasets/gpt_dataset.py).
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.training.datasets import data_samplers
from megatron.training.datasets.sft_dataset import SFTDataset

from tenplex_megatron.adapters.base import Progress, StepObserver
from tenplex_megatron.adapters.wrapping import wrap
from tenplex_megatron.errors import ConfigError

__all__ = [
    "audit_samples",
    "check_orders",
    "check_train_data",
    "order_of",
    "refuse_unknown_dealing",
]

_INDEXES = ("document_index", "sample_index", "shuffle_index")
"""Arrays of a GPTDataset that say which text its sample k is."""

_PREFIX = 4096
"""Entries of an array that are compared: a shuffle of other entries, or of more, moves them all."""


def refuse_unknown_dealing(args: Any) -> None:
    """Only loaders that deal a global batch the same way for every DP size can change layout.

    Raises:
        ConfigError: the loader shuffles per data-parallel rank, or is the script's own.
    """
    if args.dataloader_type == "external":
        # Megatron at most saves the state of such a loader per rank (--dataloader-save), and
        # leaves it to the script to find it again.
        raise ConfigError(
            "--dataloader-type external: how the script's own loader deals samples, and where it "
            "stands, is unknown, so a change would repeat or leave out samples; expected "
            "--dataloader-type single, or train without --elastic-policy"
        )
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
    if args.dataloader_type == "cyclic":
        check_orders(len(data), args.global_batch_size, _asked_samples(args))


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


def order_of(args: Any, data: Any) -> Progress:
    """What tells the order of the training samples from another one.

    Returns:
        `phase`: the step at which this data came in (--phase-transition-iterations).
        `samples`: how many are asked for.
        `digest`: equal where the orders are; one may go on longer than the other.
    """
    digest = hashlib.sha256()
    for part in _order(data):
        digest.update(part)
    if args.dataloader_type == "cyclic":
        # It shuffles once more, all there are.
        digest.update(str(len(data)).encode())
    begun = [step for step in args.phase_transition_iterations or () if step <= args.iteration]
    return {
        "phase": max(begun, default=0),
        "samples": _asked_samples(args),
        "digest": digest.hexdigest()[:32],
    }


def _order(data: Any) -> Iterator[bytes]:
    if isinstance(data, BlendedDataset):
        # Which of its data sets is next follows from the weights and the samples before.
        yield str(data.weights).encode()
        for part in data.datasets:
            yield from _order(part)
    elif isinstance(data, GPTDataset):
        for name in _INDEXES:
            yield _start(_index(data, name))
    elif isinstance(data, SFTDataset):
        # It repeats its conversations in one order.
        yield _start(data.indices)
    elif isinstance(data, MegatronDataset):
        # Its order is its own affair, and counts as another for another number of samples.
        yield data.unique_description.encode()
    else:
        yield str(len(data)).encode()


def _index(data: Any, name: str) -> Any:
    """An index, which --dataloader-defer-npy-index-mmap leaves on disk until it is used."""
    index = vars(data)[name]
    return np.load(vars(data)[f"path_to_{name}"], mmap_mode="r") if index is None else index


def _start(array: Any) -> bytes:
    return np.array(array[:_PREFIX], dtype=np.int64).tobytes()


def _asked_samples(args: Any) -> int:
    return int(args.train_samples or args.train_iters * args.global_batch_size)


def audit_samples(observer: StepObserver) -> None:
    """Report the sample ids of every micro-batch at the place Megatron decides them."""

    def audited(original: Callable[[Any], Iterator[list[int]]], sampler: Any) -> Any:
        for number, ids in enumerate(original(sampler)):
            observer.on_samples(number, ids)
            yield ids

    wrap(data_samplers.MegatronPretrainingSampler, "__iter__", audited)
