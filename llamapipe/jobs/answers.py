"""Answers one record: a prompt, a conversation, or a request in OpenAI's batch format."""

from __future__ import annotations

import asyncio
import difflib
import json
import string
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import fields, replace
from typing import Any, Final

from llamapipe.chat.results import ToolCall
from llamapipe.engine.engine import Engine
from llamapipe.engine.params import SamplingParams
from llamapipe.jobs.records import Record
from llamapipe.jobs.results import request_id

_OPTIONS: Final = frozenset(field.name for field in fields(SamplingParams))
_CHAT_OPTIONS: Final = frozenset(
    {"tools", "tool_choice", "parallel_tool_calls", "response_format", "template_args"}
)
_KEPT: Final = frozenset({"id", "prompt", "messages"})
_Message = MutableMapping[str, Any]
_Application = Callable[
    [_Message, Callable[[], Awaitable[_Message]], Callable[[_Message], Awaitable[None]]], Awaitable[None]
]


class Answerer:
    """Turns records into results with one engine; for one event loop.

    ``params``: for records that do not say otherwise. ``template``: makes the prompt from a record's columns, as
    ``str.format`` does; then the columns are no options. ``system``: a system message; prompts become conversations.
    ``chat``: prompts are messages of a user. Raises ValueError for a bad template.
    """

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        template: str | None = None,
        system: str | None = None,
        chat: bool = False,
    ) -> None:
        self._engine, self._params = engine, params
        self._template, self._system, self._chat = template, system, chat or system is not None
        self._application: _Application | None = None
        if template is not None:
            _check_template(template)

    async def answer(self, record: Record) -> tuple[dict[str, Any], int, bool]:
        """The result of a record, its generated tokens, and whether it failed. Raises EngineClosedError only."""
        given = record.fields
        if record.problem is None and "custom_id" in given and self._template is None:
            return await self._request(record)
        start: dict[str, Any] = {"index": record.index} | ({"id": given["id"]} if "id" in given else {})
        try:
            if record.problem is not None:
                raise ValueError(record.problem)
            made, n = await self._complete(given)
        except Exception as error:  # whatever it is: the other records go on
            if self._engine.closed:
                raise
            return start | {"error": {"type": type(error).__name__, "message": str(error)}}, 0, True
        return start | made, n, False

    async def _complete(self, given: dict[str, Any]) -> tuple[dict[str, Any], int]:
        if self._template is not None:
            prompt: Any = _filled(self._template, given)
            options: dict[str, Any] = {}
        else:
            prompt, options = given.get("prompt"), {k: v for k, v in given.items() if k not in _KEPT}
        messages = given.get("messages") if self._template is None else None
        if (prompt is None) == (messages is None):
            raise ValueError("a record must have either a prompt or messages, or be made by a template")
        if isinstance(prompt, list) and not (prompt and all(type(token) is int for token in prompt)):
            raise TypeError(
                "prompt must be a text or a list of token ids; give each prompt a record of its own"
            )
        if messages is not None and not (
            isinstance(messages, list) and all(isinstance(one, dict) for one in messages)
        ):
            raise TypeError("messages must be a list of objects with role and content")
        chats = messages is not None or self._chat
        known = _OPTIONS | (_CHAT_OPTIONS if chats else frozenset())
        if wrong := sorted(options.keys() - known):
            near = difflib.get_close_matches(wrong[0], known, n=1)
            raise ValueError(f"{wrong[0]!r} is no option" + (f"; did you mean {near[0]!r}?" if near else ""))
        params = replace(self._params, **{k: v for k, v in options.items() if k in _OPTIONS})
        out: Any
        if not chats:
            out = await self._engine.agenerate(prompt, params)
            made: dict[str, Any] = {"text": out.text}
            choice: Any = out
        else:
            if messages is None:
                messages = [{"role": "user", "content": prompt}]
            if self._system is not None:
                messages = [{"role": "system", "content": self._system}, *messages]
            chat = {k: v for k, v in options.items() if k in _CHAT_OPTIONS}
            out = await self._engine.achat(messages, params, **chat)
            choice = out.choices[0]
            made = {"text": choice.content}
            if choice.reasoning:
                made["reasoning"] = choice.reasoning
            if choice.tool_calls:
                made["tool_calls"] = [_call(call) for call in choice.tool_calls]
        if len(out.choices) > 1:
            texts = [one.content if chats else one.text for one in out.choices]
            made = {"texts": texts}
        n = sum(len(one.token_ids) for one in out.choices)
        counts = {"n_prompt_tokens": out.n_prompt_tokens, "n_completion_tokens": n}
        return made | {"finish_reason": choice.finish_reason, "seed": choice.seed} | counts, n

    async def _request(self, record: Record) -> tuple[dict[str, Any], int, bool]:
        """Answers a line of OpenAI's batch format as the server would."""
        given = record.fields
        result: dict[str, Any] = {"id": request_id(record.index), "custom_id": given["custom_id"]}
        url, body = given.get("url"), given.get("body")
        problem = None
        if given.get("method", "POST") != "POST":
            problem = f"method is {given['method']!r}; it must be POST"
        elif not isinstance(url, str) or not url.startswith("/v1/") or not isinstance(body, dict):
            problem = "a request needs a url such as /v1/chat/completions and a body"
        elif body.get("stream"):
            problem = "stream is true; a batch has whole answers"
        if problem is not None:
            error = {"code": "invalid_request", "message": problem}
            return result | {"response": None, "error": error}, 0, True
        status, answer = await self._post(str(url), json.dumps(body).encode())
        usage = answer.get("usage") if isinstance(answer, dict) else None
        n = int((usage or {}).get("completion_tokens") or (usage or {}).get("output_tokens") or 0)
        response = {"status_code": status, "request_id": request_id(record.index), "body": answer}
        return result | {"response": response, "error": None}, n, status >= 400

    async def _post(self, path: str, body: bytes) -> tuple[int, Any]:
        if self._application is None:
            try:
                from llamapipe.server.app import app
                from llamapipe.server.settings import ServerSettings
            except ModuleNotFoundError as error:
                raise ImportError(
                    f"requests in OpenAI's format need {error.name}, which is not installed: "
                    "pip install 'llamapipe[server]'"
                ) from None
            settings = ServerSettings(max_requests=2**31 - 1, max_body_bytes=2**31 - 1, page=False)
            self._application = app(self._engine, settings)
        begun, parts, given = 0, [], [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> _Message:
            if given:
                return given.pop()
            await asyncio.Event().wait()  # the client stays
            raise AssertionError

        async def send(message: _Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = message["status"]
            else:
                parts.append(message.get("body", b""))

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
        }
        place = {
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
        }
        await self._application(scope | place | {"client": None, "server": None}, receive, send)
        return begun, json.loads(b"".join(parts))


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "name": call.name, "arguments": call.arguments}


def _check_template(template: str) -> None:
    for _, name, _, _ in string.Formatter().parse(template):
        # Only names: attributes and positions of a column's value are no columns.
        if name is not None and (not name or not set(name).isdisjoint(".[]") or name.isdigit()):
            raise ValueError(f"the template has {{{name}}}; write the name of a column, and {{{{ for a brace")


def _filled(template: str, columns: dict[str, Any]) -> str:
    try:
        return template.format_map(columns)
    except KeyError as error:
        raise ValueError(
            f"the record has no column {error}; it has {', '.join(map(repr, columns))}"
        ) from None
