"""``POST /v1/chat/completions``: answers a conversation, in OpenAI's format."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

from starlette.responses import Response

from llamapipe.chat.options import ChatOptions
from llamapipe.chat.results import ToolCallDelta
from llamapipe.results import ChatChoice, ChatDelta, TokenLogprob, call_message
from llamapipe.server._completions import (
    DONE,
    ChunkWriter,
    Progress,
    Streamed,
    merge_streams,
    token_limit,
    usage,
)
from llamapipe.server._fields import Only, Unused
from llamapipe.server._generation import ChatJob, chat_logprobs, input_tokens, n_prompt_tokens, template_args
from llamapipe.server._limits import check_n_messages, check_top
from llamapipe.server._sampling import adapters_of, chosen_samplers, predicted
from llamapipe.server._tools import Tools, custom_arguments, custom_input, tools_of
from llamapipe.server.endpoint import SUBMITTED, EventStream, Exchange, JsonResponse, encode_json
from llamapipe.server.errors import ApiError

_NO_AUDIO = "this server answers in text"


class ChatRequest(Streamed, kw_only=True):
    """``POST /v1/chat/completions``.

    ``chat_template_kwargs``: further variables of the template; ``documents`` is one of them. ``truncation``: "auto"
    drops the oldest turns of a conversation that is too long. ``continue_final_message``: the answer continues the last
    message; "reasoning_content" its reasoning. ``include_reasoning``: false leaves the reasoning out of the answer.
    ``reasoning_format``: "none" leaves it in the content with its markers, "deepseek-legacy" has it in both places;
    ``separate_reasoning``: false is the same as "none".
    """

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # OpenAI's, for what a hosted service does: storage, billing, moderation, search, sound.
    modalities: Annotated[list[str] | None, Only(["text"], instead=_NO_AUDIO)] = None
    audio: Annotated[dict[str, Any] | None, Unused({})] = None
    metadata: Annotated[dict[str, Any] | None, Unused({})] = None
    moderation: Annotated[dict[str, Any] | None, Unused()] = None
    prompt_cache_key: Annotated[str | None, Unused()] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, Unused({})] = None
    prompt_cache_retention: Annotated[str | None, Unused()] = None
    safety_identifier: Annotated[str | None, Unused()] = None
    service_tier: Annotated[str | None, Unused("auto", "default")] = None
    store: Annotated[bool | None, Unused(False)] = None
    verbosity: Annotated[str | None, Unused()] = None
    web_search_options: Annotated[dict[str, Any] | None, Unused()] = None
    # vLLM's, SGLang's and llama-server's.
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None
    include_reasoning: bool | None = None
    parse_tool_calls: Annotated[bool | None, Only(True)] = None
    separate_reasoning: bool | None = None
    reasoning_format: Literal["auto", "none", "deepseek", "deepseek-legacy"] | None = None
    stream_reasoning: Annotated[bool | None, Only(True)] = None
    echo: Annotated[bool | None, Only(False, instead="the client has the messages")] = None
    add_special_tokens: Annotated[bool | None, Only(False, instead="the template writes them")] = None
    chat_template: Annotated[
        str | None, Only(instead="the operator sets it: llamapipe serve --chat-template")
    ] = None
    prompt_logprobs: Annotated[
        int | None, Only(instead="/v1/completions has it; /apply-template writes the prompt")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None, Only(-1, instead='truncation: "auto" drops the oldest turns')
    ] = None
    mm_processor_kwargs: Annotated[Any, Unused({})] = None
    media_io_kwargs: Annotated[Any, Unused({})] = None


_MAX_TOP = 20  # the API's limit
_PROGRESS = b'{"index":%d,"delta":{"role":"assistant","content":null},"finish_reason":null}'


async def chat_completions(exchange: Exchange, request: ChatRequest) -> Response:
    """Answers a conversation, as a whole or as a stream."""
    request.check()
    model = exchange.server.check_model(request.model)
    tools = _tools(request)
    exchange.note_unused(tools.unused)
    answer = _ChatCompletion(exchange, request, model, _job(exchange, request, tools), tools)
    if not request.stream:
        return JsonResponse(await answer.complete())
    sign = answer.progress.news if request.return_progress else None
    return EventStream(exchange, answer.events(), sign=sign)


async def count_tokens(exchange: Exchange, request: ChatRequest) -> Response:
    """Counts the tokens of a conversation's prompt."""
    exchange.server.check_model(request.model)
    check_n_messages(exchange.server, request.messages, "messages")
    tools = _tools(request)
    exchange.note_unused(tools.unused)
    functions = None if tools.choice == "none" else tools.functions
    messages = engine_messages(request.messages)
    return JsonResponse(
        input_tokens(await n_prompt_tokens(exchange, messages, functions, _template_args(request)))
    )


def _template_args(request: ChatRequest) -> dict[str, Any]:
    """The template's arguments. Raises ApiError 400."""
    args = template_args(request.chat_template_kwargs, request.reasoning_effort, "reasoning_effort")
    if request.documents is not None:
        args.setdefault("documents", request.documents)
    return args


def _job(exchange: Exchange, request: ChatRequest, tools: Tools) -> ChatJob:
    """The request as a job of the engine. Raises ApiError."""
    check_n_messages(exchange.server, request.messages, "messages")
    limit = token_limit(
        max_tokens=request.max_tokens,
        max_completion_tokens=request.max_completion_tokens,
        n_predict=request.n_predict,
    )
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
    more: dict[str, Any] = {"max_tokens": None if limit is None else max(limit, 1)}
    more.update(adapters_of(exchange.server, request.model, request.lora))
    if request.logprobs:
        more["logprobs"] = check_top("top_logprobs", request.top_logprobs or 0, _MAX_TOP)
    elif request.n_probs:
        more["logprobs"] = check_top("n_probs", request.n_probs)
    if request.samplers is not None:
        more |= chosen_samplers(exchange, request, request.samplers)
    more.update(predicted(request.prediction))
    params = request.params(exchange.server, **more)
    args = _template_args(request)
    if request.continue_final_message and request.add_generation_prompt:
        raise ApiError(
            400,
            "add_generation_prompt begins a new message and continue_final_message continues the last one; "
            "give one of them",
            "continue_final_message",
        )
    if request.add_generation_prompt is False and not request.continue_final_message:
        raise ApiError(
            400,
            "add_generation_prompt is false, so nothing says that the model is to answer: leave it out, give "
            "continue_final_message, or send what /apply-template answers to /v1/completions",
            "add_generation_prompt",
        )
    options = ChatOptions(
        tools.functions,
        tools.choice,
        request.parallel_tool_calls is not False,
        template_args=args,
        continue_last=_CONTINUED[request.continue_final_message],
        reasoning_format=_reasoning_format(request),
        truncation="auto" if request.truncation == "auto" else "error",
    )
    constraint = request.constraint()
    field = None if constraint is None else constraint.field
    return ChatJob(
        exchange,
        engine_messages(request.messages),
        params,
        options,
        field,
        is_empty=limit == 0,
        grammars=tools.grammars,
    )


_CONTINUED: dict[bool | str | None, Any] = {
    None: False,
    False: False,
    True: True,
    "content": "content",
    "reasoning_content": "reasoning",
}


def _reasoning_format(request: ChatRequest) -> Any:
    """Where reasoning is to be: llama-server's field, and SGLang's for the same."""
    named, separate = request.reasoning_format, request.separate_reasoning
    if separate is None:
        return named or "auto"
    if named is not None and separate == (named == "none"):
        raise ApiError(
            400,
            f"separate_reasoning and reasoning_format {named!r} say different things; give one of them",
            "separate_reasoning",
        )
    return named or ("auto" if separate else "none")


def _tools(request: ChatRequest) -> Tools:
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
    return tools_of(tools, choice, is_flat=False)


def _signatures(tools: Sequence[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """The name and the parameters of each function among ``tools``; None stands for what is missing."""
    functions = [tool.get("function") for tool in tools]
    return [(f.get("name"), f.get("parameters")) if isinstance(f, dict) else (None, f) for f in functions]


class _ChatCompletion:
    """The answer to one request, complete or streamed."""

    def __init__(
        self, exchange: Exchange, request: ChatRequest, model: str, job: ChatJob, tools: Tools
    ) -> None:
        self.exchange = exchange
        self.request = request
        self.model = model
        self.job = job
        self.tools = tools
        self.id = f"chatcmpl-{exchange.id}"
        self.created = int(time.time())
        self.writer = ChunkWriter(
            self.id, "chat.completion.chunk", self.created, model, request.wants_usage, request.is_padded
        )
        self.progress = Progress(self.writer, _PROGRESS, job.running)
        # Of each choice, the call of a custom tool that is not complete: its index, id, name and arguments.
        self._held: dict[int, tuple[int, str, str, list[str]]] = {}

    async def complete(self) -> dict[str, Any]:
        """The answer, when all choices are complete."""
        done = await self.job.complete()
        n_completion = 0 if self.job.is_empty else done.n_completion_tokens
        predicted = self.request.prediction is not None
        guesses = (done.n_drafted_tokens, done.n_accepted_tokens) if predicted else None
        self.exchange.count(done.n_prompt_tokens, n_completion)
        answer = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [self._choice(choice) for choice in done.choices],
            "usage": usage(done.n_prompt_tokens, n_completion, done.n_cached_tokens, guesses),
            "timings": self.exchange.times.timings(done.n_prompt_tokens, n_completion),
        }
        if self.request.return_token_ids:
            answer["prompt_token_ids"] = await self.job.prompt_tokens()
        return answer

    def _choice(self, choice: ChatChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.reasoning and self.request.include_reasoning is not False:
            message["reasoning_content"] = choice.reasoning
        if choice.tool_calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [
                self._tool_call(call_message(call, as_written=True)) for call in choice.tool_calls
            ]
        made = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }
        if self.request.return_token_ids:
            made["token_ids"] = choice.token_ids
        return made

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        as_ids = bool(self.request.return_tokens_as_token_ids)
        return chat_logprobs(entries, self.exchange.server.engine.model.vocab, as_ids)

    def _tool_call(self, call: dict[str, Any]) -> dict[str, Any]:
        """A call in the form that the client defined the tool in."""
        function = call["function"]
        known = self.tools.known(function["name"])
        if not known.is_custom:
            return call
        custom = {"name": known.name, "input": custom_input(function["arguments"])}
        return {"id": call["id"], "type": "custom", "custom": custom}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of the stream."""
        request, job, writer = self.request, self.job, self.writer
        n_completion = n_submitted = 0
        streams = job.streams()
        try:
            async with aclosing(merge_streams(streams)) as items:  # type: ignore[type-var]
                begun: set[int] = set()
                async for index, delta in items:
                    if delta is None:
                        n_submitted += 1
                        if n_submitted == len(streams):
                            yield SUBMITTED
                        continue
                    self.exchange.token_arrived(index)
                    n_completion += len(delta.token_ids)
                    if request.wants_continuous_usage:
                        writer.set_usage(usage(job.n_prompt_tokens, n_completion, job.n_cached_tokens))
                    if index not in begun:
                        begun.add(index)
                        if request.return_progress:
                            yield self.progress.last(index)
                        yield writer.chunk(await self._first_choice(index))
                    timings = None
                    if request.timings_per_token or delta.finish_reason is not None:
                        timings = self.exchange.times.timings(job.n_prompt_tokens, n_completion)
                    yield writer.chunk(self._stream_choice(index, delta), delta.content, timings)
        finally:
            self.exchange.count(job.n_prompt_tokens, n_completion)
        if request.wants_usage:
            running = [stream for stream in job.running if stream is not None]
            drafted = sum(stream.n_drafted_tokens for stream in running)
            accepted = sum(stream.n_accepted_tokens for stream in running)
            guesses = (drafted, accepted) if request.prediction is not None else None
            yield writer.usage(usage(job.n_prompt_tokens, n_completion, job.n_cached_tokens, guesses))
        yield DONE

    async def _first_choice(self, index: int) -> bytes:
        """The choice of the first event, which has the role and no text."""
        if not self.request.return_token_ids:
            return (
                b'{"index":%d,"delta":{"role":"assistant","content":"","refusal":null},'
                b'"logprobs":null,"finish_reason":null}' % index
            )
        delta = {"role": "assistant", "content": "", "refusal": None}
        made = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": []}
        return encode_json({**made, "prompt_token_ids": await self.job.prompt_tokens()})

    def _stream_choice(self, index: int, delta: ChatDelta) -> bytes:
        request = self.request
        if (
            delta.logprobs is None
            and delta.finish_reason is None
            and not (delta.reasoning or delta.tool_calls or request.return_token_ids)
        ):
            return b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (
                index,
                encode_json(delta.content),
            )
        parts: dict[str, Any] = {}
        if delta.content:
            parts["content"] = delta.content
        if delta.reasoning and request.include_reasoning is not False:
            parts["reasoning_content"] = delta.reasoning
        calls = self._call_parts(index, delta)
        if calls:
            parts["tool_calls"] = calls
        made = {
            "index": index,
            "delta": parts,
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        if request.return_token_ids:
            made["token_ids"] = delta.token_ids
        return encode_json(made)

    def _call_parts(self, index: int, delta: ChatDelta) -> list[dict[str, Any]]:
        """The parts of calls. The input of a custom tool is text in a JSON string: it is sent when it is complete."""
        made: list[dict[str, Any]] = []
        for part in delta.tool_calls:
            held = self._held.get(index)
            if held is not None and held[0] != part.index:
                made.append(self._released(index))
            if part.id is not None and self.tools.known(str(part.name)).is_custom:
                self._held[index] = (part.index, part.id, str(part.name), [part.arguments])
            elif index in self._held:
                self._held[index][3].append(part.arguments)
            else:
                made.append(_call_part(part))
        if delta.finish_reason is not None and index in self._held:
            made.append(self._released(index))
        return made

    def _released(self, choice: int) -> dict[str, Any]:
        """The call of a custom tool that was held back."""
        index, call_id, name, arguments = self._held.pop(choice)
        custom = {"name": name, "input": custom_input("".join(arguments))}
        return {"index": index, "id": call_id, "type": "custom", "custom": custom}


def _call_part(part: ToolCallDelta) -> dict[str, Any]:
    if part.id is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}


Message = Mapping[str, Any]


def engine_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages with calls of custom tools, and OpenAI's older ``function_call``, as calls of functions."""
    made: list[Message] = []
    for message in messages:
        role, older = message.get("role"), message.get("function_call")
        calls = message.get("tool_calls")
        if role == "function":  # the result of an older function_call
            made.append({**message, "role": "tool"})
        elif role == "assistant" and isinstance(older, Mapping) and not calls:
            call = {"id": f"call_{len(made)}", "type": "function", "function": dict(older)}
            rest = {key: value for key, value in message.items() if key != "function_call"}
            made.append({**rest, "tool_calls": [call]})
        elif isinstance(calls, list):
            made.append({**message, "tool_calls": [_call(call) for call in calls]})
        else:
            made.append(message)
    return made


def _call(call: Any) -> Any:
    custom = call.get("custom") if isinstance(call, Mapping) else None
    if not isinstance(custom, Mapping) or not isinstance(custom.get("input"), str):
        return call
    function = {"name": custom.get("name"), "arguments": custom_arguments(custom["input"])}
    rest = {key: value for key, value in call.items() if key != "custom"}
    return {**rest, "type": "function", "function": function}
