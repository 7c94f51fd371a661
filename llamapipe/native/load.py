"""Loads the native module and its backends, and passes native log records to ``logging``.

The module is in this file's folder. Backends are loaded only from this folder and the folders of backend packages
(``llamapipe-cuda``, ``llamapipe-vulkan``), never from the folder of another llama.cpp. Importing this file does
nothing: the first object that needs llama.cpp calls ``native()``.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from llamapipe.errors import BackendError
from llamapipe.locks import Lock
from llamapipe.native.backend_packages import BackendPackage, installed_packages, usable

_PACKAGE = Path(__file__).parents[1]
LIB_DIR = Path(__file__).parent / "lib"
# The command that fixes a build for another processor. Without --no-cache-dir, pip may reuse the same wheel.
REBUILD = (
    "build it on this machine: `pip install --no-cache-dir --force-reinstall .` in a clone, or `python build_native.py "
    "--backend cpu --clean` in the source tree"
)
logger = logging.getLogger("llamapipe.native")

_lock = Lock()
_module: Any = None
_not_loaded: dict[str, str] = {}
_LOG_BYTES = 512
_CHUNK_BYTES = 4096  # the kernel formats one core's record at a time, so a small read skips the other cores


def build_info() -> dict[str, Any]:
    """Return the record of the build (commit, flags, backends, CPU features); empty if the file is missing."""
    import json

    try:
        info = json.loads((LIB_DIR / "build.json").read_text())
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def has_gpu_backend() -> bool:
    """Return whether this build or an installed package has a backend other than the CPU. Loads nothing."""
    return any(name != "cpu" for name in build_info().get("backends", ())) or bool(installed_packages())


def native() -> Any:
    """Return the cffi module with ``ffi`` and ``lib``; the first call loads the backends. Any thread.

    Raises BackendError if the module is not built, was built for another processor, or finds no device, if a
    backend package was built from another llama.cpp, and in a sub-interpreter.
    """
    global _module
    if _module is not None:
        return _module
    with _lock:
        if _module is None:
            _module = _load()
    return _module


def backends_not_loaded() -> dict[str, str]:
    """Return the packaged backends that could not be loaded: name to reason. Call it after ``native()``."""
    return dict(_not_loaded)


def missing_cpu_features(build: dict[str, Any]) -> list[str]:
    """Return the CPU features in a build's record that this processor lacks; empty if either is not known.

    A library built for other instructions would end the process with SIGILL. pip caches wheels that it built from a
    source archive or a commit, whatever processor they were built on.
    """
    required = build.get("cpu_features")
    return missing_features(map(str, required)) if isinstance(required, list) and required else []


def missing_features(required: Iterable[str], cpuinfo: str = "/proc/cpuinfo") -> list[str]:
    """Return the features in ``required`` that this processor lacks, sorted. Names are as in Linux's ``cpuinfo``.

    The list is empty if the system does not report features (macOS, some containers). Takes about 0.1 ms.
    """
    listed = _cpu_features(cpuinfo)
    return [] if listed is None else sorted(set(required) - listed)


def _cpu_features(cpuinfo: str) -> set[str] | None:
    """Return the features of the first core; None if they cannot be read."""
    text = b""
    try:
        file = os.open(cpuinfo, os.O_RDONLY)
    except OSError:
        return None
    try:
        while chunk := os.read(file, _CHUNK_BYTES):
            text += chunk
            *lines, _ = text.split(b"\n")
            for line in lines:
                key, _, names = line.partition(b":")
                if key.strip() in (b"flags", b"Features"):
                    return set(names.decode("ascii", "replace").split())
    except OSError:
        return None
    finally:
        os.close(file)
    return None


def has_module(folder: Path) -> bool:
    """Return whether a native module was built into a folder."""
    return any(file.suffix in (".so", ".pyd") for file in folder.glob("_native*"))


def _is_sub_interpreter() -> bool:
    """Return whether this is a sub-interpreter, which callbacks from C would not reach."""
    for name in ("_interpreters", "_xxsubinterpreters"):  # the names since Python 3.13, and before
        try:
            module = import_module(name)
        except ImportError:
            continue
        return bool(module.get_current() != module.get_main())
    return False


def _load() -> Any:
    if _is_sub_interpreter():
        raise BackendError(
            "llamapipe does not run in a sub-interpreter; use the main interpreter, or a process"
        )
    build = build_info()
    packages = usable(build)
    if missing := missing_cpu_features(build):
        raise BackendError(
            f"llamapipe was built for another processor: this one lacks {', '.join(missing)}; {REBUILD}; for a build "
            "that runs on every processor of this kind, add `--config-settings=all-variants=on` or `--all-variants`"
        )
    try:
        with _library_folder():
            _native: Any = import_module("llamapipe.native._native")
    except ImportError as e:
        if (installed := _shadowed_folder()) is not None:
            raise BackendError(
                f"llamapipe was imported from {_PACKAGE.parent}, a source tree without a native module that shadows "
                f"the installation in {installed}; start Python in another folder, or build in the source tree: "
                "`python build_native.py --backend cpu`"
            ) from e
        raise BackendError(
            f"the native module cannot be loaded ({e}); build it: `pip install .` from a clone, or "
            "`python build_native.py --backend cpu` in the source tree"
        ) from e
    lib = _native.lib
    # Without a handler, logging would write warnings to the terminal.
    logger.addHandler(logging.NullHandler())
    lib.lp_log_start()
    for package in packages:
        _load_package(_native, package)
    n_devices = lib.lp_load_backends(str(LIB_DIR).encode())
    drain_log(_native)
    if n_devices <= 0:
        raise BackendError(
            f"no backend could be loaded from {LIB_DIR}; rebuild: `python build_native.py --backend cpu --clean`"
        )
    return _native


def _library_folder() -> AbstractContextManager[object]:
    """Let Windows find the module's libraries. On other systems the module itself stores their location."""
    if sys.platform == "win32":
        return os.add_dll_directory(str(LIB_DIR))
    return nullcontext()


def _load_package(module: Any, package: BackendPackage) -> None:
    """Register a package's backend. If its driver is missing, log a warning; ``llamapipe doctor`` also reports it."""
    if module.lib.lp_load_backend(str(package.module).encode()):
        drain_log(module)
        return
    reason = "; ".join(drain_log(module)) or last_error(module)
    _not_loaded[package.backend] = reason
    logger.warning("the backend of %s %s is not used: %s", package.name, package.version, reason)


def _shadowed_folder() -> Path | None:
    """Return the folder of an installed llamapipe with a native module that this package shadows, or None."""
    for entry in sys.path:
        package = Path(entry or ".").resolve() / "llamapipe"
        if package != _PACKAGE.resolve() and has_module(package / "native"):
            return package.parent
    return None


# The ends of llama.cpp's messages about an aborted step. llamapipe aborts a step if its requests were cancelled.
_ABORTED = (
    "graph_compute_async failed with error 1",
    "failed to compute graph, compute status: 1",
    "failed to decode, ret = 2",
    ", +inf)",  # the message about the cells that llama.cpp then removes
)
# llama.cpp's warning that an Embedder's pooling is not the default, if the model has no default (-1). An Embedder
# always chooses a pooling, so the warning is wrong. If the model has a default, the warning is logged.
_NO_DEFAULT = "model default pooling_type is [-1], but ["
# A warning for each adapter tensor whose base tensor is packed. The adapter's own tensor stays unpacked, as intended.
_PLAIN_ADAPTER = "cannot use buft 'CPU_"
# A warning about a token such as </s> that a file lists as plain text: llama.cpp makes it a control token.
_TOKEN_MENDED = "its type will be overridden"
# Warnings that an assistant's layers share the cells of its target model, which is intended.
_SHARED = ("sharing with layer", "to match the shared source cache")
_HARMLESS = (_NO_DEFAULT, _PLAIN_ADAPTER, *_SHARED)


def last_error(module: Any) -> str:
    """Return the message of the last native call that failed on this thread."""
    return str(module.ffi.string(module.lib.lp_last_error()).decode("utf-8", "replace"))


def enum_names(enum: str) -> dict[int, str]:
    """Return the constants of a native enum: value to name. The names are defined only in native/cdef."""
    elements: dict[int, str] = native().ffi.typeof(f"enum {enum}").elements
    return elements


def drain_log(module: Any) -> list[str]:
    """Pass queued native log records to ``logging``. Any thread.

    Returns the texts of errors, or of warnings if there are no errors: many of llama.cpp's warnings are harmless.
    """
    ffi, lib = module.ffi, module.lib
    text = ffi.new("char[]", _LOG_BYTES)
    level = ffi.new("int *")
    severities = {
        lib.GGML_LOG_LEVEL_WARN: logging.WARNING,
        lib.GGML_LOG_LEVEL_ERROR: logging.ERROR,
    }
    warnings: list[str] = []
    errors: list[str] = []
    severity = logging.DEBUG
    while (n := lib.lp_log_next(text, _LOG_BYTES, level)) >= 0:
        if level[0] != lib.GGML_LOG_LEVEL_CONT:
            # llama.cpp logs a page of INFO per model; a library should log that as DEBUG
            severity = severities.get(level[0], logging.DEBUG)
        line = ffi.buffer(text, n)[:].decode("utf-8", "replace").rstrip()
        if not line.strip("."):
            continue
        if line.endswith((*_ABORTED, _TOKEN_MENDED)) or any(part in line for part in _HARMLESS):
            severity = logging.DEBUG
        logger.log(severity, "%s", line)
        if severity >= logging.WARNING:
            (errors if severity >= logging.ERROR else warnings).append(line)
    return errors or warnings
