"""Serves the devices of this machine to models of other processes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llamapipe.errors import BackendError
from llamapipe.native.load import drain_log, last_error, native
from llamapipe.rpc.addresses import Address
from llamapipe.rpc.connections import library
from llamapipe.rpc.handshake import check_worker

_LOG_PERIOD_S = 1.0


def free_port(address: Address) -> Address:
    """The address with a port that is free just now. Raises BackendError if the given one cannot be used."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address.ip, address.port))
        except OSError as error:
            raise BackendError(
                f"the worker cannot listen at {address.endpoint} ({error.strerror}); choose another --port, or 0"
            ) from None
        return Address(address.text, address.ip, int(sock.getsockname()[1]))


def serve(
    address: Address,
    devices: Sequence[Any],
    n_threads: int,
    cache: Path | None,
    on_listening: Callable[[], object],
) -> None:
    """Serves native devices at a numeric address, one client at a time, for as long as the process lives.

    ``on_listening`` is called, on a thread of its own, once the worker has answered a first message. ``cache``: a
    folder for large tensors. Signals are not handled meanwhile: leave them to the system.

    Raises BackendError if the worker cannot listen.
    """
    module = native()
    ffi, lib = module.ffi, module.lib
    path = library()
    ended = threading.Event()

    def watch() -> None:
        version = (lib.RPC_PROTO_MAJOR_VERSION, lib.RPC_PROTO_MINOR_VERSION)
        while not ended.is_set():
            try:
                check_worker(address, version)
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
