"""Measures how busy the machine is, and divides the cores among this process's engines.

Linux reports the run delay of threads, the idle time of cores and the throttling of groups. Each class opens its files
once. A read takes a few microseconds for a thread, and some tens of microseconds for all cores.

llama.cpp's threads wait for each other by spinning, so two engines with a thread for each core block each other.
Therefore every engine reports when it computes, and ``CoreBudget`` tells it how many threads it may use.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from llamapipe.host import files
from llamapipe.host._control_group import limit_files
from llamapipe.host.cores import cpu_quota, usable_cores
from llamapipe.locks import Lock

_TASKS = Path("/proc/self/task")
_STAT = Path("/proc/stat")
_RESOLVED_S = 0.1
_APART_S, _N_MARKS = 0.03, 8  # minimum seconds between two marks; number of marks that are kept
_OLD_S, _STALE_S = 0.15, 60.0  # the age in seconds from which, and up to which, a mark is compared with


class RunDelay:
    """The run time and run delay of some of this process's threads, from ``/proc/self/task/*/schedstat``.

    The run delay is how long a thread with work waited for a core. Raises OSError if a file does not exist: on systems
    other than Linux, or if a thread has ended.
    """

    def __init__(self, thread_ids: Iterable[int], tasks: Path = _TASKS) -> None:
        self._files: list[int] = []
        try:
            for thread_id in thread_ids:
                self._files.append(files.open_file(tasks / str(thread_id) / "schedstat", os.O_RDONLY))
        except BaseException:
            self.close()
            raise

    def read(self) -> tuple[float, float]:
        """Return the total seconds that the threads have run and that they have waited for a core, since they began."""
        run_ns = delay_ns = 0
        for file in self._files:
            fields = files.read_at(file, 80, 0).split()
            run_ns += int(fields[0])
            delay_ns += int(fields[1])
        return run_ns * 1e-9, delay_ns * 1e-9

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        while self._files:
            os.close(self._files.pop())


class IdleCores:
    """Idle time of the cores that this process may run on, from ``/proc/stat``. Raises OSError without that file.

    The kernel counts in steps of 10 ms per core, so compare readings that are at least 100 ms apart. If this process is
    not niced, the time of niced processes counts as idle: the kernel would give that time to this process.
    """

    def __init__(self, stat: Path = _STAT) -> None:
        if not hasattr(os, "sysconf"):  # Wine shows Linux files to programs for Windows
            raise OSError("this system does not tell how often it counts")
        self._file = files.open_file(stat, os.O_RDONLY)
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        self._names = frozenset(f"cpu{core}".encode() for core in cores)
        self.n_cores = len(self._names)
        self._n_bytes = 200 * (os.cpu_count() or 1) + 400
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")
        self._count_niced = os.getpriority(os.PRIO_PROCESS, 0) <= 0
        self.counted = self._names, self._count_niced  # readings can be compared only if this is equal

    def read(self) -> float:
        """Return the total seconds that the cores have been idle since the machine started."""
        ticks = 0
        for line in files.read_at(self._file, self._n_bytes, 0).splitlines():
            if not line.startswith(b"cpu"):
                break
            name, _user, nice, _system, idle, iowait, *_ = line.split()
            if name in self._names:
                ticks += int(idle) + int(iowait) + (int(nice) if self._count_niced else 0)
        return ticks * self._tick_s

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Throttling:
    """Counts how often this process's control group, or one around it, has used up its CPU quota; 0 without a quota.

    The run delay includes the time of throttled threads, although no other work has taken their cores.
    """

    def __init__(self) -> None:
        self._files: list[int] = []
        if cpu_quota(limit_files("cpu", "cpu.cfs_quota_us", "cpu.max")) is None:
            return
        for path in limit_files("cpu", "cpu.stat", "cpu.stat"):
            try:
                self._files.append(files.open_file(path, os.O_RDONLY))
            except OSError:
                continue  # a container does not see the groups around it

    def read(self) -> int:
        """Return the number of throttled periods since the groups were created."""
        n = 0
        for file in self._files:
            for line in files.read_at(file, 1024, 0).splitlines():
                if line.startswith(b"nr_throttled "):
                    n += int(line.split()[1])
        return n

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        while self._files:
            os.close(self._files.pop())


class CpuLoad:
    """Reads run delay, idle time and throttling for a set of threads. One thread at a time; ``cpu_load`` makes it.

    ``run_and_delay_s``: ``RunDelay.read`` for the watched threads. ``idle_s``: see ``IdleCores.read``. ``n_throttled``:
    see ``Throttling.read``. ``process_s``: seconds of CPU time that this process has used. ``earlier``: the core times
    of a recent moment to compare with; None if none were recorded.
    """

    def __init__(self) -> None:
        self._delay, self._cores, self._throttling = RunDelay([]), IdleCores(), Throttling()
        self.earlier = _recent_mark(self._cores.counted)
        self.run_and_delay_s = self._delay.read
        self.idle_s = self._cores.read
        self.n_throttled = self._throttling.read
        self.process_s = time.process_time

    def watch(self, thread_ids: Iterable[int]) -> None:
        """Watch these threads instead of the former ones. Raises OSError if one has ended."""
        self._delay.close()
        self._delay = RunDelay(thread_ids)
        self.run_and_delay_s = self._delay.read

    def close(self) -> None:
        """Close all files; a second call does nothing."""
        self._delay.close()
        self._cores.close()
        self._throttling.close()


class CoreTimes(NamedTuple):
    """A time of ``perf_counter``, and by then the cores' idle seconds and the process's seconds of CPU time."""

    now_s: float
    idle_s: float
    process_s: float


# Pairs of ``IdleCores.counted`` and times, oldest first. Any thread reads the tuple, so it is replaced, never changed.
_marks: tuple[tuple[object, CoreTimes], ...] = ()


def mark_cores() -> None:
    """Record how long cores have been idle, for engines that will soon compute. Takes 0.1 ms; any thread.

    An engine's first step is often its longest. On a busy machine it should not start with a thread for each core.
    """
    global _marks
    now_s, marks = time.perf_counter(), _marks
    if marks and now_s - marks[-1][1].now_s < _APART_S:
        return
    try:
        cores = IdleCores()
    except OSError:
        return
    try:
        mark = CoreTimes(now_s, cores.read(), time.process_time())
        _marks = (*marks, (cores.counted, mark))[-_N_MARKS:]
    except ValueError:  # the file has another format; imports call this and must not fail
        return
    finally:
        cores.close()


def _recent_mark(counted: object) -> CoreTimes | None:
    """Return the newest mark that is old enough to compare with, or else the oldest; None if there is none.

    Stale marks, and marks of other cores or another priority than ``counted``, are left out.
    """
    now_s = time.perf_counter()
    marks = [mark for what, mark in _marks if what == counted and now_s - mark.now_s <= _STALE_S]
    old = [mark for mark in marks if now_s - mark.now_s >= _OLD_S]
    return old[-1] if old else marks[0] if marks else None


def cpu_load() -> CpuLoad | None:
    """Return a reader of this system's load; None if the system does not report all figures."""
    mark_cores()
    try:
        return CpuLoad() if has_run_delay() else None
    except OSError:
        return None


def free_cores(seconds: float) -> float | None:
    """Wait ``seconds`` and return how many of this process's cores were idle on average; None if unknown."""
    try:
        cores = IdleCores()
    except OSError:
        return None
    began_s, idle_s = time.perf_counter(), cores.read()
    time.sleep(seconds)
    idle_s, elapsed_s = cores.read() - idle_s, time.perf_counter() - began_s
    cores.close()
    return idle_s / elapsed_s


class OtherWork:
    """Measures how many of this process's cores other processes have used, on average, since the last reading.

    Raises OSError if the system does not report it.
    """

    def __init__(self, stat: Path = _STAT) -> None:
        self._cores = IdleCores(stat)
        self._last = self._now()

    def __repr__(self) -> str:
        return f"<OtherWork of {self._cores.n_cores} cores>"

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), self._cores.read() + time.process_time()

    def read(self) -> float:
        """Return the average number of cores that other processes used since the last call.

        Returns 0 for an interval under 100 ms, which the kernel does not resolve.
        """
        (began_s, before_s), self._last = self._last, self._now()
        elapsed_s, free_or_ours_s = self._last[0] - began_s, self._last[1] - before_s
        if elapsed_s < _RESOLVED_S:
            return 0.0
        return max(self._cores.n_cores - free_or_ours_s / elapsed_s, 0.0)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._cores.close()


def has_run_delay() -> bool:
    """Return whether this system reports how long threads wait for cores, as Linux with its usual options does."""
    try:
        delay = RunDelay([os.getpid()])
    except OSError:
        return False
    try:
        return delay.read()[0] > 0  # without that option, the kernel fills the file with zeros
    finally:
        delay.close()


class CoreBudget:
    """Divides ``n_cores`` among the members that compute, in the order in which they began to. Any thread."""

    def __init__(self, n_cores: int) -> None:
        self.n_cores = n_cores
        self.lock = Lock()
        self.computing: list[BudgetMember] = []

    def __repr__(self) -> str:
        return f"<CoreBudget n_cores={self.n_cores} n_computing={len(self.computing)}>"

    def member(self, n_fixed: int | None = None) -> BudgetMember:
        """Return a new member, not computing yet. ``n_fixed``: its number of threads; None: the budget decides."""
        return BudgetMember(self, n_fixed)

    @contextmanager
    def take(self) -> Iterator[int]:
        """Take half of the cores, or all if no member computes, and yield how many. Each member keeps a thread."""
        with self.lock:
            n = max(self.n_cores // 2, 1) if self.computing else self.n_cores
        member = self.member(n)
        member.enter()
        try:
            yield n
        finally:
            member.leave()

    def resize(self, n_cores: int) -> None:
        """Change the number of cores to divide."""
        with self.lock:
            self.n_cores = n_cores
            self.divide()

    def divide(self) -> None:
        """Divide the cores that fixed members leave into equal parts of at least one. The caller holds the lock."""
        left, flexible = self.n_cores, []
        for member in self.computing:
            if member.n_fixed is None:
                flexible.append(member)
            else:
                left -= member.n_fixed
        for i, member in enumerate(flexible):
            share = -(-left // (len(flexible) - i))  # rounded up: earlier members get the remainder
            member.n_allowed = max(share, 1)
            left -= member.n_allowed


class BudgetMember:
    """One engine's share of a budget. ``n_allowed``: the threads it may compute with now; read it without the lock."""

    def __init__(self, budget: CoreBudget, n_fixed: int | None) -> None:
        self.n_allowed = budget.n_cores
        self.n_fixed = n_fixed
        self.is_computing = False
        self._budget = budget

    def enter(self) -> None:
        """Record that the member computes from now on."""
        budget = self._budget
        with budget.lock:
            if not self.is_computing:
                self.is_computing = True
                budget.computing.append(self)
                budget.divide()

    def leave(self) -> None:
        """Record that the member waits for work from now on, or has been closed."""
        budget = self._budget
        with budget.lock:
            if self.is_computing:
                self.is_computing = False
                budget.computing.remove(self)
                self.n_allowed = budget.n_cores
                budget.divide()


_budget: CoreBudget | None = None
_making = Lock()


def process_budget() -> CoreBudget:
    """Return the budget of this process, made from ``usable_cores`` at the first call."""
    global _budget
    with _making:
        if _budget is None:
            _budget = CoreBudget(usable_cores())
        return _budget


def limit_cores(n_cores: int) -> None:
    """Limit this process to computing on ``n_cores`` cores, so that other processes can use the rest.

    Call it before creating engines. Engines with an explicit number of threads are not affected.
    """
    process_budget().resize(max(min(n_cores, usable_cores()), 1))


def _forget_in_child() -> None:
    """Drop the budget: the parent's engines do not compute here, and threads that are gone may hold its locks."""
    global _budget, _making, _marks
    _budget, _making, _marks = None, Lock(), ()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
mark_cores()  # for the first engine, which computes only after llamapipe is imported and a model is loaded
