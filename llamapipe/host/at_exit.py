"""Closes open engines and pipelines when the interpreter exits.

A thread that is still inside native code at that point would crash the process. Closing does not drain: the program has
ended, so queued work is cancelled.
"""

from __future__ import annotations

import atexit
import os
from typing import Protocol

from llamapipe.locks import Lock


class Closable(Protocol):
    """An object that owns a thread."""

    def close(self, drain: bool) -> None:
        """Ends the thread and waits for it."""


_lock = Lock()
_open: set[Closable] = set()
_registered = False


def close_at_exit(item: Closable) -> None:
    """Registers ``item`` to be closed, without draining, when the interpreter exits. Any thread."""
    global _registered
    with _lock:
        if not _registered:
            atexit.register(_close_all)
            _registered = True
        _open.add(item)


def forget(item: Closable) -> None:
    """Removes ``item``, which is closed. Any thread."""
    with _lock:
        _open.discard(item)


def _renew_lock() -> None:
    global _lock
    _lock = Lock()


# Another thread may hold the lock at the fork. It does not exist in the child, so the lock would stay held there.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _close_all() -> None:
    for item in list(_open):
        item.close(False)
