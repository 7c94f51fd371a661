"""``POST /v1/responses``: answers an input, in the format of OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from time import perf_counter
from typing import Annotated, Any, Literal

import msgspec
from starlette.responses import Response

from llamapipe.chat.options import ChatOptions
from llamapipe.server import _background
from llamapipe.server._fields import Only, Unused
from llamapipe.server._tools import Tools, tools_of
from llamapipe.server.dialects.encoder import Counts
from llamapipe.server.dialects.responses import ResponsesEncoder
from llamapipe.server.endpoint import PING, SUBMITTED, EventStream, Exchange, JsonResponse
from llamapipe.server.errors import BUSY, ApiError, api_error, shutting_down
from llamapipe.server.json_bytes import encode_json, typed_event
from llamapipe.server.mcp.servers import McpError
from llamapipe.server.requests.generation import (
    ChatJob,
    input_tokens,
    n_prompt_tokens,
    note_unread,
    template_args,
)
from llamapipe.server.requests.items import (
    HOSTED_ITEMS,
    LOGPROBS,
    NO_TOOLS,
    Message,
    check_include,
    messages_of,
)
from llamapipe.server.requests.job import encode_stream
from llamapipe.server.requests.kept import Kept, connect_to_store, resolve_references
from llamapipe.server.requests.limits import CHAT_TOP, check_metadata, check_n_messages, check_top
from llamapipe.server.requests.mcp_tools import McpTools, Wanted, mcp_of, shown_tools
from llamapipe.server.requests.media import note_details
from llamapipe.server.requests.sampling import Sampling
from llamapipe.server.store.answers import Item
from llamapipe.work.tenant import conversation

_SIGN_S = 60.0  # of a stream without events, until one that says nothing new


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of reasoning. ``effort`` is passed to the template."""

    effort: str | None = None
    summary: Annotated[str | None, Unused()] = None
    generate_summary: Annotated[str | None, Unused()] = None
    context: Annotated[str | None, Unused("auto", "all_turns")] = None
    mode: Annotated[str | None, Unused("standard")] = None


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer's text. ``strict`` has no effect: the schema is always enforced."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer's text."""

    format: TextFormat | None = None
    verbosity: Annotated[str | None, Unused("medium")] = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_obfuscation: Annotated[bool | None, Unused(False)] = None
    include_usage: Annotated[bool | None, Only(instead="the last event of this API has the usage")] = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/responses``. ``chat_template_kwargs``: further variables of the template."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # With a store; without one, see ``unused`` and ``connect_to_store``.
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    background: bool | None = None
    # OpenAI's, for what a hosted service does: jobs, billing, moderation.
    prompt: Annotated[
        dict[str, Any] | None, Only(instead="this server stores no prompts; send the input")
    ] = None
    background_options: Annotated[dict[str, Any] | None, Unused({})] = None
    context_management: Annotated[list[dict[str, Any]] | None, Unused([])] = None
    access_programs: Annotated[dict[str, Any] | None, Unused({})] = None
    client_metadata: Annotated[dict[str, Any] | None, Unused({})] = None
    image: Annotated[dict[str, Any] | None, Unused({})] = None
    max_tool_calls: int | None = None  # of MCP servers
    moderation: Annotated[dict[str, Any] | None, Unused()] = None
    prompt_cache_key: Annotated[str | None, Unused()] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, Unused({})] = None
    prompt_cache_retention: Annotated[str | None, Unused()] = None
    safety_identifier: Annotated[str | None, Unused()] = None
    service_tier: Annotated[str | None, Unused("auto", "default")] = None
    user: Annotated[str | None, Unused()] = None
    # vLLM's and llamapipe's own.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Annotated[int | None, Only(0)] = None
    request_id: Annotated[str | None, Unused()] = None

    def unused(self, has_store: bool, has_mcp: bool) -> tuple[str, ...]:
        """Return what has no effect in the request, in addition to whole fields.

        Raises ApiError 400 for an unknown value.
        """
        aside = () if has_store else [name for name in ("metadata", "store") if getattr(self, name)]
        asked = check_include(self.include or ())
        items: Sequence[Mapping[str, Any]] = () if isinstance(self.input, str) else self.input
        kinds = {kind for item in items if isinstance(kind := item.get("type"), str)}
        hosted = [
            kind for kind in HOSTED_ITEMS if kind in kinds and not (has_mcp and kind == "mcp_list_tools")
        ]
        if self.max_tool_calls is not None and not has_mcp:
            aside = (*aside, "max_tool_calls")
        return (*aside, *(f"include.{name}" for name in asked), *(f"input.{kind}" for kind in hosted))

    def check(self) -> None:
        """Raise ApiError 400 for stream options without a stream, and for a negative number."""
        if self.stream_options is not None and self.stream is None:
            raise ApiError(400, "stream_options is given, but stream is not", "stream_options")
        if (most := self.max_tool_calls) is not None and most < 0:
            raise ApiError(400, f"max_tool_calls is {most}; it must be 0 or more", "max_tool_calls")


_SAMPLING = [name for name in Sampling.__struct_fields__ if name in ResponsesRequest.__struct_fields__]


async def responses(exchange: Exchange, request: ResponsesRequest) -> Response:
    """Answer an input, in one piece, as a stream, or in the background."""
    request.check()
    if is_later := request.background and exchange.gate.inside_of(exchange).worker is None:
        _background.check(exchange, request.store)
    model = exchange.server.check_model(request.model)
    mcp = mcp_of(exchange, request.tools)
    kept, items = await _opened(exchange, request, mcp, request.store)
    answer = _Answer(exchange, request, model, mcp, kept, items)
    if not mcp.wanted:  # otherwise when the tools of the servers are known
        answer.prepare()
    if is_later:
        return await answer.later()
    if request.stream:
        return EventStream(exchange, answer.events(), answer.ping)
    try:
        async with aclosing(answer.parts()) as parts:
            async for _ in parts:
                pass
    except Exception as e:
        if not mcp.n_calls or answer.is_again(e) or not answer.fail(e):  # the answer lists its calls
            raise
    return JsonResponse(await answer.store())


async def count_tokens(exchange: Exchange, request: ResponsesRequest) -> Response:
    """Count the tokens of an input's prompt."""
    exchange.server.check_model(request.model)
    mcp = mcp_of(exchange, request.tools)
    try:
        for wanted in mcp.wanted:
            await _load(mcp, wanted)
    finally:
        mcp.end()
    tools = _tools(exchange, request, mcp)
    kept, items = await _opened(exchange, request, mcp, None)
    functions = None if tools.tool_choice == "none" else tools.functions
    messages = messages_of(request.instructions, items, tools, kept.earlier)
    n = await n_prompt_tokens(exchange, messages, functions, _template_args(request), "input")
    return JsonResponse(input_tokens(n))


def _tools(exchange: Exchange, request: ResponsesRequest, mcp: McpTools) -> Tools:
    """Return the tools of the request, including those of the MCP servers that it names. Raises ApiError."""
    tools = tools_of(mcp.expanded(request.tools), mcp.choice(request.tool_choice), is_flat=True)
    exchange.note_unused(tools.unused)
    return tools


async def _load(mcp: McpTools, wanted: Wanted) -> None:
    """Ask an MCP server for its tools. Raises ApiError 424."""
    try:
        await mcp.load(wanted)
    except McpError as e:
        raise ApiError(424, f"{wanted.place}: {e.message}", "tools", "mcp_list_tools_failed") from None


async def _opened(
    exchange: Exchange, request: ResponsesRequest, mcp: McpTools, stores: bool | None
) -> tuple[Kept, list[Item]]:
    """Return what the request continues, and its input as items. Raises ApiError."""
    exchange.note_unused(request.unused(exchange.gate.store is not None, bool(mcp.wanted)))
    await note_unread(exchange, request.chat_template_kwargs)
    check_n_messages(exchange.server, request.input, "input")
    note_details(exchange, request.input)
    kept = connect_to_store(exchange, stores, request.previous_response_id, request.conversation)
    if kept.is_stored:
        check_metadata(request.metadata)
    text = request.input
    sent = [{"role": "user", "content": text}] if isinstance(text, str) else text
    items = await resolve_references(exchange, sent, "input")
    await kept.load(len(items))
    return kept, items


def _template_args(request: ResponsesRequest) -> dict[str, Any]:
    effort = None if request.reasoning is None else request.reasoning.effort
    return template_args(request.chat_template_kwargs, effort, "reasoning.effort")


def _job(
    exchange: Exchange,
    request: ResponsesRequest,
    tools: Tools,
    messages: Sequence[Message],
    n_output: int = 0,
    spent_s: float = 0.0,
) -> ChatJob:
    """Return the request as a job of the engine. Raises ApiError.

    ``n_output``, ``spent_s``: the tokens and seconds that earlier jobs used.
    """
    if request.max_output_tokens is not None and request.max_output_tokens < 1:
        raise ApiError(
            400,
            f"max_output_tokens is {request.max_output_tokens}; it must be 1 or more",
            "max_output_tokens",
        )
    sampling = Sampling(**{name: getattr(request, name) for name in _SAMPLING})
    most = request.max_output_tokens
    more: dict[str, Any] = {"max_tokens": None if most is None else most - n_output}
    more.update(exchange.server.adapter_of(request.model))
    if LOGPROBS in (request.include or ()):
        more["logprobs"] = check_top("top_logprobs", request.top_logprobs or 0, CHAT_TOP)
    elif request.top_logprobs:
        raise ApiError(400, f"top_logprobs needs {LOGPROBS!r} in include", "top_logprobs")
    options = ChatOptions(
        tools.functions,
        tools.tool_choice,
        request.parallel_tool_calls is not False,
        _schema(request),
        _template_args(request),
        truncation="auto" if request.truncation == "auto" else "error",
    )
    params = sampling.params(exchange.server, {"max_tokens": "max_output_tokens"}, **more)
    return ChatJob(
        exchange,
        messages,
        params,
        options,
        "text.format",
        grammars=tools.grammars,
        spent_s=spent_s,
        field="input",
    )


def _schema(request: ResponsesRequest) -> Any:
    """Return the JSON schema that the answer must match; None allows any text."""
    form = None if request.text is None else request.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.schema is None:
        raise ApiError(400, "text.format: json_schema needs a schema", "text.format.schema")
    return form.schema


class _Answer:
    """The answer to one request. ``parts`` computes it; then ``stored`` returns it.

    If the model calls MCP tools, the answer has several jobs; each but the last ends with calls, which are then run.
    """

    def __init__(
        self,
        exchange: Exchange,
        request: ResponsesRequest,
        model: str,
        mcp: McpTools,
        kept: Kept,
        items: Sequence[Item],
    ) -> None:
        self._exchange = exchange
        self._request = request
        self._mcp = mcp
        self._kept = kept
        self._given = items
        self._name = f"answer {kept.id}"  # of the conversation, which no client can choose
        self._began = self._told_at = perf_counter()
        vocab, is_stream = exchange.server.engine.model.vocab, bool(request.stream)
        fields = _fields(request, model, kept)
        self._encoder = ResponsesEncoder(
            kept.id, fields, vocab, NO_TOOLS, exchange.times, mcp.item, is_stream
        )
        self._job: ChatJob | None = None
        self._approved: list[Item] = []  # calls of tools to run first
        self._n_input = self._n_cached = 0

    def prepare(self) -> None:
        self._encoder.tools = _tools(self._exchange, self._request, self._mcp)
        self._approved = self._mcp.approved([*self._kept.earlier, *self._given])
        self._job = self._next_job()

    def _next_job(self) -> ChatJob:
        encoder, tools = self._encoder, self._encoder.tools
        if self._mcp.n_calls:  # the required tool has been called
            tools = tools._replace(
                tool_choice=self._mcp.later_choice(tools.tool_choice, self._request.max_tool_calls)
            )
        messages = messages_of(
            self._request.instructions, [*self._given, *encoder.output], tools, self._kept.earlier
        )
        messages = self._mcp.with_images(messages)
        spent_s = perf_counter() - self._began if self._mcp.wanted else 0.0
        return _job(self._exchange, self._request, tools, messages, encoder.n_output, spent_s)

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the output's items as they arise."""
        encoder, most = self._encoder, self._request.max_output_tokens
        try:
            if self._job is None:
                async with aclosing(self._begun()) as begun:
                    async for event in begun:
                        yield event
            while True:
                async with aclosing(self._computed()) as computed:
                    async for event in computed:
                        yield event
                if encoder.finish_reason == "cancelled":  # the engine was closed: this is not a whole answer
                    raise shutting_down()
                if not (calls := encoder.take_calls()):
                    return
                async with aclosing(self._ran(calls)) as ran:
                    async for event in ran:
                        yield event
                if encoder.is_cut or encoder.needs_client:
                    return
                if most is not None and encoder.n_output >= most:
                    encoder.finish_reason = "length"
                    return
                self._job = self._next_job()
                self._exchange.next_prompt()
        finally:
            self._mcp.end()
            self._exchange.count(self._n_input, encoder.n_output)

    async def _computed(self) -> AsyncGenerator[bytes, None]:
        """Yield what the model writes until it ends or calls tools."""
        job = self._job
        assert job is not None
        if self._mcp.wanted:
            conversation.set(self._name)  # of what this task submits, see _ran
        try:
            async with aclosing(encode_stream(self._exchange, job, self._encoder)) as parts:
                async for event in parts:
                    yield event
        finally:
            self._n_input += job.n_prompt_tokens
            self._n_cached += job.n_cached_tokens

    async def _begun(self) -> AsyncGenerator[bytes, None]:
        """List the tools of MCP servers, run the calls that the client has approved, and make the first job."""
        encoder, mcp = self._encoder, self._mcp
        items = [*self._kept.earlier, *self._given]
        known = [item.get("server_label") for item in items if item.get("type") == "mcp_list_tools"]
        for wanted in mcp.wanted:
            if wanted.label in known:
                await _load(mcp, wanted)
                continue
            yield SUBMITTED
            yield encoder.open(mcp.list_item(wanted)) + encoder.progress("mcp_list_tools.in_progress")
            try:
                await _load(mcp, wanted)
            except ApiError:
                yield encoder.progress("mcp_list_tools.failed")
                raise
            encoder.fill(mcp.list_item(wanted))
            yield encoder.progress("mcp_list_tools.completed") + encoder.close()
        self.prepare()  # a wrong request is refused before any tool is run
        for item in self._approved:
            yield SUBMITTED
            yield encoder.open(item) + encoder.close()
        calls = encoder.take_calls()
        async with aclosing(self._ran(calls)) as ran:
            async for event in ran:
                yield event
        if calls:
            self._job = self._next_job()

    async def _ran(self, calls: Sequence[tuple[int, Item]]) -> AsyncGenerator[bytes, None]:
        """Run calls of MCP tools, unless the text ended at a limit.

        The conversation's cells stay in the KV cache while tools run. If the client disconnects, they are the first to
        be evicted.
        """
        engine, is_gone = self._exchange.server.engine, False
        engine.hold_conversation(self._name)
        try:
            for place, item in calls:
                item["status"] = "incomplete"  # if it does not end
                if not self._encoder.is_cut:
                    await self._run(item)
                yield self._encoder.end_call(place, item)
        except (asyncio.CancelledError, GeneratorExit):
            is_gone = True
            raise
        finally:
            engine.release_conversation(self._name, is_done=is_gone)

    async def _run(self, item: Item) -> None:
        timeout_s = self._exchange.server.settings.timeout_s
        running = self._mcp.run(item, self._request.max_tool_calls)
        if timeout_s is None:
            await running
            return
        try:
            await asyncio.wait_for(running, max(timeout_s - (perf_counter() - self._began), 0))
        except (asyncio.TimeoutError, TimeoutError):
            raise TimeoutError(
                f"the request took longer than {timeout_s:g} seconds, while a tool ran"
            ) from None

    def is_again(self, error: Exception) -> bool:
        """Return whether this is a background answer that is tried again after the error."""
        answer = api_error(error)
        is_busy = answer is not None and answer.status in BUSY
        return is_busy and self._exchange.gate.inside_of(self._exchange).worker is not None

    def fail(self, error: Exception) -> bool:
        """End the answer with an error. Returns False if the error is unexpected."""
        answer = api_error(error)
        if answer is None:
            return False
        self._encoder.error = {"code": answer.code or "server_error", "message": answer.message}
        return True

    async def later(self) -> Response:
        """Store the request to be answered in the background."""
        response = {**self._encoder.response(), "status": "queued"}
        is_stream = bool(self._request.stream)
        asked = {
            name: value for name, value in msgspec.to_builtins(self._request).items() if value is not None
        }
        events = [
            typed_event({"type": kind, "response": response, "sequence_number": n})
            for n, kind in enumerate(("response.created", "response.queued"))
        ]
        await self._kept.keep_for_later(
            response, self._given, encode_json(asked), events if is_stream else ()
        )
        return await _background.later(self._exchange, response["id"], response, is_stream)

    async def store(self) -> dict[str, Any]:
        """Return the finished response, and store it if the request asks for that."""
        response = self._encoder.response(self._n_input, self._n_cached)
        await self._kept.keep(response, self._given, self._encoder.output)
        return {**response, "store": self._kept.is_stored}

    def ping(self) -> bytes:
        """Return a sign of life for the stream: a comment, and occasionally an event.

        Codex gives up after five minutes without an event. A background answer has only comments, because its events
        are stored.
        """
        is_later = self._exchange.gate.inside_of(self._exchange).worker is not None
        if is_later or perf_counter() - self._told_at < _SIGN_S:
            return PING
        self._told_at = perf_counter()
        return self._encoder.sign_of_life() or PING

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self.parts()) as parts:
                async for event in parts:
                    self._told_at = perf_counter()
                    # The first has no bytes: the request was checked.
                    yield event or self._encoder.begin(0, Counts(0), ())
        except Exception as e:
            # After an unexpected one an event ``error`` ends the stream.
            if self._exchange.status == 0 or self.is_again(e) or not self.fail(e):
                raise
        yield self._encoder.last(await self.store())


def _fields(request: ResponsesRequest, model: str, kept: Kept) -> dict[str, Any]:
    """Return the fields of the response that repeat the request."""
    text_format = None if request.text is None else request.text.format
    effort = None if request.reasoning is None else request.reasoning.effort
    return {
        "created_at": int(time.time()),
        "background": bool(request.background),
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": kept.previous,
        "conversation": None if kept.conversation is None else {"id": kept.conversation},
        "reasoning": {"effort": effort, "summary": None},
        "store": kept.is_stored,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"} if text_format is None else msgspec.to_builtins(text_format)},
        "tool_choice": request.tool_choice or "auto",
        "tools": shown_tools(request.tools),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation or "disabled",
    }
