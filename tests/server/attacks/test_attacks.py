"""Attacks on the server's connections: each one gets an answer or its end, and others are served meanwhile."""

from __future__ import annotations

import gc
import gzip
import json
import os
import resource
import socket
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from select import select
from typing import Any

import httpx
import pytest
from support.control import PATIENCE_S, wait_until
from support.front_server import KINDS, Served, Starter, starter

import llamapipe as lp
from llamapipe.host.memory import resident_bytes
from llamapipe.server.body_budget import BodyBudget

KEY = "secret"
CHUNKED = "Transfer-Encoding: chunked"
BODY = json.dumps({"prompt": "Once", "max_tokens": 2, "temperature": 0}).encode()


@pytest.fixture(scope="module", params=KINDS)
def start(request: pytest.FixtureRequest, demo: lp.Model) -> Iterator[Starter]:
    """A server with one model, and the front process of several."""
    with starter(request.param, demo, n_ctx=512, n_seq_max=4) as start:
        yield start


@pytest.fixture(scope="module")
def server(start: Starter) -> Iterator[Served]:
    """With a key, which no attack has, and short times."""
    with start(api_keys=(KEY,), head_timeout_s=1.0, body_timeout_s=1.0, max_requests=4) as server:
        yield server


def connected(server: Served) -> socket.socket:
    return socket.create_connection((server.host, server.port), PATIENCE_S)


def read(client: socket.socket) -> bytes:
    """What the server says until it ends the connection."""
    said = b""
    with suppress(ConnectionError):
        while part := client.recv(65536):
            said += part
    return said


def answer(server: Served, data: bytes) -> bytes:
    with connected(server) as client:
        with suppress(ConnectionError):
            client.sendall(data)
        return read(client)


def post(version: str = "1.1", *fields: str, body: bytes = BODY, path: str = "/v1/completions") -> bytes:
    length = (
        []
        if any("Length" in field or "Transfer" in field for field in fields)
        else [f"Content-Length: {len(body)}"]
    )
    lines = [
        f"POST {path} HTTP/{version}",
        "Host: localhost",
        f"Authorization: Bearer {KEY}",
        *length,
        *fields,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def is_healthy(server: Served) -> bool:
    return httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200


def test_a_head_without_end(server: Served) -> None:
    """It is refused at 64 KiB, before a key could be checked, and its client still reads why."""
    with connected(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: ")
        with suppress(ConnectionError):
            for _ in range(1600):
                client.sendall(b"a" * 65536)
        assert read(client).startswith(b"HTTP/1.1 431 ")
    assert is_healthy(server)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 65536 + b"\r\n\r\n",
        b"GET /health?" + b"a" * 65536 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\r\n" * 40_000,
    ],
    ids=["fields", "a field", "a path", "line ends"],
)
def test_a_head_too_large(server: Served, head: bytes) -> None:
    said = answer(server, head)
    assert said.startswith(b"HTTP/1.1 431 ")
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_head_just_small_enough(server: Served) -> None:
    fields = b"".join(b"a%d: %b\r\n" % (i, b"b" * 300) for i in range(197))
    said = answer(
        server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + fields + b"\r\n"
    )
    assert said.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "first", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["new", "used"]
)
def test_unfinished_heads_time_out(server: Served, first: bytes) -> None:
    """Each one has its time, whatever the connection did before; /health answers meanwhile."""
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(server)) for _ in range(100)]
        for client in clients:
            client.sendall(first + b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nA")
        assert is_healthy(server)
        for client in clients:
            assert b"HTTP/1.1 408 " in read(client)


def test_a_connection_without_a_request_is_closed(server: Served) -> None:
    with connected(server) as client:
        assert read(client) == b""


def test_a_head_that_comes_byte_by_byte(server: Served) -> None:
    """Its time does not begin again with each byte."""
    with connected(server) as client:
        client.settimeout(0.05)
        said = b""
        with suppress(ConnectionError):
            for _ in range(1000):
                client.sendall(b"G")
                with suppress(TimeoutError):
                    said += client.recv(1000)
                if said:
                    break
        assert said == b"" or said[:12] in (b"HTTP/1.1 408", b"HTTP/1.1 400")


def test_slow_bodies_lock_nobody_out(server: Served) -> None:
    """Far more than requests may be served: others are served meanwhile."""
    head = post("1.1", "Content-Length: 100", body=b"{")
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(server)) for _ in range(200)]
        for client in clients:
            client.sendall(head)
        assert answer(server, post("1.1", "Connection: close")).startswith(b"HTTP/1.1 200 ")
        assert is_healthy(server)
        for client in clients:
            assert read(client).startswith(b"HTTP/1.1 408 ")


def test_many_large_bodies(start: Starter) -> None:
    """The largest one is refused, small ones pass, and the memory is free again."""
    with start(max_bodies_bytes=2**20, max_body_bytes=2**24) as server, ExitStack() as stack:
        clients = [stack.enter_context(connected(server)) for _ in range(4)]
        for client in clients:
            client.sendall(post("1.1", f"Content-Length: {2**23}", body=b" " * 500_000))
        refused = [stack.enter_context(connected(server))]
        refused[0].sendall(post("1.1", f"Content-Length: {2**23}", body=b" " * 1_200_000))
        said = read(refused[0])
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in said
        assert answer(server, post("1.1", "Connection: close")).startswith(b"HTTP/1.1 200 ")
        for client in clients:
            client.close()
        wait_until(lambda: "0 of" in repr(server.state.bodies))


def test_bodies_count_until_they_are_answered(start: Starter) -> None:
    """One that waits for a long answer is refused for the sake of others, if all together are too large."""
    body = json.dumps({"prompt": "Once", "max_tokens": 500, "n": 100, "ignore_eos": True}).encode()
    with (
        start(max_bodies_bytes=2**20, max_body_bytes=2**24) as server,
        connected(server) as first,
        connected(server) as second,
    ):
        first.sendall(post("1.1", "Connection: close", body=body + b" " * 900_000))
        wait_until(lambda: server.n_active() == 4)
        second.sendall(post("1.1", f"Content-Length: {2**23}", body=b" " * 500_000))
        said = read(first)
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"requests without an answer have more than 1048576 bytes" in said
        second.close()
        wait_until(lambda: "0 of" in repr(server.state.bodies))
        wait_until(lambda: server.n_active() == 0)


def test_bodies_that_end_early_leave_no_memory(start: Starter) -> None:
    """Not even until the next garbage collection, whether the client hangs up or is refused."""
    rest = b" " * (7 * 2**20)
    length = f"Content-Length: {2**23}"
    chunk = b"%x\r\n%b\r\n" % (len(rest), rest)

    def send(n: int, fields: str, body: bytes) -> list[socket.socket]:
        clients = [stack.enter_context(connected(server)) for _ in range(n)]
        for client in clients:
            with suppress(ConnectionError):
                client.sendall(post("1.1", fields, body=body))
        return clients

    def is_returned() -> bool:
        return resident_bytes(os.getpid()) < before + 40e6

    settings: dict[str, Any] = {"max_bodies_bytes": 2**25, "max_body_bytes": 2**23, "body_timeout_s": 1.0}
    with start(**settings) as server, ExitStack() as stack:
        gc.collect()
        before = resident_bytes(os.getpid())
        gc.disable()
        try:
            for fields, body in ((length, rest), (CHUNKED, chunk), (CHUNKED, chunk + chunk)):
                clients = send(12, fields, body)
                statuses = {read(client)[9:12] for client in clients}  # too many, too late, too large
                assert statuses & {b"503", b"408", b"413"}
                assert statuses <= {b"503", b"408", b"413", b""}
                clients += send(4, length, rest)
                for client in clients:
                    client.close()
                wait_until(is_returned)
        finally:
            gc.enable()


def encoded(encoding: str, body: bytes) -> bytes:
    """As a client sends it that has applied these encodings, one after the other."""
    for name in encoding.lower().split(","):
        if name.strip() in ("gzip", "x-gzip"):
            body = gzip.compress(body)
        elif name.strip() == "deflate":
            body = zlib.compress(body)
        elif name.strip() == "bare":
            body = zlib.compress(body, wbits=-zlib.MAX_WBITS)
    return body


@pytest.mark.parametrize(
    "encoding",
    ["gzip", "GZIP", "x-gzip", "deflate", "bare", "identity", "gzip, deflate", " deflate,gzip,identity"],
)
@pytest.mark.parametrize("fields", [(), (CHUNKED,)], ids=["a length", "chunks"])
def test_an_encoded_body(server: Served, encoding: str, fields: tuple[str, ...]) -> None:
    body = encoded(encoding, BODY)
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if fields else body
    name = encoding.replace("bare", "deflate")
    said = answer(server, post("1.1", f"Content-Encoding: {name}", "Connection: close", *fields, body=sent))
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b'"text_completion"' in said


def test_streams_of_gzip_that_follow_each_other(server: Served) -> None:
    half = len(BODY) // 2
    body = gzip.compress(BODY[:half]) + gzip.compress(BODY[half:])
    said = answer(server, post("1.1", "Content-Encoding: gzip", "Connection: close", body=body))
    assert said.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "encoding", ["br", "compress", "gzip, br", "aes128gcm", "*", "gzip, gzip, gzip, gzip"]
)
def test_an_encoding_that_is_unknown(server: Served, encoding: str) -> None:
    """It is refused before the body is read; a body that was not sent needs no decoder."""
    said = answer(server, post("1.1", f"Content-Encoding: {encoding}", "Content-Length: 100", body=b""))
    assert said.startswith(b"HTTP/1.1 415 ")
    assert b"accept-encoding: gzip, " in said
    assert b"Content-Encoding: " in said
    get = f"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: {encoding}\r\nConnection: close\r\n\r\n"
    assert answer(server, get.encode()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", BODY),
        ("deflate", BODY),
        ("gzip", gzip.compress(BODY)[:-9]),
        ("gzip", gzip.compress(BODY) + b"x"),
        ("gzip", gzip.compress(BODY)[:-8] + b"x" * 8),
        ("deflate", gzip.compress(BODY)),
        ("gzip", gzip.compress(b"") * 2000),
        ("gzip, gzip", gzip.compress(BODY)),
    ],
    ids=range(8),
)
def test_a_damaged_encoding(server: Served, encoding: str, body: bytes) -> None:
    said = answer(server, post("1.1", f"Content-Encoding: {encoding}", "Connection: close", body=body))
    assert said.startswith(b"HTTP/1.1 400 ")
    assert b"the body is not what Content-Encoding: gzip says" in said or b"deflate says" in said


def test_bodies_that_grow(start: Starter) -> None:
    """The limits count what they become: of each, and of all together."""
    bomb = gzip.compress(b" " * 2**26)
    with start(max_bodies_bytes=2**21, max_body_bytes=2**20) as server:
        for encoding in ("gzip", "gzip, gzip"):
            body = encoded("gzip", bomb) if "," in encoding else bomb
            said = answer(
                server, post("1.1", f"Content-Encoding: {encoding}", "Connection: close", body=body)
            )
            assert said.startswith(b"HTTP/1.1 413 ")
            assert b"the decoded body has more than 1048576 bytes" in said
        wait_until(lambda: "0 of" in repr(server.state.bodies))
        body = gzip.compress(BODY + b" " * 2**19)
        said = answer(server, post("1.1", "Content-Encoding: gzip", "Connection: close", body=body))
        assert said.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "text", [rb"\ud83d", rb"\udc00", rb"a\ud83db", rb"\ud83d\ud83d\ude00", rb"\\\ud83d", b"\xed\xa0\xbd"]
)
def test_half_a_character(server: Served, text: bytes) -> None:
    for path, body in {
        "/v1/completions": b'{"prompt": "%b", "max_tokens": 1, "echo": true}',
        "/v1/chat/completions": b'{"messages": [{"role": "user", "content": "%b"}], "max_tokens": 1}',
        "/tokenize": b'{"prompt": "%b"}',
        "/v1/responses": b'{"input": "%b", "max_output_tokens": 1}',
        "/v1/messages": b'{"model": "demo", "messages": [{"role": "user", "content": "%b"}], "max_tokens": 1}',
    }.items():
        said = answer(server, post("1.1", "Connection: close", path=path, body=body % text))
        assert said.startswith(b"HTTP/1.1 200 "), said
        if "echo" in str(body):
            assert "\N{REPLACEMENT CHARACTER}".encode() in said


def test_a_transfer_encoding_that_nobody_decodes(server: Served) -> None:
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    for name, status in (("chunked", b"200"), ("gzip, chunked", b"501")):
        said = answer(server, post("1.1", "Connection: close", f"Transfer-Encoding: {name}", body=chunks))
        assert said.startswith(b"HTTP/1.1 %b " % status), said
    assert b"'gzip'; use Content-Encoding" in said


def test_a_head_that_is_too_large_is_the_client_s_fault(server: Served) -> None:
    said = answer(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 300 + b"\r\n")
    assert said.startswith(b"HTTP/1.1 431 ") and b'"type":"invalid_request_error"' in said


def test_a_byte_order_mark(server: Served) -> None:
    for n in (1, 2, 5000):
        said = answer(server, post("1.1", "Connection: close", body=BOM_UTF8 * n + BODY))
        assert said.startswith(b"HTTP/1.1 200 "), said
    said = answer(server, post("1.1", "Connection: close", body=BOM_UTF8))
    assert said.startswith(b"HTTP/1.1 400 "), said


def test_the_client_with_most_bytes_is_refused() -> None:
    refused: list[str] = []

    def hold(client: str) -> Any:
        return budget.hold(client, lambda: refused.append(client))

    budget = BodyBudget(1_000_000)
    few = hold("few")
    few.grow(600_000)
    many = [hold("many") for _ in range(20)]
    for share in many:
        share.grow(100_000)
    assert set(refused) == {"many"} or refused[0] == "few"
    hold("other").grow(60_000)
    for share in (few, *many):
        share.release()
        share.release()
    assert repr(budget) == "<BodyBudget 0 of 1000000 bytes>"


def test_a_refused_client_reads_why(server: Served) -> None:
    """It goes on sending; a connection that is closed at once would lose the answer."""
    large = b" " * 2**23
    for fields, status in ((("Content-Length: 99999999",), b"413"), ((), b"401")):
        data = post("1.1", *fields, body=large)
        if status == b"401":
            data = data.replace(KEY.encode(), b"wrong", 1)
        said = answer(server, data)
        assert said.startswith(b"HTTP/1.1 " + status)
        assert b"connection: close" in said


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("protocol", ["h2c", "websocket", "TLS/1.2"])
def test_another_protocol_is_offered(server: Served, protocol: str, is_split: bool) -> None:
    """As Java's HttpClient and ``curl --http2`` do: the answer is in HTTP/1.1, and the body counts."""
    offer = (
        f"Upgrade: {protocol}",
        "Connection: Upgrade, HTTP2-Settings",
        "HTTP2-Settings: AAEAAEAAAAIAAAAA",
    )
    head, _, body = post("1.1", *offer).partition(b"\r\n\r\n")
    last = post("1.1", "Connection: close")
    with connected(server) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if is_split:
            client.sendall(head + b"\r\n\r\n")
            client.sendall(body[:5])
            client.sendall(body[5:] + last)
        else:
            client.sendall(head + b"\r\n\r\n" + body + last)
        said = read(client)
    assert said.count(b"HTTP/1.1 200 ") == 2
    assert said.count(b'"text_completion"') == 2


def test_a_client_of_http_1_0(server: Served) -> None:
    """No chunks, and the connection ends with the answer."""
    streamed = json.dumps({"prompt": "Once", "max_tokens": 2, "stream": True}).encode()
    for body in (BODY, streamed):
        said = answer(server, post("1.0", "Connection: keep-alive", body=body))
        head, _, text = said.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        assert text.startswith(b"data: {" if body is streamed else b"{")
        assert text.endswith(b"data: [DONE]\n\n" if body is streamed else b"}")


def test_several_requests_at_once(server: Served) -> None:
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert answer(server, get * 20 + last).count(b"HTTP/1.1 200 ") == 21
    said = answer(server, get + b"GET /health HTTP/1.1\r\n\r\n")
    assert (said.count(b"HTTP/1.1 200 "), said.count(b"HTTP/1.1 400 ")) in ((1, 1), (1, 0))


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"DELETE /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n",
        post(path="/tokenize", body=b'{"prompt": "Once"}'),
        post(
            "1.1",
            CHUNKED,
            path="/tokenize",
            body=b'9\r\n{"prompt"\r\n9;a=b\r\n: "Once"}\r\n0\r\nA: b\r\n\r\n',
        ),
    ],
    ids=["/health", "HEAD", "404", "401", "405", "a body", "a body in chunks"],
)
def test_answers_that_nobody_takes(server: Served, request_: bytes) -> None:
    """The requests after them are not parsed, and few of their bytes are read; then all are answered in order."""
    with socket.socket() as client:
        client.settimeout(PATIENCE_S)
        # The system's buffers are soon full if they are small, which needs small segments. One that is made smaller
        # after connecting drops what it had promised room for, and TCP sends that again after ever longer times.
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            client.setsockopt(socket.SOL_SOCKET, option, 8192)
        client.connect((server.host, server.port))
        address = client.getsockname()
        wait_until(lambda: any(other.client == address for other in server.limits))
        (connection,) = (other for other in server.limits if other.client == address)
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        many = request_ * 1000
        n_sent = 0
        client.setblocking(False)
        while not (connection.flow.write_paused and connection.flow.read_paused):
            if select([], [client], [], 0.001)[1]:
                n_sent += client.send(many[n_sent % len(request_) :])
        assert len(connection.pipeline) == 0
        assert len(connection._ahead) <= 2**14
        assert connection.transport.get_write_buffer_size() < 1000

        rest = many[n_sent % len(request_) : len(request_)] if n_sent % len(request_) else b""
        rest += b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        said = b""
        while rest:
            ready, free, _ = select([client], [client], [])
            said += client.recv(65536) if ready else b""
            rest = rest[client.send(rest) :] if free else rest
        client.settimeout(PATIENCE_S)
        said += read(client)
    n_requests = -(-n_sent // len(request_))
    assert said.count(b"HTTP/1.1 ") == n_requests + 1
    assert said.count(said[:13]) == n_requests + (said[9:12] == b"401")
    assert b"HTTP/1.1 401 " in said[-500:]  # the last one, which has no key


@pytest.mark.parametrize(
    "data",
    [
        post(
            "1.1",
            "Content-Length: 4",
            CHUNKED,
            body=b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        ),
        post("1.1", CHUNKED, "Content-Length: 4", body=b"0\r\n\r\n"),
        post("1.1", "Content-Length: 4", "Content-Length: 5", body=b"hello"),
        post("1.1", "Content-Length: +5", body=b"hello"),
        post("1.1", "Transfer-Encoding: xchunked", body=b"0\r\n\r\n"),
        post("1.1", "Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n"),
        post("1.1", CHUNKED, body=b"zz\r\nhello\r\n0\r\n\r\n"),
        post("1.1", CHUNKED, body=b"-1\r\nhello\r\n0\r\n\r\n"),
        post("1.1", CHUNKED, body=b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n"),
        post("1.1", CHUNKED, body=b"5\r\nhelloworld\r\n0\r\n\r\n"),
        post(
            "1.1", CHUNKED, body=b"".join(b"1;%b\r\n \r\n" % (b"a" * 4000) for _ in range(60)) + b"0\r\n\r\n"
        ),
        post("1.1", CHUNKED, body=b"0\r\n" + b"a: b\r\n" * 300 + b"\r\n"),
        post("1.1", CHUNKED, body=b"0\r\na: " + b"b" * 300_000),
        post("1.1", "Content-Length : 5", body=b"hello"),
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: b\0c\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: b\r\n c\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: localhost\n\n",
        b"GET /health HTTP/3.0\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=range(22),
)
def test_what_is_no_request(server: Served, data: bytes) -> None:
    """One refusal, and nothing after it is taken for another request."""
    n_before = server.n_prompt_tokens()
    said = answer(server, data)
    assert said.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))
    assert said.count(b"\r\ncontent-length: ") == 1
    assert server.n_prompt_tokens() == n_before


def test_tunnels_are_refused(server: Served) -> None:
    said = answer(server, b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n")
    assert said[9:12] in (b"400", b"405")


def test_connections_of_one_address(start: Starter) -> None:
    """The oldest one without a running request gives way, and one with a request does not."""
    with start(max_connections_per_address=4) as server, ExitStack() as stack:
        body = json.dumps({"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
        stream = stack.enter_context(connected(server))
        stream.sendall(post("1.1", "Connection: close", body=body))
        assert stream.recv(100).startswith(b"HTTP/1.1 200 ")
        idle = [stack.enter_context(connected(server)) for _ in range(40)]
        assert is_healthy(server)
        assert read(idle[0]) == b""
        assert b"data: [DONE]" in read(stream)
        assert len(server.limits) <= 4


def test_connections_that_all_have_requests(start: Starter) -> None:
    with start(max_connections_per_address=2) as server, ExitStack() as stack:
        body = json.dumps({"prompt": "Once", "max_tokens": 480, "ignore_eos": True, "stream": True}).encode()
        for _ in range(2):
            stream = stack.enter_context(connected(server))
            stream.sendall(post("1.1", body=body))
            assert stream.recv(100).startswith(b"HTTP/1.1 200 ")
        said = answer(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in said


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_descriptors")
def test_descriptors_are_spared(start: Starter) -> None:
    """Connections give way before there are none left; this process has both ends of each."""
    with start() as server, ExitStack() as stack:
        assert server.limits.at_most < 300
        server.limits.at_most = 20
        for _ in range(100):
            stack.enter_context(connected(server))
        assert is_healthy(server)
        assert answer(server, post("1.1", "Connection: close")).startswith(b"HTTP/1.1 200 ")
        assert len(server.limits) <= 20


def test_a_hang_up_ends_the_request(server: Served) -> None:
    body = json.dumps({"prompt": "Once", "max_tokens": 480, "ignore_eos": True}).encode()
    ends: list[Callable[[socket.socket], None]] = [
        lambda client: client.close(),
        lambda client: client.shutdown(socket.SHUT_RDWR),
    ]
    for end in ends:
        with connected(server) as client:
            client.sendall(post("1.1", body=body))
            wait_until(lambda: server.n_active() == 1)
            end(client)
            wait_until(lambda: server.n_active() == 0)
