"""Answers of ``/v1/fim/completions``, in the format of Mistral's chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamapipe.results import Completion, Delta
from llamapipe.server.dialects.encoder import Counts, Encoder
from llamapipe.server.dialects.openai_stream import DONE, ChunkWriter, usage
from llamapipe.server.json_bytes import encode_json


class FimEncoder(Encoder[Delta]):
    """Encodes the answer to one request, complete or streamed. The first event with text has the role."""

    def __init__(self, call_id: str, model: str, created: int) -> None:
        self._common = {"id": call_id, "object": "chat.completion", "created": created, "model": model}
        self._writer = ChunkWriter({**self._common, "object": "chat.completion.chunk"})
        self._has_role = False

    def __repr__(self) -> str:
        return f"<FimEncoder {self._common['id']}>"

    def whole(self, done: Completion, counts: Counts) -> dict[str, Any]:
        """Return the complete answer."""
        message = {"role": "assistant", "content": done.text, "tool_calls": None, "prefix": False}
        choice = {"index": 0, "message": message, "finish_reason": done.finish_reason}
        return {**self._common, "choices": [choice], "usage": usage(counts)}

    def part(self, index: int, part: Delta, counts: Counts) -> bytes:
        """Return the event for a part. The last event has the usage."""
        if part.finish_reason is not None:
            self._writer.set_usage(usage(counts))
        elif not part.text:
            return b""
        delta = {"content": part.text} if self._has_role else {"role": "assistant", "content": part.text}
        self._has_role = True
        return self._writer.chunk(
            encode_json({"index": 0, "delta": delta, "finish_reason": part.finish_reason})
        )

    def end(self, counts: Counts, prompt: Sequence[int]) -> bytes:
        """Return the end of the stream."""
        return DONE
