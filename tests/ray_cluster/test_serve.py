"""Services of Ray Serve: routes, streams whose replica is killed, clients that hang up, more replicas under load."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from support.ray_programs import PATIENCE_S, Process, RayProgram
from support.run_script import free_port

import llamapipe as lp
from llamapipe.server.errors import Dialect

pytest.importorskip("ray", reason='needs Ray: nox -s ray, or pip install "llamapipe[ray]"')

# Importing Ray warns of names that it still uses.
pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]
GREEDY: dict[str, Any] = {"model": "demo", "max_tokens": 12, "temperature": 0}
ENDLESS: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 10_000_000,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}

SERVICE = """
from ray import serve
start(num_cpus=8)
spec = lr.EngineSpec(lp.demo_model_path(), {"n_ctx": 512, "n_seq_max": 4, "overflow": "recompute"},
                     {"chat_template": sys.argv[3]})
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])}, logging_config={"log_level": "ERROR"})
serve.run(lr.openai_app(spec, **eval(sys.argv[2])), route_prefix="/")
print("ready", flush=True)
sys.stdin.readline()
serve.shutdown()
print("closed", flush=True)
"""
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


class Service:
    """A running application."""

    def __init__(self, folder: Path, options: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.program = RayProgram(folder, SERVICE, port, options, TEMPLATE)

    def replicas(self) -> list[Process]:
        """The processes of the replicas."""
        return self.program.workers(re.compile(r"ray::ServeReplica:default:llamapipe(?!-http)"))

    def wait(self, what: Callable[[], bool]) -> None:
        self.program.wait_until(what)

    def gauge(self, name: str) -> float:
        """A metric of the replica that answers."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[[str], Service]]:
    services: list[Service] = []

    def make(options: str) -> Service:
        running = Service(tmp_path, options)
        services.append(running)
        running.program.wait_for("ready")
        return running

    yield make
    for running in services:
        with running.program:
            pass


def test_routes_answer_as_those_of_the_server_do(service: Callable[[str], Service]) -> None:
    running = service("{}")
    with lp.Engine(lp.demo_model_path(), n_ctx=512, n_seq_max=4) as engine:
        params = lp.SamplingParams(max_tokens=12, temperature=0.0)
        expected = engine.generate("Once upon a time", params).text
        in_chat = engine.generate("Once ", params).text
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=60)
    with client:
        assert client.completions.create(prompt="Once upon a time", **GREEDY).choices[0].text == expected
        stream = client.completions.create(prompt="Once upon a time", stream=True, **GREEDY)
        assert "".join(chunk.choices[0].text for chunk in stream) == expected
        messages: Any = [{"role": "user", "content": "Once"}]
        chat = client.chat.completions.create(messages=messages, **GREEDY)
        assert (
            chat.choices[0].message.content == in_chat.lstrip() or chat.choices[0].message.content == in_chat
        )
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(prompt="x", model="demo", temperature=-1)
    with (
        anthropic.Anthropic(base_url=running.url, api_key="none", timeout=60) as client_a,
        client_a.messages.stream(model="demo", max_tokens=12, messages=messages) as events,
    ):
        assert events.get_final_text()
    large = httpx.post(f"{running.url}/v1/completions", content=b" " * (16 * 2**20 + 1), timeout=60)
    assert large.status_code == 413
    assert large.json()["error"]["type"] == "invalid_request_error"
    health = httpx.get(f"{running.url}/health", timeout=60)
    assert health.json() == {"status": "ok"}
    assert len(health.headers.get_list("x-request-id")) == 1
    running.program.tell("end")
    assert "closed" in running.program.end()


def test_a_stream_whose_replica_is_killed_ends_with_an_error(service: Callable[[str], Service]) -> None:
    running = service('{"replicas": 1}')
    (victim,) = running.replicas()  # before it works: then its title is that of a method
    seen: list[str] = []
    with httpx.stream(
        "POST", f"{running.url}/v1/completions", json={"prompt": "Once", **ENDLESS}, timeout=60
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                seen.append(line.removeprefix("data: "))
            if len(seen) == 20:
                victim.kill()
    assert answer.status_code == 200
    assert "[DONE]" not in seen
    assert json.loads(seen[-1])["error"]["code"] == "replica_died"
    assert len(seen) > 20
    assert all("choices" in json.loads(line) for line in seen[:-1])
    # Another one takes its place; until then requests wait or are answered 503.
    deadline = time.monotonic() + PATIENCE_S
    while (
        again := httpx.post(f"{running.url}/v1/completions", json={"prompt": "Once", **GREEDY}, timeout=60)
    ).is_error:
        assert again.status_code == 503
        assert again.json()["error"]["code"] == "replica_died"
        assert again.headers["retry-after"]
        assert time.monotonic() < deadline
    assert again.json()["choices"][0]["text"]
    assert not victim.is_alive()


def test_clients_raise_the_error(service: Callable[[str], Service]) -> None:
    running = service("{}")
    (victim,) = running.replicas()
    options = {name: value for name, value in ENDLESS.items() if name != "ignore_eos"}
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=60) as client:
        stream = client.completions.create(prompt="Once", extra_body={"ignore_eos": True}, **options)
        for _ in range(20):
            assert next(stream).choices
        victim.kill()
        with pytest.raises(openai.APIError, match="died"):
            list(stream)


def test_events_of_either_api_tell_of_a_dead_replica() -> None:
    from ray.exceptions import ActorDiedError

    from llamapipe.ray._ingress import _events

    async def dying() -> AsyncIterator[list[dict[str, Any]]]:
        yield [{"type": "http.response.body", "body": b"data: 2\n\n"}]
        raise ActorDiedError

    async def events(dialect: Dialect) -> list[bytes]:
        first = [{"type": "http.response.body", "body": b"data: 1\n\n"}]
        return [part async for part in _events(first, dying(), dialect)]

    for dialect, head in (("openai", b"data: {"), ("anthropic", b"event: error\ndata: {")):
        first, second, last = asyncio.run(events(dialect))  # type: ignore[arg-type]
        assert (first, second) == (b"data: 1\n\n", b"data: 2\n\n")
        assert last.startswith(head)
        assert b"died" in last


def test_a_client_that_hangs_up_cancels_its_request(service: Callable[[str], Service]) -> None:
    running = service("{}")
    url, body = f"{running.url}/v1/completions", {"prompt": "Once", **ENDLESS}
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert running.gauge("llamapipe_requests_running") == 1
    running.wait(lambda: running.gauge("llamapipe_requests_running") == 0)
    n_before = running.gauge("llamapipe_queue_seconds_count")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json={**body, "stream": False}, timeout=2)
    running.wait(lambda: running.gauge("llamapipe_requests_running") == 0)
    assert running.gauge("llamapipe_queue_seconds_count") == n_before + 1


def test_more_requests_than_may_wait_are_refused(service: Callable[[str], Service]) -> None:
    running = service('{"max_ongoing_requests": 1, "max_queued_requests": 1}')
    url = f"{running.url}/v1/completions"
    with ThreadPoolExecutor(3) as threads:
        with httpx.stream("POST", url, json={"prompt": "Once", **ENDLESS}, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            calls = [
                threads.submit(httpx.post, url, json={"prompt": "Once", **GREEDY}, timeout=120)
                for _ in range(3)
            ]
            running.wait(lambda: sum(call.done() for call in calls) == 2)
        answers = [call.result() for call in calls]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert [answer.status_code for answer in refused] == [429, 429]
    assert refused[0].json()["error"]["code"] == "queue_full"
    assert refused[0].headers["retry-after"]


def test_replicas_are_added_under_load(service: Callable[[str], Service]) -> None:
    running = service(
        '{"replicas": (1, 2), "target_ongoing_requests": 2, '
        '"autoscaling": {"upscale_delay_s": 1, "metrics_interval_s": 1, "look_back_period_s": 2}}'
    )
    assert len(running.replicas()) == 1
    stop = False

    def caller(i: int) -> int:
        n = 0
        while not stop:
            body = {"prompt": f"{i} Once", **GREEDY, "max_tokens": 200}
            n += httpx.post(f"{running.url}/v1/completions", json=body, timeout=120).status_code == 200
        return n

    with ThreadPoolExecutor(8) as threads:
        done = [threads.submit(caller, i) for i in range(8)]
        try:
            running.wait(lambda: len(running.replicas()) == 2)
        finally:
            stop = True
    assert all(future.result() for future in done)
