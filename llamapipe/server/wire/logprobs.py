"""Log-probabilities in the formats of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llamapipe.engine.results import TokenLogprob
from llamapipe.llama.vocab import Vocab
from llamapipe.server.errors import ApiError

MAX_TOP = 100


def token_text(piece: bytes) -> str:
    """A token's text. Bytes that are not complete characters are written in hexadecimal, so that texts are unique."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class CompletionLogprobs:
    """The ``logprobs`` of ``/v1/completions``, whose ``text_offset`` counts through the text of one choice."""

    def __init__(self, vocab: Vocab, offset: int = 0) -> None:
        self._vocab = vocab
        self._offset = offset

    def __repr__(self) -> str:
        return f"CompletionLogprobs(offset={self._offset})"

    def of(self, entries: Iterable[TokenLogprob], first: int | None = None) -> dict[str, Any]:
        """The next tokens of the choice. ``first``: a token before them that has no log-probability."""
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        if first is not None:
            self._add(first, tokens, offsets)
            logprobs.append(None)
            tops.append(None)
        for entry in entries:
            self._add(entry.id, tokens, offsets)
            logprobs.append(_finite(entry.logprob))
            top = {self._text(t.id): _finite(t.logprob) for t in reversed(entry.top)}
            top.setdefault(tokens[-1], _finite(entry.logprob))
            tops.append(top)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _text(self, token: int) -> str:
        return token_text(self._vocab.written_piece(token))

    def _add(self, token: int, tokens: list[str], offsets: list[int]) -> None:
        tokens.append(self._text(token))
        offsets.append(self._offset)
        self._offset += len(self._vocab.piece(token).decode(errors="replace"))


def chat_logprobs(entries: Sequence[TokenLogprob], vocab: Vocab) -> dict[str, Any]:
    """The ``logprobs`` of ``/v1/chat/completions``."""
    content = [
        {
            **_chat_entry(vocab.written_piece(entry.id), entry.logprob),
            "top_logprobs": [_chat_entry(vocab.written_piece(top.id), top.logprob) for top in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_entry(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token_text(piece), "logprob": _finite(logprob), "bytes": list(piece)}


def _finite(logprob: float) -> float:
    """Replaces infinity, which JSON does not have, with the lowest value of OpenAI's API."""
    return max(logprob, -9999.0)


def check_top(name: str, value: int | None, most: int = MAX_TOP) -> int | None:
    """Checks a number of alternatives. Raises ApiError 400 outside 0 to ``most``."""
    if value is not None and not 0 <= value <= most:
        raise ApiError(400, f"{name} is {value}; it must be from 0 to {most}", name)
    return value
