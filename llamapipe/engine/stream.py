"""Streams: a request's deltas as they arrive, for a thread or an asyncio task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from queue import Empty
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

from llamapipe._engine.request import Request, State
from llamapipe._engine.thread import EngineThread
from llamapipe.engine.delivery.mailbox import AsyncMailbox, ThreadMailbox
from llamapipe.engine.delivery.sink import Failure
from llamapipe.engine.frontend.observer import ObservedRequest
from llamapipe.engine.results import Delta
from llamapipe.locks import OneCall, OneTask
from llamapipe.native.owner import Owner

_RUNNING = State.RUNNING  # read once a token: a global is faster than a class attribute
BUFFER_TOKENS = 64  # tokens a stream may be ahead of its reader before its sequence pauses


class PromptProgress(NamedTuple):
    """How much of a request's prompt is computed, in tokens; ``n_done`` includes the cached ones.

    ``seconds``: since the request got a slot.
    """

    n_prompt_tokens: int
    n_cached_tokens: int
    n_done: int
    seconds: float


class _Reader(Owner):
    """The part both kinds of stream share: the budget for further tokens, the end, cancelling."""

    engine: object = None  # kept alive by its streams
    observed: ObservedRequest | None = None

    def __init__(self, engine_thread: EngineThread, request: Request, deadline: float | None) -> None:
        self._engine_thread = engine_thread
        self._request = request
        self._deadline = deadline
        self._done = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'done' if self._done else 'open'} {self._request!r}>"

    @property
    def n_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had; known with the first delta, 0 before."""
        request = getattr(self, "_request", None)
        return 0 if request is None else request.n_cached

    @property
    def prompt_progress(self) -> PromptProgress | None:
        """How much of the prompt is computed; None while the request waits for its first slot."""
        request = getattr(self, "_request", None)
        if request is None or request.left_queue_at is None:
            return None
        n = request.n_prompt
        seconds = perf_counter() - request.left_queue_at
        return PromptProgress(n, request.n_cached, min(max(request.n_past, request.n_cached), n), seconds)

    def _read(self, item: Any) -> Delta:
        if isinstance(item, Failure):
            self._done = True
            self.observed_end(item.error)
            raise item.error
        delta: Delta = item
        if delta.finish_reason is not None:
            self._done = True
            if self.observed is not None:
                self.observed_end()
        request = self._request
        request.token_budget += len(delta.token_ids)
        # A command to the engine thread for every token would be expensive: half a buffer at once is enough.
        if (
            request.state is not _RUNNING
            and request.state in (State.PAUSED, State.WAITING)
            and request.token_budget - request.n_total >= BUFFER_TOKENS // 2
        ):
            self._engine_thread.resume(request)
        return delta

    def _left_s(self) -> float | None:
        """Seconds the next delta may take; None without a deadline, or if the request is finished."""
        if self._deadline is None or self._request.state is State.FINISHED:
            return None
        return max(self._deadline - perf_counter(), 0.0)

    def _expired(self) -> TimeoutError:
        error = TimeoutError("the request did not finish within its timeout and was cancelled")
        self.observed_end(error)
        self.cancel()
        return error

    def observed_end(self, error: BaseException | None = None) -> None:
        """Notifies the observer of the end, once, if there is an observer."""
        observed, self.observed = self.observed, None
        if observed is not None:
            observed.end(error)

    def cancel(self) -> None:
        """Ends the request within a step; the stream then ends too. Any thread; a second call does nothing."""
        request = self._request
        if not request.cancelled and request.state is not State.FINISHED:
            self._engine_thread.cancel_soon(request)
        self._done = True  # last: a caller that is interrupted before this line can cancel again
        self.observed_end()

    def __del__(self) -> None:
        # Dropped before its end: the rest can no longer be read. This takes no lock, so any thread may collect it.
        if not getattr(self, "_done", True):
            observed, self.observed = self.observed, None
            if observed is not None:
                observed.drop()
            self.cancel()


class Stream(_Reader):
    """An iterator over a request's deltas; closing or dropping it cancels the request.

    For one thread at a time: ``next`` while another one waits raises RuntimeError. A slow reader pauses only its own
    sequence. Iterating raises the error of the request, and TimeoutError when its timeout passed.
    """

    def __init__(
        self, engine_thread: EngineThread, request: Request, mailbox: ThreadMailbox, deadline: float | None
    ) -> None:
        super().__init__(engine_thread, request, deadline)
        self._mailbox = mailbox
        self._one_call = OneCall("stream")

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        with self._one_call:
            return self._next()

    def _next(self) -> Delta:
        if self._done:
            raise StopIteration
        if self._engine_thread.forked:
            self._engine_thread.check_process()
        left_s = None if self._deadline is None else self._left_s()
        if left_s == 0:  # also if deltas are left in the mailbox
            raise self._expired()
        try:
            item = self._mailbox.get(timeout=left_s)
        except Empty:
            raise self._expired() from None
        except BaseException as e:  # Ctrl-C while waiting
            self.observed_end(e)
            self.cancel()
            raise
        return self._read(item)

    def close(self) -> None:
        """Cancels the request if it is not finished."""
        self.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncStream(_Reader):
    """An asynchronous iterator over a request's deltas.

    Closing or dropping it, or cancelling the task that waits for it, cancels the request. For one task at a time, of
    one event loop: a second task that asks for the next delta meanwhile gets RuntimeError. Raises as ``Stream`` does.
    """

    def __init__(
        self,
        engine_thread: EngineThread,
        make: Callable[[], tuple[Request, AsyncMailbox]],
        submit: Callable[[Request], Awaitable[None]],
        deadline: float | None,
    ) -> None:
        self._engine_thread = engine_thread
        self._deadline = deadline
        self._make: Callable[[], tuple[Request, AsyncMailbox]] | None = make
        self._submit = submit
        self._done = True  # nothing to cancel before it is started
        self._one_task = OneTask("stream")

    def __repr__(self) -> str:
        return "<AsyncStream not started>" if self._make is not None else super().__repr__()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Delta:
        with self._one_task:
            return await self._next_delta()

    async def _next_delta(self) -> Delta:
        if self._make is None and self._done:
            raise StopAsyncIteration
        if self._engine_thread.forked:
            self._engine_thread.check_process()
        try:
            if self._make is not None or self._deadline is not None:
                item = await self._next_in_time()
            else:
                item = await self._mailbox.get()
        except BaseException as e:
            self.observed_end(e)
            self.cancel()
            raise
        return self._read(item)

    async def _next_in_time(self) -> Any:
        """The next item, or TimeoutError; the first call submits the request."""
        if self._make is None:
            left_s = self._left_s()
        else:  # the request is not made yet
            left_s = None if self._deadline is None else max(self._deadline - perf_counter(), 0.0)
        if left_s is None:
            return await self._next()
        return await self._in_time(self._next(), left_s)

    async def _in_time(self, awaitable: Awaitable[Any], left_s: float) -> Any:
        import asyncio

        try:
            return await asyncio.wait_for(awaitable, left_s)
        except asyncio.TimeoutError:
            raise self._expired() from None

    async def _next(self) -> Any:
        if self._make is not None:
            await self._begin()
        return await self._mailbox.get()

    async def _begin(self) -> None:
        make, self._make = self._make, None
        if make is not None:
            self._request, self._mailbox = make()
            self._done = False
            await self._submit(self._request)

    async def submit(self) -> None:
        """Submits the request, which otherwise the first ``__anext__`` does. Raises as that does."""
        if self._make is None:
            return
        if self._engine_thread.forked:
            self._engine_thread.check_process()
        try:
            if self._deadline is None:
                await self._begin()
            else:
                await self._in_time(self._begin(), max(self._deadline - perf_counter(), 0.0))
        except BaseException as e:
            self.observed_end(e)
            self.cancel()
            raise

    def cancel(self) -> None:
        """Ends the request within a step; the stream then ends too. A second call does nothing."""
        self._make = None
        if not self._done:
            super().cancel()

    async def aclose(self) -> None:
        """Cancels the request if it is not finished."""
        self.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
