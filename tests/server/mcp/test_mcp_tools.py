"""MCP tools of ``/v1/responses`` through OpenAI's own client: lists, calls, results, choices, limits."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from agents.clients import TEMPLATE
from openai.types.responses import Response
from support.control import PATIENCE_S, wait_until
from support.mcp_agent import GOOD, OPTIONS, Agent
from support.mcp_servers import entry, write_file
from support.media_models import idefics3_projector, model_with_tile_tokens

import llamapipe as lp
from llamapipe.server import ServerSettings, serve

SHELL: Any = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """It calls ``add``, then ``fail``, then says that it is done."""
    with Agent(tmp_path_factory.mktemp("agent"), [("add", {"a": 2, "b": 3}), ("fail", {})]) as agent:
        yield agent


@pytest.fixture(scope="module")
def client(agent: Agent) -> Any:
    return agent.client


def checked(response: Any) -> Response:
    """The response, of which every field has the type that the client's library says."""
    return Response.model_validate(json.loads(response.model_dump_json()), strict=False)


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


def test_the_model_calls_tools_until_it_has_an_answer(client: Any) -> None:
    response: Any = checked(client.responses.create(**OPTIONS, tools=[GOOD]))
    assert kinds(response) == ["mcp_list_tools", "message", "mcp_call", "message", "mcp_call", "message"]
    tools, _, added, _, failed, _ = response.output
    assert tools.server_label == "good" and tools.tools[0].name == "add"
    assert tools.tools[0].annotations["readOnlyHint"] is True
    assert (added.name, added.server_label, added.output, added.error) == ("add", "good", "5", None)
    assert json.loads(added.arguments) == {"a": 2, "b": 3}
    assert (added.status, failed.status, failed.output) == ("completed", "failed", None)
    assert failed.error.type == "mcp_tool_execution_error"
    assert response.output_text.endswith("DONE.")
    assert (response.status, response.usage.output_tokens > 20) == ("completed", True)
    assert len({item.id for item in response.output}) == 6


def test_the_next_request_has_the_same_conversation(client: Any, agent: Agent) -> None:
    """What a client sends back is what the model has read and written: all of it is cached."""
    first: Any = client.responses.create(**OPTIONS, tools=[GOOD])
    inputs: Any = [
        {"role": "user", "content": "Go."},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"role": "user", "content": "Again."},
    ]
    again: Any = client.responses.create(**{**OPTIONS, "input": inputs}, tools=[GOOD])
    assert kinds(again) == ["message"]  # the list of tools is there already
    assert again.usage.input_tokens_details.cached_tokens > again.usage.input_tokens - 120
    shown = httpx.get(f"{agent.server.url}/requests", timeout=PATIENCE_S).json()["data"][1]
    usage = first.usage
    assert (shown["n_prompt_tokens"], shown["n_cached_tokens"]) == (
        usage.input_tokens,
        usage.input_tokens_details.cached_tokens,
    )
    counted = client.responses.input_tokens.count(model="turns", input=inputs, tools=[GOOD])
    assert counted.input_tokens == again.usage.input_tokens


def test_only_some_tools(client: Any) -> None:
    for allowed in (["add"], {"tool_names": ["add"]}, {"read_only": True}):
        response: Any = client.responses.create(
            **OPTIONS, tools=[{**GOOD, "allowed_tools": allowed}], max_output_tokens=1
        )
        assert [tool.name for tool in response.output[0].tools] == ["add"]


def test_beside_functions_of_the_client(client: Any) -> None:
    """With another tool of this name, the model knows it by its label, too."""
    add: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
    response: Any = client.responses.create(**OPTIONS, tools=[add, GOOD])
    call = response.output[-1]
    assert (kinds(response)[-1], call.name) == ("function_call", "add")
    forced: Any = client.responses.create(
        **OPTIONS,
        tools=[add, GOOD],
        tool_choice={"type": "mcp", "server_label": "good", "name": "add"},
        max_tool_calls=1,
    )
    call = next(item for item in forced.output if item.type == "mcp_call")
    assert (call.server_label, call.name) == ("good", "add")


def test_a_choice_holds_for_the_first_call_only(client: Any) -> None:
    for choice in ("required", {"type": "mcp", "server_label": "good"}):
        response: Any = client.responses.create(**OPTIONS, tools=[GOOD], tool_choice=choice)
        assert kinds(response)[-1] == "message"
        assert "mcp_call" in kinds(response)
    response = client.responses.create(**OPTIONS, tools=[GOOD], tool_choice="none")
    assert kinds(response) == ["mcp_list_tools", "message"]


@pytest.mark.parametrize("wrong", [{"server_label": "other"}, {"server_label": 5}, {}])
def test_a_choice_of_another_server(client: Any, wrong: dict[str, Any]) -> None:
    of_many = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", **wrong}]}
    for choice, field in (({"type": "mcp", **wrong}, "tool_choice"), (of_many, "tool_choice.tools.0")):
        with pytest.raises(openai.BadRequestError, match="the request has the servers 'good'") as caught:
            client.responses.create(**OPTIONS, tools=[GOOD], tool_choice=choice)
        assert caught.value.param == f"{field}.server_label"


def test_a_limit_of_calls(client: Any, agent: Agent) -> None:
    response: Any = client.responses.create(**OPTIONS, tools=[GOOD], max_tool_calls=1)
    assert kinds(response).count("mcp_call") == 1
    assert (response.status, response.output_text.endswith("A short title")) == ("completed", True)
    with pytest.raises(openai.BadRequestError, match="max_tool_calls is -1; it must be 0 or more"):
        client.responses.create(**OPTIONS, tools=[GOOD], max_tool_calls=-1)


def test_what_has_no_effect_is_named(client: Any) -> None:
    tool = {**GOOD, "defer_loading": True, "allowed_callers": ["direct"]}
    answer = client.responses.with_raw_response.create(**OPTIONS, tools=[tool], max_output_tokens=1)
    assert answer.headers["x-llamapipe-unused"] == "tools.allowed_callers, tools.defer_loading"


def test_tokens_are_counted_over_all_rounds(client: Any) -> None:
    whole: Any = client.responses.create(**OPTIONS, tools=[GOOD])
    n = whole.usage.output_tokens - 1
    cut: Any = client.responses.create(**OPTIONS, tools=[GOOD], max_output_tokens=n)
    assert (cut.status, cut.usage.output_tokens) == ("incomplete", n)
    assert cut.incomplete_details.reason == "max_output_tokens"
    inside: Any = client.responses.create(**OPTIONS, tools=[GOOD], max_output_tokens=8)
    assert inside.status == "incomplete"
    assert all(item.output is None for item in inside.output if item.type == "mcp_call")


@pytest.mark.parametrize(
    ("tool", "field", "problem"),
    [
        ({"server_label": "bad"}, "tools.0.server_label", "there is no MCP server 'bad'; the servers are"),
        ({"server_label": 1}, "tools.0.server_label", "must be text"),
        ({"server_label": "other", "server_url": "http://x/mcp"}, "tools.0.server_url", "no address"),
        ({"server_url": "http://x/mcp"}, "tools.0.server_url", "leave server_url out"),
        ({"headers": {"a": "b"}}, "tools.0.headers", "file"),
        ({"authorization": "secret"}, "tools.0.authorization", "file"),
        ({"connector_id": "connector_gmail"}, "tools.0.connector_id", "OpenAI's service"),
        ({"allowed_tools": "add"}, "tools.0.allowed_tools", "list of names"),
        ({"allowed_tools": {"tool_names": "add"}}, "tools.0.allowed_tools", "list of texts"),
        ({"allowed_tools": {"names": ["add"]}}, "tools.0.allowed_tools", "unknown key 'names'"),
        ({"allowed_tools": ["add", "ad"]}, "tools.0.allowed_tools", "has no tool 'ad'; did you mean add"),
        ({"allowed_tools": {"tool_names": ["zzz"]}}, "tools.0.allowed_tools", "no tool 'zzz'; it has 'add'"),
        ({"require_approval": {"always": ["zzz"]}}, "tools.0.require_approval.always", "no tool 'zzz'"),
        ({"require_approval": {"never": ["zzz"]}}, "tools.0.require_approval.never", "no tool 'zzz'"),
        ({"require_approval": "sometimes"}, "tools.0.require_approval", "'always', 'never' or an object"),
        ({"require_approval": {"ever": {}}}, "tools.0.require_approval", "unknown key 'ever'"),
        ({"server_description": 1}, "tools.0.server_description", "must be text"),
        ({"server_labl": "x"}, "tools", "did you mean server_label"),
    ],
)
def test_a_wrong_tool(client: Any, tool: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(openai.BadRequestError, match=problem) as caught:
        client.responses.create(**OPTIONS, tools=[{**GOOD, **tool}])
    assert caught.value.param == field


def test_names_that_mean_two_things(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="two MCP servers called 'good'"):
        client.responses.create(**OPTIONS, tools=[GOOD, GOOD])
    space: Any = {"type": "namespace", "name": "good", "tools": [SHELL]}
    with pytest.raises(openai.BadRequestError, match="an MCP server has the name 'good', too"):
        client.responses.create(**OPTIONS, tools=[GOOD, space])


def test_a_server_that_cannot_be_used(client: Any, agent: Agent) -> None:
    for label, problem in (("garbage", "not MCP messages"), ("many", "lists over 1024 tools")):
        with pytest.raises(openai.APIStatusError, match=problem) as caught:
            client.responses.create(**OPTIONS, tools=[{**GOOD, "server_label": label}])
        assert (caught.value.status_code, caught.value.code) == (424, "mcp_list_tools_failed")
    assert client.responses.create(**OPTIONS, tools=[GOOD]).status == "completed"


def test_while_a_tool_runs_the_conversation_stays_cached(tmp_path: Path) -> None:
    """Others need the slot meanwhile. Only what came after the call is computed."""
    os.mkfifo(tmp_path / "gate")
    with (
        Agent(tmp_path, [("gate", {})], cache_bytes=0) as agent,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(lambda: agent.client.responses.create(**OPTIONS, tools=[GOOD]))
        with (tmp_path / "gate").open("w") as gate:  # opens when the tool reads
            for i in range(3):
                agent.client.responses.create(**{**OPTIONS, "input": f"{i} is another one."})
            gate.write("open")
        used = answer.result().usage
    assert used.input_tokens_details.cached_tokens > 0.9 * used.input_tokens / 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_ends_waits_for_no_tool(stream: bool, tmp_path: Path) -> None:
    with (
        Agent(tmp_path, [("add", {"a": 2, "b": 3}), ("wait", {})]) as agent,
        ThreadPoolExecutor(1) as pool,
    ):
        asked: Any = {**OPTIONS, "tools": [GOOD], "stream": stream}
        answer = pool.submit(httpx.post, f"{agent.server.url}/v1/responses", json=asked, timeout=PATIENCE_S)
        wait_until((tmp_path / "waiting").exists)
        agent.server.close()
        text = answer.result().text
    assert (tmp_path / "cancelled").exists()
    last = text.strip().rpartition("data: ")[2]
    response = json.loads(last)["response"] if stream else json.loads(last)
    assert (response["status"], response["error"]["code"]) == ("failed", "shutting_down")
    calls = [item for item in response["output"] if item["type"] == "mcp_call"]
    assert [(call["output"], call["status"]) for call in calls] == [("5", "completed"), (None, "incomplete")]


def test_a_client_that_hangs_up_cancels_the_call(tmp_path: Path) -> None:
    with Agent(tmp_path, [("wait", {})]) as agent:
        body = {**OPTIONS, "tools": [GOOD]}
        with (
            httpx.Client(base_url=agent.server.url, timeout=httpx.Timeout(PATIENCE_S)) as client,
            client.stream("POST", "/v1/responses", json={**body, "stream": True}) as answer,
        ):
            assert answer.status_code == 200
            wait_until((tmp_path / "waiting").exists)
        wait_until((tmp_path / "cancelled").exists)


def test_what_has_been_done_is_told_when_the_answer_fails(tmp_path: Path) -> None:
    """The second result does not fit the context."""
    with Agent(tmp_path, [("add", {"a": 2, "b": 3}), ("large", {"n": 60_000})]) as agent:
        response = agent.client.responses.create(**OPTIONS, tools=[GOOD])
        assert (response.status, response.error.code) == ("failed", "context_length_exceeded")
        assert [item.output[:5] for item in response.output if item.type == "mcp_call"] == ["5", "xxxxx"]


def test_a_large_result_is_cut(tmp_path: Path) -> None:
    with Agent(tmp_path, [("large", {"n": 1000}), ("picture", {})], max_mcp_characters=100) as agent:
        response: Any = agent.client.responses.create(**OPTIONS, tools=[GOOD])
        cut, picture = (item for item in response.output if item.type == "mcp_call")
        assert cut.output == "x" * 100 + "\n[cut: the result has 1000 characters]"
        assert picture.output == "A dot:\n[image: image/png]"


def test_the_time_of_a_request_is_that_of_its_tools_too(tmp_path: Path) -> None:
    with Agent(tmp_path, [("wait", {})], timeout_s=3.0) as agent:
        body = {**OPTIONS, "tools": [GOOD]}
        answer = httpx.post(f"{agent.server.url}/v1/responses", json=body, timeout=PATIENCE_S)
        error = answer.json()["error"]  # of an answer if the call had begun by then
        assert (answer.status_code, error["code"]) in ((200, "timeout"), (504, "timeout"))


def test_images_of_a_result(tmp_path: Path) -> None:
    """A model that takes images sees them; to others they are named."""
    choice = {"type": "mcp", "server_label": "seeing", "name": "act"}
    file = write_file(tmp_path / "mcp.json", {"seeing": entry("seeing")})
    projector = idefics3_projector(tmp_path / "mmproj.gguf")
    path = model_with_tile_tokens(tmp_path / "text.gguf")
    n_input = []
    for mmproj in (None, projector):
        with (
            lp.Model(path, mmproj=mmproj, chat_template=TEMPLATE.read_text()) as model,
            lp.Engine(model, n_ctx=1024, n_seq_max=2) as engine,
            serve(engine, settings=ServerSettings(mcp=file, mcp_timeout_s=PATIENCE_S)) as server,
        ):
            body = {"input": "Look.", "temperature": 0, "tools": [{**GOOD, "server_label": "seeing"}],
                    "tool_choice": choice, "max_tool_calls": 1, "max_output_tokens": 200}  # fmt: skip
            answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=PATIENCE_S).json()
            (call,) = (item for item in answer["output"] if item["type"] == "mcp_call")
            assert call["output"] == "fine\n[image: image/png]", answer["output"]
            n_input.append(answer["usage"]["input_tokens"])
            engine.check_integrity()
    assert n_input[1] > n_input[0] + 16


def test_the_conversation_stays_in_the_cache_while_a_tool_runs(tmp_path: Path) -> None:
    """Others use all slots meanwhile: its cells wait in host memory."""
    os.mkfifo(tmp_path / "gate")
    with Agent(tmp_path, [("gate", {})]) as agent:
        responses: list[Any] = []

        def ask() -> None:
            responses.append(agent.client.responses.create(**OPTIONS, tools=[GOOD]))

        thread = threading.Thread(target=ask)
        thread.start()
        with (tmp_path / "gate").open("w") as gate:  # opens when the tool waits for it
            for i in range(6):
                others: Any = {**OPTIONS, "input": f"{i} other conversations.", "max_output_tokens": 4}
                agent.client.responses.create(**others)
            gate.write("open")
        thread.join()
        (response,) = responses
        call = next(item for item in response.output if item.type == "mcp_call")
        assert call.output == "open"
        usage = response.usage
        n_second = usage.input_tokens - usage.input_tokens_details.cached_tokens
        first: Any = agent.client.responses.input_tokens.count(model="turns", input="Go.", tools=[GOOD])
        assert n_second - first.input_tokens < 160, usage  # what the result and the call's end add


def test_servers_end_with_the_server(tmp_path: Path) -> None:
    with Agent(tmp_path, []) as agent:
        agent.client.responses.create(**OPTIONS, tools=[GOOD])
        (started,) = tmp_path.glob("started-*")
        pid = int(started.name.removeprefix("started-"))
    assert not Path(f"/proc/{pid}").exists()


def test_without_servers_such_tools_are_named(demo: lp.Model) -> None:
    with lp.Engine(demo, n_ctx=512) as engine:
        for strict in (False, True):
            with serve(engine, settings=ServerSettings(strict=strict)) as server:
                answer = httpx.post(
                    f"{server.url}/v1/responses",
                    json={"input": "Hello", "tools": [GOOD], "max_output_tokens": 1, "max_tool_calls": 3},
                )
                assert answer.status_code == (400 if strict else 200), answer.text
                if not strict:
                    assert answer.headers["x-llamapipe-unused"] == "max_tool_calls, tools.mcp"


def test_a_wrong_file_is_told_at_the_start(tmp_path: Path, demo: lp.Model) -> None:
    file = write_file(tmp_path / "mcp.json", {"a": {}})
    with lp.Engine(demo, n_ctx=512) as engine, pytest.raises(ValueError, match=r"mcp: .*'a': command must"):
        serve(engine, settings=ServerSettings(mcp=file, store=tmp_path / "store.db"))
