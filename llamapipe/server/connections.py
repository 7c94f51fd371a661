"""Limits what a client may do before its request is complete, and the number of connections.

uvicorn's protocol over llhttp reads requests and writes answers. It trusts its clients, so this module adds:

- limits on a request's head: bytes, fields and time, whatever the connection did before;
- one request at a time: the next request of a connection is parsed once the client has received the last answer, and
  only a few bytes are read ahead. Otherwise a client that sends requests without reading answers would fill the memory;
- answers in HTTP/1.1 to clients that offer HTTP/2 (``Upgrade: h2c``), and without chunks to clients of HTTP/1.0;
- an orderly end: if the connection were closed immediately, a refused client that is still sending would lose the
  answer;
- room for new clients: when there are too many connections, the oldest one without a running request is closed. So a
  client that opens many idle connections cannot keep out other clients or health checks.

Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from llamapipe.server.errors import BUSY, ApiError, dialect_of

MAX_HEAD_BYTES = 64 * 2**10
MAX_FIELDS = 200
_PIECE = 2**14  # bytes per read, and about the most that is read ahead of an unanswered request
_END = b"\n\r\n"  # the end of a head, and of a body in chunks
_LINGER_S = 2.0  # how long a client that was refused may keep sending
_LINGER_BYTES = 64 * 2**20
_SPARE_DESCRIPTORS = 128  # for new connections before others close, files, and the engine
_MOST_CONNECTIONS = 16384
_CHUNK_BYTES = 16  # bytes of framing per byte of data: a chunk may have one byte and an extension
_log = logging.getLogger("llamapipe.server")


class Connections:
    """All connections of a server, by the client's address.

    ``per_address``: the maximum connections of one address; 0: no limit. ``head_timeout_s``: seconds in which a
    request's head must arrive. ``at_most``: the maximum connections in total; None allows as many as there are
    descriptors, less a reserve.
    """

    def __init__(self, per_address: int, head_timeout_s: float, at_most: int | None = None) -> None:
        self.head_timeout_s = head_timeout_s
        self.at_most = _descriptors() if at_most is None else at_most
        self._per_address = per_address
        self.buffer = memoryview(bytearray(_PIECE))  # filled by the read in progress
        self._all: dict[Connection, None] = {}  # in order of arrival
        self._of: dict[str, dict[Connection, None]] = {}

    def __repr__(self) -> str:
        return f"<Connections n={len(self._all)} at_most={self.at_most}>"

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._all)

    def add(self, connection: Connection) -> bool:
        """Accept a connection, and close an older one if necessary. Returns False if none can be closed."""
        same = self._of.get(connection.address, {})
        if connection.address and self._per_address and len(same) >= self._per_address:
            has_room = _close_one(same)
        elif len(self._all) >= self.at_most:
            # Close one of the address with the most connections, so that clients with few keep theirs.
            most = max(self._of.values(), key=len)
            has_room = _close_one(most) or _close_one(self._all)
        else:
            has_room = True
        if has_room:
            self._all[connection] = None
            self._of.setdefault(connection.address, {})[connection] = None
        return has_room

    def remove(self, connection: Connection) -> None:
        """Forget a connection, if it is known."""
        self._all.pop(connection, None)
        same = self._of.get(connection.address, {})
        same.pop(connection, None)
        if not same:
            self._of.pop(connection.address, None)


def _close_one(connections: dict[Connection, None]) -> bool:
    for connection in connections:
        if not connection.has_request:
            connection.give_way()
            return True
    return False


def _descriptors() -> int:
    try:
        import resource
    except ImportError:  # Windows, where the limit is memory
        return _MOST_CONNECTIONS
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    try:
        n_open = sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:  # /proc exists only on Linux
        n_open = 64
    return max(min(limit - n_open - _SPARE_DESCRIPTORS, _MOST_CONNECTIONS), 16)


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """One connection. ``ended``: called once, when it is closed. ``address``: the client's; empty if unknown."""

    ended: Callable[[], None] | None = None
    address = ""

    def __init__(self, *args: Any, limits: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._is_in_head = True  # also true before the first byte of a head
        self._has_begun = False  # whether a byte of the head has arrived
        self._n_head = self._n_fields = 0  # parsed bytes and fields of the head
        self._n_unfinished = 0  # bytes of a head whose end has not arrived
        self._n_framing = 0  # bytes of a body's chunks that are not data
        self._n_body_left = 0  # bytes to come of a body whose length is known
        self._tail = b""  # the last parsed bytes, where the end of a head may begin
        self._ahead = b""  # bytes after a request whose answer the client has not received
        self._n_unsent = 0  # bytes of an answer that were not sent at the last check
        self._n_discarded = 0
        self._is_upgrade = False
        self._is_ending = self._is_lingering = False  # reads no request; discards what it reads
        self._refusal: ApiError | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Connection {self.address}>"

    @property
    def has_request(self) -> bool:
        """Whether a complete request is being answered."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None:
            return False
        return not (cycle.response_complete or cycle.more_body)

    @property
    def _awaits_answer(self) -> bool:
        """Whether the client has yet to receive the answer to a parsed request."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.more_body:
            return False
        return self.flow.write_paused or not cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or refuse it. The event loop calls this once."""
        super().connection_made(transport)
        self.flow = _Flow(transport)
        transport.set_write_buffer_limits(0)  # writing pauses until all data is sent
        self.address = self.client[0] if self.client else ""
        if self._limits.add(self):
            self._wait(self._limits.head_timeout_s, self._head_is_late)
        else:
            self._refuse(ApiError(503, "there are too many connections; try again later"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection. The event loop calls this once."""
        self._limits.remove(self)
        self._stop_waiting()
        super().connection_lost(exc)
        if self.ended is not None:
            self.ended()

    def give_way(self) -> None:
        """Close a connection without a running request to make room for a new one.

        Data that its client has not read is dropped.
        """
        self._limits.remove(self)
        self._is_ending = True
        self.transport.abort()

    # ---- reading
    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next read.

        The event loop reads into it and immediately calls ``buffer_updated``.
        """
        return self._limits.buffer[: max(_PIECE - len(self._ahead), 1)]

    def buffer_updated(self, nbytes: int) -> None:
        """Take the data that the event loop has read."""
        self.data_received(bytes(self._limits.buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Parse data until a request is complete, and keep what follows it."""
        if self._is_ending:
            self._n_discarded += len(data)
            if self._n_discarded > _LINGER_BYTES:
                self.transport.abort()
            return
        self._ahead += data
        self._parse()

    def _parse(self) -> None:
        """Parse the data up to the end of a request. The next request waits until this one is answered."""
        data, begin = self._ahead, 0
        while begin < len(data) and not (
            self._awaits_answer or self._is_ending or self.transport.is_closing()
        ):
            end = self._end_of_part(data, begin)
            self._feed(data[begin:end])
            begin = end
        self._ahead = b"" if self._is_ending else data[begin:]
        self._set_full(self._awaits_answer and len(self._ahead) >= _PIECE)

    def _set_full(self, is_full: bool) -> None:
        flow = self.flow
        assert isinstance(flow, _Flow)
        flow.is_full = is_full
        if is_full:
            flow.pause_reading()

    def _end_of_part(self, data: bytes, begin: int) -> int:
        """Return how far to parse: no request ends before this position.

        The parser cannot be stopped between two requests. A request ends with its head or its body. A head and a
        chunked body both end with an empty line.
        """
        if self._n_body_left:
            return min(begin + self._n_body_left, len(data))
        end = 0
        for n in (2, 1):  # the empty line may have begun in the previous part
            if not end and self._tail.endswith(_END[:n]) and data.startswith(_END[n:], begin):
                end = begin + len(_END) - n
        if not end:
            at = data.find(_END, begin)
            end = len(data) if at < 0 else at + len(_END)
        self._tail = (self._tail + data[max(begin, end - 2) : end])[-2:]
        return end

    def _feed(self, data: bytes) -> None:
        if self._is_ending or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        if self._is_in_head:
            self._n_unfinished += len(data)
            if self._timer is None:
                self._wait(self._limits.head_timeout_s, self._head_is_late)
        else:
            self._n_framing += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:  # from one of our limits or from the parser
            self._refuse(self._refusal or ApiError(400, f"this is no HTTP request: {error}"))
        except httptools.HttpParserUpgrade as upgrade:
            self._parse_without_upgrade(data[upgrade.args[0] :])
        else:
            if self._is_in_head and self._n_unfinished > MAX_HEAD_BYTES:
                self._refuse(_too_large())
            elif self._n_framing > MAX_HEAD_BYTES:
                self._refuse(ApiError(400, "the chunks of the body have more framing than data"))
            elif self._has_begun and self._is_in_head and self._timer is None:
                # The head follows a complete request.
                self._wait(self._limits.head_timeout_s, self._head_is_late)

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Reparse a request as HTTP/1.1 after it offered another protocol (RFC 9110, 7.8).

        llhttp does not parse the data after the head, which is the body here, because it expects the other protocol.
        """
        parts = [self.scope["method"].encode(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name not in (b"upgrade", b"http2-settings"):
                parts += [name, b": ", value, b"\r\n"]
        self._is_upgrade = False
        self.parser = httptools.HttpRequestParser(self)
        with suppress(AttributeError):  # httptools before 0.6.3
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._is_in_head = True
        self._feed(b"".join([*parts, b"\r\n"]))
        if rest:
            self._feed(rest)

    def on_message_begin(self) -> None:
        """Begin a request. The parser calls this."""
        if self._awaits_answer:  # the parser found an end of the previous request that we did not
            self._refusal = ApiError(400, "this is no HTTP request")
            raise self._refusal
        super().on_message_begin()
        self._is_in_head = self._has_begun = True
        self._n_head = self._n_fields = self._n_unfinished = self._n_framing = self._n_body_left = 0

    def on_url(self, url: bytes) -> None:
        """Take a part of the URL from the parser."""
        super().on_url(url)
        self._n_head += len(url)
        self._check_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header from the parser, or a field that follows a chunked body."""
        super().on_header(name, value)
        self._n_fields += 1
        self._n_head += len(name) + len(value) + 4
        self._check_head()

    def _check_head(self) -> None:
        if self._n_fields > MAX_FIELDS or self._n_head > MAX_HEAD_BYTES:
            self._refusal = _too_large()
            raise self._refusal  # the parser stops

    def on_headers_complete(self) -> None:
        """Check the complete head, and begin the answer. The parser calls this."""
        version = self.parser.get_http_version()
        names = [name for name, _ in self.headers]
        if version not in ("1.0", "1.1"):
            self._refusal = ApiError(400, f"this server speaks HTTP/1.1, not HTTP/{version}")
        elif version == "1.1" and b"host" not in names:
            self._refusal = ApiError(400, "a request of HTTP/1.1 needs a Host header")
        elif b"transfer-encoding" in names and b"content-length" in names:
            self._refusal = ApiError(400, "Content-Length and Transfer-Encoding are both given")
        elif self.parser.get_method() == b"CONNECT":
            self._refusal = ApiError(405, "CONNECT: Method Not Allowed")
        if self._refusal is not None:
            raise self._refusal
        if self.parser.should_upgrade():
            self._is_upgrade = True
            self.scope["method"] = self.parser.get_method().decode("ascii")
            return
        self._stop_waiting()
        self._is_in_head = False
        self._n_body_left = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        super().on_headers_complete()
        cycle = self.cycle
        cycle.transport = _Answering(self.transport, self._answer_is_last)  # type: ignore[assignment]
        if version == "1.0":
            cycle.__class__ = _OldCycle

    def on_body(self, body: bytes) -> None:
        """Take a part of the body from the parser."""
        self._n_framing = max(self._n_framing - _CHUNK_BYTES * len(body), 0)
        self._n_body_left = max(self._n_body_left - len(body), 0)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Record the end of the request. The parser calls this."""
        if self._is_upgrade:
            return
        self._is_in_head, self._has_begun = True, False
        self._n_unfinished = 0
        super().on_message_complete()

    # ---- ending
    def _head_is_late(self) -> None:
        self._timer = None
        if self._has_begun or self.has_request:
            limit_s = self._limits.head_timeout_s
            self._refuse(
                ApiError(
                    408, f"the head of a request must arrive within {limit_s:g} seconds (--head-timeout)"
                )
            )
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """End the connection with an error, or with the answer to a request that is already being served."""
        if self._is_ending:
            return
        self._is_ending = True
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and self.has_request:
            cycle.keep_alive = False  # this answer is the last; then `_answer_is_last` is called
            return
        began = False
        if cycle is not None and not cycle.response_complete:  # its body is incomplete
            began = cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
        if not began:
            url = getattr(self, "url", b"").decode("latin-1")
            body = msgspec.json.encode(error.body(dialect_of(url)))
            head = [
                b"HTTP/1.1 %d %b" % (error.status, HTTPStatus(error.status).phrase.encode()),
                b"content-type: application/json",
                b"content-length: %d" % len(body),
                b"connection: close",
            ]
            if error.status in BUSY:
                head.append(b"retry-after: 1")
            self.transport.write(b"\r\n".join([*head, b"", body]))
        _log.info("a connection of %s ends: %d %s", self.address or "a client", error.status, error.message)
        self._linger()

    def on_response_complete(self) -> None:
        """Parse the next request after an answer, or linger if the answered request has not fully arrived."""
        if self._is_lingering:
            return
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._linger()
        else:
            self._parse_ahead()

    def resume_writing(self) -> None:
        """Parse the data that has arrived. The event loop calls this when all written data has been sent."""
        super().resume_writing()
        self._parse_ahead()

    def _parse_ahead(self) -> None:
        if self._awaits_answer or self._is_ending or self.transport.is_closing():
            return
        self._set_full(False)
        self._parse()
        self.flow.resume_reading()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection if nothing arrived for a while after an answer.

        A client that is still receiving the answer gets more time.
        """
        if self._takes_answer():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            self.transport.abort()

    def _takes_answer(self) -> bool:
        """Return whether the client has received more of the answer since the last check, but not all of it."""
        before, self._n_unsent = self._n_unsent, self.transport.get_write_buffer_size()
        return 0 < self._n_unsent != before

    def _answer_is_last(self) -> None:
        if self.cycle.more_body or self._is_ending or self._ahead:
            self._linger()
            return
        self.transport.close()
        if self.flow.write_paused:
            self._linger_on()

    def _linger(self) -> None:
        """Signal the end of the data, and read for a while, because closing immediately could lose the answer."""
        self._is_ending = self._is_lingering = True
        self._ahead = b""
        self._set_full(False)
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        with suppress(OSError, NotImplementedError):
            self.transport.write_eof()
        self._linger_on()

    def _linger_on(self) -> None:
        if self._takes_answer():
            self._wait(self.timeout_keep_alive, self._linger_on)
        else:
            self._wait(_LINGER_S, self.transport.abort)

    def _wait(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, then)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Flow(FlowControl):
    """Does not resume reading while ``is_full``, because enough data was read ahead."""

    is_full = False

    def resume_reading(self) -> None:
        """Resume reading, unless enough data waits to be parsed.

        uvicorn calls this when the application begins to read a request's body, and when the answer is complete.
        """
        if not self.is_full:
            super().resume_reading()


class _Answering:
    """The transport for an answer, which must not end the connection while its client is still sending.

    Data that is written after the client has gone is dropped. Otherwise asyncio would log a warning for each part of a
    stream, until its loop reports that the connection is lost.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._write = transport.write
        self.is_closing = transport.is_closing
        self.close = close

    def write(self, data: bytes) -> None:
        """Send data, unless the connection is closing."""
        if not self.is_closing():
            self._write(data)


class _OldCycle(RequestResponseCycle):
    """Answers an HTTP/1.0 client, which does not know chunks: an answer without a length ends with the connection."""

    _ends_with_connection = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            if all(name.lower() != b"content-length" for name, _ in headers):
                self._ends_with_connection = True
                self.chunked_encoding = False
            if all(name.lower() != b"connection" for name, _ in headers):  # uvicorn adds it from 0.53 on
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
        elif self._ends_with_connection:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def _too_large() -> ApiError:
    return ApiError(
        431,
        f"the head of a request may have {MAX_HEAD_BYTES} bytes and {MAX_FIELDS} fields; this one has more",
    )
