"""Chat templates: compiled once, and rendered with the variables and message forms that they expect.

Templates differ in what they accept. ``ChatTemplate.render`` tries the usual form first, then tool arguments as text,
then the system message as a part of the first user message. The variables are those of transformers and llama.cpp.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from jinja2.exceptions import TemplateError

from llamapipe._messages import quoted
from llamapipe.chat._sandbox import FixedList, LimitError, new_limits, sandbox
from llamapipe.chat.messages import (
    ROLE,
    Message,
    check_messages,
    plain,
    with_merged_system,
    with_null_content,
    with_parts,
    with_system_role,
    with_text_arguments,
)
from llamapipe.errors import InvalidRequestError

# Marks the end of a message that is to be continued: the text that the template writes after it is cut off.
_HERE = "\x02continued here\x03"
_PROBE = "\x02content\x03"
_WORD = "Qxshownqx"
_CALLS = "tool calls"
_MAX_KINDS = 64  # kinds of messages that are looked at: their number is a caller's choice
_RESERVED = frozenset({"messages", "add_generation_prompt", "tools"})


class ChatTemplate:
    """A compiled template. Any thread.

    ``bos``, ``eos``: the texts of these tokens. ``strips_bos``: leave out a BOS at the beginning, because tokenizing
    adds it. Raises InvalidRequestError for a template that cannot be compiled.
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
        self._knows_developer = "developer" in text
        self._takes_parts = self._wants_parts()
        self._takes_null = self._wants_null()
        self._kinds_seen: set[str] = set()  # of what a template may leave out

    def __repr__(self) -> str:
        return f"<ChatTemplate of {len(self.text)} characters>"

    def render(
        self,
        messages: object,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_last: bool = False,
        template_args: Mapping[str, Any] | None = None,
        change_text: Callable[[str], str] | None = None,
    ) -> str:
        """The prompt for a conversation.

        ``continue_last``: the prompt ends inside the last message, which the model is to continue. ``change_text``:
        applied to every text of the caller, including keys of objects but not the names of roles.

        Raises TypeError and InvalidRequestError for bad messages and for messages that the template refuses.
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
        if continue_last:
            if chat[-1]["role"] != "assistant":
                raise InvalidRequestError(
                    f"the last message has the role {quoted(chat[-1]['role'])}; only an assistant message "
                    "can be continued"
                )
            chat[-1] = {**chat[-1], "content": chat[-1]["content"] + _HERE}
        if tool_list:
            names["tools"] = tool_list
            names.setdefault("functions", json.dumps(tool_list, indent=4, ensure_ascii=False))
        text = self._first_accepted(chat, add_generation_prompt and not continue_last, names)
        if continue_last:
            text, found, _ = text.rpartition(_HERE)
            if not found:
                raise InvalidRequestError(
                    "the chat template does not show the last message, so it cannot be continued"
                )
        if self._strips_bos and text.startswith(self._bos):
            text = text[len(self._bos) :]
        return text

    def newly_dropped(
        self,
        messages: object,
        tools: Sequence[Mapping[str, Any]] | None,
        template_args: Mapping[str, Any],
    ) -> list[str]:
        """What the template leaves out of messages that it has accepted, in words: tool calls, messages of a role.

        Each kind is looked at only once, in the first conversation that has it.
        """
        found: list[str] = []
        chat = (
            [dict(message) for message in messages if isinstance(message, Mapping)]
            if _is_list(messages)
            else []
        )
        kinds = {_CALLS for message in chat if message.get("tool_calls")}
        kinds |= {str(message.get("role")) for message in chat} - {"user", "assistant"}
        for kind in sorted(kinds - self._kinds_seen):
            if len(self._kinds_seen) < _MAX_KINDS:
                self._kinds_seen.add(kind)
                if not self._shows_kind(kind, chat, tools, template_args):
                    found.append(kind if kind == _CALLS else f"messages of the role {quoted(kind)}")
        return found

    def _shows_kind(
        self,
        kind: str,
        chat: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        template_args: Mapping[str, Any],
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
            return _WORD in self.render([*map(marked, chat)], tools=tools, template_args=template_args)
        except InvalidRequestError:  # it wants something else there, so it looks at it
            return True

    def _first_accepted(
        self, messages: Sequence[Message], add_generation_prompt: bool, names: Mapping[str, Any]
    ) -> str:
        """The rendering of the first form of the messages that the template accepts."""
        forms: list[Callable[[Sequence[Message]], list[Message]]] = [list]
        if any(message.get("tool_calls") for message in messages):
            forms.append(with_text_arguments)
        if any(message["role"] == "system" for message in messages):
            forms += [with_merged_system, lambda chat: with_merged_system(with_text_arguments(chat))]
        first: Exception | None = None
        for form in forms:
            chat = form(messages)
            if self._takes_null:
                chat = with_null_content(chat)
            if self._takes_parts:
                chat = with_parts(chat)
            try:
                return self._render(chat, add_generation_prompt, names)
            except LimitError as e:
                raise _stopped(e) from None
            except Exception as e:  # a template may raise anything that Python's operators raise
                first = first or e
        raise InvalidRequestError(f"the chat template refuses these messages: {first}") from first

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool, names: Mapping[str, Any]
    ) -> str:
        today = datetime.datetime.now().astimezone()
        given = {**names, "messages": messages}
        with new_limits():
            return self._template.render(
                {
                    "bos_token": self._bos,
                    "eos_token": self._eos,
                    "date_string": today.strftime("%d %b %Y"),
                    "datetime": today.strftime("%b %d %Y"),
                    "functions": "",
                    "enable_thinking": True,
                    "add_generation_prompt": add_generation_prompt,
                    **{name: _fixed(value) for name, value in given.items()},
                }
            )

    def _wants_parts(self) -> bool:
        """Whether the template shows contents that are lists of parts, and not those that are text."""
        chat: list[Message] = [{"role": "user", "content": _PROBE}]
        return not self._shows(chat, True) and self._shows(with_parts(chat), True)

    def _wants_null(self) -> bool:
        """Whether the template shows tool calls only in messages whose content is None."""
        function = {"name": _PROBE, "arguments": "{}"}
        calls = [{"id": "call00000", "type": "function", "function": function}]
        message: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        chat: list[Message] = [{"role": "user", "content": ""}, message]
        return not self._shows(chat, False) and self._shows(with_null_content(chat), False)

    def _shows(self, messages: Sequence[Message], add_generation_prompt: bool) -> bool:
        """Whether the rendered text contains the probe."""
        try:
            return _PROBE in self._render(messages, add_generation_prompt, {})
        except LimitError as e:
            raise _stopped(e) from None
        except Exception:  # as in ``_first_accepted``
            return False


def _stopped(error: LimitError) -> InvalidRequestError:
    return InvalidRequestError(f"the chat template was stopped: {error}")


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(ROLE.fullmatch(value))


def _fixed(value: Any) -> Any:
    """A JSON value whose lists a template cannot change. It cannot change dicts in any case."""
    if isinstance(value, list):
        return FixedList(map(_fixed, value))
    if isinstance(value, dict):
        return {key: _fixed(item) for key, item in value.items()}
    return value


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with all of its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    if isinstance(value, dict):
        # A role is a name that templates compare, and check_messages() accepts no other text there.
        return {
            change(key): item if key == "role" and _is_name(item) else _changed(item, change)
            for key, item in value.items()
        }
    return value
