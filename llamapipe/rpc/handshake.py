"""The first message of ggml-rpc's protocol, in Python: ggml-rpc itself ends the process or waits without a limit.

Source: ``RPC_CMD_HELLO``, ``rpc_msg_hello_req`` and ``rpc_msg_hello_rsp`` in llama.cpp's
``ggml/src/ggml-rpc/ggml-rpc.cpp``, ``RPC_CONN_CAPS_SIZE`` in ``transport.h``. Numbers are little-endian:

- request: the command (1 byte, 14), the size of what follows (8 bytes), the client's transports (24 bytes, 0: TCP);
- answer: the size (8 bytes), the version (major, minor, patch, padding: a byte each), the server's transports (24).
"""

from __future__ import annotations

import socket
import struct
import time

from llamapipe.errors import BackendError
from llamapipe.rpc.addresses import Address

TIMEOUT_S = 5.0  # for connecting and the answer together
_HELLO = 14  # "must be always 14", says the source
_CAPS_BYTES = 24
REQUEST = struct.pack("<BQ", _HELLO, _CAPS_BYTES) + bytes(_CAPS_BYTES)
ANSWER = struct.Struct(f"<Q4B{_CAPS_BYTES}s")
ANSWER_BYTES = ANSWER.size - 8  # what the answer's own size says


def check_worker(address: Address, version: tuple[int, int], timeout_s: float = TIMEOUT_S) -> None:
    """Connects to a worker, compares its protocol with ``version`` (major, minor) and disconnects. Any thread.

    Raises BackendError, after ``timeout_s`` at the latest.
    """
    found = _ask(address, timeout_s)
    # The rule of ggml-rpc's client. It does not compare patch versions.
    if found[0] != version[0] or found[1] > version[1]:
        raise BackendError(
            f"the RPC worker {address.text} speaks version {'.'.join(map(str, found))} of ggml-rpc's protocol, and "
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
    """A whole answer. Raises EOFError at its end, TimeoutError at the deadline, also if bytes trickle in."""
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
