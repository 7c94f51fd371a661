"""RPC workers in processes of their own, and servers that only pretend to be one."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from support.run_script import environment


@contextmanager
def worker(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A worker's address and its process, once it listens; killed at the end."""
    command = [sys.executable, "-m", "llamapipe", "rpc-worker", "--port", "0", "--threads", "1", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            assert line, process.stderr.read()
            yield line.split()[-1], process
        finally:
            process.kill()


@contextmanager
def server(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """The address of a server that calls ``answer`` with its first connection, on a thread, and then closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()

        def run() -> None:
            connection, _ = listening.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=run)
        thread.start()
        yield f"{host}:{port}"
        thread.join()
