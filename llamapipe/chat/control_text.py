"""Keeps control tokens out of what callers write: only the template may write them.

A message may hold the text of a control token, such as ``<|im_end|>``. Before a conversation is rendered, a character
that no message holds, the mark, is put into every such text. Afterwards the template's control tokens are found as they
are, the marks are removed from the text between them, and that text is tokenized as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_PRIVATE = range(0xE000, 0xF8FF)  # Unicode's private use area


class ControlTexts:
    """The texts of a vocabulary's control tokens, by id. Any thread."""

    def __init__(self, texts: Mapping[str, int]) -> None:
        self._ids = dict(texts)
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if self._ids else None
        self._prefixes = frozenset(text[:n] for text in self._ids for n in range(1, len(text)))
        self._max_prefix = max(map(len, self._prefixes), default=0)

    def __repr__(self) -> str:
        return f"<ControlTexts n={len(self._ids)}>"

    def first_in(self, text: str) -> str | None:
        """The first text of a control token in a text."""
        found = self._pattern.search(text) if self._pattern is not None else None
        return None if found is None else found.group()

    def marked(self, text: str, mark: str) -> str:
        """A text with a mark inside each control token's text, and after an end that the template could complete."""
        if self._pattern is None:
            return text
        text = self._pattern.sub(lambda found: found.group()[0] + mark + found.group()[1:], text)
        for n in range(min(self._max_prefix, len(text)), 0, -1):
            if text[-n:] in self._prefixes:
                return text + mark
        return text

    def split(self, text: str) -> Iterator[str | int]:
        """The parts of a text: control tokens as ids, and the text between them."""
        if self._pattern is None:
            yield text
            return
        at = 0
        for found in self._pattern.finditer(text):
            if found.start() > at:
                yield text[at : found.start()]
            yield self._ids[found.group()]
            at = found.end()
        if at < len(text):
            yield text[at:]


def unused_character(values: Any) -> str:
    """A private-use character that no text of a JSON value holds."""
    used = {character for text in _texts(values) for character in text if ord(character) in _PRIVATE}
    return next(chr(code) for code in _PRIVATE if chr(code) not in used)


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def tokenized(
    text: str,
    mark: str,
    controls: ControlTexts,
    tokenize: Callable[[str, bool, bool], list[int]],
    bos: list[int],
) -> list[int]:
    """The tokens of a rendered conversation in which the callers' texts are marked.

    ``tokenize``: takes a text, and whether to add and to parse special tokens. ``bos``: the tokens that stand first.
    """
    if mark not in text:
        return tokenize(text, True, True)
    tokens = list(bos)
    for part in controls.split(text):
        if isinstance(part, int):
            tokens.append(part)
        else:
            tokens += tokenize(part.replace(mark, ""), False, False)
    return tokens
