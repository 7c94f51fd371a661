"""Passes bytes between a client and the server unchanged, and shows afterwards what was asked and answered."""

from __future__ import annotations

import io
import socket
from dataclasses import dataclass
from http.client import HTTPResponse, parse_headers
from threading import Lock, Thread


@dataclass(frozen=True)
class Exchange:
    """A request and its answer; ``status`` is 0 where the answer is missing."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int
    answer: bytes


class Recorder:
    """Listens on a free port of the loopback and passes every connection to the server's; ``url`` is its address."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._target = (host, int(port))
        self._lock = Lock()
        self._connections: list[tuple[bytearray, bytearray]] = []
        self._threads: list[Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for thread in self._threads:
            thread.join()

    def take(self) -> list[Exchange]:
        """What went over all connections since the last call, connection by connection."""
        with self._lock:
            taken, self._connections = self._connections, []
        return [exchange for sent, got in taken for exchange in _exchanges(bytes(sent), bytes(got))]

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            sent, got = bytearray(), bytearray()
            with self._lock:
                self._connections.append((sent, got))
            thread = Thread(target=_connect, args=(client, server, sent, got), daemon=True)
            with self._lock:
                self._threads.append(thread)
            thread.start()


def _connect(client: socket.socket, server: socket.socket, sent: bytearray, got: bytearray) -> None:
    with client, server:
        back = Thread(target=_pump, args=(server, client, got), daemon=True)
        back.start()
        _pump(client, server, sent)
        back.join()


def _pump(source: socket.socket, sink: socket.socket, record: bytearray) -> None:
    try:
        while data := source.recv(65536):
            record += data
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


class _Answers:
    """What ``HTTPResponse`` takes for a socket."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def makefile(self, mode: str) -> io.BytesIO:
        return _Kept(self._file)


class _Kept(io.BytesIO):
    """A view of a file that stays open when the reader of one answer closes it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__()
        self._file = file

    def read(self, size: int | None = -1) -> bytes:
        return self._file.read(size)

    def readline(self, size: int | None = -1) -> bytes:
        return self._file.readline(-1 if size is None else size)

    def readinto(self, buffer: object) -> int:
        return self._file.readinto(buffer)  # type: ignore[arg-type]


def _exchanges(sent: bytes, got: bytes) -> list[Exchange]:
    requests, answers = io.BytesIO(sent), _Answers(got)
    exchanges = []
    while line := requests.readline():
        method, _, rest = line.decode("latin-1").strip().partition(" ")
        if not rest:
            break
        headers = {name.lower(): value for name, value in parse_headers(requests).items()}
        body = _chunks(requests) if "chunked" in headers.get("transfer-encoding", "") else b""
        body = body or requests.read(int(headers.get("content-length", 0)))
        status, text = 0, b""
        try:
            answer = HTTPResponse(answers, method=method)  # type: ignore[arg-type]
            answer.begin()
            status, text = answer.status, answer.read()
        except Exception as error:
            text = text or f"({type(error).__name__}: {error})".encode()
        exchanges.append(Exchange(method, rest.partition(" ")[0], headers, body, status, text))
    return exchanges


def _chunks(file: io.BytesIO) -> bytes:
    body = b""
    while size := int(file.readline().split(b";")[0] or b"0", 16):
        body += file.read(size)
        file.readline()
    file.readline()
    return body
