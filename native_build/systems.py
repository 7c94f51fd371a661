"""The systems that are built for: how their files are named, and where libraries look for one another."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class System:
    """A system. ``library`` and ``backend`` are patterns of file names, with ``{}`` for the library's own name."""

    cmake_name: str
    library: str
    backend: str
    module: str  # the cffi module in the stable ABI
    wheel_tag: str  # of platforms, with {} for the processor
    origin: str  # what stands for a library's own folder when its dependencies are looked for


LINUX = System("Linux", "libllamapipe-{}.so.*", "libggml-{}.so", "_native.abi3.so", "linux_{}", "$ORIGIN")
MACOS = System(
    "Darwin", "libllamapipe-{}.*.dylib", "libggml-{}.so", "_native.abi3.so", "macosx_11_0_{}", "@loader_path"
)
# There a library's dependencies are those that the process has loaded already: see llamapipe/native/load.py.
WINDOWS = System("Windows", "libllamapipe-{}.dll", "ggml-{}.dll", "_native.pyd", "win_amd64", "")


def is_program(name: str) -> bool:
    """Whether a file of this name holds code, which some systems want to be executable."""
    return any(part in name for part in (".so", ".dylib", ".dll", ".pyd"))


def system_of(target: str) -> System:
    """The system of a target, as GNU's tools name it; without one, this machine's."""
    if target:
        return WINDOWS if "-windows-" in target else MACOS if "-apple-" in target else LINUX
    return {"darwin": MACOS, "win32": WINDOWS}.get(sys.platform, LINUX)
