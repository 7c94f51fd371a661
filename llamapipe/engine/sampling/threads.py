"""Threads for what may take long for one request: compiling a constraint, its masks, logits processors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import perf_counter

from llamapipe.host.cores import usable_cores

SAMPLING_THREAD_NAME = "llamapipe-sampling"
_MOST_AT_FIRST = 4
_LONG_S = 0.01  # a job that runs longer may leave its core to another thread's


class SamplingThreads:
    """Threads that run jobs in the order of ``run``; as many as there are cores, but at most four.

    While all of them have been busy for 10 ms, ``relieve`` starts another one, up to ``n_max``: a job that hangs must
    not stop those of other requests. The threads start with the first jobs and end with ``close``. Methods are for one
    thread, the engine's.
    """

    def __init__(self, n_max: int) -> None:
        self._n_first = max(min(usable_cores(), _MOST_AT_FIRST, n_max), 1)
        self._n_max = n_max
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads: list[_Thread] = []
        self._closed = False

    def __repr__(self) -> str:
        return f"<SamplingThreads n={len(self._threads)} n_jobs={self._jobs.qsize()}>"

    def run(self, job: Callable[[], object]) -> None:
        """Has a thread call ``job``, which must not raise. After ``close``, calls it at once."""
        if self._closed:
            job()
            return
        self._jobs.put(job)
        if len(self._threads) < self._n_first and all(thread.began_s is not None for thread in self._threads):
            self._start()

    def relieve(self) -> None:
        """Starts another thread if jobs wait and every thread has been busy with its job for long."""
        if self._jobs.empty() or len(self._threads) >= self._n_max:
            return
        latest_s = perf_counter() - _LONG_S
        if all(thread.began_s is not None and thread.began_s < latest_s for thread in self._threads):
            self._start()

    def _start(self) -> None:
        thread = _Thread(self._jobs)
        try:
            thread.start()
        except RuntimeError:  # the system refuses another thread
            if not self._threads:
                self._closed = True  # so that jobs run at all
                while not self._jobs.empty():
                    job = self._jobs.get()
                    if job is not None:
                        job()
            return
        self._threads.append(thread)

    def close(self) -> None:
        """Ends the threads after the jobs that wait, and waits for them. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        while not self._jobs.empty():  # added by other jobs meanwhile
            job = self._jobs.get()
            if job is not None:
                job()


class _Thread(threading.Thread):
    """``began_s``: when it began the job that it runs, of ``perf_counter``; None: it waits for one."""

    def __init__(self, jobs: SimpleQueue[Callable[[], object] | None]) -> None:
        super().__init__(name=SAMPLING_THREAD_NAME, daemon=True)
        self._jobs = jobs
        self.began_s: float | None = perf_counter()

    def run(self) -> None:
        """Runs jobs until None comes."""
        while True:
            self.began_s = None
            job = self._jobs.get()
            self.began_s = perf_counter()
            if job is None:
                return
            job()
