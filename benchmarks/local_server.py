"""Servers under measurement, each in a process of its own on the loopback address."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def process(command: list[str], port: int) -> Iterator[int]:
    """A server in a process of its own, once it answers."""
    with child_process(command, port):
        yield port


@contextlib.contextmanager
def child_process(command: list[str], port: int) -> Iterator[int]:
    """The same; yields the number of the process."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while not healthy(port):
            if child.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server does not start: {' '.join(command)}")
            time.sleep(0.05)
        yield child.pid
    finally:
        child.terminate()
        child.wait()


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
