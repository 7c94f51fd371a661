"""Holds background tasks: an event loop has only weak references to them, so they could be collected too early."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from llamapipe.server.errors import ApiError

_log = logging.getLogger("llamapipe.server")


class Tasks:
    """A set of running tasks. Logs each failure except an ApiError, which a client receives."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Tasks {len(self._running)}>"

    def __len__(self) -> int:
        return len(self._running)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task."""
        task = asyncio.ensure_future(coroutine)
        self._running.add(task)
        task.add_done_callback(self._finish)
        return task

    def cancel(self) -> None:
        """Cancel all running tasks."""
        for task in self._running:
            task.cancel()

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ApiError):
            _log.error("a task failed", exc_info=error)
