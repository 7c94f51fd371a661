"""Several processes with the same model on one port, as ``llamapipe serve --workers`` runs them.

The supervisor loads no model. It accepts connections and hands each to the worker with the fewest connections.

A worker ends in one of three ways. If its process ends, its slot starts the next one, with a longer delay after each
short life. On SIGHUP workers are replaced one by one: when the replacement is ready, the old worker retires. If the
server stops, all workers drain; a second signal cancels them, and a third kills them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llamapipe.errors import LlamapipeError
from llamapipe.fleet._hang_up import on_hang_up
from llamapipe.fleet._process import State, WorkerProcess
from llamapipe.fleet._tasks import Tasks
from llamapipe.fleet._totals import Totals
from llamapipe.fleet.link import Subject
from llamapipe.fleet.placement import Placement
from llamapipe.server.metrics import Family

_log = logging.getLogger("llamapipe.server")
_ACCEPT_AT_ONCE = 64
_SCRAPE_S = 2.0  # the longest wait for one worker's metrics
_ACCEPT_PAUSE_S = 0.1  # the pause after a connection could not be accepted because no descriptors were left


@dataclass
class Backoff:
    """The delay before a restart, which doubles after each short life of a worker. Pure.

    ``first_s``, ``most_s``: the first and the longest delay. ``long_s``: after a worker that served this long, the next
    one starts immediately. ``n_attempts``: after this many workers in a row that ended before they were ready, no other
    worker starts.
    """

    first_s: float = 0.5
    most_s: float = 30.0
    long_s: float = 30.0
    n_attempts: int = 5
    _n_short: int = field(default=0, init=False)
    _n_failed: int = field(default=0, init=False)

    def delay_s(self, served_s: float | None) -> float | None:
        """Return the seconds to wait after a worker that served for ``served_s`` seconds; None: it was never ready.

        Returns None if no other worker should start.
        """
        self._n_failed = self._n_failed + 1 if served_s is None else 0
        if self._n_failed >= self.n_attempts:
            return None
        if served_s is not None and served_s >= self.long_s:
            self._n_short = 0
            return 0.0
        self._n_short += 1
        return float(min(self.first_s * 2 ** (self._n_short - 1), self.most_s))


class WorkerFailedError(LlamapipeError):
    """A worker cannot serve. ``is_usage``: the reason is a wrong option."""

    def __init__(self, message: str, is_usage: bool = False) -> None:
        super().__init__(message)
        self.is_usage = is_usage


@dataclass
class _Slot:
    """The place of one worker: the current worker, and when the next one may start."""

    index: int
    placement: Placement
    backoff: Backoff
    worker: WorkerProcess | None = None


class Supervisor:
    """Workers on one port. For the main thread, whose signals it handles while it runs.

    ``command``: starts a worker when ``--worker OPTIONS`` is appended. ``listener``: a listening socket. ``announce``:
    called once, when all workers are ready. ``n_requests``: how many requests ``/requests`` shows. ``backoff``: called
    for each slot to create its restart rule.
    """

    def __init__(
        self,
        command: Sequence[str],
        listener: socket.socket,
        placements: Sequence[Placement],
        announce: Callable[[], None],
        n_requests: int,
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self._command = command
        self._listener = listener
        self._announce = announce
        self._slots = [_Slot(i, placement, backoff()) for i, placement in enumerate(placements)]
        self._alive: set[WorkerProcess] = set()  # including workers that retire
        self._totals = Totals(n_requests)
        self._n_restarts = 0
        # Accepted connections whose worker refused them, or ended before it took them.
        self._homeless: deque[socket.socket] = deque()
        self._tasks = Tasks()
        self._is_accepting = self._paused = False
        self._announced = False
        self._n_signals = 0
        self._counts = 0, 0

    def __repr__(self) -> str:
        return f"<Supervisor n_workers={len(self._slots)}>"

    def run(self) -> None:
        """Serve until SIGTERM or Ctrl-C. Raises OSError, and WorkerFailedError if a worker cannot serve."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._stop = asyncio.Event()
        self._restart = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop_signal)
        on_hang_up(self._restart.set, self._stop_signal)
        stop = asyncio.ensure_future(self._stop.wait())
        work = [asyncio.ensure_future(self._keep(slot)) for slot in self._slots]
        work.append(asyncio.ensure_future(self._replace_on_request()))
        try:
            done, _ = await asyncio.wait([stop, *work], return_when=asyncio.FIRST_COMPLETED)
            await self._end(work)
            for task in done - {stop}:
                task.result()  # raises the exception that ended the server
        finally:
            for worker in self._alive:  # only if the code above failed: no worker may outlive this process
                worker.kill()
            stop.cancel()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)

    # ---- the life of workers
    def _start(self, slot: _Slot) -> WorkerProcess:
        worker = WorkerProcess(slot.index, self._command, slot.placement, self._on_change, self._start_answer)
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
        self._tasks.start(self._bury(worker))
        return worker

    async def _bury(self, worker: WorkerProcess) -> None:
        """Keep what a worker leaves: its last report, and the connections that it did not take."""
        await worker.ended.wait()
        self._alive.discard(worker)
        self._totals.keep(worker.families, worker.requests)
        self._homeless += worker.untaken
        worker.untaken.clear()
        self._on_change()

    async def _keep(self, slot: _Slot) -> None:
        """Start a slot's worker, and start the next one whenever it ends."""
        worker = slot.worker = self._start(slot)
        while True:
            await worker.ended.wait()
            if slot.worker is not worker and slot.worker is not None:  # the worker was replaced
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
        """Replace the workers one after the other. Each old worker retires when its replacement is ready."""
        for slot in self._slots:
            old = slot.worker
            if old is None or old.state is not State.READY:
                continue  # its slot starts the next worker anyway
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
            if slot.worker is not old:  # the old worker ended meanwhile, and its slot has started another
                new.retire()
                await new.ended.wait()
                continue
            slot.worker = new
            self._n_restarts += 1
            old.retire()
            await old.ended.wait()
            _log.info("worker %d: process %d has replaced %d", slot.index, new.pid, old.pid)

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
        """Stop accepting, and wait until every worker has drained."""
        for task in work:
            task.cancel()
        await asyncio.wait(work)
        self._stop.set()
        self._on_change()
        self._listener.close()
        for worker in self._alive:
            worker.stop()
        while self._alive:
            await asyncio.wait([asyncio.ensure_future(worker.ended.wait()) for worker in self._alive])
            await asyncio.sleep(0)
        for connection in self._homeless:
            connection.close()

    def _on_change(self) -> None:
        """React to a change in a worker's state."""
        here = [worker for slot in self._slots if (worker := slot.worker) is not None]
        counts = sum(worker.state is State.READY for worker in here), len(self._slots)
        if counts != self._counts:
            self._counts = counts
            for worker in self._alive:
                worker.tell_counts(*counts)
            if counts[0] == counts[1] and not self._announced:
                self._announced = True
                self._announce()
        self._update_accepting()

    # ---- connections
    def _update_accepting(self) -> None:
        """Watch the listening socket while a worker can take a connection; otherwise connections wait in the kernel."""
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
        self._update_accepting()

    def _go_on(self) -> None:
        self._paused = False
        self._update_accepting()

    # ---- questions about all workers
    def _start_answer(self, worker: WorkerProcess, number: int, about: Subject) -> None:
        self._tasks.start(self._answer(worker, number, about))

    async def _answer(self, asker: WorkerProcess, number: int, about: Subject) -> None:
        workers = sorted(self._alive, key=lambda worker: worker.pid)
        await asyncio.gather(*(worker.refresh(_SCRAPE_S, about) for worker in workers))
        workers = [worker for worker in workers if worker in self._alive]  # the totals have the others
        if about == "requests":
            asker.answer(number, self._totals.requests_with(worker.requests for worker in workers))
        else:
            asker.answer(number, self._families(workers))

    def _families(self, workers: Sequence[WorkerProcess]) -> list[Family]:
        counted = self._totals.with_live(worker.families for worker in workers)
        connections = [
            (
                "llamapipe_worker_connections",
                {"worker": str(worker.index), "pid": str(worker.pid), "state": worker.state.value},
                float(worker.n_open),
            )
            for worker in self._alive
        ]
        n_ready, n_restarts = float(self._counts[0]), float(self._n_restarts)
        return [
            *counted,
            Family(
                "llamapipe_workers", "Workers that are ready.", "gauge", [("llamapipe_workers", {}, n_ready)]
            ),
            Family("llamapipe_worker_connections", "Open connections of each worker.", "gauge", connections),
            Family(
                "llamapipe_worker_restarts",
                "Workers that were started after the first ones.",
                "counter",
                [("llamapipe_worker_restarts_total", {}, n_restarts)],
            ),
        ]
