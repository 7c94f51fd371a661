"""``POST /v1/chat/completions``: answers a conversation, in OpenAI's format."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from starlette.responses import Response

from llamapipe.chat.options import ChatOptions
from llamapipe.errors import InvalidRequestError
from llamapipe.server._fields import Only, Unused, fates
from llamapipe.server._tools import Tools, tools_of
from llamapipe.server.dialects.chat import ChatEncoder
from llamapipe.server.endpoint import EventStream, Exchange, JsonResponse
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.generation import (
    ChatJob,
    Continued,
    about_conversation,
    input_tokens,
    n_prompt_tokens,
    note_unread,
    refuse_media,
    template_args,
    with_default_args,
    with_system,
)
from llamapipe.server.requests.job import encode_stream, record_counts
from llamapipe.server.requests.limits import CHAT_TOP, check_n_messages, check_top, refuse_long_chat
from llamapipe.server.requests.media import note_details
from llamapipe.server.requests.openai_messages import continued_part, engine_messages
from llamapipe.server.requests.sampling import adapters_of, chosen_samplers, predicted, take_random_seed
from llamapipe.server.requests.text_options import Streamed, token_limit
from llamapipe.server.requests.time_limit import check_time_limit
from llamapipe.work.long_work import size_of

_NO_AUDIO = "this server answers in text"


class ChatRequest(Streamed, kw_only=True):
    """``POST /v1/chat/completions``.

    ``chat_template_kwargs``: further variables of the template, such as ``documents``. ``truncation``: "auto" drops the
    oldest turns of a conversation that is too long. ``continue_final_message``: the answer continues the last message,
    or with "reasoning_content" its reasoning. ``prefix`` in that message: the same as true. ``include_reasoning``:
    false leaves the reasoning out of the answer. ``reasoning_format``: "none" leaves the reasoning in the content with
    its markers, "deepseek-legacy" puts it in both fields. ``separate_reasoning``: false is the same as "none".
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
    # OpenAI's fields about its hosted service: storage, billing, moderation, search, sound.
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
    # Mistral's.
    random_seed: int | None = None
    safe_prompt: Annotated[bool | None, Only(False, instead="put such a prompt into a system message")] = None
    # Fields of vLLM, SGLang and llama-server.
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


async def chat_completions(exchange: Exchange, request: ChatRequest) -> Response:
    """Answer a conversation, in one piece or as a stream."""
    request.check()
    model = exchange.server.check_model(request.model)
    tools = _tools(request)
    exchange.note_unused(tools.unused)
    await note_unread(exchange, request.chat_template_kwargs, request.documents)
    job = _job(exchange, request, tools)
    encoder = ChatEncoder(
        f"chatcmpl-{exchange.id}",
        model,
        int(time.time()),
        request.format(),
        exchange.server.engine.model.vocab,
        exchange.times,
        tools,
        request.include_reasoning is not False,
        job.running,
    )
    if request.stream:
        return EventStream(exchange, encode_stream(exchange, job, encoder), sign=encoder.news)
    done = await job.complete()
    counts = record_counts(exchange, done, is_empty=job.is_empty)
    return JsonResponse(
        encoder.whole(done, counts, await job.prompt_tokens() if request.return_token_ids else ())
    )


async def count_tokens(exchange: Exchange, request: ChatRequest) -> Response:
    """Count the tokens of a conversation's prompt."""
    exchange.server.check_model(request.model)
    check_n_messages(exchange.server, request.messages, "messages")
    tools = _tools(request)
    exchange.note_unused(tools.unused)
    await note_unread(exchange, request.chat_template_kwargs, request.documents)
    functions = None if tools.tool_choice == "none" else tools.functions
    messages = engine_messages(request.messages)
    n = await n_prompt_tokens(
        exchange, messages, functions, _template_args(request), continue_last=_continue_last(request)
    )
    return JsonResponse(input_tokens(n))


# The fields on which the prompt depends.
_OF_PROMPT = frozenset(
    ("messages", "model", "tools", "tool_choice", "functions", "function_call", "reasoning_effort", "documents",
     "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "truncation")
)  # fmt: skip


def _is_set(value: object) -> bool:
    return value is not None and value is not False


async def apply_template(exchange: Exchange, request: ChatRequest) -> Response:
    """``POST /apply-template``: returns the prompt of a conversation as text. Fields of the answer are unused."""
    state = exchange.server
    state.check_model(request.model)
    check_n_messages(state, request.messages, "messages")
    tools = _tools(request)
    answers = (name for name, fate in fates(ChatRequest).items() if fate is None and name not in _OF_PROMPT)
    exchange.note_unused(tools.unused + tuple(name for name in answers if _is_set(getattr(request, name))))
    await note_unread(exchange, request.chat_template_kwargs, request.documents)
    if request.truncation == "auto":
        raise ApiError(
            400,
            'truncation is "auto"; leave it out: this route writes the whole conversation',
            "truncation",
        )
    adds_prompt = request.add_generation_prompt is not False
    continue_last = continued_part(
        request.messages, request.continue_final_message, request.add_generation_prompt
    )
    args = await with_default_args(state, _template_args(request))
    sent = engine_messages(request.messages)
    messages = with_system(state, sent)
    prompts = state.engine.model.chat_prompts

    def rendered() -> str:
        functions = None if tools.tool_choice == "none" else prompts.definitions(tools.functions)
        return prompts.render(messages, functions, adds_prompt, args, continue_last)

    try:
        refuse_media(state, messages)
        refuse_long_chat(state, sent)
        prompt = await state.in_thread(rendered, size=size_of(sent))
    except InvalidRequestError as e:
        raise about_conversation(e, sent, n_added=len(messages) - len(sent)) from None
    return JsonResponse({"prompt": prompt})


def _template_args(request: ChatRequest) -> dict[str, Any]:
    args = template_args(request.chat_template_kwargs, request.reasoning_effort, "reasoning_effort")
    if request.documents is not None:
        args.setdefault("documents", request.documents)
    return args


def _job(exchange: Exchange, request: ChatRequest, tools: Tools) -> ChatJob:
    check_n_messages(exchange.server, request.messages, "messages")
    note_details(exchange, request.messages)
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
        more["logprobs"] = check_top("top_logprobs", request.top_logprobs or 0, CHAT_TOP)
    elif request.n_probs:
        more["logprobs"] = check_top("n_probs", request.n_probs)
    if request.samplers is not None:
        more |= chosen_samplers(exchange, request, request.samplers)
    more.update(predicted(request.prediction))
    take_random_seed(request, request.random_seed)
    params = request.params(exchange.server, **more)
    args = _template_args(request)
    continue_last = _continue_last(request)
    options = ChatOptions(
        tools.functions,
        tools.tool_choice,
        request.parallel_tool_calls is not False,
        template_args=args,
        continue_last=continue_last,
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
        most_ms=check_time_limit(request.t_max_predict_ms),
    )


def _continue_last(request: ChatRequest) -> Continued:
    """Return which part of the last message an answer continues. Raises ApiError 400."""
    continued = continued_part(
        request.messages, request.continue_final_message, request.add_generation_prompt
    )
    if request.add_generation_prompt is False and not continued:
        raise ApiError(
            400,
            "add_generation_prompt is false, so nothing says that the model is to answer: leave it out, give "
            "continue_final_message, or send what /apply-template answers to /v1/completions",
            "add_generation_prompt",
        )
    return continued


def _reasoning_format(request: ChatRequest) -> Any:
    """Return where the reasoning goes, from llama-server's field or SGLang's equivalent."""
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
    """Return the tools and the choice among them. The fields' older names are ``functions`` and ``function_call``.

    A client may send a field under both names, as long as the values agree.
    """
    tools, tool_choice = request.tools, request.tool_choice
    if request.functions is not None:
        older = [{"type": "function", "function": function} for function in request.functions]
        if tools is not None and _signatures(tools) != _signatures(older):
            raise ApiError(
                400, "functions is the older name of tools, and they differ; give one of them", "functions"
            )
        tools = older if tools is None else tools
    if request.function_call is not None:
        function_call = request.function_call
        called = (
            function_call
            if isinstance(function_call, str)
            else {"type": "function", "function": function_call}
        )
        if tool_choice is not None and tool_choice != called:
            raise ApiError(
                400,
                "function_call is the older name of tool_choice, and they differ; give one of them",
                "function_call",
            )
        tool_choice = called
    return tools_of(tools, tool_choice, is_flat=False)


def _signatures(tools: Sequence[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Return the name and the parameters of each function among ``tools``; None for a missing one."""
    functions = [tool.get("function") for tool in tools]
    return [(f.get("name"), f.get("parameters")) if isinstance(f, dict) else (None, f) for f in functions]
