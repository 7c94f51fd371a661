"""Runs the native load of a model: progress reports, cancellation, files that change, and interpreter exit.

llama.cpp calls back after every tensor. The callback must not raise into C, so it stores the exception and returns
False; ``load`` raises it once llama.cpp has stopped.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llamapipe.errors import ModelLoadError
from llamapipe.host.at_exit import awaited_at_exit, end_thread_at_exit
from llamapipe.native.load import drain_log, last_error

Progress = Callable[[float], object]

_EXIT_WAIT_S = 10.0  # a load stops sooner, at its next tensor, unless a progress function never returns
_current = threading.local()  # .load: the load running on this thread
_callback: Any = None


class _Load:
    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.error: BaseException | None = None


def load(module: Any, path: Path, params: Any, progress: Progress | None, packing: Any) -> Any:
    """Load a model on this thread and return its native handle; call ``progress`` with 0.0 to 1.0.

    An exception in ``progress``, or Ctrl-C, stops the load and is raised here. When the interpreter exits, loads on
    other threads are stopped as well and raise SystemExit there, because native code must not outlive the interpreter.

    Raises ModelLoadError if llama.cpp refuses the file.
    """
    ffi, lib = module.ffi, module.lib
    params.progress_callback = _progress_callback(module)
    outer = getattr(_current, "load", None)
    _current.load = this = _Load(progress)
    handle = ffi.NULL
    try:
        drain_log(module)
        with awaited_at_exit(_EXIT_WAIT_S):
            handle = lib.lp_model_load(os.fsencode(path), params, packing)
        problems = drain_log(module)
        if this.error is not None:
            raise this.error
        if handle == ffi.NULL:
            reason = problems[0] if problems else last_error(module)
            raise ModelLoadError(f"llama.cpp could not load {path}: {reason}")
    except BaseException:
        if handle != ffi.NULL:
            lib.llama_model_free(handle)
        raise
    finally:
        this.error = None  # its traceback refers to this frame
        _current.load = outer
    return handle


def is_loading() -> bool:
    """Return whether this thread is loading a model, that is, running its progress callback."""
    return getattr(_current, "load", None) is not None


@contextmanager
def mapping_guard(module: Any, path: Path, files: Sequence[Path] = ()) -> Iterator[None]:
    """Raise ModelLoadError after the block if a mapped file was truncated in it; unguarded, the process would end.

    It guards this thread and, for ``files``, also the threads that llama.cpp starts to convert weights.
    """
    texts = [module.ffi.new("char[]", os.fsencode(os.path.realpath(file))) for file in files]
    if module.lib.lp_mapping_guard_begin(texts, len(texts)) < 0:
        raise ModelLoadError(f"{path} cannot be loaded: no handler of SIGBUS can be installed")
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    finally:
        n_missing = module.lib.lp_mapping_guard_end()
    if n_missing:  # zeros in place of data may have caused the failure
        raise ModelLoadError(
            f"{path} was truncated while it was loaded; load it again when it is complete"
        ) from failure
    if failure is not None:
        raise failure


def _progress_callback(module: Any) -> Any:
    """Return the C function that llama.cpp calls during a load; the first call connects it to Python."""
    global _callback
    if _callback is None:
        define = module.ffi.def_extern(name="lp_on_progress", error=False, onerror=_stop_load)
        _callback = define(_on_progress)
    return module.lib.lp_on_progress


def _on_progress(fraction: float, user_data: Any) -> bool:
    this: _Load = _current.load
    end_thread_at_exit()
    if this.progress is not None:
        this.progress(fraction)
    return True


def _stop_load(kind: Any, error: BaseException, trace: Any) -> bool:
    _current.load.error = error.with_traceback(trace)
    return False  # stops the load
