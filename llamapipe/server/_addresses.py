"""Checks addresses that clients name: which hosts the operator allows, and where a connection may go.

Open it to change which hosts a request can make this server connect to, for images (``--media-url``) or MCP servers
(``--mcp-url``). A name that resolves to a private address is refused. The connection goes to the address that was
checked, because the name may resolve to a different address a moment later.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import SplitResult

from llamapipe._messages import quoted

_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/32")


class Refused(Exception):  # noqa: N818 - becomes an ApiError
    """The server must not connect to an address; the message says why."""


def allowed_host(split: SplitResult, allowed: Sequence[str], option: str) -> tuple[str, int]:
    """Return the host and the port of an address.

    ``allowed``: the allowed hosts, with a port unless it is the scheme's default. ``option``: the command-line option
    that allows more hosts, for the message. Raises Refused for a host that is not allowed, ValueError for a bad port.
    """
    host, default = split.hostname or "", _PORTS.get(split.scheme, 0)
    port = default if split.port is None else split.port
    if not default or not host or split.username is not None or split.password is not None:
        raise Refused("only http://HOST/… and https://HOST/… are fetched, without a user")
    if any(ord(character) <= 32 or ord(character) == 127 for character in split.path + split.query):
        raise Refused("it has control characters or spaces")
    shown = f"[{host}]" if ":" in host else host
    names = {f"{shown}:{port}"} | ({shown} if port == default else set())
    if names.isdisjoint(name.lower() for name in allowed):
        raise Refused(f"nothing is fetched from {quoted(f'{shown}:{port}'[:80])} ({option})")
    return host, port


def address_of(host: str, port: int) -> str:
    """Return the IP address of a host. Blocks.

    Raises Refused if a name resolves to a private address. If ``host`` is itself an address, returns it unchecked.
    """
    with suppress(ValueError):
        return str(ipaddress.ip_address(host))  # the operator allowed this address itself
    addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not addresses or not all(map(is_public, addresses)):
        raise Refused("its host has an address of a private network")
    return addresses[0]


def is_public(text: str) -> bool:
    """Return whether an IP address is on the public internet: neither private nor loopback nor multicast."""
    address = ipaddress.ip_address(text.partition("%")[0])
    inner = None
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64 or address.teredo is not None:
            return False
    return address.is_global and not address.is_multicast and (inner is None or is_public(str(inner)))
