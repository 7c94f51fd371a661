"""What client programs send, in our words: each request that a client's program made is answered, not refused.

The programs themselves run in ``nox -s agents``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.chat_templates import template
from support.scripted_model import scripted_model
from support.served import http_client

import llamapipe as lp
from llamapipe.server import ServerSettings, serve

UNUSED = "x-llamapipe-unused"
HELLO = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 4, "temperature": 0}
TEXT: dict[str, Any] = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
SHELL: dict[str, Any] = {
    "type": "object",
    "properties": {"cmd": {"type": "string"}},
    "required": ["cmd"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(demo: lp.Model) -> Iterator[lp.Engine]:
    with lp.Engine(demo, n_ctx=512, n_seq_max=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: lp.Engine) -> Iterator[httpx.Client]:
    with http_client(engine, model_names=("demo",)) as client:
        yield client


@pytest.fixture(scope="module")
def strict(engine: lp.Engine) -> Iterator[httpx.Client]:
    with http_client(engine, model_names=("demo",), strict=True) as client:
        yield client


@contextmanager
def saying(folder: Path, text: str, **settings: Any) -> Iterator[httpx.Client]:
    """A client of a server whose model knows tools and says ``text``."""
    source = template("Qwen-Qwen3-0.6B").text
    with (
        lp.Model(scripted_model(folder / "said.gguf", text, (), source)) as model,
        lp.Engine(model, n_ctx=8192) as engine,
        http_client(engine, model_names=("demo",), **settings) as client,
    ):
        yield client


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, without the last line of a chat's."""
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def ids(received: list[dict[str, Any]]) -> list[int]:
    """The token ids of a stream's events."""
    return [token for event in received for token in event["choices"][0]["token_ids"]]


def call(name: str, arguments: dict[str, Any]) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


# ---- Open WebUI: the titles, tags and next questions of a chat
@pytest.mark.parametrize(
    "more", [{}, {"max_completion_tokens": 1000}, {"max_tokens": 1000}, {"metadata": {"chat_id": "one"}}]
)
def test_open_webuis_tasks(client: httpx.Client, more: dict[str, Any]) -> None:
    text = '### Task:\nGenerate a concise title.\n### Output:\nJSON format: { "title": "a title" }'
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "stream": False, **more}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get(UNUSED) == ("metadata" if "metadata" in more else None)
    assert isinstance(answer.json()["choices"][0]["message"]["content"], str)


# What the settings of a chat become in its Ollama mode, each of them set.
WEBUI_OPTIONS: dict[str, Any] = {
    "temperature": 0.0, "top_k": 40, "top_p": 0.9, "min_p": 0.0, "seed": 7, "stop": ["###"], "num_predict": 4,
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "repeat_penalty": 1.1, "repeat_last_n": 64,
    "mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5.0, "tfs_z": 1, "num_ctx": 2048, "num_batch": 512,
    "num_keep": 24, "num_gpu": 1, "num_thread": 2, "use_mmap": True, "use_mlock": False, "reasoning_effort": "medium",
}  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {"stream": True},
        {"stream": False, "keep_alive": "5m", "options": WEBUI_OPTIONS},
        {"stream": False, "format": {"type": "object", "properties": {"title": {"type": "string"}}}},
        {"messages": [*HELLO, {"role": "assistant", "thinking": "Hm."}, *HELLO]},
    ],
)
def test_open_webuis_ollama_mode(engine: lp.Engine, more: dict[str, Any]) -> None:
    settings = ServerSettings(model_names=("demo",), ollama=True)
    body = {"model": "demo:latest", "messages": HELLO, "options": {"num_predict": 4}, **more}
    with serve(engine, settings=settings) as server:
        version = httpx.get(f"{server.url}/api/version").json()["version"]
        answer = httpx.post(f"{server.url}/api/chat", content=json.dumps(body).encode(), timeout=60)
        ended = httpx.post(
            f"{server.url}/api/generate", json={"model": "demo", "keep_alive": 0, "prompt": ""}
        )
    assert all(part.isdecimal() for part in version.split("."))  # it compares them as numbers
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert all(line["message"]["role"] == "assistant" for line in lines)
    assert {"total_duration", "load_duration", "prompt_eval_count", "eval_count"} <= lines[-1].keys()
    assert (len(lines) > 1) == more.get("stream", True)
    unused = answer.headers.get(UNUSED, "")
    assert ("options.reasoning_effort" in unused) == ("reasoning_effort" in more.get("options", {}))
    assert ended.json()["done_reason"] == "unload"


def test_open_webuis_tools_in_ollama_mode(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]  # fmt: skip
    called = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
    ]
    with saying(tmp_path, call("weather", {"city": "Rome"}), ollama=True) as client:
        for turns in (HELLO, messages):
            body = {"model": "demo", "messages": turns, "stream": False, "tools": tools}
            answer = client.post("/api/chat", json=body)
            assert answer.status_code == 200, answer.text
            calls = answer.json()["message"]["tool_calls"]
            assert [item["function"]["arguments"] for item in calls] == [{"city": "Rome"}]


@pytest.mark.parametrize("more", [{}, {"usage": True}])
def test_open_webuis_connection_to_llama_server(client: httpx.Client, more: dict[str, Any]) -> None:
    """With the provider llama.cpp an answer that was stopped is continued."""
    turns = [*HELLO, {"role": "assistant", "content": "Once upon a"}]
    usage = {"stream_options": {"include_usage": True}} if more else {}
    body = {**CHAT, "messages": turns, "stream": True, "continue_final_message": True,
            "add_generation_prompt": False, **usage}  # fmt: skip
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert ("usage" in events(answer)[-1]) == bool(more)


# ---- Codex 0.169
CODEX: dict[str, Any] = {
    "model": "demo",
    "stream": True,
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [
                {"type": "input_text", "text": "You are"},
                {"type": "input_text", "text": " a coder."},
            ],
        },
        {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "Go"}]},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command.",
            "strict": False,
            "parameters": SHELL,
        },
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Tools for agents.",
            "tools": [
                {
                    "type": "function",
                    "name": "spawn_agent",
                    "description": "Starts one.",
                    "strict": False,
                    "parameters": SHELL,
                }
            ],
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "one",
    "client_metadata": {"turn_id": "one"},
}
CODEX_UNUSED = (
    "client_metadata, prompt_cache_key, reasoning.summary, include.reasoning.encrypted_content, "
    "tools.web_search"
)


def test_codex_calls_a_function_and_sends_its_output(tmp_path: Path) -> None:
    with saying(tmp_path, call("exec_command", {"cmd": "echo hi"})) as client:
        answer = client.post("/v1/responses", json=CODEX)
        assert answer.status_code == 200, answer.text
        assert answer.headers[UNUSED] == CODEX_UNUSED
        received = events(answer)
        assert received[-1]["type"] == "response.completed"
        (item,) = received[-1]["response"]["output"]
        assert (item["type"], item["name"], item.get("namespace")) == ("function_call", "exec_command", None)
        assert json.loads(item["arguments"]) == {"cmd": "echo hi"}
        back = [
            {key: item[key] for key in ("type", "status", "name", "arguments", "call_id")},
            {"type": "function_call_output", "id": "fco_1", "call_id": item["call_id"], "output": "hi\n"},
        ]
        again = client.post("/v1/responses", json={**CODEX, "input": [*CODEX["input"], *back]})
        assert events(again)[-1]["type"] == "response.completed"


def test_codex_calls_a_tool_of_a_namespace(tmp_path: Path) -> None:
    with saying(tmp_path, call("spawn_agent", {"cmd": "a"})) as client:
        answer = client.post("/v1/responses", json={**CODEX, "stream": False}).json()
        (item,) = answer["output"]
        assert (item["name"], item["namespace"]) == ("spawn_agent", "multi_agent_v1")
        item.pop("status")
        back = [item, {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}]
        again = client.post(
            "/v1/responses", json={**CODEX, "stream": False, "input": [*CODEX["input"], *back]}
        )
        assert again.status_code == 200, again.text


def test_two_tools_with_one_name_in_two_namespaces(tmp_path: Path) -> None:
    function = {"type": "function", "name": "run", "parameters": SHELL}
    tools = [{"type": "namespace", "name": name, "description": "", "tools": [function]} for name in "ab"]
    with saying(tmp_path, call("b__run", {"cmd": "a"})) as client:
        answer = client.post("/v1/responses", json={**CODEX, "stream": False, "tools": tools}).json()
    assert [(item["name"], item["namespace"]) for item in answer["output"]] == [("run", "b")]


def test_a_custom_tool_gets_text(tmp_path: Path) -> None:
    patch = {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"},
    }
    text = 'a "line"\nand another'
    with saying(tmp_path, call("apply_patch", {"input": text})) as client:
        request = {**CODEX, "tools": [patch], "tool_choice": {"type": "custom", "name": "apply_patch"}}
        received = events(client.post("/v1/responses", json=request))
        kinds = [event["type"] for event in received]
        place = kinds.index("response.custom_tool_call_input.delta")
        assert kinds[place + 1] == "response.custom_tool_call_input.done"
        assert received[place]["delta"] == received[place + 1]["input"] == text
        (item,) = received[-1]["response"]["output"]
        assert (item["type"], item["input"]) == ("custom_tool_call", text)
        back = [item, {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}]
        again = client.post("/v1/responses", json={**request, "input": [*CODEX["input"], *back]})
        assert again.status_code == 200, again.text
        # The same in chat completions, as a whole and as a stream.
        chat = {"model": "demo", "messages": HELLO, "temperature": 0}
        chat["tools"] = [{"type": "custom", "custom": {key: patch[key] for key in ("name", "description")}}]
        chat["tool_choice"] = {"type": "custom", "custom": {"name": "apply_patch"}}
        message = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]
        assert message["tool_calls"][0]["custom"] == {"name": "apply_patch", "input": text}
        parts = [
            part
            for chunk in events(client.post("/v1/chat/completions", json={**chat, "stream": True}))
            for part in chunk["choices"][0]["delta"].get("tool_calls", ())
        ]
        assert [part["custom"]["input"] for part in parts] == [text]
        chat["messages"] = [*HELLO, message, {"role": "tool", "tool_call_id": "1", "content": "ok"}]
        assert client.post("/v1/chat/completions", json=chat).status_code == 200


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(tmp_path: Path, mode: str) -> None:
    names = ("read", "write")
    flat = [{"type": "function", "name": name, "parameters": SHELL} for name in names]
    nested = [{"type": "function", "function": {"name": name, "parameters": SHELL}} for name in names]
    with saying(tmp_path, call("write", {"cmd": "a"})) as client:
        for allowed in names:
            choice: dict[str, Any] = {
                "type": "allowed_tools",
                "mode": mode,
                "tools": [{"type": "function", "name": allowed}],
            }
            request = {
                **CODEX,
                "stream": False,
                "tools": flat,
                "tool_choice": choice,
                "max_output_tokens": 300,
            }
            answer = client.post("/v1/responses", json=request).json()
            called = [item["name"] for item in answer["output"] if item["type"] == "function_call"]
            tool = {"type": "function", "function": {"name": allowed}}
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool]}}
            chat = {"model": "demo", "messages": HELLO, "tools": nested, "tool_choice": choice}
            message = client.post(
                "/v1/chat/completions", json={**chat, "temperature": 0, "max_tokens": 300}
            ).json()["choices"][0]["message"]
            in_chat = [item["function"]["name"] for item in message.get("tool_calls", ())]
            if allowed == "write":
                assert called == in_chat == ["write"]
            else:  # the model may not say what it wants to
                assert "write" not in (*called, *in_chat)


# ---- other clients of the Responses API
def test_hosted_tools_alone_are_named(client: httpx.Client, strict: httpx.Client) -> None:
    request = {"model": "demo", "input": "Hello", "max_output_tokens": 4}
    request["tools"] = [
        {"type": "web_search_preview"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
    ]
    answer = client.post("/v1/responses", json=request)
    assert (answer.status_code, answer.headers[UNUSED]) == (
        200,
        "tools.web_search_preview, tools.code_interpreter",
    )
    assert strict.post("/v1/responses", json=request).status_code == 400
    assert client.post("/v1/responses", json={**request, "tool_choice": "required"}).status_code == 400


def test_a_reference_to_an_item_says_what_to_do(client: httpx.Client) -> None:
    for item in ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}):
        answer = client.post("/v1/responses", json={"model": "demo", "input": [item]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "input.0.id")
        assert "store: false" in answer.json()["error"]["message"]


def test_refusals_and_parts_of_hosted_tools_in_an_input(client: httpx.Client) -> None:
    request = {
        "model": "demo",
        "max_output_tokens": 4,
        "input": [
            {"role": "user", "content": "Hello"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc"},
            {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "user", "content": "Why?"},
        ],
    }
    answer = client.post("/v1/responses", json=request)
    assert (answer.status_code, answer.headers[UNUSED]) == (200, "input.web_search_call")
    messages = [*HELLO, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}]
    for last in (messages[-1], {"role": "assistant", "content": None, "refusal": "No."}):
        chat = {**CHAT, "messages": [*HELLO, last, {"role": "user", "content": "Why?"}]}
        got = client.post("/v1/chat/completions", json=chat)
        assert got.status_code == 200, got.text
        assert got.json()["usage"]["prompt_tokens"] == answer.json()["usage"]["input_tokens"]


# ---- guidellm
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_usage_with_each_event(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    received = events(client.post(path, json={**body, "stream": True, "stream_options": options}))
    counts = [event["usage"]["completion_tokens"] for event in received]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == counts[-2]
    assert received[-1]["choices"] == [] and all(event["usage"]["prompt_tokens"] > 0 for event in received)


# ---- vLLM's and SGLang's clients
NEUTRAL: dict[str, Any] = {
    "guided_json": None,
    "guided_decoding_backend": None,
    "structured_outputs": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "include_stop_str_in_output": False,
    "return_token_ids": False,
    "truncate_prompt_tokens": None,
    "prompt_logprobs": None,
    "logits_processors": None,
    "priority": 0,
    "vllm_xargs": None,
    "kv_transfer_params": None,
    "stop_token_ids": [],
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "top_k": -1,
    "ignore_eos": False,
    "no_such_field": None,
}
NEUTRAL_CHAT: dict[str, Any] = {
    **NEUTRAL,
    "include_reasoning": True,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "separate_reasoning": True,
    "echo": False,
    "chat_template": None,
    "documents": None,
    "mm_processor_kwargs": None,
    "store": False,
    "metadata": {},
    "modalities": ["text"],
    "service_tier": "auto",
}


@pytest.mark.parametrize(
    ("path", "body", "neutral"),
    [("/v1/chat/completions", CHAT, NEUTRAL_CHAT), ("/v1/completions", TEXT, NEUTRAL)],
)
def test_neutral_values_pass(
    client: httpx.Client, strict: httpx.Client, path: str, body: dict[str, Any], neutral: dict[str, Any]
) -> None:
    request = {**body, **neutral}
    for http in (client, strict):
        answer = http.post(path, json=request)
        assert answer.status_code == 200, answer.text
        assert UNUSED not in answer.headers


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_what_is_unused_is_named_or_refused(
    client: httpx.Client, strict: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    request = {**body, "guided_decoding_backend": "xgrammar", "request_id": "7", "user": "me"}
    answer = client.post(path, json=request)
    assert answer.headers[UNUSED] == "guided_decoding_backend, request_id, user"
    answer = strict.post(path, json=request)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_decoding_backend")


SCHEMA: dict[str, Any] = {"const": "five"}
CONSTRAINTS: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": SCHEMA}, '"five"'),
    ({"guided_json": json.dumps(SCHEMA)}, '"five"'),
    ({"guided_regex": "ab{3}"}, "abbb"),
    ({"guided_choice": ["yes, sir"]}, "yes, sir"),
    ({"guided_grammar": 'root ::= "gbnf"'}, "gbnf"),
    ({"guided_grammar": 'start: "lark"'}, "lark"),
    ({"ebnf": 'root ::= "ebnf"'}, "ebnf"),
    ({"structured_outputs": {"json": SCHEMA}}, '"five"'),
    ({"structured_outputs": {"regex": "x{4}", "json": None}}, "xxxx"),
    ({"structured_outputs": {"choice": ["one"]}}, "one"),
    ({"structured_outputs": {"grammar": 'root ::= "two"'}}, "two"),
    ({"choice": ["three"]}, "three"),
    ({"json_schema": json.dumps(SCHEMA)}, '"five"'),
]


@pytest.mark.parametrize(("wanted", "text"), CONSTRAINTS, ids=[str(fields) for fields, _ in CONSTRAINTS])
def test_a_format_under_each_name(client: httpx.Client, wanted: dict[str, Any], text: str) -> None:
    more = {**wanted, "max_tokens": 40}
    chat = client.post("/v1/chat/completions", json={**CHAT, **more}).json()["choices"][0]["message"]
    plain = client.post("/v1/completions", json={**TEXT, **more}).json()["choices"][0]
    assert [answer.strip() for answer in (chat["content"], plain["text"])] == [text, text]


def test_two_formats_are_refused(client: httpx.Client) -> None:
    pairs: list[dict[str, Any]] = [
        {"guided_json": SCHEMA, "guided_regex": "a"},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"guided_choice": ["a"], "response_format": {"type": "json_object"}},
    ]
    for pair in pairs:
        error = client.post("/v1/chat/completions", json={**CHAT, **pair}).json()["error"]
        assert "are both given; give one of them" in error["message"]
    for bad, field in (({"guided_choice": []}, "guided_choice"), ({"guided_regex": "("}, "guided_regex")):
        assert client.post("/v1/completions", json={**TEXT, **bad}).json()["error"]["param"] == field


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_a_regex_that_grows_too_complex_is_the_requests_fault(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    request = {
        **body,
        "regex": "(.{1,100}[abc].{1,100}){100}",
        "max_tokens": 200,
        "temperature": 2.0,
        "seed": 1,
    }
    answer = client.post(path, json=request)
    assert answer.status_code == 400, answer.text
    assert "the grammar stopped after" in answer.json()["error"]["message"]


def test_token_ids(client: httpx.Client, engine: lp.Engine) -> None:
    vocab = engine.model.vocab
    asked = {"return_token_ids": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    choice = client.post("/v1/completions", json={**TEXT, **asked}).json()["choices"][0]
    assert choice["prompt_token_ids"] == vocab.tokenize(TEXT["prompt"])
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert vocab.detokenize(choice["token_ids"]) == choice["text"]
    streamed = events(client.post("/v1/completions", json={**TEXT, **asked, "stream": True}))
    assert ids(streamed) == choice["token_ids"]
    assert streamed[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]
    answer = client.post("/v1/chat/completions", json={**CHAT, "return_token_ids": True}).json()
    assert answer["prompt_token_ids"] == engine.model.tokenize_chat(HELLO)
    received = events(
        client.post("/v1/chat/completions", json={**CHAT, "return_token_ids": True, "stream": True})
    )
    assert received[0]["choices"][0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert ids(received) == answer["choices"][0]["token_ids"]


def test_prompt_logprobs(client: httpx.Client, engine: lp.Engine) -> None:
    choice = client.post("/v1/completions", json={**TEXT, "prompt_logprobs": 2}).json()["choices"][0]
    tokens = engine.model.tokenize(TEXT["prompt"])
    scores = choice["prompt_logprobs"]
    assert len(scores) == len(tokens) and scores[0] is None
    for token, entry in zip(tokens[1:], scores[1:], strict=True):
        assert len(entry) in (2, 3) and entry[str(token)]["logprob"] <= 0
        assert sorted(ranked["rank"] for ranked in entry.values() if ranked["rank"]) == [1, 2]


def test_the_last_tokens_of_a_prompt(client: httpx.Client) -> None:
    answer = client.post(
        "/v1/completions", json={**TEXT, "prompt": "word " * 900, "truncate_prompt_tokens": 9}
    )
    assert answer.json()["usage"]["prompt_tokens"] == 9
    answer = client.post(
        "/v1/completions", json={**TEXT, "prompt": "word " * 900, "truncate_prompt_tokens": -1}
    )
    assert answer.json()["usage"]["prompt_tokens"] == 511


def test_a_message_is_continued(client: httpx.Client, engine: lp.Engine) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    request = {**CHAT, "messages": begun, "add_generation_prompt": False, "continue_final_message": True}
    answer = client.post("/v1/chat/completions", json=request).json()["choices"][0]["message"]["content"]
    params = lp.SamplingParams(temperature=0, max_tokens=4)
    assert answer == engine.chat(begun, params, continue_last=True).content
    for wrong in ({"add_generation_prompt": True}, {"continue_final_message": False}):
        assert client.post("/v1/chat/completions", json={**request, **wrong}).status_code == 400
    # DeepSeek's and Mistral's form. A client that says no in OpenAI's terms gets a new message.
    marked = {**CHAT, "messages": [*HELLO, {**begun[-1], "prefix": True}]}
    body = client.post("/v1/chat/completions", json=marked).json()
    assert body["choices"][0]["message"]["content"] == answer
    body = client.post("/v1/chat/completions", json={**marked, "continue_final_message": False}).json()
    assert body["choices"][0]["message"]["content"] == engine.chat(begun, params).content != answer
    refused = {**CHAT, "messages": [{**HELLO[0], "prefix": True}]}
    assert client.post("/v1/chat/completions", json=refused).status_code == 400


@pytest.mark.parametrize(
    ("unsupported", "hint"),
    [
        ({"skip_special_tokens": False}, "return_token_ids"),
        ({"prompt_logprobs": 1}, "/v1/completions"),
        ({"chat_template": "{{ x }}"}, "--chat-template"),
        ({"structural_tag": {}}, "tools"),
        ({"guided_whitespace_pattern": " "}, "json_whitespace"),
        ({"truncate_prompt_tokens": 5}, 'truncation: "auto"'),
        ({"priority": 3}, "set it to 0"),
        ({"structured_outputs": {"disable_additional_properties": True}}, "additionalProperties: false"),
    ],
)
def test_what_cannot_be_done_names_the_nearest(
    client: httpx.Client, unsupported: dict[str, Any], hint: str
) -> None:
    answer = client.post("/v1/chat/completions", json={**CHAT, **unsupported})
    assert answer.status_code == 400
    assert hint in answer.json()["error"]["message"]


def test_efforts_and_reasoning(tmp_path: Path) -> None:
    with saying(tmp_path, "<think>\nHm.\n</think>\n\nYes.") as client:
        for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
            assert (
                client.post("/v1/chat/completions", json={**CHAT, "reasoning_effort": effort}).status_code
                == 200
            )
            request = {"model": "demo", "input": "a", "max_output_tokens": 4, "reasoning": {"effort": effort}}
            assert client.post("/v1/responses", json=request).status_code == 200
        error = client.post("/v1/chat/completions", json={**CHAT, "reasoning_effort": "most"}).json()["error"]
        assert "max" in error["message"]
        for stream in (False, True):
            for wanted in (True, False):
                request = {**CHAT, "max_tokens": 60, "include_reasoning": wanted, "stream": stream}
                answer = client.post("/v1/chat/completions", json=request)
                assert ("reasoning_content" in answer.text, "Yes." in answer.text or stream) == (wanted, True)


# ---- Anthropic's API: Claude Code, litellm
def test_claude_code(tmp_path: Path) -> None:
    with saying(tmp_path, call("Bash", {"cmd": "ls"})) as client:
        request = {
            "model": "demo",
            "max_tokens": 200,
            "stream": None,
            "temperature": 0,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Go"}]},
                {"role": "system", "content": "In the middle."},
            ],
            "tools": [
                {
                    "name": "Bash",
                    "input_schema": SHELL,
                    "description": None,
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
            ],
            "metadata": {"user_id": "me"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "thinking": {"type": "adaptive"},
            "service_tier": "auto",
        }
        answer = client.post("/v1/messages?beta=true", json=request)
        assert answer.status_code == 200, answer.text
        assert answer.headers[UNUSED] == "context_management, metadata, tools.cache_control, tools.web_search"
        (block,) = answer.json()["content"]
        assert (block["name"], block["input"]) == ("Bash", {"cmd": "ls"})
        count = {key: request[key] for key in ("model", "messages", "system", "tools")}
        n = client.post("/v1/messages/count_tokens", json=count).json()["input_tokens"]
        assert n == answer.json()["usage"]["input_tokens"] + answer.json()["usage"]["cache_read_input_tokens"]


def test_documents_of_text(client: httpx.Client) -> None:
    document = {
        "type": "document",
        "title": "T",
        "source": {"type": "text", "data": "A fox.", "media_type": "text/plain"},
    }
    request = {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": [document]}]}
    assert client.post("/v1/messages", json=request).status_code == 200
    document["source"] = {"type": "base64", "data": ""}
    error = client.post("/v1/messages", json=request).json()["error"]
    assert "must hold text" in error["message"]


# ---- conversations that do not fit
def test_the_oldest_turns_are_dropped(client: httpx.Client, engine: lp.Engine) -> None:
    talk: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for i in range(20):
        talk += [
            {"role": "user", "content": f"{i}: " + "word " * 30},
            {"role": "assistant", "content": "yes " * 10},
        ]
    talk.append({"role": "user", "content": "And now?"})
    params = lp.SamplingParams(temperature=0, max_tokens=8)
    expected = engine.chat(talk, params, truncation="auto")
    assert 100 < expected.n_prompt_tokens <= 504
    with pytest.raises(lp.errors.InvalidRequestError, match="n_ctx is 512"):
        engine.chat(talk, params)
    with pytest.raises(ValueError, match="truncation is 'always'; it must be one of"):
        engine.chat(talk, params, truncation="always")  # type: ignore[call-overload]
    with engine.stream_chat(talk, params, truncation="auto") as stream:
        assert sum(len(delta.token_ids) for delta in stream) == 8
        assert stream.n_prompt_tokens == expected.n_prompt_tokens
    for path, body in (
        ("/v1/chat/completions", {**CHAT, "messages": talk, "max_tokens": 8}),
        ("/v1/responses", {"model": "demo", "input": talk, "max_output_tokens": 8, "temperature": 0}),
    ):
        for truncation in ({}, {"truncation": "disabled"}, {"truncation": None}):
            answer = client.post(path, json={**body, **truncation})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        done = client.post(path, json={**body, "truncation": "auto"}).json()
        usage = done["usage"]
        assert usage.get("prompt_tokens", usage.get("input_tokens")) == expected.n_prompt_tokens


# ---- lm-eval's "gguf" backend
@pytest.mark.parametrize(
    ("context", "continuation"),
    [("Once", " upon"), ("é 🦊", "漢 x"), ("a 🦊🦊", " y"), ("漢", "é")],
)
def test_offsets_split_a_prompt_between_its_characters(
    client: httpx.Client, engine: lp.Engine, context: str, continuation: str
) -> None:
    """A character may have several tokens; those before the split belong to the context, and no others."""
    request = {**TEXT, "prompt": context + continuation, "logprobs": 1, "echo": True, "max_tokens": 1}
    offsets = client.post("/v1/completions", json=request).json()["choices"][0]["logprobs"]["text_offset"]
    vocab = engine.model.vocab
    pieces = [vocab.piece(token) for token in engine.model.tokenize(context + continuation)[1:]]
    n_before = sum(offset < len(context) for offset in offsets)
    assert b"".join(pieces[:n_before]).decode() == context
    assert b"".join(pieces[n_before : len(offsets)]).decode().startswith(continuation)
