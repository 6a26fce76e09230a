"""How are bytes copied at the speed of the memory?

Host copies go through libc's memcpy, which writes past the caches: half as fast again as torch's
own loop, which first reads every line it is about to overwrite.  One processor can't keep the
memory busy, so many copies are shared among the processors that a rank has to itself.
"""

import warnings
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from tenplex_megatron.store.processors import processors_per_rank

__all__ = ["copy_all", "copy_into", "read_only_bytes"]

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


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """`copy_into` for every (target, source); the targets don't overlap."""
    pairs = list(pairs)
    threads = processors_per_rank()
    is_large = sum(target.nbytes for target, _ in pairs) >= _PARALLEL_BYTES
    on_host = all(tensor.device.type == "cpu" for pair in pairs for tensor in pair)
    if threads == 1 or not is_large or not on_host:
        for target, source in pairs:
            copy_into(target, source)
        return
    pieces = [piece for pair in pairs for piece in _cut(*pair)]
    pieces.sort(key=lambda piece: piece[0].nbytes, reverse=True)
    queue = deque(pieces)
    with ThreadPoolExecutor(threads, thread_name_prefix="tenplex-copy") as pool:
        for done in [pool.submit(_copy_queued, queue) for _ in range(threads)]:
            done.result()


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


@torch.no_grad()
def _copy_queued(queue: deque[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy until nothing is left; others take from the same queue."""
    while True:
        try:
            target, source = queue.popleft()
        except IndexError:
            return
        copy_into(target, source)


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
