"""MCP over streamable HTTP, with limits on what a host may send.

Open it to change how the server connects to MCP servers by address. It is imported when the first such server is used,
because it needs the package ``mcp`` and its HTTP client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx2
from mcp.client._transport import TransportStreams
from mcp.client.streamable_http import streamable_http_client

from llamapipe.server._addresses import Refused, address_of, allowed_host

_MOST_BODY = 2**26  # bytes of an answer, or of each event of a stream without an end
_CONNECT_S = 10.0


@asynccontextmanager
async def over_http(
    url: str, headers: Mapping[str, str], hosts: Sequence[str] | None = None
) -> AsyncIterator[TransportStreams]:
    """Open a transport to the server at an address. The package follows redirects only within the same host.

    ``hosts``: the hosts that clients may name, if a client named this address; None if the operator did.
    """
    transport = _Limited() if hosts is None else _Checked(hosts)
    written = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
    timeout = httpx2.Timeout(_CONNECT_S, read=None)  # the session limits the time of each request
    async with (
        httpx2.AsyncClient(
            transport=transport, headers=written, timeout=timeout, follow_redirects=False
        ) as client,
        streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams


class _Limited(httpx2.AsyncHTTPTransport):
    """Cuts off an answer that is too large, and closes its connection."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if request.method != "GET":
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _LimitedStream(response.stream)
        return response


class _Checked(_Limited):
    """Connects only to hosts that clients may name, at checked addresses. Also checks redirected requests."""

    def __init__(self, hosts: Sequence[str]) -> None:
        super().__init__()
        self._hosts = hosts

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request. Raises ConnectError if the host is refused."""
        try:
            host, port = allowed_host(urlsplit(str(request.url)), self._hosts, "--mcp-url HOST")
            address = await asyncio.to_thread(address_of, host, port)
        except (Refused, OSError, ValueError) as e:
            raise httpx2.ConnectError(str(e) or type(e).__name__, request=request) from None
        checked = httpx2.Request(
            request.method,
            request.url.copy_with(host=address),
            headers=request.headers,  # they name the host
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": host},
        )
        return await super().handle_async_request(checked)


class _LimitedStream(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        n = 0
        async for part in self._inner:
            n += len(part)
            if n > _MOST_BODY:
                raise httpx2.ReadError(f"the host sends more than {_MOST_BODY} bytes")
            yield part

    async def aclose(self) -> None:
        await self._inner.aclose()
