"""BERT's tokenizer, which follows Hugging Face's ``BertNormalizer``, ``BertPreTokenizer`` and ``WordPiece``.

BERT models were trained with these rules. llama.cpp's tokenizer differs: it keeps only the first character of a
decomposition and drops every mark. A Hangul syllable would lose its vowel, and Devanagari its vowel signs.
"""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Callable, Mapping

_MOST_CHARACTERS = 100  # of a word; a longer word becomes the unknown token
_N_CACHED = 2**14  # words
_BEGIN = "\u2581"  # the mark before pieces that begin a word, in GGUF files
_CHINESE = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class WordPiece:
    """Splits texts into the longest pieces of a vocabulary, word by word. Any thread.

    ``pieces``: token ids by the pieces' texts in the GGUF file. ``unknown``: the id for words that pieces cannot spell.
    ``lowercase``, ``strip_accents``: what the normalization before splitting does.
    """

    def __init__(self, pieces: Mapping[str, int], unknown: int, lowercase: bool, strip_accents: bool) -> None:
        self._first = {text[1:]: i for text, i in pieces.items() if text.startswith(_BEGIN)}
        self._later = {text: i for text, i in pieces.items() if not text.startswith(_BEGIN)}
        self._longest = max(map(len, pieces), default=0)
        self._unknown = unknown
        self._lowercase, self._strips = lowercase, strip_accents
        self._spaced = _Replacements(_space)
        self._split = _Replacements(lambda character: _split(character, strip_accents))
        self._words: dict[str, tuple[int, ...]] = {}

    def __repr__(self) -> str:
        return f"<WordPiece of {len(self._first) + len(self._later)} pieces>"

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        tokens: list[int] = []
        words = self._words
        for word in self._normalize(text).split(" "):
            if word:
                ids = words.get(word)
                if ids is None:
                    ids = self._pieces(word)
                    if len(words) < _N_CACHED and len(word) <= _MOST_CHARACTERS:
                        words[word] = ids
                tokens += ids
        return tokens

    def _normalize(self, text: str) -> str:
        text = text.translate(self._spaced)
        if self._strips:
            text = unicodedata.normalize("NFD", text)
        if self._lowercase:
            # str.lower() would write a final sigma at the end of a word; the rules do not.
            text = text.replace("\u03a3", "\u03c3").lower()
        return text.translate(self._split)

    def _pieces(self, word: str) -> tuple[int, ...]:
        if len(word) > _MOST_CHARACTERS:
            return (self._unknown,)
        tokens, start, pieces = [], 0, self._first
        while start < len(word):
            for end in range(min(len(word), start + self._longest), start, -1):
                token = pieces.get(word[start:end])
                if token is not None:
                    tokens.append(token)
                    start, pieces = end, self._later
                    break
            else:
                return (self._unknown,)
        return tuple(tokens)


class _Replacements(dict[int, "str | None"]):
    """A table for ``str.translate`` that calls ``replace`` once for each distinct character."""

    def __init__(self, replace: Callable[[str], str | None]) -> None:
        super().__init__()
        self._replace = replace

    def __missing__(self, code: int) -> str | None:
        self[code] = replacement = self._replace(chr(code))
        return replacement


def _space(character: str) -> str | None:
    """Return the text for a character, or None to remove it: a control, format or private-use character, or U+FFFD.

    Every kind of space becomes " ". A Chinese character gets spaces around it, so that it becomes a word.
    """
    if character in "\t\n\r":
        return " "
    if character in "\0\ufffd" or unicodedata.category(character) in ("Cc", "Cf", "Co"):
        return None
    if character.isspace():
        return " "
    is_chinese = any(low <= ord(character) <= high for low, high in _CHINESE)
    return f" {character} " if is_chinese else character


def _split(character: str, strips: bool) -> str | None:
    """Return the text for a character: spaces around punctuation; with ``strips``, nothing for a nonspacing mark."""
    category = unicodedata.category(character)
    if category == "Mn" and strips:
        return None
    return f" {character} " if category[0] == "P" or character in string.punctuation else character
