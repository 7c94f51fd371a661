"""Custom tools whose input follows a grammar: in every form of calls, in both APIs, or refused by the field's name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support.chat_families import FAMILIES
from support.chat_templates import ByteVocabulary, renderer, template
from support.scripted_model import scripted_model
from support.served import http_client

import llamapipe as lp
from llamapipe.chat.chat_format import ChatFormat
from llamapipe.chat.tools import check_tools
from llamapipe.server._tools import tools_of

HELLO: Any = [{"role": "user", "content": "Hello"}]
GRAMMARS = {
    "regex": ("[0-9]{3}", r"[0-9]{3}"),
    "lark": ('start: WORD ("," WORD){2} LF\nWORD: /[a-z]{2}/\n%import common.LF', r"[a-z]{2},[a-z]{2},[a-z]{2}\n"),
}  # fmt: skip


@pytest.fixture(scope="module", params=["Mistral args", "Qwen3-Coder"])
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    family = FAMILIES[request.param]
    path = tmp_path_factory.mktemp("model") / "said.gguf"
    model = scripted_model(path, "Hello, world!", family.specials, template(family.template).text)
    with (
        lp.Engine(model, n_ctx=8192, n_seq_max=2) as engine,
        http_client(engine) as client,
    ):
        yield client


def chat(**grammar: Any) -> dict[str, Any]:
    tool = {"name": "code", "description": "", "format": {"type": "grammar", "grammar": grammar}}
    return {
        "model": "said",
        "messages": HELLO,
        "max_tokens": 300,
        "temperature": 0,
        "tools": [{"type": "custom", "custom": tool}],
        "tool_choice": {"type": "custom", "custom": {"name": "code"}},
        "chat_template_kwargs": {"enable_thinking": False},
    }


def responses(**grammar: Any) -> dict[str, Any]:
    return {
        "model": "said",
        "input": "Hello",
        "max_output_tokens": 300,
        "temperature": 0,
        "tools": [{"type": "custom", "name": "code", "format": {"type": "grammar", **grammar}}],
        "tool_choice": {"type": "custom", "name": "code"},
        "chat_template_kwargs": {"enable_thinking": False},
    }


@pytest.mark.parametrize("syntax", GRAMMARS)
def test_the_input_follows_the_grammar(client: httpx.Client, syntax: str) -> None:
    definition, expected = GRAMMARS[syntax]
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as api:
        body: Any = chat(syntax=syntax, definition=definition)
        extra: Any = {"extra_body": {"chat_template_kwargs": body.pop("chat_template_kwargs")}}
        whole: Any = api.chat.completions.create(**body, **extra)
        (call,) = whole.choices[0].message.tool_calls
        assert re.fullmatch(expected, call.custom.input), call
        inputs: list[str] = []
        chunk: Any
        for chunk in api.chat.completions.create(**body, **extra, stream=True):
            inputs += [part.custom["input"] for part in chunk.choices[0].delta.tool_calls or ()]
        assert "".join(inputs) == call.custom.input
        body = responses(syntax=syntax, definition=definition)
        del body["chat_template_kwargs"]
        response: Any = api.responses.create(**body, **extra)
        item = response.output[-1]
        assert item.type == "custom_tool_call" and item.input == call.custom.input
        kinds = [event.type for event in api.responses.create(**body, **extra, stream=True)]
        assert "response.custom_tool_call_input.done" in kinds


WRONG = [
    ({"syntax": "ebnf", "definition": "x"}, "syntax"),
    ({"definition": "x"}, "syntax"),
    ({"syntax": "lark"}, "definition"),
    ({"syntax": "regex", "definition": 5}, "definition"),
    ({"syntax": "regex", "definition": ""}, "definition"),
    ({"syntax": "lark", "definition": "start: ("}, "definition"),
    ({"syntax": "lark", "definition": 'start: "(" start ")" | "x"'}, "definition"),
    ({"syntax": "regex", "definition": "[0-9"}, "definition"),
    ({"syntax": "regex", "definition": r"a\bc"}, "definition"),
    ({"syntax": "lark", "definition": "start: /[0-9/"}, "definition"),
]


@pytest.mark.parametrize(("grammar", "key"), WRONG, ids=str)
def test_what_cannot_be_followed_is_refused(client: httpx.Client, grammar: dict[str, Any], key: str) -> None:
    for path, body, place in (
        ("/v1/chat/completions", chat(**grammar), "tools.0.custom.format.grammar"),
        ("/v1/responses", responses(**grammar), "tools.0.format"),
    ):
        for choice in (body["tool_choice"], "auto"):
            answer = client.post(path, json={**body, "tool_choice": choice})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == f"{place}.{key}"


@pytest.mark.parametrize("text_format", [{"type": "grammr"}, {}, "text", {"type": "text", "x": 1}])
def test_other_formats_are_refused(client: httpx.Client, text_format: Any) -> None:
    body = responses()
    body["tools"][0]["format"] = text_format
    answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("tools.0.format")
    body["tools"][0]["format"] = {"type": "text"}
    assert client.post("/v1/responses", json={**body, "max_output_tokens": 8}).status_code == 200
    assert json.loads(answer.text)["error"]["message"].startswith("tools.0.format")


def test_gpt_oss() -> None:
    """A model of few words would write spaces without end between the parts of this format's JSON."""
    vocabulary = ByteVocabulary(FAMILIES["gpt-oss"].specials)
    form = ChatFormat.of(renderer("openai-gpt-oss-120b"), vocabulary.special_id)
    tools = check_tools(
        tools_of(responses(syntax="regex", definition="[0-9]{3}")["tools"], None, True).functions
    )
    grammar = form.grammar(tools, "code", False, prompt_tail="<|start|>assistant")
    assert grammar is not None
    head = '<|channel|>commentary to=functions.code <|constrain|>json<|message|>{"input": "'
    assert vocabulary.accepted(grammar, head + '123"}') == (head + '123"}', True)
    assert vocabulary.accepted(grammar, head + "Hello")[0] == head
