"""The thread of an embedder: batches the texts of all calls, one text of each call in turn."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeAlias

from llamapipe.errors import EngineClosedError
from llamapipe.llama.embedding_context import EmbeddingContext

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Row: TypeAlias = "npt.NDArray[np.float32]"

# A batch is filled up to this number of tokens. Texts of a batch are computed as one, so the cost of attention
# grows with the square of the batch's length.
PACK_TOKENS = 512


class Call:
    """The texts of one call, as tokens. ``done`` gets their rows, in the order of the texts, or an exception."""

    def __init__(self, texts: Sequence[list[int]], on_rows: Callable[[int], object] | None = None) -> None:
        self.done: Future[list[Row]] = Future()
        # Long texts first, so that texts of similar length share a batch.
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        self.waiting = deque((i, texts[i]) for i in order)
        self.rows: list[Row | None] = [None] * len(texts)
        self.n_left = len(texts)
        self.on_rows = on_rows

    def __repr__(self) -> str:
        return f"<Call n_left={self.n_left}>"


class Worker:
    """Owns the context from ``start`` to ``close``. Any thread, unless stated otherwise."""

    def __init__(self, context: EmbeddingContext) -> None:
        self._context = context
        self._pid = os.getpid()
        self._condition = threading.Condition()
        self._calls: deque[Call] = deque()
        self._closing = False
        self._drain = True
        self._thread = threading.Thread(target=self._run, name="llamapipe-embedder", daemon=True)
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
        with self._condition:
            if self._closing:
                raise EngineClosedError("the embedder is closed")
            if not call.n_left:
                call.done.set_result([])
                return
            self._calls.append(call)
            self._condition.notify()

    def close(self, drain: bool) -> None:
        """Ends the thread: with ``drain`` after all queued calls, otherwise after the batch being computed."""
        if os.getpid() != self._pid:
            return
        self.close_soon(drain)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def close_soon(self, drain: bool = False) -> None:
        """``close`` without waiting."""
        with self._condition:
            self._drain = self._drain and drain
            self._closing = True
            self._condition.notify()

    # ---- the thread
    def _run(self) -> None:
        try:
            while self._next():
                pass
        finally:
            self._context.close()

    def _next(self) -> bool:
        """Computes a batch, or waits for one. False when the thread must end."""
        with self._condition:
            while not self._calls and not self._closing:
                self._context.rest()
                self._condition.wait()
            if self._closing and not (self._drain and self._calls):
                left, self._calls = list(self._calls), deque()
                for call in left:
                    _fail(call, EngineClosedError("the embedder was closed before these texts were computed"))
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
            if call.done.cancelled() or not call.waiting:
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
        try:
            rows = self._context.compute([text for _, _, text in batch])
        except BaseException as e:
            for call, _, _ in batch:
                call.waiting.clear()
                _fail(call, e)
            return
        for (call, index, _), row in zip(batch, rows, strict=True):
            call.rows[index] = row
            call.n_left -= 1
            if call.on_rows is not None:
                call.on_rows(1)
            if not call.n_left and call.done.set_running_or_notify_cancel():
                call.done.set_result([one for one in call.rows if one is not None])


def _fail(call: Call, error: BaseException) -> None:
    if not call.done.done() and call.done.set_running_or_notify_cancel():
        call.done.set_exception(error)
