"""Defines the handles of running requests: streams, chat streams, generations and cached prefixes.

Open this file to change how a caller reads, changes or cancels a running request.

A stream computes ahead of its reader, by a bounded number of tokens. A generation computes one token for each ``next``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from queue import Empty
from time import perf_counter
from typing import Any, Generic, NamedTuple, SupportsIndex, TypeVar

from llamapipe._engine.calls.chat import CheckedChat
from llamapipe._engine.calls.prompts import CheckedPrompt
from llamapipe._engine.policy.core import Request, State
from llamapipe._engine.runtime.mailboxes import AsyncMailbox, Mailbox
from llamapipe._engine.runtime.sinks import Failure, TokenSink
from llamapipe._engine.runtime.snapshot import SnapshotFormat, pack
from llamapipe._engine.runtime.thread import EngineThread
from llamapipe.arguments import check_int, check_tokens
from llamapipe.chat.deltas import DeltaParser
from llamapipe.errors import InvalidRequestError
from llamapipe.locks import OneCall, OneTask
from llamapipe.native.not_copyable import NotCopyable
from llamapipe.results import ChatDelta, Delta, FinishReason, Token
from llamapipe.types import Observation
from llamapipe.work.long_work import running_loop, to_thread

_RUNNING = State.RUNNING  # a global for speed: it is read for each token
S = TypeVar("S", bound="StreamReader")
C = TypeVar("C")
BUFFER_TOKENS = 64  # tokens that a stream may be ahead of its reader before its sequence pauses


class PromptProgress(NamedTuple):
    """The progress of a request's prompt.

    - ``n_prompt_tokens``: length of the prompt. ``n_cached_tokens``: prompt tokens that came from the prefix cache.
    - ``n_done``: prompt tokens that are computed, including the cached ones.
    - ``seconds``: time since the request got a slot.
    """

    n_prompt_tokens: int
    n_cached_tokens: int
    n_done: int
    seconds: float


def submit_at_once(submit: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """In a task, submit a request without waiting for room. Outside of a task, its first delta submits it."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    with suppress(StopIteration):  # the coroutine never waits, so it ends in its first step
        submit().send(None)


class StreamReader(NotCopyable):
    """The base of both kinds of stream: the budget for further tokens, the end, cancellation."""

    engine: object = None  # kept alive by its streams
    observed: Observation | None = None
    _first_token_at: float | None = None

    def __init__(self, engine_thread: EngineThread, deadline: float | None) -> None:
        self._engine_thread = engine_thread
        self._deadline = deadline
        self._request: Request  # set by ``submit``
        self._done = True  # before ``submit`` there is nothing to cancel

    def __repr__(self) -> str:
        if not hasattr(self, "_request"):
            return f"<{type(self).__name__} not started>"
        return f"<{type(self).__name__} {'done' if self._done else 'open'} {self._request!r}>"

    @property
    def n_cached_tokens(self) -> int:
        """The number of prompt tokens that came from the prefix cache; 0 before the first delta."""
        request = getattr(self, "_request", None)
        return 0 if request is None else request.n_cached

    @property
    def n_drafted_tokens(self) -> int:
        """The number of guessed tokens computed so far."""
        request = getattr(self, "_request", None)
        return 0 if request is None else request.n_drafted

    @property
    def n_accepted_tokens(self) -> int:
        """The number of guessed tokens that were right so far."""
        request = getattr(self, "_request", None)
        return 0 if request is None else request.n_accepted

    @property
    def slot_at(self) -> float | None:
        """When the request got its first slot, by ``time.perf_counter``; None while it waits."""
        request = getattr(self, "_request", None)
        return None if request is None else request.left_queue_at

    @property
    def first_token_at(self) -> float | None:
        """When the first token was read, by ``time.perf_counter``; None until then."""
        return self._first_token_at

    @property
    def prompt_progress(self) -> PromptProgress | None:
        """The progress of the prompt; None while the request waits for its first slot."""
        request = getattr(self, "_request", None)
        if request is None or request.left_queue_at is None:
            return None
        n = request.n_prompt
        seconds = perf_counter() - request.left_queue_at
        return PromptProgress(n, request.n_cached, min(max(request.n_past, request.n_cached), n), seconds)

    def _read(self, item: Any) -> Delta:
        if isinstance(item, Failure):
            self._done = True
            self.notify_end(item.error)
            raise item.error
        delta: Delta = item
        if self._first_token_at is None and delta.token_ids:
            self._first_token_at = perf_counter()
        if delta.finish_reason is not None:
            self._done = True
            if self.observed is not None:
                self.notify_end()
        request = self._request
        request.token_budget += len(delta.token_ids)
        # A command to the engine thread for every token would be expensive, so tokens are granted by half a buffer.
        if (
            request.state is not _RUNNING
            and request.state in (State.PAUSED, State.WAITING)
            and request.token_budget - request.n_total >= BUFFER_TOKENS // 2
        ):
            self._engine_thread.resume(request)
        return delta

    def _timeout_error(self) -> TimeoutError:
        error = TimeoutError("the request did not finish within its timeout and was cancelled")
        self.notify_end(error)
        self.cancel()
        return error

    def notify_end(self, error: BaseException | None = None) -> None:
        """Notify the observer of the end, once, if there is an observer."""
        observed, self.observed = self.observed, None
        if observed is not None:
            observed.end(error)

    def cancel(self) -> None:
        """End the request within a step; then the stream ends. Any thread; a second call does nothing."""
        if not self._done:
            request = self._request
            if not request.cancelled and request.state is not State.FINISHED:
                self._engine_thread.cancel_soon(request)
        self._done = True  # set last: a caller that is interrupted earlier can cancel again
        self.notify_end()

    def __del__(self) -> None:
        # Dropped before its end: the rest can no longer be read. No lock is taken, so any thread may collect the
        # stream.
        if not getattr(self, "_done", True):
            observed, self.observed = self.observed, None
            if observed is not None:
                observed.drop()
            self.cancel()


class ChatReader(NotCopyable, Generic[S]):
    """The base of both kinds of chat stream: the stream below, its counters, cancellation."""

    def __init__(self, open_stream: Callable[[CheckedPrompt], S]) -> None:
        self.n_prompt_tokens = 0
        self._open_stream = open_stream
        self._stream: S | None = None
        self._parser: DeltaParser | None = None
        self._closed = False

    def _open(self, item: CheckedChat) -> None:
        self._parser = item.delta_parser()
        self.n_prompt_tokens = self._parser.n_prompt_tokens
        self._stream = self._open_stream(item.item)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._stream!r}>"

    @property
    def n_cached_tokens(self) -> int:
        """The number of prompt tokens that came from the prefix cache; 0 before the first part."""
        return 0 if self._stream is None else self._stream.n_cached_tokens

    @property
    def n_drafted_tokens(self) -> int:
        """The number of guessed tokens computed so far."""
        return 0 if self._stream is None else self._stream.n_drafted_tokens

    @property
    def n_accepted_tokens(self) -> int:
        """The number of guessed tokens that were right so far."""
        return 0 if self._stream is None else self._stream.n_accepted_tokens

    @property
    def slot_at(self) -> float | None:
        """When the request got its first slot, by ``time.perf_counter``; None while it waits."""
        return None if self._stream is None else self._stream.slot_at

    @property
    def first_token_at(self) -> float | None:
        """When the first token was read, by ``time.perf_counter``, even if its text is held back; None until then."""
        return None if self._stream is None else self._stream.first_token_at

    @property
    def prompt_progress(self) -> PromptProgress | None:
        """The progress of the prompt; None while the request waits for its first slot."""
        return None if self._stream is None else self._stream.prompt_progress

    def cancel(self) -> None:
        """End the request within a step; then the stream ends. A second call does nothing. Any thread."""
        self._closed = True
        if self._stream is not None:
            self._stream.cancel()


class SequenceHandle(NotCopyable):
    """The base of both kinds of generation: the tokens so far, trimming and lengthening, the end."""

    engine: object = None  # kept alive by its generations

    def __init__(
        self,
        engine_thread: EngineThread,
        request: Request,
        n_vocab: int,
        n_ctx: int,
        snapshot_format: Callable[[Any], SnapshotFormat],
    ) -> None:
        self._engine_thread = engine_thread
        self._request = request
        self._n_vocab = n_vocab
        self._n_ctx = n_ctx
        self._format = snapshot_format
        self._tokens = list(request.tokens)
        self._n_forks = self._n_dropped = 0
        self._changed = False  # trimmed or lengthened since the last token
        self._alone: OneCall | OneTask

    def __repr__(self) -> str:
        return f"<{type(self).__name__} n_tokens={self.n_tokens} {self.finish_reason or 'open'}>"

    def _has_next(self) -> bool:
        """Return whether the next token can be computed. Raises the error of a failed request, EngineClosedError."""
        if self._request.error is not None:
            raise self._request.error
        if self.finish_reason is not None:
            return False
        self._engine_thread.check_open()
        return True

    def _resume(self) -> None:
        """Let the engine compute one token."""
        self._changed = False
        self._request.token_budget = self._request.n_total + 1
        self._engine_thread.resume(self._request)

    def _read(self, item: Any) -> Token | None:
        if isinstance(item, Failure):
            raise item.error
        if item is None:
            return None
        self._tokens.append(item.id)
        self._drop_old_tokens()
        token: Token = item
        return token

    @property
    def n_tokens(self) -> int:
        """Length of the sequence, prompt and appended tokens included."""
        return len(self._tokens)

    @property
    def token_ids(self) -> list[int]:
        """A copy of the sequence: the prompt's tokens, then generated and appended ones."""
        return list(self._tokens)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the generation ended; None while ``next`` may return a token."""
        if self._request.cancelled:
            return "cancelled"
        return self._request.finish_reason  # type: ignore[return-value]

    def trim(self, n_keep: SupportsIndex) -> None:
        """Keep the first ``n_keep`` tokens. ``next`` then continues after them, even if the text had ended.

        ``max_tokens`` and stop strings count from here. Raises ValueError outside ``[1, n_tokens]``,
        InvalidRequestError when the generation was cancelled or failed, or would fill the context.
        """
        with self._alone:
            self._trim(check_int("n_keep", n_keep, 1, len(self._tokens)))

    def _trim(self, n: int) -> None:
        self._check_open()
        if n >= self._n_ctx:
            raise InvalidRequestError(
                f"{n} tokens leave no room for the next; n_ctx is {self._n_ctx} and one must stay free: "
                f"keep at most {self._n_ctx - 1}"
            )
        if n < len(self._tokens) or self.finish_reason is not None:
            del self._tokens[n:]
            if n <= self._request.n_kept:
                self._n_dropped = 0
            self._change(n, [])

    def append(self, tokens: Iterable[SupportsIndex]) -> None:
        """Add tokens at the end. ``next`` then continues after them, even if the text had ended.

        ``max_tokens`` and stop strings count from here. Raises TypeError or ValueError for bad token ids,
        InvalidRequestError if they do not fit in the context, or if the generation was cancelled or failed.
        """
        ids = check_tokens("tokens", tokens, self._n_vocab)
        with self._alone:
            self._append(ids)

    def _append(self, ids: list[int]) -> None:
        self._check_open()
        if len(self._tokens) + len(ids) >= self._n_ctx:
            raise InvalidRequestError(
                f"the sequence would have {len(self._tokens) + len(ids)} tokens; n_ctx is {self._n_ctx} and one must "
                "stay free: trim it, or raise n_ctx"
            )
        if ids:
            self._tokens += ids
            self._change(None, ids)

    def _fork_request(self, seed: int | None, mailbox: Mailbox) -> Request:
        parent = self._request
        sink = parent.sink
        assert isinstance(sink, TokenSink)
        self._n_forks += 1
        seed = _seed_of_fork(parent.spec.seed, self._n_forks) if seed is None else seed
        return parent.fork(seed, sink.fork(mailbox, keeps_text=not self._changed))

    def _start_fork(self, forked: SequenceHandle) -> None:
        forked._tokens = self._tokens.copy()
        forked._changed = self._changed
        forked._n_dropped = self._n_dropped
        forked.engine = self.engine
        self._engine_thread.fork(self._request, forked._request)

    def _pack(self) -> bytes:
        snapshot = self._engine_thread.snapshot(self._request)
        return pack(snapshot, self._format(self._request.spec.all_adapters))

    def cancel(self) -> None:
        """End the generation and free its slot; ``next`` then returns None without a step. Any thread."""
        request = self._request
        if not request.cancelled and request.state is not State.FINISHED:
            self._engine_thread.cancel_soon(request)

    def __del__(self) -> None:
        if hasattr(self, "_tokens"):  # next() can no longer be called: free the slot
            self.cancel()

    def _drop_old_tokens(self) -> None:
        """Drop the tokens that the engine has dropped because the context was full."""
        request = self._request
        n = len(request.dropped) - self._n_dropped
        if n:
            del self._tokens[request.n_kept : request.n_kept + n]
            self._n_dropped += n

    def _check_open(self) -> None:
        self._engine_thread.check_open()
        if self._request.cancelled or self._request.state is State.FINISHED:
            raise InvalidRequestError("the generation was cancelled; start another")

    def _change(self, n_keep: int | None, tokens: list[int]) -> None:
        request = self._request
        self._changed = True
        request.reopen()  # the engine thread leaves a waiting request alone; `finish_reason` changes immediately
        self._engine_thread.change(request, n_keep, tokens)


def _seed_of_fork(seed: int, index: int) -> int:
    """Return a seed for the fork with this number. Forks of forks must not draw the same tokens as other forks."""
    from hashlib import blake2b

    return int.from_bytes(blake2b(f"{seed} {index}".encode(), digest_size=8).digest(), "little")


# ---- asyncio: tools/unasync.py makes the calls for threads, in llamapipe/_sync, from what follows
class AsyncClosing(NotCopyable):
    """An iterator over the output of a request; closing the iterator cancels the request."""

    def cancel(self) -> None:
        """End the request within a step."""
        raise NotImplementedError

    def __aiter__(self: C) -> C:
        return self

    async def aclose(self) -> None:
        """Do the same as ``cancel``."""
        self.cancel()

    async def __aenter__(self: C) -> C:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class AsyncStream(StreamReader, AsyncClosing):
    """An asynchronous iterator over a request's deltas. Closing or dropping it cancels the request.

    Cancelling a task that waits for a delta also cancels the request. For one task at a time, in one event loop: a
    second task that asks for a delta while another task waits gets RuntimeError. A slow reader pauses only its own
    sequence. Iterating raises the request's error, or TimeoutError after its timeout.
    """

    def __init__(
        self,
        engine_thread: EngineThread,
        make: Callable[[], tuple[Request, AsyncMailbox]],
        submit: Callable[..., Awaitable[None]],
        deadline: float | None,
    ) -> None:
        super().__init__(engine_thread, deadline)
        self._make: Callable[[], tuple[Request, AsyncMailbox]] | None = make
        self._submit = submit
        self._alone = OneTask("stream")

    async def __anext__(self) -> Delta:
        with self._alone:
            return await self._next()

    async def _next(self) -> Delta:
        if self._make is not None:  # asyncio
            await self.submit()  # asyncio
        if self._done:
            raise StopAsyncIteration
        if self._engine_thread.forked:
            self._engine_thread.check_caller()
        deadline = self._deadline
        if deadline is not None:
            if self._request.state is State.FINISHED:
                deadline = None  # all remaining deltas are in the mailbox
            elif perf_counter() >= deadline:  # even if the mailbox has deltas
                raise self._timeout_error()
        try:
            item = await self._mailbox.get(deadline)
        except Empty:
            raise self._timeout_error() from None
        except BaseException as e:  # Ctrl-C or cancellation of the task during the wait
            self.notify_end(e)
            self.cancel()
            raise
        return self._read(item)

    async def submit(self) -> None:
        """Submit the request now instead of with the first ``__anext__``. Raises as ``Engine.agenerate`` does.

        A second call does nothing.
        """
        make, self._make = self._make, None
        if make is None:
            return
        if self._engine_thread.forked:
            self._engine_thread.check_caller()
        try:
            self._request, self._mailbox = make()
            self._done = False
            await self._submit(self._request, deadline=self._deadline)
        except BaseException as e:
            self.notify_end(e)
            self.cancel()
            raise

    def cancel(self) -> None:
        """End the request within a step; then the stream ends. A second call does nothing. Any thread."""
        self._make = None
        super().cancel()


class AsyncChatStream(ChatReader[AsyncStream], AsyncClosing):
    """An asynchronous iterator over the parts of an answer. Closing or dropping it cancels the request.

    ``n_prompt_tokens``: length of the prompt; 0 until the conversation is rendered. Tasks, slow readers and errors are
    handled as in ``AsyncStream``.
    """

    def __init__(
        self,
        item: CheckedChat | Callable[[], Awaitable[CheckedChat]],
        open_stream: Callable[[CheckedPrompt], AsyncStream],
    ) -> None:
        super().__init__(open_stream)
        self._alone = OneTask("stream")
        self._build = item if callable(item) else None
        if not callable(item):
            self._open(item)

    async def __anext__(self) -> ChatDelta:
        with self._alone:
            return await self._next()

    async def _next(self) -> ChatDelta:
        if self._build is not None:
            await self._render()
        if self._stream is None or self._parser is None:
            raise StopAsyncIteration
        while True:
            delta = self._parser.read(await self._stream.__anext__())
            if delta is not None:
                return delta

    async def submit(self) -> None:
        """Render the conversation and submit the request now instead of with the first ``__anext__``.

        Raises as ``Engine.achat`` does. A second call does nothing.
        """
        await self._render()
        if self._stream is not None:
            await self._stream.submit()

    async def _render(self) -> None:
        if self._build is not None and not self._closed:
            item = await self._build()
            if not self._closed:
                self._build = None
                self._open(item)


class AsyncGeneration(SequenceHandle, AsyncClosing):
    """A sequence to which each ``next`` adds one token; nothing is computed ahead of a call.

    For one task at a time, except ``cancel`` and ``aclose``: a call while another one runs raises RuntimeError. Between
    calls the sequence keeps its slot and its KV cells until another request needs them; the cells are then saved in
    host memory, or computed again later if there is no room. Close the generation, or use ``async with``.
    """

    def __init__(
        self,
        engine_thread: EngineThread,
        request: Request,
        mailbox: AsyncMailbox,
        n_vocab: int,
        n_ctx: int,
        layout: Callable[[Any], SnapshotFormat],
    ) -> None:
        super().__init__(engine_thread, request, n_vocab, n_ctx, layout)
        self._mailbox = mailbox
        self._mailbox.requests.append(request)  # asyncio
        self._alone = OneTask("generation")

    async def __anext__(self) -> Token:
        token = await self.next()
        if token is None:
            raise StopAsyncIteration
        return token

    async def next(self) -> Token | None:
        """Return the next token; None, without computing a step, when the generation is finished or cancelled.

        Raises the error of a failed request, EngineClosedError after ``fork()``. Ctrl-C, or cancelling the task,
        cancels the generation.
        """
        with self._alone:
            if not self._has_next():
                return None
            self._engine_thread.note_waiting_task()
            try:
                self._resume()
                item = await self._mailbox.get()
            except BaseException:  # otherwise a later call would get the token in flight
                self.cancel()
                raise
            return self._read(item)

    def fork(self, seed: SupportsIndex | None = None) -> AsyncGeneration:
        """Create an independent second generation of the same sequence, even if the text has ended.

        With a prefix cache, the fork reuses this generation's KV cells; without one it computes them again. The tokens
        so far count towards the fork's ``max_tokens``. The fork's sampler starts from the sequence so far, as after
        ``trim``. ``seed``: the seed of that sampler; the default is computed from this generation's seed and the number
        of its forks.

        Returns immediately; nothing is computed before ``next``. Close the fork, too. Raises InvalidRequestError if
        this generation was cancelled or failed, TypeError or ValueError for a bad seed.
        """
        sampler_seed = None if seed is None else check_int("seed", seed, 0, 2**64 - 1)
        with self._alone:
            self._check_open()
            mailbox = AsyncMailbox(running_loop(), self._engine_thread.dispatcher)
            child = self._fork_request(sampler_seed, mailbox)
            forked = AsyncGeneration(
                self._engine_thread, child, mailbox, self._n_vocab, self._n_ctx, self._format
            )
            self._start_fork(forked)
            return forked

    async def snapshot(self) -> bytes:
        """Return the sequence and its KV cells as bytes, for ``Engine.restore`` of any engine with the same model.

        The bytes include the cells and the last four saved states. A header has the format, a fingerprint of the model
        file, the types of keys and values, and a checksum; sampling parameters are not included. The checksum reveals
        damage but not forgery: restore only snapshots from sources that you trust.

        Waits for the running step. Raises InvalidRequestError if the generation was cancelled or failed, OSError if the
        model's file cannot be read.
        """
        with self._alone:
            self._check_open()
            return await to_thread(self._pack)


# ---- end of asyncio


class CachedPrefix(NotCopyable):
    """A prompt whose KV cells stay in host memory, as ``Engine.cache_prefix`` returns it. Any thread.

    ``n_tokens``: length of the prefix. ``n_bytes``: host memory that it takes. Call ``release``, or use ``with``:
    dropping this object does not free the memory.
    """

    def __init__(self, engine_thread: EngineThread, request: Request, n_tokens: int, n_bytes: int) -> None:
        self._engine_thread = engine_thread
        self._request = request
        self.n_tokens = n_tokens
        self.n_bytes = n_bytes

    def __repr__(self) -> str:
        return f"<CachedPrefix n_tokens={self.n_tokens} n_bytes={self.n_bytes}>"

    def release(self) -> None:
        """Allow the cache to drop the prefix when it needs the memory. A second call does nothing."""
        self._engine_thread.release(self._request)

    def __enter__(self) -> CachedPrefix:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
