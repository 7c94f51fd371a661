"""Threads that take turns between clients, for slow samplers and for the long work of event loops.

Open this file to change which job runs next, or how many threads a client may use.

The principle: no client can exhaust the threads, or the cores that compute steps. The shares (see ``Tenant``) take
turns. A named share uses at most four threads at a time, and never more than are free. Of eight threads, the first
client may use four, the second two, and two more clients one each.

Within a share the sampler that has taken the least processor time comes first (start-time fair queueing). One of the
share's threads takes no jobs of samplers whose last job was slow, so forty slow constraints do not delay a quick one of
the same client. On Linux the thread of a long job gets a lower priority. The thread ends with the job, because a
process without privileges cannot raise a priority.

Large jobs need memory for the texts that they convert. They declare their size, and wait in a separate queue until
there is room.
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
_LONG_S = 0.01  # if all threads have been busy for longer, a spare one starts
_SLOW_S = 0.1  # the thread of a job that runs longer gets a lower priority; schemas usually take less
_MOST_SIZE = 2**22  # characters of the large jobs that run at the same time; a larger job runs without others
_NICE = 10  # while steps need all cores, about a tenth of the CPU time of a thread that computes them


class _Waiting(NamedTuple):
    job: Job
    is_python: bool
    size: int
    is_slow: bool


_Line = list[tuple[float, int, _Waiting]]  # a heap: by place in seconds, then in order of arrival


class Place:
    """The place of one sampler's next job among the jobs of its share, in seconds of processor time.

    ``FairThreads.run`` moves the place up to that of the share; ``add_time`` adds the time of a job. ``is_slow``:
    the last jobs took long. ``expected_s``: how long the next job may take, so that cheap jobs come first; 0: unknown.
    """

    __slots__ = ("at_s", "expected_s", "is_slow")

    def __init__(self, expected_s: float = 0.0) -> None:
        self.at_s = 0.0
        self.expected_s = expected_s
        self.is_slow = expected_s > _SLOW_S

    def add_time(self, seconds: float, together_s: float) -> None:
        """Add the processor time of a job; ``together_s`` includes the jobs that ran with it."""
        self.at_s += seconds
        self.is_slow = together_s > _LONG_S


class _Share:
    """Three queues of jobs: ``jobs``, ``slow`` (of samplers whose last job was slow), and ``large``.

    ``was_large``: whether the last turn went to a large job. ``now_s``: the place of the latest job that began.
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
        """The queue of the next job that is not large. Slow jobs use at most ``most_slow`` threads."""
        if not self.slow or (self.jobs and self.jobs[0] < self.slow[0]):
            return self.jobs
        return self.slow if self.n_slow < self.most_slow else self.jobs

    def add(self, waiting: _Waiting, place: Place | None) -> None:
        """Add a job to its queue. ``place``: None puts it at the place of the share."""
        if waiting.size:
            self.large.append(waiting)
            return
        at_s = self.now_s
        if place is not None:
            at_s = place.at_s = max(self.now_s, place.at_s)
            at_s += place.expected_s
        heappush(self.slow if waiting.is_slow else self.jobs, (at_s, next(self._order), waiting))

    def take(self, is_large: bool) -> _Waiting:
        """Remove the next job from its queue, the large one if ``is_large``, and return it."""
        self.was_large = is_large
        if is_large:
            return self.large.popleft()
        at_s, _, waiting = heappop(self.ready)
        self.now_s = max(self.now_s, at_s)
        self.n_slow += waiting.is_slow
        return waiting


class FairThreads:
    """Threads that run jobs: as many as there are cores, but at most four.

    When all threads have been busy for 10 ms, ``add_spare_thread`` starts another one, up to ``n_max``: a hanging job
    must not stop the jobs of other requests. The threads start with the first jobs and end with ``close``. Any thread.

    ``most_slow``: maximum number of a share's slow jobs that run at the same time; None: all its threads but one.
    """

    def __init__(self, n_max: int, most_slow: int | None = None) -> None:
        self._most_slow = most_slow
        self._n_first = max(min(usable_cores(), _MOST_AT_FIRST, n_max), 1)
        self._n_max = n_max
        self._lock = Lock()  # for the attributes below; held for microseconds
        self._shares: OrderedDict[Hashable, _Share] = OrderedDict()  # in the order of their turns
        self._n_running = 0
        self._size = 0  # characters of the large jobs that run
        self._threads: list[_Thread] = []
        self._closed = False
        # True wakes a thread for a job that might run now; False ends a thread.
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

        ``is_python``: the job holds the interpreter's lock, so its thread keeps its priority. ``size``: the number of
        characters of a large job; 0: the job needs little memory. ``place``: the jobs of one sampler share it; None:
        the sampler has only this job.
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
        """Lower the priority of threads whose jobs have run for 100 ms.

        Start another thread if jobs wait and all threads have been busy for 10 ms.
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
        """Return the share to serve next and whether to run its large jobs; None if no job may run now."""
        has_room = True
        for name, share in self._shares.items():
            n_most = share.most if name is None else min(share.most, self._n_max - self._n_running)
            if share.n_running >= n_most:
                continue
            if share.large:  # large jobs of later shares do not overtake a large job that has to wait
                has_room = has_room and (not self._size or self._size + share.large[0].size <= _MOST_SIZE)
                if has_room and not (share.was_large and share.ready):
                    return name, True
            if share.ready:
                return name, False
        return None

    def take(self) -> tuple[_Waiting, Hashable] | None:
        """Return the next job and its share; None if no waiting job may run now. For the threads."""
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

    def end_job(self, name: Hashable, thread: _Thread, size: int, is_slow: bool) -> bool:
        """Record the end of a job of the share ``name``. Return False if its thread must end. For the threads."""
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
            # The end of a large job may make room for several jobs.
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
                self._closed = True  # from now on callers run their jobs themselves
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
    """A thread that runs jobs. ``began_s``: when its job began, in seconds of ``perf_counter``; None: it has no job.

    ``is_slowed``: the thread's priority was lowered.
    """

    def __init__(self, pool: FairThreads, wakes: SimpleQueue[bool]) -> None:
        super().__init__(name=WORK_THREAD_NAME, daemon=True)
        self._pool = pool
        self._wakes = wakes
        self._is_python = False
        self.began_s: float | None = perf_counter()
        self.is_slowed = False

    def run(self) -> None:
        """Run jobs until the pool ends this thread, or until a job ends after the priority was lowered."""
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
            if not self._pool.end_job(share, self, waiting.size, waiting.is_slow):
                return

    def slow_down(self) -> None:
        """Lower the priority of the thread, on Linux only. Does nothing while a Python job runs."""
        if self.is_slowed or self._is_python or self.native_id is None or sys.platform != "linux":
            return
        try:
            os.setpriority(os.PRIO_PROCESS, self.native_id, _NICE)
            self.is_slowed = True
        except OSError:  # the thread has ended, or the system forbids the change
            pass
