"""The thread of an embedder: batches the texts of all calls, one text of each call in turn.

Callers put calls into its inbox and wait for their own answers. No lock is shared with them: an exception of a signal
handler may interrupt a caller between any two instructions.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from llamapipe._engine.compute_threads import ThreadTuner
from llamapipe._engine.long_work import LongWork
from llamapipe.errors import EngineClosedError
from llamapipe.host.at_exit import close_at_exit, end_thread_at_exit, forget
from llamapipe.llama.embedding_context import EmbeddingContext
from llamapipe.locks import Lock

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Row: TypeAlias = "npt.NDArray[np.float32]"
    Answer: TypeAlias = "list[Row] | BaseException"

# A batch is filled up to this number of tokens. Texts of a batch are computed as one, so the cost of attention
# grows with the square of the batch's length.
PACK_TOKENS = 512


class Call:
    """The texts of one call, as tokens. ``answer`` gets their rows, in the order of the texts, or an exception.

    It is called once, in the embedder's thread. ``cancelled``: set by a caller that gives up.
    """

    def __init__(
        self,
        texts: Sequence[list[int]],
        answer: Callable[[Answer], object],
        on_rows: Callable[[int], object] | None = None,
    ) -> None:
        self.answer = answer
        self.cancelled = False
        # Long texts first, so that texts of similar length share a batch.
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        self.waiting = deque((i, texts[i]) for i in order)
        self.rows: list[Row | None] = [None] * len(texts)
        self.n_left = len(texts)
        self.on_rows = on_rows

    def __repr__(self) -> str:
        return f"<Call n_left={self.n_left}>"


class Worker:
    """Owns the context from ``start`` to ``close``. Any thread, unless stated otherwise.

    ``long_work``: closed at its end, also when the interpreter exits.
    """

    def __init__(
        self, context: EmbeddingContext, tuner: ThreadTuner | None = None, long_work: LongWork | None = None
    ) -> None:
        self._context = context
        self._tuner = tuner
        self._long_work = long_work
        self._pid = os.getpid()
        self._inbox: SimpleQueue[Call | None] = SimpleQueue()  # None: look at ``_closing``
        self._submitting = Lock()  # of callers: no call is put after the last None
        self._calls: deque[Call] = deque()
        self._closing = False
        self._drain = True
        self._thread = threading.Thread(target=self._run, name="llamapipe-embedder", daemon=True)
        close_at_exit(self)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Worker n_calls={len(self._calls)}{' closing' if self._closing else ''}>"

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called, or this process is a fork of the one that made it."""
        return self._closing or os.getpid() != self._pid

    def submit(self, call: Call) -> None:
        """Queues a call. Raises EngineClosedError."""
        if os.getpid() != self._pid:
            raise EngineClosedError("the embedder was made in another process; make one after the fork")
        with self._submitting:
            if self._closing:
                end_thread_at_exit()
                raise EngineClosedError("the embedder is closed")
            self._inbox.put(call)

    def close(self, drain: bool) -> None:
        """Ends the thread: with ``drain`` after all queued calls, otherwise after the batch being computed."""
        if os.getpid() != self._pid:
            return
        self.close_soon(drain)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def close_soon(self, drain: bool = False) -> None:
        """``close`` without waiting."""
        with self._submitting:
            self._drain = self._drain and drain
            self._closing = True
            self._inbox.put(None)

    # ---- the thread
    def _run(self) -> None:
        try:
            while self._next():
                pass
        finally:
            if self._tuner is not None:
                self._tuner.close()
            self._context.close()
            if self._long_work is not None:
                self._long_work.close()
            forget(self)

    def _next(self) -> bool:
        """Computes a batch, or waits for one. False when the thread must end."""
        while not self._inbox.empty() or not (self._calls or self._closing):
            if self._inbox.empty():
                self._context.rest()
                if self._tuner is not None:
                    self._tuner.idle()
            call = self._inbox.get()
            if call is not None and call.n_left:
                self._calls.append(call)
            elif call is not None:
                call.answer([])
        if self._closing and not (self._drain and self._calls):
            left, self._calls = list(self._calls), deque()
            for call in left:
                call.answer(EngineClosedError("the embedder was closed before these texts were computed"))
            return False
        batch = self._batch()
        if batch:
            self._compute(batch)
        return True

    def _batch(self) -> list[tuple[Call, int, list[int]]]:
        """The next texts: one of each call in turn, as many as fit."""
        batch: list[tuple[Call, int, list[int]]] = []
        n = 0
        while self._calls and len(batch) < self._context.n_seq_max:
            call = self._calls[0]
            if call.cancelled or not call.waiting:
                self._calls.popleft()
                continue
            index, text = call.waiting[0]
            if batch and n + len(text) > PACK_TOKENS:
                break
            call.waiting.popleft()
            self._calls.rotate(-1)
            batch.append((call, index, text))
            n += len(text)
        return batch

    def _compute(self, batch: Sequence[tuple[Call, int, list[int]]]) -> None:
        tuner, texts = self._tuner, [text for _, _, text in batch]
        try:
            if tuner is not None and not tuner.member.is_computing:
                tuner.begin()
            rows = self._context.compute(texts)
            if tuner is not None:
                tuner.launched(sum(map(len, texts)))
        except BaseException as e:
            for call in {call: None for call, _, _ in batch}:
                call.waiting.clear()
                call.answer(e)
            return
        for (call, index, _), row in zip(batch, rows, strict=True):
            call.rows[index] = row
            call.n_left -= 1
            if call.on_rows is not None:
                call.on_rows(1)
            if not call.n_left:
                call.answer([one for one in call.rows if one is not None])
