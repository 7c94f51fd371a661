"""Submits requests together and waits for what comes of all of them."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty
from time import perf_counter
from typing import Any

from llamapipe.engine.delivery.mailbox import AsyncMailbox, ThreadMailbox
from llamapipe.engine.delivery.sink import Failure
from llamapipe.engine.frontend.progress import Progress
from llamapipe.engine.frontend.queue_limit import QueueLimit
from llamapipe.engine.scheduler.request import Request
from llamapipe.engine.worker.engine_thread import EngineThread, single_caller

Make = Callable[[Any], list[Request]]  # requests that answer a mailbox with (index, result)


class Submission:
    """What ``generate`` and ``score`` have in common. Any thread."""

    def __init__(self, engine_thread: EngineThread, queue: QueueLimit) -> None:
        self._engine_thread = engine_thread
        self._queue = queue

    def collect(
        self, make: Make, deadline: float | None, block: bool, timeout: float | None, bar: Progress
    ) -> list[Any]:
        """The results of the requests that ``make`` gives, in their order.

        Whatever ends it early cancels them all. Raises what a request failed with, TimeoutError, QueueFullError.
        """
        mailbox = ThreadMailbox(self._engine_thread.dispatcher)
        started: list[Request] = []
        try:
            started += make(mailbox)
            results: list[Any] = [None] * len(started)
            self._engine_thread.loop.inbox.single_caller = single_caller()
            if self._enter_together(started, block):
                self._engine_thread.submit(*started)
            else:
                for request in started:
                    self._queue.enter(request, deadline)
                    self._engine_thread.submit(request)
            for _ in started:
                index, result = mailbox.get(timeout=left_s(deadline))
                if isinstance(result, Failure):
                    raise result.error
                results[index] = result
                bar.update()
        except Empty:
            self.cancel(started)
            raise TimeoutError(
                f"not finished within the timeout of {timeout} s; what was left is cancelled"
            ) from None
        except BaseException:
            self.cancel(started)
            raise
        finally:
            bar.close()
        return results

    async def acollect(self, make: Make, block: bool) -> list[Any]:
        """``collect`` for asyncio; cancelling the task cancels the requests."""
        import asyncio

        mailbox = AsyncMailbox(asyncio.get_running_loop(), self._engine_thread.dispatcher)
        started = mailbox.requests
        try:
            started += make(mailbox)
            results: list[Any] = [None] * len(started)
            self._engine_thread.loop.inbox.single_caller = False
            if self._enter_together(started, block):
                self._engine_thread.submit(*started)
            else:
                for request in started:
                    await self._queue.aenter(request)
                    self._engine_thread.submit(request)
            for _ in started:
                index, result = await mailbox.get()
                if isinstance(result, Failure):
                    raise result.error
                results[index] = result
        except BaseException:
            self.cancel(started)
            raise
        return results

    def _enter_together(self, requests: list[Request], block: bool) -> bool:
        """Whether there is room for all; raises QueueFullError when there is not and nobody wants to wait."""
        if block:
            return self._queue.try_enter(*requests)
        self._queue.enter_at_once(*requests)
        return True

    def cancel(self, requests: list[Request]) -> None:
        """Ends requests, whether or not they were submitted before their caller gave up."""
        self._queue.leave(requests)
        for request in requests:
            self._engine_thread.cancel_soon(request)


def left_s(deadline: float | None) -> float | None:
    """Seconds until a time of ``perf_counter``; None: no limit."""
    return None if deadline is None else max(deadline - perf_counter(), 0.0)
