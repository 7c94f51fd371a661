"""The outputs of a step: known to be there, waited for, or read, one step at a time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from llamapipe.arguments import check_float
from llamapipe.errors import EngineClosedError
from llamapipe.native.load import last_error, native

if TYPE_CHECKING:
    import numpy.typing as npt

    from llamapipe.llama.batch import Batch
    from llamapipe.llama.context import Context
    from llamapipe.llama.native_pipeline import NativePipeline

_LONGEST_S = 10 * 365 * 24 * 3600.0


class _Handle:
    """Owns a native step; whoever reads its memory holds this."""

    __slots__ = ("_context", "_free", "native")

    def __init__(self, native: Any, free: Any, context: Context) -> None:
        self.native = native
        self._free = free
        self._context = context

    @property
    def forked(self) -> bool:
        """Whether this is a child process: whatever lock the parent's threads held is held for ever here."""
        return self._context.forked

    def __del__(self) -> None:
        if not self.forked:
            self._free(self.native)


class _Rows:
    """Memory of a step's rows as numpy sees it; the rows stay where they are while an array uses this."""

    __slots__ = ("__array_interface__", "_handle", "_unexpose")

    def __init__(self, handle: _Handle, address: int, shape: tuple[int, int], unexpose: Any) -> None:
        self._handle = handle
        self._unexpose = unexpose  # None where the rows are in memory of their own
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
    """The output rows of a step, float32 ``(n_outputs, n_vocab)``; ``numpy.asarray`` waits for that step only.

    Behaves as an array where a function takes ``array_like``; indexing, ``len`` and ``shape`` work, too. The arrays are
    read-only views where possible, and stay valid however long they are kept.
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


class StepOutput:
    """What ``Pipeline.submit`` returns: the outputs of one batch, perhaps not computed yet.

    Rows are in the order of the batch's entries with ``outputs`` set. Any thread. An output that nobody refers to any
    more is released by itself; ``release`` (or ``with``) does it sooner.

    Errors of the step are raised by ``wait`` and by reading ``logits`` or ``candidates``, each time: DecodeError,
    ContextFullError, or EngineClosedError where the pipeline was closed before the step was launched.
    """

    def __init__(self, pipeline: NativePipeline, native: Any, batch: Batch) -> None:
        self._pipeline = pipeline
        self._handle: _Handle | None = _Handle(native, pipeline.native.lib.lp_step_free, pipeline.context)
        self._lock = threading.Lock()
        self._rows: npt.NDArray[np.float32] | None = None
        self.n_tokens = len(batch)
        self.n_outputs = int(np.count_nonzero(batch.outputs))

    def __repr__(self) -> str:
        if self._handle is None or self._handle.forked:
            state = "released"
        elif not self.ready:
            state = "under way"
        else:
            state = "done"  # or failed: asking which would count as having read it
        return f"<StepOutput n_tokens={self.n_tokens} n_outputs={self.n_outputs} {state}>"

    @property
    def logits(self) -> Logits:
        """The rows, float32 ``(n_outputs, n_vocab)``, read when they are used."""
        return Logits(self, (self.n_outputs, self._pipeline.context.model.n_vocab))

    @property
    def number(self) -> int:
        """Which step of its pipeline this is, from 0."""
        return int(self._pipeline.native.lib.lp_step_number(self._held().native))

    @property
    def ready(self) -> bool:
        """Whether reading would not wait; also True for a step that failed. Never blocks."""
        return bool(self._pipeline.native.lib.lp_step_ready(self._held().native))

    def wait(self, timeout: float | None = None) -> None:
        """Returns once the outputs can be read without waiting.

        Raises TimeoutError after ``timeout`` seconds (the step goes on), and the step's own error.
        """
        handle = self._held()
        timeout_ns = -1
        if timeout is not None:
            timeout_ns = int(min(check_float("timeout", timeout, 0, float("inf")), _LONGEST_S) * 1e9)
        if not self._pipeline.native.lib.lp_step_wait(handle.native, timeout_ns):
            raise TimeoutError(f"the step was not done within {timeout} s; it goes on")
        self._check(handle)

    @property
    def candidates(self) -> Candidates:
        """The largest logits of each row with its log-sum-exp; waits as reading ``logits`` does."""
        return Candidates(self._read())

    def release(self) -> None:
        """Gives the rows up, so that their place can be used for others. Arrays read before stay valid."""
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
    def _held(self) -> _Handle:
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
            why = ffi.string(lib.lp_step_error(handle.native)).decode("utf-8", "replace")
            raise self._pipeline.error(code, why, self.n_tokens)

    def _read(self) -> npt.NDArray[np.float32]:
        rows = self._rows
        if rows is not None:
            return rows
        handle = self._held()
        lib, ffi = self._pipeline.native.lib, self._pipeline.native.ffi
        lib.lp_step_wait(handle.native, -1)
        self._check(handle)
        with self._lock:
            if self._handle is not handle:  # released since
                self._held()
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
            raise MemoryError(f"there is no memory for {shape} logits ({last_error(self._pipeline.native)})")
        unexpose = lib.lp_step_unexpose if in_place[0] else None
        return np.asarray(_Rows(handle, int(ffi.cast("uintptr_t", data)), shape, unexpose))


class Candidates:
    """The ``n_candidates`` largest logits of each row, sorted, ties by the lowest id (-1 where fewer are finite).

    ``ids`` int32 and ``logits`` float32, both ``(n_outputs, n_candidates)``; ``log_sum_exp`` float64 ``(n_outputs,)``
    over the whole row, so ``logits - log_sum_exp[:, None]`` are log-probabilities.
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
