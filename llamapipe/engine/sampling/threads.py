"""Threads for what may take long for one request: compiling a constraint, its masks, logits processors.

Jobs are fair to shares (see ``Tenant``): the shares take turns, and a named one has at most four threads at a time, and
no more than are free then. So neither one client nor two can use up the threads, or the cores that compute steps: of
eight threads, the first client has four, the next one two, and two more have one each.

A long job leaves its place to others: on Linux its thread gets a lower priority, and ends with the job, as a priority
cannot be raised again.

Large jobs, which need memory for the texts that they convert, say how large they are. They wait in a line beside that
of the others, until those that run leave room.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from time import perf_counter
from typing import NamedTuple

from llamapipe.host.cores import usable_cores
from llamapipe.locks import Lock

SAMPLING_THREAD_NAME = "llamapipe-sampling"
_MOST_AT_FIRST = 4
_MOST_OF_SHARE = 4
_LONG_S = 0.01  # a job that runs longer may leave its core to another thread's
_SLOW_S = 0.1  # a job that runs longer gets a thread of lower priority; schemas usually take less
_MOST_SIZE = 2**22  # of the large jobs that run at a time; a larger one runs without others
_NICE = 10  # about a tenth of the time of a thread that computes steps, where they need all cores
Job = Callable[[], object]


class _Waiting(NamedTuple):
    job: Job
    is_python: bool
    size: int


class _Share:
    """``was_large``: which of its two lines had the last turn."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.jobs: deque[_Waiting] = deque()
        self.large: deque[_Waiting] = deque()
        self.was_large = False
        self.n_running = 0

    @property
    def n_waiting(self) -> int:
        return len(self.jobs) + len(self.large)


class SamplingThreads:
    """Threads that run jobs; as many as there are cores, but at most four.

    While all of them have been busy for 10 ms, ``relieve`` starts another one, up to ``n_max``: a job that hangs must
    not stop those of other requests. The threads start with the first jobs and end with ``close``. Any thread.
    """

    def __init__(self, n_max: int) -> None:
        self._n_first = max(min(usable_cores(), _MOST_AT_FIRST, n_max), 1)
        self._n_max = n_max
        self._lock = Lock()  # of what follows; held for microseconds
        self._shares: OrderedDict[Hashable, _Share] = OrderedDict()  # in the order of their turns
        self._n_running = 0
        self._size = 0  # of the large jobs that run
        self._threads: list[_Thread] = []
        self._closed = False
        self._wakes: SimpleQueue[bool] = (
            SimpleQueue()
        )  # True for each job that might run now, False to end a thread

    def __repr__(self) -> str:
        n_jobs = sum(share.n_waiting for share in list(self._shares.values()))
        return f"<SamplingThreads n={len(self._threads)} n_jobs={n_jobs}>"

    def run(self, job: Job, share: Hashable = None, is_python: bool = False, size: int = 0) -> None:
        """Has a thread call ``job``, which must not raise. After ``close``, calls it at once.

        ``is_python``: it holds the interpreter's lock, so its thread keeps its priority. ``size``: of a large job, in
        characters; 0: it needs little memory.
        """
        with self._lock:
            if not self._closed:
                found = self._shares.get(share)
                if found is None:
                    found = _Share(self._n_max if share is None else _MOST_OF_SHARE)
                    self._shares[share] = found
                (found.large if size else found.jobs).append(_Waiting(job, is_python, size))
                threads = [thread for thread in self._threads if not thread.is_slowed]
                if len(threads) < self._n_first and all(thread.began_s is not None for thread in threads):
                    self._start()
                if not self._closed:
                    self._wakes.put(True)
                return
        job()

    def relieve(self) -> None:
        """Lowers the priority of long jobs. Starts another thread if jobs wait and all threads are busy for long."""
        if not self._shares:
            return
        now_s = perf_counter()
        with self._lock:
            for thread in self._threads:
                if thread.began_s is not None and now_s - thread.began_s > _SLOW_S:
                    thread.slow_down()
            if (
                not self._closed
                and len(self._threads) < self._n_max
                and self._next() is not None
                and all(t.began_s is not None and now_s - t.began_s > _LONG_S for t in self._threads)
            ):
                self._start()

    def _next(self) -> tuple[Hashable, deque[_Waiting]] | None:
        """The share whose turn it is, and its line whose turn it is; None if nothing may run now."""
        has_room = True
        for name, share in self._shares.items():
            n_most = share.most if name is None else min(share.most, self._n_max - self._n_running)
            if share.n_running >= n_most:
                continue
            if share.large:  # one that has to wait is not overtaken by those of later shares
                has_room = has_room and (not self._size or self._size + share.large[0].size <= _MOST_SIZE)
                if has_room and not (share.was_large and share.jobs):
                    return name, share.large
            if share.jobs:
                return name, share.jobs
        return None

    def take(self) -> tuple[_Waiting, Hashable] | None:
        """The next job, with its share; None if every share with jobs has its threads. For the threads."""
        with self._lock:
            found = self._next()
            if found is None:
                return None
            name, line = found
            taken, share = line.popleft(), self._shares[name]
            share.n_running += 1
            self._n_running += 1
            share.was_large = taken.size > 0
            self._size += taken.size
            self._shares.move_to_end(name)
            return taken, name

    def done(self, name: Hashable, thread: _Thread, size: int) -> bool:
        """Notes the end of a job. False if its thread is to end. For the threads."""
        with self._lock:
            thread.began_s = None
            share = self._shares[name]
            share.n_running -= 1
            self._n_running -= 1
            self._size -= size
            if not share.n_waiting and not share.n_running:
                del self._shares[name]
            waiting = (share.n_waiting for share in self._shares.values())
            n_wakes = (
                min(sum(waiting), len(self._threads)) if size else any(waiting)
            )  # several have room after a large one
            for _ in range(n_wakes):
                self._wakes.put(True)
            if not thread.is_slowed:
                return True
            if thread in self._threads:
                self._threads.remove(thread)
            n_quick = sum(not other.is_slowed for other in self._threads)
            if self._shares and not self._closed and n_quick < self._n_first:
                self._start()
            return False

    def _start(self) -> None:
        thread = _Thread(self, self._wakes)
        try:
            thread.start()
        except RuntimeError:  # the system refuses another thread
            if not self._threads:
                self._closed = True  # so that jobs run at all
                self._run_rest()
            return
        self._threads.append(thread)

    def _run_rest(self) -> None:
        """Runs the jobs that are left in this thread."""
        for share in list(self._shares.values()):
            for line in (share.large, share.jobs):
                while line:
                    line.popleft().job()

    def close(self) -> None:
        """Ends the threads after the jobs that wait, and waits for them. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._wakes.put(False)
        for thread in threads:
            thread.join()
        self._run_rest()


def on_slowed_thread() -> bool:
    """Whether the priority of this thread was lowered."""
    thread = threading.current_thread()
    return isinstance(thread, _Thread) and thread.is_slowed


class _Thread(threading.Thread):
    """``began_s``: when it began the job that it runs, of ``perf_counter``; None: it waits for one.

    ``is_slowed``: its priority was lowered.
    """

    def __init__(self, pool: SamplingThreads, wakes: SimpleQueue[bool]) -> None:
        super().__init__(name=SAMPLING_THREAD_NAME, daemon=True)
        self._pool = pool
        self._wakes = wakes
        self._is_python = False
        self.began_s: float | None = perf_counter()
        self.is_slowed = False

    def run(self) -> None:
        """Runs jobs until False comes, or until it was slowed down."""
        while True:
            self.began_s = None
            if not self._wakes.get():
                return
            self.began_s = perf_counter()
            taken = self._pool.take()
            if taken is None:
                continue
            waiting, share = taken
            self._is_python = waiting.is_python
            waiting.job()
            if not self._pool.done(share, self, waiting.size):
                return

    def slow_down(self) -> None:
        """Lowers the priority of the thread, where threads have one."""
        if self.is_slowed or self._is_python or self.native_id is None or sys.platform != "linux":
            return
        try:
            os.setpriority(os.PRIO_PROCESS, self.native_id, _NICE)
            self.is_slowed = True
        except OSError:  # it has ended, or the system forbids it
            pass
