"""An agent's session of four turns with three tool calls, streamed, through each API, by its own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from agents.clients import TEMPLATE, said
from support.scripted_model import turns_model

import llamapipe as lp
from llamapipe.server import ServerSettings, serve

pytestmark = pytest.mark.clients
COMMANDS = ["echo one", "echo two", "echo three"]
SHELL = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "The command."},
        "timeout": {"type": "number"},
    },
    "required": ["command"],
    "additionalProperties": False,
}
TASK: Any = {"role": "user", "content": "Run three commands."}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    texts = said([("shell", {"command": command}) for command in COMMANDS])
    path = turns_model(tmp_path_factory.mktemp("models") / "turns.gguf", texts, TEMPLATE.read_text())
    with (
        lp.Engine(path, n_ctx=8192, n_seq_max=2) as engine,
        serve(engine, settings=ServerSettings(model_names=("turns",))) as server,
    ):
        yield server.url
        engine.check_integrity()


def test_a_session_by_chat_completions(url: str) -> None:
    messages: list[Any] = [TASK]
    tools: list[Any] = [{"type": "function", "function": {"name": "shell", "parameters": SHELL}}]
    ran = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for _ in range(4):
            with client.chat.completions.stream(
                model="turns", messages=messages, tools=tools, stream_options={"include_usage": True}
            ) as stream:
                answer = stream.get_final_completion()
            assert answer.usage is not None and answer.usage.completion_tokens > 0
            message = answer.choices[0].message
            messages.append(message.to_dict())
            for call in message.tool_calls or ():
                ran.append(json.loads(call.function.arguments)["command"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
    assert ran == COMMANDS
    assert answer.choices[0].finish_reason == "stop"
    assert message.content is not None and message.content.endswith("DONE.")


def test_a_session_by_responses(url: str) -> None:
    items: list[Any] = [TASK]
    tools: list[Any] = [{"type": "function", "name": "shell", "parameters": SHELL, "strict": False}]
    ran = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for _ in range(4):
            with client.responses.stream(model="turns", input=items, tools=tools, store=False) as stream:
                answer = stream.get_final_response()
            for item in answer.output:
                items.append(item.to_dict())
                if item.type == "function_call":
                    ran.append(json.loads(item.arguments)["command"])
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": "done"})
    assert ran == COMMANDS
    assert answer.output_text.endswith("DONE.")


def test_a_session_by_messages(url: str) -> None:
    messages: list[Any] = [TASK]
    tools: list[Any] = [{"name": "shell", "input_schema": SHELL}]
    ran = []
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        for _ in range(4):
            with client.messages.stream(
                model="turns", max_tokens=200, messages=messages, tools=tools
            ) as stream:
                answer = stream.get_final_message()
            messages.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
            results = []
            for block in answer.content:
                if block.type == "tool_use":
                    ran.append(block.input["command"])
                    results.append({"type": "tool_result", "tool_use_id": block.id, "content": "done"})
            messages.append({"role": "user", "content": results})
    assert ran == COMMANDS
    assert answer.stop_reason == "end_turn"
    assert answer.content[-1].type == "text" and answer.content[-1].text.endswith("DONE.")


def test_a_side_question_without_tools(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="turns", messages=[TASK])
    assert answer.choices[0].message.content == "A short title"
