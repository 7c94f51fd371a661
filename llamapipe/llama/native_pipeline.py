"""Owns the native pipeline of a context. Open this file to change where rows are kept and who waits for them."""

from __future__ import annotations

import logging
from typing import Any

from llamapipe.arguments import choice_of
from llamapipe.errors import BackendError, ContextFullError, DecodeError, EngineClosedError
from llamapipe.llama.context import Context
from llamapipe.llama.model import Model
from llamapipe.locks import Lock
from llamapipe.native.load import drain_log, enum_names, last_error, native
from llamapipe.native.not_copyable import NotCopyable

_ANY_SIZE = 2**62


def ring_slots(model: Model, ring: str, n_slots: int, keeps_windows: bool = False) -> int:
    """Return how many slots a context's ring gets: ``n_slots``, or 0 if outputs go through llama.cpp's own buffer.

    ``keeps_windows``: layers with a sliding window keep all cells.

    There is no ring on RPC workers. A ring's slots live as long as the pipeline object and would keep the connection
    open; a worker that ends would then end this process even after the pipeline is closed. Raises ValueError if a ring
    is required there.
    """
    choice_of("ring", ring)
    if model.on_workers:
        if ring not in ("auto", "off"):
            raise ValueError(
                f'ring is {ring!r}, and the model is on RPC workers, which have none; use "auto" or "off"'
            )
        return 0
    return 0 if ring == "off" or not can_stage(model, keeps_windows) else n_slots


def can_stage(model: Model, keeps_windows: bool) -> bool:
    """Return whether llamapipe knows how llama.cpp cuts this model's batches into ubatches.

    Recurrent memories cut batches differently. With unified KV, sliding-window caches
    (``llama_kv_cache_iswa::init_batch``) try a second way if the first finds no cells. If window layers keep all cells,
    they never have fewer free cells than the other layers, which need equally many cells in both ways; the second way
    then fails as well. The exception is a state that was restored while cells were shared: window layers may then have
    fewer free cells, and a step that is cut in the second way fails.
    """
    return not model.is_recurrent and (keeps_windows or not model.n_swa)


def wants_graph_sampling(model: Model, ring: str, choice: str, keeps_windows: bool) -> bool:
    """Return whether the graph should sample. ``"auto"`` means: only if a real GPU computes.

    On a CPU or a software device, llamapipe finds a row's candidates faster without the graph. Raises ValueError if the
    graph cannot sample although it is required to.
    """
    choice_of("graph_sampling", choice)
    if choice == "on" and model.on_workers:
        raise ValueError(
            'graph_sampling is "on", and the model is on RPC workers, which return whole rows; use "auto" or "off"'
        )
    if choice != "auto":
        return choice == "on"
    return ring_slots(model, ring, 1, keeps_windows) > 0 and on_gpu(model)


def on_gpu(model: Model) -> bool:
    """Return whether a real GPU, not a software device, computes part of the model."""
    return any(d.type in ("gpu", "igpu") and not d.is_software for d in model.devices)


def mode_names() -> dict[int, str]:
    """Return the names of native.h's modes: ``"host"``, ``"events"``, ``"sync"``, ``"direct"``."""
    return {value: name.removeprefix("LP_").lower() for value, name in enum_names("lp_mode").items()}


class NativePipeline(NotCopyable):
    """Owns a native pipeline and its context; ``close`` frees both.

    ``mode``: where rows are kept and who waits for what: ``"host"``, ``"events"``, ``"sync"`` or ``"direct"`` (see
    ``docs/backends.md``). ``threaded``: steps are launched on a separate thread instead of the caller's.
    """

    def __init__(self, context: Context, ring: str, depth: int, n_slots: int, threaded: bool) -> None:
        self.context = context
        self.native = native()
        self.depth = depth
        self.threaded = threaded
        lib, ffi = self.native.lib, self.native.ffi
        if not context.has_ring:
            modes = [lib.LP_DIRECT]
        elif lib.lp_context_ring_in_host_memory(context.handle):
            modes = [lib.LP_HOST]
        elif ring == "sync":
            modes = [lib.LP_SYNC]
        else:
            modes = [lib.LP_EVENTS, lib.LP_SYNC]
        self.handle: Any = ffi.NULL
        for mode in modes:
            self.handle = lib.lp_pipeline_new(
                context.handle,
                mode,
                depth,
                n_slots,
                context.n_outputs_max,
                context.n_ubatch if context.has_ring else context.n_batch,
                context.has_ring and not context.kv_unified and context.n_seq_max > 1,
                threaded,
            )
            if self.handle != ffi.NULL:
                break
            if ring == "events":
                break
            logging.getLogger("llamapipe").warning("no events: %s", last_error(self.native))
        if self.handle == ffi.NULL:
            raise BackendError(f"the pipeline could not be made ({last_error(self.native)})")
        self.mode = mode_names()[mode]
        if context.graph_problem and not context.graph_sampling:
            logging.getLogger("llamapipe").warning(
                "%s cannot be sampled in the graph: %s", context.model.path.name, context.graph_problem
            )
        self._free = lib.lp_pipeline_free  # modules may be gone when the interpreter ends
        self._closed = False
        self._closing = Lock()
        self._n_reused = 0

    def error(self, code: int, why: str | None = None, n_tokens: int | None = None) -> Exception:
        """Return the exception for a step's negative return code."""
        lib = self.native.lib
        why = last_error(self.native) if why is None else why
        if code == lib.LP_ERROR_FULL:
            drain_log(self.native)
            what = "this step" if n_tokens is None else f"a step of {n_tokens} tokens"
            return ContextFullError(f"no KV cells are left for {what}")
        if code == lib.LP_ERROR_ABORTED:
            drain_log(self.native)
            if self._closed:
                return EngineClosedError("the pipeline was closed before the step was computed")
            return StepAbortedError("the step was aborted: all who waited for it gave up")
        if code == lib.LP_ERROR_CLOSED:
            return EngineClosedError(why)
        if code in (lib.LP_ERROR_POSITIONS, lib.LP_ERROR_ROWS):
            return DecodeError(f"the step failed: {why}")
        reason = "; ".join(drain_log(self.native)[-2:]) or why
        return DecodeError(f"llama.cpp failed to compute this step (code {code}: {reason})")

    def counters(self) -> Any:
        """Return a copy of the native counters. Any thread."""
        counters = self.native.ffi.new("lp_counters *")
        self.native.lib.lp_get_counters(self.handle, counters)
        return counters

    @property
    def n_reused(self) -> int:
        """The number of times that llama.cpp has reused its last compute graph; after closing, the last count."""
        try:
            # If the lock is taken, another thread is closing the pipeline.
            if self._closing.acquire(blocking=False) and not self.context.closed:
                self._n_reused = self.context.n_reused
        finally:
            try:  # noqa: SIM105  # calls of suppress() may be interrupted
                self._closing.release()
            except RuntimeError:  # the lock is not held
                pass
        return self._n_reused

    def next_position(self, seq_id: int) -> int:
        """Return a sequence's next position once all queued steps are done; for a pipeline with a launch thread."""
        position: int = self.native.lib.lp_next_position(self.handle, seq_id)
        return position

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def check_open(self) -> None:
        """Raise EngineClosedError when closed, or in a child process after fork()."""
        if self.context.forked:
            raise EngineClosedError("the pipeline was made before fork(); make one in the child process")
        if self._closed:
            raise EngineClosedError("the pipeline is closed; make another")

    def close(self, drain: bool = True) -> None:
        """End the pipeline's threads and free its context; finished steps can still be read. Any thread."""
        self._closed = True
        if self.context.forked:  # the pipeline's threads are not in this process
            return
        if not drain:  # also when another thread is waiting for the drain
            self.native.lib.lp_pipeline_stop(self.handle)
        with self._closing:
            if not self.context.closed:
                self._n_reused = self.context.n_reused
            self.native.lib.lp_pipeline_close(self.handle, drain)
            self.context.close()

    def __del__(self) -> None:
        # Not in close(): another thread may have been about to use the handle then.
        if getattr(self, "_closed", False) and not self.context.forked:
            self._free(self.handle)


class SavedCells(NotCopyable):
    """One saved copy of a sequence or of its state, made by ``SavedCells.of``.

    Use it from one thread at a time. It may outlive its pipeline.
    """

    def __init__(self, handle: Any) -> None:
        self._lib = native().lib
        self.handle = handle
        self.n_bytes = int(self._lib.lp_saved_bytes(handle))

    @classmethod
    def of(
        cls, pipeline: NativePipeline, seq_id: int, max_bytes: int, only_state: bool = False
    ) -> SavedCells | None:
        """Copy a sequence once queued steps are done. None if the copy fails or is larger than ``max_bytes``.

        ``only_state``: copy only the state that cannot be rewound, without the cells of other layers. Call it on the
        thread that launches.
        """
        module = pipeline.native
        handle = module.lib.lp_save(pipeline.handle, seq_id, max_bytes, only_state)
        return None if handle == module.ffi.NULL else cls(handle)

    def replace_by_state(self, pipeline: NativePipeline, seq_id: int) -> bool:
        """Copy the state at a sequence's end into the same memory. If this returns False, the copy is useless."""
        is_saved: bool = self._lib.lp_save_state(pipeline.handle, seq_id, self.handle)
        self.n_bytes = int(self._lib.lp_saved_bytes(self.handle))
        return is_saved

    @classmethod
    def of_state(cls, context: Context, seq_id: int, again: SavedCells | None) -> SavedCells | None:
        """Copy a sequence's state from a context without a pipeline; None on failure. Call it on the context's thread.

        ``again``: a copy whose memory is reused; it is closed on failure.
        """
        module = native()
        to = module.ffi.NULL if again is None else again.handle
        handle = module.lib.lp_context_save_state(context.claim(), seq_id, to)
        if again is None:
            return None if handle == module.ffi.NULL else cls(handle)
        if handle == module.ffi.NULL:
            again.close()
            return None
        again.n_bytes = int(module.lib.lp_saved_bytes(handle))
        return again

    def load_state(self, context: Context, seq_id: int, n: int) -> bool:
        """Rewind a sequence to its first ``n`` positions, where this state was copied. Return False if that empties it.

        Raises DecodeError.
        """
        status: int = self._lib.lp_context_load_state(context.claim(), seq_id, n, self.handle)
        if status < 0:
            raise DecodeError(f"loading the state of sequence {seq_id} failed ({last_error(native())})")
        return status > 0

    @classmethod
    def of_bytes(cls, state: bytes | bytearray | memoryview) -> SavedCells:
        """Make an object from the bytes that ``to_bytes`` returned. Raises MemoryError."""
        module = native()
        handle = module.lib.lp_saved_new(module.ffi.from_buffer(state), len(state))
        if handle == module.ffi.NULL:
            raise MemoryError(f"no memory is left for {len(state)} bytes of saved cells")
        return cls(handle)

    def to_bytes(self) -> bytes:
        """Return the cells in llama.cpp's format."""
        return bytes(native().ffi.buffer(self._lib.lp_saved_data(self.handle), self.n_bytes))

    def view(self) -> memoryview:
        """Return the cells in llama.cpp's format without copying them; valid until ``close``."""
        return memoryview(native().ffi.buffer(self._lib.lp_saved_data(self.handle), self.n_bytes))

    def close(self) -> None:
        """Free the memory; a second call does nothing."""
        handle, self.handle = self.handle, None
        if handle is not None:
            self._lib.lp_saved_free(handle)

    def __repr__(self) -> str:
        return f"<SavedCells {self.n_bytes} bytes{' closed' if self.handle is None else ''}>"

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None:
            self.close()


def empty_states(pipeline: NativePipeline) -> tuple[bytes, bytes] | None:
    """Return the full state of an empty sequence, and its part that cannot be rewound; None on failure.

    The two show which parts this model's memory has. Call the function before the first step.
    """
    states = []
    for only_state in (False, True):
        saved = SavedCells.of(pipeline, 0, _ANY_SIZE, only_state)
        if saved is None:
            return None
        states.append(saved.to_bytes())
        saved.close()
    return states[0], states[1]


def engine_pipeline(context: Context, ring: str, depth: int | None) -> NativePipeline:
    """Make the pipeline of an engine. On the CPU it has a launch thread only if steps should overlap."""
    lib = native().lib
    on_host = not context.has_ring or lib.lp_context_ring_in_host_memory(context.handle)
    if depth is None:
        depth = 1 if on_host else 2
    # A recurrent memory may refuse to forget a part of a sequence. The caller must learn of that immediately.
    threaded = depth > 1 and bool(on_host) and not context.model.is_recurrent
    n_slots = context.n_ring_slots if context.has_ring else depth + 1
    return NativePipeline(context, ring, depth, n_slots, threaded=threaded)


class StepAbortedError(DecodeError):
    """A step ended early because all requests that waited for it were cancelled."""
