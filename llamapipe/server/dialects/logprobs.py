"""Log-probabilities as the APIs write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llamapipe.llama.vocab import Vocab
from llamapipe.results import TokenLogprob, logprob_lists
from llamapipe.text.stream import TextOffsets


def token_text(piece: bytes) -> str:
    """Return the text of a token with these bytes.

    Bytes that are not complete characters are written in hexadecimal, so that different tokens have different texts.
    """
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class CompletionLogprobs:
    """Encodes the ``logprobs`` of ``/v1/completions``, whose ``text_offset`` counts characters of one choice's text.

    A token's offset is the index of the character that holds its first byte. ``as_ids``: tokens are
    written as ``token_id:5``.
    """

    def __init__(self, vocab: Vocab, offsets: TextOffsets, as_ids: bool = False) -> None:
        self._vocab = vocab
        self._as_ids = as_ids
        self._offsets = offsets

    def __repr__(self) -> str:
        return f"CompletionLogprobs({self._offsets})"

    def of(self, entries: Iterable[TokenLogprob], first: int | None = None) -> dict[str, Any]:
        """Return the ``logprobs`` of the choice's next tokens. ``first``: a token before them that has none."""
        lists = logprob_lists(entries, first, self._text, self._offset, self._top)
        logprobs = [None if logprob is None else _finite(logprob) for logprob in lists.logprobs]
        return {
            "tokens": lists.tokens,
            "token_logprobs": logprobs,
            "top_logprobs": lists.tops,
            "text_offset": lists.offsets,
        }

    def _text(self, token: int) -> str:
        return id_text(token) if self._as_ids else token_text(self._vocab.written_piece(token))

    def _offset(self, token: int) -> int:
        return self._offsets.next(self._vocab.piece(token))

    def _top(self, entry: TokenLogprob, text: str) -> dict[str, float]:
        top = {self._text(other.id): _finite(other.logprob) for other in reversed(entry.top)}
        top.setdefault(text, _finite(entry.logprob))
        return top


def chat_logprobs(entries: Sequence[TokenLogprob], vocab: Vocab, as_ids: bool = False) -> dict[str, Any]:
    """Return the ``logprobs`` of ``/v1/chat/completions``. ``as_ids``: tokens are written as ``token_id:5``."""

    def written(token: int, logprob: float) -> dict[str, Any]:
        piece = vocab.written_piece(token)
        text = id_text(token) if as_ids else token_text(piece)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(piece)}

    content = [
        {
            **written(entry.id, entry.logprob),
            "top_logprobs": [written(top.id, top.logprob) for top in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokens: Sequence[int], entries: Sequence[TokenLogprob], vocab: Vocab
) -> list[dict[str, Any] | None]:
    """Return vLLM's ``prompt_logprobs``: for each prompt token, its entry and those of the most probable tokens, by id.

    The first token has None. ``rank`` is None for a token that is not among the most probable tokens.
    """
    scores: list[dict[str, Any] | None] = [None] * (len(tokens) - len(entries))
    for entry in entries:
        ranked = {top.id: (rank, top.logprob) for rank, top in enumerate(entry.top, 1)}
        ranked.setdefault(entry.id, (0, entry.logprob))
        scores.append(
            {
                str(token): {
                    "logprob": _finite(logprob),
                    "rank": rank or None,
                    "decoded_token": token_text(vocab.written_piece(token)),
                }
                for token, (rank, logprob) in ranked.items()
            }
        )
    return scores


def id_text(token: int) -> str:
    """Return a token's text in vLLM's form for clients that ask for ids."""
    return f"token_id:{token}"


def _finite(logprob: float) -> float:
    """Return the log-probability, or the lowest value of OpenAI's API for infinity, which JSON cannot express."""
    return max(logprob, -9999.0)
