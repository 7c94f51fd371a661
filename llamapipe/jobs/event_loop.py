"""An event loop in a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class EventLoopThread:
    """A thread that runs an event loop until the block ends; then what runs in it is cancelled."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="llamapipe-batch", daemon=True)

    def __enter__(self) -> EventLoopThread:
        self._thread.start()
        return self

    def start(self, coroutine: Coroutine[object, object, T]) -> Future[T]:
        """Starts a task. Any thread."""
        future: Future[T] = Future()

        async def run() -> None:
            try:
                future.set_result(await coroutine)
            except asyncio.CancelledError:
                future.cancel()
            except (
                BaseException
            ) as e:  # with SystemExit the loop would end, and the caller would wait for ever
                future.set_exception(e)

        asyncio.run_coroutine_threadsafe(run(), self._loop)
        return future

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_cancel_others())
        finally:
            self._loop.close()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
