"""Chooses how many threads compute.

Open this file to change how an engine gives way to other work on the machine.

The principle: llama.cpp's threads spin after every operation until all are done. So if other work takes one of their
cores for a fraction D of the time, all threads stand still for about that fraction, and a step has only the fraction
(1 - D) of its speed. With one thread fewer, no thread has to wait. Hence the rule: use fewer threads as soon as the run
delay shows that other work needs the cores, and use more again when cores are idle.

``RunDelayPolicy`` is this rule. ``StepTimePolicy`` replaces it where the system does not report core usage. Both are
pure. ``ThreadTuner`` reads the counters and applies the decisions, on the thread of the engine or the embedder. A
change takes effect at the next decode, even if the pipeline has a separate launch thread.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable
from time import perf_counter
from typing import TYPE_CHECKING

from llamapipe.errors import BackendError
from llamapipe.host.cpu_load import BudgetMember, CpuLoad, cpu_load, mark_cores, process_budget
from llamapipe.llama.context import Context
from llamapipe.llama.embedding_context import EmbeddingContext
from llamapipe.llama.native_pipeline import on_gpu

if TYPE_CHECKING:
    from llamapipe.pipeline.trace import Trace

# The tolerated run delay of all n threads is 0.6 / n of the time: a larger D costs more than the n-th thread brings.
_TOLERATED = 0.6
_NOISE = 0.03  # the run delay of each thread on a quiet machine, as a fraction of the time
_PATIENCE_S = 0.008  # run delay above the tolerated one that lowers the number of threads: two time slices
_ROUNDING = 0.2  # a core that is idle for all but this fraction counts as free, to start using it
_HALF = 0.5  # a core that is idle for this fraction counts as free, to keep using it
_SHORT_S = 0.5  # an increase that lasts for less was wrong
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 6.4  # seconds before the next increase
_N_STEPS = 8  # numbers of threads in use at most, because each number has its own thread pool


class RunDelayPolicy:
    """Chooses ``n`` threads, at most ``n_max`` and ``limit``, from run delays and idle cores. Times are in seconds."""

    def __init__(self, n_max: int) -> None:
        self.n_max = self.limit = self.n = n_max
        self._excess_s = 0.0  # run delay above the tolerated one
        self._delay_s = self._watched_s = 0.0  # since the excess was last zero: run delay, and time
        self._increased_s = -math.inf
        self._pause_s = _FIRST_PAUSE_S
        self._paused_until_s = -math.inf

    def __repr__(self) -> str:
        return f"<RunDelayPolicy n={self.n} of {self.n_max} limit={self.limit}>"

    def set_limit(self, n: int) -> None:
        """Use at most ``n`` threads. A decrease takes effect immediately, an increase only when cores are idle."""
        self.limit = max(n, 1)
        self._use(min(self.n, self.limit))

    def observe(self, now_s: float, seconds: float, delay_s: float) -> None:
        """Learn that ``n`` threads computed for ``seconds`` and together waited for cores for ``delay_s``."""
        if self.n == 1:
            return
        tolerated = max(_TOLERATED / self.n, _NOISE * self.n) * seconds
        self._excess_s = max(self._excess_s + delay_s - tolerated, 0.0)
        if self._excess_s == 0.0:
            self._delay_s = self._watched_s = 0.0
            return
        self._delay_s += delay_s
        self._watched_s += seconds
        if self._excess_s >= _PATIENCE_S:
            self._decrease(now_s, round(self._delay_s / self._watched_s))

    def _decrease(self, now_s: float, n_missing: int) -> None:
        if now_s - self._increased_s < _SHORT_S:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        else:
            self._pause_s = _FIRST_PAUSE_S
        self._paused_until_s = now_s + self._pause_s
        self._use(self.n - max(n_missing, 1))

    def free(self, now_s: float, n_cores: float, was_idle: bool = False) -> None:
        """Learn how many cores, on average, were idle or ran these threads since the last measurement.

        ``was_idle``: the threads mostly slept.
        """
        more, fewer = math.floor(n_cores + _ROUNDING), math.floor(n_cores + _HALF)
        if more > self.n:
            if now_s >= self._paused_until_s and self._use(min(more, self.limit)):
                self._increased_s = now_s
        elif was_idle and fewer < self.n:  # while they compute, the run delay is more precise
            self._use(fewer)

    def _use(self, n: int) -> bool:
        """Set ``self.n`` to the largest usable number of threads that is at most ``n``. Return whether it changed."""
        before, n = self.n, max(n, 1)
        if 1 < n < self.n_max:
            step = -(-self.n_max // _N_STEPS)
            n = max(n // step * step, 1)
        self.n = n
        if n != before:
            self._excess_s = self._delay_s = self._watched_s = 0.0
        return n != before


_N_LIKE = 8  # steps with one number of tokens to judge by
_N_TRIED = 64  # steps with any numbers of tokens after which a try is given up
_SLOW = 1.8  # a step time above this multiple of the usual one makes the policy try fewer threads
_FASTER = 0.97  # a try is kept if the step time is below this fraction of the earlier one
_FORGET = 1.002  # factor by which the usual time rises with each step, as contexts become longer
_FIRST_TRY_PAUSE_S, _LONGEST_TRY_PAUSE_S = 0.5, 8.0  # seconds between tries


class StepTimePolicy:
    """Decides from step times alone, for systems that do not report core usage.

    A step is compared with earlier steps of the same number of tokens. When steps take far longer than before, the
    policy immediately tries one thread fewer. From time to time, it tries one fewer or one more in any case. A try
    lasts for a few similar steps and is undone unless they were faster.

    The policy chooses ``n``, at most ``n_max`` and ``limit``. Times are seconds of any clock.
    """

    def __init__(self, n_max: int) -> None:
        self.n_max = self.limit = self.n = n_max
        self._recent: dict[int, deque[float]] = {}  # by number of tokens, at ``n`` threads
        self._usual_s: dict[tuple[int, int], float] = {}  # by threads and tokens
        self._tried_from: int | None = None  # the number of threads before the try
        self._before_s: dict[int, float] = {}  # by number of tokens, before the try
        self._n_tried = 0
        self._tries_more = True  # whether the last try was one thread more
        self._was_slow = False  # whether slow steps caused the last try
        self._pause_s = _FIRST_TRY_PAUSE_S
        self._paused_until_s = -math.inf

    def __repr__(self) -> str:
        return f"<StepTimePolicy n={self.n} of {self.n_max} limit={self.limit}>"

    def set_limit(self, n: int) -> None:
        """Use at most ``n`` threads. A decrease takes effect immediately, an increase only through tries."""
        self.limit = max(n, 1)
        if self.n > self.limit:
            self._tried_from = None
            self._use(self.limit)

    def observe(self, now_s: float, n_tokens: int, seconds: float) -> None:
        """Learn that a step of ``n_tokens`` took ``seconds`` with ``n`` threads."""
        recent = self._recent.setdefault(n_tokens, deque(maxlen=_N_LIKE))
        recent.append(seconds)
        if self._tried_from is not None:
            self._judge(now_s, n_tokens, recent)
            return
        if len(recent) < _N_LIKE:
            return
        typical_s = _median(recent)
        usual_s = self._usual_s.get((self.n, n_tokens), typical_s)
        self._usual_s[self.n, n_tokens] = min(usual_s * _FORGET, typical_s)
        is_slow = typical_s > _SLOW * usual_s
        if now_s < self._paused_until_s and (self._was_slow or not is_slow):
            return
        self._was_slow = is_slow
        self._tries_more = self.n < self.limit and not (self._tries_more or is_slow)
        if self._tries_more:
            self._try(self.n + 1)
        elif self.n > 1:
            self._try(self.n - 1)

    def _try(self, n: int) -> None:
        self._tried_from, self._n_tried = self.n, 0
        self._before_s = {n_tokens: _median(times) for n_tokens, times in self._recent.items() if times}
        self._use(n)

    def _judge(self, now_s: float, n_tokens: int, recent: deque[float]) -> None:
        self._n_tried += 1
        before_s = self._before_s.get(n_tokens)
        if before_s is not None and len(recent) == _N_LIKE:
            is_better = _median(recent) < _FASTER * before_s
        elif self._n_tried >= _N_TRIED:
            is_better = False
        else:
            return
        n_before, self._tried_from = self._tried_from, None
        if is_better:
            self._pause_s = _FIRST_TRY_PAUSE_S
        else:
            self._use(min(n_before or 1, self.limit))
            self._pause_s = min(2 * self._pause_s, _LONGEST_TRY_PAUSE_S)
        self._paused_until_s = now_s + self._pause_s

    def _use(self, n: int) -> None:
        if n != self.n:
            self.n = n
            self._recent.clear()


def _median(values: Iterable[float]) -> float:
    """Return the median. Importing ``statistics`` for it would take some milliseconds."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


_DELAY_EVERY_S = 0.008  # reading the run delay of one thread takes 2 us
_CORES_EVERY_S = 0.15  # the kernel counts idle time in steps of 10 ms


class ThreadTuner:
    """Adjusts the number of a context's threads as the load of the machine changes.

    ``member``: the context's share of the process's threads; if it is not computing, call ``begin`` before a launch.
    ``load``: the system's load counters; None: step times are compared. ``is_fixed``: the number never changes, but
    counts in the shares of the process's other engines.
    """

    def __init__(
        self,
        threads: Context | EmbeddingContext,
        member: BudgetMember,
        load: CpuLoad | None,
        is_fixed: bool = False,
        trace: Trace | None = None,
    ) -> None:
        self.n_changes = 0
        self._trace = trace
        self._threads = threads
        self.member = member
        self._load = load
        self._by_delay: RunDelayPolicy | None = None
        self._by_time: StepTimePolicy | None = None
        if is_fixed or threads.n_threads == 1:
            pass
        elif load is not None:
            self._by_delay = RunDelayPolicy(threads.n_threads)
        else:
            self._by_time = StepTimePolicy(threads.n_threads)
        self._is_watching = False
        self._next_s = 0.0  # when the run delay is read again
        self._launched_s = 0.0  # when the last step was launched, or work began
        self._n_allowed = member.n_allowed  # the value at the last check
        self._computing_s = 0.0  # when this number of threads began to compute
        self._delay_began_s = self._delay_s = 0.0
        self._n_throttled = 0
        self._cores_began_s = self._idle_began_s = perf_counter()
        self._idle_s = self._run_s = self._process_s = 0.0
        if self._by_delay is not None and load is not None:
            self._restart_cores(load, self._cores_began_s)
        self._earlier = None if load is None else load.earlier  # until work begins for the first time

    def __repr__(self) -> str:
        return f"<ThreadTuner {self._by_delay or self._by_time or self._threads.n_threads}>"

    def begin(self) -> None:
        """Take a share of the process's threads as work begins, and read how idle the cores were until now."""
        now_s = self._computing_s = self._launched_s = perf_counter()
        self.member.enter()
        if self._by_delay is not None and self._load is not None:
            earlier, self._earlier = self._earlier, None
            if earlier is not None and now_s - self._cores_began_s < _CORES_EVERY_S:
                # Before the first step, use earlier core times: this engine is too new to have measured its own.
                self._cores_began_s, self._idle_s, self._process_s = earlier
                self._idle_began_s = self._cores_began_s
            seconds = now_s - self._cores_began_s
            if seconds >= _CORES_EVERY_S:
                idle_s, process_s = self._idle_s, self._process_s
                self._restart_cores(self._load, now_s)
                free_s = self._idle_s - idle_s + self._process_s - process_s
                was_idle = now_s - self._idle_began_s > 0.5 * seconds
                self._by_delay.free(now_s, free_s / seconds, was_idle)
            self._restart_delay(self._load, now_s)
        self._follow(now_s)

    def yield_cores(self) -> None:
        """Leave the cores to the process's other engines, because no work is left."""
        if not self.member.is_computing:
            return
        self.member.leave()
        now_s = self._idle_began_s = perf_counter()
        self._record(now_s)
        is_old = now_s - self._cores_began_s >= _CORES_EVERY_S
        if is_old and self._by_delay is not None and self._load is not None:
            self._restart_cores(self._load, now_s)

    def note_launch(self, n_tokens: int) -> None:
        """Record that a step of ``n_tokens`` was launched. If launches compute, the step is already computed."""
        now_s = perf_counter()
        if self._by_time is not None:
            self._by_time.observe(now_s, n_tokens, now_s - self._launched_s)
            self._launched_s = now_s
        elif now_s >= self._next_s and self._by_delay is not None and self._load is not None:
            self._observe(self._by_delay, self._load, now_s)
        elif self.member.n_allowed == self._n_allowed:
            return
        self._follow(now_s)

    def close(self) -> None:
        """Give the share back and close the files of the load counters."""
        self.member.leave()
        mark_cores()
        if self._load is not None:
            self._load.close()

    def _observe(self, policy: RunDelayPolicy, load: CpuLoad, now_s: float) -> None:
        if not self._is_watching:
            self._watch(load, now_s)
            return
        if policy.n > 1:
            n_throttled, (_, delay_s) = load.n_throttled(), load.run_and_delay_s()
            if n_throttled == self._n_throttled:  # else they waited for their control group's next period
                policy.observe(now_s, now_s - self._delay_began_s, delay_s - self._delay_s)
            self._delay_began_s, self._delay_s, self._n_throttled = now_s, delay_s, n_throttled
        self._next_s = now_s + _DELAY_EVERY_S
        seconds = now_s - self._cores_began_s
        if policy.n < policy.limit and seconds >= _CORES_EVERY_S:
            free_s = load.idle_s() - self._idle_s + load.run_and_delay_s()[0] - self._run_s
            policy.free(now_s, free_s / seconds)
            self._restart_cores(load, now_s)

    def _follow(self, now_s: float) -> None:
        """Use the number of threads that the policy and the other engines allow."""
        policy = self._by_delay or self._by_time
        if policy is None:
            return
        self._n_allowed = self.member.n_allowed
        limit = min(self._n_allowed, policy.n_max)
        if policy.limit != limit:
            if policy.limit < limit and self._load is not None:
                self._restart_cores(self._load, now_s)  # earlier idle time does not count
            policy.set_limit(limit)
        if policy.n == self._threads.n_threads:
            return
        self._record(now_s)
        try:
            self._threads.set_threads(policy.n)
        except BackendError as e:
            logging.getLogger("llamapipe").warning("the number of compute threads stays: %s", e)
            self._by_delay = self._by_time = None
            return
        self.n_changes += 1
        if self._by_delay is not None and self._load is not None:
            self._watch(self._load, now_s)

    def _watch(self, load: CpuLoad, now_s: float) -> None:
        ids = self._threads.compute_thread_ids()
        self._is_watching = bool(ids)
        load.watch(ids)
        self._restart_delay(load, now_s)
        self._restart_cores(load, now_s)

    def _restart_delay(self, load: CpuLoad, now_s: float) -> None:
        self._delay_s = load.run_and_delay_s()[1]
        self._n_throttled = load.n_throttled()
        self._delay_began_s, self._next_s = now_s, now_s + _DELAY_EVERY_S

    def _restart_cores(self, load: CpuLoad, now_s: float) -> None:
        self._idle_s, self._run_s, self._process_s = (
            load.idle_s(),
            load.run_and_delay_s()[0],
            load.process_s(),
        )
        self._cores_began_s = now_s

    def _record(self, now_s: float) -> None:
        """Record in the trace a period with the same number of threads."""
        if self._trace is not None and self._trace.on:
            n = self._threads.n_threads
            self._trace.add(f"{n} threads" if n > 1 else "1 thread", -1, self._computing_s, now_s)
        self._computing_s = now_s


def make_tuner(
    context: Context | EmbeddingContext, is_threaded: bool, is_fixed: bool, trace: Trace | None = None
) -> ThreadTuner | None:
    """Return a thread tuner for a context; None if a GPU computes, because its steps need few threads.

    ``is_threaded``: launches return before their step is computed. ``is_fixed``: the caller chose the number of
    threads.
    """
    if on_gpu(context.model):
        return None
    member = process_budget().member(context.n_threads if is_fixed else None)
    load = None if is_fixed or context.n_threads == 1 else cpu_load()
    return ThreadTuner(context, member, load, is_fixed or (load is None and is_threaded), trace)
