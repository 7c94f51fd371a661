"""Operations on a pipeline's KV cells, queued between its steps.

Every argument is checked here, before the operation is queued: llama.cpp aborts the process on some wrong ones. The
launch thread then applies the operations in the order of the calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamapipe.arguments import check_int
from llamapipe.errors import EngineClosedError, InvalidRequestError
from llamapipe.native.load import last_error

if TYPE_CHECKING:
    from llamapipe.llama.native_pipeline import NativePipeline

_INT32_MAX = 2**31 - 1


class PipelineMemory:
    """Removes, copies and shifts sequences in the pipeline's KV cells.

    Each operation is queued and returns at once. It takes effect after the steps submitted before it and before those
    submitted later. ``p0`` and ``p1`` are positions; ``p1`` is exclusive, and -1 means the end of the sequence. Any
    thread, until the pipeline is closed.

    Every method raises TypeError and ValueError for wrong arguments and EngineClosedError when the pipeline is closed.
    """

    def __init__(self, pipeline: NativePipeline) -> None:
        self._pipeline = pipeline
        context = pipeline.context
        self._n_seq_max = context.n_seq_max
        self._whole_only = context.model.is_recurrent
        self._kv_streams = not context.kv_unified and context.n_seq_max > 1
        self._can_shift = context.can_shift

    def remove(self, seq_id: int, p0: int = 0, p1: int = -1) -> None:
        """Removes positions ``[p0, p1)`` of a sequence.

        Raises InvalidRequestError for a part of a sequence when the model is recurrent: it keeps no history.
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
        """Shares positions ``[p0, p1)`` of ``src`` with ``dst``, which should be empty.

        Raises InvalidRequestError for a part of a sequence when the model is recurrent or the KV cells are split by
        sequence (``kv_unified=False``): llama.cpp then copies whole sequences only.
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
        """Removes every sequence except this one."""
        self._seq("seq_id", seq_id)
        self._queue("KEEP", seq_id)

    def shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Adds ``delta`` to positions ``[p0, p1)`` of a sequence. The next step rotates its keys.

        Raises InvalidRequestError if the model's positions cannot be shifted, if they would leave the context, or if
        the sequence shares cells with another one after ``copy`` (unified KV), which would be shifted too.
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
        """Removes every sequence."""
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
        if code < 0:
            raise EngineClosedError(last_error(native))
