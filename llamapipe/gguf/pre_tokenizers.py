"""How byte-level BPE tokenizers cut a text into words before they merge bytes, by the name in ``tokenizer.ggml.pre``.

Each entry lists regular expressions that are applied one after the other. Each match of an expression is a word, and so
is the text between two matches. The syntax is that of the ``tokenizers`` package (Oniguruma). The table has only those
names whose token ids were compared with llama.cpp's.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class PreTokenizer(NamedTuple):
    """``patterns``: applied in this order. ``whole_words``: a word that is a piece is taken whole, without merges."""

    patterns: tuple[str, ...]
    whole_words: bool = False


_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _words(letters: str, digits: str) -> str:
    """The expression of GPT-4 and its descendants. ``letters``: a class without brackets; ``digits``: a number."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?[^\s{letters}\p{{N}}]+[\r\n]*|{_ENDS}"


_LLAMA3: Final = _words(r"\p{L}", r"\p{N}{1,3}")
_QWEN2: Final = _words(r"\p{L}", r"\p{N}")
_QWEN35: Final = _words(r"\p{L}\p{M}", r"\p{N}")

PRE_TOKENIZERS: Final = {
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "modern-bert", "mpt", "olmo", "jais"),
            *("trillion", "granite-docling", "exaone4"),
        ),
        PreTokenizer((_GPT2,)),
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        PreTokenizer((_LLAMA3,), whole_words=True),
    ),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer((_LLAMA3,), whole_words=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "hunyuan", "solar-open", "megrez"),
        PreTokenizer((_QWEN2,)),
    ),
    "qwen35": PreTokenizer((_QWEN35,)),
}
