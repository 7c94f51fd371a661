"""The chat calls of an engine: from messages to an answer, whole or streamed, for threads and for asyncio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, overload

from llamapipe._engine.chat_requests import (
    ChatBuilder,
    ChatItem,
    ChatOptions,
    Conversation,
    ToolChoice,
    Truncation,
)
from llamapipe._engine.deliver import progress_bar
from llamapipe._engine.long_work import size_of, takes_long
from llamapipe._engine.submit import call_options, explains_keywords
from llamapipe.arguments import check_flag
from llamapipe.engine.async_calls import AsyncEngineCalls
from llamapipe.params import SamplingParams
from llamapipe.results import ChatCompletion, Completion
from llamapipe.streams import AsyncChatStream, ChatStream


class ChatCalls(AsyncEngineCalls):
    """The part of ``Engine`` that holds conversations. Any thread. Needs the extra ``chat``.

    ``messages`` is a list of messages, ``{"role": ..., "content": ...}``, or a str, which is a single user message.
    ``params`` is as for ``generate``, except that ``max_tokens`` is None by default: the answer ends where the model
    ends it. ``tools``: Python functions, JSON schemas in OpenAI's form, or ``Tool`` objects. ``tool_choice``:
    ``"auto"``, ``"none"``, ``"required"`` or the name of a tool; the last two force calls, a name exactly one.
    ``parallel_tool_calls``: allow several calls in one answer. ``response_format``: a JSON schema, or a class
    with ``model_json_schema``, that the answer must match. ``template_args``: further variables of the model's
    template, such as ``{"enable_thinking": False}``. ``continue_last``: the answer continues the last message, which
    must be the assistant's, and holds only the added text. ``truncation``: ``"auto"`` drops the oldest turns of a
    conversation that fills the context, but not the system messages at its beginning; ``"error"`` refuses it.
    """

    _chat_builder: ChatBuilder

    @property
    def supports_tools(self) -> bool:
        """Whether the model's chat template has tool calls. Raises InvalidRequestError without a template."""
        return self._chat_builder.chat_format().supports_tools

    @overload
    def chat(  # type: ignore[overload-overlap]
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        response_format: Any = None,
        template_args: Mapping[str, Any] | None = None,
        continue_last: bool = False,
        truncation: Truncation = "error",
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> ChatCompletion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        response_format: Any = None,
        template_args: Mapping[str, Any] | None = None,
        continue_last: bool = False,
        truncation: Truncation = "error",
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> list[ChatCompletion]: ...

    @explains_keywords
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        response_format: Any = None,
        template_args: Mapping[str, Any] | None = None,
        continue_last: bool = False,
        truncation: Truncation = "error",
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> ChatCompletion | list[ChatCompletion]:
        """Answers a conversation, or several together, and returns when all answers are complete.

        A list of conversations returns a list of answers, in its order. ``timeout``, ``block`` and ``progress`` are as
        for ``generate``. Raises what ``generate`` raises, InvalidRequestError also for messages that the model's
        template refuses, ImportError without the extra ``chat``.
        """
        self._engine_thread.check_open()
        asked = ChatOptions(
            tools,
            tool_choice,
            parallel_tool_calls,
            response_format,
            template_args,
            continue_last,
            truncation=truncation,
        )
        items, single = self._chat_builder.items(messages, params, asked)
        options = call_options(timeout, block, names_prompts=not single, operation="chat")
        makes = self._request_builder.completions([item.item for item in items])
        bar = progress_bar(check_flag("progress", progress), len(items))
        return _answers(items, self._submission.collect(makes, options, bar), single)

    @explains_keywords
    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        response_format: Any = None,
        template_args: Mapping[str, Any] | None = None,
        continue_last: bool = False,
        truncation: Truncation = "error",
        timeout: float | None = None,
        block: bool = True,
    ) -> ChatStream:
        """Starts an answer and returns an iterator over its parts, a ``ChatStream``. Raises as ``chat`` does."""
        self._engine_thread.check_open()
        asked = ChatOptions(
            tools,
            tool_choice,
            parallel_tool_calls,
            response_format,
            template_args,
            continue_last,
            truncation=truncation,
        )
        item = self._chat_builder.item(messages, params, asked)
        options = call_options(timeout, block, operation="chat")
        return ChatStream(self._open_stream(item.item, options), item.delta_parser())

    @overload
    async def achat(  # type: ignore[overload-overlap]
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        response_format: Any = None,
        template_args: Mapping[str, Any] | None = None,
        continue_last: bool = False,
        truncation: Truncation = "error",
        timeout: float | None = None,
        block: bool = True,
    ) -> ChatCompletion: ...

    @overload
    async def achat(
        self,
        messages: Sequence[Conversation],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        response_format: Any = None,
        template_args: Mapping[str, Any] | None = None,
        continue_last: bool = False,
        truncation: Truncation = "error",
        timeout: float | None = None,
        block: bool = True,
    ) -> list[ChatCompletion]: ...

    @explains_keywords
    async def achat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        response_format: Any = None,
        template_args: Mapping[str, Any] | None = None,
        continue_last: bool = False,
        truncation: Truncation = "error",
        timeout: float | None = None,
        block: bool = True,
    ) -> ChatCompletion | list[ChatCompletion]:
        """``chat`` for asyncio. Slow work is done in a worker thread. Cancelling the task cancels its requests."""
        self._engine_thread.check_open()
        asked = ChatOptions(
            tools,
            tool_choice,
            parallel_tool_calls,
            response_format,
            template_args,
            continue_last,
            truncation=truncation,
        )
        options = call_options(timeout, block, operation="chat")
        build = partial(self._chat_builder.items, messages, params, asked)
        if is_long_chat(messages, params, asked):
            items, single = await self._long_work.run(build, size=size_of(messages))
        else:
            items, single = build()
        options = replace(options, names_prompts=not single)
        makes = self._request_builder.completions([item.item for item in items])
        return _answers(items, await self._submission.acollect(makes, options), single)

    @explains_keywords
    def astream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        response_format: Any = None,
        template_args: Mapping[str, Any] | None = None,
        continue_last: bool = False,
        truncation: Truncation = "error",
        timeout: float | None = None,
        block: bool = True,
    ) -> AsyncChatStream:
        """``stream_chat`` for asyncio; the request starts with the first ``__anext__``.

        Bad arguments raise at once. A long conversation, or one with tools or a response format, is rendered in a
        worker thread; its errors are raised by the first ``__anext__``.
        """
        self._engine_thread.check_open()
        asked = ChatOptions(
            tools,
            tool_choice,
            parallel_tool_calls,
            response_format,
            template_args,
            continue_last,
            truncation=truncation,
        )
        options = call_options(timeout, block, operation="chat")
        build = partial(self._chat_builder.item, messages, params, asked)
        open_stream = partial(self._open_astream, options=options)
        if not is_long_chat(messages, params, asked):
            return AsyncChatStream(build(), open_stream)
        return AsyncChatStream(partial(self._long_work.run, build, size=size_of(messages)), open_stream)


def _answers(
    items: Sequence[ChatItem], results: Mapping[int, Completion], single: bool
) -> ChatCompletion | list[ChatCompletion]:
    """The answers in the order of their conversations."""
    answers = [item.answer(results[index]) for index, item in enumerate(items)]
    return answers[0] if single else answers


def is_long_chat(messages: Any, params: Any, asked: ChatOptions) -> bool:
    """Whether rendering a conversation, and compiling its grammar, would block an event loop."""
    is_plain = asked.tools is None and asked.response_format is None and asked.truncation == "error"
    return not is_plain or takes_long(messages, params)
