"""Tool calls in streams, read with the clients of the three APIs: fragments join to the answer that is not streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from support.chat_families import FAMILIES, FULL, WEATHER
from support.chat_templates import template
from support.scripted_model import scripted_model

import llamapipe as lp
from llamapipe.server import serve

HELLO: Any = [{"role": "user", "content": "Hello"}]
NAMES = ["Hermes", "Llama", "Mistral args", "Qwen3-Coder"]
ARGS = {"chat_template_kwargs": {"enable_thinking": False}}
FUNCTION: Any = {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}


@contextmanager
def server_of(path: Path, name: str, said: str | None = None) -> Iterator[str]:
    """The URL of a server whose model says a call."""
    family = FAMILIES[name]
    chat_template = template(family.template)
    prompt = chat_template.render(HELLO, template_args={"enable_thinking": False})
    text = family.full if said is None else said
    if family.think and prompt.endswith(family.think[0]):
        text = f"Hm. {family.think[1]}{text}"
    model = scripted_model(path / "said.gguf", text, family.specials, chat_template.text)
    with lp.Engine(model, n_ctx=4096, n_seq_max=2) as engine, serve(engine) as server:
        yield server.url


@pytest.fixture(params=NAMES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with server_of(tmp_path, request.param) as url:
        yield url


def complete(text: str) -> bool:
    try:
        return bool(json.loads(text) == FULL)
    except ValueError:
        return False


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_chat_completions_stream_a_call(url: str, choice: Any) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        options: Any = {"model": "said", "messages": HELLO, "temperature": 0, "tool_choice": choice}
        options |= {"tools": [{"type": "function", "function": FUNCTION}], "extra_body": ARGS}

        def answers(n: int) -> tuple[Any, list[Any], str]:
            whole = client.chat.completions.create(**options, max_tokens=n)
            reason = ""
            parts: list[Any] = []
            for chunk in client.chat.completions.create(**options, max_tokens=n, stream=True):
                parts += chunk.choices[0].delta.tool_calls or []
                reason = chunk.choices[0].finish_reason or reason
            return whole, parts, reason

        done, parts, reason = answers(400)
        whole, n_tokens = done.choices[0], done.usage.completion_tokens
        (call,) = whole.message.tool_calls
        assert whole.finish_reason == reason == "tool_calls"
        assert json.loads(call.function.arguments) == FULL
        assert len(parts) > 3 and [part.index for part in parts] == [0] * len(parts)
        assert [part.function.name for part in parts if part.function.name] == ["get_weather"]
        assert "".join(part.function.arguments for part in parts) == call.function.arguments
        seen = 0
        for n in range(n_tokens - 2, 4, -6):
            done, parts, reason = answers(n)
            cut = done.choices[0]
            text = "".join(part.function.arguments for part in parts)
            assert cut.finish_reason == reason == "length"
            assert [call.function.arguments for call in cut.message.tool_calls or []] == (
                [text] if parts else []
            )
            assert call.function.arguments.startswith(text)
            seen += 0 < len(text) < len(call.function.arguments)
        assert seen > 0


def test_responses_stream_a_call(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        options: Any = {"model": "said", "input": HELLO, "temperature": 0}
        options |= {"tools": [{"type": "function", **FUNCTION}], "extra_body": ARGS}

        def answers(n: int) -> tuple[Any, Any, list[str]]:
            whole = client.responses.create(**options, max_output_tokens=n)
            events: list[Any] = list(client.responses.create(**options, max_output_tokens=n, stream=True))
            parts = [
                event.delta for event in events if event.type == "response.function_call_arguments.delta"
            ]
            return whole, events[-1].response, parts

        whole, streamed, parts = answers(400)
        (call,) = (item for item in whole.output if item.type == "function_call")
        assert whole.status == streamed.status == call.status == "completed"
        assert json.loads(call.arguments) == FULL and len(parts) > 2 and "".join(parts) == call.arguments
        n_tokens, seen = whole.usage.output_tokens, 0
        for n in range(n_tokens - 2, 4, -6):
            cut, streamed, parts = answers(n)
            assert cut.status == streamed.status == "incomplete"
            for response in (cut, streamed):
                for item in response.output:
                    if item.type == "function_call":
                        assert (item.status, item.arguments) == ("incomplete", "".join(parts))
                        seen += not complete(item.arguments)
        assert seen > 0


def test_messages_stream_a_call(url: str) -> None:
    tool = {"name": "get_weather", "description": "The weather.", "input_schema": WEATHER}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        options: Any = {"model": "said", "messages": HELLO, "tools": [tool]}
        options |= {"extra_body": {"temperature": 0, **ARGS}}

        def answers(n: int) -> tuple[Any, Any, list[str]]:
            whole = client.messages.create(**options, max_tokens=n)
            with client.messages.stream(**options, max_tokens=n) as stream:
                parts = [event.partial_json for event in stream if event.type == "input_json"]
                return whole, stream.get_final_message(), parts

        whole, streamed, parts = answers(400)
        for message in (whole, streamed):
            (call,) = (block for block in message.content if block.type == "tool_use")
            assert (call.name, call.input, message.stop_reason) == ("get_weather", FULL, "tool_use")
        assert len(parts) > 2 and json.loads("".join(parts)) == FULL
        n_tokens, seen = whole.usage.output_tokens, 0
        for n in range(n_tokens - 2, 4, -6):
            cut, streamed, parts = answers(n)
            assert cut.stop_reason == streamed.stop_reason == "max_tokens"
            inputs = [block.input for block in cut.content if block.type == "tool_use"]
            assert len(inputs) == sum(block.type == "tool_use" for block in streamed.content)
            for arguments in inputs:
                assert arguments.items() <= FULL.items()
                seen += arguments != FULL
        assert seen > 0


def test_plain_json_is_one_part(tmp_path: Path) -> None:
    said = f'```json\n{{"name": "get_weather", "arguments": {json.dumps(FULL)}}}\n```'
    with (
        server_of(tmp_path, "Hermes", said) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        options: Any = {"model": "said", "messages": HELLO, "temperature": 0, "extra_body": ARGS}
        options |= {"tools": [{"type": "function", "function": FUNCTION}]}
        whole = client.chat.completions.create(**options).choices[0]
        chunks = list(client.chat.completions.create(**options, stream=True))
        parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
        assert whole.message.content is None and not any(chunk.choices[0].delta.content for chunk in chunks)
        assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "tool_calls"
        (call,) = whole.message.tool_calls
        assert [part.function.arguments for part in parts] == [call.function.arguments]
        assert json.loads(call.function.arguments) == FULL
