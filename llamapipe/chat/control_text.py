"""Keeps control tokens out of the callers' text: only the template may write them.

A message may hold the text of a control token, such as ``<|im_end|>``. Before a conversation is rendered,
``ControlTexts.marked`` inserts a mark into every such text. The mark is a character that the conversation does not
contain. In the rendered prompt, ``tokenized`` first finds the template's own control tokens. Then it removes the marks
from the text between these tokens, and tokenizes this text as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_PRIVATE = range(0xE000, 0xF8FF)  # Unicode's private use area
_PRIVATE_TEXT = re.compile(f"[{chr(_PRIVATE[0])}-{chr(_PRIVATE[-1])}]")
_SPACE = " \t\n\v\f\r"  # C's isspace()
_NAME = re.compile(r"\w*", re.ASCII)


class SpecialToken(NamedTuple):
    """A token that is matched in a text before the tokenizer runs.

    ``is_control``: the token is matched only if special tokens are parsed. User-defined tokens, which are not control
    tokens, are always matched. ``strips_left``, ``strips_right``: white space before or after the token is dropped.
    """

    text: str
    id: int
    is_control: bool
    strips_left: bool = False
    strips_right: bool = False


class Mark(NamedTuple):
    """The characters that mark the text of control tokens.

    ``character``: inserted into the text. ``escape``: the same character in JSON's ASCII form. ``stand_in``: replaces
    the text of a control token that has a single character.
    """

    character: str
    escape: str
    stand_in: str


class ControlTexts:
    """The special tokens of a vocabulary, by their text. Any thread."""

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        # llama.cpp looks for long texts first, counted in bytes.
        self._tokens = sorted((t for t in tokens if t.text), key=lambda t: -len(t.text.encode()))
        texts = [token.text for token in self._tokens if token.is_control]
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._single = frozenset(text for text in texts if len(text) == 1)
        self._starts = frozenset(t[:n] for t in texts for n in range(1, len(t)) if not _NAME.fullmatch(t[:n]))
        self._ends = frozenset(t[n:] for t in texts for n in range(1, len(t)) if not _NAME.fullmatch(t[n:]))
        self._longest = max(map(len, texts), default=0)

    def __repr__(self) -> str:
        return f"<ControlTexts n={len(self._tokens)}>"

    def first_in(self, text: str) -> str | None:
        """Return the first control token's text in ``text``; None if there is none."""
        match = self._pattern.search(text) if self._pattern is not None else None
        return None if match is None else match.group()

    def marked(self, text: str, mark: Mark) -> str:
        """Mark each control token's text in ``text``.

        Also mark the beginning and the end of ``text`` if the template could complete them to a control token.
        """
        if self._pattern is None or not text:
            return text
        # Overlapping texts of control tokens need several passes.
        while self._pattern.search(text):
            text = self._pattern.sub(lambda match: self._broken(match.group(), mark), text)
        # Templates trim contents, so white space at the ends does not count.
        core = text.strip()
        start = text.find(core)
        before, after = text[:start], text[start + len(core) :]
        if any(core[:n] in self._ends for n in range(1, min(self._longest, len(core) + 1))):
            before += mark.character
        if any(core[-n:] in self._starts for n in range(1, min(self._longest, len(core) + 1))):
            after = mark.character + after
        return before + core + after

    def _broken(self, text: str, mark: Mark) -> str:
        if text in self._single:
            # The number of characters identifies the token.
            return mark.character + mark.stand_in * (sorted(self._single).index(text) + 1) + mark.character
        return text[0] + mark.character + text[1:]

    def unmarked(self, text: str, mark: Mark) -> str:
        """Reverse ``marked``."""
        for i, single in reversed(list(enumerate(sorted(self._single), 1))):
            text = text.replace(mark.character + mark.stand_in * i + mark.character, single)
        return text.replace(mark.character, "")

    def split(self, text: str) -> list[str | int]:
        """Split a text, as llama.cpp does, into ids of special tokens and the text between them."""
        parts: list[str | int] = [text]
        for token in self._tokens:
            if token.text in text:
                parts = [
                    p for part in parts for p in ([part] if isinstance(part, int) else _cut(part, token))
                ]
        return parts


def _cut(text: str, token: SpecialToken) -> Iterator[str | int]:
    pieces = text.split(token.text)
    for i, piece in enumerate(pieces):
        if i > 0:
            yield token.id
        plain = piece.lstrip(_SPACE) if i > 0 and token.strips_right else piece
        plain = plain.rstrip(_SPACE) if i < len(pieces) - 1 and token.strips_left else plain
        if plain:
            yield plain


def unused_mark(values: Any) -> Mark:
    """Return a mark of private-use characters that no text of a JSON value contains, literally or escaped."""
    texts = list(_texts(values))
    used = {character for text in texts if not text.isascii() for character in _PRIVATE_TEXT.findall(text)}
    escaped = "".join(text.lower() for text in texts if "\\u" in text)
    free = (
        chr(code) for code in _PRIVATE if chr(code) not in used and json.dumps(chr(code))[1:-1] not in escaped
    )
    mark = next(free)
    return Mark(mark, json.dumps(mark)[1:-1], next(free))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
        for item in value:
            yield from _texts(item)


def tokenized(
    text: str,
    mark: Mark,
    controls: ControlTexts,
    tokenize: Callable[[str, bool, bool], list[int]],
    added: tuple[Sequence[int], Sequence[int]],
    media_mark: str = "",
) -> list[int]:
    """Tokenize a rendered conversation in which the callers' texts are marked.

    ``tokenize``: takes a text, and whether to add and to parse special tokens. ``added``: the tokens that ``tokenize``
    adds before and after a text. ``media_mark``: the mark around the numbers of images and sounds; empty without any.
    Number ``n`` becomes the token ``-1 - n``.
    """
    text = text.replace(mark.escape, mark.character)
    if mark.character not in text and not media_mark:
        return tokenize(text, True, True)
    first, last = added
    tokens: list[int] = []
    for part in controls.split(text):
        if isinstance(part, int):
            tokens.append(part)
        elif plain := controls.unmarked(part, mark):
            # Every second piece is the number of an image or a sound.
            for i, piece in enumerate(
                re.split(f"{media_mark}([0-9]+){media_mark}", plain) if media_mark else [plain]
            ):
                if i % 2:
                    tokens.append(-1 - int(piece))
                elif piece:
                    tokens += tokenize(piece, False, False)
    if not first or tokens[: len(first)] != list(first):
        tokens = [*first, *tokens]
    return [*tokens, *last]
