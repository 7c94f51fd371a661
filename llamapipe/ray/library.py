"""Imports Ray, with an error that names the extra."""

from __future__ import annotations

from typing import Any


def ray() -> Any:
    """The package ``ray``. Raises ImportError."""
    try:
        import ray as library
    except ModuleNotFoundError as e:
        raise ImportError(
            f"llamapipe.ray needs {e.name}, which is not installed: pip install 'llamapipe[ray]'"
        ) from None
    return library
