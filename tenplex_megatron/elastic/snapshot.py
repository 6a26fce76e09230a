"""How is a snapshot taken while training goes on?

The copy starts at a step boundary on a thread of its own and must be finished before the weights
change again (`fence`); digests and the index follow in the background.  A version is committed at a
later step boundary, when all ranks of the world have said that theirs is finished.
"""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from tenplex_megatron.adapters.base import Piece, Progress, TrainingState
from tenplex_megatron.errors import StoreError
from tenplex_megatron.execution.copying import Copying, copy_all
from tenplex_megatron.store.base import TensorWriter
from tenplex_megatron.store.processors import processors_per_rank

__all__ = ["Snapshotter"]

logger = logging.getLogger(__name__)


class Snapshotter:
    """Copies the boxes of one rank into its writer, version after version.

    Args:
        state: the live state; its pieces keep their memory for the whole generation.
        pieces: the boxes, in the order of the writer.
        writer: where they go.
    """

    def __init__(
        self, state: TrainingState, pieces: tuple[Piece, ...], writer: TensorWriter
    ) -> None:
        self._state = state
        self._early = [n for n, piece in enumerate(pieces) if piece.is_early]
        self._late = [n for n, piece in enumerate(pieces) if not piece.is_early]
        self._sources = [piece.as_bytes() for piece in pieces]
        self._writer = writer
        # One processor is left to training, until that waits and helps.
        self._threads = max(processors_per_rank() - 1, 1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="tenplex-snapshot")
        self._copying: Copying | None = None
        self._seal: Future[int] | None = None
        self.finished_version = -1
        self.copy_seconds = 0.0
        self.nbytes = sum(piece.nbytes for piece in pieces)

    def start(self, version: int, committed: int | None) -> None:
        """Begin to copy the state of this moment; returns while the copy runs.

        Blocks only for a previous version that is still being sealed.  `committed` is the version
        all ranks have finished; it stays whole.
        """
        self.wait()
        self._state.refresh()
        progress = self._state.progress()
        views = self._writer.begin(version, spare=committed)
        copy_all(self._pairs(self._early, views))
        self._copying = Copying(self._pairs(self._late, views), self._pool, self._threads)
        self._seal = self._pool.submit(self._finish, version, progress, self._copying)

    def fence(self) -> None:
        """Block until the running copy no longer reads the live state."""
        if self._copying is not None:
            self._copying.finish()
            self.copy_seconds = self._copying.seconds
            self._copying = None

    def poll(self) -> int:
        """The newest version this rank has finished; does not block."""
        if self._seal is not None and self._seal.done():
            self.wait()
        return self.finished_version

    def wait(self) -> int:
        """Block until the running version is sealed; returns the newest finished version.

        A version that could not be written is missing, and said so; training goes on without it.
        """
        self.fence()
        if self._seal is not None:
            seal, self._seal = self._seal, None
            try:
                self.finished_version = seal.result()
            except StoreError as error:
                logger.warning("a snapshot could not be finished: %s", error)
        return self.finished_version

    def close(self) -> None:
        """Finish what runs and let go of the memory."""
        self.wait()
        self._pool.shutdown()
        self._writer.close()

    def _pairs(
        self, numbers: Sequence[int], views: Sequence[memoryview]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in numbers:
            if self._sources[number].numel():
                yield torch.frombuffer(views[number], dtype=torch.uint8), self._sources[number]

    def _finish(self, version: int, progress: Progress, copying: Copying) -> int:
        copying.finish()
        self._writer.finish(version, progress)
        return version
