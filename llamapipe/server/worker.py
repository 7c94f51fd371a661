"""Inside a worker: takes connections from the supervisor, and asks it about the other workers."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from llamapipe.host.cores import limit_cores
from llamapipe.server._metrics import Metrics, rendered
from llamapipe.server.processes import (
    CANCEL,
    CONNECTION,
    ENDED,
    KEEP,
    REFUSED,
    RETIRE,
    STOP,
    TAKEN,
    Messages,
    WorkerOptions,
)

_ANSWER_S = 5.0  # the supervisor waits less for a busy worker


class ConnectionServer(Protocol):
    """What serves connections that others accepted. On its event loop's thread."""

    def connect(self, sock: socket.socket, ended: Callable[[], None]) -> None:
        """Serves a connection, and calls ``ended`` when it is closed."""

    def retire(self) -> None:
        """Answers what comes on the connections that there are, closes them as they become idle, and ends."""

    def stop(self, cancel: bool) -> None:
        """Refuses new requests and ends when the running ones are answered; ``cancel``: at once."""


class Worker:
    """One worker's link to its supervisor.

    Make it before the model is loaded: from then on the process ends when its supervisor does; once it is serving, it
    drains first. ``n_ready``, ``n_workers``: of the server, as the supervisor told last. ``keeps_cache``: what follows
    it should find the cached prefixes.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self.n_ready = self.n_workers = 0
        self.keeps_cache = self._has_failed = False
        limit_cores(options.n_threads)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # for the supervisor
        self._connections = socket.socket(fileno=options.connections)
        self._connections.setblocking(False)
        self.is_serving = False
        self._unsent = b""
        self._questions: dict[int, asyncio.Future[list[Any]]] = {}
        self._n_questions = 0
        watch = threading.Thread(target=self._watch, name="llamapipe-supervisor-watch", daemon=True)
        watch.start()

    def __repr__(self) -> str:
        return f"<Worker {self.options.index}>"

    def _watch(self) -> None:
        """Ends the process if the supervisor ends while a model is loaded; a load cannot be interrupted otherwise."""
        poll = select.poll()
        poll.register(self._connections, 0)  # only the hang-up, which poll() always reports
        poll.poll()
        if not self.is_serving:
            os._exit(1)

    async def start(self, server: ConnectionServer, metrics: Metrics) -> None:
        """Says that this worker is ready, and takes connections from now on."""
        self._server = server
        self._metrics = metrics
        self._messages = await Messages.open(socket.socket(fileno=self.options.messages))
        self._task = asyncio.ensure_future(self._listen())
        self.is_serving = True
        self._messages.send("ready")
        asyncio.get_running_loop().add_reader(self._connections, self._read)

    async def finish(self) -> None:
        """Tells the last metrics; the supervisor gives nothing more."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._connections)
        loop.remove_writer(self._connections)
        await self._tell_metrics(0)
        await self._messages.close()
        self._task.cancel()

    def fail(self, message: str) -> None:
        """Ends this worker, which can answer nothing any longer; the supervisor starts the next one if need be."""
        if not self._has_failed:
            self._has_failed = True
            self._messages.send("failed", message=message, is_usage=False)
            self._messages.send("leaving")
            self._server.stop(cancel=False)

    def leave(self) -> None:
        """Asks the supervisor to let this worker retire."""
        self._messages.send("leaving")

    async def text(self) -> bytes:
        """The metrics of all workers; those of this one if the supervisor does not answer."""
        self._n_questions += 1
        number = self._n_questions
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        self._messages.send("ask", number=number)
        try:
            return rendered(await asyncio.wait_for(answer, _ANSWER_S))
        except (asyncio.TimeoutError, ConnectionError):
            return await asyncio.to_thread(self._metrics.text)
        finally:
            del self._questions[number]

    # ---- from the supervisor
    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._connections, 1, 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, descriptors = b"", []
        if data == CONNECTION:
            self._send(
                TAKEN if descriptors else REFUSED
            )  # without a free descriptor the kernel keeps the socket
            for descriptor in descriptors:
                self._server.connect(_tcp_socket(descriptor), self._one_ended)
        elif data == KEEP:
            self.keeps_cache = True
        elif data == RETIRE:
            self._server.retire()
        elif data == STOP:
            self._server.stop(cancel=False)
        elif data == CANCEL:
            self._server.stop(cancel=True)
        else:  # the supervisor has ended
            asyncio.get_running_loop().remove_reader(self._connections)
            self._server.stop(cancel=False)

    def _one_ended(self) -> None:
        self._send(ENDED)

    def _send(self, data: bytes) -> None:
        self._unsent += data
        loop = asyncio.get_running_loop()
        try:
            self._unsent = self._unsent[self._connections.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._unsent = b""
        if self._unsent:
            loop.add_writer(self._connections, self._send, b"")
        else:
            loop.remove_writer(self._connections)

    async def _listen(self) -> None:
        waiting: set[asyncio.Task[None]] = set()
        while (message := await self._messages.receive()) is not None:
            if message["kind"] == "workers":
                self.n_ready, self.n_workers = message["n_ready"], message["n_workers"]
            elif message["kind"] == "snapshot":
                task = asyncio.ensure_future(self._tell_metrics(message["number"]))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
            elif message["kind"] == "metrics":
                answer = self._questions.get(message["number"])
                if answer is not None and not answer.done():
                    answer.set_result(message["families"])
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the supervisor has ended"))

    async def _tell_metrics(self, number: int) -> None:
        with suppress(Exception):  # the engine may be closed
            families = await asyncio.to_thread(self._metrics.families)
            self._messages.send("snapshot", number=number, families=families)


def _tcp_socket(descriptor: int) -> socket.socket:
    """The socket of a descriptor. With the protocol, which not every system tells: see ``bound_socket``."""
    found = socket.socket(fileno=descriptor)
    if found.proto == socket.IPPROTO_TCP:
        return found
    return socket.socket(found.family, found.type, socket.IPPROTO_TCP, fileno=found.detach())
