"""Has llama-cpp-python's grammars under the name of their module there; other names say what to use instead."""

from typing import NoReturn

from llamapipe._messages import missing_import
from llamapipe.compat.sampling import LlamaGrammar

__all__ = ["LlamaGrammar"]


def __getattr__(name: str) -> NoReturn:
    """Raise ImportError, which the failed import shows; AttributeError for Python's own names."""
    raise missing_import("llama_grammar", name)
