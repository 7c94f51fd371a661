"""Runs chats through ``Engine.chat`` with the model's template, or with one of the formats known by name."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from llamapipe._messages import DROP_TURNS, listed, quoted
from llamapipe.chat.results import ToolCall, ToolCallDelta, new_call_id
from llamapipe.compat.formats import Format
from llamapipe.compat.sampling import close_schema
from llamapipe.engine import Engine
from llamapipe.errors import InvalidRequestError
from llamapipe.params import SamplingParams
from llamapipe.results import ChatChoice, ChatCompletion, ChatDelta

Messages = Sequence[Mapping[str, Any]]


def tools_of(
    functions: Sequence[Mapping[str, Any]] | None, tools: Sequence[Mapping[str, Any]] | None
) -> list[Mapping[str, Any]] | None:
    """Return the tools of a call; ``functions`` is the older form of ``tools``."""
    if functions is not None:
        return [{"type": "function", "function": function} for function in functions]
    return None if tools is None else list(tools)


def choice_of(function_call: Any, tool_choice: Any, has_tools: bool) -> Any:
    """Return the choice of a tool; ``function_call`` is the older form. Raises ValueError that names the argument."""
    if isinstance(function_call, Mapping):
        if not isinstance(function_call.get("name"), str):
            raise ValueError(
                f'function_call is {quoted(function_call)}; it must be "auto", "none" or {{"name": …}}'
            )
        return {"type": "function", "function": {"name": function_call["name"]}}
    if function_call is not None:
        return function_call
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f'tool_choice is {quoted(tool_choice)}; it must be "auto", "none", "required" or '
                '{"type": "function", "function": {"name": …}}'
            )
    return tool_choice if has_tools else None  # as in llama-cpp-python, a choice has no effect without tools


def schema_of(response_format: Mapping[str, Any] | None) -> Any:
    """Return the JSON schema of the answer; None for any text. Raises TypeError and ValueError for a wrong format."""
    if response_format is not None and not isinstance(response_format, Mapping):
        raise TypeError(
            f'response_format must be a dict such as {{"type": "json_object"}}, not {type(response_format).__name__}'
        )
    if response_format is None or response_format.get("type") == "text":
        return None
    kind = response_format.get("type")
    if kind == "json_object":
        schema = close_schema(response_format.get("schema"))
        return {"type": "object"} if schema in (None, {}) else schema
    if kind == "json_schema":
        json_schema = response_format.get("json_schema")
        if isinstance(json_schema, Mapping) and "schema" in json_schema:
            return close_schema(json_schema["schema"])
        raise ValueError(
            f"response_format is {quoted(response_format)}; json_schema needs "
            "{'type': 'json_schema', 'json_schema': {'schema': …}}"
        )
    raise ValueError(
        f"response_format is {quoted(response_format)}; its type must be 'text', 'json_object' or 'json_schema'"
    )


class ChatCall:
    """One call of ``create_chat_completion``, independent of the form of its answer.

    ``named``: a format known by name; None for the model's template. Raises ValueError for the choice of an unknown
    tool, and for tools that the format or the template cannot show.
    """

    def __init__(
        self,
        engine: Engine,
        named: Format | None,
        messages: Messages,
        params: SamplingParams,
        tools: list[Mapping[str, Any]] | None,
        tool_choice: Any,
        template_args: Mapping[str, Any],
    ) -> None:
        self._engine, self._named, self._messages = engine, named, messages
        self._tools, self._tool_choice, self._template_args = tools, tool_choice, template_args
        self._forced: str | None = None  # the tool whose arguments are the whole answer
        without_tools = named is not None or not engine.supports_tools
        if tools and without_tools and isinstance(tool_choice, Mapping):
            self._forced = str(tool_choice["function"]["name"])
            params = replace(params, json_schema=close_schema(_parameters(tools, self._forced)), grammar=None)
            self._tools = None
        elif tools and named is not None and tool_choice != "none":
            raise ValueError(
                "this chat_format has no tool calls but one that tool_choice names; use chat_format="
                "'chatml-function-calling', or the model's own template"
            )
        elif tools and named is None and without_tools and tool_choice != "none":
            raise InvalidRequestError(
                "tools are given, but the model's chat template has no place for them; pass chat_format="
                "'chatml-function-calling', or a chat_template that writes tool calls"
            )
        self._params = params
        if named is not None and named.stop:
            stops = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
            self._params = replace(params, stop=stops + named.stop)

    def __repr__(self) -> str:
        return f"<ChatCall of {len(self._messages)} messages>"

    def whole(self) -> ChatCompletion:
        """Wait for the complete answer and return it."""
        if self._named is None:
            with _without_truncation():
                completion = self._engine.chat(self._messages, self._params, **self._options())
        else:
            text = self._engine.generate(self._prompt(), self._params)
            first = text.choices[0]
            choice = ChatChoice(
                0, first.text, "", (), first.finish_reason, first.seed, first.token_ids, first.logprobs
            )
            completion = ChatCompletion((choice,), text.n_prompt_tokens, text.n_cached_tokens, text.timings)
        if self._forced is None:
            return completion
        first_choice = completion.choices[0]
        arguments, reason = _arguments(first_choice.content), first_choice.finish_reason
        # A call that max_tokens cut off is left out.
        calls = () if arguments is None else (ToolCall(new_call_id(), self._forced, arguments),)
        forced = replace(
            first_choice,
            content="",
            tool_calls=calls,
            finish_reason="tool_calls" if calls and reason == "stop" else reason,
        )
        return replace(completion, choices=(forced,))

    def deltas(self) -> Generator[ChatDelta]:
        """Yield the parts of the answer. Closing the iterator cancels the call."""
        if self._forced is None:
            yield from self._plain_deltas()
            return
        call_id: str | None = new_call_id()
        name: str | None = self._forced
        with closing(self._plain_deltas()) as deltas:
            for delta in deltas:
                parts = (ToolCallDelta(0, call_id, name, delta.content),) if delta.content or call_id else ()
                call_id = name = None
                reason = "tool_calls" if delta.finish_reason == "stop" else delta.finish_reason
                yield delta._replace(content="", tool_calls=parts, finish_reason=reason)

    def _plain_deltas(self) -> Generator[ChatDelta]:
        if self._named is None:
            with _without_truncation():
                chat = self._engine.stream_chat(self._messages, self._params, **self._options())
                with closing(chat):
                    yield from chat
            return
        stream = self._engine.stream(self._prompt(), self._params)
        with closing(stream):
            for delta in stream:
                yield ChatDelta(delta.text, "", (), delta.token_ids, delta.logprobs, delta.finish_reason)

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"template_args": self._template_args}
        if self._tools:
            options |= {"tools": self._tools, "tool_choice": self._tool_choice or "auto"}
        return options

    def _prompt(self) -> list[int]:
        assert self._named is not None
        return self._engine.model.vocab.tokenize(self._named.render(self._messages), parse_special=True)


@contextmanager
def _without_truncation() -> Iterator[None]:
    """Remove from an error's message the advice to set an option that llama-cpp-python's methods do not have."""
    try:
        yield
    except InvalidRequestError as error:
        if DROP_TURNS not in str(error):
            raise
        raise InvalidRequestError(str(error).replace(DROP_TURNS, "")) from None


def _parameters(tools: list[Any], name: str) -> Any:
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or "name" not in function:
            raise ValueError(
                f'tools[{i}] must be {{"type": "function", "function": {{"name": …}}}}, not {quoted(tool)}'
            )
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool["function"].get("parameters") or {"type": "object"}
    known = listed(tool["function"]["name"] for tool in tools)
    raise ValueError(f"tool_choice names {quoted(name)}; the tools are {known}")


def _arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call; None if the text ended before they were complete."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
