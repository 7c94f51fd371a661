"""MCP tools whose calls need approval, and the events of streams with MCP tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from support.mcp_agent import GOOD, OPTIONS, Agent

ASKS: Any = {"type": "mcp", "server_label": "good"}  # as OpenAI's: always
USER: Any = {"role": "user", "content": "Go."}


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """It calls ``add``, then ``fail``, then says that it is done."""
    folder = tmp_path_factory.mktemp("agent")
    calls: Any = [("add", {"a": 2, "b": 3}), ("fail", {})]
    with Agent(folder, calls, store=folder / "store.db") as agent:
        yield agent


@pytest.fixture(scope="module")
def client(agent: Agent) -> Any:
    return agent.client


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


def approval(request: Any, approve: Any = True, **more: Any) -> Any:
    return {
        "type": "mcp_approval_response",
        "approval_request_id": request.id,
        "approve": approve,
        **more,
    }


def sent_back(response: Any) -> list[Any]:
    return [item.model_dump(exclude_none=True) for item in response.output]


def test_a_call_waits_for_approval(client: Any, agent: Agent) -> None:
    """With items that are sent back."""
    first: Any = client.responses.create(**OPTIONS, tools=[ASKS])
    assert kinds(first) == ["mcp_list_tools", "message", "mcp_approval_request"]
    request = first.output[-1]
    assert (request.server_label, request.name, json.loads(request.arguments)) == (
        "good",
        "add",
        {"a": 2, "b": 3},
    )
    inputs = [USER, *sent_back(first), approval(request)]
    second: Any = client.responses.create(**{**OPTIONS, "input": inputs}, tools=[ASKS])
    assert kinds(second) == ["mcp_call", "message", "mcp_approval_request"]
    call = second.output[0]
    assert (call.output, call.approval_request_id, call.status) == ("5", request.id, "completed")
    inputs += [*sent_back(second), approval(second.output[-1], False, reason="too dangerous")]
    third: Any = client.responses.create(**{**OPTIONS, "input": inputs}, tools=[ASKS])
    assert kinds(third) == ["message"] and third.output_text.endswith("DONE.")
    messages = agent.messages_of(inputs)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "tool"]
    assert messages[2]["content"] == "5"
    assert messages[4]["content"] == "The user refused this call: too dangerous"
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] == request.id


def test_approval_of_a_stored_answer(client: Any) -> None:
    options = {**OPTIONS, "store": True}
    first: Any = client.responses.create(**options, tools=[ASKS])
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    options["input"] = [approval(first.output[-1])]
    second: Any = client.responses.create(**options, tools=[ASKS], previous_response_id=first.id)
    assert (kinds(second)[0], second.output[0].output) == ("mcp_call", "5")
    listed = [item.to_dict() for item in client.responses.input_items.list(second.id, order="asc")]
    assert [item["type"] for item in listed] == [
        "message",
        "mcp_list_tools",
        "message",
        "mcp_approval_request",
        "mcp_approval_response",
    ]
    options["input"] = "And now?"  # without an answer to the second request
    third: Any = client.responses.create(**options, tools=[ASKS], previous_response_id=second.id)
    assert "mcp_call" not in kinds(third)
    conversation = client.conversations.create(items=[USER, *sent_back(first), *sent_back(second)])
    items = [
        item.to_dict() for item in client.conversations.items.list(conversation.id, order="asc", limit=100)
    ]
    assert {"mcp_list_tools", "mcp_approval_request", "mcp_call"} <= {item["type"] for item in items}


@pytest.mark.parametrize(
    ("required", "asked"),
    [
        ("always", "add"),
        (None, "add"),
        ("never", None),
        ({"always": {"tool_names": ["fail"]}}, "fail"),
        ({"never": {"tool_names": ["add"]}}, "fail"),
        ({"never": {"read_only": True}}, "fail"),
        ({"always": {"read_only": True}, "never": {"tool_names": ["fail"]}}, "add"),
        ({}, "add"),
    ],
)
def test_what_needs_approval(client: Any, required: Any, asked: str | None) -> None:
    response: Any = client.responses.create(**OPTIONS, tools=[{**ASKS, "require_approval": required}])
    requests = [item.name for item in response.output if item.type == "mcp_approval_request"]
    assert requests == ([] if asked is None else [asked])
    ran = [item.name for item in response.output if item.type == "mcp_call"]
    assert ran == {"add": [], "fail": ["add"], None: ["add", "fail"]}[asked]


def test_wrong_approvals_are_refused(client: Any) -> None:
    first: Any = client.responses.create(**OPTIONS, tools=[ASKS])
    items = sent_back(first)
    for inputs, tools, problem in (
        ([USER, approval(first.output[-1])], [ASKS], "answers no mcp_approval_request"),
        (
            [USER, *items, approval(first.output[-1])],
            [{**ASKS, "allowed_tools": ["fail"]}],
            "asks for the tool",
        ),
        (
            [USER, *items, approval(first.output[-1]), approval(first.output[-1], False)],
            [ASKS],
            "both approved and refused",
        ),
        # Never taken for a refusal, for other arguments, or for nothing.
        ([USER, *items, approval(first.output[-1], approve="true")], [ASKS], "is 'true'; it must be true or"),
        ([USER, *items, approval(first.output[-1], approve=None)], [ASKS], "is null; it must be true or"),
        (
            [USER, {**items[-1], "arguments": {"a": 1}}, approval(first.output[-1])],
            [ASKS],
            "the arguments of .* must be text",
        ),
        ([USER, *items, approval(first.output[-1])], [], "the request does not have in tools"),
    ):
        with pytest.raises(openai.BadRequestError, match=problem):
            client.responses.create(**{**OPTIONS, "input": inputs}, tools=tools)
    # What was run is not run again, and the call is not there twice.
    inputs = [USER, *items, approval(first.output[-1])]
    second: Any = client.responses.create(**{**OPTIONS, "input": inputs}, tools=[ASKS], max_output_tokens=1)
    inputs += sent_back(second)
    third: Any = client.responses.create(**{**OPTIONS, "input": inputs}, tools=[ASKS], max_output_tokens=1)
    assert "mcp_call" in kinds(second) and "mcp_call" not in kinds(third)


@pytest.mark.parametrize(
    "arguments",
    ['{"a": "\\ud800"}', '{"a": NaN}', "[]", '{"a":' * 100_000],
    ids=["half a character", "no number", "no object", "deep"],
)
def test_arguments_that_cannot_be_sent_cost_their_call_only(
    client: Any, arguments: str, agent: Agent
) -> None:
    """The same process of the server answers the next client."""
    started = {path.name for path in agent.folder.glob("started-*")}
    asked = {"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "good", "name": "fail"}
    inputs = [
        USER,
        {**asked, "arguments": arguments},
        {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True},
    ]
    options = {**OPTIONS, "input": inputs, "max_output_tokens": 1}
    response: Any = client.responses.create(**options, tools=[ASKS])
    (call,) = (item.to_dict() for item in response.output if item.type == "mcp_call")
    assert (call["status"], call["error"]["code"]) == ("failed", -32602)
    whole: Any = client.responses.create(**OPTIONS, tools=[GOOD])
    assert [item.output for item in whole.output if item.type == "mcp_call"] == ["5", None]
    assert {path.name for path in agent.folder.glob("started-*")} == started


def test_odd_fields_are_named(client: Any) -> None:
    listed = {"type": "mcp_list_tools", "server_label": ["good"], "tools": []}
    options = {**OPTIONS, "max_output_tokens": 1}
    response: Any = client.responses.create(**{**options, "input": [listed, USER]}, tools=[GOOD])
    assert kinds(response)[0] == "mcp_list_tools"
    with pytest.raises(openai.BadRequestError, match=r"namespace.*name|name must be") as caught:
        client.responses.create(**options, tools=[GOOD, {"type": "namespace", "name": ["good"], "tools": []}])
    assert "unhashable" not in str(caught.value)


def test_a_stream_tells_each_step(client: Any) -> None:
    with client.responses.stream(**OPTIONS, tools=[GOOD]) as stream:
        events: list[Any] = list(stream)
        final = stream.get_final_response()
    whole: Any = client.responses.create(**OPTIONS, tools=[GOOD])
    assert [(item.type, getattr(item, "output", None)) for item in final.output] == [
        (item.type, getattr(item, "output", None)) for item in whole.output
    ]
    Response.model_validate(json.loads(final.model_dump_json()))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    told = [event.type.removeprefix("response.") for event in events]
    once = [kind for i, kind in enumerate(told) if kind != "mcp_call_arguments.delta" or told[i - 1] != kind]
    text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done",
            "content_part.done", "output_item.done"]  # fmt: skip
    once = [kind for i, kind in enumerate(once) if kind != "output_text.delta" or once[i - 1] != kind]
    call = [
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
    ]
    assert once == [
        "created",
        "in_progress",
        "output_item.added",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "output_item.done",
        *text,
        *call,
        "mcp_call.completed",
        "output_item.done",
        *text,
        *call,
        "mcp_call.failed",
        "output_item.done",
        *text,
        "completed",
    ]
    for item, index in ((whole.output[2], 2), (whole.output[4], 4)):
        events_of_item = [event for event in events if getattr(event, "output_index", None) == index]
        deltas = "".join(
            event.delta for event in events_of_item if event.type == "response.mcp_call_arguments.delta"
        )
        assert deltas == item.arguments
        assert events_of_item[-1].item.status == item.status
        assert {getattr(event, "item_id", None) or event.item.id for event in events_of_item} == {
            events_of_item[0].item.id
        }


def test_a_stream_asks_for_approval_and_runs_what_was_approved(client: Any) -> None:
    with client.responses.stream(**OPTIONS, tools=[ASKS]) as stream:
        first: Any = stream.get_final_response()
    assert kinds(first)[-1] == "mcp_approval_request"
    inputs = [USER, *sent_back(first), approval(first.output[-1])]
    with client.responses.stream(**{**OPTIONS, "input": inputs}, tools=[ASKS]) as stream:
        told = [event.type.removeprefix("response.") for event in stream]
    assert told[:8] == [
        "created",
        "in_progress",
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "output_item.done",
    ]


def test_a_stream_of_a_server_that_cannot_be_used(client: Any) -> None:
    tools: Any = [{**GOOD, "server_label": "many"}]
    events: list[Any] = list(client.responses.create(**OPTIONS, tools=tools, stream=True))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.failed",
        "failed",
    ]
    error = events[-1].response.error
    assert error.code == "mcp_list_tools_failed" and "lists over 1024 tools" in error.message


def test_functions_of_the_client_end_the_answer(tmp_path: Path) -> None:
    shell: Any = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}}
    with Agent(tmp_path, [("add", {"a": 1, "b": 1}), ("shell", {})]) as agent:
        first: Any = agent.client.responses.create(**OPTIONS, tools=[shell, GOOD])
        assert kinds(first)[2:] == ["mcp_call", "message", "function_call"]
        inputs = [USER, *sent_back(first)]
        inputs.append({"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "ok"})
        second: Any = agent.client.responses.create(**{**OPTIONS, "input": inputs}, tools=[shell, GOOD])
        assert kinds(second) == ["message"] and second.output_text.endswith("DONE.")
