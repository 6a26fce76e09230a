"""What happened to the job, when, and on which node? One JSON line per event, appended."""

import json
import os
import time
from pathlib import Path

__all__ = ["EventLog"]


class EventLog:
    """Appends events to a file that several processes share.

    A line goes out in one `write` to a descriptor in append mode, so lines never mix.
    """

    def __init__(self, path: Path, node: str) -> None:
        self._path = path
        self._node = node

    def append(self, kind: str, generation: int, **fields: object) -> None:
        """Record `kind` at the present time."""
        line = {"time": time.time(), "generation": generation, "kind": kind, "node": self._node}
        data = json.dumps({**line, **fields}, default=str).encode() + b"\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)
