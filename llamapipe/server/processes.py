"""Processes that each have a model and an engine, and the supervisor that starts them, again if need be, and ends them.

``llamapipe serve --workers`` runs them on one port. The supervisor loads no model. It accepts connections and hands
each one to the worker with the fewest.

A worker ends in one of three ways. Its process ends: its place starts the next one, later after each short life. It is
replaced, on SIGHUP: when the replacement is ready, the old one retires, then comes the next place. Or the server stops:
all drain, a second signal cancels them, a third kills them.

A supervisor and a worker talk over two socket pairs. Connections go over the first: one byte for each, with the socket
attached, then one byte back when the worker has taken it, or could not, and one when it has ended. Retiring and
stopping are also bytes there, so that they come after all connections that were sent before. Everything else goes over
the second, a line of JSON for each message. If one side ends, the other reads the end of both. ``worker`` is the other
side.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import llamapipe
from llamapipe.errors import BackendError, LlamapipeError
from llamapipe.host.cores import CoreShare, core_shares, n_numa_nodes, set_group_nice, started_on
from llamapipe.native.load import has_gpu_backend

CONNECTION, RETIRE, STOP, CANCEL, KEEP = b"c", b"r", b"s", b"k", b"p"  # to the worker
TAKEN, REFUSED, ENDED = b"t", b"f", b"e"  # from the worker
_LINE_LIMIT = 2**24


@dataclass(frozen=True)
class ServedModel:
    """The model of one process of several that have different ones; see ``server.pool``.

    ``file``: as ``--model`` takes it. ``names``: for clients, the first in answers. ``embeds``: it embeds or ranks
    texts instead of generating them. ``options``: of the command line, by the names of their arguments.
    ``cache_dir``: a folder of its own, where it finds cached prefixes, and keeps them at its end if it is asked to; the
    option of the command line comes first. ``yields``: it leaves the cores to others while it loads.
    """

    file: str
    names: tuple[str, ...]
    embeds: bool
    options: dict[str, Any]
    cache_dir: str | None = None
    yields: bool = False


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker is told on its command line.

    ``connections``, ``messages``: descriptors of its ends of the socket pairs. ``devices``: names of the devices that
    its model may use; None: all. ``own_weights``: it reads the model into memory of its NUMA node, instead of mapping a
    file whose pages are on the node that read them first. ``served``: its model, if the command line names several.
    """

    index: int
    connections: int
    messages: int
    n_threads: int
    devices: tuple[str, ...] | None = None
    own_weights: bool = False
    served: ServedModel | None = None

    def text(self) -> str:
        """The options as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> WorkerOptions:
        """The options from JSON. Raises ValueError."""
        try:
            fields = json.loads(text)
            devices, served = fields.pop("devices"), fields.pop("served")
            if served is not None:
                served = ServedModel(**{**served, "names": tuple(served["names"])})
            return cls(**fields, devices=None if devices is None else tuple(devices), served=served)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"no options of a worker: {text}") from error

    def report_progress(self, fraction: float) -> None:
        """Tells the supervisor how much of the model is loaded; before ``Worker.start``."""
        with socket.socket(fileno=os.dup(self.messages)) as sock, suppress(OSError):
            sock.sendall(_encoded("progress", {"fraction": fraction}))

    def report_failure(self, message: str, is_usage: bool) -> None:
        """Tells the supervisor why this worker cannot serve. Raises OSError if there is none."""
        line = _encoded("failed", {"message": message, "is_usage": is_usage})
        with socket.socket(fileno=self.messages) as sock:
            sock.sendall(line)


class Messages:
    """The second socket. On an event loop's thread."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> Messages:
        """Takes over a socket."""
        return cls(*await asyncio.open_connection(sock=sock, limit=_LINE_LIMIT))

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message without waiting; does nothing if the other side is gone."""
        if not self._writer.is_closing():
            self._writer.write(_encoded(kind, fields))

    async def receive(self) -> dict[str, Any] | None:
        """The next message; None at the end."""
        try:
            line = await self._reader.readline()
        except (ConnectionError, ValueError):
            return None
        if not line.endswith(b"\n"):
            return None
        message: dict[str, Any] = json.loads(line)
        return message

    async def close(self) -> None:
        """Closes the socket after what was sent has gone out."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


def _encoded(kind: str, fields: dict[str, Any]) -> bytes:
    return json.dumps({"kind": kind, **fields}).encode() + b"\n"


class Backoff:
    """Waits twice as long after each short life of a worker. Pure.

    ``first_s``, ``most_s``: the first and the longest delay. ``long_s``: after a worker that served this long the next
    one starts at once. ``n_attempts``: workers in a row that ended before they were ready, until there is no other.
    """

    def __init__(
        self, first_s: float = 0.5, most_s: float = 30.0, long_s: float = 30.0, n_attempts: int = 5
    ) -> None:
        self.first_s = first_s
        self.most_s = most_s
        self.long_s = long_s
        self.n_attempts = n_attempts
        self._n_short = self._n_failed = 0

    def __repr__(self) -> str:
        return f"<Backoff n_short={self._n_short} n_failed={self._n_failed}>"

    def delay_s(self, served_s: float | None) -> float | None:
        """Seconds until the next start, after a worker that served for ``served_s``; None: it was not ready.

        Returns None if there should be no further attempt.
        """
        self._n_failed = self._n_failed + 1 if served_s is None else 0
        if self._n_failed >= self.n_attempts:
            return None
        if served_s is not None and served_s >= self.long_s:
            self._n_short = 0
            return 0.0
        self._n_short += 1
        return float(min(self.first_s * 2 ** (self._n_short - 1), self.most_s))


# A family is (name, help text, type, samples), a sample is (name, labels, value): what JSON can carry.
Sample = tuple[str, dict[str, str], float]
Family = tuple[str, str, str, list[Sample]]
_RATIOS = {"vllm:kv_cache_usage_perc"}


def add_families(live: Iterable[list[Family]], ended: Iterable[list[Family]] = ()) -> list[Family]:
    """One family for each name: counters, histograms and gauges are added up, ratios averaged.

    ``ended``: the last metrics of workers that are no more. Their counters still count, so that no counter of the
    server falls; their gauges do not.
    """
    texts: dict[str, tuple[str, str]] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], list[float]]] = {}
    for families, is_live in [
        *((families, True) for families in live),
        *((families, False) for families in ended),
    ]:
        for name, text, kind, samples in families:
            if kind == "gauge" and not is_live:
                continue
            texts.setdefault(name, (text, kind))
            found = values.setdefault(name, {})
            for sample, labels, value in samples:
                found.setdefault((sample, tuple(sorted(labels.items()))), []).append(value)
    return [
        (
            name,
            text,
            kind,
            [
                (sample, dict(labels), _joined(sample, all_))
                for (sample, labels), all_ in values[name].items()
            ],
        )
        for name, (text, kind) in texts.items()
    ]


def _joined(name: str, values: list[float]) -> float:
    if name in _RATIOS:
        return sum(values) / len(values)
    if name.endswith("_created"):  # the time since which a counter counts
        return min(values)
    return sum(values)


_MOST_UNTAKEN = 32  # connections that a worker was given and has not taken: more are for the others
_PAUSE_S = 1.0  # for a worker that has no descriptor left
_EXIT_S = 60.0  # a process that has closed its sockets must end within this time


class State(enum.Enum):
    """Of a worker: it loads its model, takes connections, finishes those that it has, is no more."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"
    ENDED = "ended"


@dataclass(frozen=True)
class Placement:
    """Where a worker computes. ``devices``: names of its devices; None: all of them."""

    share: CoreShare
    devices: tuple[str, ...] | None = None
    own_weights: bool = False


class WorkerProcess:
    """One worker from its start to its end. On the supervisor's event loop.

    ``untaken``: connections on their way to it; ``refused``: those that it could not take.

    ``changed``: called when connections were taken or have ended, or the state or the progress is another one.
    ``asked``: called with this worker and the number of a question for the metrics of all.
    """

    def __init__(
        self,
        index: int,
        command: Sequence[str],
        placement: Placement,
        changed: Callable[[], None],
        asked: Callable[[WorkerProcess, int], None],
        served: ServedModel | None = None,
    ) -> None:
        self.index = index
        self.progress = 0.0  # how much of its model is loaded
        self.state = State.STARTING
        self.failure: tuple[str, bool] | None = None  # a message, and whether it is about the command line
        self.untaken: deque[socket.socket] = deque()
        self.refused: deque[socket.socket] = deque()
        self.n_given = self.n_ended = 0
        self._is_paused = False
        self.families: list[Family] = []  # its metrics, when it was last asked
        self.settled = asyncio.Event()  # it is ready or has ended
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
                with started_on(placement.share.cores):
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
        """Whether it leaves the cores to others. When its model is loaded, it ends that itself."""
        # Not in the loop's executor, which may be busy with downloads: it has to come before the process is ready.
        threading.Thread(target=set_group_nice, args=(self.pid, yields), daemon=True).start()

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.index} pid={self.pid} {self.state.value} n_open={self.n_open}>"

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def n_open(self) -> int:
        """Connections that it has, or will take."""
        return self.n_given - self.n_ended

    @property
    def can_take(self) -> bool:
        """Whether it may be given another connection now."""
        return self.state is State.READY and len(self.untaken) < _MOST_UNTAKEN and not self._is_paused

    @property
    def served_s(self) -> float | None:
        """Seconds that it was ready; None if it never was."""
        return self._served_s if self._ready_at is None else monotonic() - self._ready_at

    @property
    def exit_text(self) -> str:
        """How it ended, for the log."""
        status = self._process.returncode
        if status is None:
            return "has not ended"
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    # ---- to the worker
    def give(self, connection: socket.socket) -> bool:
        """Hands over a connection. False if the worker cannot have it; the connection is then the caller's."""
        try:
            socket.send_fds(self._connections, [CONNECTION], [connection.fileno()])
        except OSError:
            return False
        # Kept until the worker says that it has taken it: if it ends before, another worker gets the connection.
        self.untaken.append(connection)
        self.n_given += 1
        return True

    def connect(self) -> socket.socket:
        """A new connection to it, for requests of this process. Raises ConnectionError if it has ended."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        if self.state is not State.READY or not self.give(theirs):
            ours.close()
            theirs.close()
            raise ConnectionError(f"process {self.pid} serves no longer")
        return ours

    def retire(self) -> None:
        """Lets it answer what it has, close its connections as they become idle, and end."""
        self._leave(RETIRE)

    def stop(self, keeps_cache: bool = False) -> None:
        """Lets it answer the requests that it has, and end. ``keeps_cache``: in its ``cache_dir``."""
        if keeps_cache and self.state is State.READY:
            with suppress(OSError):
                self._connections.send(KEEP)
        if self.state is State.STARTING:
            self._signal(signal.SIGTERM)
        self._leave(STOP)

    def cancel(self) -> None:
        """Ends it without waiting for answers."""
        if self.state is State.STARTING:
            self._signal(signal.SIGTERM)
        self._leave(CANCEL)

    def kill(self) -> None:
        """Kills it."""
        self._signal(signal.SIGKILL)

    def tell_counts(self, n_ready: int, n_workers: int) -> None:
        """Tells it how many workers there are, for ``/health``."""
        if self._messages is not None and self.state in (State.READY, State.LEAVING):
            self._messages.send("workers", n_ready=n_ready, n_workers=n_workers)

    async def refresh(self, timeout_s: float) -> None:
        """Brings ``families`` up to date, unless the worker is too busy to answer within the time."""
        if self._messages is None or self.state not in (State.READY, State.LEAVING):
            return
        self._n_asked += 1
        number = self._n_asked
        answer = self._snapshots[number] = asyncio.get_running_loop().create_future()
        self._messages.send("snapshot", number=number)
        try:
            await asyncio.wait([answer], timeout=timeout_s)
        finally:
            del self._snapshots[number]

    def answer(self, number: int, families: list[Family]) -> None:
        """Answers its question for the metrics of all workers."""
        if self._messages is not None:
            self._messages.send("metrics", number=number, families=families)

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
            one = data[i : i + 1]
            if one == ENDED:
                self.n_ended += 1
            elif one == TAKEN:
                self.untaken.popleft().close()
            elif one == REFUSED:
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
        """Reads which connections it still took before it ended."""
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
        elif kind == "leaving":  # a signal told it to
            self.retire()
        elif kind == "snapshot":
            self.families = message["families"]
            answer = self._snapshots.get(message["number"])
            if answer is not None and not answer.done():
                answer.set_result(None)
        elif kind == "ask":
            self._asked(self, message["number"])


_log = logging.getLogger("llamapipe.server")
_ACCEPT_AT_ONCE = 64
_SCRAPE_S = 2.0  # how long the metrics of one worker hold up those of all
_ACCEPT_PAUSE_S = 0.1  # after a connection could not be accepted for want of descriptors


class WorkerFailedError(LlamapipeError):
    """A worker cannot serve. ``is_usage``: because an option is wrong."""

    def __init__(self, message: str, is_usage: bool = False) -> None:
        super().__init__(message)
        self.is_usage = is_usage


class _Slot:
    """The place of one worker: the one that is there now, and when the next one may start."""

    def __init__(self, index: int, placement: Placement, backoff: Backoff) -> None:
        self.index = index
        self.placement = placement
        self.backoff = backoff
        self.worker: WorkerProcess | None = None


class Supervisor:
    """Workers on one port. For the main thread, whose signals it handles while it runs.

    ``command``: starts a worker, with ``--worker OPTIONS`` after it. ``listener``: a socket that listens.
    ``announce``: called once, when all workers are ready. ``backoff``: makes the rule of restarts for each worker.
    """

    def __init__(
        self,
        command: Sequence[str],
        listener: socket.socket,
        placements: Sequence[Placement],
        announce: Callable[[], None],
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self._command = command
        self._listener = listener
        self._announce = announce
        self._slots = [_Slot(i, placement, backoff()) for i, placement in enumerate(placements)]
        self._alive: set[WorkerProcess] = set()  # also those that leave
        self._ended: list[Family] = []  # the metrics of all that are no more
        self._n_restarts = 0
        self._homeless: deque[socket.socket] = (
            deque()
        )  # accepted, and the worker ended before it took them, or could not
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_accepting = self._paused = False
        self._announced = False
        self._n_signals = 0
        self._counts = 0, 0

    def __repr__(self) -> str:
        return f"<Supervisor n_workers={len(self._slots)}>"

    def run(self) -> None:
        """Serves until SIGTERM or Ctrl-C. Raises WorkerFailedError if a worker cannot serve, OSError."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._stop = asyncio.Event()
        self._restart = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop_signal)
        self._had_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and has_terminal()
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        stop = asyncio.ensure_future(self._stop.wait())
        work = [asyncio.ensure_future(self._keep(slot)) for slot in self._slots]
        work.append(asyncio.ensure_future(self._replace_on_request()))
        try:
            done, _ = await asyncio.wait([stop, *work], return_when=asyncio.FIRST_COMPLETED)
            await self._end(work)
            for task in done - {stop}:
                task.result()  # raises what ended the server
        finally:
            for worker in self._alive:  # only if the above failed: no worker outlives this process
                worker.kill()
            stop.cancel()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)

    # ---- the life of workers
    def _start(self, slot: _Slot) -> WorkerProcess:
        worker = WorkerProcess(slot.index, self._command, slot.placement, self._changed, self._asked)
        share = slot.placement.share
        _log.info(
            "worker %d starts as process %d: cores %s, %d threads%s",
            slot.index,
            worker.pid,
            ",".join(map(str, share.cores)) or "any",
            share.n_threads,
            f", devices {','.join(slot.placement.devices)}" if slot.placement.devices else "",
        )
        self._alive.add(worker)
        self._spawn(self._bury(worker))
        return worker

    async def _bury(self, worker: WorkerProcess) -> None:
        """Keeps what a worker leaves: its counters, and connections that it did not take."""
        await worker.ended.wait()
        self._alive.discard(worker)
        self._ended = add_families([], [self._ended, worker.families])
        self._homeless += worker.untaken
        worker.untaken.clear()
        self._changed()

    async def _keep(self, slot: _Slot) -> None:
        """Starts a slot's worker, and the next one whenever it ends."""
        worker = slot.worker = self._start(slot)
        while True:
            await worker.ended.wait()
            if slot.worker is not worker and slot.worker is not None:  # it was replaced
                worker = slot.worker
                continue
            if worker.failure is not None and not self._announced:
                raise WorkerFailedError(*worker.failure)  # no attempt can succeed
            delay_s = slot.backoff.delay_s(worker.served_s)
            what = worker.failure[0] if worker.failure is not None else f"it {worker.exit_text}"
            if delay_s is None:
                raise WorkerFailedError(
                    f"worker {slot.index} ended {slot.backoff.n_attempts} times before it could serve; "
                    f"the last time: {what}"
                )
            _log.warning(
                "worker %d (process %d): %s; the next one starts in %g s",
                slot.index,
                worker.pid,
                what,
                delay_s,
            )
            await asyncio.sleep(delay_s)
            self._n_restarts += 1
            worker = slot.worker = self._start(slot)

    async def _replace_on_request(self) -> None:
        while True:
            await self._restart.wait()
            self._restart.clear()
            await self._replace_all()

    async def _replace_all(self) -> None:
        """Replaces the workers one after the other, each when its replacement is ready."""
        for slot in self._slots:
            old = slot.worker
            if old is None or old.state is not State.READY:
                continue  # its slot starts the next one anyway
            new = self._start(slot)
            await new.settled.wait()
            if new.state is not State.READY:
                what = new.failure[0] if new.failure is not None else f"it {new.exit_text}"
                _log.error(
                    "worker %d cannot be replaced, the old one and the others continue: %s",
                    slot.index,
                    what,
                )
                return
            if slot.worker is not old:  # it ended meanwhile, and its slot has started another one
                new.retire()
                await new.ended.wait()
                continue
            slot.worker = new
            self._n_restarts += 1
            old.retire()
            await old.ended.wait()
            _log.info("worker %d: process %d has replaced %d", slot.index, new.pid, old.pid)

    def _hang_up(self) -> None:
        """Replaces the workers. Where the terminal was closed, stops, as programs without a handler do."""
        if self._had_terminal and not has_terminal():
            self._stop_signal()
        else:
            self._restart.set()

    def _stop_signal(self) -> None:
        self._n_signals += 1
        self._stop.set()
        for worker in self._alive:
            if self._n_signals == 1:
                worker.stop()
            elif self._n_signals == 2:
                worker.cancel()
            else:
                worker.kill()

    async def _end(self, work: list[asyncio.Task[None]]) -> None:
        """Stops accepting, and waits until every worker has drained."""
        for task in work:
            task.cancel()
        await asyncio.wait(work)
        self._stop.set()
        self._changed()
        self._listener.close()
        for worker in self._alive:
            worker.stop()
        while self._alive:
            await asyncio.wait([asyncio.ensure_future(worker.ended.wait()) for worker in self._alive])
            await asyncio.sleep(0)
        for connection in self._homeless:
            connection.close()

    def _changed(self) -> None:
        """Does what follows from another state of a worker."""
        here = [worker for slot in self._slots if (worker := slot.worker) is not None]
        counts = sum(worker.state is State.READY for worker in here), len(self._slots)
        if counts != self._counts:
            self._counts = counts
            for worker in self._alive:
                worker.tell_counts(*counts)
            if counts[0] == counts[1] and not self._announced:
                self._announced = True
                self._announce()
        self._accept_or_not()

    # ---- connections
    def _accept_or_not(self) -> None:
        """Watches the listening socket while a worker can take a connection; meanwhile they wait in the kernel."""
        loop = asyncio.get_running_loop()
        for alive in self._alive:
            self._homeless += alive.refused
            alive.refused.clear()
        while self._homeless and (worker := self._least_busy()) is not None:
            if worker.give(self._homeless[0]):
                self._homeless.popleft()
            else:
                break
        wanted = (
            not (self._stop.is_set() or self._paused or self._homeless) and self._least_busy() is not None
        )
        if wanted and not self._is_accepting:
            loop.add_reader(self._listener, self._accept)
        elif self._is_accepting and not wanted:
            loop.remove_reader(self._listener)
        self._is_accepting = wanted

    def _least_busy(self) -> WorkerProcess | None:
        able = [worker for worker in self._alive if worker.can_take]
        return min(able, key=lambda worker: (worker.n_open, worker.n_given), default=None)

    def _accept(self) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            worker = self._least_busy()
            if worker is None or self._homeless:
                break
            try:
                connection = self._listener.accept()[0]
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionError:
                continue  # the client is gone already
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                _log.error("no connection can be accepted: %s", error)
                self._paused = True
                asyncio.get_running_loop().call_later(_ACCEPT_PAUSE_S, self._go_on)
                break
            if not worker.give(connection):
                self._homeless.append(connection)
        self._accept_or_not()

    def _go_on(self) -> None:
        self._paused = False
        self._accept_or_not()

    # ---- metrics
    def _asked(self, worker: WorkerProcess, number: int) -> None:
        self._spawn(self._answer(worker, number))

    async def _answer(self, asker: WorkerProcess, number: int) -> None:
        workers = sorted(self._alive, key=lambda worker: worker.pid)
        await asyncio.gather(*(worker.refresh(_SCRAPE_S) for worker in workers))
        # One that ended meanwhile is among the ended.
        families = add_families([w.families for w in workers if w.state is not State.ENDED], [self._ended])
        connections = [
            (
                "llamapipe_worker_connections",
                {"worker": str(worker.index), "pid": str(worker.pid), "state": worker.state.value},
                float(worker.n_open),
            )
            for worker in self._alive
        ]
        n_ready = float(self._counts[0])
        families += [
            ("llamapipe_workers", "Workers that are ready.", "gauge", [("llamapipe_workers", {}, n_ready)]),
            ("llamapipe_worker_connections", "Open connections of each worker.", "gauge", connections),
            (
                "llamapipe_worker_restarts",
                "Workers that were started after the first ones.",
                "counter",
                [("llamapipe_worker_restarts_total", {}, float(self._n_restarts))],
            ),
        ]
        asker.answer(number, families)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def has_terminal() -> bool:
    """Whether the process has a terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


ROOT = Path(llamapipe.__file__).parent.parent  # imported from there, whatever the working directory holds
_LIST_GPUS = """\
import sys
sys.path.insert(0, sys.argv[1])
from llamapipe.server.processes import print_gpus
print_gpus()
"""


def placements(n: int | None, use_gpus: bool) -> list[Placement]:
    """Where ``n`` workers compute; None: one for each GPU or, without GPUs, for each NUMA node.

    Workers get disjoint cores. With fewer workers than GPUs each gets several; with more, they share them. Raises
    ValueError if there are fewer cores than workers, OSError if the native libraries cannot be loaded.
    """
    shares = None if n is None else core_shares(n)
    gpus = gpu_names() if use_gpus else []
    return placed(shares or core_shares(len(gpus) or n_numa_nodes()), gpus)


def placed(shares: Sequence[CoreShare], gpus: Sequence[str]) -> list[Placement]:
    """A placement for each share; see ``placements``."""
    if not gpus:
        own_weights = len({share.nodes for share in shares}) > 1
        return [Placement(share, None, own_weights) for share in shares]
    n, n_gpus = len(shares), len(gpus)
    if n > n_gpus:
        return [Placement(share, (gpus[i % n_gpus],)) for i, share in enumerate(shares)]
    return [
        Placement(share, tuple(gpus[i * n_gpus // n : (i + 1) * n_gpus // n]))
        for i, share in enumerate(shares)
    ]


def gpu_names() -> list[str]:
    """Names of the GPUs that llama.cpp can use. Raises OSError if that fails."""
    return [name for name, _ in _gpus()]


def free_gpu_memory() -> int:
    """Free bytes of the GPUs with dedicated memory, together; 0 if there are none. Raises OSError if that fails."""
    return sum(n_bytes for _, n_bytes in _gpus()) if has_gpu_backend() else 0


def _gpus() -> list[tuple[str, int]]:
    """The GPUs, and how much of their own memory is free. Asks another process: a supervisor loads no native code."""
    answer = subprocess.run(
        [*interpreter(), "-c", _LIST_GPUS, str(ROOT)],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if answer.returncode:
        last = answer.stderr.strip().rpartition("\n")[2]
        raise OSError(f"the devices cannot be listed: {last or f'status {answer.returncode}'}")
    return [(name, n_bytes) for name, n_bytes in json.loads(answer.stdout.rpartition("\x1e")[2])]


def print_gpus() -> None:
    """Prints the GPUs as JSON, after a record separator: drivers also print."""
    gpus = [device for device in llamapipe.devices() if device.type == "gpu" and not device.is_software]
    found = [(gpu.name, gpu.memory_free if gpu.has_own_memory else 0) for gpu in gpus]
    sys.stdout.write("\x1e" + json.dumps(found))


def supervise(
    arguments: Sequence[str],
    listener: socket.socket,
    where: Sequence[Placement],
    announce: Callable[[], None],
) -> None:
    """Runs workers, which are the command ``llamapipe`` with these arguments, until SIGTERM or Ctrl-C.

    For the main thread. Raises WorkerFailedError, OSError.
    """
    Supervisor(command_with(arguments), listener, where, announce).run()


def command_with(arguments: Sequence[str]) -> list[str]:
    """The command ``llamapipe`` with these arguments, for a process of this interpreter."""
    script = ROOT / "llamapipe_command.py"
    program = [str(script)] if script.exists() else ["-m", "llamapipe"]
    return [*interpreter(), *program, *arguments]


def interpreter() -> list[str]:
    """The interpreter with its own options. Raises BackendError in a program that was packed into one file."""
    if getattr(sys, "frozen", False):
        raise BackendError(
            "this program was packed with its interpreter (PyInstaller) and cannot start llamapipe's processes; serve "
            "one model in one process, or install Python and `pip install llamapipe`"
        )
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
