"""In the place of llama-cpp-python's low-level names: an import from here says what to use instead."""

from typing import NoReturn

from llamapipe._messages import missing_import


def __getattr__(name: str) -> NoReturn:
    """Raise ImportError, which an import of a name shows; AttributeError for Python's own names."""
    raise missing_import("llama_cpp", name)
