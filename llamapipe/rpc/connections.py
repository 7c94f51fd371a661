"""Connections of this process to workers: one for each address, held by the model that uses it.

A worker serves one connection at a time, and keeps one graph for each of its devices. ggml-rpc's client remembers which
one without a lock: two contexts that compute at once could each get the result of the other's graph. So a worker
belongs to one model, and such a model has one context.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamapipe.errors import BackendError
from llamapipe.locks import Lock
from llamapipe.native.load import LIB_DIR, drain_log, last_error, native
from llamapipe.rpc.addresses import Address, parse_addresses
from llamapipe.rpc.handshake import check_worker

_lock = Lock()
_open: dict[str, Any] = {}  # the native connections, by address


def library() -> Path:
    """The path of ggml-rpc's library. Raises BackendError if this build has none."""
    path = LIB_DIR / "libllamapipe-rpc.so"
    if not path.is_file():
        raise BackendError(
            "this build has no RPC backend; build it: `python build_native.py` or `pip install .`, without "
            "`--no-rpc` or `-C rpc=off`"
        )
    return path


class Workers:
    """The connections of one model; ``close`` ends them.

    ``devices``: the native handles of the workers' devices, in the order of the addresses; valid for the life of the
    process. Any thread.

    Raises TypeError and ValueError for wrong addresses, BackendError if a worker cannot be reached, does not answer,
    speaks another version of the protocol, or belongs to another model of this process.
    """

    def __init__(self, given: object) -> None:
        self._native = native()
        lib = self._native.lib
        self._endpoints: list[str] = []
        self.devices: list[Any] = []
        addresses = parse_addresses("rpc", given, lib.GGML_RPC_MAX_SERVERS)
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
            found = ffi.new("ggml_backend_dev_t[]", n)
            lib.lp_rpc_devices(handle, n, found)
            self.devices += list(found)

    def close(self) -> None:
        """Ends the connections; a second call does nothing. After the model is freed, and not after a fork."""
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
