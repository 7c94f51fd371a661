"""``llamapipe rpc-worker``: lends this machine's devices to models that run elsewhere."""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from llamapipe.arguments import check_int, path_of
from llamapipe.cli.options import number_or_automatic
from llamapipe.cli.parser import UsageError, usage_errors
from llamapipe.errors import BackendError
from llamapipe.host.cores import usable_cores
from llamapipe.rpc import Address, check_host, free_port, look_up, serve

USAGE = "llamapipe rpc-worker [options]"
DESCRIPTION = """\
Lend this machine's devices to a model that runs in another process: its GPUs, or its CPU if it has none. A worker
serves one process at a time."""
EPILOG = """\
examples:
  llamapipe rpc-worker --port 50052
  llamapipe generate -m large.gguf --rpc 127.0.0.1:50052 "Once upon a time"
  llamapipe rpc-worker --host 10.0.0.2 --allow-network 10.0.0.0/24

Connections are neither authenticated nor encrypted: every process of this machine and of the networks that
--allow-network names can use this machine's memory and devices, and end the worker. Ctrl-C ends it at once.
docs/guides/rpc.md says more."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="listen at this address (127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, default=50052, metavar="N", help="listen on this port; 0: a free one (50052)"
    )
    parser.add_argument(
        "--allow-network",
        action="append",
        default=[],
        metavar="NETWORK",
        help="let machines of this network connect, such as 10.0.0.0/24 (repeatable; Linux)",
    )
    parser.add_argument(
        "--device",
        action="append",
        metavar="NAME",
        help="lend this device only (repeatable; doctor lists them)",
    )
    parser.add_argument(
        "-t",
        "--threads",
        type=number_or_automatic,
        metavar="N",
        help="CPU threads (default, and -1: the cores)",
    )
    parser.add_argument(
        "--cache",
        type=path_of,
        metavar="DIR",
        help="keep large tensors here, so that they are sent only once",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command, until a signal or an error ends it."""
    networks = [_network(text) for text in args.allow_network]
    address = _address(args, networks)
    with usage_errors():
        n_threads = usable_cores() if args.threads is None else check_int("--threads", args.threads, 1, 512)
    if args.cache is not None:
        args.cache.mkdir(parents=True, exist_ok=True)
    devices, names = _devices(args.device)
    address = free_port(address)
    # Native code listens and computes. Only the system's own handler ends it immediately.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stdout:
        sys.stdout.flush()
        # ggml-rpc writes messages about each client to stdout.
        nowhere = None if args.verbose else os.open(os.devnull, os.O_WRONLY)
        os.dup2(2 if nowhere is None else nowhere, 1)

        def announce() -> None:
            print(
                f"llamapipe rpc-worker serves {', '.join(names)} at {address.endpoint}",
                file=stdout,
                flush=True,
            )
            if not address.is_loopback:
                print(
                    f"llamapipe: machines of {', '.join(map(str, networks))} can connect to {address.ip}; "
                    "connections are neither authenticated nor encrypted",
                    file=sys.stderr,
                    flush=True,
                )

        serve(address, devices, n_threads, args.cache, announce, networks)
    return 0


def _network(text: str) -> ipaddress.IPv4Network:
    try:
        return ipaddress.IPv4Network(text)
    except ValueError as error:
        raise UsageError(
            f"--allow-network: {error}; give an IPv4 network such as 10.0.0.0/24, or one machine's address"
        ) from None


def _address(args: argparse.Namespace, networks: Sequence[ipaddress.IPv4Network]) -> Address:
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port is {args.port}; it must be from 0 to 65535")
    with usage_errors():
        check_host("--host", args.host.strip("[]"))
    address = Address(args.host, look_up(args.host), args.port)
    if address.is_loopback and networks:
        raise UsageError(
            f"--allow-network is given, but --host is {args.host}, which only this machine reaches; "
            "give --host the address at which that network reaches this machine"
        )
    if not address.is_loopback and sys.platform != "linux":
        raise UsageError(
            f"--host is {args.host}, which other machines can reach; only on Linux can a worker keep others out: "
            "use 127.0.0.1 and a tunnel (WireGuard, SSH)"
        )
    if not address.is_loopback and not networks:
        raise UsageError(
            f"--host is {args.host}, which other machines can reach, and ggml-rpc neither authenticates nor encrypts: "
            "everyone there could use this machine's memory and devices; name who may, such as --allow-network "
            "10.0.0.0/24"
        )
    return address


def _devices(wanted: list[str] | None) -> tuple[list[Any], list[str]]:
    """Return the native handles and names of the requested devices, else of the GPUs, else of the CPU."""
    from llamapipe.llama.devices import device_handles

    known = device_handles()
    if wanted is None:
        gpus = [pair for pair in known if pair[0].type in ("gpu", "igpu")]
        chosen = gpus or [pair for pair in known if pair[0].type == "cpu"]
    else:
        names = [device.name for device, _ in known]
        if missing := [name for name in wanted if name not in names]:
            raise BackendError(f"there is no device {missing[0]!r}; this machine has: {', '.join(names)}")
        chosen = [pair for pair in known if pair[0].name in wanted]
    return [handle for _, handle in chosen], [device.name for device, _ in chosen]
