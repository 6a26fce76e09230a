"""How do the first copies into fresh shared memory reach full speed without delaying the start?

Entering a page into a process costs about ten times what copying into it does. A thread enters them
ahead of the first copy; pages it has not reached are entered by the copy itself.
"""

import ctypes
import logging
import mmap
import threading
from collections.abc import Sequence

__all__ = ["PageToucher", "memory_address"]

logger = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it
_CHUNK_BYTES = 64 << 20


def memory_address(memory: mmap.mmap) -> int:
    """Where a mapping begins in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class PageToucher:
    """Enters the pages of some mappings in the background; never changes their content."""

    def __init__(self, memories: Sequence[mmap.mmap]) -> None:
        self._memories = list(memories)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # Less than one chunk is entered by the first copy before a thread would have started.
        if sum(len(memory) for memory in self._memories) > _CHUNK_BYTES:
            self._thread = threading.Thread(target=self._run, name="snapshot-pages", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread and let go of the mappings."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._memories.clear()

    def _run(self) -> None:
        # mmap.madvise keeps the GIL until every page is entered; the C function does not.
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for memory in self._memories:
            address, nbytes = memory_address(memory), len(memory)
            for start in range(0, nbytes, _CHUNK_BYTES):
                if self._stop.is_set():
                    return
                chunk = min(_CHUNK_BYTES, nbytes - start)
                if madvise(address + start, chunk, _MADV_POPULATE_WRITE):
                    logger.debug("pages are not entered ahead: errno %d", ctypes.get_errno())
                    return
