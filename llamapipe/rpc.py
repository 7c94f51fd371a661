"""Uses devices of other machines, through llama.cpp's ggml-rpc.

Python code checks the addresses and asks the workers for their protocol version, because ggml-rpc ends the process, or
waits without a limit, if it cannot connect. ggml-rpc is loaded with the first model that has ``rpc=``, or with the
first worker.

A worker serves one connection at a time, and keeps one graph for each of its devices. ggml-rpc's client remembers that
graph without a lock: two contexts that compute at the same time could each get the result of the other's graph. So a
worker belongs to only one model, and a model with workers has only one context.

The first message of the protocol (``RPC_CMD_HELLO``, ``rpc_msg_hello_req`` and ``rpc_msg_hello_rsp`` in llama.cpp's
``ggml/src/ggml-rpc/ggml-rpc.cpp``, ``RPC_CONN_CAPS_SIZE`` in ``transport.h``), numbers little-endian:

- request: the command (1 byte, 14), the size of the rest (8 bytes), the client's transports (24 bytes, 0: TCP);
- answer: the size (8 bytes), the version (major, minor, patch, padding: a byte each), the server's transports (24).
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamapipe.errors import BackendError
from llamapipe.locks import Lock
from llamapipe.native.load import LIB_DIR, drain_log, last_error, native

_FORM = 'an address such as "10.0.0.2:50052"'


@dataclass(frozen=True)
class Address:
    """A worker's address. ``text``: as given. ``ip``: the numeric IPv4 address of its host."""

    text: str
    ip: str
    port: int

    @property
    def endpoint(self) -> str:
        """The address in ggml-rpc's form."""
        return f"{self.ip}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether the address is on this machine and cannot be reached from others."""
        return ipaddress.IPv4Address(self.ip).is_loopback


def parse_addresses(texts: object, limit: int) -> list[Address]:
    """Return the addresses of a sequence of ``"host:port"``, all different, at most ``limit``.

    Raises TypeError and ValueError, which name the argument ``rpc``, and BackendError for an unknown host.
    """
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Sequence):
        raise TypeError(
            f"rpc must be a sequence of addresses, not {type(texts).__name__}: "
            'rpc=["10.0.0.2:50052", "10.0.0.3:50052"]'
        )
    if not texts:
        raise ValueError(f"rpc is empty; give {_FORM} for each worker, or None")
    if len(texts) > limit:
        raise ValueError(f"rpc has {len(texts)} addresses; it must have at most {limit}")
    split = [split_address("rpc", text) for text in texts]
    addresses: dict[str, Address] = {}
    for text, (host, port) in zip(texts, split, strict=True):
        address = Address(text, look_up(host), port)
        if other := addresses.get(address.endpoint):
            raise ValueError(f"rpc has the worker {address.endpoint} twice: {other.text!r}, {text!r}")
        addresses[address.endpoint] = address
    return list(addresses.values())


def split_address(name: str, text: object) -> tuple[str, int]:
    """Return host and port of ``"host:port"``. Raises TypeError and ValueError."""
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
    """Raise ValueError for an IPv6 address: ggml-rpc connects and listens over IPv4 only."""
    if ":" in host:
        raise ValueError(
            f"{name}: {host} is an IPv6 address, and ggml-rpc uses IPv4 only; give the machine's IPv4 address"
        )


def look_up(host: str) -> str:
    """Return the first IPv4 address of a host. Raises BackendError if there is none."""
    try:
        addresses = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BackendError(
            f"the host {host!r} has no IPv4 address ({reason}); check the name, or give the number"
        ) from None
    return str(addresses[0][4][0])


TIMEOUT_S = 5.0  # for connecting and reading the answer together
_HELLO = 14  # fixed by ggml-rpc ("must be always 14")
_CAPS_BYTES = 24
REQUEST = struct.pack("<BQ", _HELLO, _CAPS_BYTES) + bytes(_CAPS_BYTES)
ANSWER = struct.Struct(f"<Q4B{_CAPS_BYTES}s")
ANSWER_BYTES = ANSWER.size - 8  # the size that an answer must declare


def check_worker(address: Address, version: tuple[int, int], timeout_s: float = TIMEOUT_S) -> None:
    """Connect to a worker, compare its protocol with ``version`` (major, minor) and disconnect. Any thread.

    Raises BackendError, after ``timeout_s`` at the latest.
    """
    answer = _ask(address, timeout_s)
    # This is the rule of ggml-rpc's client, which does not compare patch versions.
    if answer[0] != version[0] or answer[1] > version[1]:
        raise BackendError(
            f"the RPC worker {address.text} speaks version {'.'.join(map(str, answer))} of ggml-rpc's protocol, and "
            f"this build version {version[0]}.{version[1]}; run the same version of llamapipe on both machines"
        )


def _ask(address: Address, timeout_s: float) -> tuple[int, int, int]:
    deadline = time.monotonic() + timeout_s
    try:
        with socket.create_connection((address.ip, address.port), timeout_s) as sock:
            sock.sendall(REQUEST)
            size, major, minor, patch, _, _ = ANSWER.unpack(_receive(sock, deadline))
    except EOFError:
        raise BackendError(
            f"{address.text} closed the connection instead of answering; it is no RPC worker, or one of another "
            "version: run `llamapipe rpc-worker` of the same version there"
        ) from None
    except TimeoutError:
        raise BackendError(
            f"{address.text} did not answer within {timeout_s:g} s; an RPC worker serves one process at a time: "
            "end the other one, or check that a worker runs there and no firewall is in between"
        ) from None
    except OSError as error:
        raise BackendError(
            f"no connection to the RPC worker {address.text} ({error.strerror or error}); "
            f"start it there: `llamapipe rpc-worker --port {address.port}`"
        ) from None
    if size != ANSWER_BYTES:
        raise BackendError(
            f"{address.text} answered {size} bytes instead of {ANSWER_BYTES}; it is no RPC worker, or one of another "
            "version: run `llamapipe rpc-worker` of the same version there"
        )
    return major, minor, patch


def _receive(sock: socket.socket, deadline: float) -> bytes:
    """Receive a whole answer.

    Raises EOFError if the connection ends, TimeoutError at the deadline even if bytes arrive.
    """
    data = b""
    while len(data) < ANSWER.size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        part = sock.recv(ANSWER.size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


_lock = Lock()
_open: dict[str, Any] = {}  # the native connections, by address


def library() -> Path:
    """Return the path of ggml-rpc's library. Raises BackendError if this build has none."""
    path = next(LIB_DIR.glob("libllamapipe-rpc.*"), None)
    if path is None:
        raise BackendError(
            "this build has no RPC backend; build it: `python build_native.py` or `pip install .`, without "
            "`--no-rpc` or `-C rpc=off`"
        )
    return path


class Workers:
    """The connections of one model to its workers; ``close`` ends them.

    ``devices``: the native handles of the workers' devices, in the order of the addresses; valid for the life of the
    process. Any thread.

    Raises TypeError and ValueError for wrong addresses, BackendError if a worker cannot be reached, does not answer,
    speaks another version of the protocol, or belongs to another model of this process.
    """

    def __init__(self, rpc: object) -> None:
        self._native = native()
        lib = self._native.lib
        self._endpoints: list[str] = []
        self.devices: list[Any] = []
        addresses = parse_addresses(rpc, lib.GGML_RPC_MAX_SERVERS)
        path = library()
        _warn(addresses)
        try:
            for address in addresses:
                self._connect(path, address)
        except BaseException:
            self.close()
            raise

    def _connect(self, path: Path, address: Address) -> None:
        ffi, lib = self._native.ffi, self._native.lib
        with _lock:
            if address.endpoint in _open:
                raise BackendError(
                    f"the RPC worker {address.text} is used by another model of this process; close that one, "
                    "or start a worker for each"
                )
            check_worker(address, (lib.RPC_PROTO_MAJOR_VERSION, lib.RPC_PROTO_MINOR_VERSION))
            handle = lib.lp_rpc_connect(str(path).encode(), address.endpoint.encode())
            reasons = drain_log(self._native)
            if handle == ffi.NULL:
                raise BackendError(
                    f"no connection to the RPC worker {address.text} "
                    f"({'; '.join([last_error(self._native), *reasons])}); check that it still runs"
                )
            _open[address.endpoint] = handle
            self._endpoints.append(address.endpoint)
            n = lib.lp_rpc_devices(handle, 0, ffi.NULL)
            devices = ffi.new("ggml_backend_dev_t[]", n)
            lib.lp_rpc_devices(handle, n, devices)
            self.devices += list(devices)

    def close(self) -> None:
        """End the connections; a second call does nothing. Call it after the model is freed, and not after a fork."""
        with _lock:
            endpoints, self._endpoints = self._endpoints, []
            for endpoint in endpoints:
                self._native.lib.lp_rpc_disconnect(_open.pop(endpoint))


def _warn(addresses: Sequence[Address]) -> None:
    far = [address.text for address in addresses if not address.is_loopback]
    if far:
        logging.getLogger("llamapipe").warning(
            "weights and prompts go to %s in the clear: RPC connections are neither authenticated nor encrypted; "
            "use them in a network of your own only",
            ", ".join(far),
        )


_LOG_PERIOD_S = 1.0


def free_port(address: Address) -> Address:
    """Return the address with a port that is currently free. Raises BackendError if ``address`` cannot be used."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address.ip, address.port))
        except OSError as error:
            raise BackendError(
                f"the worker cannot listen at {address.endpoint} ({error.strerror}); choose another --port, or 0"
            ) from None
        return Address(address.text, address.ip, int(sock.getsockname()[1]))


_SO_ATTACH_FILTER = 26  # Linux; the module socket does not name it


def _admit_only(address: Address, networks: Sequence[ipaddress.IPv4Network]) -> bool:
    """Admit only these networks to the socket that listens at an address. Return False if there is no such socket.

    A kernel filter (Linux's Documentation/networking/filter.rst) drops other machines' packets: to them the port looks
    like one behind a firewall. ggml-rpc itself makes the socket and accepts every connection.
    """
    here = [ipaddress.IPv4Network(ip) for ip in ("127.0.0.1", address.ip)]
    load, mask, compare, answer = 0x20, 0x54, 0x15, 0x06
    sender = 0xFFF00000 + 12  # SKF_NET_OFF: the packet's header; the source address is at byte 12
    code = []
    for network in (*here, *networks):
        code += [(load, 0, 0, sender), (mask, 0, 0, int(network.netmask))]
        code += [(compare, 0, 1, int(network.network_address)), (answer, 0, 0, 0xFFFFFFFF)]
    code.append((answer, 0, 0, 0))
    ffi = native().ffi
    program = ffi.new("char[]", b"".join(struct.pack("=HBBI", *instruction) for instruction in code))
    option = struct.pack("HP", len(code), int(ffi.cast("uintptr_t", program)))
    for entry in Path("/proc/self/fd").iterdir():
        try:
            sock = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue  # not a socket, or the descriptor of the listing itself
        with sock:
            listens = sock.family == socket.AF_INET and sock.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            )
            if listens and sock.getsockname() == (address.ip, address.port):
                sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
                return True
    return False


def serve(
    address: Address,
    devices: Sequence[Any],
    n_threads: int,
    cache: Path | None,
    on_listening: Callable[[], object],
    networks: Sequence[ipaddress.IPv4Network] = (),
) -> None:
    """Serve native devices at a numeric address, one client at a time, for as long as the process lives.

    ``on_listening`` is called on another thread once the worker has answered a first message. ``cache``: a folder for
    large tensors. ``networks``: besides this machine, only these networks can connect (Linux only); ignored if
    ``address`` is a loopback address. The call handles no signals: leave them to the system.

    Raises BackendError if the worker cannot listen.
    """
    module = native()
    ffi, lib = module.ffi, module.lib
    path = library()
    ended = threading.Event()

    def watch() -> None:
        version = (lib.RPC_PROTO_MAJOR_VERSION, lib.RPC_PROTO_MINOR_VERSION)
        filtered = address.is_loopback
        while not ended.is_set():
            # The worker serves connections in turn. When it answers, any connection made before the filter has ended.
            filtered = filtered or _admit_only(address, networks)
            try:
                check_worker(address, version)
                if filtered:
                    break
            except BackendError:
                ended.wait(0.01)
        if not ended.is_set():
            on_listening()
        while not ended.wait(_LOG_PERIOD_S):
            drain_log(module)

    handles = ffi.new("ggml_backend_dev_t[]", list(devices))
    folder = ffi.NULL if cache is None else ffi.new("char[]", str(cache).encode())
    threading.Thread(target=watch, name="llamapipe-rpc-watch", daemon=True).start()
    try:
        lib.lp_rpc_serve(
            str(path).encode(), address.endpoint.encode(), folder, n_threads, len(handles), handles
        )
    finally:
        ended.set()
    raise BackendError(f"the worker at {address.endpoint} ended: {last_error(module)}")
