"""Formats that an answer must match, on every route: they hold, and errors name the field of the request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.chat_families import FAMILIES
from support.chat_templates import template
from support.scripted_model import scripted_model
from support.served import http_client

import llamapipe as lp

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
BAD: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "strng"}}}
PLACE = "cannot be compiled at #/properties/a: Invalid type: strng"
CHAT = ("/v1/chat/completions", {"messages": HELLO, "model": "demo", "max_tokens": 60})
TEXT = ("/v1/completions", {"prompt": "Hello", "model": "demo", "max_tokens": 60})
RESPONSES = ("/v1/responses", {"input": "Hello", "model": "demo", "max_output_tokens": 60})
MESSAGES = ("/v1/messages", {"messages": HELLO, "model": "demo", "max_tokens": 60})


def response_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def test_where_reasoning_is(tmp_path: Path) -> None:
    said = "<think>\nWell, what.\n</think>\n\nIt is sunny."
    path = scripted_model(tmp_path / "said.gguf", said, (), template("Qwen-Qwen3-0.6B").text)
    with (
        lp.Engine(path, n_ctx=2048, n_seq_max=2) as engine,
        http_client(engine, model_names=("demo",)) as client,
    ):
        apart = {"content": "It is sunny.", "reasoning_content": "Well, what."}
        for fields, expected in (
            ({"reasoning_format": "auto"}, apart),
            ({"reasoning_format": "deepseek", "separate_reasoning": True}, apart),
            ({"reasoning_format": "none"}, {"content": said}),
            ({"separate_reasoning": False}, {"content": said}),
            ({"reasoning_format": "deepseek-legacy"}, {**apart, "content": said}),
        ):
            body = {**CHAT[1], **fields, "temperature": 0}
            message = client.post(CHAT[0], json=body).json()["choices"][0]["message"]
            assert {key: value for key, value in message.items() if key in apart} == expected
            with client.stream("POST", CHAT[0], json={**body, "stream": True}) as response:
                lines = [line.removeprefix("data: ") for line in response.iter_lines() if "choices" in line]
            deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
            streamed = {key: "".join(delta.get(key) or "" for delta in deltas) for key in apart}
            assert {key: text for key, text in streamed.items() if text} == expected
        # A continued message: the answer holds what is added, and the prompt ends inside the reasoning.
        begun = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
        body = {**CHAT[1], "messages": [*HELLO, begun], "temperature": 0}
        for continued in (True, "reasoning_content"):
            message = client.post(CHAT[0], json={**body, "continue_final_message": continued}).json()
            assert message["choices"][0]["message"]["content"] == "It is sunny."
        for wrong, name in (
            ({"reasoning_format": "raw"}, "reasoning_format"),
            ({"reasoning_format": "none", "separate_reasoning": True}, "separate_reasoning"),
            ({"continue_final_message": "thoughts"}, "continue_final_message"),
        ):
            answer = client.post(CHAT[0], json={**body, **wrong})
            assert (answer.status_code, name in answer.text) == (400, True)


@pytest.fixture(scope="module")
def client(demo: lp.Model) -> Iterator[httpx.Client]:
    with (
        lp.Engine(demo, n_ctx=512, n_seq_max=2) as engine,
        http_client(engine, model_names=("demo",)) as client,
    ):
        yield client


@pytest.mark.parametrize(
    "wanted",
    [
        response_format(SCHEMA),
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_object", "value": SCHEMA}},  # huggingface_hub's client sends this
        {"json_schema": SCHEMA},
        {"json_schema": json.dumps(SCHEMA)},
    ],
    ids=[
        "response_format",
        "llama-server's",
        "Text Generation Inference's",
        "json_schema",
        "json_schema as text",
    ],
)
@pytest.mark.parametrize("route", [CHAT, TEXT], ids=["chat", "text"])
def test_a_schema_holds(client: httpx.Client, route: tuple[str, dict[str, Any]], wanted: Any) -> None:
    path, body = route
    choice = client.post(path, json={**body, **wanted}).json()["choices"][0]
    text = choice["message"]["content"] if path == CHAT[0] else choice["text"]
    assert json.loads(text) in ({"a": 1}, {"a": 2})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "wanted", "field", "message"),
    [
        (CHAT, response_format(BAD), "response_format", f"response_format: the JSON schema {PLACE}"),
        (CHAT, {"json_schema": BAD}, "json_schema", f"json_schema {PLACE}"),
        (
            CHAT,
            {"response_format": {"type": "json_object", "schema": SCHEMA, "value": BAD}},
            "response_format.value",
            "response_format: schema and value have different schemas; give one of them",
        ),
        (
            CHAT,
            {"response_format": {**response_format(SCHEMA)["response_format"], "value": BAD}},
            "response_format.value",
            "response_format: json_schema and value have different schemas",
        ),
        (TEXT, response_format(BAD), "response_format", f"response_format: the JSON schema {PLACE}"),
        (TEXT, {"json_schema": BAD}, "json_schema", f"json_schema {PLACE}"),
        (CHAT, {"regex": "("}, "regex", "regex cannot be compiled"),
        (TEXT, {"regex": "("}, "regex", "regex cannot be compiled"),
        (TEXT, {"grammar": "root ::= x"}, "grammar", "grammar: the rule 'x' is not defined"),
        (CHAT, response_format(SCHEMA) | {"regex": "a"}, "regex", "response_format and regex are both given"),
        (TEXT, response_format(SCHEMA) | {"regex": "a"}, "regex", "response_format and regex are both given"),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": BAD}}},
            "text.format",
            f"text.format: the JSON schema {PLACE}",
        ),
        (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": BAD}}},
            None,  # Anthropic's errors name no field
            f"output_config.format: the JSON schema {PLACE}",
        ),
    ],
)
def test_an_error_names_the_field_and_shows_no_internals(
    client: httpx.Client,
    route: tuple[str, dict[str, Any]],
    wanted: Any,
    field: str | None,
    message: str,
    stream: bool,
) -> None:
    answer = client.post(route[0], json={**route[1], **wanted, "stream": stream})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["message"].startswith(message)
    assert error.get("param") == field
    for internal in ("x-guidance", "lark", "of the list"):
        assert internal not in error["message"]


def test_a_schema_of_a_tool_is_named_by_its_tool(tmp_path: Path) -> None:
    family = FAMILIES["Hermes"]

    def function(name: str, parameters: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    path, body = CHAT
    body = {**body, "model": "said"}
    model = scripted_model(tmp_path / "said.gguf", family.full, (), template(family.template).text)
    with (
        lp.Engine(model, n_ctx=4096) as engine,
        http_client(engine) as client,
    ):
        bad = function("bad", BAD)
        strict = {"type": "function", "function": {**bad["function"], "strict": True}}
        for tool, more in (
            (bad, {"tool_choice": "required"}),
            (strict, {}),
            (strict, response_format(SCHEMA)),
        ):
            tools = [function("good", SCHEMA), tool]
            error = client.post(path, json={**body, "tools": tools, **more}).json()["error"]
            assert error["message"] == f"tool 'bad': the JSON schema {PLACE}"
            assert error["param"] == "tools"
        for more in ({}, response_format(SCHEMA)):  # the tool stays
            assert client.post(path, json={**body, "tools": [bad], **more}).status_code == 200
        fields = {"tools": [function("good", SCHEMA)], **response_format(BAD)}
        error = client.post(path, json={**body, **fields}).json()["error"]
        assert error["message"] == f"response_format: the JSON schema {PLACE}"


def test_a_model_without_tools_is_named(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    error = client.post(CHAT[0], json={**CHAT[1], "tools": [tool]}).json()["error"]
    assert error["param"] == "tools"
    assert "give a chat_template" in error["message"]
