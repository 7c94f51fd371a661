"""MCP servers that clients name by addresses: which are reached, what they are told, what a client cannot reach."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import openai
import pytest
from support.control import wait_until
from support.mcp_agent import GOOD, OPTIONS, Agent, http_server

TOKEN = "a-secret-token"


class Host(BaseHTTPRequestHandler):
    """Notes what it is asked, and redirects or answers without an end."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[tuple[str, str, dict[str, str]]]] = []
    target = ""

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", "0")))
        type(self).asked.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
        if self.path == "/endless":
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.close_connection = True
            try:
                while True:
                    self.wfile.write(b" " * 2**20)
            except OSError:
                return
        self.send_response(307 if self.path == "/redirect" else 404)
        if self.path == "/redirect":
            self.send_header("location", type(self).target)
        self.send_header("content-length", "0")
        self.end_headers()

    do_GET = do_POST  # noqa: N815
    do_DELETE = do_POST  # noqa: N815


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with http_server(tmp_path_factory.mktemp("http")) as address:
        yield address


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory, address: str, host: str) -> Iterator[Agent]:
    port = urlsplit(address).port
    hosts = (f"127.0.0.1:{port}", f"localhost:{port}", host)
    folder = tmp_path_factory.mktemp("agent")
    calls: Any = [("add", {"a": 2, "b": 3}), ("fail", {})]
    with Agent(folder, calls, mcp_urls=hosts, store=folder / "store.db") as agent:
        yield agent


def remote(url: str, **more: Any) -> Any:
    return {"type": "mcp", "server_label": "far", "server_url": url, "require_approval": "never", **more}


def refused(agent: Agent, tool: Any) -> Any:
    with pytest.raises(openai.APIStatusError) as caught:
        agent.client.responses.create(**OPTIONS, tools=[tool])
    return caught.value


def test_a_server_at_an_address(agent: Agent, address: str) -> None:
    response = agent.client.responses.create(**OPTIONS, tools=[remote(address)])
    calls = [item for item in response.output if item.type == "mcp_call"]
    assert [(call.server_label, call.name, call.output) for call in calls] == [
        ("far", "add", "5"),
        ("far", "fail", None),
    ]
    both = agent.client.responses.create(**OPTIONS, tools=[remote(address), GOOD], max_output_tokens=1)
    assert [item.server_label for item in both.output if item.type == "mcp_list_tools"] == ["far", "good"]


def test_what_a_client_tells_its_server_is_not_shown(agent: Agent, host: str) -> None:
    """Not in the answer, not in what is stored, not in the events."""
    Host.asked.clear()
    tool = remote(f"http://{host}/mcp", authorization=TOKEN, headers={"x-more": "yés"})
    error = refused(agent, tool)
    assert error.status_code == 424
    assert {(asked["authorization"], asked["x-more"]) for _, _, asked in Host.asked} == {
        (f"Bearer {TOKEN}", "yés")
    }
    assert all(asked["host"] == host for _, _, asked in Host.asked)
    options = {**OPTIONS, "store": True, "stream": True}
    events = [event.to_json() for event in agent.client.responses.create(**options, tools=[tool])]
    (stored,) = {json.loads(event)["response"]["id"] for event in events if "response.failed" in event}
    shown = [*events, agent.client.responses.retrieve(stored).to_json()]
    assert not [text for text in shown if TOKEN in text or "x-more" in text]
    assert all("far" in text for text in shown[-2:])


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://127.0.0.1:9/mcp", "nothing is fetched from '127.0.0.1:9' (--mcp-url HOST)"),
        ("https://me.example/mcp", "nothing is fetched from"),
        ("ftp://{host}/mcp", "only http://HOST/… and https://HOST/…"),
        ("http://me:secret@{host}/mcp", "without a user"),
        ("http://{host}/a b", "control characters or spaces"),
        ("http://{host}/mcp\n", "control characters or spaces"),
        ("http://[/mcp", "Invalid IPv6 URL"),
    ],
)
def test_other_addresses(agent: Agent, host: str, url: str, problem: str) -> None:
    Host.asked.clear()
    error = refused(agent, remote(url.replace("{host}", host)))
    assert (error.status_code, error.param) == (400, "tools.0.server_url")
    assert problem in error.message
    assert not Host.asked


def test_a_name_of_a_private_network(agent: Agent, address: str) -> None:
    """The operator has listed it, and a name never means an address of this machine."""
    error = refused(agent, remote(address.replace("127.0.0.1", "localhost")))
    assert (error.status_code, error.code) == (424, "mcp_list_tools_failed")
    assert "its host has an address of a private network" in error.message


def test_a_name_that_means_another_address_a_moment_later(
    agent: Agent, host: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection goes to the address that was checked; nobody asks for the name again."""
    port = urlsplit(address).port
    asked = []
    real = socket.getaddrinfo

    def resolve(name: str, *arguments: Any, **options: Any) -> list[Any]:
        if name != "localhost":
            return real(name, *arguments, **options)
        asked.append(name)
        where = "93.184.216.34" if len(asked) == 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (where, port))]

    connected = []

    async def connect(self: Any, request: Any) -> Any:
        connected.append((request.url.host, request.headers["host"], request.extensions["sni_hostname"]))
        raise ConnectionError("far away")

    import httpx2

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", connect)
    error = refused(agent, remote(f"http://localhost:{port}/mcp"))
    assert error.status_code == 424
    assert connected[0] == ("93.184.216.34", f"localhost:{port}", "localhost")
    assert {name for name, _, _ in connected} == {"93.184.216.34"}


@pytest.mark.parametrize("where", ["http://127.0.0.1:9/mcp", "http://169.254.169.254/latest", "/mcp"])
def test_redirects(agent: Agent, host: str, where: str) -> None:
    """They stay within the host."""
    Host.asked.clear()
    Host.target = where
    error = refused(agent, remote(f"http://{host}/redirect"))
    assert error.status_code == 424
    paths = {path for _, path, _ in Host.asked}
    assert paths == ({"/redirect", "/mcp"} if where == "/mcp" else {"/redirect"})


def test_an_answer_without_an_end(agent: Agent, host: str) -> None:
    error = refused(agent, remote(f"http://{host}/endless"))
    assert error.status_code == 424
    assert "sends more than 67108864 bytes" in error.message


@pytest.mark.parametrize(
    ("more", "field", "problem"),
    [
        ({"headers": {"host": "other"}}, "headers", "is not the client's"),
        ({"headers": {"Mcp-Session-Id": "other"}}, "headers", "is not the client's"),
        ({"headers": {"x": "a\r\nb: c"}}, "headers", "names and texts"),
        ({"headers": {"x y": "a"}}, "headers", "names and texts"),
        ({"headers": {"x": 1}}, "headers", "names and texts"),
        ({"headers": ["x"]}, "headers", "names and texts"),
        ({"authorization": 1}, "authorization", "must be a token"),
        ({"authorization": "a\nb"}, "authorization", "must be a token"),
        ({"server_label": "a b"}, "server_label", "at most 64"),
        ({"server_url": 1}, "server_url", "must be text"),
    ],
)
def test_wrong_fields(agent: Agent, address: str, more: Any, field: str, problem: str) -> None:
    error = refused(agent, {**remote(address), **more})
    assert (error.status_code, error.param) == (400, f"tools.0.{field}")
    assert problem in error.message


def test_too_many_servers(agent: Agent, address: str) -> None:
    tools = [{**remote(address), "server_label": f"far{i}"} for i in range(33)]
    with pytest.raises(openai.BadRequestError, match="there are 33 MCP servers; the limit is 32"):
        agent.client.responses.create(**OPTIONS, tools=tools)


def test_the_connection_ends_with_the_answer(agent: Agent, address: str, tmp_path: Path) -> None:
    remotes = agent.server._server.state.mcp_remote  # type: ignore[attr-defined]
    agent.client.responses.create(**OPTIONS, tools=[remote(address)])
    agent.client.responses.input_tokens.count(model="turns", input="Go.", tools=[remote(address)])
    refused(agent, {**remote(address), "allowed_tools": ["none"]} | {"require_approval": "x"})
    wait_until(lambda: "RemoteServers 0" in repr(remotes))
