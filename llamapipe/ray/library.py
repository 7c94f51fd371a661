"""Imports Ray, with an error that names the extra."""

from __future__ import annotations

import os
from typing import Any


def ray() -> Any:
    """The package ``ray``, without its reports of usage unless they were asked for. Raises ImportError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray as library
    except ModuleNotFoundError as e:
        raise ImportError(
            f"llamapipe.ray needs {e.name}, which is not installed: pip install 'llamapipe[ray]'"
        ) from None
    return library
