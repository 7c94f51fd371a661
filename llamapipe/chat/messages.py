"""Prepares messages for templates: checks them, reduces them to plain JSON, and converts them to the templates' forms.

``kept_messages`` drops the oldest turns of a conversation that does not fit into the context. The engine
(``truncation="auto"``), the server and ``llamapipe chat`` use it. A turn begins with a user's message and includes all
results of its tool calls. Turns are dropped until the conversation fills half of the context or, with long tools and
system messages, half of the rest. If turns were dropped only until the conversation fits, every later prompt would
begin differently, and the prefix cache could not serve it. A caller sends the whole conversation each time, and the
same turns must be dropped each time. So ``kept_messages`` replays how the conversation grew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from difflib import get_close_matches
from hashlib import sha256
from typing import Any, TypeVar

from llamapipe._messages import did_you_mean, nearest, quoted
from llamapipe.chat.halves import whole_json
from llamapipe.errors import InvalidRequestError
from llamapipe.structured.schema import check_depth

Message = dict[str, Any]
SYSTEM_ROLES = ("system", "developer")
_ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")
ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TEXT_PARTS = ("text", "input_text", "output_text")
_EXAMPLE = 'engine.chat([{"role": "user", "content": "Hello"}])'


def check_messages(messages: object) -> list[Message]:
    """Return the messages as plain dicts whose ``content`` is text.

    ``content`` may be None, text, or a list of parts with text. The arguments of tool calls become dicts. Arguments
    that are not a JSON object, such as the arguments of a call that was cut off, become text. Raises TypeError or
    InvalidRequestError, which name the message's index.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(f"messages must be a list of messages, not {type(messages).__name__}: {_EXAMPLE}")
    if not messages:
        raise InvalidRequestError("messages is empty; give at least one message")
    return [_checked(index, message) for index, message in enumerate(messages)]


def plain(name: str, value: Any) -> Any:
    """Copy a value as plain JSON, so that templates never see the caller's objects. Raises InvalidRequestError."""
    check_depth(f"{name} is", [value])
    try:
        return json.loads(whole_json(json.dumps(value)))
    except (TypeError, ValueError, RecursionError) as e:
        raise InvalidRequestError(f"{name} cannot be written as JSON: {e}") from None


def _checked(index: int, message: object) -> Message:
    place = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise TypeError(
            f"{place} must be a dict with role and content, not {type(message).__name__}: {_EXAMPLE}"
        )
    fields: Message = plain(place, dict(message))
    role = fields.get("role")
    if role is None:
        raise InvalidRequestError(f"{place} has no role{_misspelt('role', fields)}")
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise InvalidRequestError(f"{place} has the role {quoted(role)}; it must be a name such as 'user'")
    # Templates may define other roles, but a role that nearly equals a usual role is a typo.
    if role not in _ROLES and (near := get_close_matches(role, _ROLES, 1, 0.8)):
        raise InvalidRequestError(f"{place} has the role {quoted(role)}; did you mean {near[0]}?")
    if "content" not in fields and "tool_calls" not in fields and "refusal" not in fields:
        raise InvalidRequestError(f"{place} has no content{_misspelt('content', fields)}")
    refusal = fields.pop("refusal", None)
    if fields.get("content") is None and isinstance(refusal, str):
        fields["content"] = refusal
    fields["content"] = _text(place, fields.get("content"))
    if fields.get("tool_calls") in (None, []):  # templates check only whether the member exists
        fields.pop("tool_calls", None)
    else:
        fields["tool_calls"] = _calls(place, fields["tool_calls"])
    return fields


def _misspelt(field: str, fields: Mapping[str, Any]) -> str:
    """Return a hint that names a probable misspelling of a missing field; empty if there is none."""
    wrong = next((key for key in fields if key != field and nearest(str(key), [field]) is not None), None)
    return "" if wrong is None else f"; is {quoted(wrong)} meant to be {quoted(field)}?"


def _text(place: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{place}: content must be text or a list of parts, not {type(content).__name__}"
        )
    texts: list[str] = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise InvalidRequestError(
                f"{place}: part {i} of the content is neither text nor an object with a type"
            )
        kind = part.get("type")
        # Hosted models may answer with a refusal instead of text.
        if kind == "refusal" and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
            continue
        if kind not in _TEXT_PARTS:
            what = "no type" if kind is None else f"the type {quoted(kind)}"
            hint = did_you_mean(str(kind), _TEXT_PARTS)
            raise InvalidRequestError(
                f"{place}: part {i} of the content has {what}; only text is supported{hint}"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f"{place}: part {i} of the content has no text{_misspelt('text', part)}"
            )
        texts.append(part["text"])
    return "".join(texts)


def _calls(place: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{place}: tool_calls must be a list, not {type(calls).__name__}")
    tool_calls = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(
                f"{place}: tool_calls[{i}] must have the form "
                '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
            )
        arguments = _arguments(function.get("arguments"))
        tool_calls.append({"type": "function", **call, "function": {**function, "arguments": arguments}})
    return tool_calls


def _arguments(arguments: Any) -> dict[str, Any] | str:
    """Return the arguments of a call as an object, or as text if they are not an object.

    Callers also send back answers that ``max_tokens`` ended within a call. The arguments of that call are not JSON.
    """
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments if isinstance(arguments, dict) else json.dumps(arguments, ensure_ascii=False)
    try:
        value = json.loads(whole_json(arguments))
        check_depth("arguments are", value)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


# The members of a message that hold an assistant's reasoning in clients and templates.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning in a message; empty if there is none."""
    return next((text for key in REASONING_KEYS if isinstance(text := message.get(key), str) and text), "")


def continued_part(message: Mapping[str, Any], asked: bool | str) -> str:
    """Return the part of the last message that an answer continues: "content", "reasoning", or empty for none.

    ``asked``: the part; True for the last part that the message has; False for none.
    """
    if asked is True:
        return "reasoning" if reasoning_of(message) and not message.get("content") else "content"
    return asked or ""


# ---- the forms that some templates expect
def with_reasoning_names(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the assistant's reasoning under every name that templates use.

    gpt-oss uses ``thinking``. Its template refuses ``thinking`` in a message with content, and shows it only before
    calls.
    """
    chat = []
    for message in messages:
        if text := reasoning_of(message):
            calls = message.get("tool_calls") and not message.get("content")
            names = REASONING_KEYS if calls else REASONING_KEYS[:2]
            message = {**dict.fromkeys(names, text), **message}  # noqa: PLW2901
        chat.append(message)
    return chat


def with_arguments(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    """Return the messages with the arguments of tool calls changed."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    return [
        {**message, "tool_calls": [*map(changed, message["tool_calls"])]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the arguments of tool calls as JSON text."""
    return with_arguments(
        messages, lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )


def with_object_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the arguments of all tool calls as objects.

    Arguments that are text become the object's only member, ``arguments``.
    """
    return with_arguments(messages, lambda value: {"arguments": value} if isinstance(value, str) else value)


def text_arguments(messages: Sequence[Message]) -> list[str]:
    """Return the arguments of tool calls that are text, not objects."""
    return [
        call["function"]["arguments"]
        for message in messages
        for call in message.get("tool_calls") or ()
        if isinstance(call["function"]["arguments"], str)
    ]


def with_merged_system(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with all system messages' text moved to the start of the first user message."""
    texts = [message["content"] for message in messages if message["role"] in SYSTEM_ROLES]
    others = [message for message in messages if message["role"] not in SYSTEM_ROLES]
    for i, message in enumerate(others):
        if message["role"] == "user":
            others[i] = {**message, "content": "\n".join([*texts, message["content"]])}
            return others
    return [{"role": "user", "content": "\n".join(texts)}, *others]


def with_users_text(
    messages: Sequence[Message], places: Container[int], after_tools: bool = True
) -> list[Message]:
    """Return the messages with the system messages at ``places`` in a form that a template shows there.

    System messages directly after the first one are added to it. The others become user messages. ``after_tools``: the
    template accepts a user message after the result of a tool; otherwise the text is added to that result.
    """
    chat: list[Message] = []
    for i, message in enumerate(messages):
        if i not in places:
            chat.append(message)
            continue
        before = chat[-1]["role"] if chat else ""
        if (before == "tool" and not after_tools) or (
            chat and all(earlier["role"] in SYSTEM_ROLES for earlier in chat)
        ):
            chat[-1] = {**chat[-1], "content": f"{chat[-1]['content']}\n\n{message['content']}"}
        else:
            chat.append({**message, "role": "user"})
    return chat


def with_joined_users(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with consecutive messages of the user joined."""
    chat: list[Message] = []
    for message in messages:
        if message["role"] == "user" and chat and chat[-1]["role"] == "user":
            chat[-1] = {**chat[-1], "content": f"{chat[-1]['content']}\n\n{message['content']}"}
        else:
            chat.append(message)
    return chat


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with all ids of calls as nine letters and digits, the form that Mistral's templates need.

    Conversations may come from other models or have no ids. The same id becomes the same text in every request. A call
    and a result without ids get the same id if they are in the same place.
    """

    def short(name: str) -> str:
        return name if re.fullmatch("[A-Za-z0-9]{9}", name) else sha256(name.encode()).hexdigest()[:9]

    chat: list[Message] = []
    waiting: dict[str, bool] = {}  # ids of calls without a result; True if the call had no id
    n_missing = 0
    for message in messages:
        if message.get("tool_calls"):
            calls, waiting = [], {}
            for call in message["tool_calls"]:
                n_missing += not call.get("id")
                id_ = short(str(call.get("id") or f"missing {n_missing}"))
                waiting[id_] = not call.get("id")
                calls.append({**call, "id": id_})
            chat.append({**message, "tool_calls": calls})
        elif message["role"] == "tool":
            first = next(
                (call_id for call_id, had_none in waiting.items() if had_none), next(iter(waiting), "missing")
            )
            id_ = short(str(message.get("tool_call_id") or first))
            waiting.pop(id_, None)
            chat.append({**message, "tool_call_id": id_})
        else:
            chat.append(message)
    return chat


def with_joined_answers(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with consecutive messages of the assistant joined, up to a message with calls."""
    chat: list[Message] = []
    for message in messages:
        before = chat[-1] if chat else {}
        if message["role"] == "assistant" == before.get("role") and not before.get("tool_calls"):
            texts = [part["content"] for part in (before, message) if part["content"]]
            chat[-1] = {**before, **message, "content": "\n\n".join(texts)}
        else:
            chat.append(message)
    return chat


def with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with only one call in each message of the assistant, followed by its result."""
    chat: list[Message] = []
    results: list[Message] = []
    for i, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            if not results:
                chat.append(message)
            else:
                results.pop()
            continue
        end = next((j for j in range(i + 1, len(messages)) if messages[j]["role"] != "tool"), len(messages))
        results = list(messages[i + 1 : end])
        left = list(results)
        rest = {key: value for key, value in message.items() if key not in REASONING_KEYS}
        for n, call in enumerate(calls):
            chat.append(
                {**(rest if n else message), "tool_calls": [call], "content": "" if n else message["content"]}
            )
            ids = [result.get("tool_call_id") for result in left]
            if left:
                chat.append(left.pop(ids.index(call.get("id")) if call.get("id") in ids else 0))
        chat += left
    return chat


def with_called_results(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with tool results that follow no call turned into user messages.

    Such results remain when a program has removed the calls from the conversation.
    """
    chat: list[Message] = []
    follows_call = False
    for message in messages:
        if message["role"] != "tool":
            follows_call = bool(message.get("tool_calls"))
        chat.append(message if message["role"] != "tool" or follows_call else {**message, "role": "user"})
    return chat


def with_answered_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with calls that have no result turned into text, such as calls that ``max_tokens`` cut off.

    Calls in the last message stay.
    """
    chat: list[Message] = []
    for message, after in zip(messages, [*messages[1:], {}], strict=True):
        if message.get("tool_calls") and after.get("role", "tool") != "tool":
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
            chat.append({**rest, "content": "\n".join([*filter(None, [message["content"]]), *calls])})
        else:
            chat.append(message)
    return chat


def with_first_user(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with an empty user message before an answer that begins the chat, such as a greeting."""
    n = next((i for i, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))
    if n == len(messages) or messages[n]["role"] != "assistant":
        return list(messages)
    return [*messages[:n], {"role": "user", "content": ""}, *messages[n:]]


def with_null_content(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with None as the content of messages that hold tool calls but no text."""
    return [
        {**message, "content": None} if message.get("tool_calls") and not message["content"] else message
        for message in messages
    ]


def with_written_calls(
    messages: Sequence[Message], written: Callable[[Sequence[tuple[str, str, dict[str, Any]]]], str]
) -> list[Message]:
    """Return the messages with tool calls as part of their text.

    ``written``: returns the text of calls, each of which is an id, a name and arguments.
    """
    chat = []
    for message in messages:
        if calls := message.get("tool_calls"):
            triples = [
                (str(call.get("id", "")), call["function"]["name"], call["function"]["arguments"])
                for call in calls
            ]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            chat.append({**rest, "content": (message["content"] or "") + written(triples)})
        else:
            chat.append(message)
    return chat


def with_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with an empty ``reasoning_content`` in answers that have none."""
    return [
        {"reasoning_content": "", **message} if message["role"] == "assistant" else message
        for message in messages
    ]


def with_parts(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with contents as lists of parts."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"] or ""}]} for message in messages
    ]


def with_tools_in_system(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages with the tools as JSON in the first system message.

    If the first message is not a system message, an empty one is added.
    """
    text = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "tools": text}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": text}, *messages]


def with_system_role(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the role ``developer`` replaced by its older name, ``system``."""
    return [
        {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
    ]


def with_descriptions(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools with a description of every parameter. Missing descriptions become empty texts."""
    copies = []
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters") or {}
        properties = parameters.get("properties")
        if isinstance(properties, Mapping):
            described = {
                name: {"description": "", **schema} if isinstance(schema, Mapping) else schema
                for name, schema in properties.items()
            }
            function = {**function, "parameters": {**parameters, "properties": described}}
        copies.append({**tool, "function": function})
    return copies


def with_plain_schemas(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools with their parameters written as most templates expect them.

    Each schema becomes an object whose ``type`` does not include "null", because some templates convert types with a
    macro that calls itself without end for unknown types, such as ``"null"``.
    """
    return [
        {**tool, "function": {**function, "parameters": _plain_schema(function.get("parameters") or {})}}
        for tool in tools
        for function in [tool["function"]]
    ]


def _plain_schema(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return {}  # for the schemas True and False
    result = dict(schema)
    kinds = result.pop("type", None)
    others = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind not in ("null", None)]
    if others:
        result["type"] = others[0] if len(others) == 1 else others
    if result.get("type") == "object":
        result.setdefault("additionalProperties", {})
    for key, value in result.items():
        if key in _OF_NAMES and isinstance(value, Mapping):
            result[key] = {name: _plain_schema(member) for name, member in value.items()}
        elif key in _OF_SCHEMA:
            is_list = isinstance(value, list)
            result[key] = [_plain_schema(option) for option in value] if is_list else _plain_schema(value)
    return result


# Keywords whose value is a schema or a list of schemas, and keywords whose value has schemas by name.
_OF_SCHEMA = frozenset({"items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf"})
_OF_NAMES = frozenset({"properties", "$defs", "definitions"})


MessageT = TypeVar("MessageT", bound=Mapping[str, Any])
_RESULTS = ("tool", "function")
# The characters of messages that are checked per token of the context. Older turns never fit.
_MOST_CHARACTERS = 64


def kept_messages(
    messages: Sequence[MessageT],
    n_tokens: Callable[[list[MessageT]], int],
    n_ctx: int,
    max_tokens: int | None,
    room: int = 1,
) -> list[MessageT]:
    """Return the conversation, without its oldest turns if the prompt leaves too little room for the answer.

    The answer needs room for ``max_tokens``, but at most a quarter of ``n_ctx``, and for at least ``room`` tokens. The
    system messages at the beginning and the last turn stay; if they alone fill the context, nothing is dropped.
    ``n_tokens``: returns the number of tokens in the prompt for messages.
    """
    n_free = _room(n_ctx, max_tokens, room)
    n_head = next(
        (i for i, message in enumerate(messages) if message.get("role") not in SYSTEM_ROLES), len(messages)
    )
    messages = list(messages)
    head, turns = messages[:n_head], _turns(messages[n_head:])
    n_left = _MOST_CHARACTERS * n_ctx - sum(len(str(message)) for message in head)
    n_looked_at = 0
    for turn in reversed(turns):
        n_left -= sum(len(str(message)) for message in turn)
        if n_left < 0 and n_looked_at:
            break
        n_looked_at += 1
    recent = turns[len(turns) - n_looked_at :]
    if len(turns) < 2 or (n_looked_at == len(turns) and n_tokens(messages) + n_free <= n_ctx):
        return messages
    begin = _first_after_growing(head, recent, n_tokens, n_ctx, n_free)
    for first in range(begin, len(recent)):  # the sizes of turns do not add up exactly
        kept = [*head, *(message for turn in recent[first:] for message in turn)]
        n = n_tokens(kept)
        if n + n_free <= n_ctx:
            return kept
    return kept if n + room <= n_ctx else messages


def kept_tokens(
    before: Sequence[int], n_prompt: int, n_ctx: int, max_tokens: int | None, room: int
) -> Sequence[int]:
    """Return the tokens before a prompt, without the oldest if they leave too little room for the answer.

    The answer needs the room that ``kept_messages`` describes. If tokens are dropped, the rest fills half of ``n_ctx``.
    """
    if len(before) + n_prompt + _room(n_ctx, max_tokens, room) <= n_ctx:
        return before
    n_kept = max(n_ctx // 2 - n_prompt, 0)
    return before[len(before) - n_kept :]


def _room(n_ctx: int, max_tokens: int | None, least: int) -> int:
    """Return the number of tokens that are kept free for an answer."""
    return max(n_ctx // 4 if max_tokens is None else min(max_tokens, n_ctx // 4), least)


def _turns(messages: list[MessageT]) -> list[list[MessageT]]:
    """Return the messages in turns, each of which begins with a user message after a message of another role.

    A tool call and its result are in the same turn.

    Messages before the first user message, such as a greeting, belong to the first turn. Templates may refuse a
    conversation without a user message, and its tokens could then not be counted.
    """
    users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    answers_earlier, is_answer = [False] * len(messages), False
    for i in reversed(range(len(messages))):
        is_answer = messages[i].get("role") in _RESULTS or (is_answer and not messages[i].get("tool_calls"))
        answers_earlier[i] = is_answer
    begins = [i for i in users[1:] if messages[i - 1].get("role") != "user" and not answers_earlier[i]]
    if not messages:
        return []
    begins.insert(0, 0)
    return [messages[begin:end] for begin, end in zip(begins, [*begins[1:], len(messages)], strict=True)]


def _first_after_growing(
    head: list[MessageT],
    turns: list[list[MessageT]],
    n_tokens: Callable[[list[MessageT]], int],
    n_ctx: int,
    n_free: int,
) -> int:
    """Return the index of the first turn that is kept if the turns arrive one after the other."""
    if len(turns) == 1:
        return 0
    sizes = [n_tokens(turn) for turn in turns]
    # Each size includes the text that the template writes once, such as tools.
    n_once = max(sizes[0] + sizes[1] - n_tokens([*turns[0], *turns[1]]), 0)
    sizes = [size - n_once for size in sizes]
    n = n_tokens([*head, *turns[0]]) - sizes[0]  # the tokens of the head and of the text written once
    n_wanted = max(n_ctx // 2, n + (n_ctx - n_free - n) // 2)
    first = 0
    for index, size in enumerate(sizes):
        if n + size + n_free > n_ctx:
            # The last turn may lack its answer. It counts like the preceding turn, so that the answer moves no cut.
            usual = sizes[index - 1] if index else size
            while first < index and (n + usual > n_wanted or n + size + n_free > n_ctx):
                n -= sizes[first]
                first += 1
        n += size
    return first
