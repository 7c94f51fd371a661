"""Compiles chat templates, and renders them with the variables and message forms that they expect.

Templates differ in the messages that they accept and show. If a template would omit or move a system message, or omit
tool results or another role, the message becomes a user message in the same place. ``ChatTemplate.render`` tries the
usual form first. Then it tries tool arguments as text, the system message as part of the first user message, and
consecutive user messages as one. Last, it applies the changes in ``_CHANGES``, such as ids of nine characters. The
variables have the names that transformers and llama.cpp use.
"""

from __future__ import annotations

import datetime
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, islice, pairwise
from typing import Any, Final

from jinja2.exceptions import TemplateError
from jinja2.meta import find_undeclared_variables

from llamapipe._messages import quoted
from llamapipe.chat.messages import (
    REASONING_KEYS,
    ROLE,
    SYSTEM_ROLES,
    Message,
    check_messages,
    continued_part,
    plain,
    reasoning_of,
    text_arguments,
    with_answered_calls,
    with_arguments,
    with_called_results,
    with_descriptions,
    with_first_user,
    with_joined_answers,
    with_joined_users,
    with_merged_system,
    with_null_content,
    with_object_arguments,
    with_parts,
    with_plain_schemas,
    with_reasoning,
    with_reasoning_names,
    with_short_ids,
    with_single_calls,
    with_system_role,
    with_text_arguments,
    with_tools_in_system,
    with_users_text,
    with_written_calls,
)
from llamapipe.chat.sandbox import FixedList, JsonText, LimitError, new_limits, sandbox
from llamapipe.errors import InvalidRequestError

# Marks the end of a message that the model continues. The text that the template writes after this mark is cut off.
_HERE = "\x02continued here\x03"
_PROBE = "\x02content\x03"
_WORD = "Qxshownqx"
_ID = "call00000"
_CALLS = "tool calls"
_UNCALLED = "results without calls"
_PLACE = re.compile(r"Qxplace([0-9]+)qx")
_Form = Callable[[Sequence[Message]], list[Message]]
WriteCalls = Callable[[Sequence[tuple[str, str, dict[str, Any]]]], str]
_MAX_PARAMETERS = 64  # parameters that are tried to find the one that a template refuses
_MAX_KINDS = 64  # kinds of messages that are checked, because callers may send any number of roles
_OF_MESSAGE = re.compile(r"""message(\.tools|\[['"]tools['"]\])""")
_RESERVED = frozenset({"messages", "add_generation_prompt", "tools"})
_DEFAULTS = {"enable_thinking": True}  # the values of omitted template arguments
# The limits of a template argument in a probe: characters of a text, members of a list or an object, levels.
_SHORT, _FEW, _SHALLOW = 64, 4, 3


class ChatTemplate:
    """A compiled template. Any thread.

    ``bos``, ``eos``: the texts of these tokens. ``strips_bos``: remove a BOS from the beginning of prompts, because the
    tokenizer adds it. Raises InvalidRequestError for a template that cannot be compiled or exceeds a limit.
    """

    def __init__(self, text: str, bos: str = "", eos: str = "", strips_bos: bool = False) -> None:
        self.text = text
        try:
            self._template = sandbox.compiled(text)
        except (TemplateError, SyntaxError, RecursionError, MemoryError) as e:
            raise InvalidRequestError(f"the chat template cannot be compiled: {e}") from None
        self._bos = bos
        self._eos = eos
        self._strips_bos = strips_bos and bool(bos)
        with new_limits():
            self._takes_parts = self._wants_parts()
            self._takes_null = self._wants_null()
            self._knows_developer = "developer" in text and self._shows_first("developer") is True
            self._drops_system = self._shows_first("system") is False
            self._takes_text_arguments = self._wants_text_arguments()
            self._has_tools_in_system = self._shows_tools_of_system()
        self._kinds_seen: set[str] = set()  # the kinds of parts that `newly_dropped` has checked
        self._shown: dict[str, bool] = {}  # whether the template shows messages of a role, by the role

    def __repr__(self) -> str:
        return f"<ChatTemplate of {len(self.text)} characters>"

    @cached_property
    def arguments(self) -> frozenset[str]:
        """The names of template arguments that the template may read."""
        return frozenset(find_undeclared_variables(sandbox.parse(self.text))) - _RESERVED

    def probed_arguments(self, template_args: Mapping[str, Any]) -> dict[str, Any]:
        """Return a short form of the template arguments on which the markers of an answer may depend.

        Templates compare only short values. Long texts and lists are cut off, because each probe would render them.
        """
        names = dict(plain("template_args", dict(template_args)))
        read = {name: _shortened(value) for name, value in names.items() if name in self.arguments}
        return {name: value for name, value in sorted(read.items()) if _DEFAULTS.get(name) is not value}

    def render(
        self,
        messages: object,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_last: bool | str = False,
        reasoning_opening: str = "",
        template_args: Mapping[str, Any] | None = None,
        change_text: Callable[[str], str] | None = None,
        write_calls: WriteCalls | None = None,
        is_probe: bool = False,
    ) -> str:
        """Return the prompt for a conversation.

        ``continue_last``: the prompt ends inside the last message, and the model continues its "content", its
        "reasoning", or with True, the last of these that the message has. ``reasoning_opening``: the marker before
        reasoning, for templates that do not show the reasoning of the last message. ``change_text``: applied to every
        text of the caller, including keys of objects but not the names of roles. ``write_calls``: returns the text of
        tool calls, for a template that omits calls. ``is_probe``: messages that the template refuses or omits are not
        changed, so that the result shows what the template supports.

        Raises TypeError and InvalidRequestError for invalid messages and for messages that the template refuses.
        """
        chat = check_messages(messages)
        names = dict(plain("template_args", dict(template_args or {})))
        wrong = _RESERVED & names.keys()
        if wrong:
            raise InvalidRequestError(
                f"template_args must not hold {min(wrong)}, which is a separate argument"
            )
        tool_list = plain("tools", list(tools)) if tools else None
        if change_text is not None:
            chat, names, tool_list = (_changed(value, change_text) for value in (chat, names, tool_list))
        if not self._knows_developer:
            chat = with_system_role(chat)
        if tool_list:
            names["tools"] = tool_list
            names.setdefault("functions", json.dumps(tool_list, indent=4, ensure_ascii=False))
            if self._has_tools_in_system:
                chat = with_tools_in_system(chat, tool_list)
        chat = with_reasoning_names(chat)
        if write_calls is not None:
            chat = with_written_calls(chat, write_calls)
        if continue_last:
            if chat[-1]["role"] != "assistant":
                raise InvalidRequestError(
                    f"the last message has the role {quoted(chat[-1]['role'])}; only an assistant message "
                    "can be continued"
                )
            if continued_part(chat[-1], continue_last) == "reasoning":
                return self._in_reasoning(chat, names, reasoning_opening)
            chat[-1] = {**chat[-1], "content": chat[-1]["content"] + _HERE}
        text = self._placed(chat, add_generation_prompt and not continue_last, names, is_probe)
        if continue_last:
            text, mark, _ = text.rpartition(_HERE)
            if not mark:
                raise InvalidRequestError(
                    "the chat template does not show the last message, so it cannot be continued"
                )
        return self._without_bos(text)

    def _without_bos(self, text: str) -> str:
        return text[len(self._bos) :] if self._strips_bos and text.startswith(self._bos) else text

    def _in_reasoning(self, chat: list[Message], names: Mapping[str, Any], opening: str) -> str:
        """Return a prompt that ends inside the reasoning of the last message.

        If the template does not show reasoning there, the prompt asks for a new answer that begins with the reasoning.
        """
        reasoning = reasoning_of(chat[-1])
        if not reasoning:
            raise InvalidRequestError(
                "the last message has no reasoning_content, so its reasoning cannot be continued"
            )
        last = {key: value for key, value in chat[-1].items() if key != "tool_calls"}
        last |= dict.fromkeys(REASONING_KEYS, reasoning + _HERE)
        try:
            text, mark, _ = self._placed([*chat[:-1], last], False, names).rpartition(_HERE)
        except InvalidRequestError:
            mark = ""
        if not mark:
            if not opening:
                raise InvalidRequestError("the chat template has no reasoning, so none can be continued")
            prompt = self._placed(chat[:-1], True, names)
            begun = prompt.rstrip().endswith(opening.rstrip())
            text = f"{prompt}{'' if begun else opening}{reasoning}"
        return self._without_bos(text)

    def newly_dropped(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_args: Mapping[str, Any],
        write_calls: WriteCalls | None,
    ) -> list[str]:
        """Describe the parts of accepted messages that the template omits: tool calls, messages of a role.

        Each kind is checked once, in the first conversation that has it.
        """
        parts: list[str] = []
        chat = [dict(message) for message in messages]
        kinds = {_CALLS for message in chat if message.get("tool_calls")}
        kinds |= {str(message.get("role")) for message in chat} - {"user", "assistant"}
        for kind in sorted(kinds - self._kinds_seen):
            if len(self._kinds_seen) < _MAX_KINDS:
                self._kinds_seen.add(kind)
                if not self._shows_kind(kind, chat, tools, template_args, write_calls):
                    parts.append(kind if kind == _CALLS else f"messages of the role {quoted(kind)}")
        return parts

    def _shows_kind(
        self,
        kind: str,
        chat: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        template_args: Mapping[str, Any],
        write_calls: WriteCalls | None,
    ) -> bool:
        def marked(message: Message) -> Message:
            if kind == _CALLS and message.get("tool_calls"):
                function = {"name": _WORD, "arguments": {}}
                calls = [
                    {**call, "function": {**call["function"], **function}} for call in message["tool_calls"]
                ]
                return {**message, "tool_calls": calls}
            return {**message, "content": _WORD} if message.get("role") == kind else message

        try:
            marked_chat = [*map(marked, chat)]
            return _WORD in self.render(
                marked_chat, tools=tools, template_args=template_args, write_calls=write_calls
            )
        except InvalidRequestError:  # the template checks the part, so it does not ignore it
            return True

    def _placed(
        self,
        chat: list[Message],
        add_generation_prompt: bool,
        names: Mapping[str, Any],
        is_probe: bool = False,
    ) -> str:
        """Return the rendered text with system messages in their places, some of them as user messages."""
        if not is_probe:
            chat = self._with_shown_roles(chat, names)
        n = next((i for i, message in enumerate(chat) if message["role"] not in SYSTEM_ROLES), len(chat))
        if n and self._drops_system and chat[0]["role"] == "system":
            chat = [*with_merged_system(chat[: n + 1]), *chat[n + 1 :]]
        places = self._misplaced(chat, names)
        placed = with_users_text(chat, places)
        beside = with_users_text(chat, places, after_tools=False)
        options = [placed] if len(beside) == len(placed) else [placed, beside]
        return self._first_accepted(options, add_generation_prompt, names, () if is_probe else _CHANGES)

    def _with_shown_roles(self, chat: list[Message], names: Mapping[str, Any]) -> list[Message]:
        """Return all messages; those whose role the template omits become user messages."""
        others = {message["role"] for message in chat} - {*SYSTEM_ROLES, "user", "assistant"}
        if hidden := {role for role in others if not self._shows_role(role, names)}:
            chat = [{**message, "role": "user"} if message["role"] in hidden else message for message in chat]
        if (called := with_called_results(chat)) != chat and not self._shows_role(_UNCALLED, names):
            chat = called
        return chat

    def _shows_role(self, role: str, names: Mapping[str, Any]) -> bool:
        """Return False if the template omits messages of this role: an unusual role, or results of tools.

        The role ``_UNCALLED`` stands for results of tools that follow no call.
        """
        if role not in self._shown:
            user: Message = {"role": "user", "content": _PROBE}
            answer: Message = {"role": "assistant", "content": _PROBE}
            called = _calling(_PROBE, {})
            message: Message = {"role": role, "content": _WORD, "tool_call_id": _ID, "name": _PROBE}
            chats: list[list[Message]] = [[message, user], [user, answer, message]]
            if role == "tool":
                chats = [[user, called, message]]
            elif role == _UNCALLED:
                chats = [[user, answer, {**message, "role": "tool"}]]
            shown = False
            for chat in chats:
                try:
                    shown |= _WORD in self._first_form(chat, True, {**names, "tools": None})
                except InvalidRequestError:  # the template checks the message, so it does not ignore it
                    shown = True
            if len(self._shown) >= _MAX_KINDS:
                return shown
            self._shown[role] = shown
        return self._shown[role]

    def _misplaced(self, chat: Sequence[Message], names: Mapping[str, Any]) -> set[int]:
        """Return the indices of system messages that the template omits or moves.

        The first message is not checked, because the constructor has checked whether the template shows it.
        """
        late = [i for i, message in enumerate(chat) if i and message["role"] in SYSTEM_ROLES]
        if not late:
            return set()
        marked = [
            {**message, "content": f"Qxplace{i}qx"} if message["content"] else message
            for i, message in enumerate(chat)
        ]
        try:
            text = self._accepted(
                marked, (_as_given, with_text_arguments, with_object_arguments), True, names
            )
        except InvalidRequestError:
            return set(late)
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for place in _PLACE.finditer(text):
            first.setdefault(int(place[1]), place.start())
            last[int(place[1])] = place.start()
        if chat[0]["role"] in SYSTEM_ROLES and chat[0]["content"] and 0 not in last:
            return set(late)
        others = [i for i in range(len(chat)) if chat[i]["role"] not in SYSTEM_ROLES]
        wrong = {i for i in late if chat[i]["content"] and i not in last}
        latest_before = dict(zip(others, accumulate((first.get(i, -1) for i in others), max), strict=True))
        after = len(text)
        for i in reversed(range(1, len(chat))):
            if i in latest_before:
                after = min(after, last.get(i, after))
            elif i in last:
                n = bisect_left(others, i)
                before = latest_before[others[n - 1]] if n else -1
                if not before < last[i] < after:
                    wrong.add(i)
        return wrong

    def _first_accepted(
        self,
        options: Sequence[Sequence[Message]],
        add_generation_prompt: bool,
        names: Mapping[str, Any],
        changes: Sequence[_Form],
    ) -> str:
        """Return the text of the first of several message lists that the template accepts.

        If it accepts none, the ``changes`` are applied to each list, one after the other, until the template accepts
        the result. Raises the error of the last unchanged list.
        """
        refused: InvalidRequestError | None = None
        for messages in options:
            try:
                return self._first_form(messages, add_generation_prompt, names)
            except _StoppedError:
                raise
            except InvalidRequestError as error:
                refused = error
        for messages in options:
            for change in changes:
                changed = change(messages)
                if changed != messages:
                    messages = changed  # noqa: PLW2901
                    try:
                        return self._first_form(messages, add_generation_prompt, names)
                    except InvalidRequestError:
                        pass
        assert refused is not None
        raise refused

    def _first_form(
        self, messages: Sequence[Message], add_generation_prompt: bool, names: Mapping[str, Any]
    ) -> str:
        """Return the text of the first form of the messages that the template accepts."""
        forms: list[_Form] = [_as_given]
        if any(message.get("tool_calls") for message in messages):
            forms.insert(0 if self._takes_text_arguments else 1, with_text_arguments)
            if text_arguments(messages):
                forms.append(with_object_arguments)
        if any(message["role"] == "system" for message in messages):
            forms += [_after(form, with_merged_system) for form in forms]
        if any(a["role"] == b["role"] == "user" for a, b in pairwise(messages)) or len(forms) > 2:
            forms += [_after(form, with_joined_users) for form in forms]
        if any(message["role"] == "assistant" for message in messages):
            forms += [_after(form, with_reasoning) for form in forms]
        with new_limits():
            try:
                return self._accepted(messages, forms, add_generation_prompt, names)
            except InvalidRequestError as error:
                if not (tools := names.get("tools")):
                    raise
                for others in (with_descriptions(tools), with_descriptions(with_plain_schemas(tools))):
                    try:
                        context = {**names, "tools": others}
                        return self._accepted(messages, forms, add_generation_prompt, context)
                    except InvalidRequestError:
                        pass
                place = self._refused_parameter(messages, forms, {**names, "tools": others})
                if place is None:
                    raise
                raise InvalidRequestError(
                    f"the chat template cannot show the parameter {quoted(place[1])} of the tool {quoted(place[0])}; "
                    "give its schema one 'type'"
                ) from error

    def _refused_parameter(
        self, messages: Sequence[Message], forms: Sequence[_Form], names: Mapping[str, Any]
    ) -> tuple[str, str] | None:
        """Return the name of a tool and of its parameter that the template refuses; None for other causes."""

        def accepts(function: Mapping[str, Any], properties: Mapping[str, Any]) -> bool:
            parameters = {**function["parameters"], "properties": properties, "required": []}
            tools = [{"type": "function", "function": {**function, "parameters": parameters}}]
            try:
                return bool(self._accepted(messages, forms, True, {**names, "tools": tools}))
            except InvalidRequestError:
                return False

        functions = [tool["function"] for tool in names["tools"]]
        pairs = (
            (function, name, schema)
            for function in functions
            for name, schema in (function["parameters"].get("properties") or {}).items()
        )
        for function, name, schema in islice(pairs, _MAX_PARAMETERS):
            if not accepts(function, {name: schema}) and accepts(function, {}):
                return str(function["name"]), str(name)
        return None

    def _accepted(
        self,
        messages: Sequence[Message],
        forms: Sequence[_Form],
        add_generation_prompt: bool,
        names: Mapping[str, Any],
    ) -> str:
        """Return the text of the first form that the template accepts and in which it shows all text arguments.

        If no accepted form shows them, returns the text of the first accepted form.
        """
        written = [text.strip() for text in text_arguments(messages)]
        fallback: str | None = None
        error: Exception | None = None
        for form in forms:
            chat = with_arguments(form(messages), _json_text) if written else form(messages)
            if self._takes_null:
                chat = with_null_content(chat)
            if self._takes_parts:
                chat = with_parts(chat)
            try:
                text = self._render(chat, add_generation_prompt, names)
            except LimitError as e:
                raise _stopped(e) from None
            except Exception as e:  # a template may raise anything that Python's operators raise
                error = error or e
                continue
            if all(arguments in text for arguments in written):
                return text
            fallback = text if fallback is None else fallback
        if fallback is not None:
            return fallback
        raise InvalidRequestError(f"the chat template refuses these messages: {error}") from error

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool, names: Mapping[str, Any]
    ) -> str:
        today = datetime.datetime.now().astimezone()
        context = {**names, "messages": messages}
        with new_limits():
            return self._template.render(
                {
                    "bos_token": self._bos,
                    "eos_token": self._eos,
                    "date_string": today.strftime("%d %b %Y"),
                    "datetime": today.strftime("%b %d %Y"),
                    "functions": "",
                    **_DEFAULTS,
                    "add_generation_prompt": add_generation_prompt,
                    **{name: _fixed(value) for name, value in context.items()},
                }
            )

    def _wants_parts(self) -> bool:
        """Return whether the template shows content only if it is a list of parts, not text."""
        chat: list[Message] = [{"role": "user", "content": _PROBE}]
        return not self._shows(chat, True) and self._shows(with_parts(chat), True)

    def _wants_null(self) -> bool:
        """Return whether the template shows tool calls only in messages whose content is None."""
        chat: list[Message] = [{"role": "user", "content": ""}, _calling(_PROBE, "{}")]
        return not self._shows(chat, False) and self._shows(with_null_content(chat), False)

    def _shows_tools_of_system(self) -> bool:
        """Return whether the template shows tools only as JSON in a system message, like Phi-4 mini."""
        if not _OF_MESSAGE.search(self.text):
            return False
        user = {"role": "user", "content": _WORD}
        system = {"role": "system", "content": "", "tools": "Qxtools"}
        shown = self._tried([user], True, {"tools": [{"function": {"name": "Qxtools"}}]})
        if shown is None or "Qxtools" in shown:
            return False
        return "Qxtools" in (self._tried([system, user], True, {}) or "")

    def _shows_first(self, role: str) -> bool | None:
        """Return whether the template shows a message of this role before a user message; None if it refuses."""
        chat: list[Message] = [{"role": role, "content": _PROBE}, {"role": "user", "content": _WORD}]
        text = self._tried(with_parts(chat) if self._takes_parts else chat, True, {})
        return None if text is None else _PROBE in text

    def _wants_text_arguments(self) -> bool:
        """Return whether the template writes dict arguments in Python syntax, and text arguments unchanged."""
        arguments = {"name": _PROBE}

        def written(arguments: dict[str, str] | str) -> str:
            try:
                return self._render([{"role": "user", "content": ""}, _calling("name", arguments)], False, {})
            except Exception:  # see ``_accepted``
                return ""

        return str(arguments) in written(arguments) and json.dumps(arguments) in written(
            json.dumps(arguments)
        )

    def _shows(self, messages: Sequence[Message], add_generation_prompt: bool) -> bool:
        """Return whether the rendered text contains the probe."""
        return _PROBE in (self._tried(messages, add_generation_prompt, {}) or "")

    def _tried(
        self, messages: Sequence[Message], add_generation_prompt: bool, names: Mapping[str, Any]
    ) -> str | None:
        """Return the text of messages in this form only; None if the template refuses them."""
        try:
            return self._render(messages, add_generation_prompt, names)
        except LimitError as e:
            raise _stopped(e) from None
        except Exception:  # see ``_accepted``
            return None


def _calling(name: str, arguments: object) -> Message:
    call = {"id": _ID, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _as_given(messages: Sequence[Message]) -> list[Message]:
    return list(messages)


def _after(form: _Form, then: _Form) -> _Form:
    return lambda messages: then(form(messages))


def _json_text(arguments: Any) -> Any:
    return JsonText(arguments) if isinstance(arguments, str) else arguments


# The changes for messages that a template refuses, such as answers of other models and calls that were cut off.
_CHANGES: Final[tuple[_Form, ...]] = (
    with_joined_answers,
    with_called_results,
    with_short_ids,
    with_answered_calls,
    with_joined_answers,
    with_single_calls,
    with_first_user,
)


class _StoppedError(InvalidRequestError):
    """The template took too long or wrote too much."""


def _stopped(error: LimitError) -> InvalidRequestError:
    return _StoppedError(f"the chat template was stopped: {error}")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(ROLE.fullmatch(value))


def _shortened(value: Any, levels: int = _SHALLOW) -> Any:
    if isinstance(value, str):
        return value[:_SHORT]
    n = _FEW if levels else 0
    if isinstance(value, list):
        return [_shortened(item, levels - 1) for item in value[:n]]
    if isinstance(value, dict):
        return {key[:_SHORT]: _shortened(item, levels - 1) for key, item in [*value.items()][:n]}
    return value


def _fixed(value: Any) -> Any:
    """Return a JSON value whose lists a template cannot change. The sandbox protects dicts in any case."""
    if isinstance(value, list):
        return FixedList(map(_fixed, value))
    if isinstance(value, dict):
        return {key: _fixed(item) for key, item in value.items()}
    return value


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with all of its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    if isinstance(value, dict):
        # Templates compare the role, and check_messages() accepts only a name there.
        return {
            change(key): item if key == "role" and _is_name(item) else _changed(item, change)
            for key, item in value.items()
        }
    return value
