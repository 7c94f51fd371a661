"""Converts a vocabulary for llguidance: the bytes of each token, and the tokens that are not text.

It is built once per vocabulary and shared by all of its grammars.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from llamapipe.host.at_exit import awaited_at_exit
from llamapipe.llama.vocab import Vocab
from llamapipe.structured.library import llguidance


class GrammarTokenizer:
    """The tokens of a vocabulary for matchers, and masks of its end-of-generation tokens.

    llguidance sees one more token than the vocabulary has: an end token with the id ``n_vocab``. Where a grammar allows
    that token, all end-of-generation tokens of the vocabulary are allowed. So a grammar can
    also end with a vocabulary that has no such token.

    - ``native``: the ``LLTokenizer``. It refers to the vocabulary weakly, so a cache keyed by vocabularies may hold it.
    - ``eog``: uint32 ``(n_words,)``, the bits of end-of-generation tokens. ``not_eog``: the bits of all other tokens.

    Immutable; any thread. Building takes a Python call and a copy per token: 0.6 s for 152,000 tokens.
    """

    def __init__(self, vocab: Vocab, field: str = "a grammar") -> None:
        library = llguidance(field)
        self.n_vocab = vocab.n_vocab
        self.n_words = (vocab.n_vocab + 31) // 32
        tokens, special = token_bytes(vocab)
        end = vocab.n_vocab
        source = _Source([*tokens, b"<end>"], [*special, end], end, vocab)
        with awaited_at_exit():
            self.native: Any = library.LLTokenizer(library.TokenizerWrapper(source))
        self.eog = _bits(self.n_words, np.fromiter(vocab.eog_tokens, np.int64, len(vocab.eog_tokens)))
        self.not_eog = _bits(self.n_words, np.arange(vocab.n_vocab)) & ~self.eog
        self.eog.flags.writeable = self.not_eog.flags.writeable = False

    def __repr__(self) -> str:
        return f"<GrammarTokenizer n_vocab={self.n_vocab}>"


def token_bytes(vocab: Vocab) -> tuple[list[bytes], list[int]]:
    """The bytes of every token, and the ids of special tokens, which never represent text.

    The bytes of a control token are its name, by which a Lark grammar can ask for it (``<|end|>``). End-of-generation
    tokens are special even if they have text, because one inside a string would end the request there. Tokens without
    text and name (unused ids, padding) have no bytes, and no grammar allows them.
    """
    tokens = [vocab.piece(t) for t in range(vocab.n_vocab)]
    special = set(vocab.eog_tokens)
    for t in [t for t, piece in enumerate(tokens) if not piece]:
        tokens[t] = vocab.detokenize([t], unparse_special=True).encode()
        if tokens[t]:
            special.add(t)
    return tokens, sorted(special)


class _Source:
    """The attributes that ``llguidance.TokenizerWrapper`` reads."""

    bos_token_id: int | None = None

    def __init__(self, tokens: list[bytes], special: list[int], end: int, vocab: Vocab) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end
        self._vocab = weakref.ref(vocab)

    def __call__(self, text: str) -> list[int]:
        """Token ids of ``text``. TypeError for bytes makes llguidance pass valid UTF-8 as str only.

        Masks do not depend on it: grammars are compiled with ``no_forcing``.
        """
        if not isinstance(text, str):
            raise TypeError("text must be str")
        vocab = self._vocab()
        return [] if vocab is None else vocab.tokenize(text, add_special=False, parse_special=False)


def _bits(n_words: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    words = np.zeros(n_words, np.uint32)
    np.bitwise_or.at(words, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return words
