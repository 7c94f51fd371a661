"""The folder for files that can be made again: the user's cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The folder in the user's cache that is llamapipe's, which may not exist yet. It may be deleted at any time.

    ``LLAMAPIPE_CACHE_DIR`` sets it; else it is ``llamapipe`` in ``XDG_CACHE_HOME``, ``~/Library/Caches`` on macOS,
    ``~/.cache`` elsewhere. Raises RuntimeError if there is no home folder.
    """
    if own := os.environ.get("LLAMAPIPE_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    # The XDG specification says to ignore relative paths.
    if (xdg := os.environ.get("XDG_CACHE_HOME")) and Path(xdg).is_absolute():
        return Path(xdg) / "llamapipe"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "llamapipe"
    return Path.home() / ".cache" / "llamapipe"
