"""Handles of running requests: streams and chat streams, generations, cached prefixes.

A stream computes ahead of its reader, by a bounded number of tokens; a generation computes one token for each ``next``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from queue import Empty
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, SupportsIndex

from llamapipe._engine.chat_requests import CheckedChat
from llamapipe._engine.deliver import (
    AsyncMailbox,
    DeltaParser,
    Failure,
    Mailbox,
    ThreadMailbox,
    TokenSink,
    running_loop,
)
from llamapipe._engine.long_work import to_thread
from llamapipe._engine.request import Request, State
from llamapipe._engine.snapshot import SnapshotFormat, pack
from llamapipe._engine.submit import CheckedPrompt, ObservedRequest
from llamapipe._engine.thread import EngineThread
from llamapipe.arguments import check_int, check_tokens
from llamapipe.errors import InvalidRequestError
from llamapipe.locks import OneCall, OneTask
from llamapipe.native.not_copyable import NotCopyable
from llamapipe.results import ChatDelta, Delta, FinishReason, Token

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


class _Reader(NotCopyable):
    """What both kinds of stream share: the budget for further tokens, the end, cancelling."""

    engine: object = None  # kept alive by its streams
    observed: ObservedRequest | None = None

    def __init__(self, engine_thread: EngineThread, deadline: float | None) -> None:
        self._engine_thread = engine_thread
        self._deadline = deadline
        self._request: Request  # from ``submit`` on
        self._done = True  # nothing to cancel before then

    def __repr__(self) -> str:
        if not hasattr(self, "_request"):
            return f"<{type(self).__name__} not started>"
        return f"<{type(self).__name__} {'done' if self._done else 'open'} {self._request!r}>"

    @property
    def n_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had; known with the first delta, 0 before."""
        request = getattr(self, "_request", None)
        return 0 if request is None else request.n_cached

    @property
    def n_drafted_tokens(self) -> int:
        """Guessed tokens that were computed so far."""
        request = getattr(self, "_request", None)
        return 0 if request is None else request.n_drafted

    @property
    def n_accepted_tokens(self) -> int:
        """Guessed tokens that were right so far."""
        request = getattr(self, "_request", None)
        return 0 if request is None else request.n_accepted

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
        if not self._done:
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


class _Sequence(NotCopyable):
    """What both kinds of generation share: the tokens so far, trimming and lengthening, the end."""

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
        """Whether the next token can be computed. Raises the error of a failed request, EngineClosedError."""
        if self._request.error is not None:
            raise self._request.error
        if self.finish_reason is not None:
            return False
        self._engine_thread.check_open()
        return True

    def _resume(self) -> None:
        """Lets the engine compute one token."""
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
        """None while ``next`` may return a token."""
        if self._request.cancelled:
            return "cancelled"
        return self._request.finish_reason  # type: ignore[return-value]

    def trim(self, n_keep: SupportsIndex) -> None:
        """Keeps the first ``n_keep`` positions; ``next`` continues from the last of them, also after the end.

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
        """Adds tokens; ``next`` continues from the last of them, also after the end.

        ``max_tokens`` and stop strings count from here. Raises TypeError or ValueError for bad token ids,
        InvalidRequestError when they do not fit in the context or the generation was cancelled.
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

    def _forked_request(self, seed: int | None, mailbox: Mailbox) -> Request:
        parent = self._request
        sink = parent.sink
        assert isinstance(sink, TokenSink)
        self._n_forks += 1
        seed = _seed_of_fork(parent.spec.seed, self._n_forks) if seed is None else seed
        return parent.fork(seed, sink.fork(mailbox, keeps_text=not self._changed))

    def _start_fork(self, forked: _Sequence) -> None:
        forked._tokens = self._tokens.copy()
        forked._changed = self._changed
        forked._n_dropped = self._n_dropped
        forked.engine = self.engine
        self._engine_thread.fork(self._request, forked._request)

    def _pack(self) -> bytes:
        found = self._engine_thread.snapshot(self._request)
        return pack(found, self._format(self._request.spec.all_adapters))

    def cancel(self) -> None:
        """Ends the generation and frees its slot; ``next`` then returns None without a step. Any thread."""
        request = self._request
        if not request.cancelled and request.state is not State.FINISHED:
            self._engine_thread.cancel_soon(request)

    def __del__(self) -> None:
        if hasattr(self, "_tokens"):  # next() cannot be called any more: free the slot
            self.cancel()

    def _drop_old_tokens(self) -> None:
        """Drops what the engine has dropped because the context was full."""
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
        request.reopen()  # the engine thread leaves a waiting request alone; `finish_reason` must hold at once
        self._engine_thread.change(request, n_keep, tokens)


def _seed_of_fork(seed: int, index: int) -> int:
    """A seed for the fork with this number: forks of forks must not draw what another fork draws."""
    from hashlib import blake2b

    return int.from_bytes(blake2b(f"{seed} {index}".encode(), digest_size=8).digest(), "little")


# ---- asyncio: tools/unasync.py makes the next part, for threads, from this one
class AsyncStream(_Reader):
    """An asynchronous iterator over a request's deltas; closing or dropping it cancels the request.

    So does cancelling the task that waits for it. For one task at a time, of one event loop: a second task that asks
    for the next delta meanwhile gets RuntimeError. A slow reader pauses only its own sequence. Iterating raises the
    error of the request, and TimeoutError when its timeout passed.
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

    def __aiter__(self) -> AsyncStream:
        return self

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
                deadline = None  # the rest is in the mailbox
            elif perf_counter() >= deadline:  # also if deltas are left there
                raise self._expired()
        try:
            item = await self._mailbox.get(deadline)
        except Empty:
            raise self._expired() from None
        except BaseException as e:  # Ctrl-C, or the task is cancelled, while it waits
            self.observed_end(e)
            self.cancel()
            raise
        return self._read(item)

    async def submit(self) -> None:
        """Submits the request, which otherwise the first ``__anext__`` does. Raises as ``Engine.agenerate`` does.

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
            self.observed_end(e)
            self.cancel()
            raise

    def cancel(self) -> None:
        """Ends the request within a step; the stream then ends too. A second call does nothing. Any thread."""
        self._make = None
        super().cancel()

    async def aclose(self) -> None:
        """Cancels the request if it is not finished."""
        self.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncChatStream(NotCopyable):
    """An asynchronous iterator over the parts of an answer; closing or dropping it cancels the request.

    ``n_prompt_tokens``: length of the prompt; 0 as long as a long conversation is not rendered. Else as for
    ``AsyncStream``.
    """

    def __init__(
        self,
        item: CheckedChat | Callable[[], Awaitable[CheckedChat]],
        open_stream: Callable[[CheckedPrompt], AsyncStream],
    ) -> None:
        self.n_prompt_tokens = 0
        self._build = item if callable(item) else None
        self._open_stream = open_stream
        self._stream: AsyncStream | None = None
        self._parser: DeltaParser | None = None
        self._closed = False
        self._alone = OneTask("stream")
        if not callable(item):
            self._open(item)

    def _open(self, item: CheckedChat) -> None:
        self._build = None
        self._parser = item.delta_parser()
        self.n_prompt_tokens = self._parser.n_prompt_tokens
        self._stream = self._open_stream(item.item)

    def __repr__(self) -> str:
        return f"<AsyncChatStream of {self._stream!r}>"

    @property
    def n_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had; known with the first part, 0 before."""
        return 0 if self._stream is None else self._stream.n_cached_tokens

    @property
    def n_drafted_tokens(self) -> int:
        """Guessed tokens that were computed so far."""
        return 0 if self._stream is None else self._stream.n_drafted_tokens

    @property
    def n_accepted_tokens(self) -> int:
        """Guessed tokens that were right so far."""
        return 0 if self._stream is None else self._stream.n_accepted_tokens

    @property
    def prompt_progress(self) -> PromptProgress | None:
        """How much of the prompt is computed; None while the request waits for its first slot."""
        return None if self._stream is None else self._stream.prompt_progress

    def __aiter__(self) -> AsyncChatStream:
        return self

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
        """Renders the conversation and submits the request, which otherwise the first ``__anext__`` does.

        Raises as ``Engine.achat`` does. A second call does nothing.
        """
        await self._render()
        if self._stream is not None:
            await self._stream.submit()

    async def _render(self) -> None:
        if self._build is not None and not self._closed:
            item = await self._build()
            if not self._closed:
                self._open(item)

    def cancel(self) -> None:
        """Ends the request within a step; the stream then ends too. A second call does nothing. Any thread."""
        self._closed = True
        if self._stream is not None:
            self._stream.cancel()

    async def aclose(self) -> None:
        """Cancels the request if it is not finished."""
        self.cancel()

    async def __aenter__(self) -> AsyncChatStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncGeneration(_Sequence):
    """A sequence that is continued by ``next``; nothing is computed ahead of a call.

    For one task at a time, except ``cancel`` and ``aclose``: a call while another one runs raises RuntimeError. Between
    calls the sequence keeps its slot and cells until another request needs them. The cells are then saved in host
    memory, or computed again without room there. Close it, or use ``async with``, when done.
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

    def __aiter__(self) -> AsyncGeneration:
        return self

    async def __anext__(self) -> Token:
        token = await self.next()
        if token is None:
            raise StopAsyncIteration
        return token

    async def next(self) -> Token | None:
        """The next token; None, without computing a step, when the generation is finished or cancelled.

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
            except BaseException:  # the token in flight would answer a later call
                self.cancel()
                raise
            return self._read(item)

    def fork(self, seed: SupportsIndex | None = None) -> AsyncGeneration:
        """A second generation of the same sequence, which is independent from here on; also after the end.

        It reuses the KV cells of this one if the engine has a prefix cache (else it computes them again), and counts
        ``max_tokens`` on. Its sampler starts over with the sequence so far, as after ``trim``, with its own seed:
        ``seed``, by default one that follows from the seed of this generation and the number of its forks.

        Returns at once; nothing is computed before ``next``. Close it as well. Raises InvalidRequestError when the
        generation was cancelled or failed, TypeError or ValueError for a bad seed.
        """
        given = None if seed is None else check_int("seed", seed, 0, 2**64 - 1)
        with self._alone:
            self._check_open()
            mailbox = AsyncMailbox(running_loop(), self._engine_thread.dispatcher)
            child = self._forked_request(given, mailbox)
            forked = AsyncGeneration(
                self._engine_thread, child, mailbox, self._n_vocab, self._n_ctx, self._format
            )
            self._start_fork(forked)
            return forked

    async def snapshot(self) -> bytes:
        """The sequence and its KV cells as bytes, for ``Engine.restore`` of this engine or another one, at any time.

        They have a header with the format, a fingerprint of the model file and the types of keys and values, and a
        checksum. They take as many bytes as the cells, about what a step reads. Sampling parameters are not part of
        them. The checksum finds damage and no forgery: restore only snapshots of sources that you trust.

        Waits for the running step. Raises InvalidRequestError when the generation was cancelled or failed, OSError when
        the model's file cannot be read.
        """
        with self._alone:
            self._check_open()
            return await to_thread(self._pack)

    async def aclose(self) -> None:
        """The same as ``cancel``."""
        self.cancel()

    async def __aenter__(self) -> AsyncGeneration:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


# ---- threads: made by tools/unasync.py; edit the part above
class Stream(_Reader):
    """An asynchronous iterator over a request's deltas; closing or dropping it cancels the request.

    So does cancelling the task that waits for it. For one task at a time, of one event loop: a second task that asks
    for the next delta meanwhile gets RuntimeError. A slow reader pauses only its own sequence. Iterating raises the
    error of the request, and TimeoutError when its timeout passed.
    """

    def __init__(
        self,
        engine_thread: EngineThread,
        make: Callable[[], tuple[Request, ThreadMailbox]],
        submit: Callable[..., None],
        deadline: float | None,
    ) -> None:
        super().__init__(engine_thread, deadline)
        self._make: Callable[[], tuple[Request, ThreadMailbox]] | None = make
        self._submit = submit
        self._alone = OneCall("stream")

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        with self._alone:
            return self._next()

    def _next(self) -> Delta:
        if self._done:
            raise StopIteration
        if self._engine_thread.forked:
            self._engine_thread.check_caller()
        deadline = self._deadline
        if deadline is not None:
            if self._request.state is State.FINISHED:
                deadline = None  # the rest is in the mailbox
            elif perf_counter() >= deadline:  # also if deltas are left there
                raise self._expired()
        try:
            item = self._mailbox.get(deadline)
        except Empty:
            raise self._expired() from None
        except BaseException as e:  # Ctrl-C, or the task is cancelled, while it waits
            self.observed_end(e)
            self.cancel()
            raise
        return self._read(item)

    def submit(self) -> None:
        """Submits the request, which otherwise the first ``__next__`` does. Raises as ``Engine.generate`` does.

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
            self._submit(self._request, deadline=self._deadline)
        except BaseException as e:
            self.observed_end(e)
            self.cancel()
            raise

    def cancel(self) -> None:
        """Ends the request within a step; the stream then ends too. A second call does nothing. Any thread."""
        self._make = None
        super().cancel()

    def close(self) -> None:
        """Cancels the request if it is not finished."""
        self.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class ChatStream(NotCopyable):
    """An asynchronous iterator over the parts of an answer; closing or dropping it cancels the request.

    ``n_prompt_tokens``: length of the prompt; 0 as long as a long conversation is not rendered. Else as for
    ``Stream``.
    """

    def __init__(
        self,
        item: CheckedChat | Callable[[], CheckedChat],
        open_stream: Callable[[CheckedPrompt], Stream],
    ) -> None:
        self.n_prompt_tokens = 0
        self._build = item if callable(item) else None
        self._open_stream = open_stream
        self._stream: Stream | None = None
        self._parser: DeltaParser | None = None
        self._closed = False
        self._alone = OneCall("stream")
        if not callable(item):
            self._open(item)

    def _open(self, item: CheckedChat) -> None:
        self._build = None
        self._parser = item.delta_parser()
        self.n_prompt_tokens = self._parser.n_prompt_tokens
        self._stream = self._open_stream(item.item)

    def __repr__(self) -> str:
        return f"<ChatStream of {self._stream!r}>"

    @property
    def n_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had; known with the first part, 0 before."""
        return 0 if self._stream is None else self._stream.n_cached_tokens

    @property
    def n_drafted_tokens(self) -> int:
        """Guessed tokens that were computed so far."""
        return 0 if self._stream is None else self._stream.n_drafted_tokens

    @property
    def n_accepted_tokens(self) -> int:
        """Guessed tokens that were right so far."""
        return 0 if self._stream is None else self._stream.n_accepted_tokens

    @property
    def prompt_progress(self) -> PromptProgress | None:
        """How much of the prompt is computed; None while the request waits for its first slot."""
        return None if self._stream is None else self._stream.prompt_progress

    def __iter__(self) -> ChatStream:
        return self

    def __next__(self) -> ChatDelta:
        with self._alone:
            return self._next()

    def _next(self) -> ChatDelta:
        if self._build is not None:
            self._render()
        if self._stream is None or self._parser is None:
            raise StopIteration
        while True:
            delta = self._parser.read(self._stream.__next__())
            if delta is not None:
                return delta

    def submit(self) -> None:
        """Renders the conversation and submits the request, which otherwise the first ``__next__`` does.

        Raises as ``Engine.chat`` does. A second call does nothing.
        """
        self._render()
        if self._stream is not None:
            self._stream.submit()

    def _render(self) -> None:
        if self._build is not None and not self._closed:
            item = self._build()
            if not self._closed:
                self._open(item)

    def cancel(self) -> None:
        """Ends the request within a step; the stream then ends too. A second call does nothing. Any thread."""
        self._closed = True
        if self._stream is not None:
            self._stream.cancel()

    def close(self) -> None:
        """Cancels the request if it is not finished."""
        self.cancel()

    def __enter__(self) -> ChatStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class Generation(_Sequence):
    """A sequence that is continued by ``next``; nothing is computed ahead of a call.

    For one task at a time, except ``cancel`` and ``close``: a call while another one runs raises RuntimeError. Between
    calls the sequence keeps its slot and cells until another request needs them. The cells are then saved in host
    memory, or computed again without room there. Close it, or use ``with``, when done.
    """

    def __init__(
        self,
        engine_thread: EngineThread,
        request: Request,
        mailbox: ThreadMailbox,
        n_vocab: int,
        n_ctx: int,
        layout: Callable[[Any], SnapshotFormat],
    ) -> None:
        super().__init__(engine_thread, request, n_vocab, n_ctx, layout)
        self._mailbox = mailbox
        self._alone = OneCall("generation")

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> Token:
        token = self.next()
        if token is None:
            raise StopIteration
        return token

    def next(self) -> Token | None:
        """The next token; None, without computing a step, when the generation is finished or cancelled.

        Raises the error of a failed request, EngineClosedError after ``fork()``. Ctrl-C, or cancelling the task,
        cancels the generation.
        """
        with self._alone:
            if not self._has_next():
                return None
            self._engine_thread.note_waiting_thread()
            try:
                self._resume()
                item = self._mailbox.get()
            except BaseException:  # the token in flight would answer a later call
                self.cancel()
                raise
            return self._read(item)

    def fork(self, seed: SupportsIndex | None = None) -> Generation:
        """A second generation of the same sequence, which is independent from here on; also after the end.

        It reuses the KV cells of this one if the engine has a prefix cache (else it computes them again), and counts
        ``max_tokens`` on. Its sampler starts over with the sequence so far, as after ``trim``, with its own seed:
        ``seed``, by default one that follows from the seed of this generation and the number of its forks.

        Returns at once; nothing is computed before ``next``. Close it as well. Raises InvalidRequestError when the
        generation was cancelled or failed, TypeError or ValueError for a bad seed.
        """
        given = None if seed is None else check_int("seed", seed, 0, 2**64 - 1)
        with self._alone:
            self._check_open()
            mailbox = ThreadMailbox(self._engine_thread.dispatcher)
            child = self._forked_request(given, mailbox)
            forked = Generation(self._engine_thread, child, mailbox, self._n_vocab, self._n_ctx, self._format)
            self._start_fork(forked)
            return forked

    def snapshot(self) -> bytes:
        """The sequence and its KV cells as bytes, for ``Engine.restore`` of this engine or another one, at any time.

        They have a header with the format, a fingerprint of the model file and the types of keys and values, and a
        checksum. They take as many bytes as the cells, about what a step reads. Sampling parameters are not part of
        them. The checksum finds damage and no forgery: restore only snapshots of sources that you trust.

        Waits for the running step. Raises InvalidRequestError when the generation was cancelled or failed, OSError when
        the model's file cannot be read.
        """
        with self._alone:
            self._check_open()
            return self._pack()

    def close(self) -> None:
        """The same as ``cancel``."""
        self.cancel()

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


# ---- end of what tools/unasync.py makes


class CachedPrefix(NotCopyable):
    """What ``Engine.cache_prefix`` returns. Any thread.

    ``n_tokens``: of the prefix. ``n_bytes``: of host memory that it takes. The prefix stays also if this object is
    dropped; ``release`` it, or use ``with``, when it is not needed any more.
    """

    def __init__(self, engine_thread: EngineThread, request: Request, n_tokens: int, n_bytes: int) -> None:
        self._engine_thread = engine_thread
        self._request = request
        self.n_tokens = n_tokens
        self.n_bytes = n_bytes

    def __repr__(self) -> str:
        return f"<CachedPrefix n_tokens={self.n_tokens} n_bytes={self.n_bytes}>"

    def release(self) -> None:
        """Lets the cache drop the prefix when it needs the memory. A second call does nothing."""
        self._engine_thread.release(self._request)

    def __enter__(self) -> CachedPrefix:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
