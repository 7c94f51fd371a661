"""Fetches images that a request names by address, from a folder or from hosts that the operator allows.

Open this file for ``--media-path`` and ``--media-url``. The client chooses the address, so the hosts, the time and the
size of an answer are limited. A name that resolves to a private address is refused, and the connection goes to the
address that was checked. Redirects are checked in the same way.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from llamapipe._messages import quoted
from llamapipe.errors import InvalidRequestError
from llamapipe.media.decode import path_below
from llamapipe.server._addresses import Refused, address_of, allowed_host
from llamapipe.server.endpoint import Exchange
from llamapipe.server.errors import ApiError, code_of
from llamapipe.wanted import time_limit
from llamapipe.work.long_work import LongWork

MOST_ADDRESSES = 32  # of one request
MOST_HOPS = 4  # requests for one address, including the first
MOST_SECONDS = 10.0  # for one address, with its redirects
_N_THREADS = 32  # threads that wait for hosts; a client gets at most four
_CHUNK = 2**16
_REDIRECTS = (301, 302, 303, 307, 308)
_ENGINE_PLACE = re.compile(r"messages\[(\d+)\]: part (\d+) of the content")


class PlacedPart(dict[str, Any]):
    """An image or a sound of a message. ``place``: its field in the request, if that is outside the message."""

    def __init__(self, place: str, part: Mapping[str, Any]) -> None:
        super().__init__(part)
        self.place = place


def place_of(messages: Sequence[Mapping[str, Any]], index: int, i: int) -> str:
    """Return the field of the request that holds a part of a message."""
    part = messages[index]["content"][i]
    return part.place if isinstance(part, PlacedPart) else f"messages.{index}.content.{i}"


def in_request(error: InvalidRequestError, messages: Sequence[Mapping[str, Any]]) -> Exception:
    """Return the engine's error about an image or a sound, with its field in the request. Others are not changed."""
    match = _ENGINE_PLACE.match(str(error))
    if match is None:
        return error
    try:
        place = place_of(messages, int(match[1]), int(match[2]))
    except (LookupError, TypeError):
        return error
    said = str(error)[match.end() :]
    if isinstance(messages[int(match[1])]["content"][int(match[2])], PlacedPart):
        # The type is ours: Anthropic's clients send "image", Ollama's only the data.
        said = said.replace(" has the type 'image_url';", " is an image;", 1)
    return ApiError(400, f"{place}{said}", place, code_of(error))


def note_details(exchange: Exchange, items: object) -> None:
    """Note that images have a ``detail``: the model's projector chooses their resolution. Raises ApiError 400."""
    for item in items if isinstance(items, list) else ():
        content = item.get("content") if isinstance(item, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, Mapping):
                continue
            inner = part.get("image_url")
            holder = inner if isinstance(inner, Mapping) else part
            if part.get("type") in ("image_url", "input_image") and holder.get("detail") not in (
                None,
                "auto",
            ):
                exchange.note_unused(("detail",))
                return


async def with_media(
    exchange: Exchange, messages: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return the messages with images in place of their addresses; the same object if there are no addresses.

    Raises ApiError 400, InvalidRequestError; TimeoutError after ``timeout_s``.
    """
    urls: dict[tuple[int, int], str] = {}
    for index, message in enumerate(messages):
        content = message.get("content")
        for i, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, Mapping) and part.get("type") in ("image_url", "input_image"):
                url = part.get("image_url")
                url = url.get("url") if isinstance(url, Mapping) else url
                if isinstance(url, str) and url.partition(":")[0].lower() in ("http", "https", "file"):
                    urls[index, i] = url
    if not urls or exchange.server.engine.model.projector is None:  # the engine reports the error
        return messages
    if len(set(urls.values())) > MOST_ADDRESSES:
        raise ApiError(
            400,
            f"the messages name images by {len(set(urls.values()))} addresses; at most {MOST_ADDRESSES} are read",
        )
    loaded: dict[str, bytes | Path] = {}
    left = exchange.server.settings.max_body_bytes
    with time_limit(exchange.server.settings.timeout_s):
        for (index, i), url in urls.items():
            if url not in loaded:
                place = place_of(messages, index, i)
                loaded[url] = value = await _loaded(exchange, place, url, left)
                left -= len(value) if isinstance(value, bytes) else 0
    exchange.hold_more(sum(len(value) for value in loaded.values() if isinstance(value, bytes)))
    changed = [dict(message) for message in messages]
    for (index, i), url in urls.items():
        content = changed[index]["content"] = list(changed[index]["content"])
        content[i] = PlacedPart(place_of(messages, index, i), {"type": "image", "image": loaded[url]})
    return changed


async def _loaded(exchange: Exchange, place: str, url: str, most: int) -> bytes | Path:
    settings = exchange.server.settings
    if url[:5].lower() == "file:":
        if settings.media_path is None:
            raise ApiError(
                400, f"{place}: {quoted(url[:80])}: this server reads no files: give a data URL", place
            )
        name = unquote(url[5:].removeprefix("//"))
        try:
            return await asyncio.to_thread(path_below, place, name, Path(settings.media_path))
        except InvalidRequestError:  # its message names the folder
            raise ApiError(
                400, f"{place}: {quoted(url[:80])} is not a file in the folder of --media-path", place
            ) from None
    if not settings.media_urls:
        raise ApiError(
            400,
            f"{place}: {quoted(url[:80])}: no address is fetched by this server (--media-url HOST): give a data URL",
            "messages",
        )
    ending = _Ending()
    try:
        return await _threads().run(fetch, url, settings.media_urls, most, ending)
    except Refused as e:
        raise ApiError(400, f"{place}: {quoted(url[:80])}: {e}", place) from None
    except (asyncio.CancelledError, TimeoutError):  # the client hung up, or its time is over
        ending.end()
        raise


@cache
def _threads() -> LongWork:
    """Return the threads for fetching. Slow hosts block only these, and clients take turns."""
    return LongWork(_N_THREADS)


class _Ending:
    """Ends a fetch at its deadline, or when nobody waits for the result any more. Any thread may use it."""

    def __init__(self) -> None:
        self.is_ended = False
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def watch(self, connection: socket.socket) -> None:
        with self._lock:
            self._socket = connection
            if self.is_ended:
                self._shut()

    def end(self) -> None:
        with self._lock:
            self.is_ended = True
            self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


def fetch(url: str, allowed: Sequence[str], most: int, ending: _Ending) -> bytes:
    """Fetch the file at an address, ``most`` bytes at most. Blocks until it has arrived.

    ``allowed``: the allowed hosts, with a port unless it is the scheme's default. Raises Refused.
    """
    deadline = monotonic() + MOST_SECONDS
    timer = threading.Timer(MOST_SECONDS, ending.end)
    timer.daemon = True
    timer.start()
    try:
        for _ in range(MOST_HOPS):
            answer = _answer(url, allowed, most, deadline, ending)
            if isinstance(answer, bytes):
                return answer
            url = urljoin(url, answer)
        raise Refused(f"it is redirected more than {MOST_HOPS - 1} times")
    except (OSError, http.client.HTTPException, ValueError) as e:
        if ending.is_ended or isinstance(e, TimeoutError):
            raise Refused(f"its host did not send all of it within {MOST_SECONDS:g} s") from None
        raise Refused(f"it cannot be fetched: {str(e)[:200] or type(e).__name__}") from None
    finally:
        timer.cancel()


def _answer(url: str, allowed: Sequence[str], most: int, deadline: float, ending: _Ending) -> bytes | str:
    """Return the body of an answer, or the address that it redirects to."""
    split = urlsplit(url)
    host, port = allowed_host(split, allowed, "--media-url HOST")
    address = address_of(host, port)
    left_s = deadline - monotonic()
    if left_s <= 0 or ending.is_ended:
        raise TimeoutError
    connection = http.client.HTTPConnection(host, port, timeout=left_s)
    raw = socket.create_connection((address, port), timeout=left_s)
    ending.watch(raw)
    try:
        connection.sock = (
            _tls_context().wrap_socket(raw, server_hostname=host) if split.scheme == "https" else raw
        )
        ending.watch(connection.sock)
        path = (split.path or "/") + (f"?{split.query}" if split.query else "")
        connection.putrequest("GET", path, skip_accept_encoding=True)
        for name, value in (("Accept", "image/*"), ("Accept-Encoding", "identity"), ("Connection", "close")):
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        if response.status in _REDIRECTS and (place := response.getheader("location")) is not None:
            return place
        if response.status != 200:
            raise Refused(f"its host answers {response.status}")
        if response.getheader("content-encoding", "identity").lower() != "identity":
            raise Refused("its host sends it compressed")
        return _body(response, most)
    finally:
        connection.close()
        raw.close()


def _body(response: http.client.HTTPResponse, most: int) -> bytes:
    length = response.getheader("content-length", "0")
    parts: list[bytes] = []
    n = int(length) if length.isdigit() else 0
    if n <= most:
        n = 0
        while n <= most and (part := response.read(_CHUNK)):
            parts.append(part)
            n += len(part)
    if n > most:
        raise Refused(f"it has more than {most} bytes, with the request's others (--max-body-bytes)")
    if length.isdigit() and n != int(length):
        raise ConnectionError("the connection ended early")
    return b"".join(parts)


_tls_context = cache(ssl.create_default_context)
