"""A generation: one token at a time, on demand, on a sequence that can be trimmed and extended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import SupportsIndex

from llamapipe._engine.request import Request, State
from llamapipe._engine.thread import EngineThread, single_caller
from llamapipe.arguments import check_int, check_tokens
from llamapipe.engine.delivery.mailbox import ThreadMailbox
from llamapipe.engine.delivery.sink import Failure, TokenSink
from llamapipe.engine.frontend.snapshot import Layout, Snapshot, pack
from llamapipe.engine.results import FinishReason, Token
from llamapipe.errors import InvalidRequestError
from llamapipe.locks import OneCall
from llamapipe.native.owner import Owner


class Generation(Owner):
    """A sequence that is continued by ``next``; nothing is computed ahead of a call.

    For one thread at a time, except ``cancel`` and ``close``: a call while another one runs raises RuntimeError.
    Between calls the sequence keeps its slot and cells until another request needs them. The cells are then saved in
    host memory, or computed again without room there. Close it, or use ``with``, when done.
    """

    engine: object = None  # kept alive by its generations

    def __init__(
        self,
        engine_thread: EngineThread,
        request: Request,
        mailbox: ThreadMailbox,
        n_vocab: int,
        n_ctx: int,
        layout: Callable[[], Layout],
    ) -> None:
        self._engine_thread = engine_thread
        self._request = request
        self._mailbox = mailbox
        self._n_vocab = n_vocab
        self._n_ctx = n_ctx
        self._layout = layout
        self._tokens = list(request.tokens)
        self._n_forks = self._n_dropped = 0
        self._changed = False  # trimmed or lengthened since the last token
        self._one_call = OneCall("generation")

    def __repr__(self) -> str:
        return f"<Generation n_tokens={self.n_tokens} {self.finish_reason or 'open'}>"

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> Token:
        token = self.next()
        if token is None:
            raise StopIteration
        return token

    def next(self) -> Token | None:
        """The next token; None, without computing a step, when the generation is finished or cancelled.

        Blocks until the token is sampled. Raises the error of a failed request, EngineClosedError after ``fork()``.
        """
        with self._one_call:
            return self._next()

    def _next(self) -> Token | None:
        request = self._request
        if request.error is not None:
            raise request.error
        if self.finish_reason is not None:
            return None
        self._engine_thread.check_open()
        self._changed = False
        self._engine_thread.loop.inbox.single_caller = single_caller()
        try:
            request.token_budget = request.n_total + 1
            self._engine_thread.resume(request)
            item = self._mailbox.get()
        except BaseException:  # Ctrl-C: the token in flight would answer a later call
            self.cancel()
            raise
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
        with self._one_call:
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
        with self._one_call:
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

    def fork(self, seed: SupportsIndex | None = None) -> Generation:
        """A second generation of the same sequence, which goes its own way from here; also after the end.

        It reuses the KV cells of this one if the engine has a prefix cache (else it computes them again), and counts
        ``max_tokens`` on. Its sampler starts over with the sequence so far, as after ``trim``, with a seed of its own:
        ``seed``, by default one that follows from the seed of this generation and the number of its forks.

        Returns at once; nothing is computed before ``next``. Close it as well. Raises InvalidRequestError when the
        generation was cancelled or failed, TypeError or ValueError for a bad seed.
        """
        given = None if seed is None else check_int("seed", seed, 0, 2**64 - 1)
        with self._one_call:
            return self._fork(given)

    def _fork(self, given: int | None) -> Generation:
        self._check_open()
        parent = self._request
        sink = parent.sink
        assert isinstance(sink, TokenSink)
        self._n_forks += 1
        seed = _seed_of_fork(parent.spec.seed, self._n_forks) if given is None else given
        mailbox = ThreadMailbox(self._engine_thread.dispatcher)
        child = parent.fork(seed, sink.fork(mailbox, keeps_text=not self._changed))
        forked = Generation(self._engine_thread, child, mailbox, self._n_vocab, self._n_ctx, self._layout)
        forked._tokens = self._tokens.copy()
        forked._changed = self._changed
        forked._n_dropped = self._n_dropped
        forked.engine = self.engine
        self._engine_thread.call(self._engine_thread.loop.fork, parent, child)
        return forked

    def snapshot(self) -> bytes:
        """The sequence and its KV cells as bytes, for ``Engine.restore`` of this engine or another one, at any time.

        They have a header with the format, a fingerprint of the model file and the types of keys and values, and a
        checksum. They take as many bytes as the cells, about what a step reads. Sampling parameters are not part of
        them. The checksum finds damage and no forgery: restore only snapshots of sources that you trust.

        Waits for the running step. Raises InvalidRequestError when the generation was cancelled or failed, OSError when
        the model's file cannot be read.
        """
        with self._one_call:
            return self._snapshot()

    def _snapshot(self) -> bytes:
        self._check_open()
        taken = self._engine_thread.ask(partial(self._engine_thread.loop.snapshot, self._request))
        return pack(Snapshot(*taken), self._layout())

    def cancel(self) -> None:
        """Ends the generation and frees its slot; ``next`` then returns None without a step. Any thread."""
        request = self._request
        if not request.cancelled and request.state is not State.FINISHED:
            self._engine_thread.cancel_soon(request)

    def close(self) -> None:
        """The same as ``cancel``."""
        self.cancel()

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

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
        self._engine_thread.call(self._engine_thread.loop.change, request, n_keep, tokens)


def _seed_of_fork(seed: int, index: int) -> int:
    """A seed for the fork with this number: forks of forks must not draw what another fork draws."""
    from hashlib import blake2b

    return int.from_bytes(blake2b(f"{seed} {index}".encode(), digest_size=8).digest(), "little")
