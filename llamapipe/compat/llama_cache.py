"""Has llama-cpp-python's caches under the name of their module there; other names say what to use instead."""

from typing import NoReturn

from llamapipe._messages import missing_import
from llamapipe.compat.base import LlamaCache, LlamaDiskCache, LlamaRAMCache

__all__ = ["LlamaCache", "LlamaDiskCache", "LlamaRAMCache"]


def __getattr__(name: str) -> NoReturn:
    """Raise ImportError, which the failed import shows; AttributeError for Python's own names."""
    raise missing_import("llama_cache", name)
