"""Ends what is still running when the interpreter exits, so that no thread is inside native code by then."""

from __future__ import annotations

import atexit
import os
import threading
from typing import Protocol


class Closable(Protocol):
    """Something with a thread of its own."""

    def close(self, drain: bool) -> None:
        """Ends the thread and waits for it."""


_lock = threading.Lock()
_open: set[Closable] = set()
_registered = False


def close_at_exit(item: Closable) -> None:
    """Has ``item`` closed, without draining, when the interpreter exits."""
    global _registered
    with _lock:
        if not _registered:
            atexit.register(_close_all)
            _registered = True
        _open.add(item)


def forget(item: Closable) -> None:
    """``item`` is closed already."""
    with _lock:
        _open.discard(item)


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # another thread may have held it then, and is not in the child
    os.register_at_fork(after_in_child=_renew_lock)


def _close_all() -> None:
    for item in list(_open):
        item.close(False)
