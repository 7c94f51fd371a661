"""Embeddings and reranking, for threads and asyncio.

Open this file to change how texts become vectors, or which texts share a batch.

One thread owns the context. It batches the texts of all calls, one text of each call in turn, so that a long list does
not keep a single text waiting. Callers put calls into its inbox and wait for their own answers. The thread shares no
lock with callers, because a signal handler may raise in a caller between any two instructions.

``embed`` and ``aembed``, ``rerank`` and ``arerank`` share their checks (``_check_texts``, ``_pairs``) and their results
(``_result``, ``_rank``). They differ only in how they wait, so ``tools/unasync.py`` would have nothing to derive.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from llamapipe._engine.runtime.compute_threads import ThreadTuner, make_tuner
from llamapipe._messages import explains_options
from llamapipe.arguments import check_flag, check_tokens, from_column
from llamapipe.errors import DecodeError, EngineClosedError, InvalidRequestError
from llamapipe.host.at_exit import close_at_exit, end_thread_at_exit, forget
from llamapipe.host.memory import return_freed_memory
from llamapipe.llama.embedding_context import EmbeddingContext
from llamapipe.llama.model import MODEL_OPTIONS, Model
from llamapipe.locks import Lock, check_threads
from llamapipe.native.owner import AsyncOwner
from llamapipe.work.long_work import LongWork, running_loop, settle, size_of
from llamapipe.work.progress import progress_bar

if TYPE_CHECKING:
    import asyncio

Text: TypeAlias = str | Sequence[int]
Floats: TypeAlias = npt.NDArray[np.float32]
Answer: TypeAlias = list[Floats] | BaseException


T = TypeVar("T")


@dataclass(frozen=True)
class Ranked:
    """A document as ``Embedder.rerank`` ranks it.

    - ``index``: its index in ``documents``.
    - ``score``: the model's score, unchanged; higher for a better match.
    - ``n_tokens``: tokens of the query and the document together.
    """

    index: int
    score: float
    n_tokens: int


class Embedder(AsyncOwner):
    """Computes embeddings and ranks documents. Any thread, and asyncio.

    Close it before its model, or use ``with``::

        with lp.Embedder("model.gguf") as embedder:
            vectors = embedder.embed(["a text", "another one"])

    - ``model``: a ``Model``, or the path of a GGUF file, which the embedder then loads, owns and closes. Encoders (such
      as BERT) and decoders work.
    - ``pooling``: ``"mean"``, ``"cls"`` or ``"last"``: one vector for a text; ``"none"``: one for each token;
      ``"rank"``: for rerankers. Default: the model's own; if it has none, ``"last"`` for decoders, else ``"mean"``.
    - ``n_ctx``: maximum number of tokens of a text; default: the model's training context, at most 2048.
    - ``n_seq_max``: maximum number of texts computed together. A call may have any number of texts.
    - ``n_threads``: compute threads; default: the cores that this process may use, and fewer while other work needs
      them.

    The attributes ``model``, ``pooling``, ``n_ctx`` and ``n_seq_max`` hold the values in use; ``n_embd`` is the number
    of values of a vector. Texts of all callers are batched, and callers take turns: a long list does not keep a single
    text waiting.

    Raises TypeError and ValueError for bad arguments (``docs/reference/options.md`` has the ranges), ModelLoadError,
    InvalidRequestError for a model that cannot compute embeddings, BackendError if memory runs out.
    """

    @explains_options({"Model": MODEL_OPTIONS})
    def __init__(
        self,
        model: Model | str | os.PathLike[str],
        pooling: str | None = None,
        n_ctx: int | None = None,
        n_seq_max: int = 16,
        n_threads: int | None = None,
    ) -> None:
        self._owns_model = isinstance(model, (str, os.PathLike))
        check_threads()
        # After an error or Ctrl-C the caller has no object to close, so this block closes what it has created.
        with ExitStack() as undo:
            if isinstance(model, (str, os.PathLike)):
                model = undo.enter_context(closing(Model(model)))
            elif not isinstance(model, Model):
                raise TypeError(f"model must be a Model or the path of a file, not {type(model).__name__}")
            self.model = model
            self._n_end = self._n_added()
            context = EmbeddingContext(model, pooling, n_ctx, n_seq_max, n_threads)
            undo.callback(context.close)
            self.pooling = context.pooling
            self.n_ctx = context.n_ctx
            self.n_seq_max = context.n_seq_max
            self.n_embd = context.width
            self._long_work = LongWork()
            tuner = make_tuner(context, is_threaded=False, is_fixed=n_threads is not None)
            if tuner is not None:
                undo.callback(tuner.close)
            self._worker = Worker(context, tuner, self._long_work)
            undo.callback(self._worker.close, False)
            self._worker.start()
            undo.pop_all()

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<Embedder pooling={self.pooling!r} n_ctx={self.n_ctx} {self.model.path.name!r}{state}>"

    # ---- embeddings
    @overload
    def embed(
        self, texts: str, normalize: bool = True, *, truncate: bool = False, progress: bool = False
    ) -> Floats: ...

    @overload
    def embed(
        self,
        texts: Sequence[Text] | Sequence[int],
        normalize: bool = True,
        *,
        truncate: bool = False,
        progress: bool = False,
    ) -> Floats: ...

    @explains_options()
    def embed(
        self,
        texts: Text | Sequence[Text],
        normalize: bool = True,
        *,
        truncate: bool = False,
        progress: bool = False,
    ) -> Floats | list[Floats]:
        """Return the embeddings: float32 ``(n_texts, n_embd)`` for a list, ``(n_embd,)`` for one text.

        With pooling ``"none"``: a list of float32 arrays ``(n_tokens, n_embd)``, or one such array for one text.

        - ``texts``: a str, its token ids, or a list of these.
        - ``normalize``: divide each vector by its length; a vector of zeros stays as it is.
        - ``truncate``: cut texts of more than ``n_ctx`` tokens instead of refusing them.
        - ``progress``: show a progress bar (needs tqdm).

        Blocks until all are computed; Ctrl-C drops the texts that are not computed yet. Any thread. Raises TypeError or
        ValueError for bad texts and options, InvalidRequestError for a reranker and for texts that are empty or too
        long, ImportError for ``progress`` without tqdm, EngineClosedError, BackendError if llama.cpp fails, DecodeError
        if a damaged model computes numbers that are not finite.
        """
        single, tokens = self._check_texts(texts, truncate)
        bar = progress_bar(len(tokens)) if check_flag("progress", progress) else None
        try:
            rows = self._wait(tokens, None if bar is None else bar.update)
        finally:
            if bar is not None:
                bar.close()
        return self._result(rows, single, check_flag("normalize", normalize))

    @explains_options()
    async def aembed(
        self, texts: Text | Sequence[Text], normalize: bool = True, *, truncate: bool = False
    ) -> Floats | list[Floats]:
        """Do what ``embed`` does, for asyncio. Cancelling the task drops the texts that are not computed yet."""
        single, tokens = await self._long_work.run(self._check_texts, texts, truncate, size=size_of(texts))
        return self._result(await self._await(tokens), single, check_flag("normalize", normalize))

    def _result(self, rows: list[Floats], single: bool, normalize: bool) -> Floats | list[Floats]:
        if normalize:
            rows = [_normalize(row) for row in rows]
        if single:
            return rows[0]
        if self.pooling == "none":
            return rows
        return np.stack(rows) if rows else np.empty((0, self.n_embd), np.float32)

    async def offload(self, function: Callable[..., T], *arguments: object, size: int = 0) -> T:
        """Call ``function(*arguments)`` in one of the embedder's threads for long work; see ``Engine.offload``."""
        return await self._long_work.run(function, *arguments, size=size)

    # ---- reranking
    @explains_options()
    def rerank(self, query: str, documents: Sequence[str], *, truncate: bool = False) -> list[Ranked]:
        """Rank the documents, the best match for the query first; equal scores keep the order of the list.

        ``truncate``: cut documents that have more than ``n_ctx`` tokens together with the query, instead of refusing
        them.

        Blocks as ``embed`` does. Any thread. Raises TypeError or ValueError for bad texts and options,
        InvalidRequestError for a model without a rank head and for texts that are empty or too long, EngineClosedError,
        BackendError if llama.cpp fails.
        """
        pairs = self._pairs(query, documents, truncate)
        return _rank(self._wait(pairs), pairs)

    @explains_options()
    async def arerank(self, query: str, documents: Sequence[str], *, truncate: bool = False) -> list[Ranked]:
        """Do what ``rerank`` does, for asyncio. Cancelling the task drops the documents that are not computed yet."""
        size = size_of([query, documents])
        pairs = await self._long_work.run(self._pairs, query, documents, truncate, size=size)
        return _rank(await self._await(pairs), pairs)

    def _pairs(self, query: str, documents: Sequence[str], truncate: bool) -> list[list[int]]:
        """Return the tokens of each document together with the query. Raises as ``rerank`` does."""
        if self.pooling != "rank":
            raise InvalidRequestError(
                f"{self.model.path.name} has pooling {self.pooling!r}; reranking needs a model with a rank head"
            )
        if not isinstance(query, str):
            raise TypeError(f"query must be a str, not {type(query).__name__}")
        if isinstance(documents, str) or not isinstance(documents, Sequence):
            raise TypeError(f"documents must be a list of str, not {type(documents).__name__}")
        check_flag("truncate", truncate)
        before, after = self._around_document(query)
        return [self._pair(before, document, after, i, truncate) for i, document in enumerate(documents)]

    def _around_document(self, query: str) -> tuple[list[int], list[int]]:
        vocab = self.model.vocab
        template = self.model.metadata.get("tokenizer.chat_template.rerank")
        if template is not None:
            head, _, tail = (part.replace("{query}", query) for part in template.partition("{document}"))
            before = vocab.tokenize(head, add_special=False, parse_special=True)
            return before, vocab.tokenize(tail, add_special=False, parse_special=True)
        eos = vocab.sep if vocab.eos is None else vocab.eos
        start = [vocab.bos] if vocab.add_bos else []
        ends = [eos] if vocab.add_eos else []
        separator = [vocab.sep] if vocab.add_sep else []
        inner = vocab.tokenize(query, add_special=False)
        before = [token for token in (*start, *inner, *ends, *separator) if token is not None]
        return before, [token for token in ends if token is not None]

    def _pair(
        self, before: list[int], document: str, after: list[int], index: int, truncate: bool
    ) -> list[int]:
        if not isinstance(document, str):
            raise TypeError(f"document {index} must be a str, not {type(document).__name__}")
        middle = self.model.vocab.tokenize(document, add_special=False)
        n = len(before) + len(middle) + len(after)
        if n > self.n_ctx:
            room = self.n_ctx - len(before) - len(after)
            if truncate and room < 1:
                raise InvalidRequestError(
                    f"the query has {n - len(middle)} tokens with those around it, which leave no room for a document; "
                    f"n_ctx is {self.n_ctx}: shorten the query"
                )
            if not truncate:
                raise InvalidRequestError(
                    f"document {index} has {n} tokens with the query; n_ctx is {self.n_ctx}: shorten it, "
                    "or set truncate to cut it"
                )
            middle = middle[:room]
        if not n:
            raise InvalidRequestError(f"document {index} and the query are empty")
        return [*before, *middle, *after]

    # ---- tokens
    def tokens(self, texts: Text | Sequence[Text], *, truncate: bool = False) -> list[list[int]]:
        """Return the tokens of each text, without computing vectors. ``embed`` also accepts tokens. Any thread.

        Raises as ``embed`` does.
        """
        return self._check_texts(texts, truncate)[1]

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens that ``embed`` computes for a text, including the model's special tokens."""
        return self.model.vocab.tokenize(text)

    def _n_added(self) -> int:
        """Return the number of special tokens added after a text."""
        vocab = self.model.vocab
        try:
            plain, whole = vocab.tokenize("a", add_special=False), vocab.tokenize("a")
        except ValueError:  # this vocabulary cannot express the letter
            return 0
        n = len(plain)
        starts = (i for i in range(len(whole) - n + 1) if whole[i : i + n] == plain)
        return len(whole) - n - next(starts, len(whole) - n)

    def _check_texts(self, texts: Text | Sequence[Text], truncate: bool) -> tuple[bool, list[list[int]]]:
        """Return whether ``texts`` is a single text, and each text as tokens. Raises as ``embed`` does."""
        if self.closed:
            raise EngineClosedError("the embedder is closed")
        if self.pooling == "rank":
            raise InvalidRequestError(f"{self.model.path.name} is a reranker; use rerank()")
        check_flag("truncate", truncate)
        if isinstance(texts, str):
            return True, [self._tokens(texts, None, truncate)]
        texts = from_column("texts", texts)
        if isinstance(texts, (bytes, bytearray)) or not isinstance(texts, Sequence):
            raise TypeError(f"texts must be a str or a list, not {type(texts).__name__}")
        if texts and not isinstance(texts[0], (str, Sequence, np.ndarray)):
            return True, [self._tokens(texts, None, truncate)]  # type: ignore[arg-type]
        return False, [self._tokens(cast("Text", text), i, truncate) for i, text in enumerate(texts)]

    def _tokens(self, text: Text, index: int | None, truncate: bool) -> list[int]:
        what = "the text" if index is None else f"text {index}"
        if isinstance(text, str):
            tokens = self.model.vocab.tokenize(text)
            n_end = self._n_end
        else:
            tokens = check_tokens(what, text, self.model.n_vocab)
            n_end = 0
        if not tokens:
            raise InvalidRequestError(f"{what} is empty")
        if len(tokens) > self.n_ctx:
            if not truncate:
                raise InvalidRequestError(
                    f"{what} has {len(tokens)} tokens; n_ctx is {self.n_ctx}: shorten it, or set truncate to cut it"
                )
            end = tokens[len(tokens) - n_end :]
            tokens = [*tokens[: self.n_ctx - n_end], *end]
        return tokens

    def _wait(
        self, texts: Sequence[list[int]], on_rows: Callable[[int], object] | None = None
    ) -> list[Floats]:
        answers: SimpleQueue[list[Floats] | BaseException] = SimpleQueue()
        call = EmbedCall(texts, answers.put, on_rows)
        try:
            self._worker.submit(call)
            answer = answers.get()
        except BaseException:  # Ctrl-C: drop the texts that were not computed
            call.cancelled = True
            raise
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def _await(self, texts: Sequence[list[int]]) -> list[Floats]:
        loop = running_loop()
        future: asyncio.Future[list[Floats]] = loop.create_future()

        def answer(outcome: list[Floats] | BaseException) -> None:
            with suppress(RuntimeError):  # the loop may be closed by now
                error = outcome if isinstance(outcome, BaseException) else None
                loop.call_soon_threadsafe(settle, future, outcome, error)

        call = EmbedCall(texts, answer)
        self._worker.submit(call)
        try:
            return await future
        except BaseException:
            call.cancelled = True
            raise

    # ---- lifetime
    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._worker.closed

    def close(self, drain: bool = True) -> None:
        """Close the embedder and free its native memory before returning; a second call does nothing. Any thread.

        ``drain``: finish waiting calls first; otherwise these raise EngineClosedError.
        """
        was_open = not self.closed
        self._worker.close(check_flag("drain", drain))
        if self._owns_model:
            self.model.close()
        elif was_open:
            return_freed_memory()

    def _is_left_open(self) -> bool:
        worker = getattr(self, "_worker", None)
        return not (worker is None or worker.closed)

    def _abandon(self) -> None:
        self._worker.close_soon()


def _normalize(row: Floats) -> Floats:
    """Return vectors of length 1; a vector of zeros stays as it is."""
    length = np.linalg.norm(row, axis=-1, keepdims=True)
    vectors: Floats = np.divide(row, length, out=np.zeros_like(row), where=length > 0)
    return vectors


def _rank(rows: list[Floats], pairs: list[list[int]]) -> list[Ranked]:
    scores = [
        Ranked(i, float(row[0]), len(pair)) for i, (row, pair) in enumerate(zip(rows, pairs, strict=True))
    ]
    return sorted(scores, key=lambda ranked: -ranked.score)


# A batch is filled up to this number of tokens. Attention is computed over the whole batch, so its cost grows with the
# square of the batch's length.
PACK_TOKENS = 512


class EmbedCall:
    """The texts of one call, as tokens. ``answer`` receives their vectors in the same order, or an exception.

    ``answer`` is called once, in the embedder's thread. ``on_rows`` is called there for each computed text, with 1. A
    caller that gives up sets ``cancelled``.
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
        self.rows: list[Floats | None] = [None] * len(texts)
        self.n_left = len(texts)
        self.on_rows = on_rows

    def __repr__(self) -> str:
        return f"<EmbedCall n_left={self.n_left}>"


class Worker:
    """Owns the context and the thread that computes with it. Any thread, unless stated otherwise.

    ``long_work``: closed when the worker ends, including at interpreter exit.
    """

    def __init__(
        self, context: EmbeddingContext, tuner: ThreadTuner | None = None, long_work: LongWork | None = None
    ) -> None:
        self._context = context
        self._tuner = tuner
        self._long_work = long_work
        self._pid = os.getpid()
        self._inbox: SimpleQueue[EmbedCall | None] = SimpleQueue()  # None: look at ``_closing``
        self._submitting = Lock()  # held by callers only: no call is put after the last None
        self._calls: deque[EmbedCall] = deque()
        self._closing = False
        self._drain = True
        self._thread = threading.Thread(target=self._run, name="llamapipe-embedder", daemon=True)

    def __repr__(self) -> str:
        return f"<Worker n_calls={len(self._calls)}{' closing' if self._closing else ''}>"

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called, or this process was forked from the one that made the worker."""
        return self._closing or os.getpid() != self._pid

    def start(self) -> None:
        """Start the thread. If Ctrl-C interrupts this call, close the worker, because it may be running."""
        with self._submitting:  # closing at interpreter exit waits until the thread has started
            close_at_exit(self)
            self._thread.start()

    def submit(self, call: EmbedCall) -> None:
        """Queue a call. Raises EngineClosedError."""
        if os.getpid() != self._pid:
            raise EngineClosedError("the embedder was made in another process; make one after the fork")
        with self._submitting:
            if self._closing:
                end_thread_at_exit()
                raise EngineClosedError("the embedder is closed")
            self._inbox.put(call)

    def close(self, drain: bool) -> None:
        """End the thread: after all queued calls with ``drain``, otherwise after the current batch."""
        if os.getpid() != self._pid:
            return
        self.close_soon(drain)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        forget(self)

    def close_soon(self, drain: bool = False) -> None:
        """Do what ``close`` does, without waiting for the thread. By default drop the queued calls."""
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
        """Compute a batch, or wait for one. Return False when the thread must end."""
        while not self._inbox.empty() or not (self._calls or self._closing):
            if self._inbox.empty():
                self._context.rest()
                if self._tuner is not None:
                    self._tuner.yield_cores()
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

    def _batch(self) -> list[tuple[EmbedCall, int, list[int]]]:
        """Return the texts of the next batch: one from each call in turn, as many as fit."""
        batch: list[tuple[EmbedCall, int, list[int]]] = []
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

    def _compute(self, batch: Sequence[tuple[EmbedCall, int, list[int]]]) -> None:
        tuner, texts = self._tuner, [text for _, _, text in batch]
        try:
            if tuner is not None and not tuner.member.is_computing:
                tuner.begin()
            rows = self._context.compute(texts)
            if tuner is not None:
                tuner.note_launch(sum(map(len, texts)))
            rows = [
                row if np.isfinite(row).all() else self._context.compute_alone(text)
                for text, row in zip(texts, rows, strict=True)
            ]
        except BaseException as e:
            for call in {call: None for call, _, _ in batch}:
                call.waiting.clear()
                call.answer(e)
            return
        failed = {
            call: None for (call, _, _), row in zip(batch, rows, strict=True) if not np.isfinite(row).all()
        }
        for call in failed:
            call.waiting.clear()
            call.answer(DecodeError("a vector is not finite; the model or its weights are damaged"))
        for (call, index, _), row in zip(batch, rows, strict=True):
            if call in failed:
                continue
            call.rows[index] = row
            call.n_left -= 1
            if call.on_rows is not None:
                call.on_rows(1)
            if not call.n_left:
                call.answer([row for row in call.rows if row is not None])
