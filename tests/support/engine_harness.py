"""An engine thread over a fake context, and the ways to ask something of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import Empty
from time import perf_counter
from typing import Any, cast

from llamapipe._engine.calls.queue_limit import QueueLimit
from llamapipe._engine.policy.core import Request, RequestSpec
from llamapipe._engine.policy.kv import KvCache
from llamapipe._engine.policy.scheduler import Scheduler
from llamapipe._engine.runtime.loop import EngineLoop
from llamapipe._engine.runtime.mailboxes import ThreadMailbox
from llamapipe._engine.runtime.sinks import Choices, CompletionSink, DeltaSink, Failure, TokenSink
from llamapipe._engine.runtime.snapshot import SnapshotFormat, unpack
from llamapipe._engine.runtime.state_layout import Bytes
from llamapipe._engine.runtime.thread import EngineThread
from llamapipe._sync.streams import Generation, Stream
from llamapipe.results import Completion
from llamapipe.streams import BUFFER_TOKENS
from support.control import PATIENCE_S, Worker, held_thread, wait_until
from support.fakes import N_VOCAB, FakeContext, FakeSampler, continuation
from support.memory import cache_of

N_CTX = 160


def prompt_of(n: int, which: int = 0) -> list[int]:
    """`n` tokens; other numbers give other prompts."""
    return [(31 * which + 7 * i + 1) % N_VOCAB for i in range(n)]


def piece(token: int) -> bytes:
    return f"{token} ".encode()


class AsItIs:
    """The form of a fake context's states."""

    def to_stored(self, state: Bytes, n: int, only_state: bool = False) -> list[Bytes]:
        return [state]

    def loadable(self, stored: Bytes, n: int, only_state: bool = False) -> tuple[bytes, bool]:
        return bytes(stored), True


class Answer:
    """A completion that was asked for, and what came of it."""

    def __init__(self, request: Request, mailbox: ThreadMailbox) -> None:
        self.request = request
        self.mailbox = mailbox

    def result(self) -> Completion:
        """Waits for the end; raises what the request failed with."""
        try:
            _, result = self.mailbox.get(perf_counter() + PATIENCE_S)
        except Empty:
            raise AssertionError(f"no answer: {self.request!r}") from None
        if isinstance(result, Failure):
            raise result.error
        assert isinstance(result, Completion)
        return result

    def check(self) -> None:
        """The result is what the request would have given alone."""
        r = self.request
        result = self.result()
        tokens, reason = continuation(r.tokens[: r.n_prompt], r.max_tokens, r.stop_tokens, N_CTX)
        assert (result.token_ids, result.finish_reason) == (tokens, reason)
        assert result.text == "".join(f"{t} " for t in tokens)
        assert result.n_prompt_tokens == r.n_prompt


class EngineHarness:
    """An engine thread over a fake context, and the ways to ask something of it."""

    def __init__(
        self,
        n_slots: int = 4,
        window_s: float = 0.0,
        max_queue: int | None = None,
        make_sampler: Callable[[Request], Any] | None = None,
        cache: KvCache | None = None,
        **context: Any,
    ) -> None:
        self.context = FakeContext(n_slots, N_CTX, **context)
        n_cells = self.context.n_cells
        self.scheduler = Scheduler(
            cache_of(n_slots) if cache is None else cache, N_CTX, n_cells, self.context.n_batch, 16
        )
        self.queue = QueueLimit(max_queue)
        self.samplers: list[FakeSampler] = []
        self._make_sampler = make_sampler or self.make_sampler
        self.engine_thread = EngineThread(
            EngineLoop(self.scheduler, self.context, window_s, self.queue.remove)
        )
        self.engine_thread.start()
        self.n_asked = 0

    def make(self, request: Request) -> Any:
        return self._make_sampler(request)

    def make_sampler(self, request: Request) -> FakeSampler:
        self.samplers.append(FakeSampler())
        return self.samplers[-1]

    def rebuild(self, sampler: Any, request: Request) -> None:
        """As a sampler factory does after a change."""
        sampler.reset()
        sampler.accept(request.tokens)

    def request(
        self,
        n_prompt: int = 4,
        max_tokens: int | None = 5,
        tokens: list[int] | None = None,
        **options: Any,
    ) -> Request:
        spec = RequestSpec(max_tokens, sampler_factory=self, **options)
        request = Request(tokens or prompt_of(n_prompt, self.n_asked), spec)
        self.n_asked += 1
        return request

    def submit(self, request: Request) -> None:
        """As the engine does with completions and streams."""
        self.queue.enter(request, None)
        try:
            self.engine_thread.submit(request)
        except BaseException:
            self.queue.remove([request])
            raise

    def complete(self, n_prompt: int = 4, max_tokens: int | None = 5, **options: Any) -> Answer:
        mailbox = ThreadMailbox(self.engine_thread.dispatcher)
        sink = CompletionSink(Choices(mailbox, 0), piece, (), 0)
        request = self.request(n_prompt, max_tokens, sink=sink, **options)
        self.submit(request)
        return Answer(request, mailbox)

    def stream(self, n_prompt: int = 4, max_tokens: int | None = 5) -> Stream:
        mailbox = ThreadMailbox(self.engine_thread.dispatcher)
        sink = DeltaSink(mailbox, piece, ())
        request = self.request(n_prompt, max_tokens, token_budget=BUFFER_TOKENS, sink=sink)
        stream = Stream(self.engine_thread, lambda: (request, mailbox), self._submit, None)
        stream.submit()
        return stream

    def _submit(self, request: Request, deadline: float | None) -> None:
        self.submit(request)

    def start(
        self, n_prompt: int = 4, max_tokens: int | None = 5, stops: tuple[str, ...] = (), **options: Any
    ) -> Generation:
        mailbox = ThreadMailbox(self.engine_thread.dispatcher)
        sink = TokenSink(mailbox, piece, stops)
        request = self.request(n_prompt, max_tokens, token_budget=0, resumable=True, sink=sink, **options)
        self.engine_thread.submit(request)
        return self.generation(request, mailbox)

    def generation(self, request: Request, mailbox: ThreadMailbox) -> Generation:
        return Generation(self.engine_thread, request, mailbox, N_VOCAB, self.context.n_ctx, self.layout)

    def layout(self, adapters: object = None) -> SnapshotFormat:
        return SnapshotFormat(bytes(16), 4, "f16", "f16", cast(Any, AsItIs()))

    def restore(self, snapshot: bytes) -> Generation:
        """As an engine does."""
        saved = unpack(snapshot, self.layout(), N_VOCAB)
        mailbox = ThreadMailbox(self.engine_thread.dispatcher)
        n_generated = len(saved.tokens) - saved.n_prompt
        request = self.request(
            max_tokens=None,
            tokens=saved.tokens,
            token_budget=n_generated,
            n_generated=n_generated,
            resumable=True,
            sink=TokenSink(mailbox, piece, ()),
        )
        self.engine_thread.call(self.engine_thread.loop.restore, request, saved)
        return self.generation(request, mailbox)

    def cancel(self, request: Request) -> None:
        request.cancelled = True
        self.engine_thread.call(self.engine_thread.loop.cancel, request)

    def finish_one(self) -> None:
        """One request, from one idle moment of the engine thread to the next."""
        self.complete(max_tokens=1).check()
        self.idle()

    def idle(self) -> None:
        """Returns when the thread has nothing to do but to wait for commands."""
        ident = self.engine_thread._thread.ident
        assert ident is not None
        wait_until(lambda: sys._current_frames()[ident].f_code.co_name == "run_next")

    def held(self) -> AbstractContextManager[None]:
        """Holds the thread between two steps: what is asked meanwhile comes to it all at once."""
        return held_thread(self.engine_thread)

    def close(self, drain: bool = True) -> None:
        """Closes within reason; then nothing is left of anybody."""
        Worker(self.engine_thread.close, drain).result()
        assert self.context.closed
        assert self.queue.n == 0
        assert all(sampler.closed for sampler in self.samplers)
        assert len(self.scheduler.live()) == 0
        self.engine_thread.loop.check_integrity()
