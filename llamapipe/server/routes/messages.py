"""``POST /v1/messages`` and ``/v1/messages/count_tokens``, in Anthropic's format."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from llamapipe.engine.chat_results import ChatChoice, ChatDelta
from llamapipe.engine.frontend.chat_builder import ChatOptions
from llamapipe.server.chats import ChatJob
from llamapipe.server.errors import ApiError
from llamapipe.server.events import SUBMITTED, error_event, event
from llamapipe.server.exchange import Call
from llamapipe.server.prompts import check_n_messages
from llamapipe.server.wire.anthropic import CountRequest, MessagesRequest, ToolChoice
from llamapipe.server.wire.anthropic_messages import messages_of
from llamapipe.server.wire.sampling import Sampling
from llamapipe.server.wire.template_args import template_args

_DECODER = msgspec.json.Decoder(MessagesRequest)
_COUNT_DECODER = msgspec.json.Decoder(CountRequest)
_PING = event({"type": "ping"}, "ping")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "cache_salt")
_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "timeout": "max_tokens",
}


async def messages(call: Call) -> None:
    """Answers a conversation, as a whole or as a stream."""
    request = call.decode(_DECODER)
    model = call.state.check_model(request.model)
    call.note_unused(request.unused())
    answer = _Answer(call, model, _job(call, request))
    if request.stream:
        await call.answer_events(answer.events(), ping=_PING)
    else:
        await call.answer_json(await answer.whole())


async def count_tokens(call: Call) -> None:
    """Counts the tokens of a conversation's prompt."""
    request = call.decode(_COUNT_DECODER)
    call.state.check_model(request.model)
    call.note_unused(request.unused())
    check_n_messages(call.state, request.messages, "messages")
    tokens = await call.state.tokenize_chat(
        messages_of(request), request.functions(), True, _template_args(request)
    )
    await call.answer_json({"input_tokens": len(tokens)})


def _job(call: Call, request: MessagesRequest) -> ChatJob:
    """The request as a job of the engine. Raises ApiError."""
    check_n_messages(call.state, request.messages, "messages")
    if request.max_tokens < 1:
        raise ApiError(400, f"max_tokens is {request.max_tokens}; it must be 1 or more", "max_tokens")
    sampling = Sampling(**{name: getattr(request, name) for name in _SAMPLING}, stop=request.stop_sequences)
    conversation = messages_of(request)
    config = request.output_config
    if config is not None and config.format is not None and request.output_format is not None:
        raise ApiError(
            400, "output_format is the older name of output_config.format; give one of them", "output_format"
        )
    answer_format = request.output_format if config is None or config.format is None else config.format
    functions = request.functions()
    choice, parallel = _choice(request.tool_choice, bool(functions))
    options = ChatOptions(
        functions,
        choice,
        parallel,
        None if answer_format is None else answer_format.schema,
        _template_args(request),
        continue_last=bool(conversation) and conversation[-1]["role"] == "assistant",
    )
    params = sampling.params(call.state.engine.model.vocab.tokenize, max_tokens=request.max_tokens)
    field = "output_format" if request.output_format is not None else "output_config.format"
    return ChatJob(call, conversation, params, options, field)


def _choice(given: ToolChoice | None, has_tools: bool) -> tuple[str, bool]:
    """The engine's ``tool_choice``, and whether several calls are allowed."""
    if given is None:
        return ("auto" if has_tools else "none"), True
    if given.type == "auto" and not has_tools:
        return "none", True
    parallel = not given.disable_parallel_tool_use
    if given.type == "tool" and given.name is None:
        raise ApiError(400, "tool_choice: the type 'tool' needs a name", "tool_choice.name")
    if given.type == "tool" and has_tools:
        return str(given.name), parallel
    if given.type in ("any", "tool") and not has_tools:
        raise ApiError(400, "tool_choice asks for a call, but there are no tools", "tool_choice")
    return {"auto": "auto", "any": "required", "none": "none"}[given.type], parallel


def _template_args(request: CountRequest) -> dict[str, Any]:
    """The template arguments that control reasoning."""
    args: dict[str, Any] = {}
    if request.thinking is not None and request.thinking.type in ("enabled", "disabled"):
        args["enable_thinking"] = request.thinking.type == "enabled"
    effort = None if request.output_config is None else request.output_config.effort
    return args | template_args(request.chat_template_kwargs, effort, "output_config.effort")


class _Answer:
    """The answer to one request, complete or streamed."""

    def __init__(self, call: Call, model: str, job: ChatJob) -> None:
        self.call = call
        self.model = model
        self.job = job

    def _message(self, content: list[dict[str, Any]], n_prompt: int, n_cached: int) -> dict[str, Any]:
        return {
            "id": f"msg_{self.call.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": n_prompt - n_cached,
                "output_tokens": 0,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": n_cached,
            },
        }

    async def whole(self) -> dict[str, Any]:
        """The answer, when it is complete."""
        done = await self.job.whole()
        choice = done.choices[0]
        self.call.count(done.n_prompt_tokens, done.n_completion_tokens, done.timings.first_token_s)
        message = self._message(_content(choice), done.n_prompt_tokens, done.n_cached_tokens)
        message["usage"]["output_tokens"] = done.n_completion_tokens
        return message | _stop(choice)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of the stream."""
        n_completion = 0
        (stream,) = self.job.streams()
        blocks = _Blocks()
        try:
            async with aclosing(stream) as deltas:
                begun = False
                async for delta in deltas:
                    if delta is None:
                        yield SUBMITTED
                        continue
                    self.call.token_arrived(0)
                    n_completion += len(delta.token_ids)
                    if not begun:
                        begun = True
                        message = self._message([], self.job.n_prompt_tokens, self.job.n_cached_tokens)
                        yield _named("message_start", message=message)
                    for one in blocks.events(delta):
                        yield one
                    if delta.finish_reason is not None:
                        usage = {"output_tokens": n_completion}
                        yield _named("message_delta", delta=_stop(delta), usage=usage)
            yield _named("message_stop")
        except Exception as e:
            if self.call.status == 0:
                raise
            yield error_event(e, "anthropic")
        finally:
            self.call.count(self.job.n_prompt_tokens, n_completion)


class _Blocks:
    """The content blocks of a stream: one is open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._open: object = None  # "text", "thinking", or the index of a tool call

    def __repr__(self) -> str:
        return f"<_Blocks open={self._open!r}>"

    def events(self, delta: ChatDelta) -> list[bytes]:
        """The events for a part of the answer."""
        made: list[bytes] = []
        if delta.reasoning:
            made += self._switched("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            made.append(self._delta({"type": "thinking_delta", "thinking": delta.reasoning}))
        if delta.content:
            made += self._switched("text", {"type": "text", "text": ""})
            made.append(self._delta({"type": "text_delta", "text": delta.content}))
        for part in delta.tool_calls:
            block: dict[str, Any] = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            made += self._switched(part.index, block)
            if part.arguments:
                made.append(self._delta({"type": "input_json_delta", "partial_json": part.arguments}))
        if delta.finish_reason is not None:
            if self._index < 0:
                made += self._switched("text", {"type": "text", "text": ""})
            made.append(_named("content_block_stop", index=self._index))
        return made

    def _switched(self, what: object, block: dict[str, Any]) -> list[bytes]:
        if self._open == what:
            return []
        made = [] if self._open is None else [_named("content_block_stop", index=self._index)]
        self._open = what
        self._index += 1
        return [*made, _named("content_block_start", index=self._index, content_block=block)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _named("content_block_delta", index=self._index, delta=delta)


def _named(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


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
