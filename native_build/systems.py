"""Describes the target systems: the names of their files, and where libraries look for each other."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class System:
    """A system. ``library``, ``backend``: patterns of file names, with ``{}`` for the library's own name."""

    cmake_name: str
    library: str
    backend: str
    module: str  # the file name of a cffi module for the stable ABI
    wheel_tag: str  # the platform tag, with {} for the processor
    origin: str  # means a library's own folder in the search path of its dependencies


LINUX = System("Linux", "libllamapipe-{}.so.*", "libggml-{}.so", "_native.abi3.so", "linux_{}", "$ORIGIN")
MACOS = System(
    "Darwin", "libllamapipe-{}.*.dylib", "libggml-{}.so", "_native.abi3.so", "macosx_11_0_{}", "@loader_path"
)
# Windows has no such path: dependencies must already be loaded, see llamapipe/native/load.py.
WINDOWS = System("Windows", "libllamapipe-{}.dll", "ggml-{}.dll", "_native.pyd", "win_amd64", "")


def is_program(name: str) -> bool:
    """Return whether a file with this name holds code, which must be executable on some systems."""
    return any(part in name for part in (".so", ".dylib", ".dll", ".pyd"))


def system_of(target: str) -> System:
    """Return the system of a target, named as in GNU's tools; this machine's system if ``target`` is empty."""
    if target:
        return WINDOWS if "-windows-" in target else MACOS if "-apple-" in target else LINUX
    return {"darwin": MACOS, "win32": WINDOWS}.get(sys.platform, LINUX)
