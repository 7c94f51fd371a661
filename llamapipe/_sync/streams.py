"""Streams and generations for threads. Made by ``tools/unasync.py`` from ``streams.py``: edit that file."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty
from time import perf_counter
from typing import Any, SupportsIndex

from llamapipe._engine.calls.chat import CheckedChat
from llamapipe._engine.calls.prompts import CheckedPrompt
from llamapipe._engine.policy.core import Request, State
from llamapipe._engine.runtime.mailboxes import ThreadMailbox
from llamapipe._engine.runtime.snapshot import SnapshotFormat
from llamapipe._engine.runtime.thread import EngineThread
from llamapipe.arguments import check_int
from llamapipe.locks import OneCall
from llamapipe.native.not_copyable import NotCopyable
from llamapipe.results import ChatDelta, Delta, Token
from llamapipe.streams import (
    C,
    ChatReader,
    SequenceHandle,
    StreamReader,
)


class Closing(NotCopyable):
    """An iterator over the output of a request; closing the iterator cancels the request."""

    def cancel(self) -> None:
        """End the request within a step."""
        raise NotImplementedError

    def __iter__(self: C) -> C:
        return self

    def close(self) -> None:
        """Do the same as ``cancel``."""
        self.cancel()

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class Stream(StreamReader, Closing):
    """An iterator over a request's deltas. Closing or dropping it cancels the request.

    Cancelling a task that waits for a delta also cancels the request. For one task at a time, in one event loop: a
    second task that asks for a delta while another task waits gets RuntimeError. A slow reader pauses only its own
    sequence. Iterating raises the request's error, or TimeoutError after its timeout.
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
                deadline = None  # all remaining deltas are in the mailbox
            elif perf_counter() >= deadline:  # even if the mailbox has deltas
                raise self._timeout_error()
        try:
            item = self._mailbox.get(deadline)
        except Empty:
            raise self._timeout_error() from None
        except BaseException as e:  # Ctrl-C or cancellation of the task during the wait
            self.notify_end(e)
            self.cancel()
            raise
        return self._read(item)

    def submit(self) -> None:
        """Submit the request now instead of with the first ``__next__``. Raises as ``Engine.generate`` does.

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
            self.notify_end(e)
            self.cancel()
            raise

    def cancel(self) -> None:
        """End the request within a step; then the stream ends. A second call does nothing. Any thread."""
        self._make = None
        super().cancel()


class ChatStream(ChatReader[Stream], Closing):
    """An iterator over the parts of an answer. Closing or dropping it cancels the request.

    ``n_prompt_tokens``: length of the prompt; 0 until the conversation is rendered. Tasks, slow readers and errors are
    handled as in ``Stream``.
    """

    def __init__(
        self,
        item: CheckedChat | Callable[[], CheckedChat],
        open_stream: Callable[[CheckedPrompt], Stream],
    ) -> None:
        super().__init__(open_stream)
        self._alone = OneCall("stream")
        self._build = item if callable(item) else None
        if not callable(item):
            self._open(item)

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
        """Render the conversation and submit the request now instead of with the first ``__next__``.

        Raises as ``Engine.chat`` does. A second call does nothing.
        """
        self._render()
        if self._stream is not None:
            self._stream.submit()

    def _render(self) -> None:
        if self._build is not None and not self._closed:
            item = self._build()
            if not self._closed:
                self._build = None
                self._open(item)


class Generation(SequenceHandle, Closing):
    """A sequence to which each ``next`` adds one token; nothing is computed ahead of a call.

    For one task at a time, except ``cancel`` and ``close``: a call while another one runs raises RuntimeError. Between
    calls the sequence keeps its slot and its KV cells until another request needs them; the cells are then saved in
    host memory, or computed again later if there is no room. Close the generation, or use ``with``.
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

    def __next__(self) -> Token:
        token = self.next()
        if token is None:
            raise StopIteration
        return token

    def next(self) -> Token | None:
        """Return the next token; None, without computing a step, when the generation is finished or cancelled.

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
            except BaseException:  # otherwise a later call would get the token in flight
                self.cancel()
                raise
            return self._read(item)

    def fork(self, seed: SupportsIndex | None = None) -> Generation:
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
            mailbox = ThreadMailbox(self._engine_thread.dispatcher)
            child = self._fork_request(sampler_seed, mailbox)
            forked = Generation(self._engine_thread, child, mailbox, self._n_vocab, self._n_ctx, self._format)
            self._start_fork(forked)
            return forked

    def snapshot(self) -> bytes:
        """Return the sequence and its KV cells as bytes, for ``Engine.restore`` of any engine with the same model.

        The bytes include the cells and the last four saved states. A header has the format, a fingerprint of the model
        file, the types of keys and values, and a checksum; sampling parameters are not included. The checksum reveals
        damage but not forgery: restore only snapshots from sources that you trust.

        Waits for the running step. Raises InvalidRequestError if the generation was cancelled or failed, OSError if the
        model's file cannot be read.
        """
        with self._alone:
            self._check_open()
            return self._pack()
