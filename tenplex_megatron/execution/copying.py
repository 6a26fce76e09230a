"""How are bytes copied at the speed of the memory?

Host copies go through libc's memcpy, which writes past the caches: half as fast again as torch's
own loop, which first reads every line it is about to overwrite.  One processor can't keep the
memory busy, so many copies are shared among the processors that a rank has to itself.
"""

import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, Queue

import numpy as np
import numpy.typing as npt
import torch

from tenplex_megatron.errors import StoreError
from tenplex_megatron.store.processors import processors_per_rank

__all__ = ["Copying", "copy_all", "copy_into", "read_only_bytes"]

# Below about this size libc copies through the caches as well, and a call of torch is cheaper.
_LARGE_BYTES = 1 << 20
_PAGE_BYTES = 4096
# A load this little behind a recent store, counted within a page, is taken to depend on it; libc's
# copy is then three times slower than torch's, whose loop holds fewer loads in flight.
_ALIASING_BYTES = 768
# Below this, starting threads costs more than they save.
_PARALLEL_BYTES = 8 << 20
# A larger copy is cut, so that no thread is left alone with it.
_PIECE_BYTES = 32 << 20


class Copying:
    """Copies under way on threads of `pool`; whoever waits for them takes part.

    Args:
        pairs: (target, source) as for `copy_into`; the targets don't overlap.
        pool: idle threads.
        threads: how many of them to use.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        pool: ThreadPoolExecutor,
        threads: int,
    ) -> None:
        pieces = [piece for pair in pairs for piece in _cut(*pair)]
        self._todo: Queue[tuple[torch.Tensor, torch.Tensor]] = Queue()
        for piece in sorted(pieces, key=lambda piece: piece[0].nbytes, reverse=True):
            self._todo.put(piece)
        self._is_broken = False
        self._started = self._ended = time.monotonic()
        self._helpers = [pool.submit(self._help) for _ in range(threads)]

    @property
    def seconds(self) -> float:
        """From the start to the last byte that has been copied."""
        return self._ended - self._started

    def finish(self) -> None:
        """Take part until every byte is copied, by whom ever; any thread may call it, at any time.

        Raises:
            StoreError: a copy failed, whose own error another thread has met.
        """
        self._help()
        self._todo.join()
        for helper in self._helpers:
            helper.result()
        if self._is_broken:
            raise StoreError("a copy failed, so the rest of them is worth nothing")

    @torch.no_grad()
    def _help(self) -> None:
        while True:
            try:
                target, source = self._todo.get_nowait()
            except Empty:
                return
            is_copied = False
            try:
                copy_into(target, source)
                is_copied = True
            finally:
                self._is_broken = self._is_broken or not is_copied
                self._ended = time.monotonic()
                self._todo.task_done()


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """`copy_into` for every (target, source), on all processors this rank has to itself."""
    pairs = list(pairs)
    threads = processors_per_rank() - 1
    if threads == 0 or sum(target.nbytes for target, _ in pairs) < _PARALLEL_BYTES:
        for target, source in pairs:
            copy_into(target, source)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="tenplex-copy") as pool:
        Copying(pairs, pool, threads).finish()


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source)` for equal shapes and types; does not hold the GIL while it copies."""
    if _is_streamable(target, source):
        np.copyto(_as_bytes(target), _as_bytes(source))
    else:
        target.copy_(source)


def read_only_bytes(view: memoryview) -> torch.Tensor:
    """A mapping as a tensor that nobody may write to; it keeps the mapping alive."""
    return torch.from_numpy(np.frombuffer(view, dtype=np.uint8))


def _cut(target: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A pair as pairs of at most `_PIECE_BYTES` where its bytes lie together."""
    if target.nbytes <= _PIECE_BYTES or not _is_streamable(target, source):
        return [(target, source)]
    step = _PIECE_BYTES // target.element_size()
    targets, sources = (torch.split(whole.detach().view(-1), step) for whole in (target, source))
    return list(zip(targets, sources, strict=True))


def _is_streamable(target: torch.Tensor, source: torch.Tensor) -> bool:
    if target.nbytes < _LARGE_BYTES or target.dtype != source.dtype:
        return False
    if target.device.type != "cpu" or source.device.type != "cpu":
        return False
    if not (target.is_contiguous() and source.is_contiguous()):
        return False
    distance = (target.data_ptr() - source.data_ptr()) % _PAGE_BYTES
    return not 0 < distance < _ALIASING_BYTES


def _as_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def _warn_now() -> None:
    """Torch says once per process that an array is read-only; nothing here writes to such."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        read_only_bytes(memoryview(b"\0"))


_warn_now()
