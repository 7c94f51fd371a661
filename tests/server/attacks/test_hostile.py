"""Requests of hostile and clumsy clients: each gets a clear answer, nothing is left, and nobody else waits."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import socket
from collections.abc import Awaitable, Iterator
from contextlib import ExitStack
from functools import partial
from time import process_time, thread_time
from typing import Any

import httpx
import pytest
from support.control import until, wait_until
from support.served import http_client

import llamapipe as lp
from llamapipe._messages import listed, quoted
from llamapipe.chat.tools import MAX_TOOLS, allowed_tools, check_tools
from llamapipe.server import ServerSettings, serve
from llamapipe.server._tools import tools_of
from llamapipe.server.endpoint import MAX_DEPTH, MAX_VALUES, problem_of
from llamapipe.server.requests.items import messages_of
from llamapipe.server.routes.chat import ChatRequest

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def engine(demo: lp.Model) -> Iterator[lp.Engine]:
    with lp.Engine(demo, n_ctx=512, n_seq_max=4, max_queue=16) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: lp.Engine) -> Iterator[serve]:
    settings = ServerSettings(body_timeout_s=0.5, max_requests=4, model_names=("demo",))
    with serve(engine, settings=settings) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: serve) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def limited(engine: lp.Engine) -> Iterator[httpx.Client]:
    with http_client(engine, max_messages=20, max_text_characters=150_000, model_names=("demo",)) as client:
        yield client


def function(name: Any, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [-1]},
        {"prompt": [10**9]},
        {"prompt": [1, {}]},
        {"prompt": True},
        {"max_tokens": 10**30},
        {"max_tokens": "3"},
        {"temperature": "hot"},
        {"temperature": 10**400},
        {"top_p": 7},
        {"n": 0},
        {"n": 10**6},
        {"stop": [""]},
        {"logit_bias": {"": 1}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"99999999": 1}},
        {"logit_bias": {"5": "x"}},
        {"logit_bias": {"5" * 5000: 1}},
        {"logit_bias": {"a" * 70_000: 1}},
        {"stop": ["a"] * 1025},
        {"stop": ["a" * 70_000]},
        {"dry_sequence_breakers": ["a"] * 65},
        {"best_of": -1},
        {"logprobs": 10**6},
        {"best_of": 10**9},
        {"echo": "yes"},
        {"grammar": "root ::= root root"},
        {"regex": "("},
        {"json_schema": {"type": "nope"}},
        {"allowed_token_ids": []},
        {"sampler_order": ["no such"]},
    ],
    ids=lambda change: str(change)[:60],
)
def test_a_bad_option_of_a_completion(client: httpx.Client, change: dict[str, Any]) -> None:
    """The message or the error's ``param`` names the field."""
    body = json.dumps({"prompt": "Hi", "max_tokens": 2, **change})
    answer = client.post("/v1/completions", content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert next(iter(change)) in f"{error['param']} {error['message']}"


def test_the_longest_message_before_an_answer(client: httpx.Client) -> None:
    for n, status in ((4096, 200), (4097, 400)):
        message = {"reasoning_budget": 3, "reasoning_budget_message": "a" * n}
        answer = client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2, **message})
        assert (answer.status_code, "4097 characters; the limit is 4096" in answer.text) == (status, n > 4096)


@pytest.mark.parametrize(
    "change",
    [
        {"grammar_triggers": [{"type": 99, "value": "x"}]},
        {"chat_parser": "x"},
        {"n_discard": -1},
        {"mm_hashes": ["0" * 64]},
        {"multi_modal_uuids": {"image": ["a"]}},
        {"kv_transfer_params": {"remote_block_ids": [1]}},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/completion"])
def test_fields_that_were_attacks_elsewhere(client: httpx.Client, path: str, change: dict[str, Any]) -> None:
    """Options with which clients reached into other servers are refused, or named as unused."""
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    answer = client.post(path, json={**prompt, "max_tokens": 2, **change})
    (field,) = change
    if answer.status_code == 200:
        assert field in answer.headers["x-llamapipe-unused"]
    else:
        assert answer.status_code == 400 and field in answer.text


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []},
        {"messages": [{}]},
        {"tools": [function(7, {})]},
        {"tools": [function("f", [])]},
        {"tools": [function("f", {})], "functions": [{"name": "g", "parameters": {}}]},
        {"tools": [{}], "functions": [{}]},
        {"tools": [function("f", {})], "tool_choice": "none", "function_call": "auto"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": [1]}}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": "a" * 10**6}]},
        {"messages": [{"role": "assistant", "content": "x"}] * 2000},
        {"tools": [{}]},
        {"tools": [function("", {})]},
        {"tools": [function("f", {"type": "object", "properties": {"a": {"$ref": "#/no"}}})]}
        | {"tool_choice": "required"},
        {"tool_choice": "required"},
        {"response_format": {"type": "no such"}},
        {"response_format": {"type": "json_schema"}},
        {"top_logprobs": 5},
        {"chat_template_kwargs": {"messages": []}},
        {"modalities": ["audio"]},
    ],
    ids=lambda change: str(change)[:60],
)
def test_a_bad_option_of_a_chat(client: httpx.Client, change: dict[str, Any]) -> None:
    assert client.post("/v1/chat/completions", json={**CHAT, **change}).status_code == 400


def test_both_names_of_one_thing_may_say_the_same(client: httpx.Client) -> None:
    tools = {"tools": [function("f", {})], "tool_choice": "none"}
    older = {"functions": [function("f", {})["function"]], "function_call": "none"}
    for change in (tools, older, {**tools, **older}):
        assert client.post("/v1/chat/completions", json={**CHAT, **change}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","max_tokens":1e400}',
    ],
    ids=lambda body: repr(body[:30]),
)
def test_a_body_that_is_no_request(client: httpx.Client, body: bytes) -> None:
    assert client.post("/v1/completions", content=body).status_code == 400


def test_a_text_that_is_too_long_is_not_tokenized(limited: httpx.Client) -> None:
    for path, field in (("/tokenize", "content"), ("/tokenize", "prompt"), ("/v1/completions", "prompt")):
        answer = limited.post(path, json={field: "a" * 15_000_000})
        assert answer.status_code == 400 and "15000000 characters" in answer.text
    assert limited.post("/tokenize", json={"content": "a" * 100_000}).status_code == 200


MANY = [{"role": "user", "content": "x"}] * 21


@pytest.mark.parametrize(
    ("path", "field", "more"),
    [
        ("/v1/chat/completions", "messages", {}),
        ("/v1/chat/completions", "messages", {"truncation": "auto"}),
        ("/v1/responses", "input", {}),
        ("/v1/messages", "messages", {"model": "demo", "max_tokens": 2}),
        ("/v1/messages/count_tokens", "messages", {"model": "demo"}),
        ("/tokenize", "messages", {}),
        ("/apply-template", "messages", {}),
    ],
)
def test_a_conversation_that_is_too_long_is_not_rendered(
    limited: httpx.Client, path: str, field: str, more: dict[str, Any]
) -> None:
    """By the number of its messages, or by their contents if they cannot fit the context."""
    answer = limited.post(path, json={field: MANY, **more})
    assert (answer.status_code, "21 items; the limit of this server is 20" in answer.text) == (400, True)
    long = "a" * 40_000
    for content in (long, [{"type": "text", "text": long}] if "resp" not in path else long):
        answer = limited.post(path, json={field: [{"role": "user", "content": content}] * 4, **more})
        assert answer.status_code == 400
        said = re.search(r"160000 characters, at least \d+ tokens; n_ctx is", answer.text) is not None
        assert said is not bool(more.get("truncation"))
    assert limited.post(path, json={field: MANY[:20], **more}).status_code == 200
    for n, status in ((20, 200), (21, 400)):
        parts = [{"type": "text", "text": "a"}] * n
        answer = limited.post(path, json={field: [{"role": "user", "content": parts}], **more})
        assert answer.status_code == status
        assert ("has over 20 messages and parts" in answer.text) is (status == 400)


def test_texts_up_to_the_limit_are_counted(limited: httpx.Client) -> None:
    """Longer ones are counted, too, if they can fit the context."""
    for path, field in (("/tokenize", "content"), ("/tokenize", "prompt"), ("/v1/completions", "prompt")):
        answer = limited.post(path, json={field: "a" * 150_001})
        assert (answer.status_code, "150001 characters" in answer.text) == (400, True)
    assert len(limited.post("/tokenize", json={"content": "a" * 150_000}).json()["tokens"]) > 1000
    body = {"prompt": "a" * 150_000, "return_token_strs": True}
    answer = limited.post("/tokenize", json=body).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) > 1000
    pieces = limited.post("/tokenize", json={"content": "a" * 150_000, "with_pieces": True}).json()["tokens"]
    assert "".join(piece["piece"] for piece in pieces).strip() == "a" * 150_000
    assert limited.post("/detokenize", json={"tokens": [5] * 150_000}).status_code == 200
    answer = limited.post("/detokenize", json={"tokens": [5] * 150_001})
    assert (answer.status_code, "the limit of this server is 150000" in answer.text) == (400, True)


def test_tokens_outside_the_vocabulary(client: httpx.Client) -> None:
    for token in (-1, 10**12):
        answer = client.post("/detokenize", json={"tokens": [token]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


def test_a_bad_request_leaves_no_traceback(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    """A plain TypeError or ValueError may be a defect, so it is logged; checks raise errors that name the field."""
    with caplog.at_level(logging.WARNING):
        for change in ({"temperature": -1}, {"prompt": [-1]}, {"logit_bias": {"": 1}}, {"regex": "("}):
            client.post("/v1/completions", json={"prompt": "a", **change})
        client.post("/detokenize", json={"tokens": [-1]})
        client.post("/v1/chat/completions", json={**CHAT, "tools": [{}]})
    assert not [record for record in caplog.records if "refused" in record.message]


USER = '"messages":[{"role":"user","content":"a"}]'
FUNCTION = '"type":"function","function":{"name":"f","parameters":DEEP}'
SCHEMA = '"type":"json_schema","json_schema":{"schema":DEEP}'
NESTED = [  # path, body, the answer to a value within the limit
    ("/v1/chat/completions", '{"messages":[{"role":"user","content":"a","x":DEEP}],"max_tokens":2}', 200),
    ("/v1/chat/completions", f'{{{USER},"max_tokens":2,"chat_template_kwargs":{{"x":DEEP}}}}', 200),
    ("/v1/chat/completions", f'{{{USER},"max_tokens":2,"documents":[DEEP]}}', 400),
    ("/v1/chat/completions", f'{{{USER},"max_tokens":2,"metadata":DEEP}}', 200),
    ("/v1/chat/completions", f'{{{USER},"tools":[{{{FUNCTION}}}]}}', 400),
    ("/v1/chat/completions", f'{{{USER},"response_format":{{{SCHEMA}}}}}', 400),
    ("/v1/chat/completions", f'{{{USER},"no such":DEEP}}', 400),
    ("/v1/completions", '{"prompt":DEEP}', 400),
    ("/v1/completions", '{"prompt":"a","json_schema":DEEP}', 400),
    ("/v1/responses", '{"input":[{"role":"user","content":"a","x":DEEP}],"max_output_tokens":16}', 200),
    ("/v1/responses", '{"input":"a","tools":[{"type":"function","name":"f","parameters":DEEP}]}', 400),
    ("/v1/messages", f'{{"model":"demo",{USER},"max_tokens":2,"chat_template_kwargs":{{"x":DEEP}}}}', 200),
    ("/v1/messages", f'{{"model":"demo",{USER},"max_tokens":2,"tools":[{{"name":"f","input_schema":DEEP}}]}}', 400),
    ("/v1/messages/count_tokens", f'{{"model":"demo",{USER},"tools":[{{"name":"f","input_schema":DEEP}}]}}', 200),
    ("/v1/embeddings", '{"input":DEEP}', 400),
    ("/v1/rerank", '{"query":"a","documents":[DEEP]}', 400),
    ("/tokenize", '{"messages":[{"role":"user","content":"a","x":DEEP}]}', 200),
    ("/detokenize", '{"tokens":[DEEP]}', 400),
    ("/apply-template", f'{{{USER},"chat_template_kwargs":{{"x":DEEP}}}}', 200),
]  # fmt: skip


def nested(body: str, n: int) -> str:
    """The body with a value that has so many levels with those around it."""
    before = body.partition("DEEP")[0]
    n -= sum(map(before.count, "{[")) - sum(map(before.count, "}]"))
    return body.replace("DEEP", '{"x":' * n + "1" + "}" * n)


@pytest.mark.parametrize(("path", "body", "status"), NESTED)
def test_a_body_that_is_nested_deeply(
    client: httpx.Client, caplog: pytest.LogCaptureFixture, path: str, body: str, status: int
) -> None:
    """Up to 256 levels it is treated like any other, and beyond them refused, before anything is done with it."""
    with caplog.at_level(logging.WARNING):
        deep = client.post(path, content=nested(body, MAX_DEPTH))
        assert deep.status_code == status, deep.text
        assert f"{MAX_DEPTH} levels" not in deep.text
        for n in (MAX_DEPTH + 1, 10 * MAX_DEPTH, 100_000):
            answer = client.post(path, content=nested(body, n))
            assert (answer.status_code, "more than 256 levels" in answer.text) == (400, True)
    assert not [record for record in caplog.records if "Traceback" in record.getMessage() or record.exc_info]


def test_the_depth_of_a_body() -> None:
    """Brackets in strings do not count, and the whole body is looked at."""
    most = '{"a":[' * 128 + "]}" * 128
    assert not problem_of(most.encode())
    assert problem_of(f"[{most}]".encode())
    for text in ("[" * 300, '"' + "{" * 300, '\\"' + "[" * 300, "\\", '"', "\u005b" * 300, "]" * 300):
        written = json.dumps(text)
        assert not problem_of(f"[{written},{written},{most[6:-2]}]".encode())
        assert problem_of(f"[{written},{written},{most}]".encode())
        for n in (2**20 - 3, 2**20 - 2, 2**20 - 1, 2**21):
            assert not problem_of(f"{' ' * n}[{written},{most[6:-2]}]".encode())
            assert problem_of(f"{' ' * n}[{written},{most}]".encode())
    assert not problem_of(b"[" + b"[]," * 10_000 + b"0]")


def test_the_number_of_values_in_a_body(client: httpx.Client) -> None:
    """To decode 5 million empty objects took 0.4 s, while nobody else was served; what is in strings does not count."""
    n = MAX_VALUES
    for value, most in (("{}", n), ("[]", n), ('{"a":1}', n // 2), ("1", 16 * n)):
        assert problem_of(f"[{','.join([value] * (most * 15 // 16))}]".encode()) is None
        assert "members" in str(problem_of(f"[{','.join([value] * (most + 2))}]".encode()))
        written = json.dumps(f"[{','.join([value] * (most + 2))}]")
        assert problem_of(f"[{written}, {written}]".encode()) is None
    body = f'{{"prompt": "a", "metadata": {{"x": [{",".join(["{}"] * (n + 2))}]}}}}'
    answer = client.post("/v1/completions", content=body)
    assert (answer.status_code, "members" in answer.text) == (400, True)


def test_a_bad_response_request_names_the_field(client: httpx.Client) -> None:
    for change in ({"reasoning": {"effort": "huge"}}, {"reasoning": {"no such": 1}}):
        answer = client.post("/v1/responses", json={"input": "Hi", **change})
        assert (answer.status_code, "reasoning" in answer.text) == (400, True)


def test_template_arguments_that_are_fields(client: httpx.Client) -> None:
    for route in ("/apply-template", "/tokenize", "/v1/chat/completions"):
        answer = client.post(route, json={**CHAT, "chat_template_kwargs": {"tools": []}})
        assert answer.status_code == 400


def test_a_path_cannot_write_lines_into_the_log(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        client.get("/v1/models/a%0A200 OK")
        wait_until(lambda: "%0A200" in caplog.text)  # an answer is logged after it was sent
    assert "\n200" not in caplog.text


def test_slow_bodies_do_not_keep_others_out(server: serve, client: httpx.Client, engine: lp.Engine) -> None:
    """As many as may be served at once: others are served meanwhile, and they are answered 408."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_connection((server.host, server.port), 60)) for _ in range(4)
        ]
        for slow in sockets:
            slow.sendall(head)
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        for slow in sockets:
            answer = b"".join(iter(partial(slow.recv, 4096), b""))
            assert answer.startswith(b"HTTP/1.1 408 ") and b"within 0.5 seconds" in answer
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


SLOW = "start: s\ns: " + " | ".join(" ".join("s" * n) for n in range(2, 9)) + " | /[a-z %s]/"


def test_slow_grammars_do_not_keep_others_out(demo: lp.Model) -> None:
    """20 requests with a grammar whose masks take longer and longer, and four slots. Each has 0.3 s for it."""
    settings = ServerSettings(api_keys=("attacker", "other"), grammar_timeout_s=0.3)
    with lp.Engine(demo, n_ctx=512, n_seq_max=4) as engine, serve(engine, settings=settings) as server:
        limits = httpx.Limits(max_connections=50)

        async def main() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url, timeout=180, limits=limits) as client:

                def ask(key: str, **body: Any) -> Awaitable[httpx.Response]:
                    headers = {"authorization": f"Bearer {key}"}
                    return client.post("/v1/completions", json={"prompt": "Once", **body}, headers=headers)

                slow = [
                    asyncio.ensure_future(ask("attacker", max_tokens=400, lark=SLOW % chr(65 + i % 20)))
                    for i in range(20)
                ]
                first, *_ = await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
                for _ in range(3):
                    answer = await ask("other", max_tokens=20, ignore_eos=True)
                    assert answer.status_code == 200
                assert sum(not task.done() for task in slow) > 5
                for task in slow:
                    if not task.done():
                        task.cancel()
                return [task.result() for task in first]

        refused = asyncio.run(main())
        assert all(answer.status_code == 400 for answer in refused)
        assert "grammar_timeout is 0.3 s" in refused[0].text or "Too many items" in refused[0].text


def test_ambiguous_grammars_cost_little(demo: lp.Model) -> None:
    """Forty of one client take the processor time of one that was not bounded; no key and no timeout is needed."""
    lark = "start: s\ns: s s | s s s | s s s s | /[a-z %s]/"
    with lp.Engine(demo, n_ctx=512, n_seq_max=4) as engine, serve(engine) as server:

        async def main() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url, timeout=180) as client:
                bodies = [
                    {"prompt": "Once", "max_tokens": 200, "lark": lark % chr(65 + i % 26)} for i in range(40)
                ]
                return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

        began_s = process_time()
        answers = asyncio.run(main())
        assert process_time() - began_s < 60
        assert {answer.status_code for answer in answers} == {400}
        assert "Too many items (limit 5000" in answers[0].text


@pytest.mark.parametrize(
    "constraint",
    [{"lark": "start: s\ns: s s | /[a-z %s]/"}, {"grammar": 'root ::= s\ns ::= "" | [a-z %s] s | [a-z] s s'}],
    ids=["lark", "gbnf"],
)
@pytest.mark.parametrize("more", [{}, {"json_schema": {"type": "boolean"}}], ids=["plain", "schema"])
def test_slow_grammars_do_not_keep_other_requests_of_their_client_out(
    demo: lp.Model, constraint: dict[str, str], more: dict[str, Any]
) -> None:
    """Forty of one address without keys. Each in turn, it would wait for most of them, half a second for each."""
    ((kind, text),) = constraint.items()
    with lp.Engine(demo, n_ctx=512, n_seq_max=4) as engine, serve(engine) as server:

        async def main() -> int:
            limits = httpx.Limits(max_connections=50)
            async with httpx.AsyncClient(base_url=server.url, timeout=180, limits=limits) as client:

                def ask(**body: Any) -> Awaitable[httpx.Response]:
                    return client.post("/v1/completions", json={"prompt": "Once", **body})

                slow = [
                    asyncio.ensure_future(ask(max_tokens=200, **{kind: text % chr(0xC0 + i)}))
                    for i in range(40)
                ]
                await until(lambda: engine.stats().n_active)
                for _ in range(2):
                    answer = await ask(max_tokens=20, **more)
                    assert answer.status_code == 200
                n_done = sum(task.done() for task in slow)
                for task in slow:
                    task.cancel()
                return n_done

        assert asyncio.run(main()) < 8
        wait_until(lambda: engine.stats().n_active == engine.stats().n_queued == 0)
        engine.check_integrity()


def test_choices_of_a_stream_end_with_its_client(client: httpx.Client, engine: lp.Engine) -> None:
    for _ in range(5):
        body = {**CHAT, "max_tokens": 400, "n": 3, "stream": True, "logit_bias": {"1": -100}}
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            next(answer.iter_lines())
    wait_until(lambda: engine.stats().n_active == engine.stats().n_queued == 0)
    engine.check_integrity()


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": 0},
        {"timeout_s": "1"},
        {"body_timeout_s": -1},
        {"strict": 1},
        {"max_messages": 0},
        {"max_text_characters": "many"},
        {"max_sound_s": 1801},
        {"page": None},
        {"api_keys": 5},
        {"api_keys": [" a"]},
        {"api_keys": ["a\n"]},
        {"model_names": b"a"},
    ],
    ids=str,
)
def test_bad_settings_name_the_field(options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        ServerSettings(**options)


def test_thousands_of_tools() -> None:
    """They are read on the event loop: time in the square of their number would stop everybody."""
    n = MAX_TOOLS
    tools = [function(f"f{i}", {}) for i in range(n)]
    chosen = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(n)]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": chosen}}
    items = [
        {"type": "function_call", "name": f"f{i % n}", "arguments": "{}", "call_id": f"c{i}"}
        for i in range(20_000)
    ]
    began_s = thread_time()
    request_tools = tools_of(tools, choice, is_flat=False)
    messages = messages_of(None, items, request_tools)
    assert thread_time() - began_s < 10  # 0.3 s here; in the square, a minute
    assert len(request_tools.names) == n and len(messages[0]["tool_calls"]) == len(items)
    mode, allowed = allowed_tools(request_tools.tool_choice, check_tools(request_tools.functions))
    assert (mode, len(allowed)) == ("auto", n)


FLAT = {"type": "function", "name": "f", "parameters": {}}
TURNS = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "more", "tool"),
    [
        ("/v1/chat/completions", {"messages": TURNS}, function("f", {})),
        ("/v1/responses", {"input": "Hi"}, FLAT),
        ("/v1/responses", {"input": "Hi"}, {"type": "namespace", "name": "n", "tools": [FLAT] * 2}),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 1}, {"name": "f", "input_schema": {}}),
        ("/v1/messages/count_tokens", {"messages": TURNS}, {"name": "f", "input_schema": {}}),
        ("/tokenize", {"messages": TURNS}, function("f", {})),
        ("/apply-template", {"messages": TURNS}, function("f", {})),
    ],
)
def test_too_many_tools_are_not_looked_at(
    client: httpx.Client, path: str, more: dict[str, Any], tool: dict[str, Any]
) -> None:
    """20,000 of them took 5 s, and 2000 took 10 s, until they were refused."""
    tools = [tool] * MAX_TOOLS  # that they have one name is found later
    n = MAX_TOOLS if tool.get("type") == "namespace" else MAX_TOOLS + 1
    answer = client.post(path, json={"model": "demo", **more, "tools": [*tools, tool][:n]})
    assert answer.status_code == 400
    assert f"the limit is {MAX_TOOLS}" in answer.text


LONG = "x" * 1_000_000
CHOICE = {"type": "function", "function": {"name": LONG}}


@pytest.mark.parametrize(
    "change",
    [
        {"model": LONG},
        {LONG: 1},
        {"messages": [{"role": LONG, "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": LONG}]}]},
        {"messages": [{"role": "user", "content": "a", LONG: 1}]},
        {"tool_choice": CHOICE, "tools": [function(f"f{i}", {}) for i in range(500)]},
        {"tool_choice": LONG},
        {"tools": [function(LONG, {})]},
        {"tools": [function("f", {"type": LONG})], "tool_choice": "required"},
        {"tools": [{"type": LONG}]},
        {"logit_bias": {LONG: 1}},
        {"reasoning_effort": LONG},
        {"response_format": {"type": LONG}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": LONG}}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {LONG: {"type": 1}}},
            }
        },
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"properties": {LONG: {"type": 1}}}},
            }
        },
        {"chat_template_kwargs": {"messages": LONG}},
        {"stop": [LONG, 1]},
        {"n": "9" * 1000},
        {"truncation": LONG},
    ],
    ids=lambda change: json.dumps(change)[:30],
)
def test_errors_are_short(client: httpx.Client, change: dict[str, Any]) -> None:
    answer = client.post("/v1/chat/completions", json={**CHAT, **change})
    assert answer.status_code in (200, 400, 404)
    assert len(answer.content) < 2500
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


def test_nothing_of_a_refused_request_waits_for_the_garbage_collector(client: httpx.Client) -> None:
    """A conversation of 100,000 messages takes 30 MB; a dozen of them took 400 MB until the next collection."""

    def n_requests() -> int:
        return sum(type(instance) is ChatRequest for instance in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        messages = [{"role": "user", "content": "a"}] * 10_001
        for change in ({"messages": messages}, {"n": 0}, {"stream": True, "messages": messages}, {}):
            client.post("/v1/chat/completions", json={**CHAT, **change})
            wait_until(lambda: not n_requests())
    finally:
        gc.enable()


@pytest.mark.parametrize(("path", "name"), [("/v1/chat/completions", "messages"), ("/v1/responses", "input")])
def test_a_large_conversation_is_refused_before_it_is_decoded(
    client: httpx.Client, path: str, name: str
) -> None:
    messages = [{"role": "user", "content": "a" * 99}] * 10_001
    error = client.post(path, json={name: messages, "n": "wrong"}).json()["error"]
    assert error["message"].startswith(
        "the body has 10001 messages, by their roles; the limit of this server is 10000"
    )


def test_values_in_messages() -> None:
    assert quoted("a") == "'a'"
    assert quoted("a" * 10**6) == f"'{'a' * 100}…'"
    assert quoted(b"a" * 101) == f"b'{'a' * 100}…'"
    assert quoted({"a": "b" * 1000}) == "{'a': '" + "b" * 93 + "…"
    assert quoted(10**5000) == "a number of 16610 bits" and quoted(True) == "True"
    assert quoted([10**5000]) == "a list that is too large to show"
    assert listed(range(3)) == "0, 1, 2" and listed(range(30)).endswith("18, 19 and 10 more")
