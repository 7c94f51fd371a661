"""The engine: what callers use. Hands checked requests to the engine thread and waits for answers."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, overload

from llamapipe.arguments import check_flag, check_float, check_int
from llamapipe.engine.delivery.mailbox import AsyncMailbox, ThreadMailbox
from llamapipe.engine.frontend.progress import progress_bar
from llamapipe.engine.frontend.queue_limit import QueueLimit
from llamapipe.engine.frontend.request_builder import Prompt, RequestBuilder
from llamapipe.engine.frontend.score_jobs import ScoreJob, perplexity_job, score_job, tokens_job
from llamapipe.engine.frontend.submission import Make, Submission
from llamapipe.engine.generation import Generation
from llamapipe.engine.params import SamplingParams
from llamapipe.engine.results import Completion, EngineStats
from llamapipe.engine.scheduler.request import Request
from llamapipe.engine.scheduler.scheduler import Scheduler
from llamapipe.engine.stream import BUFFER_TOKENS, AsyncStream, Stream
from llamapipe.engine.worker.engine_loop import EngineLoop
from llamapipe.engine.worker.engine_thread import EngineThread, single_caller
from llamapipe.engine.worker.executor import StepExecutor
from llamapipe.llama.context import Context
from llamapipe.llama.model import Model
from llamapipe.llama.native_pipeline import engine_pipeline, on_gpu, ring_slots, wants_graph_sampling
from llamapipe.pipeline.trace import Trace, check_trace_path

_MAX_WINDOW_US = 1_000_000
SCORE_ROWS = 32  # of a step, for tokens that are not generated: what they take is bounded by this
# Of prompts, for a step of a CPU: 256 take hardly longer each than 512 (docs/decisions.md).
PREFILL_CUTOFF_TOKENS = 256


class Engine:
    """Serves any number of threads and asyncio tasks from one context.

    ``n_ctx``: positions each request may use, prompt and generated (default: the smaller of the model's training
    context and 4096). ``n_seq_max``: requests computed at once; more wait. ``n_cells``: KV cells in all; fewer than
    ``n_ctx * n_seq_max`` make the KV cache unified, and requests are preempted when cells run out.
    ``batch_window_us``: how long an idle engine waits for siblings of the request that woke it. ``pipeline_depth``:
    steps under way at once: with 1 each is sampled and delivered before the next is launched, with 2 delivery overlaps
    with computing (default: 2 where a device computes, 1 where the CPU does, which the overlapped work would slow
    down). ``max_queue``: most requests that wait for a slot, None for any number. ``trace``: True records what runs
    when, for the attribute ``trace``; a path also writes it there when the engine closes, as ``.json`` or ``.svg``.
    ``ring``: how outputs are read: ``"auto"``, ``"events"`` or ``"sync"``, or ``"off"`` for llama.cpp's own buffer (see
    ``docs/backends.md``). ``graph_sampling``: sample in the compute graph what can be, so that only tokens come back:
    ``"auto"`` (on a GPU that is no software device), ``"on"`` or ``"off"``. For the other options see ``Context``.

    Any thread. Close it, or use ``with`` or ``async with``, before its model. In a child after ``fork()`` its use is
    refused.

    Raises TypeError and ValueError for bad options, BackendError when the context cannot be created.
    """

    def __init__(
        self,
        model: Model,
        n_ctx: int | None = None,
        n_seq_max: int = 8,
        n_cells: int | None = None,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        kv_unified: bool | None = None,
        type_k: str = "f16",
        type_v: str = "f16",
        flash_attn: str = "auto",
        batch_window_us: int = 200,
        pipeline_depth: int | None = None,
        max_queue: int | None = None,
        trace: bool | str | Path | None = None,
        ring: str = "auto",
        graph_sampling: str = "auto",
    ) -> None:
        if not isinstance(model, Model):
            raise TypeError(f"model must be a Model, not {type(model).__name__}")
        depth = None if pipeline_depth is None else check_int("pipeline_depth", pipeline_depth, 1, 2)
        self._trace_path = _trace_path(trace)
        window_us = check_int("batch_window_us", batch_window_us, 0, _MAX_WINDOW_US)
        self._queue = QueueLimit(
            None if max_queue is None else check_int("max_queue", max_queue, 1, 2**31 - 1)
        )
        # docs/decisions.md: per-sequence streams are faster where no cells are shared.
        unified = n_cells is not None if kv_unified is None else kv_unified
        new_context = partial(
            Context,
            model,
            n_ctx=n_ctx,
            n_seq_max=n_seq_max,
            n_cells=n_cells,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_outputs_max=1,  # raised to n_seq_max: a sequence that is continued has one at a time
            n_more_outputs=SCORE_ROWS,
            n_threads=n_threads,
            n_threads_batch=n_threads_batch,
            kv_unified=unified,
            type_k=type_k,
            type_v=type_v,
            flash_attn=flash_attn,
            n_ring_slots=ring_slots(model, ring, 2 if depth is None else depth + 1),
            graph_sampling=wants_graph_sampling(model, ring, graph_sampling),
        )
        # Bad sizes, or Ctrl-C: nobody will have this object to close. What is made is kept on the same line.
        with ExitStack() as undo:
            context = undo.enter_context(closing(new_context()))
            if not model.is_causal:
                raise ValueError(
                    f"{model.path.name} is not causal: it reads whole texts and continues none; "
                    "give a model that generates"
                )
            padding_token = None if unified or model.is_recurrent else 0
            scheduler = Scheduler(
                context.n_seq_max,
                context.n_ctx,
                context.n_cells,
                context.n_batch,
                context.n_ubatch,
                padding_token,
                n_score_rows=max(context.n_outputs_max - context.n_seq_max, 1),
                min_prefix_copy=min_prefix_copy(context),
                prefill_cutoff=prefill_cutoff(context),
            )
            self.model = model
            self.n_ctx = context.n_ctx
            self.n_seq_max = context.n_seq_max
            self.n_cells = context.n_cells
            self._context_repr = repr(context)
            pipeline = undo.enter_context(closing(engine_pipeline(context, ring, depth)))
            self._request_builder = RequestBuilder(model, context.n_ctx)
            loop = EngineLoop(scheduler, StepExecutor(pipeline), window_us * 1e-6, self._queue.leave)
            engine_thread = EngineThread(loop)
            undo.callback(engine_thread.close, drain=False)
            self._engine_thread = engine_thread
            self._submission = Submission(engine_thread, self._queue)
            self.trace = loop.trace = Trace(pipeline)
            if trace:
                self.trace.start()
            engine_thread.start()
            undo.pop_all()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"n_queued={self._queue.n}"
        return f"<Engine {state} {self._context_repr} {self.model.path.name!r}>"

    # ---- blocking calls
    @overload
    def generate(
        self,
        prompt: str,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> Any: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> Completion | list[Completion]:
        """Completes a prompt, or several at once, and returns when all are finished.

        ``prompt``: text, token ids, or a list of those; a list gives a list of completions in its order. ``params``:
        for all, or one for each prompt; with ``n`` over 1 there is a list, with each prompt's completions one after
        another. ``timeout``: seconds for the whole call. ``block``: wait for room in the queue,
        or raise QueueFullError. ``progress``: a bar on a terminal (needs tqdm).

        Ctrl-C, a timeout and any error cancel what this call started. Raises InvalidRequestError, TypeError or
        ValueError for bad prompts and options, QueueFullError, TimeoutError, DecodeError, EngineClosedError.
        """
        self._engine_thread.check_open()
        deadline = _deadline(timeout)
        check_flag("block", block)
        check_flag("progress", progress)
        items, single = self._request_builder.items(prompt, params)
        bar = progress_bar(progress, sum(sampler_factory.params.n for _, sampler_factory in items))
        results = self._submission.collect(
            lambda mailbox: self._request_builder.completions(items, mailbox), deadline, block, timeout, bar
        )
        return results[0] if single and len(results) == 1 else results

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
    ) -> Stream:
        """Starts a completion and returns an iterator over its deltas; see ``Stream``. Raises as ``generate`` does."""
        self._engine_thread.check_open()
        deadline = _deadline(timeout)
        check_flag("block", block)
        mailbox = ThreadMailbox(self._engine_thread.dispatcher)
        request = self._request_builder.stream(
            self._request_builder.item(prompt, params), mailbox, BUFFER_TOKENS
        )
        stream = Stream(self._engine_thread, request, mailbox, deadline)
        try:
            if block:
                self._queue.enter(request, deadline)
            else:
                self._queue.enter_at_once(request)
            self._engine_thread.loop.inbox.single_caller = single_caller()
            self._engine_thread.submit(request)
        except BaseException:
            self._submission.cancel([request])
            raise
        return stream

    def start(self, prompt: Prompt, params: SamplingParams | None = None) -> Generation:
        """A generation that computes one token for each call of ``next``, and nothing before the first.

        Raises as ``generate`` does.
        """
        self._engine_thread.check_open()
        item = self._request_builder.item(prompt, params)
        mailbox = ThreadMailbox(self._engine_thread.dispatcher)
        request = self._request_builder.generation(item, mailbox)
        generation = Generation(self._engine_thread, request, mailbox, self.model.n_vocab, self.n_ctx)
        try:
            self._engine_thread.submit(request)
        except BaseException:
            self._submission.cancel([request])
            raise
        return generation

    # ---- scores
    def score(
        self,
        prompt: Prompt | Sequence[Prompt],
        continuation: Any,
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> Any:
        """How probable the model holds a continuation behind a prompt: a Score, or lists of them.

        Prompt and continuation are text or token ids. For one prompt, a list of continuations gives a list. For a list
        of prompts, ``continuation`` has one item for each, or a list of items for each, and so has the result. Equal
        prompts are computed once. Text behind text is tokenized together with it; the continuation is what that adds
        to the prompt's number of tokens.

        Options as for ``generate``. Raises InvalidRequestError where prompt and continuation are longer than ``n_ctx``
        allows or a continuation has no tokens; else as ``generate`` does.
        """
        return self._score(score_job(self.model, prompt, continuation), timeout, block, progress)

    def score_tokens(
        self,
        tokens: Sequence[int] | Sequence[Sequence[int]],
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> Any:
        """How probable each token is behind all before it: a Score of all but the first, or a list of them.

        Options and exceptions as for ``score``.
        """
        return self._score(tokens_job(self.model, tokens), timeout, block, progress)

    def perplexity(
        self,
        tokens: Sequence[int],
        n_window: int | None = None,
        *,
        timeout: float | None = None,
        progress: bool = False,
    ) -> float:
        """The exponential of the mean negative log-probability of a text's tokens, in windows.

        As llama.cpp's perplexity tool defines it: windows of ``n_window`` tokens (default ``n_ctx``) that do not
        overlap, an incomplete last one left out; a BOS token takes the place of each one's first where the vocabulary
        wants one; of each, the tokens behind its first ``n_window // 2 + 1`` count.

        Options and exceptions as for ``score``; InvalidRequestError also for fewer tokens than a window.
        """
        perplexity: float = self._score(
            perplexity_job(self.model, tokens, n_window, self.n_ctx), timeout, True, progress
        )
        return perplexity

    def _score(self, job: ScoreJob, timeout: float | None, block: bool, progress: bool) -> Any:
        self._engine_thread.check_open()
        deadline = _deadline(timeout)
        check_flag("block", block)
        bar = progress_bar(check_flag("progress", progress), job.n_requests)
        answers = self._submission.collect(
            partial(job.requests, self._request_builder), deadline, block, timeout, bar
        )
        return job.result(answers)

    # ---- asyncio
    async def agenerate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
    ) -> Any:
        """``generate`` for asyncio: a Completion, or a list of them for a list of prompts.

        Cancelling the task cancels its requests. Raises as ``generate`` does.
        """
        self._engine_thread.check_open()
        _deadline(timeout)
        check_flag("block", block)
        items, single = self._request_builder.items(prompt, params)
        results = await self._finish(
            lambda mailbox: self._request_builder.completions(items, mailbox), block, timeout
        )
        return results[0] if single and len(results) == 1 else results

    async def ascore(
        self, prompt: Any, continuation: Any, *, timeout: float | None = None, block: bool = True
    ) -> Any:
        """``score`` for asyncio. Cancelling the task cancels its requests."""
        self._engine_thread.check_open()
        _deadline(timeout)
        job = score_job(self.model, prompt, continuation)
        make = partial(job.requests, self._request_builder)
        return job.result(await self._finish(make, check_flag("block", block), timeout))

    async def _finish(self, make: Make, block: bool, timeout: float | None) -> list[Any]:
        # The coroutine is made where it is awaited: Ctrl-C may come between any two lines.
        if timeout is None:
            return await self._submission.acollect(make, block)
        results: list[Any] = await _with_timeout(self._submission.acollect(make, block), float(timeout))
        return results

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
    ) -> AsyncStream:
        """``stream`` for asyncio; the request starts with the first ``__anext__``, bad arguments raise at once."""
        self._engine_thread.check_open()
        deadline = _deadline(timeout)
        check_flag("block", block)
        item = self._request_builder.item(prompt, params)

        async def begin() -> tuple[Request, AsyncMailbox]:
            import asyncio

            mailbox = AsyncMailbox(asyncio.get_running_loop(), self._engine_thread.dispatcher)
            request = self._request_builder.stream(item, mailbox, BUFFER_TOKENS)
            mailbox.requests.append(request)
            try:
                if block:
                    await self._queue.aenter(request)
                else:
                    self._queue.enter_at_once(request)
                self._engine_thread.loop.inbox.single_caller = False
                self._engine_thread.submit(request)
            except BaseException:
                self._submission.cancel([request])
                raise
            return request, mailbox

        return AsyncStream(self._engine_thread, begin, deadline)

    # ---- state
    def stats(self) -> EngineStats:
        """A consistent copy of the counters; waits for the end of the running step."""
        return self._engine_thread.stats()

    def check_integrity(self) -> None:
        """Raises AssertionError when the engine's bookkeeping is inconsistent. For tests and debugging."""
        self._engine_thread.ask(self._engine_thread.loop.check_integrity)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._engine_thread.closing

    def close(self, drain: bool = True) -> None:
        """Ends the engine and frees its native memory before it returns; a second call does nothing.

        ``drain``: finish what callers wait for, else cancel it. New requests are refused from now on. Any thread.
        """
        was_open = not self.closed
        self._engine_thread.close(check_flag("drain", drain))
        if was_open and self._trace_path is not None and not self._engine_thread.in_child():
            self.trace.save(self._trace_path)

    async def aclose(self, drain: bool = True) -> None:
        """``close`` without blocking the event loop."""
        import asyncio

        await asyncio.to_thread(self.close, drain)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose(drain=kind is None)

    def __del__(self) -> None:
        engine_thread = getattr(self, "_engine_thread", None)
        if engine_thread is not None and not engine_thread.closing and not engine_thread.in_child():
            warnings.warn(
                f"{self!r} was never closed; use `with` or close()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    # ---- inside


def min_prefix_copy(context: Context) -> int | None:
    """How many cells of a prompt it pays to copy for another completion of it; None: none."""
    if context.model.is_recurrent:
        return None  # only whole sequences can be copied
    # Unified, cells are shared. Streams are copied whole: docs/decisions.md.
    return 1 if context.kv_unified else 32


def prefill_cutoff(context: Context) -> int | None:
    """After how many tokens of prompts a step ends so that streams get their first tokens; None: by itself never."""
    # A GPU reads the weights for each step, however few tokens it has.
    return None if on_gpu(context.model) else PREFILL_CUTOFF_TOKENS


def _trace_path(trace: bool | str | Path | None) -> Path | None:
    if trace is None or isinstance(trace, bool):
        return None
    if not isinstance(trace, (str, Path)):
        raise TypeError(f"trace must be True, a path or None, not {type(trace).__name__}")
    return check_trace_path(trace)


def _deadline(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    return perf_counter() + min(check_float("timeout", timeout, 0, math.inf), threading.TIMEOUT_MAX)


async def _with_timeout(work: Any, timeout: float) -> Any:
    import asyncio

    try:
        return await asyncio.wait_for(work, timeout)
    except asyncio.TimeoutError:
        raise TimeoutError(
            f"not finished within the timeout of {timeout} s; what was left is cancelled"
        ) from None
