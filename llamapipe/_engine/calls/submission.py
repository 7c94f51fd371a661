"""Brings the requests of a call into the engine loop, and collects their results.

Open this file when a call hangs, loses a result, or leaves requests running after its caller has gone.

The principle: every call takes the same steps. Its options and prompts are checked before anything is queued
(``call_options``, ``RequestBuilder``). Its requests are made, enter the queue when there is room (``QueueLimit``) and
are submitted. Its results are collected until none is missing (``Pending``, ``Submission``). If the caller gives up at
any point (an error, Ctrl-C, a cancelled task, a closed iterator), all requests without a result are cancelled.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Collection,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import replace
from itertools import chain, islice
from queue import Empty
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from llamapipe._engine.calls.call_options import CallOptions, ExpiredError
from llamapipe._engine.calls.observed import observed_request
from llamapipe._engine.calls.prompts import PORTION, Groups, RequestFactory, with_prompt_index
from llamapipe._engine.calls.queue_limit import QueueLimit
from llamapipe._engine.policy.core import Request
from llamapipe._engine.runtime.mailboxes import AsyncMailbox, Mailbox, ThreadMailbox
from llamapipe._engine.runtime.sinks import Failure
from llamapipe._engine.runtime.thread import EngineThread
from llamapipe.errors import EngineClosedError, QueueFullError
from llamapipe.locks import Lock
from llamapipe.results import Completion
from llamapipe.types import Observation, RequestObserver
from llamapipe.work.long_work import running_loop
from llamapipe.work.progress import Progress

if TYPE_CHECKING:
    import asyncio


T = TypeVar("T")
END: Any = object()  # marks the end of an iterator whose items may be None


async def as_async(values: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    """Yield the values of an iterable of either kind, for ``async for``."""
    if isinstance(values, AsyncIterable):
        async for value in values:
            yield value
    else:
        for value in values:
            yield value


def no_requests(mailbox: Mailbox) -> dict[int, list[Request]]:
    """Return an empty dict: the request factory of a prompt that failed its checks."""
    return {}


class Pending(Generic[T]):
    """The requests of one call that have no result yet, for one thread or task. ``bar``: counts results."""

    def __init__(
        self, options: CallOptions, observer: RequestObserver | None, bar: Progress | None = None
    ) -> None:
        self.options = options
        self.bar = bar
        self._observer = observer
        self.observed: dict[int, Observation] = {}
        self.groups: dict[int, Sequence[Request]] = {}
        self.unsubmitted: deque[Request] = deque()
        self.ready: deque[tuple[int, T | Exception]] = deque()  # results that need no request
        self.timed_out = False
        # These attributes serve long lists: the thread that closes the engine submits the rest of the list.
        self.lock = Lock()
        self.is_long = False
        self.is_making = False
        self.is_broken = False  # submitting the rest was interrupted, so results will be missing
        self.has_ended = False

    def add(self, groups: Groups) -> None:
        """Add groups of requests to submit, by the index of their result."""
        self.groups.update(groups)
        for index, requests in groups.items():
            self.unsubmitted += requests
            if self._observer is not None:
                self.observed[index] = self._observer.begin(
                    observed_request(requests, self.options.operation)
                )

    @property
    def requests(self) -> list[Request]:
        """All requests without a result."""
        return [request for requests in list(self.groups.values()) for request in requests]

    def give_up(self, error: BaseException | None) -> None:
        """Tell the observer that all groups without a result have ended. ``error``: the reason, if there is one."""
        if not isinstance(error, (TimeoutError, QueueFullError, EngineClosedError)):
            error = None  # Ctrl-C, or the error of another request
        while self.observed:
            self.observed.popitem()[1].end(error)


def _timeout_completion(completion: Completion) -> Completion:
    if all(choice.finish_reason != "cancelled" for choice in completion.choices):
        return completion
    return replace(
        completion,
        choices=tuple(
            replace(choice, finish_reason="timeout") if choice.finish_reason == "cancelled" else choice
            for choice in completion.choices
        ),
    )


# Long lists are submitted in portions. When 20,000 prompts were submitted together, the garbage collector repeatedly
# scanned all their objects, for up to 0.26 s, during which no thread ran.
_N_AHEAD = 2 * PORTION  # if fewer groups of a long list have no result yet, the next portion is submitted


class Submission:
    """Brings requests to the engine loop and their results back. Any thread."""

    def __init__(self, engine_thread: EngineThread, queue: QueueLimit) -> None:
        self._engine_thread = engine_thread
        self._queue = queue
        self.observer: RequestObserver | None = None

    def _entering(self, unsubmitted: deque[Request], block: bool) -> Iterator[Request]:
        """Submit all requests together if the queue has room for them.

        Otherwise yield each request, so that the caller waits for room, and then submit it. Raises QueueFullError
        instead if ``block`` is false.
        """
        if not block:
            self._queue.enter_at_once(*unsubmitted)
        elif not self._queue.try_enter(*unsubmitted):
            while unsubmitted:
                yield unsubmitted[0]
                self._engine_thread.submit(unsubmitted[0])
                unsubmitted.popleft()
            return
        self._engine_thread.submit(*unsubmitted)
        unsubmitted.clear()

    def cancel(self, requests: Collection[Request]) -> None:
        """Cancel requests, whether or not they were submitted before their caller gave up."""
        if not requests:
            return
        self._queue.discard(requests)
        for request in requests:
            self._engine_thread.cancel_soon(request)

    def _end(self, pending: Pending[T]) -> None:
        """End the call after an error, or when its caller gives up. Cancel the requests without a result."""
        error = sys.exc_info()[1]
        with pending.lock:
            pending.has_ended = True
            if pending.is_long:
                self._engine_thread.end_list(pending)
            if pending.groups:
                self.cancel(pending.requests)
                pending.give_up(error)
        if pending.bar is not None:
            pending.bar.close()

    def _stop(self, pending: Pending[T], expired: ExpiredError) -> None:
        """Cancel the requests at the deadline, so that their tokens arrive within a step, or raise ``expired``."""
        if pending.options.on_timeout == "raise":
            raise expired
        with pending.lock:
            pending.timed_out = True
            self.cancel(pending.requests)
            self._submit_cancelled(pending)

    def _submit_cancelled(self, pending: Pending[T]) -> None:
        """Submit, as cancelled, the requests left at the deadline. They end immediately, without a token."""
        if pending.unsubmitted:
            self.cancel(pending.unsubmitted)
            self._engine_thread.submit(*pending.unsubmitted, of_list=pending.is_long)
            pending.unsubmitted.clear()

    def _read(self, item: tuple[int, Any], pending: Pending[Any]) -> tuple[int, Any]:
        """Return the index and the result in a mailbox item, whose requests are then no longer pending.

        Raises the error of a failed request if ``on_error`` is ``"raise"``.
        """
        index, result = item
        if (observed := pending.observed.pop(index, None)) is not None:
            error = result.error if isinstance(result, Failure) else None
            observed.end(error, timed_out=pending.timed_out)
        if isinstance(result, Failure):
            options = pending.options
            result = with_prompt_index(result.error, index) if options.names_prompts else result.error
            if options.on_error == "raise" or not isinstance(result, Exception):
                raise result
            self.cancel(pending.groups[index])  # the other choices of the prompt
        elif pending.timed_out and isinstance(result, Completion):
            result = _timeout_completion(result)
        pending.groups.pop(index, None)
        if pending.bar is not None:
            pending.bar.update()
        return index, result

    def _make_next(self, batches: Iterator[RequestFactory], mailbox: Mailbox, pending: Pending[T]) -> bool:
        """Make the next requests, and submit them if the list is long. Return False if no requests are left."""
        with pending.lock:
            if pending.is_broken:
                raise EngineClosedError("the engine is closed; make another")
            pending.is_making = True
            try:
                make = next(batches, None)
                if make is None:
                    return False
                pending.add(make(mailbox))
                if isinstance(mailbox, AsyncMailbox):
                    mailbox.requests = pending.requests
                if pending.timed_out:
                    self._submit_cancelled(pending)
                elif pending.is_long:
                    self._queue.try_enter(*pending.unsubmitted)  # a queue with long lists has no limit
                    self._engine_thread.submit(*pending.unsubmitted, of_list=True)
                    pending.unsubmitted.clear()
                return True
            finally:
                pending.is_making = False

    def _portions(
        self, batches: Iterator[RequestFactory], mailbox: Mailbox, pending: Pending[T]
    ) -> Iterator[RequestFactory]:
        """Return the portions of a list that are submitted one after another.

        There is one portion if all requests or none must enter the queue. If the queue has no limit, closing the engine
        submits the rest of a long list, as if the whole list had been submitted together.
        """
        if self._queue.limit is not None:  # callers wait for room, and closing refuses waiting callers
            if pending.options.block:
                return batches

            def make(mailbox: Mailbox) -> Groups:
                return {index: requests for make in batches for index, requests in make(mailbox).items()}

            return iter([make])
        first = list(islice(batches, 2))
        batches = chain(first, batches)
        if len(first) < 2:
            return batches

        def submit_rest() -> None:
            with pending.lock:
                # ``is_making``: a signal handler closes the engine while this thread makes requests.
                if pending.has_ended or pending.is_making or pending.is_broken:
                    return
                try:
                    while self._make_next(batches, mailbox, pending):
                        pass
                except BaseException:
                    pending.is_broken = True
                    raise

        pending.is_long = True
        self._engine_thread.begin_list(pending, submit_rest)
        return batches

    def submit_paused(self, request: Request) -> None:
        """Submit a request that computes nothing before it is resumed. It does not count in the queue."""
        try:
            self._engine_thread.submit(request)
        except BaseException:
            self.cancel([request])
            raise

    # ---- asyncio: tools/unasync.py makes the calls for threads, in llamapipe/_sync, from what follows
    async def asubmit(self, *requests: Request, block: bool = True, deadline: float | None = None) -> None:
        """Wait for room in the queue and submit. Any error, Ctrl-C and cancelling the task cancel all requests.

        Raises QueueFullError, TimeoutError, EngineClosedError.
        """
        try:
            self._engine_thread.note_waiting_task()
            for request in self._entering(deque(requests), block):
                await self._queue.aenter(request, deadline)
        except BaseException:
            self.cancel(requests)
            raise

    async def acollect(
        self, batches: Iterator[RequestFactory], options: CallOptions, bar: Progress | None = None
    ) -> dict[int, Any]:
        """Return the results of the requests of all batches, by index. Long lists are submitted in portions.

        Any error, Ctrl-C and cancelling the task cancel all requests. Raises the error of a request, TimeoutError,
        QueueFullError, EngineClosedError.
        """
        pending = Pending[Any](options, self.observer, bar)
        mailbox = AsyncMailbox(running_loop(), self._engine_thread.dispatcher)
        results: dict[int, Any] = {}
        try:
            batches = self._portions(batches, mailbox, pending)
            exhausted = False
            while True:
                try:
                    while not exhausted and len(pending.groups) < _N_AHEAD:
                        self._engine_thread.note_waiting_task()
                        if not self._make_next(batches, mailbox, pending):
                            exhausted = True
                            break
                        if pending.unsubmitted:
                            for request in self._entering(pending.unsubmitted, options.block):
                                await self._queue.aenter(request, options.deadline)
                    if not pending.groups:
                        return results
                    # Requests that are cancelled at the deadline arrive within a step.
                    item = await mailbox.get(None if pending.timed_out else options.deadline)
                except Empty:
                    self._stop(pending, options.expired_error())
                except ExpiredError as expired:
                    self._stop(pending, expired)
                else:
                    index, results[index] = self._read(item, pending)
        finally:
            self._end(pending)

    # ---- end of asyncio

    # ---- results arrive while prompts are still read
    def iterate(
        self,
        batches: Iterator[RequestFactory],
        n_ahead: int,
        pending: Pending[T],
    ) -> Iterator[tuple[int, T | Exception]]:
        """Yield each result with its index as requests finish, with at most about ``n_ahead`` groups unfinished.

        Closing the iterator, Ctrl-C and any error cancel the remaining requests.
        """
        mailbox = ThreadMailbox(self._engine_thread.dispatcher)
        options = pending.options
        try:
            exhausted = False
            while True:
                try:
                    while not exhausted and len(pending.groups) < n_ahead:
                        self._engine_thread.note_waiting_thread()
                        if not self._make_next(batches, mailbox, pending):
                            exhausted = True
                            break
                        if pending.unsubmitted:
                            for request in self._entering(pending.unsubmitted, options.block):
                                self._queue.enter(request, options.deadline)
                        if pending.ready:
                            break
                    while pending.ready:
                        yield self._read(pending.ready.popleft(), pending)
                    if not pending.groups:
                        if exhausted:
                            return
                        continue
                    item = mailbox.get(options.deadline)
                except Empty:
                    raise options.expired_error() from None
                yield self._read(item, pending)
        finally:
            self._end(pending)

    async def aiterate(
        self, batches: AsyncIterator[RequestFactory], n_ahead: int, pending: Pending[T]
    ) -> AsyncGenerator[tuple[int, T | Exception], None]:
        """Yield as ``iterate`` does, for asyncio; results also arrive while ``batches`` waits.

        Closing the iterator cancels the remaining requests.
        """
        import asyncio

        mailbox = AsyncMailbox(running_loop(), self._engine_thread.dispatcher)
        room = asyncio.Semaphore(n_ahead)
        submitting = asyncio.ensure_future(self._submit_all(batches, mailbox, room, pending))
        submitting.add_done_callback(mailbox.receive)  # wakes the reader below
        try:
            while pending.groups or not submitting.done():
                try:
                    item = await mailbox.get(pending.options.deadline)
                except Empty:
                    raise pending.options.expired_error() from None
                if item is submitting:
                    submitting.result()  # raises what the submission raised
                    continue
                index, result = self._read(item, pending)
                room.release()
                yield index, result
        finally:
            submitting.cancel()
            await asyncio.wait([submitting])
            self._end(pending)

    async def _submit_all(
        self,
        batches: AsyncIterator[RequestFactory],
        mailbox: AsyncMailbox,
        room: asyncio.Semaphore,
        pending: Pending[T],
    ) -> None:
        """Submit the requests that ``batches`` yields, while there is room."""
        while True:
            await room.acquire()
            make = await anext(batches, None)
            if make is None:
                return
            pending.add(make(mailbox))
            mailbox.requests = pending.requests
            self._engine_thread.note_waiting_task()
            for request in self._entering(pending.unsubmitted, pending.options.block):
                await self._queue.aenter(request, pending.options.deadline)
            while pending.ready:
                mailbox.receive(pending.ready.popleft())
