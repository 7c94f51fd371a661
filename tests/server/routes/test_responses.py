"""``/v1/responses`` through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from support.chat_families import FAMILIES, FULL, WEATHER
from support.chat_templates import template
from support.scripted_model import scripted_model
from support.served import openai_client

import llamapipe as lp

HELLO = [{"role": "user", "content": "Hello"}]
TOOL: Any = {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": WEATHER}
OPTIONS: Any = {"model": "demo", "input": "Hello", "max_output_tokens": 40, "temperature": 0}


@pytest.fixture(scope="module")
def engine(demo: lp.Model) -> Iterator[lp.Engine]:
    with lp.Engine(demo, n_ctx=512, n_seq_max=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: lp.Engine) -> Iterator[openai.OpenAI]:
    with openai_client(engine) as client:
        yield client


def checked(response: Any) -> Response:
    """The response, of which every field has the type that the client's library says."""
    return Response.model_validate(json.loads(response.model_dump_json()), strict=False)


def test_an_answer_is_the_engines(client: openai.OpenAI, engine: lp.Engine) -> None:
    response = checked(client.responses.create(**OPTIONS, instructions="Be brief."))
    conversation = [{"role": "system", "content": "Be brief."}, *HELLO]
    expected = engine.chat(conversation, lp.SamplingParams(temperature=0, max_tokens=40))
    assert response.output_text == expected.content
    status = {"stop": "completed", "length": "incomplete"}[expected.finish_reason]
    assert (response.status, response.output[0].type, response.usage is not None) == (status, "message", True)
    assert response.usage is not None
    assert response.usage.input_tokens == expected.n_prompt_tokens
    assert response.usage.output_tokens == expected.n_completion_tokens


def test_a_stream_gives_the_same_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(**OPTIONS)
    with client.responses.stream(**OPTIONS) as stream:
        events: list[Any] = list(stream)
        final = checked(stream.get_final_response())
    assert final.output_text == whole.output_text
    assert final.output[0].id == events[2].item.id and events[2].item.id.startswith("msg_")
    assert final.usage is not None and whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == f"response.{whole.status}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text


def test_too_few_tokens_leave_it_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(**{**OPTIONS, "max_output_tokens": 2})
    assert (response.status, response.output[0].status) == ("incomplete", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_a_schema_holds(client: openai.OpenAI) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    text: Any = {"format": {"type": "json_schema", "name": "numbers", "schema": schema}}
    assert json.loads(client.responses.create(**OPTIONS, text=text).output_text)["n"] in (1, 2)


def test_log_probabilities_come_if_they_are_included(client: openai.OpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    response: Any = client.responses.create(**OPTIONS, include=include, top_logprobs=2)
    entries = response.output[0].content[0].logprobs
    assert len(entries) >= response.usage.output_tokens - 1
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_an_input_is_a_conversation(client: openai.OpenAI, engine: lp.Engine) -> None:
    """Items of all kinds, as a client sends them back."""
    first = client.responses.create(**OPTIONS)
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"type": "message", "role": "user", "content": "And now?"},
    ]
    response = client.responses.create(**{**OPTIONS, "input": items})
    conversation = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And now?"},
    ]
    expected = engine.chat(conversation, lp.SamplingParams(temperature=0, max_tokens=40))
    assert response.output_text == expected.content


def test_tools_are_called_and_their_results_read(tmp_path: Path) -> None:
    family = FAMILIES["Hermes"]
    said = "<think>\nA tool.\n</think>\n\n" + family.full
    source = template(family.template).text
    with (
        lp.Model(scripted_model(tmp_path / "said.gguf", said, (), source)) as model,
        lp.Engine(model, n_ctx=4096) as engine,
        openai_client(engine) as client,
    ):
        options: Any = {**OPTIONS, "model": "said", "max_output_tokens": 400, "tools": [TOOL]}
        choices: list[Any] = ["auto", "required", {"type": "function", "name": "get_weather"}]
        for choice in choices:
            whole = client.responses.create(**options, tool_choice=choice)
            with client.responses.stream(**options, tool_choice=choice) as stream:
                streamed = stream.get_final_response()
            response: Any
            for response in (whole, streamed):
                reasoning, call = response.output
                assert reasoning.type == "reasoning" and reasoning.content[0].text.strip() == "A tool."
                assert call.type == "function_call" and call.name == "get_weather"
                assert (reasoning.id[:3], call.id[:3]) == ("rs_", "fc_")
                assert json.loads(call.arguments) == FULL
                assert response.status == "completed"
                assert (
                    0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
                )
        output = {"type": "function_call_output", "call_id": whole.output[1].call_id, "output": "sunny"}
        items = [item.model_dump(exclude_none=True) for item in whole.output]
        follow: Any = [*HELLO, *items, output]
        after = client.responses.create(**{**options, "input": follow})
        assert after.usage is not None and whole.usage is not None
        assert after.usage.input_tokens > whole.usage.input_tokens + 30


@pytest.mark.parametrize(
    "change",
    [
        {"input": []},
        {"input": 3},
        {"input": [{"role": "robot", "content": "a"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]},
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"background": True},
        {"truncation": "always"},
        {"include": ["file_search_call.result"]},
        {"tools": [{"type": "web_serch"}]},
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        {"tools": [{"type": "namespace", "name": "n"}]},
        {"tools": [TOOL, TOOL]},
        {"tools": [{**TOOL, "nmae": "a"}]},
        {"tool_choice": {"type": "web_search"}, "tools": [TOOL, {"type": "web_search"}]},
        {
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "x"}],
            }
        },
        {"tool_choice": "required"},
        {"tool_choice": {"type": "mcp"}, "tools": [TOOL]},
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        {"max_output_tokens": 0},
        {"top_logprobs": 3},
        {"temperature": -1},
        {"unknown": 1},
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused(client: openai.OpenAI, change: dict[str, Any]) -> None:
    answer = httpx.post(f"{client.base_url}responses", json={**OPTIONS, **change})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert next(iter(change)) in f"{error['param']} {error['message']}"


def test_options_without_effect_are_named(client: openai.OpenAI) -> None:
    answer = httpx.post(
        f"{client.base_url}responses", json={**OPTIONS, "store": True, "metadata": {"a": "b"}}
    )
    assert answer.headers["x-llamapipe-unused"] == "metadata, store"
    assert (answer.json()["store"], answer.json()["metadata"]) == (False, {"a": "b"})
