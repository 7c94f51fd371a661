"""One process with a model and an engine, from start to end, as seen by the process that started it."""

from __future__ import annotations

import asyncio
import enum
import os
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from llamapipe.fleet import link
from llamapipe.fleet.link import Messages, ServedModel, Subject, WorkerOptions
from llamapipe.fleet.placement import Placement
from llamapipe.host.cores import pin_thread, set_group_nice
from llamapipe.server.metrics import Family

_MOST_UNTAKEN = 32  # connections sent to a worker that it has not taken; further ones go to other workers
_PAUSE_S = 1.0  # without new connections, for a worker that has no file descriptor left
_EXIT_S = 60.0  # a process is killed this long after closing its sockets, unless it has ended


class State(enum.Enum):
    """The state of a worker: loading its model, taking connections, finishing the open ones, or ended."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"
    ENDED = "ended"


class WorkerProcess:
    """One worker from its start to its end. Use it on the supervisor's event loop.

    ``untaken``: connections on their way to the worker. ``refused``: connections that it could not take.

    ``changed``: called when connections were taken or have ended, and when the state or the progress has changed.
    ``asked``: called with this worker and the number and subject of each question that it has about all workers; None:
    questions are not answered.
    """

    def __init__(
        self,
        index: int,
        command: Sequence[str],
        placement: Placement,
        changed: Callable[[], None],
        asked: Callable[[WorkerProcess, int, Subject], None] | None = None,
        served: ServedModel | None = None,
    ) -> None:
        self.index = index
        self.progress = 0.0  # the fraction of its model that is loaded, from 0 to 1
        self.state = State.STARTING
        self.failure: tuple[str, bool] | None = None  # a message, and whether it is about the command line
        self.untaken: deque[socket.socket] = deque()
        self.refused: deque[socket.socket] = deque()
        self.n_given = self.n_ended = 0
        self._is_paused = False
        # As of its last answers: its metrics, and where the time of its recent requests went.
        self.families: list[Family] = []
        self.requests: list[dict[str, Any]] = []
        self.settled = asyncio.Event()  # set when it is ready or has ended
        self.ended = asyncio.Event()
        self._changed = changed
        self._asked = asked
        self._ready_at: float | None = None
        self._served_s: float | None = None
        self._snapshots: dict[int, asyncio.Future[None]] = {}
        self._n_asked = 0
        self._connections, theirs = socket.socketpair()
        messages, their_messages = socket.socketpair()
        with theirs, their_messages:
            options = WorkerOptions(
                index,
                theirs.fileno(),
                their_messages.fileno(),
                placement.share.n_threads,
                placement.devices,
                placement.own_weights,
                served,
            )
            try:
                with pin_thread(placement.share.cores):
                    self._process = subprocess.Popen(
                        [*command, "--worker", options.text()],
                        stdin=subprocess.DEVNULL,
                        pass_fds=(options.connections, options.messages),
                        start_new_session=True,  # Ctrl-C is for the supervisor
                    )
            except BaseException:
                self._connections.close()
                messages.close()
                raise
        if served is not None and served.yields:
            self.let_yield(True)
        self._connections.setblocking(False)
        messages.setblocking(False)
        asyncio.get_running_loop().add_reader(self._connections, self._read)
        self._messages: Messages | None = None
        self._task = asyncio.ensure_future(self._live(messages))

    def let_yield(self, yields: bool) -> None:
        """Make the process leave the cores to others, or undo this. The process undoes it when its model is loaded."""
        # Not in the loop's executor, which may be busy with downloads: this must happen before the process is ready.
        threading.Thread(target=set_group_nice, args=(self.pid, yields), daemon=True).start()

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.index} pid={self.pid} {self.state.value} n_open={self.n_open}>"

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def n_open(self) -> int:
        """The number of connections that it has taken or will take, and that have not ended."""
        return self.n_given - self.n_ended

    @property
    def can_take(self) -> bool:
        """Whether it may be given another connection now."""
        return self.state is State.READY and len(self.untaken) < _MOST_UNTAKEN and not self._is_paused

    @property
    def served_s(self) -> float | None:
        """The seconds for which it has been ready, or was; None if it never was."""
        return self._served_s if self._ready_at is None else monotonic() - self._ready_at

    @property
    def exit_text(self) -> str:
        """How the process ended, for the log."""
        status = self._process.returncode
        if status is None:
            return "has not ended"
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    # ---- to the worker
    def give(self, connection: socket.socket) -> bool:
        """Hand over a connection. Return False if that fails; the caller then keeps the connection."""
        try:
            socket.send_fds(self._connections, [link.CONNECTION], [connection.fileno()])
        except OSError:
            return False
        # Kept until the worker reports that it has taken the connection: if it ends first, another worker gets it.
        self.untaken.append(connection)
        self.n_given += 1
        return True

    def connect(self) -> socket.socket:
        """Return a new connection to the worker for this process's requests. Raises ConnectionError if it has ended."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        if self.state is not State.READY or not self.give(theirs):
            ours.close()
            theirs.close()
            raise ConnectionError(f"process {self.pid} no longer takes connections")
        return ours

    def retire(self) -> None:
        """Let the worker answer its requests, close its connections as they become idle, and end."""
        self._leave(link.RETIRE)

    def stop(self, keeps_cache: bool = False) -> None:
        """Let the worker answer its requests and end. ``keeps_cache``: save cached prefixes in its ``cache_dir``."""
        if keeps_cache and self.state is State.READY:
            with suppress(OSError):
                self._connections.send(link.KEEP)
        if self.state is State.STARTING:
            self._signal(signal.SIGTERM)
        self._leave(link.STOP)

    def stop_tools(self) -> None:
        """End the tool calls that run in the worker, because the server will end."""
        if self.state is State.READY:
            with suppress(OSError):
                self._connections.send(link.STOP_TOOLS)

    def cancel(self) -> None:
        """End the worker without waiting for the answers to its requests."""
        if self.state is State.STARTING:
            self._signal(signal.SIGTERM)
        self._leave(link.CANCEL)

    def kill(self) -> None:
        """Kill the process."""
        self._signal(signal.SIGKILL)

    def tell_counts(self, n_ready: int, n_workers: int) -> None:
        """Send the worker the numbers of ready and of all workers, for ``/health``."""
        if self._messages is not None and self.state in (State.READY, State.LEAVING):
            self._messages.send("workers", n_ready=n_ready, n_workers=n_workers)

    async def refresh(self, timeout_s: float, about: Subject = "families") -> None:
        """Update ``families`` or ``requests``, unless the worker is too busy to answer within the time."""
        if self._messages is None or self.state not in (State.READY, State.LEAVING):
            return
        self._n_asked += 1
        number = self._n_asked
        answer = self._snapshots[number] = asyncio.get_running_loop().create_future()
        self._messages.send("snapshot", number=number, about=about)
        try:
            await asyncio.wait([answer], timeout=timeout_s)
        finally:
            del self._snapshots[number]

    def answer(self, number: int, facts: Sequence[Any]) -> None:
        """Answer the worker's question about all workers."""
        if self._messages is not None:
            self._messages.send("answer", number=number, found=facts)

    def _leave(self, how: bytes) -> None:
        if self.state is State.ENDED:
            return
        with suppress(OSError):
            self._connections.send(how)
        if self.state is State.READY:
            self._set(State.LEAVING)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _set(self, state: State) -> None:
        self.state = state
        if state in (State.READY, State.ENDED):
            self.settled.set()
        self._changed()

    # ---- from the worker
    def _read(self) -> None:
        try:
            data = self._connections.recv(4096)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._connections)
            return
        self._note(data)
        self._changed()

    def _note(self, data: bytes) -> None:
        for i in range(len(data)):
            byte = data[i : i + 1]
            if byte == link.ENDED:
                self.n_ended += 1
            elif byte == link.TAKEN:
                self.untaken.popleft().close()
            elif byte == link.REFUSED:
                self.refused.append(self.untaken.popleft())
                self.n_given -= 1
                if not self._is_paused:
                    self._is_paused = True
                    asyncio.get_running_loop().call_later(_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._is_paused = False
        self._changed()

    async def _live(self, sock: socket.socket) -> None:
        self._messages = messages = await Messages.open(sock)
        while (message := await messages.receive()) is not None:
            self._handle(message)
        deadline = monotonic() + _EXIT_S
        while self._process.poll() is None:
            if monotonic() > deadline:
                self.kill()
            await asyncio.sleep(0.01)
        if self._connections.fileno() >= 0:
            self._read_all()
            asyncio.get_running_loop().remove_reader(self._connections)
            self._connections.close()
        self._served_s, self._ready_at = self.served_s, None
        for answer in self._snapshots.values():
            if not answer.done():
                answer.set_result(None)
        await messages.close()
        self._set(State.ENDED)
        self.ended.set()

    def _read_all(self) -> None:
        """Read which connections the worker took before it ended."""
        with suppress(OSError):
            while data := self._connections.recv(4096):
                self._note(data)

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "ready" and self.state is State.STARTING:
            self._ready_at = monotonic()
            self._set(State.READY)
        elif kind == "progress":
            self.progress = message["fraction"]
            self._changed()
        elif kind == "failed":
            self.failure = message["message"], message["is_usage"]
        elif kind == "leaving":  # because of a signal
            self.retire()
        elif kind == "snapshot":
            if message["about"] == "requests":
                self.requests = message["found"]
            else:
                self.families = [Family(*family) for family in message["found"]]
            answer = self._snapshots.get(message["number"])
            if answer is not None and not answer.done():
                answer.set_result(None)
        elif kind == "ask" and self._asked is not None:
            self._asked(self, message["number"], message["about"])
