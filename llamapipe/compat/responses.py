"""Converts completions and chats to the dictionaries of OpenAI's API that llama-cpp-python returns."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from llamapipe.compat.tokenizer import LlamaTokenizer
from llamapipe.results import ChatChoice, ChatDelta, Delta, TokenLogprob, call_message, logprob_lists
from llamapipe.text.stream import TextOffsets


def head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """Return the fields that all answers begin with."""
    return {"id": f"{prefix}-{uuid.uuid4()}", "object": kind, "created": int(time.time()), "model": model}


def usage(n_prompt: int, n_completion: int) -> dict[str, int]:
    """Return the ``usage`` of an answer: its counts of tokens."""
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
    }


class LogprobWriter:
    """Writes the ``logprobs`` of a completion. ``offsets``: where each token begins in the text."""

    def __init__(self, tokenizer: LlamaTokenizer, offsets: TextOffsets) -> None:
        self._tokenizer = tokenizer
        self._offsets = offsets

    def __repr__(self) -> str:
        return f"LogprobWriter({self._offsets})"

    def write(self, entries: Iterable[TokenLogprob], first: int | None = None) -> dict[str, Any]:
        """Return the ``logprobs`` of tokens. ``first``: a preceding token that has no log-probability."""
        lists = logprob_lists(entries, first, self._text, self._offset, self._top)
        return {
            "tokens": lists.tokens,
            "text_offset": lists.offsets,
            "token_logprobs": lists.logprobs,
            "top_logprobs": lists.tops,
        }

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token])

    def _offset(self, token: int) -> int:
        return self._offsets.next(self._tokenizer.detokenize([token]))

    def _top(self, entry: TokenLogprob, text: str) -> dict[str, float]:
        top = {self._text(other.id): other.logprob for other in reversed(entry.top)}
        return {**dict(reversed(top.items())), text: entry.logprob}


def completion_chunks(
    start: dict[str, Any], deltas: Iterable[Delta], writer: LogprobWriter | None
) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a streamed completion; the last one has a finish reason and no text."""
    for delta in deltas:
        logprobs = None
        if writer is not None and delta.logprobs:
            logprobs = writer.write(delta.logprobs)
        if delta.text or logprobs is not None:
            yield start | {"choices": [completion_choice(delta.text, logprobs, None)]}
        if delta.finish_reason is not None:
            yield start | {"choices": [completion_choice("", None, delta.finish_reason)]}


def completion_choice(text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    """Return a choice of a completion; there is only one."""
    return {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": reason}


def chat_choice(choice: ChatChoice) -> dict[str, Any]:
    """Return a choice of a chat; there is only one."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.content}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        calls = [call_message(call, as_written=True) for call in choice.tool_calls]
        message |= {
            "content": choice.content or None,
            "tool_calls": calls,
            "function_call": calls[0]["function"],
        }
    logprobs = None if choice.logprobs is None else chat_logprobs(choice.logprobs)
    return {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def chat_chunks(start: dict[str, Any], deltas: Iterable[ChatDelta]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a streamed chat."""

    def chunk(delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        return start | {
            "choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]
        }

    yield chunk({"role": "assistant"})
    for part in deltas:
        delta: dict[str, Any] = {}
        if part.content:
            delta["content"] = part.content
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        if part.tool_calls:
            delta["tool_calls"] = [
                {
                    "index": call.index,
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in part.tool_calls
            ]
        logprobs = chat_logprobs(part.logprobs) if part.logprobs else None
        if delta or logprobs is not None:
            yield chunk(delta, logprobs=logprobs)
        if part.finish_reason is not None:
            yield chunk({}, part.finish_reason)


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat."""

    def entry(piece: bytes, logprob: float) -> dict[str, Any]:
        finite = logprob if math.isfinite(logprob) else -9999.0
        return {"token": piece.decode("utf-8", "replace"), "bytes": list(piece), "logprob": finite}

    content = [
        entry(token.piece, token.logprob) | {"top_logprobs": [entry(t.piece, t.logprob) for t in token.top]}
        for token in entries
    ]
    return {"content": content, "refusal": None}
