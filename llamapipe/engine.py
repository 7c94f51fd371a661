"""The engine: its parts, options and lifetime, and its calls.

Open this file to see what an engine is made of, and what a call does before it submits its requests and after it has
their results. ``_engine/calls/submission.py`` has what happens in between.
"""

from __future__ import annotations

import logging
import os
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from contextlib import ExitStack, aclosing, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, overload

from llamapipe._engine.calls.call_options import ERROR_MODES, CallOptions, OnError, OnTimeout, call_options
from llamapipe._engine.calls.chat import ChatBuilder, CheckedChat
from llamapipe._engine.calls.observed import observed_request
from llamapipe._engine.calls.prompts import CheckedPrompt, RequestBuilder, RequestFactory, in_order_of_prompts
from llamapipe._engine.calls.queue_limit import QueueLimit
from llamapipe._engine.calls.scores import ScoreJob, perplexity_job, score_job, tokens_job
from llamapipe._engine.calls.submission import END, Pending, as_async, no_requests
from llamapipe._engine.policy.core import Request
from llamapipe._engine.policy.kv import MIN_PREFIX, KvCache
from llamapipe._engine.policy.overflow import Overflow
from llamapipe._engine.policy.planner import LEAST_CHUNK
from llamapipe._engine.policy.scheduler import Scheduler
from llamapipe._engine.policy.speculation import MOST_GUESSED, Drafter, Gate
from llamapipe._engine.runtime.compute_threads import make_tuner
from llamapipe._engine.runtime.disk_cache import DiskCache, Writes, read_sequence, sequence_of, write_sequence
from llamapipe._engine.runtime.draft import AssistantDraft, make_drafter, make_mtp_drafter
from llamapipe._engine.runtime.draft_checks import check_draft_file, mtp_problem
from llamapipe._engine.runtime.encoder import MediaEncoder
from llamapipe._engine.runtime.executor import StepExecutor
from llamapipe._engine.runtime.invariance import check_invariance
from llamapipe._engine.runtime.loop import EngineLoop
from llamapipe._engine.runtime.mailboxes import AsyncMailbox, Mailbox
from llamapipe._engine.runtime.state_layout import StateLayout
from llamapipe._engine.runtime.thread import EngineThread
from llamapipe._messages import explains_fields, explains_keywords, explains_options, quoted
from llamapipe._options import MTP_CHOICES
from llamapipe._sync.engine import BlockingCalls
from llamapipe._sync.submission import BlockingSubmission
from llamapipe.arguments import (
    check_choice,
    check_flag,
    check_int,
    choice_of,
    float_of,
    int_of,
    path_of,
    refuse_table,
)
from llamapipe.chat.options import ChatOptions, Conversation, ReasoningFormat, ToolChoice, Truncation
from llamapipe.errors import BackendError, InvalidRequestError
from llamapipe.gguf.draft_file import DRAFT_KINDS
from llamapipe.host.memory import free_memory, return_freed_memory
from llamapipe.kv_events import KvEvents
from llamapipe.llama.adapter import Adapter, AdapterChoice, ControlVector, carries, local_file
from llamapipe.llama.context import Context
from llamapipe.llama.fim import FimExtra, FimOrder, fim_text
from llamapipe.llama.kv_memory import MemorySizes, kv_bytes, model_sizes, stores_values
from llamapipe.llama.model import MODEL_OPTIONS, Model, warn_of_context
from llamapipe.llama.native_pipeline import (
    NativePipeline,
    empty_states,
    engine_pipeline,
    on_gpu,
    ring_slots,
    wants_graph_sampling,
)
from llamapipe.llama.rope import Rope, Scaling
from llamapipe.locks import check_threads
from llamapipe.native.owner import AsyncOwner
from llamapipe.ollama_models import model_of
from llamapipe.params import SamplingParams, check_salt
from llamapipe.pipeline.trace import Trace, check_trace_path
from llamapipe.results import ChatCompletion, Completion, EngineStats, Score
from llamapipe.streams import (
    BUFFER_TOKENS,
    AsyncChatStream,
    AsyncGeneration,
    AsyncStream,
    CachedPrefix,
    submit_at_once,
)
from llamapipe.types import Prompt, RequestObserver, ResponseFormat, TokenIds, ToolDefinition
from llamapipe.work.long_work import LongWork, running_loop, size_of, takes_long, to_thread
from llamapipe.work.progress import Progress, progress_bar
from llamapipe.work.tenant import conversation_key, is_of, own_key, tenant

if TYPE_CHECKING:
    from llamapipe.kv_events import Publisher

T = TypeVar("T")
_CACHE_DIR_BYTES = 10 * 2**30
_log = logging.getLogger("llamapipe")
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "iq4_nl"]
FlashAttention = Literal["auto", "on", "off"]
_N_STATES = 8  # recurrent states of a sequence, one after each of its last tokens, to take back wrong guesses
# In cells. With unified KV, the attention of every step passes over parked cells. Devices read the cells; our kernels
# read only their entries in the mask, and 7,000 of these took 2 % of a step of a 135M model.
_MAX_PARKED_UNIFIED, _MAX_PARKED_SKIPPED = 512, 8192
_META_BYTES = 16  # position and sequence of a saved cell
SCORE_ROWS = 32  # maximum output rows of a step for scored tokens; bounds their memory
# On a CPU a prompt token takes hardly longer in a step of 256 than in one of 512.
PREFILL_CUTOFF_TOKENS = 256


@explains_fields
@dataclass(frozen=True)
class EngineTuning:
    """Options of an engine that few programs need: ``Engine(model, tuning=EngineTuning(n_ubatch=1024))``. Frozen.

    - ``n_batch``: maximum tokens of a step. ``n_ubatch``: maximum tokens that llama.cpp computes at a time.
    - ``n_threads_batch``: compute threads for steps of more than one token; default: ``n_threads``.
    - ``kv_unified``: one KV cache shared by all requests (True) or a separate part for each (False); None: unified
      only if ``n_cells`` is given.
    - ``swa_full``: whether layers with a sliding window keep all cells, so that prefixes are reused as in other models
      (True), or the cells of the last window only, in a fraction of the memory (False). None: True, unless the cells
      would take more than a quarter of the free memory.
    - ``moe_cache_size``: bytes of GPU memory for experts that ``Model(n_cpu_moe=...)`` keeps on the CPU: the most
      recently used are computed on the GPU. None: no such cache. It is experimental in llama.cpp.
    - ``yarn_ext_factor``, ``yarn_attn_factor``, ``yarn_beta_fast``, ``yarn_beta_slow``: details of ``rope_scaling``
      ``"yarn"``, with llama.cpp's names; None: the file's values, or the paper's (arXiv 2309.00071).
    - ``min_room``: tokens of the context that a prompt must leave for its answer, or ``max_tokens`` if that is fewer;
      longer prompts are refused. With 1, the default, an agent may get an answer of one token where it should have
      shortened its conversation.
    - ``batch_window_us``: microseconds that an idle engine waits after a request for others to join the step.
    - ``pipeline_depth``: steps in flight at once. With 1, each step is sampled and delivered before the next is
      launched; with 2, delivery overlaps with computing. Default: 2 on a device; 1 on a CPU, which the overlap would
      slow down.
    - ``ring``: how outputs are read: ``"auto"``, ``"events"`` or ``"sync"``, or ``"off"`` for llama.cpp's own output
      buffer. ``graph_sampling``: sample in the compute graph, so that only tokens are copied to the host: ``"auto"``
      (on GPUs, except software devices), ``"on"`` or ``"off"``.
    - ``kv_events``: a ``KvEvents``: publish the contents of the prefix cache, for routers; see
      ``docs/guides/routers.md``. Needs the extra ``kv-events``.
    - ``trace``: True records a timeline in the engine's attribute ``trace``. A path does the same, and the timeline is
      written to this file when the engine closes, as ``.json`` (Perfetto) or ``.svg``.

    Values are checked when an engine is made. Raises TypeError for unknown options.
    """

    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads_batch: int | None = None
    kv_unified: bool | None = None
    swa_full: bool | None = None
    moe_cache_size: int | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None
    min_room: int = 1
    batch_window_us: int = 200
    pipeline_depth: int | None = None
    ring: Literal["auto", "events", "sync", "off"] = "auto"
    graph_sampling: Literal["auto", "on", "off"] = "auto"
    kv_events: KvEvents | None = None
    trace: bool | str | Path | None = None


_NO_TUNING = EngineTuning()


def with_tuning(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``Engine``, made from a flat mapping of options, such as those of a command line.

    The options of EngineTuning become the argument ``tuning``.
    """
    tuned = {name: value for name, value in options.items() if name in EngineTuning.__dataclass_fields__}
    if not tuned:
        return dict(options)
    rest = {name: value for name, value in options.items() if name not in tuned}
    return rest | {"tuning": replace(rest.get("tuning", _NO_TUNING), **tuned)}


class Engine(BlockingCalls, AsyncOwner):
    """Generates text for any number of threads and asyncio tasks at once, with one context.

    - ``model``: a ``Model``, or the path of a GGUF file, which the engine then loads, owns and closes.
    - ``n_ctx``: tokens of each request, prompt and output together; default: the smaller of the model's training
      context and 4096.
    - ``n_seq_max``: maximum number of requests computed at the same time; others wait.
    - ``n_cells``: KV cells in total, in one KV cache that all requests share; requests are preempted when cells run
      out. None: ``n_ctx`` separate cells for each of ``n_seq_max`` requests.
    - ``rope_scaling``, ``rope_freq_base``, ``rope_freq_scale``, ``yarn_orig_ctx``: how positions are scaled for texts
      that are longer than the model's context (``docs/guides/long-contexts.md``), with llama.cpp's names; None: as the
      file says. ``rope_scaling="yarn", rope_freq_scale=0.25`` is for four times the model's context.
    - ``type_k``, ``type_v``: the types of keys and values in the KV cache; the quantized ones take less memory.
      ``flash_attn``: ``"auto"`` uses flash attention where the backend supports it.
    - ``n_threads``: compute threads. Default: the cores that this process may use, within a container's CPU limit, and
      fewer while other work needs the cores. With ``kernels="ggml"`` this may change how texts of 512 tokens or more
      are rounded (``docs/sampling.md``). An explicit number stays fixed; more threads than free cores slow the engine
      down several-fold.
    - ``prefix_cache``: keep the KV cells of ended requests, so that requests that begin with the same tokens need not
      compute them (``docs/guides/memory.md``). ``"exact"`` reuses fewer cells, so that logits are bitwise equal to
      those without the cache.
    - ``cache_bytes``: bytes of host memory for cached cells that lose their slot to another request; default: a tenth
      of the free memory; 0: none.
    - ``cache_dir``: a folder that keeps cached prefixes across restarts, and those that host memory has no room for
      (``docs/guides/memory.md``). All models that use the folder together take at most ``cache_dir_bytes``; default: 10
      GiB.
    - ``max_itl_ms``: cut prompts into chunks, so that streams wait at most about this many milliseconds between two
      tokens; None: a step may have up to ``n_ubatch`` tokens. A chunk has at least 64 tokens, so a slow machine may
      take longer.
    - ``overflow``: what happens to a request that has filled ``n_ctx``. ``"stop"``: it ends with ``"length"``.
      ``"recompute"``: it keeps its first ``n_keep`` tokens (at least the BOS token) and the newer half of the others,
      which are computed again; only ``max_tokens``, a stop string or an end token then ends its text. ``"shift"``: it
      keeps the same tokens but does not compute them again; llama.cpp shifts their positions. This is faster but only
      approximate. It needs a separate KV cache for each request (no ``n_cells``) and a model whose positions can be
      shifted.
    - ``max_queue``: maximum number of requests that wait for a slot; None: no limit.
    - ``draft``: what guesses several tokens for each step (``docs/guides/performance.md``): a smaller model of the same
      family, an EAGLE-3 or DFlash draft or a Gemma 4 assistant for the model, or the path of one; ``"mtp"``: the
      model's own layer that predicts the token after the next; ``"auto"``: that layer, if the file has one. It changes
      the number of steps, never the text, and is used only where it saves time. A path is loaded with the model's
      ``kernels`` and ``packed_cache``, and closed with the engine; close a ``Model`` yourself, after the engine. A
      draft that does not belong to the model is refused; the error says what differs.
    - ``batch_invariant``: the same request gives the same text whatever else runs (``docs/sampling.md``). Raises
      ValueError, with the reason, for a model whose texts could differ.
    - ``adapters``: the adapters that requests may name (``SamplingParams.adapter``), or their names; empty: all that
      the model has loaded, now or later. ``docs/guides/adapters.md`` says which adapters share a step.
    - ``tuning``: options that few programs need; see ``EngineTuning``.

    The attributes ``model``, ``n_ctx``, ``n_seq_max`` and ``n_cells`` hold the values in use, ``kv_events`` the
    addresses that KV events are sent from, and ``trace`` the timeline.

    Chats need the extra ``chat``. In their calls, ``messages`` is a list of messages, ``{"role": ..., "content":
    ...}``, or a str, which is a single user message. ``params`` is as for ``generate``, except that ``max_tokens`` is
    None by default: the answer ends where the model ends it. ``tools``: Python functions, JSON schemas in OpenAI's
    form, or ``Tool`` objects. ``tool_choice``: ``"auto"``, ``"none"``, ``"required"`` or the name of a tool;
    ``"required"`` forces calls, and a name forces exactly one call of that tool. ``parallel_tool_calls``: allow several
    calls in one answer. ``response_format``: a JSON schema, or a class with ``model_json_schema``, that the answer must
    match. ``template_args``: further variables of the model's template, such as ``{"enable_thinking": False}``.
    ``continue_last``: the answer continues the last message, which must be the assistant's, and holds only the added
    text. It continues the ``"content"`` or the ``"reasoning"``; True means the last of the two that the message has.
    ``reasoning_format``: ``"auto"`` puts reasoning in ``.reasoning``, ``"none"`` leaves it in the content with its
    markers, ``"deepseek-legacy"`` does both. ``truncation``: ``"auto"`` drops the oldest turns of a conversation that
    fills the context, but not the system messages at its beginning; ``"error"`` refuses it.

    Any thread. Close the engine before its model, or use ``with`` or ``async with``. After ``fork()`` it refuses work
    in the child.

    Raises TypeError and ValueError for bad options (``docs/reference/options.md`` has the ranges), ModelLoadError for a
    bad file, BackendError if the context cannot be created, ImportError if an option needs an extra that is missing.
    """

    @explains_options(
        {
            "EngineTuning": EngineTuning.__dataclass_fields__,
            "SamplingParams": SamplingParams.__dataclass_fields__,
            "Model": MODEL_OPTIONS,
        }
    )
    def __init__(
        self,
        model: Model | str | os.PathLike[str],
        n_ctx: int | None = None,
        n_seq_max: int = 8,
        n_cells: int | None = None,
        n_threads: int | None = None,
        type_k: CacheType = "f16",
        type_v: CacheType = "f16",
        flash_attn: FlashAttention = "auto",
        prefix_cache: bool | Literal["exact"] = True,
        cache_bytes: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_dir_bytes: int | None = None,
        max_itl_ms: float | None = None,
        rope_scaling: Scaling | None = None,
        rope_freq_base: float | None = None,
        rope_freq_scale: float | None = None,
        yarn_orig_ctx: int | None = None,
        overflow: Literal["stop", "recompute", "shift"] = "stop",
        n_keep: int = 0,
        max_queue: int | None = None,
        batch_invariant: bool = False,
        draft: Model | str | os.PathLike[str] | None = None,
        adapters: Sequence[Adapter | ControlVector | str] = (),
        tuning: EngineTuning = _NO_TUNING,
    ) -> None:
        # 1. The options, before anything is created.
        self._owns_model = isinstance(model, (str, os.PathLike))
        _check_types(model, draft, tuning)
        depth = tuning.pipeline_depth
        depth = None if depth is None else int_of("pipeline_depth", depth)
        self._trace_path = _check_trace_path(tuning.trace)
        cache_mode = prefix_cache if prefix_cache == "exact" else check_flag("prefix_cache", prefix_cache)
        max_itl_s = None if max_itl_ms is None else float_of("max_itl_ms", max_itl_ms) / 1e3
        n_cache_bytes = None if cache_bytes is None else int_of("cache_bytes", cache_bytes)
        folder = _check_cache_folder(cache_dir, cache_mode, n_cache_bytes)
        self._uses_files = cache_mode is True and n_cache_bytes != 0
        n_folder_bytes = _CACHE_DIR_BYTES
        if cache_dir_bytes is not None:
            n_folder_bytes = int_of("cache_dir_bytes", cache_dir_bytes)
        kv_events = _check_kv_events(tuning.kv_events, cache_mode)
        window_us = int_of("batch_window_us", tuning.batch_window_us)
        min_room = int_of("min_room", tuning.min_room)
        moe_cache_size = 0
        if tuning.moe_cache_size is not None:
            moe_cache_size = int_of("moe_cache_size", tuning.moe_cache_size)
        rope = Rope(
            rope_scaling,
            rope_freq_base,
            rope_freq_scale,
            yarn_orig_ctx,
            tuning.yarn_ext_factor,
            tuning.yarn_attn_factor,
            tuning.yarn_beta_fast,
            tuning.yarn_beta_slow,
        )
        self._queue = QueueLimit(None if max_queue is None else int_of("max_queue", max_queue))
        # Per-sequence KV is faster if no cells are shared.
        unified = n_cells is not None if tuning.kv_unified is None else tuning.kv_unified
        check_threads()
        # After an error or Ctrl-C the caller has no object to close: each line that creates something also stores it.
        with ExitStack() as undo:
            # 2. The models: the engine's, and one that drafts.
            if not isinstance(model, Model):
                model = undo.enter_context(closing(Model(model, load_mtp=draft in MTP_CHOICES)))
            has_mtp = draft in MTP_CHOICES and _has_mtp(model, draft == "mtp", depth)
            sizes = None
            if model.is_recurrent or model.n_swa:
                sizes = model_sizes(model, choice_of("type_k", type_k), choice_of("type_v", type_v))
            draft = self._load_draft(undo, draft, model)
            depth = _depth_for_drafts(depth, has_mtp, draft)

            # 3. The context: the KV cells, and the buffers of a step.
            swa_full = _choose_swa_full(model, tuning.swa_full, sizes, n_ctx, n_seq_max, n_cells)
            # With unified KV, a step is then one ubatch, and all decoding requests must fit into it.
            keeps_windows = swa_full and (not unified or int_of("n_ubatch", tuning.n_ubatch) >= n_seq_max)
            new_context = partial(
                Context,
                model,
                n_ctx=n_ctx,
                n_seq_max=n_seq_max,
                n_cells=n_cells,
                n_batch=tuning.n_batch,
                n_ubatch=tuning.n_ubatch,
                n_outputs_max=1,  # raised to n_seq_max: a decoding sequence has one at a time
                n_more_outputs=SCORE_ROWS,
                n_threads=n_threads,
                n_threads_batch=tuning.n_threads_batch,
                kv_unified=unified,
                type_k=type_k,
                type_v=type_v,
                flash_attn=flash_attn,
                n_ring_slots=ring_slots(model, tuning.ring, 2 if depth is None else depth + 1, keeps_windows),
                graph_sampling=wants_graph_sampling(model, tuning.ring, tuning.graph_sampling, keeps_windows),
                batch_invariant=check_flag("batch_invariant", batch_invariant),
                n_states=_n_states(model),
                swa_full=swa_full,
                rope=rope,
                moe_cache_size=moe_cache_size,
            )
            context = undo.enter_context(closing(new_context()))
            _check_cache_bytes(context, sizes, n_cache_bytes)
            if batch_invariant:
                check_invariance(
                    model, unified, flash_attn, partial(new_context, n_ring_slots=0, graph_sampling=False)
                )
            _check_use(context, min_room)
            self.model = model
            self.n_ctx, self.n_seq_max, self.n_cells = context.n_ctx, context.n_seq_max, context.n_cells
            self._types, self._rope, self._n_positions = (type_k, type_v), rope, context.n_positions
            self._kv_bytes = kv_bytes(model, context.n_cells, type_k, type_v) or 0
            self._context_repr = repr(context)

            # 4. The policy: what is cached, guessed and computed next.
            publisher = _open_publisher(undo, kv_events, model.name)
            drafter = _open_drafter(undo, context, draft, has_mtp, max_itl_s)
            name = "mtp" if has_mtp else "" if draft is None else draft.path.name
            self._draft_text = f" draft={name!r}" if name else ""
            n_cache_bytes = _free_memory() // 10 if n_cache_bytes is None else n_cache_bytes
            cache = _make_cache(
                context, cache_mode, n_cache_bytes, self._kv_bytes, publisher, folder is not None
            )
            scheduler = _make_scheduler(
                context, cache, drafter, _check_overflow(context, overflow, n_keep), max_itl_s
            )
            model.adopt(context, f"Engine(n_ctx={context.n_ctx}, n_seq_max={context.n_seq_max})")
            _warn_of_size(context, self._kv_bytes)

            # 5. The calls: from arguments to requests.
            self._request_builder = RequestBuilder(
                model,
                context.n_ctx,
                _n_sharing(context, cache, self._queue.limit),
                speculates=scheduler.gate.n_most > 0,
                drafts=drafter is not None,
                drafts_media=isinstance(drafter, AssistantDraft),  # it reads the cells of images
                allowed=model.adapters.select(adapters),
                n_ubatch=context.n_ubatch,
                min_room=min_room,
            )
            self._chat_builder = ChatBuilder(model, self._request_builder)

            # 6. The engine thread, and its helpers.
            pipeline = undo.enter_context(closing(engine_pipeline(context, tuning.ring, depth)))
            self._state_layout = _state_layout(pipeline)
            no_guesses = scheduler.gate.no_guesses
            self.trace = Trace(pipeline, {"no_guesses": no_guesses} if no_guesses else {})
            tuner = make_tuner(
                context,
                pipeline.threaded,
                is_fixed=bool(n_threads or tuning.n_threads_batch),
                trace=self.trace,
            )
            self._long_work = LongWork()
            form = f"{flash_attn} {swa_full} {batch_invariant} {model.kernels}"
            self._disk_cache = self._open_disk_cache(undo, folder, n_folder_bytes, form, context)
            loop = EngineLoop(
                scheduler,
                StepExecutor(pipeline, tuner),
                window_us * 1e-6,
                self._queue.remove,
                self.trace,
                publisher,
                self._long_work,
                None if model.projector is None else MediaEncoder(model.projector),
                self._disk_cache,
            )
            self.kv_events = None if publisher is None else publisher.options
            engine_thread = EngineThread(loop)
            undo.callback(engine_thread.close, drain=False)
            self._engine_thread = engine_thread
            self._submission = BlockingSubmission(engine_thread, self._queue)
            if tuning.trace:
                self.trace.start()
            engine_thread.start()
            undo.pop_all()

    def _load_draft(
        self, undo: ExitStack, draft: Model | str | os.PathLike[str] | None, model: Model
    ) -> Model | None:
        """Return the draft model, loaded if ``draft`` is a path; None if ``draft`` is not a model.

        Raises ValueError.
        """
        self._draft_model: Model | None = None  # None unless the engine loaded it
        if draft is None or draft in MTP_CHOICES:
            return None
        if not isinstance(draft, Model):
            draft = self._draft_model = undo.enter_context(closing(_load_draft_file(draft, model)))
        return draft

    def _open_disk_cache(
        self, undo: ExitStack, folder: Path | None, max_bytes: int, form: str, context: Context
    ) -> DiskCache | None:
        """Open the cache of cells in ``folder``. ``form``: other things that cells depend on. Raises ValueError."""
        if folder is None:
            return None
        if self._state_layout is None:
            _log.warning("cache_dir has no effect: the form of this model's cells in a file is not known")
            return None
        disk = DiskCache(
            folder,
            max_bytes,
            self._snapshot_format(None),  # the adapters are part of the keys
            form,
            self.model.n_vocab,
            self.n_ctx,
            can_cut=not context.needs_states and not self.model.n_swa,
        )
        undo.callback(disk.close)
        return disk

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"n_queued={self._queue.n}"
        kv = f" kv={self._kv_bytes / 2**20:.0f}MiB" if self._kv_bytes else ""
        packed = self.model.packed_bytes
        kernels = f" kernels={self.model.kernels}" + (f" packed={packed / 2**20:.0f}MiB" if packed else "")
        return (
            f"<Engine {state} {self._context_repr}{kv}{kernels} {self.model.path.name!r}{self._draft_text}>"
        )

    def check_params(self, params: SamplingParams) -> None:
        """Check params for this model, and compile their constraint, which may take long. Any thread.

        Later requests reuse the compiled constraint. To keep the event loop free, call this in a worker thread before
        ``astream``.
        Raises as ``generate`` does.
        """
        self._request_builder.check_params(params)

    @property
    def supports_tools(self) -> bool:
        """Whether the model's chat template supports tool calls. Any thread.

        Raises InvalidRequestError without a template, ImportError without the extra ``chat``.
        """
        return self._chat_builder.chat_format().supports_tools

    # ---- asyncio: tools/unasync.py makes the calls for threads, in llamapipe/_sync, from what follows
    @overload
    async def agenerate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        on_error: Literal["raise"] = "raise",
        on_timeout: OnTimeout = "raise",
    ) -> Completion: ...

    @overload
    async def agenerate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        on_error: Literal["return"],
        on_timeout: OnTimeout = "raise",
    ) -> Completion | Exception: ...

    @overload
    async def agenerate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        on_error: Literal["raise"] = "raise",
        on_timeout: OnTimeout = "raise",
    ) -> list[Completion]: ...

    @overload
    async def agenerate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        on_error: Literal["return"],
        on_timeout: OnTimeout = "raise",
    ) -> list[Completion | Exception]: ...

    @explains_keywords
    async def agenerate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        on_error: OnError = "raise",
        on_timeout: OnTimeout = "raise",
    ) -> Completion | Exception | list[Completion] | list[Completion | Exception]:
        """Complete a prompt, or several together, and return when all are finished.

        - ``prompt``: text or token ids, for one ``Completion``; or a list of these, for a list of completions in its
          order.
        - ``params``: one for all prompts, or a list with one for each; None: the defaults of ``SamplingParams``.
        - ``timeout``: seconds for the whole call; None: no limit.
        - ``block``: wait for room in the queue; otherwise QueueFullError is raised.
        - ``progress``: show a progress bar (needs tqdm).
        - ``on_error``: ``"raise"`` raises the first error, which names the index of its prompt, and cancels the rest.
          ``"return"`` returns each error in place of its completion, like ``asyncio.gather(return_exceptions=True)``.
        - ``on_timeout``: ``"raise"`` raises TimeoutError. ``"return"`` returns the text so far; unfinished choices have
          the finish reason ``"timeout"``.

        Any thread. Ctrl-C, a cancelled task and any error cancel the requests of this call. Raises InvalidRequestError,
        TypeError or ValueError for bad prompts and options, ImportError for options that need a missing extra,
        QueueFullError, TimeoutError, DecodeError, EngineClosedError, and BackendError if the engine has failed.
        """
        self._engine_thread.check_open()
        checked = check_choice("on_error", on_error, ERROR_MODES)
        options = call_options(timeout, block, on_error, on_timeout)
        with options.in_time():
            items, single = await self._long_work.run_off_loop(
                self._request_builder.items, prompt, params, checked
            )
        options = replace(options, names_prompts=not single)
        batches = self._request_builder.completions(items)
        bar = progress_bar(len(items)) if check_flag("progress", progress) else None
        results = await self._submission.acollect(batches, options, bar)
        return in_order_of_prompts(items, results, single)

    @overload
    def aiter_completed(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        n_ahead: int | None = None,
        timeout: float | None = None,
        progress: bool = False,
        on_error: Literal["raise"] = "raise",
    ) -> AsyncGenerator[tuple[int, Completion], None]: ...

    @overload
    def aiter_completed(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        n_ahead: int | None = None,
        timeout: float | None = None,
        progress: bool = False,
        on_error: Literal["return"],
    ) -> AsyncGenerator[tuple[int, Completion | Exception], None]: ...

    @explains_keywords
    def aiter_completed(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        n_ahead: int | None = None,
        timeout: float | None = None,
        progress: bool = False,
        on_error: OnError = "raise",
    ) -> (
        AsyncGenerator[tuple[int, Completion], None]
        | AsyncGenerator[tuple[int, Completion | Exception], None]
    ):
        """Complete any number of prompts in bounded memory: yield ``(index, Completion)`` as they finish.

        - ``prompts``: any iterable, including a generator. It is read as requests finish. For asyncio it may be
          asynchronous; completions are then also yielded while the next prompt is awaited.
        - ``n_ahead``: maximum number of prompts read ahead of their completions; default: twice ``n_seq_max``.
        - ``params``: one for all prompts, or an iterable with one for each.
        - ``timeout``: as for ``generate``, but counted from when the first result is asked for.

        Other options are as for ``generate``. For one thread or task at a time. Closing or dropping the iterator, or
        cancelling its task, cancels the requests that are left; to close it after a ``break``, use
        ``contextlib.aclosing``. Raises as ``generate`` does.
        """
        self._engine_thread.check_open()
        check_choice("on_error", on_error, ERROR_MODES)
        call_options(timeout, True, on_error, "raise")
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, (Iterable, AsyncIterable)):
            raise TypeError(f"prompts must be an iterable of prompts, not {type(prompts).__name__}")
        refuse_table("prompts", prompts)
        n = 2 * self.n_seq_max if n_ahead is None else check_int("n_ahead", n_ahead, 1, 2**31 - 1)
        total = len(prompts) if isinstance(prompts, Sized) else None
        bar = progress_bar(total) if check_flag("progress", progress) else None
        return self._aiter_completed(prompts, params, n, timeout, bar, on_error)

    async def _aiter_completed(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        n_ahead: int,
        timeout: float | None,
        bar: Progress | None,
        on_error: OnError,
    ) -> AsyncGenerator[tuple[int, Any], None]:
        options = call_options(timeout, True, on_error, "raise", names_prompts=True)
        pending = Pending[Completion](options, self._submission.observer, bar)
        batches = self._arequest_batches(prompts, params, pending)
        results = self._submission.aiterate(batches, n_ahead, pending)
        async with aclosing(batches), aclosing(results):  # asyncio
            async for index, result in results:  # asyncio
                yield index, result  # asyncio
        # threads: yield from results

    async def _arequest_batches(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        pending: Pending[Completion],
    ) -> AsyncGenerator[RequestFactory, None]:
        """Yield, for each prompt as it is read, a function that makes its requests.

        Errors that are to be returned go to ``pending.ready``.
        """
        all_params: Iterator[SamplingParams | None]
        all_params = repeat(params) if params is None or isinstance(params, SamplingParams) else iter(params)
        index = 0
        async for prompt in as_async(prompts):
            its_params = next(all_params, END)
            if its_params is END:
                raise ValueError(f"params has {index} items, and there are more prompts; give one for each")
            item = await self._long_work.run_off_loop(
                self._request_builder.item_or_error, prompt, its_params, index, pending.options.on_error
            )
            if isinstance(item, Exception):
                pending.ready.append((index, item))
                yield no_requests
            else:
                yield partial(self._request_builder.make_requests, {index: item})
            index += 1
        if not isinstance(all_params, repeat) and next(all_params, END) is not END:
            raise ValueError(f"there are {index} prompts, and params has more items; give one for each")

    @explains_keywords
    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
    ) -> AsyncStream:
        """Start a completion and return an iterator over its deltas. Raises as ``generate`` does.

        For asyncio the request starts when its first delta is awaited, or with ``submit``; bad arguments raise
        immediately. With ``block=False`` the request starts immediately, in a task, and a full queue raises here: a web
        service can still answer with status 429.
        """
        self._engine_thread.check_open()
        options = call_options(timeout, block)
        return self._aopen_stream(options, self._request_builder.item(prompt, params))

    def _aopen_stream(self, options: CallOptions, item: CheckedPrompt) -> AsyncStream:
        def make() -> tuple[Request, AsyncMailbox]:
            mailbox = AsyncMailbox(running_loop(), self._engine_thread.dispatcher)
            request = self._request_builder.stream(item, mailbox, BUFFER_TOKENS)
            mailbox.requests.append(request)  # asyncio
            observer = self._submission.observer
            if observer is not None:
                stream.observed = observer.begin(observed_request([request], options.operation))
            return request, mailbox

        submit = partial(self._submission.asubmit, block=options.block)
        stream = AsyncStream(self._engine_thread, make, submit, options.deadline)
        stream.engine = self  # keeps the engine alive, which closes itself when nothing refers to it
        # threads: stream.submit()
        if not options.block:  # asyncio
            submit_at_once(stream.submit)  # asyncio
        return stream

    # ---- filling in the middle
    @explains_keywords
    async def ainfill(
        self,
        prefix: str,
        suffix: str,
        params: SamplingParams | None = None,
        *,
        extra: FimExtra = (),
        filename: str | None = None,
        order: FimOrder = "psm",
        timeout: float | None = None,
        block: bool = True,
    ) -> Completion:
        """Generate the text between ``prefix`` and ``suffix``, with a model that was trained to fill gaps.

        - ``extra``: other files, each ``(filename, text)``, the most important last. ``filename``: the name of the file
          with the gap.
        - ``order``: the prompt begins with the prefix (``"psm"``) or with the suffix (``"spm"``).

        Other options are as for ``generate``. If the whole prompt and ``max_tokens`` do not fit into ``n_ctx``, text is
        left out as in ``Model.tokenize_fim``: in large portions, so that the prefix cache helps while a cursor moves.

        Raises InvalidRequestError for a model without fill-in-the-middle tokens; otherwise raises as ``generate`` does.
        """
        self._engine_thread.check_open()
        text = fim_text(prefix, suffix, extra, filename, order)
        tokens = await self._long_work.run_off_loop(self._fim_tokens, text, params)
        return await self.agenerate(tokens, params, timeout=timeout, block=block)

    @explains_keywords
    def astream_infill(
        self,
        prefix: str,
        suffix: str,
        params: SamplingParams | None = None,
        *,
        extra: FimExtra = (),
        filename: str | None = None,
        order: FimOrder = "psm",
        timeout: float | None = None,
        block: bool = True,
    ) -> AsyncStream:
        """Start filling in and return an iterator over the deltas, as ``stream`` does.

        Takes the arguments of ``infill``.
        """
        self._engine_thread.check_open()
        tokens = self._fim_tokens(fim_text(prefix, suffix, extra, filename, order), params)
        return self.astream(tokens, params, timeout=timeout, block=block)

    # ---- chats
    @overload
    async def achat(  # type: ignore[overload-overlap]
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[ToolDefinition] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        response_format: ResponseFormat | None = None,
        template_args: Mapping[str, object] | None = None,
        continue_last: bool | Literal["content", "reasoning"] = False,
        truncation: Truncation = "error",
        reasoning_format: ReasoningFormat = "auto",
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> ChatCompletion: ...

    @overload
    async def achat(
        self,
        messages: Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[ToolDefinition] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        response_format: ResponseFormat | None = None,
        template_args: Mapping[str, object] | None = None,
        continue_last: bool | Literal["content", "reasoning"] = False,
        truncation: Truncation = "error",
        reasoning_format: ReasoningFormat = "auto",
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> list[ChatCompletion]: ...

    @explains_keywords
    async def achat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[ToolDefinition] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        response_format: ResponseFormat | None = None,
        template_args: Mapping[str, object] | None = None,
        continue_last: bool | Literal["content", "reasoning"] = False,
        truncation: Truncation = "error",
        reasoning_format: ReasoningFormat = "auto",
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> ChatCompletion | list[ChatCompletion]:
        """Answer a conversation, or several together, and return when all answers are complete.

        For a list of conversations, returns a list of answers in the same order; ``params`` may then be a list, too.
        ``timeout``, ``block`` and ``progress`` are as for ``generate``. Raises as ``generate`` does; also raises
        InvalidRequestError for messages that the model's template refuses, and ImportError without the extra ``chat``.
        """
        self._engine_thread.check_open()
        chat_options = ChatOptions(
            tools,
            tool_choice,
            parallel_tool_calls,
            response_format,
            template_args,
            continue_last,
            truncation=truncation,
            reasoning_format=reasoning_format,
        )
        options = call_options(timeout, block, operation="chat")
        with options.in_time():
            items, single = await self._long_work.run_off_loop(
                self._chat_builder.items, messages, params, chat_options
            )
        options = replace(options, names_prompts=not single)
        batches = self._request_builder.completions([item.item for item in items])
        bar = progress_bar(len(items)) if check_flag("progress", progress) else None
        results = await self._submission.acollect(batches, options, bar)
        answers = [item.answer(results[index]) for index, item in enumerate(items)]
        return answers[0] if single else answers

    @explains_keywords
    def astream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[ToolDefinition] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        response_format: ResponseFormat | None = None,
        template_args: Mapping[str, object] | None = None,
        continue_last: bool | Literal["content", "reasoning"] = False,
        truncation: Truncation = "error",
        reasoning_format: ReasoningFormat = "auto",
        before: Sequence[int] = (),
        timeout: float | None = None,
        block: bool = True,
    ) -> AsyncChatStream:
        """Start an answer and return an iterator over its parts. Raises as ``chat`` does.

        ``before``: tokens of earlier turns, which precede the prompt. With ``truncation="auto"`` the oldest are left
        out.

        For asyncio the request starts when its first part is awaited, or with ``submit``. Bad arguments raise
        immediately. A long conversation, or one with tools or a response format, is rendered in a worker thread when it
        starts. With ``block=False`` a full queue raises here, and conversations that need no worker thread also start
        immediately.
        """
        self._engine_thread.check_open()
        chat_options = ChatOptions(
            tools,
            tool_choice,
            parallel_tool_calls,
            response_format,
            template_args,
            continue_last,
            truncation=truncation,
            reasoning_format=reasoning_format,
        )
        options = call_options(timeout, block, operation="chat")
        open_stream = partial(self._aopen_stream, options)
        build = partial(self._chat_builder.item, messages, params, chat_options, before)
        if takes_long(messages, params, chat_options):  # asyncio
            if not block:  # asyncio
                self._queue.check_room()  # asyncio

            async def render() -> CheckedChat:  # asyncio
                with options.in_time():  # asyncio
                    return await self._long_work.run(build, size=size_of(messages))  # asyncio

            return AsyncChatStream(render, open_stream)  # asyncio
        with options.in_time():
            item = build()
        return AsyncChatStream(item, open_stream)

    # ---- token by token, and memory
    @explains_keywords
    async def astart(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncGeneration:
        """Start a generation that computes one token for each call of ``next``, and nothing before the first call.

        Raises as ``generate`` does.
        """
        self._engine_thread.check_open()
        item = await self._long_work.run_off_loop(self._request_builder.item, prompt, params)
        mailbox = AsyncMailbox(running_loop(), self._engine_thread.dispatcher)
        request = self._request_builder.generation(item, mailbox)
        generation = self._ageneration(request, mailbox)
        self._submission.submit_paused(request)
        return generation

    def _ageneration(self, request: Request, mailbox: AsyncMailbox) -> AsyncGeneration:
        generation = AsyncGeneration(
            self._engine_thread, request, mailbox, self.model.n_vocab, self.n_ctx, self._snapshot_format
        )
        generation.engine = self
        return generation

    @explains_keywords
    async def arestore(self, snapshot: bytes, params: SamplingParams | None = None) -> AsyncGeneration:
        """Continue a sequence from a ``Generation.snapshot`` of this engine or another one with the same model.

        Nothing is computed before the first ``next``, which loads the cells. They are computed again if ``cache_bytes``
        has no room for them, if there is no prefix cache, or if the other engine's memory had another layout
        (``flash_attn``). Limits in ``params`` count from here; a constraint applies to earlier generated tokens, too.

        Raises TypeError if ``snapshot`` is not bytes, InvalidRequestError if it is damaged, from another model, made
        with other ``type_k`` or ``type_v``, or too long for ``n_ctx``; otherwise raises as ``start`` does.
        """
        self._engine_thread.check_open()
        if not isinstance(snapshot, (bytes, bytearray, memoryview)):
            raise TypeError(f"snapshot must be bytes, not {type(snapshot).__name__}")
        sequence = await to_thread(self._unpack, snapshot, params)
        item = await self._long_work.run_off_loop(self._request_builder.item, sequence.tokens, params)
        mailbox = AsyncMailbox(running_loop(), self._engine_thread.dispatcher)
        request = self._request_builder.restored_generation(item, mailbox, sequence)
        generation = self._ageneration(request, mailbox)
        self._engine_thread.restore(request, sequence)
        return generation

    @explains_options()
    async def acache_prefix(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        cache_salt: str | None = None,
        adapter: AdapterChoice | None = None,
    ) -> CachedPrefix:
        """Compute a prompt and keep its KV cells in host memory until they are released.

        Later requests whose prompts begin with the same tokens load these cells. ``prompt``: text or token ids, such as
        the result of ``Model.tokenize_chat(messages, add_generation_prompt=False)``. ``cache_salt``, ``adapter``: as in
        the requests that will use the prefix. ``timeout``: seconds; None: no limit.

        Returns when the prompt is computed. Raises InvalidRequestError if the prompt has fewer than 16 tokens or needs
        more than is left of ``cache_bytes``, or if the engine has no prefix cache; otherwise raises as ``score`` does.
        """
        self._engine_thread.check_open()
        options = call_options(timeout, True, operation="cache_prefix")
        adapters = self._request_builder.select_adapters(adapter)
        item = await self._long_work.run_off_loop(self._request_builder.item, prompt, None)
        tokens = item.tokens
        if len(tokens) < MIN_PREFIX:
            raise InvalidRequestError(
                f"the prefix has {len(tokens)} tokens; fewer than {MIN_PREFIX} are computed again for each request: "
                "there is no need to cache them"
            )
        requests: list[Request] = []

        def make(mailbox: Mailbox) -> dict[int, list[Request]]:
            requests[:] = [self._request_builder.prefix(tokens, mailbox, check_salt(cache_salt), adapters)]
            return {0: requests}

        try:
            await self._submission.acollect(iter([make]), options)
            n_bytes, n_needed, budget = await to_thread(self._engine_thread.saved_sizes, requests[0])
            if n_bytes == 0:
                raise InvalidRequestError(
                    f"the {len(tokens)} tokens take about {n_needed} bytes, more than is left of the {budget} in "
                    "cache_bytes (0 without a prefix cache): raise it, or release other prefixes"
                )
        except BaseException:
            if requests:
                self._engine_thread.release(requests[0])
            raise
        return CachedPrefix(self._engine_thread, requests[0], len(tokens), n_bytes)

    # ---- scores
    @overload
    async def ascore(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        continuation: Prompt,
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        adapter: AdapterChoice | None = None,
    ) -> Score: ...

    @overload
    async def ascore(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt | Sequence[Prompt],
        continuation: Sequence[Prompt],
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        adapter: AdapterChoice | None = None,
    ) -> list[Score]: ...

    @overload
    async def ascore(
        self,
        prompt: Sequence[Prompt],
        continuation: Sequence[Sequence[Prompt]],
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        adapter: AdapterChoice | None = None,
    ) -> list[list[Score]]: ...

    @overload
    async def ascore(
        self,
        prompt: Sequence[Prompt],
        continuation: Sequence[Prompt | Sequence[Prompt]],
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        adapter: AdapterChoice | None = None,
    ) -> list[Score | list[Score]]: ...

    @explains_options()
    async def ascore(
        self,
        prompt: Prompt | Sequence[Prompt],
        continuation: Prompt | Sequence[Prompt | Sequence[Prompt]],
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        adapter: AdapterChoice | None = None,
    ) -> Score | list[Score] | list[list[Score]] | list[Score | list[Score]]:
        """Score continuations given a prompt: the log-probability of each of their tokens.

        Prompt and continuation are text or token ids.

        - One prompt and one continuation: a ``Score``. One prompt and a list of continuations: a list of scores.
        - A list of prompts: ``continuation`` has one item, or a list of items, for each prompt; the result has the same
          shape.

        Equal prompts are computed once. Many continuations of a prompt are divided among requests that run at the same
        time. If prompt and continuation are both text, they are tokenized together; the tokens after the longest prefix
        that the prompt and all these texts share are scored. No space is added: after "Answer:", pass " yes", not
        "yes". A warning is logged if several continuations all seem to lack the space.

        Options are as for ``generate``; ``adapter`` is as in SamplingParams. Raises InvalidRequestError if prompt and
        continuation together exceed ``n_ctx``, a continuation has no tokens, or there is no such adapter; otherwise
        raises as ``generate`` does.
        """
        self._engine_thread.check_open()
        options = call_options(timeout, block, operation="score")
        with options.in_time():
            job = await self._long_work.run_off_loop(score_job, prompt, continuation, self.model)
        return await self._ascore(job, options, progress, adapter)

    @overload
    async def ascore_tokens(
        self,
        tokens: TokenIds,
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        adapter: AdapterChoice | None = None,
    ) -> Score: ...

    @overload
    async def ascore_tokens(
        self,
        tokens: Sequence[TokenIds],
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        adapter: AdapterChoice | None = None,
    ) -> list[Score]: ...

    @explains_options()
    async def ascore_tokens(
        self,
        tokens: TokenIds | Sequence[TokenIds],
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        adapter: AdapterChoice | None = None,
    ) -> Score | list[Score]:
        """Score a text, or several: every token but the first, given the tokens before it.

        ``tokens``: the token ids of one text, for a ``Score``; or a list of these, for a list of scores. A text has at
        least two tokens. Options and exceptions are as for ``score``.
        """
        self._engine_thread.check_open()
        options = call_options(timeout, block, operation="score")
        with options.in_time():
            job = tokens_job(tokens, self.model)
        return await self._ascore(job, options, progress, adapter)

    @explains_options()
    async def aperplexity(
        self,
        text: str | TokenIds,
        n_window: int | None = None,
        *,
        timeout: float | None = None,
        progress: bool = False,
        adapter: AdapterChoice | None = None,
    ) -> float:
        """Return the perplexity of a text: the exponential of the mean negative log-probability of its tokens.

        ``text``: text or token ids, of any length. By default every token but the first counts, given all tokens before
        it. In a text longer than ``n_ctx``, each token is scored given at least the ``n_ctx // 2`` tokens before it.

        With ``n_window`` the result equals that of llama.cpp's perplexity tool. The text is cut into windows of
        ``n_window`` tokens that do not overlap; an incomplete last window is left out. If the vocabulary asks for a BOS
        token, it replaces each window's first token. The first ``n_window // 2 + 1`` tokens of each window do not
        count.

        Options and exceptions are as for ``score``. Also raises InvalidRequestError for fewer than 2 tokens, or for
        less than one window.
        """
        self._engine_thread.check_open()
        options = call_options(timeout, True, operation="score")
        with options.in_time():
            job = await self._long_work.run_off_loop(perplexity_job, text, n_window, self.model, self.n_ctx)
        return await self._ascore(job, options, progress, adapter)

    async def _ascore(
        self,
        job: ScoreJob[T],
        options: CallOptions,
        progress: bool,
        adapter: AdapterChoice | None,
    ) -> T:
        batches = job.batches(self._request_builder, self._request_builder.select_adapters(adapter))
        bar = progress_bar(job.n_requests) if check_flag("progress", progress) else None
        return job.result(await self._submission.acollect(batches, options, bar))

    # ---- end of asyncio

    # ---- for programs around an engine
    def observe(self, observer: RequestObserver | None) -> None:
        """Set the observer, which is notified of every future request; None removes it. Any thread."""
        self._submission.observer = observer

    async def offload(self, function: Callable[..., T], *arguments: object, size: int = 0) -> T:
        """Run ``function(*arguments)`` in one of the engine's threads for long work, to keep the event loop free.

        ``size``: the number of characters that the function converts; the total size of large work in progress is
        limited. The function runs in a copy of this task's context, and the clients of a server take turns. For
        asyncio. Raises what the function raises.
        """
        return await self._long_work.run(function, *arguments, size=size)

    @explains_keywords
    def tokenize_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[ToolDefinition] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        response_format: ResponseFormat | None = None,
        template_args: Mapping[str, object] | None = None,
        continue_last: bool | Literal["content", "reasoning"] = False,
        truncation: Truncation = "error",
        reasoning_format: ReasoningFormat = "auto",
        before: Sequence[int] = (),
    ) -> list[int]:
        """Return the prompt that ``chat`` would compute for a conversation.

        Negative tokens stand for images and sounds. ``before``: see ``stream_chat``. All arguments are checked as
        ``chat`` checks them, which may take long: in a coroutine, call this through ``offload``. Any thread. Raises as
        ``chat`` does.
        """
        chat_options = ChatOptions(
            tools,
            tool_choice,
            parallel_tool_calls,
            response_format,
            template_args,
            continue_last,
            truncation=truncation,
            reasoning_format=reasoning_format,
        )
        return list(self._chat_builder.item(messages, params, chat_options, before).item.tokens)

    def count_chat_tokens(
        self, messages: Conversation, template_args: Mapping[str, object] | None = None
    ) -> int:
        """Count the tokens of a conversation's prompt, images included, whether or not they fit. Any thread.

        Raises as ``chat`` does.
        """
        return self._chat_builder.n_tokens(messages, template_args or {})

    def set_cache_writes(self, when: Literal["always", "at_close", "never"]) -> None:
        """Set when cached prefixes are written to ``cache_dir``. They are read in any case.

        ``"always"``, the initial setting: in the background when they are evicted from host memory, while the engine
        has no work, and when it is closed. ``"at_close"``: only when it is closed. ``"never"``: not at all. A write in
        progress is finished.

        Waits for the running step. Any thread. Raises ValueError for other values and without ``cache_dir``,
        EngineClosedError in a forked process.
        """
        check_choice("when", when, get_args(Writes))
        if self._disk_cache is None:
            raise ValueError("set_cache_writes needs an engine with cache_dir")
        self._engine_thread.ask(partial(self._engine_thread.loop.set_cache_writes, when))

    def save_conversation(self, name: str, path: str | os.PathLike[str]) -> tuple[int, int]:
        """Write the cells of a conversation to a file. Return the numbers of its tokens and of the file's bytes.

        ``name``: the value of the context variable ``llamapipe.work.tenant.conversation`` when a request was made. The
        conversation is the sequence of this tenant's last such request. The file appears only when it is complete, and
        only the user who runs the engine may read it. Waits for the running step. Any thread. Raises
        InvalidRequestError if no cells are cached, EngineClosedError, OSError.
        """
        self._engine_thread.check_open()
        path = path_of(path)
        loop = self._engine_thread.loop
        sequence = self._engine_thread.ask(partial(loop.conversation, conversation_key(name)))
        if sequence is None:
            raise InvalidRequestError(
                f"no cells of the conversation {quoted(name)} are cached; compute it first"
            )
        try:
            return len(sequence.tokens), write_sequence(path, sequence, self._snapshot_format(None))
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error
        finally:
            sequence.close()

    def load_conversation(self, name: str, path: str | os.PathLike[str]) -> int:
        """Cache, under a name, the cells that ``save_conversation`` wrote to a file. Return the number of tokens.

        Any later request with the same tenant, salt and adapters that begins with these tokens uses them. Any thread.
        Raises OSError, EngineClosedError, InvalidRequestError for a file that is damaged, too long, or of another model
        or tenant, and in an engine whose options let it use no cells from files.
        """
        self._engine_thread.check_open()
        path = path_of(path)
        if not self._uses_files:
            raise InvalidRequestError(
                f"{path.name} would not be used: cells from a file need an engine with prefix_cache=True and "
                "cache_bytes above 0"
            )
        try:
            sequence = read_sequence(path, self._snapshot_format(None), self.model.n_vocab)
        except ValueError as error:
            raise InvalidRequestError(f"{path.name} cannot be used: {error}") from error
        loop = self._engine_thread.loop
        try:
            self._check_length(path, len(sequence.tokens))
            if not is_of(tenant.get().cache)(sequence.cache_key):
                raise InvalidRequestError(f"{path.name} belongs to another API key")
        except InvalidRequestError:
            sequence.close()
            raise
        self._engine_thread.ask(partial(loop.take_in_conversation, conversation_key(name), sequence))
        return len(sequence.tokens)

    def import_conversation(self, data: bytes, path: str | os.PathLike[str]) -> tuple[int, int]:
        """Write the bytes of a ``save_conversation`` file from elsewhere to a file of this tenant.

        Returns the same numbers as ``save_conversation``. Everything except the values of the cells is checked before
        it reaches native code. The file may come from another tenant. Any thread. Raises OSError, EngineClosedError,
        InvalidRequestError for a file that is damaged, too long, or of another model.
        """
        self._engine_thread.check_open()
        path = path_of(path)
        try:
            sequence = sequence_of(data, self._snapshot_format(None), self.model.n_vocab)
        except ValueError as error:
            raise InvalidRequestError(f"{path.name} cannot be used: {error}") from error
        try:
            self._check_length(path, len(sequence.tokens))
            own_sequence = sequence._replace(cache_key=own_key(sequence.cache_key))
            return len(sequence.tokens), write_sequence(path, own_sequence, self._snapshot_format(None))
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error
        finally:
            sequence.close()

    def _check_length(self, path: Path, n: int) -> None:
        if n > self.n_ctx:
            raise InvalidRequestError(f"{path.name} has {n} tokens; n_ctx is {self.n_ctx}")

    def hold_conversation(self, name: str) -> None:
        """Announce that a conversation will continue soon, for example after a tool call: its cells are evicted last.

        ``name``: as for ``save_conversation``. Call ``release_conversation`` when the conversation continues. Does not
        wait. Any thread.
        """
        self._engine_thread.call(self._engine_thread.loop.hold_conversation, conversation_key(name))

    def release_conversation(self, name: str, is_done: bool = False) -> None:
        """End ``hold_conversation``. ``is_done``: the conversation has ended, so its cells are evicted first.

        Does not wait. Any thread.
        """
        release = self._engine_thread.loop.release_conversation
        self._engine_thread.call(release, conversation_key(name), is_done)

    def forget_conversation(self, name: str) -> int:
        """Drop the cached cells of a conversation, unless a request uses them. Return the number of cells.

        Waits for the running step. Any thread. Raises EngineClosedError.
        """
        self._engine_thread.check_open()
        forget = self._engine_thread.loop.forget_conversation
        return self._engine_thread.ask(partial(forget, conversation_key(name)))

    # ---- state
    def stats(self) -> EngineStats:
        """Return a consistent copy of the counters. Waits for the running step. Any thread, even after ``close``."""
        return replace(self._engine_thread.stats(), queue_times=self._queue.times())

    def reset_prefix_cache(self) -> None:
        """Forget the cached tokens that no request uses, also in ``cache_dir``, except those of ``cache_prefix``.

        In a server with separate caches, forgets only those of the calling tenant. Waits for the running step. Any
        thread. Raises EngineClosedError, OSError.
        """
        self._engine_thread.check_open()
        is_wanted = is_of(tenant.get().cache)
        reset = partial(self._engine_thread.loop.reset_cache, is_wanted)
        self._engine_thread.ask(reset)
        if self._disk_cache is not None:
            self._disk_cache.forget(is_wanted)
            self._engine_thread.ask(reset)  # cells that were read from these files meanwhile

    def check_integrity(self) -> None:
        """Raise AssertionError if the engine's bookkeeping is inconsistent. For tests and debugging."""
        self._engine_thread.check_integrity()

    @property
    def adapters(self) -> tuple[Adapter | ControlVector, ...]:
        """The adapters and control vectors that requests may name now. Any thread."""
        return self._request_builder.named_adapters

    @property
    def failure(self) -> BackendError | None:
        """The defect that stopped the engine; None while it works. Any thread.

        Every request then fails with it. Close such an engine and create a new one.
        """
        return self._engine_thread.failure

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._engine_thread.closing

    def close(self, drain: bool = True) -> None:
        """End the engine and free its native memory before returning; a second call does nothing.

        ``drain``: finish the requests that callers wait for; otherwise cancel them. New requests are refused. Any
        thread.
        """
        was_open = not self.closed
        self._engine_thread.close(check_flag("drain", drain))
        observer, self._submission.observer = self._submission.observer, None
        try:
            if observer is not None:
                observer.close()
        finally:
            try:
                if was_open and self._trace_path is not None and not self._engine_thread.in_child():
                    self.trace.save(self._trace_path)
            finally:
                if self._draft_model is not None:
                    self._draft_model.close()
                if self._owns_model:
                    self.model.close()
                elif was_open:
                    return_freed_memory()

    def _is_left_open(self) -> bool:
        engine_thread = getattr(self, "_engine_thread", None)
        return not (engine_thread is None or engine_thread.closing or engine_thread.in_child())

    def _abandon(self) -> None:
        self._engine_thread.close_soon()


def _state_layout(pipeline: NativePipeline) -> StateLayout | None:
    """Return the layout of the states of a context that has computed nothing yet; None if it is not known."""
    context, states = pipeline.context, empty_states(pipeline)
    if states is None:
        return None
    n_streams = 1 if context.kv_unified else context.n_seq_max
    metadata = context.model.metadata
    return StateLayout.of_empty(*states, n_streams, stores_values(metadata), context.model.has_mrope)


def _make_cache(
    context: Context,
    mode: bool | str,
    host_bytes: int,
    kv_bytes: int,
    publisher: Publisher | None,
    spills: bool,
) -> KvCache:
    """Create the cache of a context, with the sharing that the context supports.

    ``mode``: True, ``"exact"`` or False. ``host_bytes``: host memory for saved cells. ``kv_bytes``: bytes of the
    context's cells, 0 if it is not known. ``spills``: there is a ``cache_dir``. Raises ValueError for options that
    exclude each other.
    """
    is_exact = mode == "exact"
    if is_exact and context.n_batch % context.n_ubatch:
        raise ValueError(
            f"n_batch is {context.n_batch} and n_ubatch {context.n_ubatch}; prefix_cache='exact' needs an n_batch "
            "that is a multiple of n_ubatch"
        )
    if is_exact and context.needs_states and not context.is_recurrent:
        raise ValueError(
            "prefix_cache='exact' needs swa_full=True, because rounding depends on where cells are: leave swa_full "
            "out"
        )
    if is_exact and context.kv_unified:
        raise ValueError(
            "prefix_cache='exact' needs a KV cache for each request, because rounding depends on where cells are: "
            "leave n_cells and kv_unified out"
        )
    # Only our attention kernels skip the cells of other sequences; those of devices do not.
    max_parked = _MAX_PARKED_SKIPPED if context.mixes_adapters else _MAX_PARKED_UNIFIED
    return KvCache(
        context.n_seq_max,
        bool(mode),
        has_states=context.needs_states,
        has_cells=not context.model.has_only_states,
        window=0 if context.needs_states else context.model.n_swa,
        shares_cells=context.kv_unified,
        host_bytes=host_bytes if mode else 0,
        cell_bytes=kv_bytes / context.n_cells + _META_BYTES,
        max_parked=max_parked if context.kv_unified else None,
        min_prefix=MIN_PREFIX,
        exact_multiple=context.n_ubatch if is_exact else None,
        observer=None if publisher is None else publisher.tracker,
        spills=spills,
    )


def _make_scheduler(
    context: Context, cache: KvCache, drafter: Drafter | None, overflow: Overflow, max_itl_s: float | None
) -> Scheduler:
    model = context.model
    no_guesses = "" if context.n_ubatch > 1 else "n_ubatch is 1: a step has no room for guesses"
    n_score_rows = max(context.n_outputs_max - context.n_seq_max, 1)
    # If a ubatch finds no cells, the earlier ubatches of its step are undone. Their tokens may have overwritten cells
    # that had left a window, which the sequences then need again. So where windows share cells, a step is one ubatch.
    is_one_ubatch = context.kv_unified and model.n_swa > 0 and context.has_ring
    gate = Gate(
        0 if no_guesses else n_score_rows,
        splits=not context.kv_unified or model.is_recurrent,
        drafter=drafter,
        no_guesses=no_guesses,
        has_window=model.n_swa > 0,
        keeps_states=context.n_states > 0,
        copies_states=model.is_recurrent and not context.n_states,
        n_longest=min(context.n_states or MOST_GUESSED, MOST_GUESSED),
    )
    return Scheduler(
        cache,
        context.n_ctx,
        context.n_cells,
        context.n_ubatch if is_one_ubatch else context.n_batch,
        context.n_ubatch,
        padding_token=None if context.kv_unified or model.is_recurrent else 0,
        n_score_rows=n_score_rows,
        prefill_cutoff=prefill_cutoff(context),
        max_itl_s=max_itl_s,
        overflow=overflow,
        gate=gate,
        # Without a ring, llama.cpp cuts batches, so rows could not be assigned to adapters.
        carries=carries if context.mixes_adapters and context.has_ring else None,
    )


def _check_types(model: object, draft: object, tuning: object) -> None:
    """Raise TypeError for wrong types of the arguments that have no row in the table of options."""
    if not isinstance(model, (Model, str, os.PathLike)):
        raise TypeError(f"model must be a Model or the path of a GGUF file, not {type(model).__name__}")
    if draft is not None and not isinstance(draft, (Model, str, os.PathLike)):
        raise TypeError(
            'draft must be a Model, the path of a GGUF file, "mtp", "auto" or None, not '
            f"{type(draft).__name__}"
        )
    if draft in ("ngram", "off"):
        raise ValueError(
            f"draft is {quoted(draft)}; repeated text is guessed without a draft: leave draft out. "
            'SamplingParams(speculate="off") guesses nothing'
        )
    if not isinstance(tuning, EngineTuning):
        raise TypeError(
            f"tuning must be EngineTuning, not {type(tuning).__name__}: tuning=lp.EngineTuning(n_ubatch=1024)"
        )


def _has_mtp(model: Model, must: bool, depth: int | None) -> bool:
    """Return whether the model's MTP layer drafts. If it ``must`` but cannot, raises ValueError with the reason."""
    problem = mtp_problem(model)
    if not problem and depth is not None and depth > 1:
        problem = f"pipeline_depth is {depth}, and MTP layers read the states of one step before the next"
    if must and problem:
        raise ValueError(f"draft is 'mtp', but {problem}; leave draft out, or give a smaller model")
    return not problem


def _depth_for_drafts(depth: int | None, has_mtp: bool, draft: Model | None) -> int | None:
    """Return the number of steps in flight: 1 if drafts read the states of a step, which must be computed first."""
    reads_states = draft is not None and draft.architecture in DRAFT_KINDS
    if draft is not None and reads_states and depth is not None and depth > 1:
        kind = DRAFT_KINDS[draft.architecture]
        raise ValueError(
            f"pipeline_depth is {depth}, and {kind} reads the states of one step before the next; "
            "leave it out, or use 1"
        )
    return 1 if has_mtp or reads_states else depth


def _n_states(model: Model) -> int:
    """Return how many recurrent states of a sequence are kept for guesses, in addition to the last one.

    The states of short convolutions (LFM2) have the values of a few tokens. Other states are as large as thousands of
    KV cells, and keeping them makes every step slower, with or without guesses. So the engine copies one such state
    before each step with guesses.
    """
    architecture = model.metadata.get("general.architecture", "")
    return _N_STATES if f"{architecture}.shortconv.l_cache" in model.metadata else 0


def _choose_swa_full(
    model: Model,
    wanted: bool | None,
    sizes: MemorySizes | None,
    n_ctx: int | None,
    n_seq_max: int,
    n_cells: int | None,
) -> bool:
    """Return whether layers with a sliding window keep all cells: as requested, else if there is enough memory."""
    if wanted is not None:
        return check_flag("swa_full", wanted)
    n_most = min(model.n_ctx_train, 4096) if n_ctx is None else int_of("n_ctx", n_ctx)
    n = n_most * int_of("n_seq_max", n_seq_max) if n_cells is None else int_of("n_cells", n_cells)
    return sizes is None or n * sizes.window <= _free_memory() // 4


def _check_cache_bytes(context: Context, sizes: MemorySizes | None, n_cache_bytes: int | None) -> None:
    """Raise ValueError if no recurrent state fits."""
    n_least = 2 * sizes.state if sizes is not None and context.needs_states else 0
    if n_cache_bytes and n_cache_bytes < n_least:
        raise ValueError(
            f"cache_bytes is {n_cache_bytes}; half of it is for recurrent states, of which one takes {n_least // 2} "
            f"bytes: give at least {n_least}, or 0 to keep none"
        )


def _check_use(context: Context, min_room: int) -> None:
    """Raise ValueError if a context's model cannot generate text, or ``min_room`` leaves nothing for a prompt."""
    if not context.model.is_causal:
        raise ValueError(
            f"{context.model.path.name} is not causal, so it cannot generate text; "
            "pass a generative model, or use lp.Embedder for embeddings"
        )
    if 1 < min_room >= context.n_ctx:
        raise ValueError(
            f"min_room is {min_room} and n_ctx {context.n_ctx}; that leaves nothing for a prompt: "
            f"min_room is at most {context.n_ctx - 1}"
        )


def _open_publisher(undo: ExitStack, kv_events: KvEvents | None, name: str) -> Publisher | None:
    """Open the publisher of KV events, if they are enabled. Raises ImportError without the extra ``kv-events``."""
    if kv_events is None:
        return None
    from llamapipe.kv_events import Publisher

    return undo.enter_context(closing(Publisher(kv_events, name)))


def _open_drafter(
    undo: ExitStack, context: Context, draft: Model | None, has_mtp: bool, max_itl_s: float | None
) -> Drafter | None:
    """Open the drafter: a model, or the model's MTP layer. Raises ValueError for a draft that does not fit."""
    # The same limit as for chunks of prompts: streams wait while the draft model computes a chunk.
    n_room = context.n_ubatch if max_itl_s is None else min(LEAST_CHUNK, context.n_ubatch)
    if has_mtp:
        return undo.enter_context(closing(make_mtp_drafter(context, n_room)))
    if draft is not None:
        return undo.enter_context(closing(make_drafter(context, draft, n_room)))
    return None


def _n_sharing(context: Context, cache: KvCache, max_queue: int | None) -> int:
    """Return how many requests of a call may share a prompt's cells and run at the same time; 1: no sharing."""
    shares = cache.enabled and cache.shares_running
    # Where cells are scarce, the requests of a call would compete for them. A limited queue could refuse some of them.
    shares = shares and max_queue is None and context.n_cells >= context.n_ctx * context.n_seq_max
    return context.n_seq_max // 2 if shares else 1  # the other slots are for other callers


def _check_overflow(context: Context, mode: str, n_keep: int) -> Overflow:
    choice_of("overflow", mode)
    n = int_of("n_keep", n_keep)
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
        keys = "" if context.type_k in ("f32", "f16") else f" with type_k={context.type_k!r}"
        raise ValueError(
            f"the positions of {context.model.path.name} cannot be shifted{keys}: use overflow='recompute'"
        )
    return Overflow(mode, max(n, int(context.model.vocab.add_bos)))


def _warn_of_size(context: Context, n_bytes: int) -> None:
    """Log a warning about sizes that work but are rarely intended."""
    warn_of_context(context.model, context.n_ctx, context.rope)
    free = free_memory()
    on_host = all(device.type == "cpu" for device in context.model.devices)
    if on_host and free is not None and n_bytes > (free + n_bytes) / 2:
        _log.warning(
            "the KV cache takes %.1f GiB, more than half of the %.1f GiB that were free: "
            "a smaller n_ctx, n_seq_max or n_cells, or type_k and type_v 'q8_0', take less",
            n_bytes / 2**30,
            (free + n_bytes) / 2**30,
        )


def _check_cache_folder(
    folder: str | os.PathLike[str] | None, cache_mode: bool | Literal["exact"], n_cache_bytes: int | None
) -> Path | None:
    """Return the folder of cached prefixes. Raises TypeError, ValueError."""
    if folder is None:
        return None
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"cache_dir must be the path of a folder or None, not {type(folder).__name__}")
    path = os.fsdecode(folder)
    if not path or "\0" in path:
        raise ValueError(f"cache_dir is {path!r}; give the path of a folder")
    if cache_mode is not True:
        raise ValueError(
            f"cache_dir needs prefix_cache=True, not {cache_mode!r}; set it, or leave cache_dir out"
        )
    if n_cache_bytes == 0:
        raise ValueError(
            "cache_dir needs cache_bytes above 0, because cells are read from files into host memory"
        )
    return Path(path).expanduser()


def _free_memory() -> int:
    """Return the free memory in bytes; 5 GiB if it is not known."""
    free = free_memory()
    return 5 * 2**30 if free is None else free


def prefill_cutoff(context: Context) -> int | None:
    """Return the number of prompt tokens at which a step with a stream's first token is full; None: no such limit."""
    # A GPU reads all weights in each step, even for a few tokens.
    return None if on_gpu(context.model) else PREFILL_CUTOFF_TOKENS


def _load_draft_file(path: str | os.PathLike[str], model: Model) -> Model:
    """Load a draft with the options of the model it drafts for. Raises ValueError if the two do not fit together."""
    from llamapipe.gguf.check import check_gguf

    stored = model_of(path)
    file = local_file(path) if stored is None else stored[0]
    check_draft_file(model, check_gguf(file))
    return Model(
        path,
        n_gpu_layers=-1 if on_gpu(model) else 0,
        kernels="auto" if model.attends else "ggml",
        packed_cache=model.packed_folder,
    )


def _check_kv_events(kv_events: object, cache_mode: bool | str) -> KvEvents | None:
    if kv_events is None:
        return None
    if not isinstance(kv_events, KvEvents):
        raise TypeError(f"kv_events must be KvEvents or None, not {type(kv_events).__name__}")
    if not cache_mode:
        raise ValueError(
            "kv_events publishes the contents of the prefix cache, but prefix_cache is False: leave one of them out"
        )
    return kv_events


def _check_trace_path(trace: bool | str | Path | None) -> Path | None:
    if trace is None or isinstance(trace, bool):
        return None
    if not isinstance(trace, (str, Path)):
        raise TypeError(f"trace must be True, a path or None, not {type(trace).__name__}")
    return check_trace_path(trace)
