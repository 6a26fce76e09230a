"""Which attributes of other modules are replaced, and how are they put back?"""

from collections.abc import Mapping
from typing import Any

__all__ = ["Patches"]


class Patches:
    """Replaced attributes and environment variables, undone in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, bool, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name`, which need not exist yet."""
        own = vars(owner)
        self._undo.append((owner, name, name in own, own.get(name)))
        setattr(owner, name, value)

    def set_all(self, owner: Any, values: Mapping[str, Any]) -> None:
        """Replace several attributes of one owner."""
        for name, value in values.items():
            self.set(owner, name, value)

    def restore(self) -> None:
        """Put every attribute back as it was before the first `set`."""
        while self._undo:
            owner, name, existed, value = self._undo.pop()
            if existed:
                setattr(owner, name, value)
            else:
                delattr(owner, name)
