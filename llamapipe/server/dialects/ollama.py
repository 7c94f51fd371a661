"""Answers of ``/api/chat`` and ``/api/generate``, in Ollama's format: lines of JSON, or one object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from llamapipe.chat.results import ToolCall, ToolCallDelta
from llamapipe.llama.vocab import Vocab
from llamapipe.results import ChatDelta, Delta
from llamapipe.server._times import RequestTimes
from llamapipe.server.dialects.encoder import Counts, Encoder, PromptAt
from llamapipe.server.dialects.logprobs import chat_logprobs
from llamapipe.server.json_bytes import encode_json, line


class OllamaEncoder(Encoder[Any]):
    """Encodes the answer to one request: a line for each part, or with ``is_whole`` a single object at the end.

    ``is_chat``: for ``/api/chat``, otherwise for ``/api/generate``. ``is_empty``: the request asks for no tokens.
    ``with_context``: the answer ends with the tokens so far, from which a client can continue. ``loaded_ns``: the
    nanoseconds that the request waited for its model.
    """

    def __init__(
        self,
        model: str,
        is_chat: bool,
        vocab: Vocab,
        times: RequestTimes,
        is_whole: bool = False,
        is_empty: bool = False,
        with_context: bool = False,
        loaded_ns: int = 0,
    ) -> None:
        self.prompt_at: PromptAt = "end" if with_context else None
        self._model = model
        self._is_chat = is_chat
        self._vocab = vocab
        self._times = times
        self._is_whole = is_whole
        self._is_empty = is_empty
        self._loaded_ns = loaded_ns
        self._calls = _Calls()
        self._token_ids: list[int] = []
        self._done_reason = "stop"
        # The parts of an answer that is one object.
        self._contents: list[str] = []
        self._thinking: list[str] = []
        self._all_calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []

    def __repr__(self) -> str:
        return f"<OllamaEncoder {self._model} n_tokens={len(self._token_ids)}>"

    def part(self, index: int, part: ChatDelta | Delta, counts: Counts) -> bytes:
        """Return the line for a part; nothing if the part has no text or is incomplete."""
        if isinstance(part, Delta):
            part = ChatDelta(part.text, "", (), part.token_ids, part.logprobs, part.finish_reason)
        self._token_ids += part.token_ids
        is_last = part.finish_reason is not None
        if self._is_empty or part.finish_reason in ("length", "timeout"):
            self._done_reason = "length"
        if self._is_empty:
            return b""
        calls = [*self._calls.complete(part.tool_calls, is_last)]
        logprobs = [] if part.logprobs is None else chat_logprobs(part.logprobs, self._vocab)["content"]
        if self._is_whole:
            self._contents.append(part.content)
            self._thinking.append(part.reasoning)
            self._all_calls += calls
            self._logprobs += logprobs
        elif part.content or part.reasoning or calls or logprobs:
            return line(self._object(part.content, part.reasoning, calls, logprobs))
        return b""

    def end(self, counts: Counts, prompt: Sequence[int]) -> bytes:
        """Return the last line, with the counts, or the whole answer with ``is_whole``."""
        texts = "".join(self._contents), "".join(self._thinking)
        fields = self._object(*texts, self._all_calls, self._logprobs)
        fields |= {"done": True, "done_reason": self._done_reason}
        if self.prompt_at is not None:
            fields["context"] = [*prompt, *self._token_ids]
        arrived, ended = self._times.arrived_at, self._times.last_at or self._times.arrived_at
        first = self._times.first_at if self._token_ids and self._times.first_at is not None else ended
        submitted = arrived if self._times.submitted_at is None else self._times.submitted_at
        fields |= {
            "total_duration": nanoseconds(ended - arrived) + self._loaded_ns,
            "load_duration": self._loaded_ns,
            "prompt_eval_count": counts.n_prompt,
            "prompt_eval_duration": nanoseconds(first - submitted),
            "eval_count": 0 if self._is_empty else len(self._token_ids),
            "eval_duration": nanoseconds(ended - first),
        }
        return encode_json(fields) if self._is_whole else line(fields)

    def ping(self) -> bytes:
        """Return a line without text, which does not change the client's text."""
        return line(self._object())

    def _object(
        self,
        content: str = "",
        thinking: str = "",
        calls: Sequence[Mapping[str, Any]] = (),
        logprobs: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        fields = empty_part(self._model, self._is_chat)
        message = fields["message"] if self._is_chat else fields
        message["content" if self._is_chat else "response"] = content
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        if logprobs:
            fields["logprobs"] = logprobs
        return fields


class _Calls:
    """Joins the pieces of tool calls, because a line of this API has only whole calls."""

    def __init__(self) -> None:
        self._open: tuple[ToolCallDelta, list[str]] | None = None

    def __repr__(self) -> str:
        return f"<_Calls {self._open}>"

    def complete(self, pieces: Sequence[ToolCallDelta], is_last: bool) -> Iterator[dict[str, Any]]:
        """Yield the calls that these pieces complete. ``is_last``: there are no more pieces."""
        for piece in pieces:
            if piece.id is not None:
                yield from self._close()
                self._open = piece, []
            if self._open is not None:
                self._open[1].append(piece.arguments)
        if is_last:
            yield from self._close()

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        (first, texts), self._open = self._open, None
        call = ToolCall.of(str(first.id), str(first.name), "".join(texts))
        function = {"index": first.index, "name": call.name, "arguments": call.arguments}
        yield {"id": call.id, "function": function}


def empty_part(model: str, is_chat: bool) -> dict[str, Any]:
    """Return a part of an answer without text, which does not change the client's text."""
    empty = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return {"model": model, "created_at": now(), **empty, "done": False}


def now() -> str:
    """Return the current time in this API's format."""
    return date_of(datetime.now(timezone.utc))


def date_of(moment: datetime) -> str:
    """Return a time in this API's format."""
    return moment.astimezone(timezone.utc).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """Return the nanoseconds of a duration, at least one, because clients divide by them."""
    return max(round(seconds * 1e9), 1)
