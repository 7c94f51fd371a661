"""Addresses of workers: parsed, and looked up once, so that ggml-rpc gets the one that was checked."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from llamapipe.errors import BackendError

_FORM = 'an address such as "10.0.0.2:50052"'


@dataclass(frozen=True)
class Address:
    """``text``: as it was given. ``ip``: the numeric IPv4 address of its host. Plain data."""

    text: str
    ip: str
    port: int

    @property
    def endpoint(self) -> str:
        """The form that ggml-rpc reads."""
        return f"{self.ip}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether it is on this machine and cannot be reached from others."""
        return ipaddress.IPv4Address(self.ip).is_loopback


def parse_addresses(name: str, given: object, limit: int) -> list[Address]:
    """The addresses of a sequence of ``"host:port"``, all different, at most ``limit``.

    Raises TypeError and ValueError, which name the argument ``name``, and BackendError for an unknown host.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise TypeError(
            f"{name} must be a sequence of addresses, not {type(given).__name__}: "
            f'{name}=["10.0.0.2:50052", "10.0.0.3:50052"]'
        )
    if not given:
        raise ValueError(f"{name} is empty; give {_FORM} for each worker, or None")
    if len(given) > limit:
        raise ValueError(f"{name} has {len(given)} addresses; it must have at most {limit}")
    split = [split_address(name, text) for text in given]
    found: dict[str, Address] = {}
    for text, (host, port) in zip(given, split, strict=True):
        address = Address(text, look_up(host), port)
        if other := found.get(address.endpoint):
            raise ValueError(f"{name} has the worker {address.endpoint} twice: {other.text!r}, {text!r}")
        found[address.endpoint] = address
    return list(found.values())


def split_address(name: str, text: object) -> tuple[str, int]:
    """Host and port of ``"host:port"``. Raises TypeError and ValueError."""
    if not isinstance(text, str):
        raise TypeError(f"{name} must hold str, not {type(text).__name__}: {_FORM}")
    form = re.fullmatch(r"(\[[^\[\]]*\]|[^:\[\]\s\0/]+):([0-9]{1,5})", text)
    if form is None:
        raise ValueError(f"{name}: {text!r} is not of the form host:port; give {_FORM}")
    host, port = form[1], int(form[2])
    if not 1 <= port <= 65535:
        raise ValueError(f"{name}: the port of {text!r} is {port}; it must be from 1 to 65535")
    check_host(name, host.strip("[]"))
    return host, port


def check_host(name: str, host: str) -> None:
    """Raises ValueError for an IPv6 address: ggml-rpc connects and listens over IPv4 only."""
    if ":" in host:
        raise ValueError(
            f"{name}: {host} is an IPv6 address, and ggml-rpc uses IPv4 only; give the machine's IPv4 address"
        )


def look_up(host: str) -> str:
    """The first IPv4 address of a host. Raises BackendError if there is none."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BackendError(
            f"the host {host!r} has no IPv4 address ({reason}); check the name, or give the number"
        ) from None
    return str(found[0][4][0])
