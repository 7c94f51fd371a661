"""``POST /v1/chat/completions``: answers a conversation, in OpenAI's format."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from llamapipe.chat.results import ToolCallDelta
from llamapipe.engine.chat_results import ChatChoice, ChatDelta, call_message
from llamapipe.engine.frontend.chat_builder import ChatOptions
from llamapipe.server.chats import ChatJob
from llamapipe.server.errors import ApiError
from llamapipe.server.events import DONE, SUBMITTED, ChunkWriter, Progress, error_event, merged
from llamapipe.server.exchange import Call
from llamapipe.server.routes.completions import usage
from llamapipe.server.wire.logprobs import chat_logprobs, check_top
from llamapipe.server.wire.openai import EFFORTS, ChatRequest, token_limit

_DECODER = msgspec.json.Decoder(ChatRequest)
_MAX_TOP = 20  # the API's limit
_PROGRESS = b'{"index":%d,"delta":{"role":"assistant","content":null},"finish_reason":null}'
_encode = msgspec.json.Encoder().encode


async def chat_completions(call: Call) -> None:
    """Answers a conversation, as a whole or as a stream."""
    request = call.decode(_DECODER)
    request.check()
    model = call.state.check_model(request.model)
    call.note_unused(request.unused())
    answer = _Answer(call, request, model, _job(call, request))
    if request.stream:
        await call.answer_events(
            answer.events(), sign=answer.progress.news if request.return_progress else None
        )
    else:
        await call.answer_json(await answer.whole())


def _job(call: Call, request: ChatRequest) -> ChatJob:
    """The request as a job of the engine. Raises ApiError."""
    vocab = call.state.engine.model.vocab
    if request.modalities is not None and request.modalities != ["text"]:
        raise ApiError(400, "modalities may only be ['text']: this server answers in text", "modalities")
    limit = token_limit(max_tokens=request.max_tokens, max_completion_tokens=request.max_completion_tokens)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
    more: dict[str, Any] = {"max_tokens": None if limit is None else max(limit, 1)}
    if request.json_schema is not None:
        more["json_schema"] = request.json_schema
    if request.logprobs:
        more["logprobs"] = check_top("top_logprobs", request.top_logprobs or 0, _MAX_TOP)
    params = request.params(lambda text: vocab.tokenize(text, add_special=False), **more)
    args = dict(request.chat_template_kwargs or {})
    effort = request.reasoning_effort
    if effort is not None:
        if effort not in EFFORTS:
            raise ApiError(
                400, f"reasoning_effort is {effort!r}; it may be {', '.join(EFFORTS)}", "reasoning_effort"
            )
        if effort == "none":
            args.setdefault("enable_thinking", False)
        else:
            args.setdefault("reasoning_effort", effort)
    tools, tool_choice = _tools(request)
    parallel = request.parallel_tool_calls is not False
    options = ChatOptions(tools, tool_choice, parallel, request.answer_schema(), args)
    return ChatJob(call, request.messages, params, options, is_empty=limit == 0)


def _tools(request: ChatRequest) -> tuple[Sequence[dict[str, Any]] | None, Any]:
    """The tools and the choice among them; ``functions`` and ``function_call`` are their older names.

    A client may send both names of one thing, as long as they say the same.
    """
    tools, choice = request.tools, request.tool_choice
    if request.functions is not None:
        older = [{"type": "function", "function": function} for function in request.functions]
        if tools is not None and _signatures(tools) != _signatures(older):
            raise ApiError(
                400, "functions is the older name of tools, and they differ; give one of them", "functions"
            )
        tools = older if tools is None else tools
    if request.function_call is not None:
        given = request.function_call
        called = given if isinstance(given, str) else {"type": "function", "function": given}
        if choice is not None and choice != called:
            raise ApiError(
                400,
                "function_call is the older name of tool_choice, and they differ; give one of them",
                "function_call",
            )
        choice = called
    if choice is None:
        choice = "auto" if tools else "none"
    if not tools and choice not in ("auto", "none"):
        raise ApiError(400, "tool_choice asks for a call, but there are no tools", "tool_choice")
    return tools, choice


def _signatures(tools: Sequence[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """The name and the parameters of each function among ``tools``; None stands for what is missing."""
    functions = [tool.get("function") for tool in tools]
    return [(f.get("name"), f.get("parameters")) if isinstance(f, dict) else (None, f) for f in functions]


class _Answer:
    """The answer to one request, complete or streamed."""

    def __init__(self, call: Call, request: ChatRequest, model: str, job: ChatJob) -> None:
        self.call = call
        self.request = request
        self.model = model
        self.job = job
        self.id = f"chatcmpl-{call.id}"
        self.created = int(time.time())
        self.writer = ChunkWriter(
            self.id, "chat.completion.chunk", self.created, model, request.wants_usage, request.is_padded
        )
        self.progress = Progress(self.writer, _PROGRESS, job.running)

    async def whole(self) -> dict[str, Any]:
        """The answer, when all choices are complete."""
        done = await self.job.whole()
        n_completion = 0 if self.job.is_empty else done.n_completion_tokens
        self.call.count(done.n_prompt_tokens, n_completion, done.timings.first_token_s)
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [self._choice(choice) for choice in done.choices],
            "usage": usage(done.n_prompt_tokens, n_completion, done.n_cached_tokens),
        }

    def _choice(self, choice: ChatChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.tool_calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [call_message(call) for call in choice.tool_calls]
        logprobs = None
        if choice.logprobs is not None:
            logprobs = chat_logprobs(choice.logprobs, self.call.state.engine.model.vocab)
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of the stream."""
        request, job, writer = self.request, self.job, self.writer
        n_completion = n_submitted = 0
        streams = job.streams()
        try:
            async with aclosing(merged(streams)) as items:  # type: ignore[type-var]
                begun: set[int] = set()
                async for index, delta in items:
                    if delta is None:
                        n_submitted += 1
                        if n_submitted == len(streams):
                            yield SUBMITTED
                        continue
                    self.call.token_arrived(index)
                    n_completion += len(delta.token_ids)
                    if index not in begun:
                        begun.add(index)
                        if request.return_progress:
                            yield self.progress.last(index)
                        yield writer.chunk(
                            b'{"index":%d,"delta":{"role":"assistant","content":"","refusal":null},'
                            b'"logprobs":null,"finish_reason":null}' % index
                        )
                    yield writer.chunk(self._stream_choice(index, delta), delta.content)
        except Exception as e:
            if self.call.status == 0:
                raise
            yield error_event(e, "openai")
            return
        finally:
            self.call.count(job.n_prompt_tokens, n_completion)
        if request.wants_usage:
            yield writer.usage(usage(job.n_prompt_tokens, n_completion, job.n_cached_tokens))
        yield DONE

    def _stream_choice(self, index: int, delta: ChatDelta) -> bytes:
        if (
            delta.logprobs is None
            and delta.finish_reason is None
            and not (delta.reasoning or delta.tool_calls)
        ):
            return b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (
                index,
                _encode(delta.content),
            )
        parts: dict[str, Any] = {}
        if delta.content:
            parts["content"] = delta.content
        if delta.reasoning:
            parts["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            parts["tool_calls"] = [_call_part(part) for part in delta.tool_calls]
        logprobs = None
        if delta.logprobs is not None:
            logprobs = chat_logprobs(delta.logprobs, self.call.state.engine.model.vocab)
        return _encode(
            {"index": index, "delta": parts, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        )


def _call_part(part: ToolCallDelta) -> dict[str, Any]:
    if part.id is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}
