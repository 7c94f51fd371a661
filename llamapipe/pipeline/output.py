"""The outputs of one step: poll them, wait for them, or read them.

Nothing here waits for another step. Arrays stay valid after the output is released, because they hold a reference to
the native step that owns their memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from llamapipe.arguments import check_float
from llamapipe.errors import EngineClosedError
from llamapipe.host.at_exit import end_thread_at_exit
from llamapipe.llama.batch import DecodeBatch
from llamapipe.llama.context import Context
from llamapipe.llama.native_pipeline import NativePipeline
from llamapipe.locks import Lock
from llamapipe.native.load import last_error, native
from llamapipe.native.not_copyable import NotCopyable

_LONGEST_S = 10 * 365 * 24 * 3600.0


class _Handle(NotCopyable):
    """Owns a native step. Every object that reads the step's memory holds a reference to it."""

    __slots__ = ("_context", "_free", "native")

    def __init__(self, native: Any, free: Any, context: Context) -> None:
        self.native = native
        self._free = free
        self._context = context

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child, where locks held by the parent's threads are never released."""
        return self._context.forked

    def __del__(self) -> None:
        if not self.forked:
            self._free(self.native)


class _Rows:
    """Exposes a step's rows to numpy; the rows stay in place as long as an array refers to this object."""

    __slots__ = ("__array_interface__", "_handle", "_unexpose")

    def __init__(self, handle: _Handle, address: int, shape: tuple[int, int], unexpose: Any) -> None:
        self._handle = handle
        self._unexpose = unexpose  # None if the rows were copied out of the ring
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": "=f4".replace("=", np.dtype(np.float32).str[0]),
            "data": (address, True),
        }

    def __del__(self) -> None:
        if self._unexpose is not None and not self._handle.forked:
            self._unexpose(self._handle.native)


class Logits:
    """The output rows of a step, float32 ``(n_outputs, n_vocab)``, fetched at the first use.

    Pass the object wherever numpy accepts an ``array_like``; indexing, ``len`` and ``shape`` work as well. Converting
    it to an array, or indexing it, waits for that step only. The arrays are read-only views where possible and stay
    valid as long as they are referenced. Any thread.
    """

    __slots__ = ("_output", "dtype", "shape")

    def __init__(self, output: StepOutput, shape: tuple[int, int]) -> None:
        self._output = output
        self.shape = shape
        self.dtype = np.dtype(np.float32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        rows = self._output._read()
        if dtype is not None and np.dtype(dtype) != rows.dtype:
            if copy is False:
                raise ValueError(f"logits are float32; as {np.dtype(dtype)} they must be copied")
            return rows.astype(dtype)
        return rows.copy() if copy else rows

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self._output._read()[index]

    def __repr__(self) -> str:
        return f"<Logits {self.shape} of {self._output!r}>"


class StepOutput(NotCopyable):
    """The outputs of one submitted batch, which may not be computed yet.

    Rows follow the order of the batch entries whose ``outputs`` flag is set. ``n_tokens`` and ``n_outputs`` count the
    batch's tokens and output rows. Any thread.

    Dropping the last reference releases the output. Call ``release``, or use ``with``, to free its rows sooner.

    ``wait``, ``candidates`` and every use of ``logits`` raise the step's own error: DecodeError, ContextFullError, or
    EngineClosedError if the pipeline was closed before the step was launched.
    """

    def __init__(self, pipeline: NativePipeline, native: Any, batch: DecodeBatch) -> None:
        self._pipeline = pipeline
        self._handle: _Handle | None = _Handle(native, pipeline.native.lib.lp_step_free, pipeline.context)
        self._lock = Lock()
        self._rows: npt.NDArray[np.float32] | None = None
        self.n_tokens = len(batch)
        self.n_outputs = int(np.count_nonzero(batch.outputs))

    def __repr__(self) -> str:
        if self._handle is None or self._handle.forked:
            state = "released"
        elif not self.ready:
            state = "pending"
        else:
            state = "done"  # or failed: a check would mark the error as read
        return f"<StepOutput n_tokens={self.n_tokens} n_outputs={self.n_outputs} {state}>"

    @property
    def logits(self) -> Logits:
        """The output rows, float32 ``(n_outputs, n_vocab)``. Getting this object does not wait; using it does."""
        return Logits(self, (self.n_outputs, self._pipeline.context.model.n_vocab))

    @property
    def number(self) -> int:
        """The step's number in its pipeline, from 0."""
        return int(self._pipeline.native.lib.lp_step_number(self._live_handle().native))

    @property
    def ready(self) -> bool:
        """Whether a read would return or raise without waiting. Never blocks."""
        return bool(self._pipeline.native.lib.lp_step_ready(self._live_handle().native))

    def wait(self, timeout: float | None = None) -> None:
        """Block until the step is computed.

        Raises the step's own error, or TimeoutError after ``timeout`` seconds; the step then continues.
        """
        handle = self._live_handle()
        timeout_ns = -1
        if timeout is not None:
            timeout_ns = int(min(check_float("timeout", timeout, 0, float("inf")), _LONGEST_S) * 1e9)
        if not self._pipeline.native.lib.lp_step_wait(handle.native, timeout_ns):
            raise TimeoutError(
                f"the step was not computed within {timeout} s; it continues, so wait() can be called again"
            )
        self._check(handle)

    @property
    def candidates(self) -> Candidates:
        """The 40 largest logits of each row and the row's log-sum-exp. Waits for the step."""
        return Candidates(self._read())

    def release(self) -> None:
        """Free the rows' slot in the ring for later steps. Arrays that were read before stay valid."""
        with self._lock:
            handle, self._handle = self._handle, None
            self._rows = None
        if handle is not None and not handle.forked:
            self._pipeline.native.lib.lp_step_release(handle.native)

    def __enter__(self) -> StepOutput:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    # ---- inside
    def _live_handle(self) -> _Handle:
        handle = self._handle
        if handle is None:
            raise EngineClosedError("this output was released; read it before release()")
        if handle.forked:
            raise EngineClosedError(
                "this output was made before fork(); its step is computed in the parent only"
            )
        return handle

    def _check(self, handle: _Handle) -> None:
        lib, ffi = self._pipeline.native.lib, self._pipeline.native.ffi
        code = lib.lp_step_code(handle.native)
        if code != 0:
            end_thread_at_exit()
            why = ffi.string(lib.lp_step_error(handle.native)).decode("utf-8", "replace")
            raise self._pipeline.error(code, why, self.n_tokens)

    def _read(self) -> npt.NDArray[np.float32]:
        rows = self._rows
        if rows is not None:
            return rows
        handle = self._live_handle()
        lib, ffi = self._pipeline.native.lib, self._pipeline.native.ffi
        lib.lp_step_wait(handle.native, -1)
        self._check(handle)
        with self._lock:
            if self._handle is not handle:  # released in the meantime
                self._live_handle()
            if self._rows is None:
                self._rows = self._expose(handle, lib, ffi)
            return self._rows

    def _expose(self, handle: _Handle, lib: Any, ffi: Any) -> npt.NDArray[np.float32]:
        shape = self.logits.shape
        if self.n_outputs == 0:
            return np.empty(shape, np.float32)
        in_place = ffi.new("bool *")
        data = lib.lp_step_expose(handle.native, in_place)
        if data == ffi.NULL:
            raise MemoryError(
                f"logits of shape {shape} do not fit in memory ({last_error(self._pipeline.native)})"
            )
        unexpose = lib.lp_step_unexpose if in_place[0] else None
        return np.asarray(_Rows(handle, int(ffi.cast("uintptr_t", data)), shape, unexpose))


class Candidates:
    """The ``n_candidates`` largest logits of each row in descending order; equal logits are ordered by token id.

    ``ids`` is int32 and ``logits`` float32, both ``(n_outputs, n_candidates)``. An id is -1 where the row has fewer
    finite logits. ``log_sum_exp`` is float64 ``(n_outputs,)`` over the whole row, so
    ``logits - log_sum_exp[:, None]`` are log-probabilities.
    """

    __slots__ = ("ids", "log_sum_exp", "logits")

    def __init__(self, rows: npt.NDArray[np.float32], n_candidates: int = 40) -> None:
        n_rows, n_vocab = rows.shape
        k = min(n_candidates, n_vocab)
        self.ids = np.empty((n_rows, k), np.int32)
        self.logits = np.empty((n_rows, k), np.float32)
        self.log_sum_exp = np.empty(n_rows, np.float64)
        module = native()
        buffer = module.ffi.from_buffer
        if n_rows and module.lib.lp_candidates(
            buffer("float[]", np.ascontiguousarray(rows)),
            n_rows,
            n_vocab,
            k,
            buffer("int32_t[]", self.ids, require_writable=True),
            buffer("float[]", self.logits, require_writable=True),
            buffer("double[]", self.log_sum_exp, require_writable=True),
        ):
            raise MemoryError(last_error(module))
