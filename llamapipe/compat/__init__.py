"""Provides llama-cpp-python's names, with one shared engine behind each ``Llama``.

Use it with ``from llamapipe.compat import Llama``. Calls from many threads run together. Options that llamapipe cannot
honour raise an error that says why. The constants that the constructor takes, such as ``GGML_TYPE_Q8_0``, are also
here.
"""

import sys
from importlib.util import find_spec

from llamapipe._messages import quoted, unknown_attribute
from llamapipe._names_elsewhere import INSTEAD
from llamapipe.compat.base import LlamaCache, LlamaDiskCache, LlamaRAMCache, LlamaState
from llamapipe.compat.llama import Llama
from llamapipe.compat.options import CONSTANTS
from llamapipe.compat.sampling import (
    LlamaGrammar,
    LogitsProcessor,
    LogitsProcessorList,
    MinTokensLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)
from llamapipe.compat.tokenizer import LlamaTokenizer

__version__ = "0.3.36"  # of llama-cpp-python: the version whose names these are

__all__ = [
    "Llama", "LlamaCache", "LlamaDiskCache", "LlamaGrammar", "LlamaRAMCache", "LlamaState", "LlamaTokenizer",
    "LogitsProcessor", "LogitsProcessorList", "MinTokensLogitsProcessor", "StoppingCriteria",
    "StoppingCriteriaList",
]  # fmt: skip


def __getattr__(name: str) -> int:
    """Return the value of a constant. Raises AttributeError, which names a replacement or the nearest name.

    ``from llama_cpp import NAME`` gets an ImportError with that text: it would hide an AttributeError behind its own.
    """
    if name in CONSTANTS:
        return CONSTANTS[name]
    if name.startswith(("llama_", "ggml_")) and name not in INSTEAD["llama_cpp"]:  # functions of llama.cpp
        what = INSTEAD["llama_cpp"]["llama_cpp"]
        error = AttributeError(f"llamapipe.compat has no attribute {quoted(name)}; {what}", name=name)
    else:
        error = unknown_attribute("llamapipe.compat", name, __dir__(), "llama_cpp")
    asker = sys._getframe(1).f_code.co_name
    if asker == "_handle_fromlist" and not name.startswith("__") and find_spec(f"{__name__}.{name}") is None:
        raise ImportError(str(error), name=__name__)
    raise error


def __dir__() -> list[str]:
    """Return the public names, for completion in an editor or notebook."""
    return sorted([*__all__, *CONSTANTS, "__version__"])
