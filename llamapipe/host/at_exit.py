"""The exit of the interpreter: waits for native work on other threads, then closes the objects that own threads.

Up to Python 3.13, a daemon thread that asks for the interpreter's lock during finalization is ended immediately
(``pthread_exit``). That call unwinds the thread's frames, and unwinding C++ or Rust frames aborts or crashes the
process. So work whose native frames take the lock themselves (a callback, llguidance) runs ``with awaited_at_exit()``.
A thread of ours that is still inside native code would crash the process as well, so owners of threads register with
``close_at_exit``. Closing does not drain: the program has ended, so queued work is cancelled.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from llamapipe.locks import Lock


class Closable(Protocol):
    """An object that owns a thread."""

    def close(self, drain: bool) -> None:
        """End the thread and wait for it."""


_lock = Lock()
_open: set[Closable] = set()
_working: dict[threading.Event, float | None] = {}  # seconds that the exit waits for each; None: no limit
_registered = False
_exiting = False


def close_at_exit(item: Closable) -> None:
    """Register ``item`` to be closed, without draining, when the interpreter exits. Any thread.

    Raises SystemExit on any thread but the main one if the interpreter is already exiting.
    """
    with _lock:
        _begin()
        _open.add(item)


def forget(item: Closable) -> None:
    """Unregister ``item``, which has been closed. Any thread."""
    with _lock:
        _open.discard(item)


@contextmanager
def awaited_at_exit(at_most_s: float | None = None) -> Iterator[None]:
    """Make the interpreter's exit wait for native work in the block, at most ``at_most_s`` seconds. Any thread.

    Raises SystemExit on any thread but the main one if the interpreter is already exiting. The thread then ends without
    a message, as daemon threads do.
    """
    if threading.current_thread() is threading.main_thread():  # the exit begins only after this block
        yield
        return
    ended = threading.Event()
    try:
        with _lock:
            _begin()
            _working[ended] = at_most_s
        yield
    finally:
        ended.set()
        with _lock:
            _working.pop(ended, None)


def is_exiting() -> bool:
    """Return whether the interpreter is exiting. Any thread."""
    return _exiting


def end_thread_at_exit() -> None:
    """Raise SystemExit on any thread but the main one if the interpreter is exiting; otherwise do nothing."""
    if _exiting and threading.current_thread() is not threading.main_thread():
        raise SystemExit


def _begin() -> None:
    global _registered
    end_thread_at_exit()
    if not _registered:
        atexit.register(_at_exit)
        _registered = True


def _forget_others() -> None:
    global _lock
    _lock = Lock()
    _working.clear()


# Another thread may hold the lock at the fork. It does not exist in the child, so the lock would stay held there.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_others)


def _at_exit() -> None:
    global _exiting
    with _lock:
        _exiting = True
        owners, working = list(_open), list(_working.items())
    with ExitStack() as rest:  # Ctrl-C ends one wait, not all
        for item in owners:
            rest.callback(item.close, False)
        for ended, at_most_s in working:
            rest.callback(ended.wait, at_most_s)
