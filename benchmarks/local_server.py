"""Servers under measurement, each in a process of its own on the loopback address."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SERVE = (sys.executable, "-m", "llamapipe", "serve")


class Server(NamedTuple):
    """A running server: its port, and the number of its process."""

    port: int
    pid: int


@contextlib.contextmanager
def running(*command: object) -> Iterator[Server]:
    """A server in another process, once it answers. The option ``--port`` is added to the command."""
    port = free_port()
    arguments = [*map(str, command), "--port", str(port)]
    child = subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + 120
        while not healthy(port):
            if child.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server does not start: {' '.join(arguments)}")
            time.sleep(0.05)
        yield Server(port, child.pid)
    finally:
        child.terminate()
        child.wait()


def post(port: int, path: str, body: Any) -> Any:
    """The JSON of an answer. Raises HTTPError if it is not one of success."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def healthy(port: int) -> bool:
    """Whether a server answers on a port."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return b"200 OK" in connection.recv(1000)
    except OSError:
        return False


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
