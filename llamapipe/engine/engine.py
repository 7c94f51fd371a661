"""The engine: its parts, options and lifetime. Its calls are in ``calls`` and ``chat_calls``."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal

from llamapipe._engine.chat_requests import ChatBuilder
from llamapipe._engine.compute_threads import tuner_of
from llamapipe._engine.executor import StepExecutor
from llamapipe._engine.invariance import check_invariance
from llamapipe._engine.long_work import LongWork
from llamapipe._engine.loop import EngineLoop
from llamapipe._engine.scheduler import MODES, Overflow, Scheduler
from llamapipe._engine.snapshot import Layout
from llamapipe._engine.submit import QueueLimit, RequestBuilder, RequestObserver, Submission
from llamapipe._engine.thread import EngineThread
from llamapipe.arguments import check_choice, check_flag, check_float, check_int, explains_options
from llamapipe.engine.cache import cache_of
from llamapipe.engine.chat_calls import ChatCalls
from llamapipe.host.memory import free_memory, return_freed_memory
from llamapipe.kv_events.options import KvEvents
from llamapipe.llama.context import Context, state_version
from llamapipe.llama.kv_memory import kv_bytes
from llamapipe.llama.model import MODEL_OPTIONS, Model
from llamapipe.llama.native_pipeline import engine_pipeline, on_gpu, ring_slots, wants_graph_sampling
from llamapipe.native.owner import Owner
from llamapipe.params import SamplingParams
from llamapipe.pipeline.trace import Trace, check_trace_path
from llamapipe.results import EngineStats

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "iq4_nl"]
FlashAttention = Literal["auto", "on", "off"]
_MAX_WINDOW_US = 1_000_000
SCORE_ROWS = 32  # maximum output rows of a step for scored tokens; bounds their memory
# On a CPU a prompt token takes hardly longer in a step of 256 than in one of 512.
PREFILL_CUTOFF_TOKENS = 256


class Engine(ChatCalls, Owner):
    """Serves any number of threads and asyncio tasks from one context.

    - ``model``: a ``Model``, or the path of a GGUF file, which the engine then loads, owns and closes.
    - ``n_ctx``: positions each request may use, prompt and generated; default: the smaller of the model's training
      context and 4096. ``n_seq_max``: requests computed at once; others wait. ``n_cells``: KV cells in total; default:
      ``n_ctx * n_seq_max``. Another number makes the KV cache unified; requests are preempted when cells run out.
    - ``kv_unified``: one KV cache shared by all requests (True) or a separate part for each (False); None: unified
      only if ``n_cells`` is given. ``type_k``, ``type_v``: the types of keys and values in the KV cache; the quantized
      ones take less memory. ``flash_attn``: ``"auto"`` uses flash attention where the backend supports it.
    - ``n_batch``: maximum tokens of a step. ``n_ubatch``: maximum tokens that llama.cpp computes at a time.
    - ``n_threads``: compute threads. Default: the cores this process may use, or fewer in a container with a CPU
      limit, and fewer for as long as other work needs the cores; with ``kernels="ggml"`` this may change how texts
      of 512 tokens or more are rounded (``docs/design/cpu.md``). A given number stays fixed: more threads than
      free cores slow the engine down several-fold. ``n_threads_batch``: the same for steps of more than one token;
      default: ``n_threads``.
    - ``batch_window_us``: microseconds that an idle engine waits after a request for others to join the step.
    - ``pipeline_depth``: steps in flight at once. With 1 each is sampled and delivered before the next is launched,
      with 2 delivery overlaps with computing. Default: 2 on a device; 1 on a CPU, which the overlap would slow down.
    - ``max_queue``: maximum number of requests that wait for a slot; None: no limit.
    - ``trace``: True records a timeline in the attribute ``trace``; a path also writes it there when the engine
      closes, as ``.json`` (Perfetto) or ``.svg``.
    - ``prefix_cache``: keep the KV cells of ended requests, so that requests that begin with the same tokens need not
      compute them; see ``docs/guides/memory.md``. ``"exact"`` reuses fewer, so that logits are bitwise those without
      the cache. ``cache_bytes``: host memory for cells that have lost their slot;
      default: a tenth of the free memory, 0: none.
    - ``max_itl_ms``: cut prompts into chunks so that streams wait at most about this long between two tokens; None:
      a step has up to ``n_ubatch`` tokens. A chunk has at least 64 tokens, so a slow machine may take longer.
    - ``overflow``: what happens to a request that has filled ``n_ctx``. ``"stop"``: it ends, with ``"length"``.
      ``"recompute"``: it keeps its first ``n_keep`` tokens (at least the BOS token) and the newer half of the others,
      which are computed again; its text then ends only by ``max_tokens``, a stop string or an end token. ``"shift"``:
      the same without computing them again, with llama.cpp's shift of positions. That is faster and only approximate;
      it needs ``kv_unified=False`` and a model whose positions can be shifted.
    - ``batch_invariant``: True: the same request gives the same text whatever else runs, or a ValueError here says why
      this model's texts could differ; see ``docs/sampling.md``.
    - ``kv_events``: publish what the prefix cache holds, for routers; see ``docs/guides/routers.md``. The attribute of
      this name has the addresses that are in use. Needs the extra ``kv-events``.
    - ``ring``: how outputs are read: ``"auto"``, ``"events"`` or ``"sync"``, or ``"off"`` for llama.cpp's own output
      buffer. ``graph_sampling``: sample in the compute graph, so that only tokens are copied to the host: ``"auto"``
      (on GPUs, except software devices), ``"on"`` or ``"off"``.

    Any thread. Close it, or use ``with`` or ``async with``, before its model. After ``fork()`` it refuses work in the
    child.

    Raises TypeError and ValueError for bad options, ModelLoadError for a bad file, BackendError if the context cannot
    be created.
    """

    _elsewhere = dict.fromkeys(("embed", "rerank"), "an Embedder has it: Embedder(model)") | {
        "tokenize": "the model has it: engine.model.tokenize",
        "detokenize": "the model has it: engine.model.detokenize",
    }

    @explains_options({"SamplingParams": SamplingParams.__dataclass_fields__, "Model": MODEL_OPTIONS})
    def __init__(
        self,
        model: Model | str | os.PathLike[str],
        n_ctx: int | None = None,
        n_seq_max: int = 8,
        n_cells: int | None = None,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        kv_unified: bool | None = None,
        type_k: CacheType = "f16",
        type_v: CacheType = "f16",
        flash_attn: FlashAttention = "auto",
        batch_window_us: int = 200,
        pipeline_depth: int | None = None,
        max_queue: int | None = None,
        trace: bool | str | Path | None = None,
        ring: Literal["auto", "events", "sync", "off"] = "auto",
        graph_sampling: Literal["auto", "on", "off"] = "auto",
        prefix_cache: bool | Literal["exact"] = True,
        cache_bytes: int | None = None,
        max_itl_ms: float | None = None,
        overflow: Literal["stop", "recompute", "shift"] = "stop",
        n_keep: int = 0,
        kv_events: KvEvents | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self._owns_model = isinstance(model, (str, os.PathLike))
        if not isinstance(model, (Model, str, os.PathLike)):
            raise TypeError(f"model must be a Model or the path of a GGUF file, not {type(model).__name__}")
        depth = None if pipeline_depth is None else check_int("pipeline_depth", pipeline_depth, 1, 2)
        self._trace_path = _trace_path(trace)
        cache_mode = prefix_cache if prefix_cache == "exact" else check_flag("prefix_cache", prefix_cache)
        max_itl_s = None if max_itl_ms is None else check_float("max_itl_ms", max_itl_ms, 1, 1e6) / 1e3
        n_cache_bytes = None if cache_bytes is None else check_int("cache_bytes", cache_bytes, 0, 2**63 - 1)
        if kv_events is not None and not isinstance(kv_events, KvEvents):
            raise TypeError(f"kv_events must be KvEvents or None, not {type(kv_events).__name__}")
        if kv_events is not None and not cache_mode:
            raise ValueError("kv_events tells what the prefix cache holds, but prefix_cache is False")
        window_us = check_int("batch_window_us", batch_window_us, 0, _MAX_WINDOW_US)
        self._queue = QueueLimit(
            None if max_queue is None else check_int("max_queue", max_queue, 1, 2**31 - 1)
        )
        # Per-sequence KV is faster if no cells are shared.
        unified = n_cells is not None if kv_unified is None else kv_unified
        # After an error or Ctrl-C the caller has no object to close: each line that creates something also stores it.
        with ExitStack() as undo:
            if not isinstance(model, Model):
                model = undo.enter_context(closing(Model(model)))
            new_context = partial(
                Context,
                model,
                n_ctx=n_ctx,
                n_seq_max=n_seq_max,
                n_cells=n_cells,
                n_batch=n_batch,
                n_ubatch=n_ubatch,
                n_outputs_max=1,  # raised to n_seq_max: a decoding sequence has one at a time
                n_more_outputs=SCORE_ROWS,
                n_threads=n_threads,
                n_threads_batch=n_threads_batch,
                kv_unified=unified,
                type_k=type_k,
                type_v=type_v,
                flash_attn=flash_attn,
                n_ring_slots=ring_slots(model, ring, 2 if depth is None else depth + 1),
                graph_sampling=wants_graph_sampling(model, ring, graph_sampling),
                batch_invariant=check_flag("batch_invariant", batch_invariant),
            )
            context = undo.enter_context(closing(new_context()))
            if batch_invariant:
                check_invariance(
                    model, unified, flash_attn, partial(new_context, n_ring_slots=0, graph_sampling=False)
                )
            if not model.is_causal:
                raise ValueError(
                    f"{model.path.name} is not causal, so it cannot generate text; "
                    "pass a generative model, or use lp.Embedder for embeddings"
                )
            padding_token = None if unified or model.is_recurrent else 0
            self._types = (type_k, type_v, 1 if unified else context.n_seq_max)
            self._kv_bytes = kv_bytes(model, context.n_cells, type_k, type_v) or 0
            publisher = tracker = None
            if kv_events is not None:
                from llamapipe.kv_events.publisher import Publisher

                publisher = undo.enter_context(closing(Publisher(kv_events, model.path.stem)))
                tracker = publisher.tracker
            scheduler = Scheduler(
                cache_of(context, cache_mode, n_cache_bytes, self._kv_bytes, tracker),
                context.n_ctx,
                context.n_cells,
                context.n_batch,
                context.n_ubatch,
                padding_token,
                n_score_rows=max(context.n_outputs_max - context.n_seq_max, 1),
                prefill_cutoff=prefill_cutoff(context),
                max_itl_s=max_itl_s,
                overflow=_overflow(context, overflow, n_keep),
            )
            self.model = model
            self.n_ctx = context.n_ctx
            self.n_seq_max = context.n_seq_max
            self.n_cells = context.n_cells
            self._context_repr = repr(context)
            model.adopt(context, f"Engine(n_ctx={context.n_ctx}, n_seq_max={context.n_seq_max})")
            _warn_of_size(context, self._kv_bytes)
            pipeline = undo.enter_context(closing(engine_pipeline(context, ring, depth)))
            # "exact" can share only whole batches, and these models only whole sequences.
            shares = cache_mode is True and not model.is_recurrent and not model.n_swa
            # Where cells are scarce, a request may cost others the cells that they share; a full queue refuses them.
            shares = (
                shares and not self._queue.is_limited and context.n_cells >= context.n_ctx * context.n_seq_max
            )
            n_sharing = context.n_seq_max // 2 if shares else 1  # the other slots are for other callers
            self._request_builder = RequestBuilder(model, context.n_ctx, n_sharing)
            self._chat_builder = ChatBuilder(model, self._request_builder)
            tuner = tuner_of(context, pipeline.threaded, is_fixed=bool(n_threads or n_threads_batch))
            executor = StepExecutor(pipeline, tuner)
            loop = EngineLoop(scheduler, executor, window_us * 1e-6, self._queue.left)
            loop.kv_events = publisher
            loop.long_work = self._long_work = LongWork()
            self.kv_events = None if publisher is None else publisher.options
            engine_thread = EngineThread(loop)
            undo.callback(engine_thread.close, drain=False)
            self._engine_thread = engine_thread
            self._submission = Submission(engine_thread, self._queue)
            self.trace = loop.trace = Trace(pipeline)
            if tuner is not None:
                tuner.trace = self.trace
            if trace:
                self.trace.start()
            engine_thread.start()
            undo.pop_all()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"n_queued={self._queue.n}"
        kv = f" kv={self._kv_bytes / 2**20:.0f}MiB" if self._kv_bytes else ""
        packed = self.model.packed_bytes
        kernels = f" kernels={self.model.kernels}" + (f" packed={packed / 2**20:.0f}MiB" if packed else "")
        return f"<Engine {state} {self._context_repr}{kv}{kernels} {self.model.path.name!r}>"

    def check_params(self, params: SamplingParams) -> None:
        """Checks params for this model, and compiles their constraint, which may take long. Any thread.

        Later requests reuse the result. Call this in a worker thread before ``astream``, to keep the event loop free.
        Raises as ``generate`` does.
        """
        self._request_builder.check_params(params)

    # ---- state
    def stats(self) -> EngineStats:
        """A consistent copy of the counters; waits for the end of the running step."""
        return replace(self._engine_thread.stats(), queue_times=self._queue.times())

    def check_integrity(self) -> None:
        """Raises AssertionError when the engine's bookkeeping is inconsistent. For tests and debugging."""
        self._engine_thread.ask(self._engine_thread.loop.check_integrity)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._engine_thread.closing

    def close(self, drain: bool = True) -> None:
        """Ends the engine and frees its native memory before it returns; a second call does nothing.

        ``drain``: finish the requests that callers wait for; otherwise cancel them. New requests are refused. Any
        thread.
        """
        was_open = not self.closed
        self._engine_thread.close(check_flag("drain", drain))
        if self._submission.observer is not None:
            self._submission.observer.close()
        if was_open and self._trace_path is not None and not self._engine_thread.in_child():
            self.trace.save(self._trace_path)
        if self._owns_model:
            self.model.close()
        elif was_open:
            return_freed_memory()

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

    def _observe(self, observer: RequestObserver | None) -> None:
        """Sets the observer of future requests; None: no observer."""
        self._submission.observer = observer

    def _layout(self) -> Layout:
        return Layout(self.model.fingerprint, state_version(), *self._types)

    def __del__(self) -> None:
        engine_thread = getattr(self, "_engine_thread", None)
        if engine_thread is not None and not engine_thread.closing and not engine_thread.in_child():
            warnings.warn(
                f"{self!r} was never closed; use `with` or close()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
            engine_thread.close_soon()


def _overflow(context: Context, mode: str, n_keep: int) -> Overflow:
    """Checks the options for a full context."""
    check_choice("overflow", mode, MODES)
    n = check_int("n_keep", n_keep, 0, 2**31 - 1)
    if mode == "stop" and n:
        raise ValueError(
            f"n_keep is {n}, but overflow is 'stop', which drops nothing: choose 'recompute' or 'shift'"
        )
    if mode == "stop":
        return Overflow()
    if n > context.n_ctx - 4:
        raise ValueError(
            f"n_keep is {n} and n_ctx {context.n_ctx}; that leaves too little to drop: n_keep is at most "
            f"{context.n_ctx - 4}"
        )
    if mode == "shift" and context.kv_unified:
        raise ValueError(
            "overflow='shift' moves cells, and with a unified KV cache requests share them: use "
            "overflow='recompute', or leave n_cells and kv_unified out"
        )
    if mode == "shift" and not context.can_shift:
        raise ValueError(
            f"the positions of {context.model.path.name} cannot be shifted: use overflow='recompute'"
        )
    return Overflow(mode, max(n, int(context.model.vocab.add_bos)))


def _warn_of_size(context: Context, n_bytes: int) -> None:
    """Logs a warning about sizes that work but are rarely meant."""
    log = logging.getLogger("llamapipe")
    if context.n_ctx > context.model.n_ctx_train:
        log.warning(
            "n_ctx is %d, but the model was trained with %d: longer texts are likely to be of poor quality",
            context.n_ctx,
            context.model.n_ctx_train,
        )
    free = free_memory()
    on_host = all(device.type == "cpu" for device in context.model.devices)
    if on_host and free is not None and n_bytes > (free + n_bytes) / 2:
        log.warning(
            "the KV cache takes %.1f GiB, more than half of the %.1f GiB that were free: "
            "a smaller n_ctx, n_seq_max or n_cells, or type_k and type_v 'q8_0', take less",
            n_bytes / 2**30,
            (free + n_bytes) / 2**30,
        )


def prefill_cutoff(context: Context) -> int | None:
    """Prompt tokens after which a step is cut short to deliver a stream's first token early; None: no such limit."""
    # A GPU reads all weights in each step, even for a few tokens.
    return None if on_gpu(context.model) else PREFILL_CUTOFF_TOKENS


def _trace_path(trace: bool | str | Path | None) -> Path | None:
    if trace is None or isinstance(trace, bool):
        return None
    if not isinstance(trace, (str, Path)):
        raise TypeError(f"trace must be True, a path or None, not {type(trace).__name__}")
    return check_trace_path(trace)
