"""Answers of ``/v1/messages``, in Anthropic's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamapipe.results import ChatChoice, ChatDelta
from llamapipe.server._times import RequestTimes
from llamapipe.server.dialects.encoder import Counts, Encoder
from llamapipe.server.json_bytes import typed_event

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "timeout": "max_tokens",
}


class AnthropicEncoder(Encoder[ChatDelta]):
    """Encodes the answer to one request, complete or streamed. A stream has content blocks, one open at a time."""

    def __init__(self, call_id: str, model: str, times: RequestTimes) -> None:
        self._id = call_id
        self._model = model
        self._times = times
        self._index = -1
        self._open: object = None  # the open block: "text", "thinking", or the index of a tool call

    def __repr__(self) -> str:
        return f"<AnthropicEncoder {self._id} open={self._open!r}>"

    def whole(self, choice: ChatChoice, counts: Counts) -> dict[str, Any]:
        """Return the complete answer."""
        return self._message(_content(choice), counts) | _stop(choice)

    def _message(self, content: list[dict[str, Any]], counts: Counts) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": counts.n_prompt - counts.n_cached,
                "output_tokens": counts.n_completion,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": counts.n_cached,
            },
        }

    # ---- streamed
    def begin(self, index: int, counts: Counts, prompt: Sequence[int]) -> bytes:
        """Return the event that begins the message, without content."""
        return _event("message_start", message=self._message([], counts._replace(n_completion=0)))

    def part(self, index: int, part: ChatDelta, counts: Counts) -> bytes:
        """Return the events for a part."""
        events: list[bytes] = []
        if part.reasoning:
            events += self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta({"type": "thinking_delta", "thinking": part.reasoning}))
        if part.content:
            events += self._switch("text", {"type": "text", "text": ""})
            events.append(self._delta({"type": "text_delta", "text": part.content}))
        for piece in part.tool_calls:
            block: dict[str, Any] = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            events += self._switch(piece.index, block)
            if piece.arguments:
                events.append(self._delta({"type": "input_json_delta", "partial_json": piece.arguments}))
        if part.finish_reason is not None:
            if self._index < 0:
                events += self._switch("text", {"type": "text", "text": ""})
            events.append(_event("content_block_stop", index=self._index))
            usage = {"output_tokens": counts.n_completion}
            events.append(_event("message_delta", delta=_stop(part), usage=usage))
        return b"".join(events)

    def _switch(self, what: object, block: dict[str, Any]) -> list[bytes]:
        if self._open == what:
            return []
        events = [] if self._open is None else [_event("content_block_stop", index=self._index)]
        self._open = what
        self._index += 1
        return [*events, _event("content_block_start", index=self._index, content_block=block)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def end(self, counts: Counts, prompt: Sequence[int]) -> bytes:
        """Return the event that ends the stream, with llama-server's ``timings``."""
        return _event("message_stop", timings=self._times.timings(counts.n_prompt, counts.n_completion))


def _event(kind: str, **fields: Any) -> bytes:
    return typed_event({"type": kind, **fields})


def _content(choice: ChatChoice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasoning:
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    if choice.content or not choice.tool_calls:
        blocks.append({"type": "text", "text": choice.content})
    return blocks + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        for call in choice.tool_calls
    ]


def _stop(end: ChatChoice | ChatDelta) -> dict[str, Any]:
    reason = "stop_sequence" if end.stop_string is not None else _STOP_REASONS[str(end.finish_reason)]
    return {"stop_reason": reason, "stop_sequence": end.stop_string}
