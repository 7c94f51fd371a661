"""Tools and schemas of another form than their API's: each is a 400 that names the field, and no defect in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from support.chat_families import FAMILIES
from support.chat_templates import template
from support.scripted_model import scripted_model
from support.served import http_client

import llamapipe as lp

HELLO: Any = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
BAD_SCHEMA: list[Any] = [
    {"type": "object", "properties": []},
    {"type": "object", "properties": {"x": 5}},
    {"type": "object", "properties": {"x": []}},
    {"type": "object", "properties": {"x": "string"}},
    {"type": "object", "required": "x"},
    {"type": "object", "required": [5]},
    {"properties": None},
    {"$ref": 5},
    {"$ref": "#/$defs/none"},
    {"$defs": []},
    {"anyOf": {}},
    {"anyOf": []},
    {"properties": {"x": {"enum": "a"}}},
    {"properties": {"x": {"type": "array", "items": 5}}},
    {"properties": {"x": {"pattern": 5}}},
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    family = FAMILIES["Qwen3-Coder"]
    path = tmp_path_factory.mktemp("model") / "said.gguf"
    model = scripted_model(path, "Hello, world!", family.specials, template(family.template).text)
    with (
        lp.Engine(model, n_ctx=2048, n_seq_max=2) as engine,
        http_client(engine, ollama=True) as client,
    ):
        yield client


def functions(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def flat(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "name": "f", "parameters": parameters}]


def anthropic(schema: Any) -> list[dict[str, Any]]:
    return [{"name": "f", "input_schema": schema}]


MakeTools = Callable[[Any], list[dict[str, Any]]]
PATHS: dict[str, tuple[dict[str, Any], MakeTools]] = {
    "/v1/chat/completions": ({"messages": HELLO, "max_tokens": 4}, functions),
    "/v1/chat/completions/input_tokens": ({"messages": HELLO}, functions),
    "/v1/responses": ({"input": "Hello", "max_output_tokens": 16}, flat),
    "/v1/responses/input_tokens": ({"input": "Hello"}, flat),
    "/v1/messages": ({"messages": HELLO, "max_tokens": 4}, anthropic),
    "/v1/messages/count_tokens": ({"messages": HELLO}, anthropic),
    "/api/chat": ({"messages": HELLO, "stream": False}, functions),
    "/apply-template": ({"messages": HELLO}, functions),
    "/tokenize": ({"messages": HELLO}, functions),
}


def wrong_tools(make_tools: MakeTools) -> Iterator[tuple[Any, str]]:
    """Lists of tools, and a word of the field that is wrong."""
    lists: tuple[Any, ...] = ({}, 5, "x", True, [5], [None], [[]], [{}], {"type": "function"})
    for tools in lists:
        yield tools, "tools"
    (good,) = make_tools(SCHEMA)
    schema = "input_schema" if "input_schema" in good else "parameters"
    inner = good.get("function", good)
    fields: dict[str, list[Any]] = {
        schema: [True, False, 5, 1.5, "object", [], [SCHEMA], {"type": 5}, {"type": "array"}],
        "name": [5, None, "", "a b", [], {}, True, "auto"],
        "description": [5, [], {}, True],
        "strict": ["x", 5, [], {}],
    }
    for field, values in fields.items():
        for value in values:
            changed = {**inner, field: value}
            yield [changed if inner is good else {**good, "function": changed}], field
    for value in [None, 5, [], "x", True, {}] if inner is not good else []:
        yield [{**good, "function": value}], "function"
    for value in [5, [], {}, True, "no such"]:
        yield [{**good, "type": value}], "type"


def refused(answer: httpx.Response, caplog: pytest.LogCaptureFixture) -> str:
    """The message of an answer to a bad request, which is nothing to log."""
    logged = [
        record.getMessage()
        for record in caplog.records
        if record.exc_info or "Traceback" in record.getMessage()
    ]
    assert (answer.status_code, logged) == (400, [])
    error = answer.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("path", PATHS)
def test_a_tool_of_another_form_is_refused_by_its_field(
    client: httpx.Client, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    caplog.set_level(logging.WARNING)
    body, make_tools = PATHS[path]
    assert client.post(path, json={"model": "said", **body, "tools": make_tools(SCHEMA)}).status_code == 200
    for tools, field in wrong_tools(make_tools):
        message = refused(client.post(path, json={"model": "said", **body, "tools": tools}), caplog)
        assert "tool" in message, (tools, message)
        if not isinstance(tools, list) or tools[0] in (None, 5, [], {}) or "auto" in message:
            continue
        names = ("parameters", "input_schema") if field == "input_schema" else (field, "form")
        assert any(name in message for name in names), (tools, message)


@pytest.mark.parametrize("path", PATHS)
def test_schemas_that_are_none(client: httpx.Client, path: str) -> None:
    """The model sees them; its arguments are any JSON object."""
    body, make_tools = PATHS[path]
    for schema in BAD_SCHEMA:
        answer = client.post(path, json={"model": "said", **body, "tools": make_tools(schema)})
        assert answer.status_code in (200, 400), answer.text


NONE: list[Any] = [True, 5, "x", [], [SCHEMA]]
FORMATS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "/v1/chat/completions": lambda v: {"response_format": {"type": "json_schema", "json_schema": v}},
    "/v1/completions": lambda v: {"response_format": {"type": "json_schema", "json_schema": v}},
    "/v1/responses": lambda v: {"text": {"format": v}},
    "/v1/messages": lambda v: {"output_config": {"format": v}},
    "/api/chat": lambda v: {"format": v},
}


@pytest.mark.parametrize("path", FORMATS)
def test_a_format_of_another_form_is_refused(
    client: httpx.Client, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    caplog.set_level(logging.WARNING)
    body = {"prompt": "Hello", "max_tokens": 4} if path == "/v1/completions" else PATHS[path][0]
    values = list(NONE)
    if path != "/api/chat":  # where the format is a schema, which may have other keywords
        values += [
            {"name": 5},
            {"type": "json_schema", "name": "x", "schema": 5},
            {"name": "x", "schema": []},
        ]
    for value in values:
        fields = FORMATS[path](value)
        message = refused(client.post(path, json={"model": "said", **body, **fields}), caplog)
        assert "format" in message or "schema" in message, (value, message)
