"""Refuses requests that pages of other sites send, before any other check.

A browser lets any page send requests to a server on the user's machine. Its headers ``Origin`` and ``Sec-Fetch-Site``
describe the page, and ``Host`` has the name that the page uses for the server. There are three rules:

- While the server listens on loopback, the host must be this machine. If a page's name first resolves to its own
  server and then to 127.0.0.1 (DNS rebinding), the browser sees the same origin; only ``Host`` shows the foreign name.
- The page must belong to this server, this machine, an editor or desktop app, or an origin in ``cors_origins``.
- A body from a browser must be declared as JSON. Any page can send other types without the server's permission.

Clients that are not browsers send neither of the first two headers, so the last two rules do not affect them.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from llamapipe._messages import quoted
from llamapipe.server.endpoint import Exchange
from llamapipe.server.errors import ApiError
from llamapipe.server.gate import Gate

# Pages with these schemes belong to programs that the user has installed, not to a site.
_APP_SCHEMES = frozenset(
    (
        "app", "file", "tauri", "capacitor", "vscode-webview", "vscode-file",
        "chrome-extension", "moz-extension", "safari-web-extension",
    )
)  # fmt: skip
# An IPv6 address, which has colons, may have brackets or not. No user name may precede the host.
_AUTHORITY = re.compile(
    r"\[([0-9a-f:.]+)\](?::[0-9]*)?|([^\s:@/\\\[\]]+)(?::[0-9]*)?|([0-9a-f:.]+)", re.ASCII
)
_CONTAINER_HOSTS = frozenset(("host.docker.internal", "host.containers.internal"))
_METHODS = "GET, POST, DELETE"
_PREFLIGHT_S = "600"  # how long a browser may cache the answer to a preflight request
_EXPOSED = b"x-request-id, x-llamapipe-unused, x-llamapipe-not-stored, x-llamapipe-worker, server-timing, retry-after"


class Guard:
    """Middleware that answers 403 to foreign hosts and pages, 415 to bodies of other types, and preflight requests.

    Answers to allowed origins get the headers with which a browser lets the page read the answer.
    """

    def __init__(self, app: ASGIApp, state: Gate) -> None:
        self._app = app
        self._state = state
        settings = state.settings
        self._allows_all_origins = "*" in settings.cors_origins
        self._origins = frozenset(origin.lower() for origin in settings.cors_origins)
        self._hosts = frozenset(_name(host) for host in settings.allow_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(self._state, scope, receive, send)
        browser: dict[bytes, bytes] = {}
        hosts: list[bytes] = []
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value)
            elif name in (b"origin", b"access-control-request-method") or name.startswith(b"sec-fetch-"):
                differs = browser.setdefault(name, value) != value
                if differs:  # two values: neither can be trusted
                    browser[name] = b"cross-site" if name == b"sec-fetch-site" else b"null"
        origin = browser.get(b"origin")
        error = self._error(scope, browser, hosts)
        if error is None and origin is not None:
            exchange.answer_headers += self._readable(origin)
            if exchange.method == "OPTIONS" and b"access-control-request-method" in browser:
                await exchange.send(_allow(exchange))
                return
        try:
            if error is None:
                await self._app(scope, receive, send)
            else:
                await exchange.send(exchange.error_response(error))
        finally:
            self._state.note_answered(exchange)

    def _error(self, scope: Scope, browser: dict[bytes, bytes], hosts: list[bytes]) -> ApiError | None:
        try:
            self._check_host(scope, hosts)
            if b"origin" in browser or b"sec-fetch-site" in browser:
                self._check_page(scope, browser, hosts)
        except ApiError as error:
            return error
        return None

    # ---- the name of the server
    def _check_host(self, scope: Scope, hosts: list[bytes]) -> None:
        if "*" in self._hosts or not hosts:  # only HTTP/1.0 clients send no host
            return
        if len(hosts) > 1:
            raise ApiError(400, "there are two Host headers")
        on_loopback = listens_on_loopback(self._state, scope)
        if not (self._hosts or on_loopback):
            return
        host = hosts[0].decode("latin-1")
        name = _name(host)
        if name in self._hosts or _is_own_name(name) or (not on_loopback and _address(name)):
            return
        raise ApiError(
            403,
            f"the host {quoted(host)} is not a name of this server"
            + (f"; if it is, for example behind a proxy, allow it with --allow-host {name}" if name else ""),
            code="forbidden_host",
        )

    # ---- the page
    def _check_page(self, scope: Scope, browser: dict[bytes, bytes], hosts: list[bytes]) -> None:
        origin = browser.get(b"origin")
        site = browser.get(b"sec-fetch-site", b"").strip().lower()
        if not self._is_allowed(origin, site, hosts) and not _opens_page(scope, browser):
            who = "a page of another site" if origin is None else f"a page of {origin.decode('latin-1')}"
            raise ApiError(
                403,
                f"{who} may not use this server; --cors ORIGIN allows the pages of an origin",
                code="forbidden_origin",
            )
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kinds = [value for name, value in scope["headers"] if name == b"content-type"]
            if [kind.partition(b";")[0].strip().lower() for kind in kinds] != [b"application/json"]:
                raise ApiError(415, "a browser must send its body with Content-Type: application/json")

    def _is_allowed(self, origin: bytes | None, site: bytes, hosts: list[bytes]) -> bool:
        if self._allows_all_origins:
            return True
        if site in (b"same-origin", b"none"):  # a page cannot change this header
            return True
        if origin is None:
            return site != b"cross-site"
        text = origin.decode("latin-1").lower()
        if text in self._origins:
            return True
        try:
            parts = urlsplit(text)
            name = _name(parts.netloc)
        except ValueError:
            return False
        if parts.scheme in _APP_SCHEMES:
            return True
        if parts.scheme not in ("http", "https"):
            return False
        if _is_loopback_name(name):
            return True
        return not site and [parts.netloc.encode("latin-1")] == [host.strip().lower() for host in hosts]

    # ---- answers that pages may read
    def _readable(self, origin: bytes) -> list[tuple[bytes, bytes]]:
        return [
            (b"access-control-allow-origin", b"*" if self._allows_all_origins else origin),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"Origin"),
        ]


def listens_on_loopback(state: Gate, scope: Scope) -> bool:
    """Return whether the server listens on loopback, where only programs on this machine can reach it."""
    address = state.bound_to or (scope.get("server") or ("", None))[0]
    ip = _address(address.strip("[]"))
    return address == "localhost" or (ip is not None and ip.is_loopback)


def _allow(exchange: Exchange) -> Response:
    """Answer a preflight request, with which a browser asks whether the page may send the actual request."""
    headers = {
        "access-control-allow-methods": _METHODS,
        "access-control-allow-headers": exchange.headers.get("access-control-request-headers", "*"),
        "access-control-max-age": _PREFLIGHT_S,
    }
    if exchange.headers.get("access-control-request-private-network") == "true":
        headers["access-control-allow-private-network"] = "true"
    return Response(headers=headers)


def _opens_page(scope: Scope, browser: dict[bytes, bytes]) -> bool:
    """Return whether the request opens the server's page, for example because the user follows a link to it.

    The page that has the link cannot read the answer.
    """
    return (
        scope["method"] == "GET"
        and scope["path"] in ("", "/")
        and b"origin" not in browser
        and browser.get(b"sec-fetch-mode") == b"navigate"
        and browser.get(b"sec-fetch-dest") == b"document"
    )


def _name(authority: str) -> str:
    """Return the host of ``host:port``, normalized for comparison; an empty text if ``authority`` is invalid."""
    match = _AUTHORITY.fullmatch(authority.strip().lower())
    return "" if match is None else next(filter(None, match.groups())).removesuffix(".")


def _is_own_name(name: str) -> bool:
    """Return whether a host can only be this machine, or a name that nobody can register.

    Nobody can register a name without a dot, or one of the names that containers use.
    """
    if _is_loopback_name(name) or name in _CONTAINER_HOSTS:
        return True
    if (ip := _address(name)) is not None:
        return ip.is_unspecified
    return bool(name) and "." not in name and ":" not in name


def _is_loopback_name(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    ip = _address(name)
    return ip is not None and ip.is_loopback


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
