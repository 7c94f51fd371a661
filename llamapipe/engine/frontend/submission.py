"""The one way in: requests enter the queue, are submitted, and are cancelled if their caller gives up.

``Submission`` has a face for threads (``submit``, ``collect``, ``iterate``) and one for asyncio (``asubmit``,
``acollect``, ``aiterate``). They differ in how they wait and share everything else: ``_entering`` and ``Pending``.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator
from functools import partial
from itertools import chain, islice
from queue import Empty
from typing import TYPE_CHECKING, Any, TypeVar

from llamapipe._engine.request import Request
from llamapipe._engine.thread import EngineThread, single_caller
from llamapipe.engine.delivery.mailbox import AsyncMailbox, Mailbox, ThreadMailbox
from llamapipe.engine.delivery.progress import Progress
from llamapipe.engine.frontend.call_options import CallOptions, left_s
from llamapipe.engine.frontend.observer import RequestObserver
from llamapipe.engine.frontend.pending import Pending
from llamapipe.engine.frontend.queue_limit import ExpiredError, QueueLimit
from llamapipe.engine.frontend.request_builder import PORTION, Groups, Make
from llamapipe.errors import EngineClosedError

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

# Long lists are submitted in portions. When 20,000 prompts were submitted at once, the garbage collector scanned
# all their objects again and again, for up to 0.26 s, during which no thread ran.
_N_AHEAD = 2 * PORTION  # if fewer groups of a long list have no result yet, the next portion is submitted


class Submission:
    """Brings requests to the engine loop and their results back. Any thread."""

    def __init__(self, engine_thread: EngineThread, queue: QueueLimit) -> None:
        self._engine_thread = engine_thread
        self._queue = queue
        self.observer: RequestObserver | None = None

    def _entering(self, unsubmitted: deque[Request], block: bool) -> Iterator[Request]:
        """Submits all requests together if the queue has room for them.

        If not, it yields each request before it submits it, and the caller waits for room. Raises QueueFullError
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
        """Ends requests, whether or not they were submitted before their caller gave up."""
        if not requests:
            return
        self._queue.withdraw(requests)
        for request in requests:
            self._engine_thread.cancel_soon(request)

    def _end(self, pending: Pending[T]) -> None:
        """Ends the call after an error, or when its caller gives up. Cancels the requests without a result."""
        error = sys.exc_info()[1]
        with pending.lock:
            pending.has_ended = True
            self._engine_thread.end_list(pending)
            if pending.groups:
                self.cancel(pending.requests)
                pending.give_up(error)

    def _stop(self, pending: Pending[T], expired: ExpiredError) -> None:
        """After the deadline: ends the requests, so that what they generated arrives within a step, or raises."""
        if pending.options.on_timeout == "raise":
            raise expired
        with pending.lock:
            pending.timed_out = True
            self.cancel(pending.requests)
            self._submit_cancelled(pending)

    def _submit_cancelled(self, pending: Pending[T]) -> None:
        """Submits, as cancelled, the requests left at the deadline. They end at once, without a token."""
        if pending.unsubmitted:
            self.cancel(pending.unsubmitted)
            self._engine_thread.submit(*pending.unsubmitted, of_list=pending.is_long)
            pending.unsubmitted.clear()

    def _make_next(self, makes: Iterator[Make], mailbox: Mailbox, pending: Pending[T]) -> bool:
        """Makes the next requests, if there are any; submits those of a long list."""
        with pending.lock:
            if pending.is_broken:
                raise EngineClosedError("the engine is closed; make another")
            return self._make(makes, mailbox, pending)

    def _make(self, makes: Iterator[Make], mailbox: Mailbox, pending: Pending[T]) -> bool:
        pending.is_making = True
        try:
            make = next(makes, None)
            if make is None:
                return False
            pending.add(make(mailbox))
            if isinstance(mailbox, AsyncMailbox):
                mailbox.requests = pending.requests
            if pending.timed_out:
                self._submit_cancelled(pending)
            elif pending.is_long:
                self._queue.try_enter(*pending.unsubmitted)  # it has no limit
                self._engine_thread.submit(*pending.unsubmitted, of_list=True)
                pending.unsubmitted.clear()
            return True
        finally:
            pending.is_making = False

    def _watched(self, makes: Iterator[Make], mailbox: Mailbox, pending: Pending[T]) -> Iterator[Make]:
        """Has closing the engine submit the rest of a long list, as if the list had come at once."""
        if self._queue.is_limited:  # callers wait for room, and closing refuses those that do
            return makes
        first = list(islice(makes, 2))
        makes = chain(first, makes)
        if len(first) < 2:
            return makes

        def submit_rest() -> None:
            with pending.lock:
                # While it is made in this thread, a signal handler closes the engine.
                if pending.has_ended or pending.is_making or pending.is_broken:
                    return
                pending.is_broken = True
                while self._make(makes, mailbox, pending):
                    pass
                pending.is_broken = False

        pending.is_long = True
        self._engine_thread.begin_list(pending, submit_rest)
        return makes

    def _together(self, makes: Iterator[Make], options: CallOptions) -> Iterator[Make]:
        """Merges the functions into one if all requests must enter the queue together, or none of them."""
        if options.block or not self._queue.is_limited:
            return makes

        def make(mailbox: Mailbox) -> Groups:
            return {index: requests for make in makes for index, requests in make(mailbox).items()}

        return iter([make])

    # ---- threads
    def submit(self, *requests: Request, block: bool = True, deadline: float | None = None) -> None:
        """Enters the queue and submits; an error cancels all requests.

        Raises QueueFullError, TimeoutError, EngineClosedError.
        """
        try:
            self._engine_thread.loop.inbox.single_caller = single_caller()
            for request in self._entering(deque(requests), block):
                self._queue.enter(request, deadline)
        except BaseException:
            self.cancel(requests)
            raise

    def submit_paused(self, request: Request) -> None:
        """Submits a request that computes nothing before it is resumed; it takes no place in the queue."""
        try:
            self._engine_thread.submit(request)
        except BaseException:
            self.cancel([request])
            raise

    def collect(self, makes: Iterator[Make], options: CallOptions, bar: Progress) -> dict[int, Any]:
        """The results, by index, of the requests that ``makes`` create. Long lists are submitted in portions.

        Ctrl-C and any error cancel all of them. Raises the error of a request, TimeoutError, QueueFullError.
        """
        pending = Pending[Any](options)
        pending.observer = self.observer
        mailbox = ThreadMailbox(self._engine_thread.dispatcher)
        try:
            makes = self._watched(self._together(makes, options), mailbox, pending)
            return dict(self.iterate(makes, _N_AHEAD, pending, bar, mailbox))
        finally:
            self._engine_thread.end_list(pending)
            bar.close()

    def iterate(
        self,
        makes: Iterator[Make],
        n_ahead: int,
        pending: Pending[T],
        bar: Progress,
        mailbox: ThreadMailbox | None = None,
    ) -> Iterator[tuple[int, T | Exception]]:
        """Yields each result with its index, as requests finish. At most about ``n_ahead`` groups are without a result.

        Closing the iterator, Ctrl-C and any error cancel what is left.
        """
        mailbox = mailbox or ThreadMailbox(self._engine_thread.dispatcher)
        options = pending.options
        pending.observer = self.observer
        try:
            exhausted = False
            while True:
                try:
                    while not exhausted and len(pending.groups) < n_ahead:
                        self._engine_thread.loop.inbox.single_caller = single_caller()
                        if not self._make_next(makes, mailbox, pending):
                            exhausted = True
                            break
                        if pending.unsubmitted:
                            for request in self._entering(pending.unsubmitted, options.block):
                                self._queue.enter(request, options.deadline)
                        if pending.ready:
                            break
                    while pending.ready:
                        yield pending.ready.popleft()
                    if not pending.groups:
                        if exhausted:
                            return
                        continue
                    item = self._next(mailbox, pending)
                except ExpiredError as expired:
                    self._stop(pending, expired)
                    continue
                index, result, failed = pending.read(item)
                self.cancel(failed)
                del pending.groups[index]
                bar.update()
                yield index, result
        finally:
            self._end(pending)

    def _next(self, mailbox: ThreadMailbox, pending: Pending[T]) -> Any:
        if pending.timed_out:  # what is cancelled arrives within a step
            return mailbox.get()
        try:
            return mailbox.get(timeout=left_s(pending.options.deadline))
        except Empty:
            raise pending.options.expired() from None

    # ---- asyncio
    async def asubmit(self, *requests: Request, block: bool = True) -> None:
        """``submit`` for asyncio; cancelling the task cancels the requests."""
        try:
            self._engine_thread.loop.inbox.single_caller = False
            for request in self._entering(deque(requests), block):
                await self._queue.aenter(request)
        except BaseException:
            self.cancel(requests)
            raise

    async def acollect(self, makes: Iterator[Make], options: CallOptions) -> dict[int, Any]:
        """``collect`` for asyncio; cancelling the task cancels the requests."""
        import asyncio

        mailbox = AsyncMailbox(asyncio.get_running_loop(), self._engine_thread.dispatcher)
        pending = Pending[Any](options)
        pending.observer = self.observer
        results: dict[int, Any] = {}
        exhausted = False
        try:
            makes = self._watched(self._together(makes, options), mailbox, pending)
            while True:
                try:
                    while not exhausted and len(pending.groups) < _N_AHEAD:
                        self._engine_thread.loop.inbox.single_caller = False
                        if not self._make_next(makes, mailbox, pending):
                            exhausted = True
                            break
                        if pending.unsubmitted:
                            for request in self._entering(pending.unsubmitted, options.block):
                                await _in_time(partial(self._queue.aenter, request), options)
                    if not pending.groups:
                        return results
                    item = await (mailbox.get() if pending.timed_out else _in_time(mailbox.get, options))
                    index, results[index], failed = pending.read(item)
                    self.cancel(failed)
                    del pending.groups[index]
                except ExpiredError as expired:
                    self._stop(pending, expired)
        finally:
            self._end(pending)

    async def aiterate(
        self, makes: AsyncIterator[Make], n_ahead: int, pending: Pending[T]
    ) -> AsyncGenerator[tuple[int, T | Exception], None]:
        """``iterate`` for asyncio; results arrive also while ``makes`` waits. Closing the iterator cancels the rest."""
        import asyncio

        mailbox = AsyncMailbox(asyncio.get_running_loop(), self._engine_thread.dispatcher)
        pending.observer = self.observer
        room = asyncio.Semaphore(n_ahead)
        submitting = asyncio.ensure_future(self._submit_all(makes, mailbox, room, pending))
        submitting.add_done_callback(mailbox.receive)  # wakes the reader below
        try:
            while pending.groups or not submitting.done():
                item = await _in_time(mailbox.get, pending.options)
                if item is submitting:
                    submitting.result()  # raises what the submission raised
                    continue
                if isinstance(item[1], Exception):
                    index, result = item
                else:
                    index, result, failed = pending.read(item)
                    self.cancel(failed)
                    del pending.groups[index]
                room.release()
                yield index, result
        finally:
            submitting.cancel()
            await asyncio.wait([submitting])
            self._end(pending)

    async def _submit_all(
        self, makes: AsyncIterator[Make], mailbox: AsyncMailbox, room: asyncio.Semaphore, pending: Pending[T]
    ) -> None:
        """Submits what ``makes`` yields, while there is room."""
        while True:
            await room.acquire()
            make = await anext(makes, None)
            if make is None:
                return
            pending.add(make(mailbox))
            mailbox.requests = pending.requests
            self._engine_thread.loop.inbox.single_caller = False
            for request in self._entering(pending.unsubmitted, pending.options.block):
                await self._queue.aenter(request)
            while pending.ready:
                mailbox.receive(pending.ready.popleft())


async def _in_time(wait: Callable[[], Awaitable[T]], options: CallOptions) -> T:
    """The result of ``wait``, or ExpiredError."""
    if options.deadline is None:
        return await wait()
    import asyncio

    try:
        # Made where it is awaited: Ctrl-C may come between two lines, and a coroutine that is never awaited warns.
        return await asyncio.wait_for(wait(), left_s(options.deadline))
    except asyncio.TimeoutError:
        raise options.expired() from None
