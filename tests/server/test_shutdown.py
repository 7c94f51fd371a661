"""How a server ends: it closes its port and idle connections, and finishes running requests. So says the guide."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from support.control import PATIENCE_S, Gate, wait_until
from support.fleet_servers import LONG, LongStream, worker_server
from support.server_process import ServerProcess

import llamapipe as lp
from llamapipe.server import serve
from llamapipe.server._inside import InsideAnswer, post
from llamapipe.server.application import app
from llamapipe.server.run import _until_exit

OPTIONS = ("--n-ctx", "2048", "--n-seq-max", "2")


class Idle:
    """A connection that has been answered once and stays open."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        assert address.hostname is not None and address.port is not None
        self._address = (address.hostname, address.port)
        self._connection = HTTPConnection(*self._address, timeout=PATIENCE_S)
        self._connection.request("GET", "/health")
        assert self._connection.getresponse().read().startswith(b'{"status":"ok"')

    def refuses_others(self) -> bool:
        """Returns when the server has closed this connection: whether it then refuses another one."""
        assert self._connection.sock is not None
        assert self._connection.sock.recv(4096) == b""
        try:
            socket.create_connection(self._address, PATIENCE_S).close()
        except ConnectionRefusedError:
            return True
        return False

    def close(self) -> None:
        self._connection.close()


def test_closing_in_python() -> None:
    with (
        lp.Engine(lp.demo_model_path(), n_ctx=2048, n_seq_max=2) as engine,
        serve(engine) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/completions", json=LONG) as answer,
        closing(Idle(server.url)) as idle,
        ThreadPoolExecutor(1) as pool,
    ):
        lines = answer.iter_lines()
        next(lines)
        closed = pool.submit(server.close)
        assert idle.refuses_others()
        assert not closed.done()
        assert list(lines)[-2] == "data: [DONE]"
        closed.result()


def test_who_is_cut_off_is_told(demo: lp.Model) -> None:
    """After a second signal uvicorn cancels what runs, and would answer 500 and log an error for each."""
    parts: list[bytes] = []

    async def take(part: bytes) -> None:
        parts.append(part)

    async def cut(engine: lp.Engine, gate: Gate) -> InsideAnswer:
        application = app(engine)
        asked = asyncio.ensure_future(
            post(application, "/v1/completions", json.dumps({**LONG, "stream": False}).encode(), take)
        )
        await asyncio.to_thread(gate.wait)
        application.state.llamapipe.draining = True
        asked.cancel()
        return await asked

    with lp.Engine(demo, n_ctx=2048, n_seq_max=2) as engine, Gate(engine) as gate:
        assert asyncio.run(cut(engine, gate)) == InsideAnswer(503, True)
    assert json.loads(b"".join(parts))["error"]["code"] == "shutting_down"
    for error, is_shown in ((asyncio.CancelledError(), False), (ValueError(), True)):
        record = logging.makeLogRecord({"exc_info": (type(error), error, None)})
        assert _until_exit(record) is is_shown


def test_sigterm_drains(tmp_path: Path) -> None:
    with (
        ServerProcess(*OPTIONS, cwd=tmp_path) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/completions", json=LONG) as answer,
        closing(Idle(server.url)) as idle,
    ):
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        assert idle.refuses_others()
        assert list(lines)[-2] == "data: [DONE]"


def test_sigterm_to_a_supervisor(tmp_path: Path) -> None:
    with worker_server(1, *OPTIONS, log=tmp_path / "log") as server, closing(Idle(server.url)) as idle:
        stream = LongStream(server)
        server.process.send_signal(signal.SIGTERM)
        wait_until(idle.refuses_others)
        assert stream.finishes()
        assert server.process.wait(PATIENCE_S) == 0


class TestTheLog:
    """A request that its client abandons: the log has the tokens of a stream, and says that it has no others."""

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    @pytest.mark.parametrize("stream", [True, False])
    def test_an_abandoned_request_is_logged(
        self, path: str, stream: bool, demo: lp.Model, caplog: pytest.LogCaptureFixture
    ) -> None:
        prompt = {"prompt": "Once upon"} if path == "/v1/completions" else {"messages": MESSAGES}
        body = json.dumps({**prompt, "max_tokens": 1500, "ignore_eos": True, "stream": stream}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        caplog.set_level("INFO", logger="llamapipe.server")
        with lp.Engine(demo, n_ctx=2048, n_seq_max=1) as engine, serve(engine) as server:
            with socket.create_connection((server.host, server.port), PATIENCE_S) as client:
                client.sendall(head + body)
                if stream:
                    said = client.recv(1000)
                    assert said.startswith(b"HTTP/1.1 200")
                    while b"data: " not in said:
                        said += client.recv(1000)
                else:
                    wait_until(lambda: engine.stats().n_completion_tokens > 3)
            wait_until(lambda: [record for record in caplog.records if record.name == "llamapipe.server"])
        (line,) = [record.getMessage() for record in caplog.records if record.name == "llamapipe.server"]
        counts = dict(word.split("=") for word in line.split() if "=" in word)
        if stream:
            assert f"POST {path} 200 " in line
            assert int(counts["n_prompt_tokens"]) > 1
            assert int(counts["n_completion_tokens"]) > 0
        else:
            assert f"POST {path} 499 " in line
            assert (counts["n_prompt_tokens"], counts["n_completion_tokens"]) == ("-", "-")


MESSAGES = [{"role": "user", "content": "Tell me a story."}]
