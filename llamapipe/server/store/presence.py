"""Shows other processes that this process is alive, by a lock on a file. The system releases the lock when it ends.

A killed process is therefore recognized as dead immediately, and a slow process is never mistaken for dead.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from glob import escape
from pathlib import Path

from llamapipe.cache_file import create_locked, remove_if_dead


class Presence:
    """Shows the presence of this process to others that use a file. Blocks. ``name``: empty until ``sign_in``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = ""
        self._lock: int | None = None

    def __repr__(self) -> str:
        return f"<Presence {self.name}>"

    def sign_in(self) -> None:
        """Lock a new file, and remove the files of ended processes. A second call does nothing. Raises OSError."""
        if self._lock is not None:
            return
        for old in self._path.parent.glob(f"{escape(self._path.name)}-at-*"):
            remove_if_dead(old)
        name = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._lock = create_locked(self._file(name))
        self.name = name

    def sign_out(self) -> None:
        """Remove the file. A second call does nothing."""
        if self._lock is not None:
            self._file(self.name).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def find_ended(self, names: Iterable[str | None]) -> list[str]:
        """Return which of these names belong to other processes that have ended."""
        dead = []
        for name in {name for name in names if name is not None} - {self.name}:
            remove_if_dead(self._file(name))
            if not self._file(name).exists():
                dead.append(name)
        return dead

    def _file(self, name: str) -> Path:
        return Path(f"{self._path}-at-{name}")
