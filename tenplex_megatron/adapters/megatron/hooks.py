"""Where does Megatron's training loop call us?

Some names of `megatron.training` are wrapped; they are looked up as module globals at every call,
so setting the attribute is enough, and they have held from core_v0.12 to core_v0.19 (see
`compat.py`).  The wrappers pass every argument through.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.training import arguments, training
from megatron.training.global_vars import get_args

from tenplex_megatron.adapters.base import FrameworkAdapter, StepObserver
from tenplex_megatron.adapters.megatron.compat import use_built_helpers
from tenplex_megatron.adapters.megatron.loaders import (
    audit_samples,
    check_train_data,
    order_of,
    refuse_unknown_dealing,
)
from tenplex_megatron.adapters.megatron.state import MegatronState
from tenplex_megatron.adapters.wrapping import add_policy_flag, wrap
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError

__all__ = ["MegatronAdapter"]

logger = logging.getLogger(__name__)


class MegatronAdapter(FrameworkAdapter):
    """Megatron-LM's `pretrain`, with the script unchanged."""

    def __init__(self) -> None:
        self._state: MegatronState | None = None
        self._losses: dict[str, float] | None = None

    def install(self, observer: StepObserver, layout: ParallelLayout) -> None:
        """See `FrameworkAdapter.install`; the flags of the layout are there already."""
        del layout
        _warn_of_another_megatron(Path(sys.argv[0]))
        use_built_helpers()
        wrap(arguments, "add_megatron_arguments", add_policy_flag)
        wrap(training, "setup_model_and_optimizer", self._build(observer))
        wrap(training, "build_train_valid_test_datasets", self._check_data)
        wrap(training, "train_step", self._keep_losses)
        wrap(training, "checkpoint_and_decide_exit", self._step(observer))
        wrap(training, "train", self._train(observer))
        if observer.audits_samples:
            audit_samples(observer)

    def _build(self, observer: StepObserver) -> Callable[..., Any]:
        def build(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            refuse_unknown_dealing(get_args())
            _refuse_unseen_state()
            with _no_checkpoint(replaced=observer.imports_state):
                model, optimizer, scheduler = original(*args, **kwargs)
            if optimizer is not None:
                self._state = MegatronState(model, optimizer, scheduler, get_args())
                wrap(optimizer, "step", self._update(observer))
                observer.on_built(self._state)
                _say_if_finished()
            return model, optimizer, scheduler

        return build

    @staticmethod
    def _update(observer: StepObserver) -> Callable[..., Any]:
        def update(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            observer.before_update()
            return original(*args, **kwargs)

        return update

    def _check_data(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        datasets = original(*args, **kwargs)
        train = datasets[0]
        # Ranks that read no batch have none.
        if train is not None:
            check_train_data(get_args(), train)
            if self._state is not None:
                self._state.keep_order(order_of(get_args(), train))
        return datasets

    def _keep_losses(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        losses: Mapping[str, Any] = result[0]
        self._losses = {name: float(value) for name, value in losses.items()} if losses else None
        return result

    def _step(self, observer: StepObserver) -> Callable[..., Any]:
        def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            leaves = original(*args, **kwargs)
            state = self._state
            if state is None:
                return leaves
            # (model, optimizer, scheduler, iteration, operations, ...), positional everywhere.
            state.step, state.floating_point_operations = int(args[3]), float(args[4])
            is_last = bool(leaves) or state.step >= get_args().train_iters
            return observer.on_step(state.step, self._losses, is_last=is_last) or leaves

        return step

    def _train(self, observer: StepObserver) -> Callable[..., Any]:
        """Megatron finishes its own work (checkpoints, trackers), then leaves with exit code 0."""

        def train(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._state is not None:
                self._state.resume_streams()
            try:
                return original(*args, **kwargs)
            except SystemExit:
                if observer.exit_code is not None:
                    raise SystemExit(observer.exit_code) from None
                raise

        return train


def _refuse_unseen_state() -> None:
    """Flags whose state lies where snapshots do not look, or changes while they copy."""
    given = vars(get_args())
    reasons = {
        "--fp8-format": ("fp8", "its scales live in Transformer Engine's opaque state"),
        "--optimizer-cuda-graph": ("optimizer_cuda_graph", "a replayed step can't be held back"),
        "--async-save": ("async_save", "a change would not wait for the checkpoint"),
    }
    for flag, (name, reason) in reasons.items():
        if given.get(name):
            raise ConfigError(f"{flag}: {reason}; drop the flag, or train without --elastic-policy")


@contextlib.contextmanager
def _no_checkpoint(*, replaced: bool) -> Iterator[None]:
    """A state that is imported needs no checkpoint, which may not even load in this layout."""
    args = get_args()
    paths = (args.load, args.pretrained_checkpoint)
    if replaced:
        args.load = args.pretrained_checkpoint = None
    try:
        yield
    finally:
        args.load, args.pretrained_checkpoint = paths


def _warn_of_another_megatron(script: Path) -> None:
    """A checkout's scripts lie beside its `megatron`; loaded is what was found first."""
    beside = script.resolve().parent / "megatron"
    used = Path(str(training.__file__)).parents[1]
    if os.environ.get("RANK", "0") == "0" and (beside / "training").is_dir() and used != beside:
        logger.warning(
            "megatron is imported from %s, not from %s beside the script; set PYTHONPATH=%s to "
            "use that one",
            used,
            beside,
            beside.parent,
        )


def _say_if_finished() -> None:
    args = get_args()
    if args.iteration >= args.train_iters and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "step %s of %s is done already, nothing is left to train: raise --train-iters, or "
            "remove the job's snapshots to start anew",
            args.iteration,
            args.train_iters,
        )
