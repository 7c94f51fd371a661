"""Pages of other sites: what their browsers send is refused before anything of it is read, and computed never."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from support.front_server import KINDS, Served, Starter, starter

import llamapipe as lp
from llamapipe.server import ServerSettings

ASK = {"prompt": "Once", "max_tokens": 2}
EVIL = "https://evil.example"
ROUTES = [
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/v1/messages"), ("POST", "/tokenize"),
    ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/health"), ("GET", "/"), ("GET", "/page/api.js"),
    ("GET", "/no/such"), ("DELETE", "/v1/models/demo"), ("OPTIONS", "/v1/completions"),
]  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def start(request: pytest.FixtureRequest, demo: lp.Model) -> Iterator[Starter]:
    """A server with one model, and the front process of several."""
    with starter(request.param, demo, n_ctx=512, n_seq_max=4) as start:
        yield start


def client_of(server: Served) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"authorization": "Bearer k"}, timeout=60)


@contextmanager
def served(start: Starter, **settings: Any) -> Iterator[httpx.Client]:
    """A client of a server with a key: a page is refused before the key is checked."""
    with start(**{"api_keys": ("k",), **settings}) as server, client_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def server(start: Starter) -> Iterator[Served]:
    with start(api_keys=("k",)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[httpx.Client]:
    with client_of(server) as client:
        yield client


def post(client: httpx.Client, **headers: str) -> httpx.Response:
    """A request for a completion; ``None`` as a value leaves out a header."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.post("/v1/completions", json=ASK, headers=sent)


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": EVIL},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"host": "evil.example"},
        {"host": "evil.example:8080", "origin": "http://evil.example:8080", "sec-fetch-site": "same-origin"},
    ],
    ids=str,
)
def test_a_foreign_page(
    client: httpx.Client, server: Served, method: str, path: str, headers: dict[str, str]
) -> None:
    """On every route, known or not, with the right key and with none."""
    n_before = server.n_prompt_tokens()
    for key in ({}, {"authorization": ""}):
        answer = client.request(method, path, headers={**headers, **key}, json=ASK)
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
        assert answer.json()["error"]["type"] == "permission_error"
        assert answer.headers["x-request-id"]
    assert server.n_prompt_tokens() == n_before


def answered(start: Starter, headers: list[tuple[bytes, bytes]]) -> int:
    """The status of a request with these headers, whose body may not be read."""
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("the body was read")

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "http_version": "1.1",
        "headers": headers, "server": ("127.0.0.1", 80), "root_path": "", "scheme": "http",
    }  # fmt: skip
    asyncio.run(start.application()(scope, receive, send))
    status: int = sent[0]["status"]
    return status


def test_the_body_is_not_read(start: Starter) -> None:
    """The refusal comes before the body, not after."""
    assert answered(start, [(b"host", b"localhost"), (b"origin", EVIL.encode())]) == 403
    assert answered(start, [(b"host", b"localhost"), (b"origin", b"http://localhost")]) == 415


def test_two_hosts_or_origins(start: Starter) -> None:
    """Programs between client and server may read another one than this server."""
    two = [(b"host", b"localhost"), (b"host", b"evil.example")]
    assert answered(start, two) == answered(start, two[::-1]) == 400
    origins = [(b"host", b"localhost"), (b"origin", b"http://localhost"), (b"origin", EVIL.encode())]
    assert answered(start, origins) == 403


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000", "https://localhost", "http://127.0.0.1:5173", "http://[::1]:9", "http://app.localhost",
        "vscode-webview://1d2f", "vscode-file://vscode-app", "app://obsidian.md", "tauri://localhost", "file://",
        "http://tauri.localhost", "chrome-extension://abcdef", "moz-extension://abcdef",
    ],
)  # fmt: skip
def test_pages_of_this_machine(client: httpx.Client, origin: str) -> None:
    """They may read the answer, errors included, and may ask first."""
    asked = client.options(
        "/v1/completions",
        headers={
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
            "access-control-request-private-network": "true",
        },
    )
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == origin
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    assert asked.headers["access-control-allow-private-network"] == "true"
    answer = post(client, origin=origin, sec_fetch_site="cross-site")
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert post(client, origin=origin, authorization="").headers["access-control-allow-origin"] == origin


def test_the_servers_own_page(client: httpx.Client) -> None:
    host = f"{client.base_url.host}:{client.base_url.port}"
    assert post(client, origin=f"http://{host}", sec_fetch_site="same-origin").status_code == 200
    assert client.get("/", headers={"sec-fetch-site": "none"}).status_code == 200


def test_a_link_to_the_page(client: httpx.Client) -> None:
    """It may be opened from another site, but not in a frame, and nothing else may be."""
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    answer = client.get("/", headers=link)
    assert answer.status_code == 200
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["cross-origin-opener-policy"] == "same-origin"
    assert client.get("/", headers={**link, "sec-fetch-dest": "iframe"}).status_code == 403
    assert client.get("/v1/models", headers=link).status_code == 403
    assert client.post("/", headers=link).status_code == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", None])
def test_the_type_of_a_browsers_body(client: httpx.Client, kind: str | None) -> None:
    """Other types need no permission, so any page can send them; curl sends them, too, and is no browser."""
    body = json.dumps(ASK).encode()
    headers = {} if kind is None else {"content-type": kind}
    for browser in ({"origin": "http://localhost:3000"}, {"sec-fetch-site": "same-origin"}):
        answer = client.post("/v1/completions", content=body, headers={**headers, **browser})
        assert answer.status_code == 415
        assert "Content-Type: application/json" in answer.json()["error"]["message"]
    assert client.post("/v1/completions", content=body, headers=headers).status_code == 200


def test_json_with_a_character_set(client: httpx.Client) -> None:
    kind = "Application/JSON; charset=utf-8"
    assert post(client, origin="http://localhost", content_type=kind).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:8080", 200), ("localhost.", 200), ("127.0.0.1:1", 200), ("127.1.2.3", 200),
        ("[::1]:8080", 200), ("a.localhost", 200), ("mymachine", 200), ("0.0.0.0:8080", 200),
        ("host.docker.internal:8080", 200), ("evil.example", 403), ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403), ("192.168.1.5", 403), ("[2001:db8::1]", 403),
    ],
)  # fmt: skip
def test_names_of_a_server_on_loopback(client: httpx.Client, host: str, status: int) -> None:
    answer = client.get("/health", headers={"host": host})
    assert answer.status_code == status
    if status == 403:
        assert "--allow-host" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "host",
    [
        "",
        "127.0.0.1@evil.example",
        "127.0.0.1:80@evil.example",
        "[::1].evil.example",
        "localhost:x",
        "localhost\\x",
    ],
)
def test_what_is_no_name(client: httpx.Client, host: str) -> None:
    answer = client.get("/health", headers={"host": host})
    assert answer.status_code == 403
    assert answer.json()["error"]["message"] == f"the host {host!r} is not a name of this server"
    origin = f"http://{host}"
    assert client.get("/health", headers={"host": "localhost", "origin": origin}).status_code == 403


def test_names_that_are_allowed(start: Starter) -> None:
    with served(start, allow_hosts=("llm.example.org",)) as client:
        for host, status in (("llm.example.org:443", 200), ("evil.example", 403), ("localhost", 200)):
            assert client.get("/health", headers={"host": host}).status_code == status
    with served(start, allow_hosts=("*",)) as client:
        assert client.get("/health", headers={"host": "evil.example"}).status_code == 200


def test_a_server_for_other_machines(start: Starter) -> None:
    """Behind a proxy or in a cluster every name is allowed, until some are named. Its pages may use it, others not."""

    @contextmanager
    def client(**settings: Any) -> Iterator[httpx.Client]:
        with (
            start("0.0.0.0", **settings) as server,
            httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client,
        ):
            yield client

    with client() as open_one:
        assert open_one.get("/health", headers={"host": "llm.svc.cluster.local"}).status_code == 200
        assert post(open_one, host="llm.example", origin="http://llm.example").status_code == 200
        assert post(open_one, host="llm.example", origin=EVIL).status_code == 403
    with client(allow_hosts=("llm.example",)) as named:
        for host, status in (("llm.example", 200), ("10.0.0.7:80", 200), ("evil.example", 403)):
            assert named.get("/health", headers={"host": host}).status_code == status


def test_origins_that_are_allowed(start: Starter) -> None:
    with served(start, cors_origins=("https://chat.example",)) as client:
        answer = post(client, origin="https://chat.example", sec_fetch_site="cross-site")
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert post(client, origin="https://chat.example.evil.example").status_code == 403
        assert post(client, origin="http://chat.example").status_code == 403
    with served(start, cors_origins=("*",)) as client:
        answer = post(client, origin=EVIL, sec_fetch_site="cross-site")
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize("field", ["cors_origins", "allow_hosts"])
@pytest.mark.parametrize("value", ["a b", "chat.example/", "", "http://a.example/path"])
def test_bad_settings(field: str, value: str) -> None:
    options: dict[str, Any] = {field: (value,)}
    with pytest.raises(ValueError, match=field):
        ServerSettings(**options)
