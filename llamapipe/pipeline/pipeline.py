"""The pipeline as a public object: ``submit`` a batch now, read its output later.

This file checks arguments and manages the lifetime of the public object. The queue, the launch thread and the output
ring are native, and ``llama.native_pipeline`` owns them. Every argument of an operation on KV cells is checked before
the operation is queued: some wrong arguments make llama.cpp abort the process.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamapipe.arguments import check_flag, check_int
from llamapipe.errors import DecodeError, EngineClosedError, InvalidRequestError
from llamapipe.host.at_exit import close_at_exit, forget
from llamapipe.llama.batch import DecodeBatch, check_batch
from llamapipe.llama.context import Context
from llamapipe.llama.model import Model
from llamapipe.llama.native_pipeline import NativePipeline, ring_slots
from llamapipe.native.load import last_error
from llamapipe.native.owner import DrainingOwner
from llamapipe.pipeline.output import StepOutput
from llamapipe.pipeline.trace import Trace

_INT32_MAX = 2**31 - 1


class PipelineMemory:
    """Removes, copies and shifts sequences in the pipeline's KV cells.

    Each operation is queued and returns immediately. It takes effect after the steps submitted before it and before
    those submitted later. ``p0`` and ``p1`` are positions; ``p1`` is exclusive, and -1 means the end of the sequence.
    Any thread, until the pipeline is closed.

    Every method raises TypeError or ValueError for wrong arguments, EngineClosedError if the pipeline is closed.
    """

    def __init__(self, pipeline: NativePipeline) -> None:
        self._pipeline = pipeline
        context = pipeline.context
        self._n_seq_max = context.n_seq_max
        self._whole_only = context.model.is_recurrent
        self._kv_streams = not context.kv_unified and context.n_seq_max > 1
        self._can_shift = context.can_shift

    def remove(self, seq_id: int, p0: int = 0, p1: int = -1) -> None:
        """Remove positions ``[p0, p1)`` of a sequence.

        Raises InvalidRequestError for a part of a sequence if the model is recurrent, because it keeps no history.
        """
        self._seq("seq_id", seq_id)
        first, end = self._range(p0, p1)
        if self._whole_only and (first > 0 or end >= 0):
            raise InvalidRequestError(
                f"this model keeps one state per sequence, so positions {first} to {end} cannot be removed alone; "
                "remove the whole sequence and compute it again"
            )
        self._queue("REMOVE", seq_id, p0=first, p1=end)

    def copy(self, src: int, dst: int, p0: int = 0, p1: int = -1) -> None:
        """Copy positions ``[p0, p1)`` of ``src`` to ``dst``, which should be empty; unified KV shares the cells.

        Raises InvalidRequestError for a part of a sequence if the model is recurrent or the KV cells are split by
        sequence (``kv_unified=False``), because llama.cpp then copies whole sequences only.
        """
        self._seq("src", src)
        self._seq("dst", dst)
        first, end = self._range(p0, p1)
        if src == dst:
            return
        if (self._kv_streams or self._whole_only) and (first > 0 or end >= 0):
            raise InvalidRequestError(
                f"positions {first} to {end} of sequence {src} cannot be copied alone; copy the whole sequence and "
                "remove the rest, or use kv_unified=True"
            )
        self._queue("COPY", src, dst, first, end)

    def keep(self, seq_id: int) -> None:
        """Remove every sequence except this one."""
        self._seq("seq_id", seq_id)
        self._queue("KEEP", seq_id)

    def shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add ``delta`` to positions ``[p0, p1)`` of a sequence. The next step rotates its keys.

        Raises InvalidRequestError if the model's positions cannot be shifted, if they would leave the context, or if
        ``copy`` made the sequence share cells with another one (unified KV), which would be shifted, too.
        """
        self._seq("seq_id", seq_id)
        first, end = self._range(p0, p1)
        delta = check_int("delta", delta, -_INT32_MAX, _INT32_MAX)
        if not self._can_shift:
            raise InvalidRequestError("the positions of this model cannot be shifted")
        if first + delta < 0:
            raise InvalidRequestError(f"position {first} cannot be shifted by {delta}: it would be negative")
        if end > 0 and end - 1 + delta >= self._pipeline.context.n_ctx:
            raise InvalidRequestError(
                f"position {end - 1} cannot be shifted by {delta}: n_ctx is {self._pipeline.context.n_ctx}"
            )
        self._queue("SHIFT", seq_id, p0=first, p1=end, delta=delta)

    def clear(self) -> None:
        """Remove every sequence."""
        self._queue("CLEAR", 0)

    def _seq(self, name: str, seq_id: int) -> None:
        check_int(name, seq_id, 0, self._n_seq_max - 1)

    def _range(self, p0: int, p1: int) -> tuple[int, int]:
        return check_int("p0", p0, 0, _INT32_MAX), check_int("p1", p1, -1, _INT32_MAX)

    def _queue(self, op: str, seq_id: int, other: int = 0, p0: int = 0, p1: int = -1, delta: int = 0) -> None:
        self._pipeline.check_open()
        native = self._pipeline.native
        code = native.lib.lp_memory(
            self._pipeline.handle, getattr(native.lib, f"LP_{op}"), seq_id, other, p0, p1, delta
        )
        if code == native.lib.LP_ERROR_POSITIONS:
            raise InvalidRequestError(last_error(native))
        if code == native.lib.LP_ERROR_CLOSED:
            raise EngineClosedError(last_error(native))
        if code < 0:
            raise DecodeError(f"changing the cells of sequence {seq_id} failed ({last_error(native)})")


_MAX_DEPTH = 64


@dataclass(frozen=True)
class PipelineStats:
    """Counters since the pipeline was created.

    ``steps``: batches launched. ``n_decodes``: the ``llama_decode`` calls they were cut into. ``n_waits``: times a
    thread blocked for one step. ``n_syncs``: times a thread blocked for all work (``llama_synchronize``). ``n_copies``
    and ``n_bytes``: copies of rows to host memory and their bytes. ``n_moved``: copies that freed a slot of the ring
    because unread outputs filled it. ``n_memory_ops``: KV operations applied. ``n_reused``: compute graphs that
    llama.cpp reused. ``compute_s``: seconds of computing, where the backend reports them.
    """

    steps: int
    n_decodes: int
    n_waits: int
    n_syncs: int
    n_copies: int
    n_bytes: int
    n_moved: int
    n_memory_ops: int
    n_reused: int
    compute_s: float


class Pipeline(DrainingOwner):
    """Computes batches in order while the program reads the outputs of earlier ones.

    ``submit`` hands a batch to the pipeline's launch thread and returns its output immediately. It blocks only while
    ``depth`` steps are submitted and not yet computed. Rows stay in a ring of ``depth + 1`` slots, each of
    ``n_outputs_max`` rows, until they are read or released. If all slots hold unread rows, the oldest output is copied
    out of the ring.

    ``n_ctx``: positions that each sequence may use. ``n_outputs_max``: maximum output rows of one decode (default
    ``n_ubatch``); a batch with more is cut into several decodes. ``ring``: ``"auto"``, ``"events"``, ``"sync"`` or
    ``"off"`` (see ``docs/backends.md``); the attribute ``mode`` holds the mode in use. ``Context`` describes the other
    options.

    Any thread. Close the pipeline before its model, or use ``with``.

    Raises TypeError or ValueError for wrong options, BackendError if the context cannot be created.
    """

    def __init__(
        self,
        model: Model,
        n_ctx: int | None = None,
        n_seq_max: int = 1,
        n_cells: int | None = None,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_outputs_max: int | None = None,
        depth: int = 2,
        kv_unified: bool | None = None,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        type_k: str = "f16",
        type_v: str = "f16",
        flash_attn: str = "auto",
        ring: str = "auto",
    ) -> None:
        if not isinstance(model, Model):
            raise TypeError(f"model must be a Model, not {type(model).__name__}")
        depth = check_int("depth", depth, 1, _MAX_DEPTH)
        context = Context(
            model,
            n_ctx=n_ctx,
            n_seq_max=n_seq_max,
            n_cells=n_cells,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_outputs_max=n_outputs_max,
            n_threads=n_threads,
            n_threads_batch=n_threads_batch,
            kv_unified=n_cells is not None if kv_unified is None else kv_unified,
            type_k=type_k,
            type_v=type_v,
            flash_attn=flash_attn,
            n_ring_slots=ring_slots(model, ring, depth + 1),
        )
        try:
            self._pipeline = NativePipeline(context, ring, depth, depth + 1, threaded=True)
        except BaseException:
            context.close()
            raise
        self.model = model
        self.depth = depth
        self.mode = self._pipeline.mode
        self.n_ctx = context.n_ctx
        self.n_seq_max = context.n_seq_max
        self.n_batch = context.n_batch
        self.memory = PipelineMemory(self._pipeline)
        self.trace = Trace(self._pipeline)
        close_at_exit(self._pipeline)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"mode={self.mode}"
        return f"<Pipeline {state} depth={self.depth} {self._pipeline.context!r}>"

    def submit(self, batch: DecodeBatch) -> StepOutput:
        """Queue a batch after earlier ones and return its output. Any thread.

        The positions of each sequence must continue from its last position without a gap. Blocks while ``depth`` steps
        are submitted and not yet computed.

        Raises TypeError or ValueError for a batch that does not fit; nothing is queued then. Raises EngineClosedError
        if the pipeline is closed.
        """
        if not isinstance(batch, DecodeBatch):
            raise TypeError(f"batch must be a DecodeBatch, not {type(batch).__name__}")
        pipeline = self._pipeline
        pipeline.check_open()
        limits = {"tokens": self.model.n_vocab, "seq_ids": self.n_seq_max, "positions": self.n_ctx}
        check_batch(batch, self.n_batch, **limits)
        native, ffi = pipeline.native, pipeline.native.ffi
        code = ffi.new("int *")
        step = native.lib.lp_submit(
            pipeline.handle,
            len(batch),
            ffi.from_buffer("int32_t[]", batch.tokens),
            ffi.from_buffer("int32_t[]", batch.positions),
            ffi.from_buffer("int32_t[]", batch.seq_ids),
            ffi.from_buffer("int8_t[]", batch.outputs),
            code,
        )
        if step == ffi.NULL:
            if code[0] == native.lib.LP_ERROR_POSITIONS:
                raise ValueError(last_error(native))
            raise pipeline.error(code[0], last_error(native), len(batch))
        return StepOutput(pipeline, step, batch)

    def stats(self) -> PipelineStats:
        """Return a copy of the counters. Any thread."""
        pipeline = self._pipeline
        counters = pipeline.counters()
        return PipelineStats(
            steps=counters.n_steps,
            n_decodes=counters.n_decodes,
            n_waits=counters.n_waits,
            n_syncs=counters.n_syncs,
            n_copies=counters.n_copies,
            n_bytes=counters.n_bytes,
            n_moved=counters.n_moved,
            n_memory_ops=counters.n_memory_ops,
            n_reused=pipeline.n_reused,
            compute_s=counters.compute_ns * 1e-9,
        )

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._pipeline.closed

    def close(self, drain: bool = True) -> None:
        """Free the native memory. Computed outputs can still be read; a second call does nothing.

        With ``drain``, submitted steps are computed first. Otherwise they fail, including the running step if its
        backend can abort it (CPU).
        """
        self._pipeline.close(check_flag("drain", drain))
        forget(self._pipeline)

    def _is_left_open(self) -> bool:
        pipeline = getattr(self, "_pipeline", None)
        return not (pipeline is None or pipeline.closed or pipeline.context.forked)
