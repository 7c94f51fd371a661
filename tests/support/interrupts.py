"""Ctrl-C for child processes."""

from __future__ import annotations

import signal


def heed_ctrl_c() -> None:
    """For ``preexec_fn``: a shell that runs the tests in the background has its children ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
