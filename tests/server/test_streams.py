"""Streams: their headers come at once, and no stream is silent while it waits."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai
import pytest
import uvicorn
from support.control import PATIENCE_S, Gate
from support.served import http_client

import llamapipe as lp
from llamapipe.server import ServerSettings, serve
from llamapipe.server.connections import Connection, Connections
from llamapipe.server.endpoint import EventStream
from llamapipe.server.errors import ApiError
from llamapipe.server.routes import responses

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story."}]
CHAT = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0, "stream": True}
PATHS = {
    "/v1/completions": {"prompt": "Once upon", "max_tokens": 4, "temperature": 0, "stream": True},
    "/v1/chat/completions": CHAT,
    "/v1/messages": {**CHAT, "model": "demo"},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4, "stream": True},
}
on_all = pytest.mark.parametrize("path", PATHS)


@pytest.fixture(scope="module")
def engine(demo: lp.Model) -> Iterator[lp.Engine]:
    with lp.Engine(demo, n_ctx=512, n_seq_max=4, max_queue=2, tuning=lp.EngineTuning(n_batch=32)) as engine:
        yield engine


@contextmanager
def served(engine: lp.Engine, **settings: Any) -> Iterator[httpx.Client]:
    with http_client(engine, model_names=("demo",), **settings) as client:
        yield client


def n_events(lines: list[str]) -> int:
    return sum(line.startswith("data: ") and "ping" not in line for line in lines)


@on_all
def test_headers_come_before_the_first_step(engine: lp.Engine, path: str) -> None:
    with (
        Gate(engine) as gate,
        served(engine, ping_s=0) as client,
        client.stream("POST", path, json=PATHS[path]) as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        gate.wait()  # the first step was not computed yet
        gate.open()
        assert "data: " in "".join(answer.iter_lines())


@on_all
def test_a_silent_stream_gives_signs_of_life(engine: lp.Engine, path: str) -> None:
    ping = ["event: ping", 'data: {"type":"ping"}'] if path == "/v1/messages" else [": ping"]
    with served(engine, ping_s=0.02) as client:
        with Gate(engine) as gate, client.stream("POST", path, json=PATHS[path]) as answer:
            lines = filter(None, answer.iter_lines())
            if path == "/v1/responses":
                assert [next(lines)[:24] for _ in range(4)][::2] == [
                    "event: response.created",
                    "event: response.in_progr",
                ]
            for _ in range(3):
                assert [next(lines) for _ in ping] == ping
            gate.open()
            rest = list(lines)
        with client.stream("POST", path, json=PATHS[path]) as answer:
            again = list(filter(None, answer.iter_lines()))
    assert n_events(rest) + (2 if path == "/v1/responses" else 0) == n_events(again)


def test_codex_sees_signs_of_life(engine: lp.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits five minutes for an event, and no comment is one."""
    monkeypatch.setattr(responses, "_SIGN_S", 0.0)
    path = "/v1/responses"
    with (
        served(engine, ping_s=0.02) as client,
        Gate(engine) as gate,
        client.stream("POST", path, json=PATHS[path]) as answer,
    ):
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        events = [json.loads(next(lines).removeprefix("data: ")) for _ in range(4)]
        gate.open()
        events += [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["type"] for event in events[:4]] == ["response.created", *["response.in_progress"] * 3]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert events[-1]["response"]["status"] == "incomplete"


@on_all
def test_streams_have_no_pings_if_these_are_off(engine: lp.Engine, path: str) -> None:
    with served(engine, ping_s=0) as client:
        assert "ping" not in client.post(path, json=PATHS[path]).text


def test_clients_skip_the_signs(engine: lp.Engine) -> None:
    """OpenAI's and Anthropic's own clients, while the request waits and is computed."""
    with Gate(engine) as gate, serve(engine, settings=ServerSettings(ping_s=0.01)) as server:
        ours = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        theirs = anthropic.Anthropic(base_url=server.url, api_key="none")
        chunks = ours.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=4, stream=True)
        parts = theirs.messages.create(model="demo", messages=MESSAGES, max_tokens=4, stream=True)
        events = ours.responses.create(model="demo", input="Hi", max_output_tokens=4, stream=True)
        gate.open()
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] is not None
        assert next(part.type for part in parts) == "message_start"
        assert [event.type for event in events][-1].startswith("response.")


@on_all
def test_a_full_queue_is_still_a_status(engine: lp.Engine, path: str) -> None:
    with Gate(engine) as gate, served(engine) as client, ExitStack() as stack:
        stack.callback(engine.stream("a").close)
        gate.wait()  # no other request gets a slot now
        with suppress(lp.errors.QueueFullError):
            for _ in range(100):
                stack.callback(engine.stream("a", block=False).close)
        answer = client.post(path, json=PATHS[path])
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"


@on_all
def test_a_prompt_too_long_is_still_a_status(engine: lp.Engine, path: str) -> None:
    field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    text = "word " * 600
    value = [{"role": "user", "content": text}] if field == "messages" else text
    with served(engine) as client:
        assert client.post(path, json={**PATHS[path], field: value}).status_code == 400


@on_all
def test_an_error_after_the_headers_is_an_event(engine: lp.Engine, path: str) -> None:
    with Gate(engine), served(engine, timeout_s=0.2) as client:
        answer = client.post(path, json=PATHS[path])
    assert answer.status_code == 200
    lines = [line for line in answer.text.split("\n") if line]
    last = json.loads(lines[-1].removeprefix("data: "))
    if path == "/v1/responses":
        assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "timeout")
    elif path == "/v1/messages":
        assert (lines[-2], last["error"]["type"]) == ("event: error", "timeout_error")
    else:
        assert last["error"]["code"] == "timeout"


def test_a_check_that_takes_long(engine: lp.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The status is sent with the first sign of life, and what the check finds is an event."""
    check = engine.check_params
    pinged = threading.Event()

    def slow(params: lp.SamplingParams) -> None:
        assert pinged.wait(PATIENCE_S)
        check(params)

    monkeypatch.setattr(engine, "check_params", slow)
    body = {**PATHS["/v1/completions"], "regex": "("}
    with served(engine, ping_s=0.02) as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = filter(None, answer.iter_lines())
        assert (answer.status_code, next(lines)) == (200, ": ping")
        pinged.set()
        last = json.loads(next(line for line in lines if line != ": ping").removeprefix("data: "))
    assert last["error"]["param"] == "regex"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_progress_of_the_prompt(engine: lp.Engine, path: str) -> None:
    """llama-server's fields: an event after each of the steps that compute the prompt, while they are watched."""
    text = " ".join(f"cat{i}" for i in range(60))
    body: dict[str, Any] = (
        {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    )
    body |= {"max_tokens": 2, "stream": True, "return_progress": True, "cache_prompt": False}
    with Gate(engine) as gate, served(engine) as client, client.stream("POST", path, json=body) as answer:
        progress: list[dict[str, int]] = []
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "prompt_progress" not in event:
                    assert "error" not in event
                    continue
                (choice,) = event["choices"]
                assert choice["index"] == 0 and choice["finish_reason"] is None
                progress.append(event["prompt_progress"])
                if len(progress) < 4:
                    gate.step()
                else:
                    gate.open()
    total = progress[0]["total"]
    assert total > 100
    assert [set(entry) for entry in progress] == [{"total", "cache", "processed", "time_ms"}] * len(progress)
    assert [entry["processed"] for entry in progress][:3] == [0, 32, 64]
    assert progress[-1]["processed"] == total
    assert all(
        entry["cache"] == 0 and entry["total"] == total and entry["time_ms"] >= 0 for entry in progress
    )


def test_progress_of_a_short_prompt(engine: lp.Engine) -> None:
    body = {**CHAT, "return_progress": True, "stream_options": {"include_usage": True}}
    with served(engine) as client:
        events = client.post("/v1/chat/completions", json=body).text
        assert events.count("prompt_progress") >= 1
        assert client.post("/v1/chat/completions", json={**body, "stream": False}).status_code == 200


def test_the_scores_of_an_echo_leave_no_cells_to_other_salts(engine: lp.Engine) -> None:
    """A stream computes the prompt for its scores before it generates."""
    prompt = "A prompt that nobody else may learn from the time that their own ones take: it is one tenant's secret."
    body = {"prompt": prompt, "max_tokens": 2, "cache_salt": "mine"}
    scored = {**body, "echo": True, "logprobs": 0, "stream": True}

    def n_cached(salt: str | None) -> int:
        answer = client.post("/v1/completions", json={**body, "cache_salt": salt}).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    with served(engine) as client:
        assert "token_logprobs" in client.post("/v1/completions", json=scored).text
        assert n_cached(None) == n_cached("other") == 0
        assert n_cached("mine") > 16


def test_no_sign_of_life_follows_an_error() -> None:
    """The error arrives while a sign waits for its turn to be sent."""

    async def sent() -> list[bytes]:
        woken = asyncio.Event()
        bodies: list[bytes] = []

        async def send(message: Any) -> None:
            bodies.append(message.get("body", b""))

        async def events() -> AsyncGenerator[bytes, None]:
            await woken.wait()
            raise ApiError(400, "broken")
            yield b""

        def sign() -> bytes:
            woken.set()
            return b"sign"

        settings = SimpleNamespace(settings=ServerSettings(ping_s=0.01))
        exchange: Any = SimpleNamespace(status=200, gate=settings, dialect="openai")
        await EventStream(exchange, events(), sign=sign).stream_response(send)
        return bodies

    first, error, end = asyncio.run(sent())
    assert (first, end) == (b"sign", b"") and b"broken" in error


def test_a_client_that_hung_up_leaves_no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    """Parts that are ready at once are written before the event loop tells that the connection is lost."""
    client = socket.socket()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        for _ in range(50):
            await send({"type": "http.response.body", "body": b"more", "more_body": True})
        await send({"type": "http.response.body"})
        is_over.set()

    async def serve_one() -> None:
        config = uvicorn.Config(stream, lifespan="off", log_config=None)
        config.load()
        state, limits = uvicorn.server.ServerState(), Connections(0, 10.0)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(config, state, {}, limits=limits), "127.0.0.1", 0
        )
        async with server:
            client.connect(server.sockets[0].getsockname())
            client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await is_over.wait()

    is_over = asyncio.Event()
    asyncio.run(serve_one())
    assert [record.getMessage() for record in caplog.records] == []
