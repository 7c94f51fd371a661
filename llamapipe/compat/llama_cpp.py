"""Stands in for llama-cpp-python's low-level names: importing one raises an error that names what to use instead."""

from typing import NoReturn

from llamapipe._messages import missing_import


def __getattr__(name: str) -> NoReturn:
    """Raise ImportError, which the failed import shows; AttributeError for Python's own names."""
    raise missing_import("llama_cpp", name)
