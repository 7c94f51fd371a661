"""From sampled tokens to the callers that wait for them. Open this file when a result comes wrong, late or twice.

The rule of this file: nobody is woken while the engine thread holds the interpreter's lock. A sink turns the tokens of
a request into what its caller asked for, a completion or deltas, and puts that into a mailbox. The mailbox tells the
dispatcher, which notes who waits. The next launch runs native code without the lock and wakes them there: one byte into
the pipe of each event loop, and the first waiting thread. Each thread wakes the next one when it waits again.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from queue import Empty
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from llamapipe._engine.request import Request
from llamapipe._engine.scoring import ContinuationTargets, PromptTargets, TokenScore
from llamapipe.errors import EngineClosedError
from llamapipe.native.load import native
from llamapipe.results import (
    ChatDelta,
    ChatFinishReason,
    Choice,
    Completion,
    Delta,
    FinishReason,
    Timings,
    Token,
    TokenLogprob,
    TopLogprob,
)
from llamapipe.text import TextStream

if TYPE_CHECKING:
    import asyncio

    from llamapipe.chat.parser import ChatParser


class Failure:
    """An exception on its way to the caller."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


Piece = Callable[[int], bytes]  # a token's bytes


def token_logprob(request: Request, token: int, piece: Piece) -> TokenLogprob:
    """The log-probability of a request's next token. Each token is asked for once."""
    logprob, top = request.logprobs.pop(0)
    return TokenLogprob(token, logprob, _top(top, piece), piece(token))


def prompt_token_logprobs(
    prompt: Sequence[int], scores: Sequence[TokenScore], piece: Piece
) -> list[TokenLogprob]:
    """The log-probability of each token of a prompt except the first."""
    return [
        TokenLogprob(token, score.logprob, _top(score.top, piece), piece(token))
        for token, score in zip(prompt[1:], scores, strict=False)  # a cancelled request may have fewer
    ]


def _top(top: Sequence[tuple[int, float]], piece: Piece) -> tuple[TopLogprob, ...]:
    return tuple(TopLogprob(token, logprob, piece(token)) for token, logprob in top)


class Sink:
    """Receives a request's tokens on the engine thread; subclasses say what goes into the mailbox, and when."""

    __slots__ = ()

    def token(self, request: Request, token: int) -> bool:
        """Takes a generated token; True when it completed a stop string."""
        raise NotImplementedError

    def finish(self, request: Request) -> None:
        """The request ended: ``finish_reason`` or ``error`` says how."""
        raise NotImplementedError

    def restart_text(self) -> None:
        """Forgets half characters and held text: the sequence was changed."""


class TextSink(Sink):
    """A sink that gives text with each token."""

    __slots__ = ("_piece", "_stops", "_text", "mailbox")

    def __init__(self, mailbox: Mailbox, piece: Piece, stops: tuple[str, ...]) -> None:
        self.mailbox = mailbox
        self._piece = piece
        self._stops = stops
        self._text = TextStream(stops)

    def restart_text(self) -> None:
        """Forgets half characters and held text: the sequence was changed."""
        self._text = TextStream(self._stops)


class Choices:
    """The choices of one prompt, which their sinks fill in. The last one puts ``(index, Completion)`` into the mailbox.

    If a choice fails, ``(index, Failure)`` is put there once, and no completion. ``first_at``: when a
    choice had its first token.
    """

    __slots__ = (
        "_choices",
        "_failed",
        "_index",
        "_n_accepted",
        "_n_cached",
        "_n_drafted",
        "_n_left",
        "_prompt_targets",
        "_queue_s",
        "_started_at",
        "first_at",
        "mailbox",
    )

    def __init__(
        self, mailbox: Mailbox, index: int, n: int = 1, prompt_targets: PromptTargets | None = None
    ) -> None:
        self.mailbox = mailbox
        self._index = index
        self._prompt_targets = prompt_targets  # where the prompt's log-probabilities are wanted
        self._started_at = perf_counter()
        self._choices: list[Choice | None] = [None] * n
        self._n_left = n
        self._n_cached: int | None = None
        self._n_drafted = self._n_accepted = 0
        self.first_at: float | None = None
        self._queue_s: float | None = None
        self._failed = False

    def note_first_token(self, request: Request) -> None:
        """The first of the choices to have a token has it."""
        self.first_at = perf_counter()
        left_queue_at = request.left_queue_at
        self._queue_s = None if left_queue_at is None else max(left_queue_at - self._started_at, 0.0)

    def fail(self, error: BaseException) -> None:
        """A choice failed."""
        if not self._failed:
            self._failed = True
            self.mailbox.put((self._index, Failure(error)))

    def add(self, choice: Choice, request: Request, piece: Piece) -> None:
        """A choice is complete."""
        if self._choices[choice.index] is not None:  # after a defect a request may be finished twice
            return
        self._choices[choice.index] = choice
        if self._n_cached is None or request.n_cached < self._n_cached:
            self._n_cached = request.n_cached  # the choice that computed the prompt for the others counts
        self._n_drafted += request.n_drafted
        self._n_accepted += request.n_accepted
        self._n_left -= 1
        if self._n_left or self._failed:
            return
        first_s = None if self.first_at is None else self.first_at - self._started_at
        timings = Timings(first_s, perf_counter() - self._started_at, self._queue_s)
        prompt = None
        if self._prompt_targets is not None:
            ids = request.full_sequence[: request.n_prompt]
            prompt = prompt_token_logprobs(ids, self._prompt_targets.scores, piece)
        self.mailbox.put(
            (
                self._index,
                Completion(
                    tuple(self._choices),  # type: ignore[arg-type]  # none is missing
                    request.n_prompt,
                    self._n_cached,
                    timings,
                    prompt,
                    self._n_drafted,
                    self._n_accepted,
                ),
            )
        )


class CompletionSink(Sink):
    """Collects one choice of a prompt and hands it to ``choices``, which all choices of that prompt share."""

    __slots__ = ("_choices", "_index", "_logprobs", "_parts", "_piece", "_seed", "_text")

    def __init__(
        self, choices: Choices, piece: Piece, stops: tuple[str, ...], seed: int, index: int = 0
    ) -> None:
        self._choices = choices
        self._piece = piece
        self._seed = seed
        self._index = index
        self._text = TextStream(stops) if stops else None  # without stop strings the text is made at the end
        self._parts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def token(self, request: Request, token: int) -> bool:
        """Searches for stop strings, if there are any."""
        if self._choices.first_at is None:
            self._choices.note_first_token(request)
        if request.wants_logprobs:
            self._logprobs.append(token_logprob(request, token, self._piece))
        text = self._text
        if text is None:
            return False
        self._parts.append(text.push(self._piece(token)))
        return text.stopped

    def finish(self, request: Request) -> None:
        """Hands over the choice, or the error."""
        if request.error is not None:
            self._choices.fail(request.error)
            return
        tokens = request.full_sequence[request.n_prompt :]
        matched = None
        if self._text is None:
            text = b"".join(map(self._piece, tokens)).decode("utf-8", "replace")
        else:
            text = "".join(self._parts) + self._text.finish()
            matched = self._text.matched
        reason: FinishReason = request.finish_reason  # type: ignore[assignment]
        logprobs = self._logprobs if request.wants_logprobs else None
        if logprobs is not None and len(logprobs) < len(tokens):  # cancelled before its last tokens came here
            left = tokens[len(logprobs) :][: len(request.logprobs)]
            logprobs += [token_logprob(request, token, self._piece) for token in left]
        ended_by = request.stop_token
        choice = Choice(
            self._index,
            text,
            tokens,
            reason,
            self._seed,
            logprobs,
            matched,
            ended_by,
            token_logprob(request, ended_by, self._piece)
            if request.wants_logprobs and ended_by is not None
            else None,
        )
        self._choices.add(choice, request, self._piece)


class ScoreSink(Sink):
    """Puts ``(index, the scores of each continuation)`` into the mailbox, or ``(index, Failure)``."""

    __slots__ = ("_index", "mailbox")

    def __init__(self, mailbox: Mailbox, index: int) -> None:
        self.mailbox = mailbox
        self._index = index

    def token(self, request: Request, token: int) -> bool:
        """Nothing is generated."""
        raise AssertionError("a request without tokens has generated one")

    def finish(self, request: Request) -> None:
        """Hands the scores over."""
        if request.error is not None:
            self.mailbox.put((self._index, Failure(request.error)))
        elif request.finish_reason == "cancelled":  # by its caller, or because the engine was closed
            self.mailbox.put(
                (self._index, Failure(EngineClosedError("the engine was closed before this was scored")))
            )
        else:
            assert isinstance(request.logprob_targets, ContinuationTargets)
            self.mailbox.put((self._index, request.logprob_targets.scores))


class DeltaSink(TextSink):
    """Puts a Delta into the mailbox for every token, the last with the finish reason."""

    __slots__ = ("_last",)

    def __init__(self, mailbox: Mailbox, piece: Piece, stops: tuple[str, ...]) -> None:
        super().__init__(mailbox, piece, stops)
        self._last: tuple[str, tuple[int, ...], tuple[TokenLogprob, ...] | None] = ("", (), None)

    def token(self, request: Request, token: int) -> bool:
        """Hands text and token over, or keeps them for ``finish`` when it follows at once."""
        text = self._text.push(self._piece(token))
        stopped = self._text.stopped
        logprobs = (token_logprob(request, token, self._piece),) if request.wants_logprobs else None
        if stopped or request.finish_reason is not None:
            if self._last[1]:  # after a right guess the last step has several tokens
                self.mailbox.put(Delta(*self._last, None))
            self._last = (text, (token,), logprobs)
        else:
            self.mailbox.put(Delta(text, (token,), logprobs, None))
        return stopped

    def finish(self, request: Request) -> None:
        """Hands over the last delta, or the error."""
        if request.error is not None:
            self.mailbox.put(Failure(request.error))
            return
        text, tokens, logprobs = self._last
        if request.wants_logprobs and logprobs is None:
            logprobs = ()
        reason: FinishReason = request.finish_reason  # type: ignore[assignment]
        text += self._text.finish()
        self.mailbox.put(Delta(text, tokens, logprobs, reason, self._text.matched))


class TokenSink(TextSink):
    """Puts a Token into the mailbox for every token; None when there is none to give for a ``next``."""

    __slots__ = ("_last",)

    def __init__(self, mailbox: Mailbox, piece: Piece, stops: tuple[str, ...]) -> None:
        super().__init__(mailbox, piece, stops)
        self._last: Token | None = None

    def continue_character(self, generated: bytes) -> None:
        """The text before ended with these bytes, of which the last may be half a character."""
        self._text.push_shown(generated)

    def fork(self, mailbox: Mailbox, keeps_text: bool) -> TokenSink:
        """Another sink of this kind. ``keeps_text``: it begins with the half character and the held text of this one.

        Not while the engine thread gives this one a token.
        """
        sink = TokenSink(mailbox, self._piece, self._stops)
        if keeps_text:
            sink._text = self._text.copy()
        return sink

    def token(self, request: Request, token: int) -> bool:
        """Hands the token over, or keeps it for ``finish`` when it follows at once: the end is known by then."""
        piece = self._piece(token)
        given = Token(token, piece, self._text.push(piece))
        if request.wants_logprobs:
            note = token_logprob(request, token, self._piece)
            given = given._replace(logprob=note.logprob, top=note.top)
        stopped = self._text.stopped
        if stopped or request.finish_reason is not None:
            self._last = given
        else:
            self.mailbox.put(given)
        return stopped

    def finish(self, request: Request) -> None:
        """Answers the ``next`` that the end came with; its caller sees the finish reason on the request."""
        if request.error is not None:
            self.mailbox.put(Failure(request.error))
            return
        last, self._last = self._last, None
        if last is not None:
            last = last._replace(text=last.text + self._text.finish())
        self.mailbox.put(last)


# Wait in slices of one second: Ctrl-C may have interrupted the thread that should wake us, or have arrived just before
# we blocked, in which case it does not interrupt the wait.
_RECHECK_S = 1.0


class Mailbox(Protocol):
    """Accepts results on the engine thread."""

    def put(self, item: object) -> None:
        """Adds an item. Never blocks."""


class ThreadMailbox:
    """A mailbox that one thread at a time reads from.

    ``waiter``: made when a reader first has to wait, because most requests of a list never do.
    """

    def __init__(self, dispatcher: ResultDispatcher) -> None:
        self._dispatcher = dispatcher
        self._items: deque[object] = deque()
        self.waiter: Waiter | None = None

    def put(self, item: object) -> None:
        """Adds an item; its reader is woken at the end of the step. Engine thread."""
        self._items.append(item)
        self._dispatcher.add_thread(self)

    def get(self, deadline: float | None = None) -> Any:
        """Waits for the next item; signals interrupt it. Raises queue.Empty after ``deadline`` (``perf_counter``)."""
        items, dispatcher = self._items, self._dispatcher
        while True:
            if items:  # checked first: the exception would cost more than the token
                try:
                    return items.popleft()
                except IndexError:  # another reader, by mistake, was quicker
                    pass
            left_s = _RECHECK_S
            if deadline is not None:
                left_s = min(deadline - perf_counter(), left_s)
                if left_s <= 0:
                    raise Empty
            if self.waiter is None:
                self.waiter = (
                    dispatcher.waiter()
                )  # an item that arrived before this woke no thread: look again
            else:
                dispatcher.wait(self.waiter, left_s)


class AsyncMailbox:
    """A mailbox that one asyncio task reads from. Made on its loop's thread.

    ``requests``: the requests that are answered here; they are cancelled if the loop turns out to be closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, dispatcher: ResultDispatcher) -> None:
        self.loop = loop
        self.requests: list[Request] = []
        self._dispatcher = dispatcher
        self._items: deque[object] = deque()
        self._waiter: asyncio.Future[None] | None = None
        dispatcher.attach(loop)

    def put(self, item: object) -> None:
        """Adds an item; its loop gets it at the end of the step. Engine thread."""
        self._dispatcher.add(self, item)

    def receive(self, item: object) -> None:
        """Accepts an item. The loop's thread."""
        self._items.append(item)
        waiter = self._waiter
        if waiter is not None and not waiter.done():  # done: cancelled, or woken already
            try:
                waiter.set_result(None)
            except Exception:  # a signal handler has cancelled it between the two lines
                if not waiter.done():
                    raise

    async def get(self, deadline: float | None = None) -> Any:
        """Waits for the next item. Raises queue.Empty after ``deadline`` (``perf_counter``)."""
        items = self._items
        while not items:
            self._waiter = waiter = self.loop.create_future()
            if deadline is None:
                await waiter
            elif (left_s := deadline - perf_counter()) > 0:
                timer = self.loop.call_later(left_s, wake_task, waiter)
                try:
                    await waiter
                finally:
                    timer.cancel()
            else:
                raise Empty
        return items.popleft()


def running_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this task."""
    import asyncio

    return asyncio.get_running_loop()


def wake_task(waiter: asyncio.Future[None]) -> None:
    """Ends a task's wait for a future, unless it has ended. The loop's thread."""
    if not waiter.done():
        waiter.set_result(None)


class ResultDispatcher:
    """The callers of one engine that wait for results. Methods are for the engine thread, unless they say otherwise.

    A launch writes a byte to each noted event loop's pipe and wakes the first waiting thread. A thread that waits again
    wakes the next one; if one takes long to return, those that are left are woken together.

    ``at_launch``: ``wakes`` was given to an executor whose launches compute. Otherwise there is nothing to wait for:
    ``flush`` wakes the first thread, and each woken thread wakes the next one before its own work.

    ``pending``: something was added since the last ``flush``.
    """

    def __init__(self, at_launch: bool = False) -> None:
        self.pending = False
        self._at_launch = at_launch
        self._wakers: dict[asyncio.AbstractEventLoop, LoopWaker[deque[tuple[AsyncMailbox, object]]]] = {}
        self._attached = False  # a loop was attached since closed ones were removed
        self._closed = False
        self._loops: dict[asyncio.AbstractEventLoop, deque[tuple[AsyncMailbox, object]]] = {}
        self._threads: list[ThreadMailbox] = []
        self._wake_queue = WakeQueue()
        self.waiter = self._wake_queue.waiter  # makes a new object for a thread to wait on; any thread
        self.wakes = LaunchWakeList(self._wake_queue)

    def add(self, mailbox: AsyncMailbox, item: object) -> None:
        """Notes an item until ``flush``."""
        self.pending = True
        self._loops.setdefault(mailbox.loop, deque()).append((mailbox, item))

    def add_thread(self, mailbox: ThreadMailbox) -> None:
        """Notes, until ``flush``, that a mailbox has an item."""
        self.pending = True
        self._threads.append(mailbox)

    def flush(self, together: bool = False) -> list[Request]:
        """Wakes the noted callers. ``together``: all of them now, as no launch follows soon.

        Returns the requests of closed event loops: nothing can read their results any more.
        """
        self.pending = False
        waiters: list[Waiter] = []
        if self._threads:
            waiters = [mailbox.waiter for mailbox in self._threads if mailbox.waiter is not None]
            self._threads.clear()
        by_list = self._at_launch or together
        if waiters and by_list:
            self.wakes.add(waiters)  # first: an error with an event loop must not lose them
        orphans = self._hand_over() if self._loops else []
        if self._wakers and (self._attached or orphans or together):
            self._remove_closed()
        if waiters and not by_list:
            self._wake_queue.add(waiters)
            self._wake_queue.next()
        if together:
            self.wake()
        return orphans

    def wake(self) -> None:
        """Wakes all callers that the next launch was to wake, because it will not happen soon."""
        if self._wakers:
            files = self.wakes.files
            for waker in list(self._wakers.values()):
                if waker.waiting and waker.fd not in files:  # an interruption lost its byte
                    waker.ring()
        self.wakes.now()

    def _hand_over(self) -> list[Request]:
        """Gives event loops their items. Returns the requests of closed loops."""
        loops, self._loops = self._loops, {}
        orphans: list[Request] = []
        for loop, items in loops.items():
            waker = self._wakers.get(loop)
            try:
                if waker is None:
                    loop.call_soon_threadsafe(receive, items)
                    continue
                if not loop.is_closed():
                    if waker.put(items):
                        if self._at_launch:
                            self.wakes.add_file(waker.fd)
                        else:
                            waker.ring()
                    continue
            except RuntimeError:  # the loop is closed
                pass
            for mailbox, _ in items:
                orphans += mailbox.requests
        return orphans

    def _remove_closed(self) -> None:
        """Closes the wakers of closed event loops. One that is dropped without ``close`` lives as long as the engine.

        Called when a loop was attached, when a closed one was met, and when there is nothing to do: not once a step.
        """
        self._attached = False
        for loop in [loop for loop in list(self._wakers) if loop.is_closed()]:
            waker = self._wakers.pop(loop)
            self.wakes.remove_file(waker.fd)  # its number may soon be another file's
            waker.close()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Gives an event loop a waker, if it can watch files. The loop's thread."""
        if loop not in self._wakers and not self._closed:
            with suppress(
                NotImplementedError, OSError, RuntimeError
            ):  # then it is woken by call_soon_threadsafe
                self._wakers[loop] = LoopWaker(loop, receive)
                self._attached = True
            if self._closed and (waker := self._wakers.pop(loop, None)) is not None:  # closed meanwhile
                waker.dismiss()

    def close(self) -> None:
        """Wakes all callers. No step follows."""
        self.flush(together=True)
        self._closed = True
        while self._wakers:
            self._wakers.popitem()[1].dismiss()

    def wait(self, waiter: Waiter, timeout: float) -> None:
        """Wakes the next thread, then sleeps until woken, for ``timeout`` seconds, or until a signal. That thread."""
        if self._wake_queue.wait(waiter, timeout) and not self._at_launch:
            self._wake_queue.next()


def receive(items: deque[tuple[AsyncMailbox, object]]) -> None:
    """Gives items to their mailboxes, on the loop's thread. After Ctrl-C, another call continues with the rest."""
    while items:
        mailbox, item = items.popleft()
        mailbox.receive(item)


Waiter = Any  # one thread at a time waits on it; a wake without a waiting thread is kept for the next wait


_PATIENCE_S = 200e-6  # a reader's work for a token and its wake-up take 10 to 30 us


class WakeQueue:
    """Waiting threads that are woken one after another: each wakes the next one when it waits again. Any thread.

    ``handle``: for native code. Raises MemoryError, here and in ``waiter``.
    """

    def __init__(self) -> None:
        self._native = module = native()
        self.handle = self._own(
            module.lib.lp_wake_queue_new(int(_PATIENCE_S * 1e9)), module.lib.lp_wake_queue_free
        )

    def waiter(self) -> Waiter:
        """A new object for a thread to wait on."""
        lib = self._native.lib
        return self._own(lib.lp_waiter_new(), lib.lp_waiter_free)

    def _own(self, handle: Any, free: Any) -> Any:
        if handle == self._native.ffi.NULL:
            raise MemoryError("no memory is left for a thread to wait")
        return self._native.ffi.gc(handle, free)

    def wait(self, waiter: Waiter, timeout: float) -> bool:
        """Wakes the next thread and sleeps. False after ``timeout`` seconds or a signal."""
        woken: bool = self._native.lib.lp_waiter_wait(waiter, self.handle, timeout)
        return woken

    def asleep(self, waiter: Waiter) -> bool:
        """Whether a thread sleeps on it."""
        sleeps: bool = self._native.lib.lp_waiter_asleep(waiter)
        return sleeps

    def add(self, waiters: Sequence[Waiter]) -> None:
        """Appends waiters to the queue, without waking them."""
        if self._native.lib.lp_wake_queue_add(self.handle, waiters, len(waiters)) < 0:
            raise MemoryError("no memory is left for waking threads")

    def next(self) -> None:
        """Wakes the next sleeping thread; all of them if the last one took long to wait again."""
        self._native.lib.lp_wake_queue_yield_turn(self.handle)

    def wake_all_if_stalled(self) -> None:
        """Wakes all threads that are left if the last one took long. CPU launches call this while they compute."""
        self._native.lib.lp_wake_queue_wake_all_if_stalled(self.handle)

    def all(self) -> None:
        """Wakes all threads that are left."""
        self._native.lib.lp_wake_queue_wake_all(self.handle)


class LaunchWakeList:
    """Threads and event loops to wake at the next launch.

    Kept in shared memory that native code reads, because a cffi call for each entry would release the GIL each time.

    For the thread that launches.
    """

    def __init__(self, wake_queue: WakeQueue) -> None:
        self._native = module = native()
        self._wake_queue = wake_queue
        self._fds = module.ffi.new("int[]", 4)
        self._waiters = module.ffi.new("lp_waiter *[]", 32)
        self._kept: list[Waiter] = []  # the array only has their addresses
        self.handle = module.ffi.new("lp_wake_list *")
        self.handle.queue = wake_queue.handle
        self.handle.fds, self.handle.waiters = self._fds, self._waiters

    @property
    def files(self) -> list[int]:
        """The pipes that will get a byte."""
        return [self._fds[i] for i in range(self.handle.n_fds)]

    def add_file(self, fd: int) -> None:
        """Adds a non-blocking pipe."""
        handle = self.handle
        n = handle.n_fds
        if n == len(self._fds):
            more = self._native.ffi.new("int[]", 2 * n)
            more[0:n] = self._fds
            self._fds = handle.fds = more
        self._fds[n] = fd
        handle.n_fds = n + 1

    def remove_file(self, fd: int) -> None:
        """Removes a pipe."""
        kept = [other for other in self.files if other != fd]
        self._fds[0 : len(kept)] = kept
        self.handle.n_fds = len(kept)

    def add(self, waiters: Sequence[Waiter]) -> None:
        """Adds waiters, after those added before."""
        if self.handle.n_waiters == 0:  # a launch has taken the last ones
            self._kept.clear()
        self._kept += waiters
        n = len(self._kept)
        if n > len(self._waiters):
            self._waiters = self.handle.waiters = self._native.ffi.new("lp_waiter *[]", 2 * n)
        self._waiters[0:n] = self._kept
        self.handle.n_waiters = n

    def begin(self) -> None:
        """Does what a launch does first: writes the bytes and wakes the first thread."""
        self._native.lib.lp_wake_list_begin(self.handle)

    def now(self) -> None:
        """Wakes all of them now, and the threads left in the queue."""
        self._native.lib.lp_wake_list_wake_all(self.handle)


T = TypeVar("T")
_MOST_RINGS = 64  # read at once; more would take memory from another allocator, and there are rarely two


class LoopWaker(Generic[T]):
    """The items that wait for one loop, and the pipe that the loop watches.

    ``call_soon_threadsafe`` releases the GIL to write its byte. The loop's thread wakes at once and holds the GIL while
    it has work, and meanwhile the next step is not computed.

    Made on the loop's thread. Raises NotImplementedError where the loop cannot watch files, OSError when there are no
    more, RuntimeError when the loop is closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[T], object]) -> None:
        self._loop = loop
        self._take = take
        self._items: deque[T] = deque()
        self._rung = False  # a ring is due, or was not answered yet
        self._read_end, self.fd = os.pipe()
        self._open = True
        try:
            os.set_blocking(self._read_end, False)
            os.set_blocking(self.fd, False)
            loop.add_reader(self._read_end, self._answer)
        except BaseException:
            with suppress(Exception):  # Ctrl-C may have come when it was being watched already
                loop.remove_reader(self._read_end)
            self.close()
            raise

    @property
    def waiting(self) -> bool:
        """Whether items wait that the loop has not taken. Any thread."""
        return bool(self._items)

    def put(self, item: T) -> bool:
        """Adds an item. True if the loop's pipe must get a byte, from ``ring`` or through ``fd``. Engine thread."""
        self._items.append(item)
        if self._rung:  # checked after the append: the answer that resets it takes this item, too
            return False
        self._rung = True
        return True

    def ring(self) -> None:
        """Wakes the loop. Engine thread; also the loop's own thread, if Ctrl-C interrupted it."""
        with suppress(BlockingIOError):  # full: it has been woken often enough
            os.write(self.fd, b"\0")

    def _answer(self) -> None:
        """Takes all items. The loop's thread."""
        items, take = self._items, self._take
        try:
            try:
                os.read(self._read_end, _MOST_RINGS)
            except BlockingIOError:
                pass
            finally:  # after the read, which would take the next byte, too; before the items: one may arrive now
                self._rung = False
            while items:
                take(items[0])
                items.popleft()
        except BaseException:  # Ctrl-C: if the loop continues, it gets the rest, and the interrupted item
            self.ring()
            raise

    def dismiss(self) -> None:
        """Tells the loop to take the rest and to stop watching the pipe: no item follows. Any thread."""
        try:
            self._loop.call_soon_threadsafe(self._leave)
        except RuntimeError:  # the loop is closed
            self.close()

    def _leave(self) -> None:
        self._answer()
        self._loop.remove_reader(self._read_end)
        self.close()

    def close(self) -> None:
        """Closes the pipe, which no loop may watch any more. A second call does nothing."""
        if self._open:
            self._open = False
            os.close(self._read_end)
            os.close(self.fd)

    def __del__(self) -> None:
        # A loop that ended before it could leave: a watched pipe is not dropped.
        if getattr(self, "_open", False):
            self.close()


class DeltaParser:
    """Turns the deltas of one request into those of a chat; tokens without visible text are kept for the next."""

    def __init__(self, parser: ChatParser | None, n_prompt_tokens: int) -> None:
        self.n_prompt_tokens = n_prompt_tokens
        self._parser = parser
        self._called = False
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def __repr__(self) -> str:
        return f"<DeltaParser n_prompt_tokens={self.n_prompt_tokens}>"

    def read(self, delta: Delta) -> ChatDelta | None:
        """The next part of the answer; None if there is nothing to show yet."""
        reason: ChatFinishReason | None = delta.finish_reason
        parser = self._parser
        if parser is None:
            if not delta.text and reason is None and delta.logprobs is None:
                self._token_ids += delta.token_ids
                return None
            return self._with_tokens(
                ChatDelta(delta.text, "", (), delta.token_ids, delta.logprobs, reason, delta.stop_string)
            )
        piece = parser.feed(delta.text)
        content, reasoning, tool_calls = piece.content, piece.reasoning, piece.tool_calls
        if reason is not None:
            last = parser.finish(cut_off=reason != "stop")
            content, reasoning = content + last.content, reasoning + last.reasoning
            tool_calls += last.tool_calls
        self._called = self._called or bool(tool_calls)
        if reason == "stop" and self._called and not parser.ended_in_call:
            reason = "tool_calls"
        if not (content or reasoning or tool_calls) and reason is None:
            self._token_ids += delta.token_ids
            self._logprobs += delta.logprobs or ()
            return None
        return self._with_tokens(
            ChatDelta(
                content, reasoning, tool_calls, delta.token_ids, delta.logprobs, reason, delta.stop_string
            )
        )

    def _with_tokens(self, delta: ChatDelta) -> ChatDelta:
        """The delta with the tokens that were kept before it."""
        if not self._token_ids:
            return delta
        ids, logprobs = (*self._token_ids, *delta.token_ids), delta.logprobs
        if logprobs is not None:
            logprobs = (*self._logprobs, *logprobs)
        self._token_ids.clear()
        self._logprobs.clear()
        return delta._replace(token_ids=ids, logprobs=logprobs)


class Progress(Protocol):
    """Counts finished prompts."""

    def update(self, n: int = 1) -> Any:
        """``n`` more prompts are finished."""

    def close(self) -> Any:
        """Ends the display."""


def progress_bar(total: int | None) -> Progress:
    """Tqdm's bar on a terminal, tqdm's or a widget in a notebook, and nothing elsewhere.

    ``total``: the number of prompts, None if it is not known. Raises ImportError if tqdm is missing.
    """
    try:
        with warnings.catch_warnings():  # a notebook without ipywidgets gets the bar made of text
            warnings.simplefilter("ignore")
            tqdm: Any = import_module("tqdm.auto").tqdm
    except ImportError:
        raise ImportError('progress=True needs tqdm: pip install "llamapipe[progress]"') from None
    bar: Progress = tqdm(total=total, unit="prompt", disable=not (sys.stderr.isatty() or _in_notebook()))
    return bar


def _in_notebook() -> bool:
    """Whether standard error goes to a Jupyter frontend."""
    return type(sys.stderr).__module__.split(".")[0] == "ipykernel"
