"""Defines paths: the project, the user's cache, the package's native folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
PACKAGE_NATIVE = PROJECT / "llamapipe" / "native"
# Pinned requirements: the source archive to build, and the binding that tests and benchmarks compare with.
REQUIREMENTS = PROJECT / "third_party" / "llama.cpp.txt"
PEER_REQUIREMENTS = PROJECT / "third_party" / "llama-cpp-python.txt"
CHECKOUT = PROJECT / "third_party" / "llama.cpp"


def cache_dir() -> Path:
    """Return the folder for downloads, build trees and built libraries, shared by all environments.

    ``LLAMAPIPE_CACHE_DIR`` sets the folder; else it is ``llamapipe`` in the user's cache folder (``XDG_CACHE_HOME``,
    ``~/Library/Caches`` on macOS, ``~/.cache`` elsewhere). The folder may be deleted at any time.
    """
    if own := os.environ.get("LLAMAPIPE_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    # The XDG specification says to ignore relative paths.
    if (xdg := os.environ.get("XDG_CACHE_HOME")) and Path(xdg).is_absolute():
        return Path(xdg) / "llamapipe"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "llamapipe"
    return Path.home() / ".cache" / "llamapipe"
