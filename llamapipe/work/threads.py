"""Threads that take turns between clients: for samplers that take long, and for the long work of event loops.

Open this file to change which job runs next, or how many threads a client may use.

The principle: no client can exhaust the threads, or the cores that compute steps. The shares (see ``Tenant``) take
turns, and a named share has at most four threads at a time, but never more than are free. Of eight threads, the first
client may use four, the second two, and two more clients one each.

Within a share the sampler that has taken the least processor time comes first (start-time fair queueing). One of the
share's threads takes no jobs of samplers whose last job was slow, so forty slow constraints do not delay a quick one of
the same client. On Linux the thread of a long job gets a lower priority, and ends with the job, because a priority
cannot be raised again.

Large jobs need memory for the texts that they convert. They declare their size, and wait in a second queue until there
is room.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from itertools import count
from queue import SimpleQueue
from time import perf_counter
from typing import NamedTuple

from llamapipe.host.cores import usable_cores
from llamapipe.locks import Lock

Job = Callable[[], object]
WORK_THREAD_NAME = "llamapipe-sampling"
_MOST_AT_FIRST = 4
_MOST_OF_SHARE = 4
_LONG_S = 0.01  # a job that runs longer may leave its core to another thread's
_SLOW_S = 0.1  # a job that runs longer gets a thread of lower priority; schemas usually take less
_MOST_SIZE = 2**22  # of the large jobs that run at a time; a larger one runs without others
_NICE = 10  # about a tenth of the time of a thread that computes steps, where they need all cores


class _Waiting(NamedTuple):
    job: Job
    is_python: bool
    size: int
    is_slow: bool


_Line = list[tuple[float, int, _Waiting]]  # a heap: by place, then in order


class Place:
    """The place of one sampler's next job among the jobs of its share, in seconds of processor time.

    ``FairThreads.run`` moves it up to the place of the share; ``took`` adds the time of a job. ``is_slow``: its last
    jobs took long. ``expected_s``: how long the next job may take, if that is known, so that cheap jobs come first.
    """

    __slots__ = ("at_s", "expected_s", "is_slow")

    def __init__(self, expected_s: float = 0.0) -> None:
        self.at_s = 0.0
        self.expected_s = expected_s
        self.is_slow = expected_s > _SLOW_S

    def took(self, seconds: float, together_s: float) -> None:
        """Add the processor time of a job, which took ``together_s`` including the jobs that ran with it."""
        self.at_s += seconds
        self.is_slow = together_s > _LONG_S


class _Share:
    """Three queues of jobs: ``jobs``, ``slow`` (of samplers whose last job was slow), and ``large``.

    ``was_large``: whether the last turn went to a large job. ``now_s``: the place of the job that began last.
    """

    def __init__(self, most: int, most_slow: int) -> None:
        self.most = most
        self.most_slow = most_slow
        self.jobs: _Line = []
        self.slow: _Line = []
        self.large: deque[_Waiting] = deque()
        self.was_large = False
        self.n_running = self.n_slow = 0
        self.now_s = 0.0
        self._order = count()

    @property
    def n_waiting(self) -> int:
        return len(self.jobs) + len(self.slow) + len(self.large)

    @property
    def ready(self) -> _Line:
        """The queue of the next job that is not large. One thread is reserved for jobs that are not slow."""
        if not self.slow or (self.jobs and self.jobs[0] < self.slow[0]):
            return self.jobs
        return self.slow if self.n_slow < self.most_slow else self.jobs

    def add(self, waiting: _Waiting, place: Place | None) -> None:
        """Add a job to its queue."""
        if waiting.size:
            self.large.append(waiting)
            return
        at_s = self.now_s
        if place is not None:
            at_s = place.at_s = max(self.now_s, place.at_s)
            at_s += place.expected_s
        heappush(self.slow if waiting.is_slow else self.jobs, (at_s, next(self._order), waiting))

    def take(self, is_large: bool) -> _Waiting:
        """Return the next job."""
        self.was_large = is_large
        if is_large:
            return self.large.popleft()
        at_s, _, waiting = heappop(self.ready)
        self.now_s = max(self.now_s, at_s)
        self.n_slow += waiting.is_slow
        return waiting


class FairThreads:
    """Threads that run jobs: as many as there are cores, but at most four.

    While all of them have been busy for 10 ms, ``add_spare_thread`` starts another one, up to ``n_max``: a job that
    hangs must not stop the jobs of other requests. The threads start with the first jobs and end with ``close``. Any
    thread. ``most_slow``: maximum number of slow jobs of a share that run at the same time; None: all its threads but
    one.
    """

    def __init__(self, n_max: int, most_slow: int | None = None) -> None:
        self._most_slow = most_slow
        self._n_first = max(min(usable_cores(), _MOST_AT_FIRST, n_max), 1)
        self._n_max = n_max
        self._lock = Lock()  # of what follows; held for microseconds
        self._shares: OrderedDict[Hashable, _Share] = OrderedDict()  # in the order of their turns
        self._n_running = 0
        self._size = 0  # of the large jobs that run
        self._threads: list[_Thread] = []
        self._closed = False
        # True for each job that might run now, False to end a thread.
        self._wakes: SimpleQueue[bool] = SimpleQueue()

    def __repr__(self) -> str:
        n_jobs = sum(share.n_waiting for share in list(self._shares.values()))
        return f"<FairThreads n={len(self._threads)} n_jobs={n_jobs}>"

    def run(
        self,
        job: Job,
        share: Hashable = None,
        is_python: bool = False,
        size: int = 0,
        place: Place | None = None,
    ) -> None:
        """Call ``job``, which must not raise, on one of the threads. After ``close``, call it immediately.

        ``is_python``: the job holds the interpreter's lock, so its thread keeps its priority. ``size``: the characters
        of a large job; 0: it needs little memory. ``place``: shared by the jobs of one sampler; None: this is the only
        job.
        """
        with self._lock:
            if not self._closed:
                share_jobs = self._shares.get(share)
                if share_jobs is None:
                    most = self._n_max if share is None else _MOST_OF_SHARE
                    share_jobs = _Share(most, self._most_slow or max(most - 1, 1))
                    self._shares[share] = share_jobs
                is_slow = place is not None and place.is_slow
                share_jobs.add(_Waiting(job, is_python, size, is_slow), place)
                threads = [thread for thread in self._threads if not thread.is_slowed]
                if len(threads) < self._n_first and all(thread.began_s is not None for thread in threads):
                    self._start()
                if not self._closed:
                    self._wakes.put(True)
                return
        job()

    def add_spare_thread(self) -> None:
        """Lower the priority of long jobs.

        Start another thread if jobs wait and all threads have been busy for long.
        """
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

    def _next(self) -> tuple[Hashable, bool] | None:
        """Return the share whose turn it is, and whether it is its large jobs' turn; None if nothing may run now."""
        has_room = True
        for name, share in self._shares.items():
            n_most = share.most if name is None else min(share.most, self._n_max - self._n_running)
            if share.n_running >= n_most:
                continue
            if share.large:  # one that has to wait is not overtaken by those of later shares
                has_room = has_room and (not self._size or self._size + share.large[0].size <= _MOST_SIZE)
                if has_room and not (share.was_large and share.ready):
                    return name, True
            if share.ready:
                return name, False
        return None

    def take(self) -> tuple[_Waiting, Hashable] | None:
        """Return the next job and its share; None if every share with jobs has all its threads. For the threads."""
        with self._lock:
            next_share = self._next()
            if next_share is None:
                return None
            name, is_large = next_share
            share = self._shares[name]
            job = share.take(is_large)
            share.n_running += 1
            self._n_running += 1
            self._size += job.size
            self._shares.move_to_end(name)
            return job, name

    def done(self, name: Hashable, thread: _Thread, size: int, is_slow: bool) -> bool:
        """Record the end of a job. Return False if its thread must end. For the threads."""
        with self._lock:
            thread.began_s = None
            share = self._shares[name]
            share.n_running -= 1
            share.n_slow -= is_slow
            self._n_running -= 1
            self._size -= size
            if not share.n_waiting and not share.n_running:
                del self._shares[name]
            waiting = (share.n_waiting for share in self._shares.values())
            # After a large job several may have room.
            n_wakes = min(sum(waiting), len(self._threads)) if size else any(waiting)
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
        for share in list(self._shares.values()):
            share.n_slow = 0
            while share.n_waiting:
                job = share.take(not share.ready)
                share.n_slow = 0
                job.job()

    def close(self) -> None:
        """End the threads after all waiting jobs, and wait for the threads. A second call does nothing."""
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
    """Return whether the priority of this thread was lowered."""
    thread = threading.current_thread()
    return isinstance(thread, _Thread) and thread.is_slowed


class _Thread(threading.Thread):
    """A thread for jobs. ``began_s``: when its job began, by ``perf_counter``; None: it waits for one.

    ``is_slowed``: its priority was lowered.
    """

    def __init__(self, pool: FairThreads, wakes: SimpleQueue[bool]) -> None:
        super().__init__(name=WORK_THREAD_NAME, daemon=True)
        self._pool = pool
        self._wakes = wakes
        self._is_python = False
        self.began_s: float | None = perf_counter()
        self.is_slowed = False

    def run(self) -> None:
        """Run jobs until the pool ends this thread, or until its priority was lowered."""
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
            if not self._pool.done(share, self, waiting.size, waiting.is_slow):
                return

    def slow_down(self) -> None:
        """Lower the priority of the thread, where threads have one."""
        if self.is_slowed or self._is_python or self.native_id is None or sys.platform != "linux":
            return
        try:
            os.setpriority(os.PRIO_PROCESS, self.native_id, _NICE)
            self.is_slowed = True
        except OSError:  # it has ended, or the system forbids it
            pass
