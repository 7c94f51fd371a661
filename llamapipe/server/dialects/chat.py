"""Answers of ``/v1/chat/completions``, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamapipe.chat.results import ToolCallDelta
from llamapipe.llama.vocab import Vocab
from llamapipe.results import ChatChoice, ChatCompletion, ChatDelta, TokenLogprob, call_message
from llamapipe.server._times import RequestTimes
from llamapipe.server._tools import Tools, custom_input
from llamapipe.server.dialects.encoder import Counts, PromptAt
from llamapipe.server.dialects.logprobs import chat_logprobs
from llamapipe.server.dialects.openai_stream import Computing, Format, OpenAiEncoder, common_fields, usage
from llamapipe.server.json_bytes import encode_json

_PROGRESS = b'{"index":%d,"delta":{"role":"assistant","content":null},"finish_reason":null}'
_BEGIN = (
    b'{"index":%d,"delta":{"role":"assistant","content":"","refusal":null},'
    b'"logprobs":null,"finish_reason":null}'
)


class ChatEncoder(OpenAiEncoder[ChatDelta]):
    """Encodes the answer to one request, complete or streamed.

    ``tools``: the tools of the request, with the client's names. ``with_reasoning``: the answer includes the
    reasoning.
    """

    def __init__(
        self,
        call_id: str,
        model: str,
        created: int,
        form: Format,
        vocab: Vocab,
        times: RequestTimes,
        tools: Tools,
        with_reasoning: bool = True,
        running: Sequence[Computing | None] = (),
    ) -> None:
        common = common_fields(call_id, "chat.completion", created, model)
        super().__init__(common, "chat.completion.chunk", form, vocab, times, _PROGRESS, running)
        self.prompt_at: PromptAt = "begin" if form.token_ids else None
        self._tools = tools
        self._with_reasoning = with_reasoning
        # For each choice, the incomplete call of a custom tool: its index, id, name and pieces of arguments.
        self._held: dict[int, tuple[int, str, str, list[str]]] = {}

    # ---- complete
    def whole(self, done: ChatCompletion, counts: Counts, prompt: Sequence[int] = ()) -> dict[str, Any]:
        """Return the complete answer. ``prompt``: the prompt's tokens, for a client that wants token ids."""
        answer = self._whole([self._choice(choice) for choice in done.choices], counts)
        if self._form.token_ids:
            answer["prompt_token_ids"] = prompt
        return answer

    def _choice(self, choice: ChatChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.reasoning and self._with_reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.tool_calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [
                self._call(call_message(call, as_written=True)) for call in choice.tool_calls
            ]
        fields = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }
        if self._form.token_ids:
            fields["token_ids"] = choice.token_ids
        return fields

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        return None if entries is None else chat_logprobs(entries, self._vocab, self._form.tokens_as_ids)

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return a call in the form in which the client defined the tool."""
        function = call["function"]
        if not self._tools.client_name(function["name"]).is_custom:
            return call
        return _custom_call(call["id"], function["name"], function["arguments"])

    # ---- streamed
    def begin(self, index: int, counts: Counts, prompt: Sequence[int]) -> bytes:
        """Return the first event of a choice, which has the role and no text."""
        if self._form.continuous_usage:
            self._writer.set_usage(usage(counts))
        last = self._progress.last(index)
        if not self._form.token_ids:
            return last + self._writer.chunk(_BEGIN % index)
        delta = {"role": "assistant", "content": "", "refusal": None}
        fields = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": []}
        return last + self._writer.chunk(encode_json({**fields, "prompt_token_ids": prompt}))

    def part(self, index: int, part: ChatDelta, counts: Counts) -> bytes:
        """Return the event for a part."""
        return self._chunk(self._part(index, part), part, part.content, counts)

    def _part(self, index: int, part: ChatDelta) -> bytes:
        if (
            part.logprobs is None
            and part.finish_reason is None
            and not (part.reasoning or part.tool_calls or self._form.token_ids)
        ):
            return b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (
                index,
                encode_json(part.content),
            )
        delta: dict[str, Any] = {}
        if part.content:
            delta["content"] = part.content
        if part.reasoning and self._with_reasoning:
            delta["reasoning_content"] = part.reasoning
        if calls := self._call_parts(index, part):
            delta["tool_calls"] = calls
        fields = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(part.logprobs),
            "finish_reason": part.finish_reason,
        }
        if self._form.token_ids:
            fields["token_ids"] = part.token_ids
        return encode_json(fields)

    def _call_parts(self, index: int, part: ChatDelta) -> list[dict[str, Any]]:
        """Return the parts of the calls in ``part``.

        The model writes the input of a custom tool as a JSON string, so the input is sent when the string is complete.
        """
        parts: list[dict[str, Any]] = []
        for piece in part.tool_calls:
            held = self._held.get(index)
            if held is not None and held[0] != piece.index:
                parts.append(self._release(index))
            if piece.id is not None and self._tools.client_name(str(piece.name)).is_custom:
                self._held[index] = (piece.index, piece.id, str(piece.name), [piece.arguments])
            elif index in self._held:
                self._held[index][3].append(piece.arguments)
            else:
                parts.append(_call_part(piece))
        if part.finish_reason is not None and index in self._held:
            parts.append(self._release(index))
        return parts

    def _release(self, choice: int) -> dict[str, Any]:
        """Return the call of a custom tool that was held back."""
        index, call_id, name, arguments = self._held.pop(choice)
        return {"index": index, **_custom_call(call_id, name, "".join(arguments))}


def _custom_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call of a custom tool, with the model's name of the tool, because this API has no namespaces."""
    return {"id": call_id, "type": "custom", "custom": {"name": name, "input": custom_input(arguments)}}


def _call_part(piece: ToolCallDelta) -> dict[str, Any]:
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}
