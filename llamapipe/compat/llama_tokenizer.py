"""Has llama-cpp-python's tokenizer under the name of its module there; other names say what to use instead."""

from typing import NoReturn

from llamapipe._messages import missing_import
from llamapipe.compat.tokenizer import LlamaTokenizer

__all__ = ["LlamaTokenizer"]


def __getattr__(name: str) -> NoReturn:
    """Raise ImportError, which the failed import shows; AttributeError for Python's own names."""
    raise missing_import("llama_tokenizer", name)
