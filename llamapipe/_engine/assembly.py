"""Makes the parts of an engine from its options: the cache, the scheduler and its guesses, the drafter, the publisher.

The functions check what depends on the model and the context; options are checked before there is a context.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from llamapipe._engine.policy.kv import MIN_PREFIX, KvCache
from llamapipe._engine.policy.overflow import Overflow
from llamapipe._engine.policy.planner import LEAST_CHUNK
from llamapipe._engine.policy.scheduler import Scheduler
from llamapipe._engine.policy.speculation import MOST_GUESSED, Drafter, Gate
from llamapipe._engine.runtime.draft import make_drafter, make_mtp_drafter
from llamapipe._engine.runtime.draft_checks import check_draft_file, mtp_problem
from llamapipe._engine.runtime.state_layout import StateLayout
from llamapipe.arguments import check_flag, choice_of, int_of
from llamapipe.gguf.draft_file import DRAFT_KINDS
from llamapipe.host.memory import free_memory
from llamapipe.kv_events import KvEvents
from llamapipe.llama.adapter import carries, local_file
from llamapipe.llama.context import Context
from llamapipe.llama.kv_memory import MemorySizes, stores_values
from llamapipe.llama.model import Model, warn_of_context
from llamapipe.llama.native_pipeline import NativePipeline, empty_states, on_gpu
from llamapipe.ollama_models import model_of

if TYPE_CHECKING:
    from llamapipe.kv_events import Publisher

_log = logging.getLogger("llamapipe")
_N_STATES = 8  # recurrent states of a sequence, one after each of its last tokens, to take back wrong guesses
# In cells. With unified KV, the attention of every step passes over parked cells. Devices read the cells; our kernels
# read only their entries in the mask, and 7,000 of these took 2 % of a step of a 135M model.
_MAX_PARKED_UNIFIED, _MAX_PARKED_SKIPPED = 512, 8192
_META_BYTES = 16  # position and sequence of a saved cell
SCORE_ROWS = 32  # maximum output rows of a step for scored tokens; bounds their memory
# On a CPU a prompt token takes hardly longer in a step of 256 than in one of 512.
PREFILL_CUTOFF_TOKENS = 256


def state_layout(pipeline: NativePipeline) -> StateLayout | None:
    """Return the layout of the states of a context that has computed nothing yet; None if it is not known."""
    context, states = pipeline.context, empty_states(pipeline)
    if states is None:
        return None
    n_streams = 1 if context.kv_unified else context.n_seq_max
    metadata = context.model.metadata
    return StateLayout.of_empty(*states, n_streams, stores_values(metadata), context.model.has_mrope)


def make_cache(
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


def make_scheduler(
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


def uses_mtp(model: Model, must: bool, depth: int | None) -> bool:
    """Return whether the model's MTP layer drafts. If it ``must`` but cannot, raises ValueError with the reason."""
    problem = mtp_problem(model)
    if not problem and depth is not None and depth > 1:
        problem = f"pipeline_depth is {depth}, and MTP layers read the states of one step before the next"
    if must and problem:
        raise ValueError(f"draft is 'mtp', but {problem}; leave draft out, or give a smaller model")
    return not problem


def depth_for_drafts(depth: int | None, has_mtp: bool, draft: Model | None) -> int | None:
    """Return the number of steps in flight: 1 if drafts read the states of a step, which must be computed first."""
    reads_states = draft is not None and draft.architecture in DRAFT_KINDS
    if draft is not None and reads_states and depth is not None and depth > 1:
        kind = DRAFT_KINDS[draft.architecture]
        raise ValueError(
            f"pipeline_depth is {depth}, and {kind} reads the states of one step before the next; "
            "leave it out, or use 1"
        )
    return 1 if has_mtp or reads_states else depth


def n_states(model: Model) -> int:
    """Return how many recurrent states of a sequence are kept for guesses, in addition to the last one.

    The states of short convolutions (LFM2) have the values of a few tokens. Other states are as large as thousands of
    KV cells, and keeping them makes every step slower, with or without guesses. So the engine copies one such state
    before each step with guesses.
    """
    architecture = model.metadata.get("general.architecture", "")
    return _N_STATES if f"{architecture}.shortconv.l_cache" in model.metadata else 0


def choose_swa_full(
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
    return sizes is None or n * sizes.window <= known_free_memory() // 4


def check_cache_bytes(context: Context, sizes: MemorySizes | None, n_cache_bytes: int | None) -> None:
    """Raise ValueError if no recurrent state fits."""
    n_least = 2 * sizes.state if sizes is not None and context.needs_states else 0
    if n_cache_bytes and n_cache_bytes < n_least:
        raise ValueError(
            f"cache_bytes is {n_cache_bytes}; half of it is for recurrent states, of which one takes {n_least // 2} "
            f"bytes: give at least {n_least}, or 0 to keep none"
        )


def check_use(context: Context, min_room: int) -> None:
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


def open_publisher(undo: ExitStack, kv_events: KvEvents | None, name: str) -> Publisher | None:
    """Open the publisher of KV events, if they are enabled. Raises ImportError without the extra ``kv-events``."""
    if kv_events is None:
        return None
    from llamapipe.kv_events import Publisher

    return undo.enter_context(closing(Publisher(kv_events, name)))


def open_drafter(
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


def n_sharing(context: Context, cache: KvCache, max_queue: int | None) -> int:
    """Return how many requests of a call may share a prompt's cells and run at the same time; 1: no sharing."""
    shares = cache.enabled and cache.shares_running
    # Where cells are scarce, the requests of a call would compete for them. A limited queue could refuse some of them.
    shares = shares and max_queue is None and context.n_cells >= context.n_ctx * context.n_seq_max
    return context.n_seq_max // 2 if shares else 1  # the other slots are for other callers


def check_overflow(context: Context, mode: str, n_keep: int) -> Overflow:
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


def warn_of_size(context: Context, n_bytes: int) -> None:
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


def known_free_memory() -> int:
    """Return the free memory in bytes; 5 GiB if it is not known."""
    free = free_memory()
    return 5 * 2**30 if free is None else free


def prefill_cutoff(context: Context) -> int | None:
    """Return the number of prompt tokens at which a step with a stream's first token is full; None: no such limit."""
    # A GPU reads all weights in each step, even for a few tokens.
    return None if on_gpu(context.model) else PREFILL_CUTOFF_TOKENS


def load_draft_model(path: str | os.PathLike[str], model: Model) -> Model:
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
