"""Images that requests name by addresses: what is read and fetched, and what a client cannot reach."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from support.control import wait_until
from support.media_models import idefics3_projector, model_with_tile_tokens, png
from support.served import post_json

import llamapipe as lp
from llamapipe.server import ServerSettings, serve
from llamapipe.server._addresses import is_public
from llamapipe.server.requests import media

PNG = png(200, 120)
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


class Host(BaseHTTPRequestHandler):
    """Sends an image, redirects, and misbehaves."""

    protocol_version = "HTTP/1.1"
    other = ""  # the address of a host that is not allowed
    asked: list[str] = []  # noqa: RUF012
    release = threading.Event()

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int = 200, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "content_length" not in headers:
            self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        match self.path.partition("?")[0]:
            case "/a.png":
                self.answer(body=PNG)
            case "/near":
                self.answer(302, location="a.png")
            case "/loop":
                self.answer(302, location="/loop")
            case "/far":
                self.answer(302, location=f"{type(self).other}/secret.png")
            case "/elsewhere":
                self.answer(302, location=self.path.partition("?")[2])
            case "/long":
                self.answer(content_length=str(2**40))
            case "/endless":
                self.send_response(200)
                self.end_headers()
                self.close_connection = True
                try:
                    while True:
                        self.wfile.write(bytes(2**16))
                except OSError:
                    pass
            case "/short":
                self.answer(body=PNG[:50], content_length=str(len(PNG)))
                self.close_connection = True
            case "/packed":
                self.answer(body=b"x", content_encoding="gzip")
            case "/slow":
                self.send_response(200)
                self.send_header("content-length", "1000")
                self.end_headers()
                self.wfile.flush()
                type(self).release.wait()
            case "/text":
                self.answer(body=b"no image")
            case _:
                self.answer(404)


class Secret(Host):
    """A host that no client may reach."""

    asked: list[str] = []  # noqa: RUF012


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, str]]:
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), kind) for kind in (Host, Secret)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    first, second = (f"127.0.0.1:{server.server_address[1]}" for server in servers)
    Host.other = f"http://{second}"
    yield first, second
    Host.release.set()
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("addresses") / "images"
    (folder / "deep").mkdir(parents=True)
    for name in ("a.png", "deep/b c.png", "../secret.png"):
        (folder / name).write_bytes(PNG)
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    os.mkfifo(folder / "pipe.png")
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Engine]:
    place = tmp_path_factory.mktemp("model")
    idefics3_projector(place / "mmproj.gguf")
    with (
        lp.Model(model_with_tile_tokens(place / "text.gguf")) as model,
        lp.Engine(model, n_ctx=512, n_seq_max=4) as engine,
    ):
        yield engine


@pytest.fixture(scope="module")
def server(engine: lp.Engine, hosts: tuple[str, str], folder: Path) -> Iterator[str]:
    port = hosts[0].partition(":")[2]
    settings = ServerSettings(
        model_names=("m",),
        media_path=folder,
        media_urls=(hosts[0], f"localhost:{port}", "no-such-host.invalid"),
        max_body_bytes=2**20,
    )
    with serve(engine, settings=settings) as server:
        yield server.url
        engine.check_integrity()


def ask(url: str, *addresses: str) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": address}} for address in addresses]
    content = [*parts, {"type": "text", "text": "What is this?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}
    return post_json(url, "/v1/chat/completions", body)


def problem(url: str, address: str) -> str:
    answer = ask(url, address)
    assert answer.get("status") == 400, answer
    return str(answer["error"]["message"])


def test_addresses_of_an_allowed_host(server: str, hosts: tuple[str, str]) -> None:
    expected = ask(server, URL)["usage"]["prompt_tokens"]
    for path in ("a.png", "near", "a.png?x=1#y"):
        answer = ask(server, f"http://{hosts[0]}/{path}")
        assert answer["usage"]["prompt_tokens"] == expected, answer
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > expected // 2
    source = {"type": "url", "url": f"http://{hosts[0]}/a.png"}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
    answer = post_json(
        server, "/v1/messages", {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    )
    assert answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] == expected
    before = len(Host.asked)
    assert ask(server, *[f"http://{hosts[0]}/a.png"] * 3)["usage"]["prompt_tokens"] > 2 * expected
    assert len(Host.asked) == before + 1


def test_what_is_not_fetched(server: str, hosts: tuple[str, str]) -> None:
    first, second = hosts
    port = first.partition(":")[2]
    refused = {
        f"http://{second}/secret.png": "nothing is fetched from",
        f"http://{first}/far": "nothing is fetched from",
        f"http://{first}/elsewhere?file:///etc/hostname": "only http://HOST",
        f"http://{first}/elsewhere?ftp://{first}/a.png": "only http://HOST",
        f"http://{first}/elsewhere?http://localhost:{port}/a.png": "address of a private network",
        f"http://localhost:{port}/a.png": "address of a private network",
        "http://127.0.0.1/a.png": "nothing is fetched from",
        f"http://user:word@{first}/a.png": "without a user",
        f"http://{first}@{second}/a.png": "without a user",
        f"http://{first}/loop": "redirected more than 3 times",
        f"http://{first}/none": "answers 404",
        f"http://{first}/long": "has more than 1048576 bytes",
        f"http://{first}/endless": "has more than 1048576 bytes",
        f"http://{first}/short": "the connection ended early",
        f"http://{first}/packed": "sends it compressed",
        f"http://{first}/text": "cannot be decoded",
        f"http://{first}/a b.png": "control characters or spaces",
        "http://no-such-host.invalid/a.png": "cannot be fetched",
        "http://127.0.0.1:99999/a.png": "cannot be fetched",
        "http://[::1/a.png": "cannot be fetched",
        "https://": "only http://HOST",
    }  # fmt: skip
    for address, reason in refused.items():
        assert reason in problem(server, address), address
    assert not Secret.asked
    many = ask(server, *(f"http://{first}/a.png?{i}" for i in range(33)))
    assert "33 addresses; at most 32" in many["error"]["message"]


def test_a_host_that_stays_silent(
    server: str, hosts: tuple[str, str], engine: lp.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "MOST_SECONDS", 0.5)
    began = monotonic()
    asked = [threading.Thread(target=ask, args=(server, f"http://{hosts[0]}/slow")) for _ in range(4)]
    for thread in asked:
        thread.start()
    with engine.stream("Once", lp.SamplingParams(max_tokens=50, ignore_eos=True)) as stream:
        assert sum(len(delta.token_ids) for delta in stream) == 50
    assert "did not send all of it within 0.5 s" in problem(server, f"http://{hosts[0]}/slow")
    for thread in asked:
        thread.join()
    assert monotonic() - began < 30


def test_another_client_beside_many_slow_addresses(engine: lp.Engine, hosts: tuple[str, str]) -> None:
    """Its fetch waits for none of the others."""
    settings = ServerSettings(model_names=("m",), media_urls=(hosts[0],), api_keys=("a", "b"))

    def send(url: str, key: str, path: str) -> HTTPConnection:
        part = {"type": "image_url", "image_url": {"url": f"http://{hosts[0]}/{path}"}}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1, "model": "m"}
        connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        return connection

    with serve(engine, settings=settings) as server:
        before = len(Host.asked)
        asked = [send(server.url, "a", f"slow?{i}") for i in range(64)]
        wait_until(lambda: len(Host.asked) >= before + 4)
        connection = send(server.url, "b", "a.png?b")
        assert connection.getresponse().status == 200
        slow = [path for path in Host.asked[before:] if path.startswith("/slow")]
        assert len(slow) == 4  # as many as one client fetches at a time, none of which has ended
        for sock in (connection, *asked):
            sock.close()


def test_files_of_a_folder(server: str, folder: Path) -> None:
    expected = ask(server, URL)["usage"]["prompt_tokens"]
    for address in ("file://a.png", f"file://{folder}/a.png", "file://deep/b%20c.png", "FILE:a.png"):
        assert ask(server, address)["usage"]["prompt_tokens"] == expected, address
    for address in (
        "file://../secret.png", "file://link.png", "file://pipe.png", "file://deep", "file://%2e%2e/secret.png",
        f"file://{folder}/../secret.png", "file:///etc/hostname", "file:///dev/zero", "file://a.png%00", "file://",
    ):  # fmt: skip
        message = problem(server, address)
        assert "is not a file in the folder of --media-path" in message
        assert str(folder.parent) not in message.replace(address[:80], "")  # what is shown of it


def test_a_server_that_allows_nothing(engine: lp.Engine) -> None:
    with serve(engine, settings=ServerSettings(model_names=("m",))) as server:
        assert "no address is fetched by this server (--media-url HOST)" in problem(
            server.url, "http://127.0.0.1/a"
        )
        assert "this server reads no files" in problem(server.url, "file:///etc/hostname")


def test_a_text_model_says_that_it_takes_no_images(make_engine: Any, demo: lp.Model) -> None:
    settings = ServerSettings(model_names=("m",))
    with serve(make_engine(demo, n_ctx=256), settings=settings) as server:
        assert "only text is supported" in problem(server.url, "http://127.0.0.1/a")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True), ("2606:4700:4700::1111", True), ("127.0.0.1", False), ("10.1.2.3", False),
        ("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False), ("::1", False),
        ("::ffff:10.0.0.1", False), ("::ffff:8.8.8.8", True), ("64:ff9b::a00:1", False), ("2002:a00:1::", False),
        ("fe80::1%eth0", False), ("fd00::1", False), ("ff02::1", False), ("255.255.255.255", False),
    ],
)  # fmt: skip
def test_private_networks_are_not_public(address: str, expected: bool) -> None:
    assert is_public(address) is expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"media_urls": ("*",)}, "is not a host"),
        ({"media_urls": ("http://host/",)}, "is not a host"),
        ({"media_urls": "host"}, "sequence"),
        ({"media_path": "/nowhere"}, "is not a folder"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ServerSettings(**settings)
