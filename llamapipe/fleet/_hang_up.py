"""SIGHUP: an operator sends it to reload, and the system sends it when a terminal is closed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable


def on_hang_up(reload: Callable[[], object], stop: Callable[[], object]) -> None:
    """Call ``reload`` on SIGHUP, or ``stop`` if the signal was sent because the terminal was closed.

    Call this function on the main thread, in a running event loop.
    """
    had_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()

    def hang_up() -> None:
        if had_terminal and not _has_terminal():
            stop()
        else:
            reload()

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
