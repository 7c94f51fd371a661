"""Addresses that clients name: which hosts the operator allows, and where a connection may go.

Open it to change what a request can make this server connect to: for images (``--media-url``), and for MCP servers
(``--mcp-url``). A name that resolves to an address of a private network is refused, and a connection goes to the
address that was checked, so that the name cannot mean another one a moment later.
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
    """Why nothing is asked of an address."""


def allowed_host(split: SplitResult, allowed: Sequence[str], option: str) -> tuple[str, int]:
    """Return the host and the port of an address.

    Raises Refused if the operator does not allow them, ValueError. ``allowed``: hosts, with a port where it is not the
    scheme's; ``option``: allows another one.
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
    """Look up the address of a host. Blocks.

    Raises Refused for one of a private network, unless ``host`` is one.
    """
    with suppress(ValueError):
        return str(ipaddress.ip_address(host))  # the operator allows it
    addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not addresses or not all(map(is_public, addresses)):
        raise Refused("its host has an address of a private network")
    return addresses[0]


def is_public(text: str) -> bool:
    """Return whether an address is one of the internet: of no private network, this machine, or a group."""
    address = ipaddress.ip_address(text.partition("%")[0])
    inner = None
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64 or address.teredo is not None:
            return False
    return address.is_global and not address.is_multicast and (inner is None or is_public(str(inner)))
