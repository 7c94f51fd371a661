"""llama-cpp-python's names, backed by one shared engine for each ``Llama``: ``from llamapipe.compat import Llama``.

Calls from many threads run together. Options that llamapipe cannot honour raise and say why.
"""

from llamapipe.compat.grammar import LlamaGrammar
from llamapipe.compat.llama import Llama
from llamapipe.compat.sampling import LogitsProcessorList, MinTokensLogitsProcessor, StoppingCriteriaList
from llamapipe.compat.state import LlamaCache, LlamaRAMCache, LlamaState
from llamapipe.compat.tokenizer import LlamaTokenizer

__all__ = [
    "Llama",
    "LlamaCache",
    "LlamaGrammar",
    "LlamaRAMCache",
    "LlamaState",
    "LlamaTokenizer",
    "LogitsProcessorList",
    "MinTokensLogitsProcessor",
    "StoppingCriteriaList",
]
