"""The engine loop: it turns plans into steps and tokens into deliveries.

Open this file to change the order in which things happen in a step, or between two.

A turn of the loop, in this order:

1. Execute the commands that have arrived (``Inbox``): new requests, cancels, changes, questions.
2. Perform the changes to KV cells, then plan a step and launch it (``StepsInFlight``).
3. Deliver the tokens of the step before, while the new one is computed.
4. Sample the oldest step in flight, and commit its tokens. Draws that take long are left to other threads
   (``LateDraws``), and their requests skip steps until then.

Where a launch returns only when its step is computed, delivery comes after sampling instead. A stop string found at
delivery ends a request that is already part of the next step; its token of that step is discarded.

The rules: the engine thread alone touches the scheduler, the executor and the samplers. A request whose
``batch_plan`` is not the step's plan any more has left the step: nothing is drawn or recorded for it, because its
sampler must not see a token that is discarded. Whatever fails ends the requests of its step only; after a defect of
the loop itself, every request gets an error, and so does every later one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Container, Hashable, Sequence
from contextlib import suppress
from itertools import islice, takewhile
from operator import attrgetter
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from llamapipe._engine.deliver import ResultDispatcher
from llamapipe._engine.executor import Executor
from llamapipe._engine.planner import BatchPlan
from llamapipe._engine.request import UNLIMITED, Request, Sampler, State
from llamapipe._engine.scheduler import Scheduler
from llamapipe._engine.scoring import LogprobTargets
from llamapipe._engine.snapshot import Snapshot
from llamapipe.errors import BackendError, ContextFullError, DecodeError, InvalidRequestError, NoToken
from llamapipe.llama.native_pipeline import StepAbortedError
from llamapipe.results import EngineStats, TimeHistogram

if TYPE_CHECKING:
    from llamapipe._engine.encoder import MediaEncoder
    from llamapipe.kv_events import Publisher
    from llamapipe.pipeline.trace import Trace


class Inbox:
    """A queue of function calls. Any thread puts, the engine thread runs them; both are safe under Ctrl-C.

    ``single_caller``: callers set it before they submit. True when no other thread or task could submit meanwhile, so
    the engine need not wait for more requests before it starts a step. ``urgent``: arguments of calls that are also in
    the queue and may be taken first, whatever waits before them.
    """

    __slots__ = ("_commands", "empty", "single_caller", "urgent")

    def __init__(self) -> None:
        self.single_caller = False
        self.urgent: deque[Request] = deque()
        self._commands: SimpleQueue[tuple[Callable[..., object], tuple[object, ...]]] = SimpleQueue()
        self.empty = (
            self._commands.empty
        )  # asked several times a step: the queue's own method, without another call

    def __repr__(self) -> str:
        return f"<Inbox n={self._commands.qsize()}>"

    def put(self, function: Callable[..., object], *arguments: object) -> None:
        """Adds a call. Never blocks."""
        self._commands.put((function, arguments))

    def run_next(self, timeout: float | None = None) -> None:
        """Waits for the next call and makes it. Raises queue.Empty after ``timeout`` seconds."""
        # A get() with a timeout of about a microsecond may wait for ever (seen in CPython 3.11 and 3.12). The put()
        # before it has left the queue's lock open, so get() looks twice, and the time left is negative the second time,
        # which means no limit. A get() that does not wait closes the lock.
        try:
            function, arguments = self._commands.get_nowait()
        except Empty:
            function, arguments = self._commands.get(timeout=timeout)
        function(*arguments)

    def qsize(self) -> int:
        """The number of calls that wait."""
        return self._commands.qsize()


# Powers of two from 0.25 ms to 128 s.
BOUNDS_S = tuple(2.0**i / 1000 for i in range(-2, 18))


class TimeCounter:
    """A histogram that grows. One thread adds; any thread may take a copy."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._total_s = 0.0

    def __repr__(self) -> str:
        return f"<TimeCounter n={sum(self._counts)}>"

    def add(self, seconds: float) -> None:
        """Counts one time."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._total_s += seconds

    def copy(self) -> TimeHistogram:
        """The counts so far."""
        return TimeHistogram(BOUNDS_S, tuple(self._counts), self._total_s)


class InFlightStep(NamedTuple):
    """A launched step: its plan, its number, the samplers of its rows, and when its launch began."""

    plan: BatchPlan
    step_id: int
    samplers: list[Any]
    began_s: float  # of ``perf_counter``


class StepsInFlight:
    """The launched steps of one context, oldest first. Methods are for the engine thread, unless they say otherwise.

    ``steps``: the queue itself; the loop only looks at its length and its ends. ``executor``: what launches them.
    """

    def __init__(self, executor: Executor) -> None:
        self.steps: deque[InFlightStep] = deque()
        self.executor = executor
        self._n_completed = 0
        self._retired: deque[tuple[int, Sampler]] = (
            deque()
        )  # samplers to close once that many steps are complete
        self._launching: BatchPlan | None = (
            None  # what a launch computes just now; read by threads that cancel
        )

    def __repr__(self) -> str:
        return f"<StepsInFlight n={len(self.steps)} n_completed={self._n_completed}>"

    def launch(self, plan: BatchPlan, samplers: list[Any], began_s: float = 0.0) -> int:
        """Launches a plan and returns the step's number. Raises ContextFullError and DecodeError, as the executor."""
        executor = self.executor
        self._launching = plan
        try:
            if plan.repeats:
                step_id = executor.launch_repeat()
            else:
                targets, n_top = targets_of(plan) if plan.scored else (None, 0)
                step_id = executor.launch(
                    plan.tokens,
                    plan.positions,
                    plan.seq_ids,
                    plan.outputs,
                    plan.rows,
                    samplers,
                    targets,
                    n_top,
                    plan.rows_of_media,
                    plan.is_causal,
                )
            self.steps.append(InFlightStep(plan, step_id, samplers, began_s))
            # A request may have been cancelled when the step was neither being launched nor in flight.
            if plan.scheduled[0][0].cancelled and all(request.cancelled for request, _ in plan.scheduled):
                executor.abort(step_id)
        finally:
            self._launching = None
        return step_id

    def complete_oldest(self) -> None:
        """Removes the oldest step, which was sampled or failed, and closes the samplers that waited for it."""
        self.steps.popleft()
        self._n_completed += 1
        while self._retired and self._retired[0][0] <= self._n_completed:
            self._retired.popleft()[1].close()

    def retire(self, sampler: Sampler) -> None:
        """Closes a sampler, after the steps in flight if there are any: they may draw with it."""
        if self.steps:
            self._retired.append((self._n_completed + len(self.steps), sampler))
        else:
            sampler.close()

    def close(self) -> None:
        """Closes the samplers that are left. No step may be sampled afterwards."""
        for _, sampler in self._retired:
            sampler.close()

    # ---- any thread
    def abort_all(self) -> None:
        """Cancels the requests of all steps in flight, so that the steps need not be computed."""
        for plan in (self._launching, *(launched.plan for launched in self.steps.copy())):
            for request, _ in plan.scheduled if plan is not None else ():
                request.cancelled = True
        self.abort_cancelled()

    def abort_cancelled(self) -> None:
        """Aborts each step whose requests are all cancelled."""
        plan = self._launching
        computes = plan is not None and not self.executor.late_errors  # the launch itself computes
        if plan is not None and computes and all(request.cancelled for request, _ in plan.scheduled):
            step_id = self.executor.launching()
            if self._launching is plan:  # so the number is this plan's, or that of a step in the past
                self.executor.abort(step_id)
        for launched in self.steps.copy():
            if all(request.cancelled for request, _ in launched.plan.scheduled):
                self.executor.abort(launched.step_id)


def draw(executor: Executor, launched: InFlightStep) -> list[int]:
    """A token for each of the plan's requests; 0 for those that left the step. Waits for the step if need be."""
    plan, requests = launched.plan, launched.plan.requests
    for request in requests:
        if request.batch_plan is not plan:
            break
    else:
        if plan.repeats:
            return executor.sample_repeat(launched.step_id)
        if not requests and not executor.late_errors:
            return []
        if plan.n_guessed:
            return executor.sample(launched.step_id, plan.rows, launched.samplers, plan.guessed)
        return executor.sample(launched.step_id, plan.rows, launched.samplers)
    here = [i for i, request in enumerate(requests) if request.batch_plan is plan]
    samplers = [requests[i].sampler for i in here]
    guessed = [plan.guessed[i] for i in here] if plan.n_guessed else ()
    drawn = executor.sample(launched.step_id, [plan.rows[i] for i in here], samplers, guessed)
    sampled = [0] * len(requests)
    for i, token in zip(here, drawn, strict=True):
        sampled[i] = token
    return sampled


def record_logprobs(plan: BatchPlan, sampled: Sequence[int]) -> None:
    """Stores the log-probabilities of the tokens, for the requests that asked for them."""
    before = None
    for request, token in zip(plan.requests, sampled, strict=True):
        if request.wants_logprobs and request.batch_plan is plan:
            if request is not before:  # the first of its rows
                before = request
                request.logprobs.clear()  # that of a token that ended the text
            if token >= 0:
                assert request.sampler is not None
                request.logprobs.append(request.sampler.logprobs(len(request.logprobs)))


def targets_of(plan: BatchPlan) -> tuple[dict[int, list[int]], int]:
    """The tokens whose log-probability is wanted, for each batch entry, and the most top tokens wanted with any."""
    found: dict[int, list[int]] = {}
    n_top = 0
    for _, targets, first, entries in plan.scored:
        n_top = max(n_top, targets.n_top)
        for i, entry in enumerate(entries):
            found[entry] = targets.targets(first + i)
    return found, n_top


def score(executor: Executor, launched: InFlightStep) -> list[Request]:
    """Gives requests the scores of their own tokens. Returns the requests with a score that is not a number."""
    plan = launched.plan
    rows: list[int] = []
    wanted: list[int] = []
    asked: list[tuple[Request, LogprobTargets, int, int]] = []
    n_top = 0
    for request, targets, first, entries in plan.scored:
        if request.batch_plan is not plan:
            continue
        n_top = max(n_top, targets.n_top)
        for i, entry in enumerate(entries):
            tokens = targets.targets(first + i)
            rows += [entry] * len(tokens)
            wanted += tokens
            asked.append((request, targets, first + i, len(tokens)))
    scores = iter(executor.score(launched.step_id, rows, wanted, n_top))
    damaged: list[Request] = []
    for request, targets, position, n in asked:
        mine = list(islice(scores, n))
        if any(score.logprob != score.logprob for score in mine):
            damaged.append(request)
        elif targets.n_top < n_top:  # another request of the step wanted more
            mine = [score._replace(top=score.top[: targets.n_top]) for score in mine]
        targets.take(position, mine)
    return damaged


class LateDraws:
    """Finds the request of a token that arrives. Methods are for the engine thread.

    A request leaves with its token. If it ended before, its token is ignored: the numbers of its sampler's draws tell.
    """

    def __init__(self) -> None:
        # By sampler, with the number of the draw, and when it began. The oldest first.
        self.requests: dict[Any, tuple[Request, int, float]] = {}

    def __repr__(self) -> str:
        return f"<LateDraws n={len(self.requests)}>"

    def add(self, plan: BatchPlan, sampled: Sequence[int]) -> None:
        """Adds the requests of a step whose tokens will be drawn later."""
        for request, token in zip(plan.requests, sampled, strict=True):
            if token == NoToken.LATER and request.batch_plan is plan and request.sampler is not None:
                self.requests[request.sampler] = request, request.sampler.n_draws, perf_counter()

    def await_end_states(self, requests: Sequence[Request], executor: Executor) -> None:
        """Asks the samplers of requests that have generated their last token whether the text is complete."""
        for request in requests:
            sampler = request.sampler
            executor.await_end_state(sampler)
            if sampler is not None:
                self.requests[sampler] = request, sampler.n_draws, perf_counter()

    def late_by(self, seconds: float) -> list[tuple[Request, float]]:
        """The requests that have waited for so long for their tokens, with the seconds; the longest first."""
        now_s = perf_counter()
        waits = ((request, now_s - began_s) for request, _, began_s in self.requests.values())
        return [(request, waited_s) for request, waited_s in waits if waited_s >= seconds]

    def take(self, executor: Executor, open_requests: Container[Request]) -> list[tuple[Request, int]]:
        """The requests whose tokens have arrived, with these."""
        arrived = []
        for sampler, number, token in executor.take_drawn():
            request, wanted, _ = self.requests.get(sampler, (None, 0, 0.0))
            if request is None or number != wanted:
                continue
            del self.requests[sampler]
            if request in open_requests and request.is_drawing:
                arrived.append((request, token))
        return arrived

    def forget(self, sampler: Any) -> None:
        """The sampler's request has ended."""
        self.requests.pop(sampler, None)


_WINDOW = 32  # steps between two decisions
_LEAST_GAIN = 1.1  # predicted gain that starts a try
_KEEP_GAIN = 1.03  # measured gain that keeps it
_LONGEST_PAUSE = 64  # windows between two tries


class MicroBatchSwitch:
    """Splits while that is faster: tried when the formula predicts a gain, kept when a gain is measured.

    Let T be the time that a step computes, and b the time of everything else until the next step is launched. Two
    alternating micro-batches are (T + b) / max(2T, b, T + b/2) times as fast as one. A try ends when a window of steps
    has no more tokens per second than the window before the try. Each failed try doubles the pause before the next.

    ``n``: the number of micro-batches now.
    """

    def __init__(self, executor: Executor) -> None:
        self.n = 1
        self._executor = executor
        self._able = executor.overlaps and executor.depth > 1
        self._n_steps = self._n_tokens = 0
        self._began = perf_counter()
        self._compute_s = 0.0
        self._before = 0.0  # tokens per second before the try
        self._pause, self._n_paused = 1, 0

    def stepped(self, n_tokens: int) -> bool:
        """Counts a step that sampled ``n_tokens``. True when ``n`` has changed."""
        if not self._able:
            return False
        self._n_steps += 1
        self._n_tokens += n_tokens
        if self._n_steps < _WINDOW:
            return False
        now, compute_s = perf_counter(), self._executor.compute_s()
        wall_s, busy_s = now - self._began, compute_s - self._compute_s
        speed, before = self._n_tokens / wall_s, self.n
        if self._n_tokens >= 2 * _WINDOW:  # at least two requests a step: else there is nothing to split
            self.n = self._choose(busy_s / _WINDOW, max(wall_s - busy_s, 0.0) / _WINDOW, speed)
        else:
            self.n = 1
        self._n_steps = self._n_tokens = 0
        self._began, self._compute_s = now, compute_s
        return self.n != before

    def _choose(self, compute_s: float, other_s: float, speed: float) -> int:
        if self.n == 1:
            self._n_paused += 1
            if self._n_paused < self._pause or gain(compute_s, other_s) < _LEAST_GAIN:
                return 1
            self._before = speed
            return 2
        if speed >= _KEEP_GAIN * self._before:
            self._before = speed / _KEEP_GAIN  # from now on the speed only has to stay the same
            self._pause = 1
            return 2
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._n_paused = 0
        return 1


def gain(compute_s: float, other_s: float) -> float:
    """The predicted gain of two micro-batches over one."""
    slowest = max(2 * compute_s, other_s, compute_s + other_s / 2)
    return (compute_s + other_s) / slowest if slowest > 0 else 1.0


def _n_tokens_of(request: Request, following: Sequence[tuple[Request, int]]) -> int:
    """How many of the next undelivered tokens are in this request's sequence."""
    tokens = takewhile(lambda pair: pair[0] is request, following)
    return sum(token >= 0 and token not in request.stop_tokens for _, token in tokens)


_MAX_SKIPPED_WINDOWS = 7
_MAX_COMMANDS = 512  # between two steps, so that requests progress while thousands of others arrive
_sampler = attrgetter("sampler")  # a function in C, for a list that is made in every step
_LATER = int(NoToken.LATER)  # looked at in every step
_LOOK_S = 0.02  # between two looks at draws that other threads make
# After which a late draw's slot is lent; saving and loading its cells takes a few milliseconds.
_LEND_S = 0.05


class Closable(Protocol):
    """What ends with the loop."""

    def close(self) -> None:
        """Ends it."""


class EngineLoop:
    """The steps of one context, from ``run`` until a ``stop`` command. Methods are for the engine thread.

    ``inbox``: the commands of other threads. ``dispatcher``: wakes the callers that wait for results. ``in_flight``:
    the launched steps; other threads may abort them. ``open``: the requests whose end is not delivered yet.
    ``trace``: records plan and deliver stages. ``kv_events``: tells routers what the prefix cache holds. ``long_work``:
    threads for callers' work, which end with the loop. ``encoder``: of images and sounds, for models that take them.

    ``window_s``: how long an idle loop waits for more requests after the one that woke it. ``left_queue``: called with
    the requests that do not wait for a slot any longer.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        window_s: float,
        left_queue: Callable[[Sequence[Request]], object],
        trace: Trace | None = None,
        kv_events: Publisher | None = None,
        long_work: Closable | None = None,
        encoder: MediaEncoder | None = None,
    ) -> None:
        self.inbox = Inbox()
        self.dispatcher = ResultDispatcher(at_launch=not executor.overlaps)
        if not executor.overlaps:
            executor.wake_at_launch(self.dispatcher.wakes)
        self.in_flight = StepsInFlight(executor)
        self.open: dict[Request, None] = {}
        self._trace = trace
        self._kv_events = kv_events
        self._long_work = long_work
        self._encoder = encoder
        self._scheduler = scheduler
        self._executor = executor
        self._left_queue = left_queue
        self._micro_batches = MicroBatchSwitch(executor)
        scheduler.set_depth(executor.depth if executor.overlaps else 1)
        self._window_s = window_s
        self._n_skip = self._n_skipped = 0  # windows to skip after one in vain, and skipped since
        self._stopping = False
        self.closed = False  # the context is freed
        self.failure: BackendError | None = None  # a defect of the loop: every request fails with it
        self._undelivered: list[tuple[Request, int]] = []  # the tokens of the step sampled last
        self._last_step = -1  # the number of that step
        self._late = LateDraws()
        executor.notify_drawn(lambda: self.inbox.put(self.take_drawn))
        self._step_times = TimeCounter()
        self._n_wants_logprobs = 0  # open requests that want log-probabilities
        self._unguessed: dict[str, int] = {}  # requests without guesses, by the reason
        # The number of the last step that had some, how many, and how many were right.
        self._last_guesses = (-1, 0, 0)
        self._n_accepted = 0  # right guesses of all steps up to that one
        self._n_requests = self._n_steps = self._n_prompt = self._n_generated = 0
        self._plan_s = self._launch_s = self._sample_s = self._deliver_s = self._idle_s = 0.0

    def __repr__(self) -> str:
        return f"<EngineLoop n_steps={self._n_steps} n_in_flight={len(self.in_flight.steps)} n_open={len(self.open)}>"

    # ---- commands
    def add(self, *requests: Request) -> None:
        """Accepts new requests."""
        self._n_requests += len(requests)
        self.open.update(dict.fromkeys(requests))
        for request in requests:
            self._n_wants_logprobs += request.wants_logprobs
            if unguessed := request.spec.unguessed:
                self._unguessed[unguessed] = self._unguessed.get(unguessed, 0) + 1
            if self.failure is not None:
                self._give_up(request, self.failure)
                continue
            self._scheduler.add(request)
            if self._encoder is not None and not request.is_encoded:
                self._encoder.put(request, self._encoded)
            if request.cancelled:
                self.cancel(request)

    def _encoded(self, request: Request, error: Exception | None) -> None:
        """The encoder has encoded a request's images and sounds. Its thread; the rest is done in this one."""
        self.inbox.put(self._continue_encoded, request, error)

    def _continue_encoded(self, request: Request, error: Exception | None) -> None:
        if request.state is State.FINISHED:
            return
        if error is None:
            self._scheduler.encoded(request)
        else:
            self._fail([request], error)

    def cancel(self, request: Request) -> None:
        """Ends a request in any state."""
        if request.arrival < 0:
            request.cancelled = True  # `add`, which comes later, looks at it
        elif request.state is not State.FINISHED:
            self._scheduler.cancel(request)
            self._finished(request)

    def resume(self, request: Request) -> None:
        """Continues a paused request, as far as its token budget allows."""
        if request.state is not State.FINISHED:
            self._scheduler.resume(request)

    def change(self, request: Request, n_keep: int | None, tokens: Sequence[int]) -> None:
        """Trims a resumable request's sequence to ``n_keep`` tokens, or appends some. Its sampler starts over."""
        if request.state is State.FINISHED:
            return
        if n_keep is not None:
            self._scheduler.trim(request, n_keep)
        if tokens:
            self._scheduler.append(request, tokens)
        request.sink.restart_text()
        if request.sampler is not None and request.spec.sampler_factory is not None:
            request.spec.sampler_factory.rebuild(request.sampler, request)

    def take_drawn(self) -> None:
        """Records the tokens that other threads have drawn."""
        for request, token in self._late.take(self._executor, self.open):
            if token >= 0 and request.wants_logprobs and request.sampler is not None:
                request.logprobs.append(request.sampler.logprobs(-1))
            self._n_generated += token >= 0
            self._scheduler.can_guess = self._scheduler.can_guess or request.spec.speculates
            self._scheduler.drawn(request, token)
            if token == NoToken.SETTLED:  # its last token is delivered already
                self._finished(request)
            else:
                self._undelivered.append((request, token))
        self._await_end_states()
        self._deliver()

    def _look_after_late_draws(self) -> bool:
        """Looks after draws that take long: others get threads and slots. Returns whether a slot came free."""
        self._executor.add_spare_thread()
        if not self._scheduler.n_queued:
            return False
        late = self._late.late_by(_LEND_S)
        return sum(self._scheduler.lend(request, waited_s / _LEND_S) for request, waited_s in late) > 0

    def _await_end_states(self) -> None:
        self._late.await_end_states(self._scheduler.awaiting_end, self._executor)
        self._scheduler.awaiting_end.clear()

    def fork(self, parent: Request, child: Request) -> None:
        """Accepts a request that continues the sequence of a resumable one. The child fails if the parent has ended."""
        self._scheduler.fork(parent, child)
        self.add(child)
        if parent.state is State.FINISHED:
            self._scheduler.fail(child, parent.error or InvalidRequestError("the generation was cancelled"))
            self._finished(child)

    def snapshot(self, request: Request) -> Snapshot:
        """The sequence of a resumable request that does not run."""
        if request.error is not None:
            raise request.error
        self._change_cells()
        kept, executor = request.saved_cells, self._executor
        n_cells, state = 0, None if kept is None else executor.read_saved(kept.key)
        if kept is not None and state is not None:
            n_cells = kept.n
        elif request.slot >= 0 and request.n_past and request.uses_cache:
            state = executor.read_cells(request.slot)
            n_cells = request.n_past if state is not None else 0
        # Constraints cannot be followed from the middle of a text: they begin with what follows.
        n_prompt = len(request.tokens) if request.dropped else request.n_prompt
        return Snapshot(request.tokens.copy(), n_prompt, n_cells, state or b"", request.active_from)

    def restore(self, request: Request, n_cells: int, state: bytes) -> None:
        """Accepts a new request whose first cells are given."""
        if state and self.failure is None:
            cache = self._scheduler.cache
            key = cache.restore(request, n_cells, len(state))
            if key is not None and not self._executor.keep_saved(key, state):
                cache.saved(key, None)
        self.add(request)

    def visit_unused(self, visit: Callable[[Sequence[int], Hashable, bytes], None]) -> None:
        """Calls a function with the tokens, the key and the cells of each sequence that no request uses."""
        self._change_cells()
        for found in self._scheduler.cache.unused():
            read = self._executor.read_saved if found.slot < 0 else self._executor.read_cells
            state = read(found.key if found.slot < 0 else found.slot)
            if state is not None:
                visit(found.tokens, found.cache_key, state)

    def reset_cache(self, is_wanted: Callable[[Hashable], bool]) -> None:
        """Drops cached cells; see ``KvCache.reset``."""
        self._scheduler.cache.reset(is_wanted)

    def take_in(self, tokens: Sequence[int], cache_key: Hashable, state: bytes) -> None:
        """Keeps cells that come from elsewhere, if there is room."""
        cache = self._scheduler.cache
        key = cache.take_in(tokens, cache_key, len(state))
        if key is not None and not self._executor.keep_saved(key, state):
            cache.saved(key, None)

    def kept_bytes(self, request: Request) -> tuple[int, int, int]:
        """The bytes of a request's cells that stay saved (0: they could not be saved), needed bytes, and the budget."""
        self._change_cells()
        kept, cache = request.saved_cells, self._scheduler.cache
        n_bytes = 0 if kept is None or not cache.has(kept) else kept.n_bytes
        return n_bytes, cache.n_bytes_of(len(request.tokens)), cache.host_budget

    def release(self, request: Request) -> None:
        """The saved cells of a request that has ended need not be kept any more."""
        self._scheduler.cache.unpin(request)

    def stop(self, drain: bool) -> None:
        """Ends the loop: after the open requests are finished, or at once."""
        self._stopping = True
        self._deliver()  # the tokens sampled last are part of the sequences already
        for request in list(self.open):
            if not drain:
                self.cancel(request)
            elif not request.spec.resumable:
                self._run_to_end(request)

    def stats(self) -> EngineStats:
        """A copy of the counters. Also for other threads, after the engine thread's end."""
        return EngineStats(
            n_requests=self._n_requests,
            n_preempted=self._scheduler.n_preempted,
            n_active=self._scheduler.n_active,
            n_used_cells=self._scheduler.n_used_cells,
            n_cache_hit_tokens=self._scheduler.cache.n_hit_tokens,
            n_saved=self._scheduler.cache.n_saved,
            n_restored=self._scheduler.cache.n_restored,
            cache_bytes=0 if self.closed else self._scheduler.cache.n_host_bytes,
            step_times=self._step_times.copy(),
            n_queued=self._scheduler.n_queued,
            n_micro_batches=self._scheduler.batch_builder.n_micro_batches,
            steps=self._n_steps,
            n_prompt_tokens=self._n_prompt,
            n_completion_tokens=self._n_generated,
            idle_s=self._idle_s,
            plan_s=self._plan_s,
            launch_s=self._launch_s,
            sample_s=self._sample_s,
            deliver_s=self._deliver_s,
            n_drafted=self._scheduler.gate.n_drafted,
            n_accepted=self._scheduler.gate.n_accepted,
            n_forced=self._scheduler.gate.n_forced,
            n_steps_saved=self._scheduler.gate.n_steps_saved,
            no_guesses=self._scheduler.gate.no_guesses,
            unguessed=self._unguessed.copy(),
            n_adapter_changes=self._scheduler.turns.n_changes,
            n_encoded_media=0 if self._encoder is None else self._encoder.n_encoded,
            **self._executor.stats(),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if the scheduler's state is inconsistent, or other than llama.cpp's memory.

        Threads as for ``stats``.
        """
        self._scheduler.check_integrity()
        if not self.in_flight.steps and not self.closed:
            self._change_cells()
            expected = self._scheduler.n_cells_by_slot()
            found = {slot: self._executor.sequence_end(slot) for slot in expected}
            assert found == expected, f"cells by slot: {found}, expected {expected}"

    # ---- the loop
    def run(self) -> None:
        """Runs until a ``stop`` command. Frees the context at the end."""
        try:
            self._loop()
        except BaseException as e:  # callers wait for this thread: it must not end without an answer
            self._serve_errors(e)
        finally:
            self.closed = True
            for owner in (
                self.dispatcher,
                self.in_flight,
                self._scheduler.gate.drafter,
                self._executor,
                self._kv_events,
                self._long_work,
                self._encoder,
            ):
                if owner is not None:
                    owner.close()

    def _loop(self) -> None:
        scheduler, inbox = self._scheduler, self.inbox
        dispatcher, steps = self.dispatcher, self.in_flight.steps
        started = perf_counter()
        while True:
            while inbox.urgent:  # thousands of new requests may wait before a cancel in the inbox
                self.cancel(inbox.urgent.popleft())
            for _ in range(_MAX_COMMANDS):
                if inbox.empty():
                    break
                inbox.run_next()
            if dispatcher.pending:  # a caller that cancelled need not wait for a step
                self._flush()
            if scheduler.cache.memory_ops:
                # Before the plan: what cannot be removed in part is computed again.
                self._change_cells()
            if scheduler.drafts and scheduler.may_draft:  # which takes time that callers need not wait for
                self._deliver()
                self._flush(together=True)
            # After a change from two micro-batches to one, a step may be in flight that has to be sampled first.
            plan = scheduler.plan() if len(steps) < scheduler.max_in_flight else None
            if scheduler.dequeued:
                self._left_queue(scheduler.take_dequeued())
            if plan is not None:
                self._launch(plan, started)
            self._deliver()
            if self._kv_events is not None:
                self._kv_events.flush()

            # There are three cases for what to do next:
            # 1. A step is in flight, and no further one can be launched: sample it.
            if steps and (plan is None or len(steps) >= scheduler.max_in_flight):
                self._sample()
                started = perf_counter()
                if scheduler.has_work or steps:
                    continue
                # All requests wait for their callers: the first one to return must not start a step without the
                # others.
                self._change_cells()
            # 2. The launch failed, or there is room for another micro-batch: plan again.
            elif plan is not None:
                started = perf_counter()
                continue
            # 3. Nothing can be computed: wait for a command.
            self._deliver()
            if scheduler.dequeued:  # requests that ended without ever having a slot
                self._left_queue(scheduler.take_dequeued())
            self._flush(together=True)  # also wakes callers that an interrupted thread failed to wake
            if self._stopping:
                if not self.open:
                    self._left_queue(scheduler.take_dequeued())
                    return
                self._end_waiting()
                if self._late.requests or scheduler.is_encoding:
                    inbox.run_next()
                continue
            self._wait()
            waited = perf_counter()
            self._idle_s += waited - started
            started = waited

    def _wait(self) -> None:
        """Blocks for a command, then a moment longer for more requests, if that has paid lately."""
        inbox, scheduler = self.inbox, self._scheduler
        if self._kv_events is not None:
            self._kv_events.flush()
        if inbox.empty():
            self._executor.yield_cores()
            if not inbox.single_caller and not self.open:
                self._executor.park_threads()
        while self._late.requests:  # draws that hang must not keep others from being made
            try:
                inbox.run_next(_LOOK_S)
                break
            except Empty:
                if self._look_after_late_draws():
                    return
        else:
            inbox.run_next()
        if inbox.single_caller or self._window_s <= 0 or not scheduler.has_work:
            return
        if self._n_skipped < self._n_skip:
            self._n_skipped += 1
            return
        deadline = perf_counter() + self._window_s
        n_arrived = 0
        while not (self._stopping or (scheduler.n_active and scheduler.all_ready)):
            left_s = deadline - perf_counter()
            if left_s <= 0:
                break
            try:
                inbox.run_next(left_s)
            except Empty:
                break
            n_arrived += 1
        self._n_skip = 0 if n_arrived else min(2 * self._n_skip + 1, _MAX_SKIPPED_WINDOWS)
        self._n_skipped = 0

    def _change_cells(self) -> bool:
        """Performs the changes to KV cells that are queued. False if a sequence lost its cells by that."""
        changes = self._executor.change_cells(self._scheduler.cache.take_memory_ops())
        return not (changes.lost or changes.saved) or self._scheduler.cells_changed(changes)

    # ---- one step
    def _launch(self, plan: BatchPlan, started: float) -> None:
        """Launches a plan that was begun at this time of ``perf_counter``. Handles its failure."""
        keeps_cells = not self._scheduler.cache.memory_ops or self._change_cells()
        if not keeps_cells or (not plan.repeats and not self._make_samplers(plan)):
            self._scheduler.drop(plan)  # a request of it lost its cells or failed: plan again
            return
        samplers: list[Any] = [] if plan.repeats else list(map(_sampler, plan.requests))
        planned = perf_counter()
        try:
            self.in_flight.launch(plan, samplers, planned)
        except (ContextFullError, DecodeError) as e:
            self._failed(plan, e)
        if self._trace is not None and self._trace.on and self.in_flight.steps:
            self._trace.add("plan", self.in_flight.steps[-1].step_id, started, planned)
        self._plan_s += planned - started
        self._launch_s += perf_counter() - planned

    def _make_samplers(self, plan: BatchPlan) -> bool:
        """Makes the missing samplers. False if memory was missing for one: its request has failed."""
        for request in plan.requests:
            if request.sampler is None and request.spec.sampler_factory is not None:
                try:
                    request.sampler = request.spec.sampler_factory.make(request)
                except MemoryError as e:
                    self._fail([request], e)
                    return False
        return True

    def _sample(self) -> None:
        """Draws the tokens of the oldest step in flight and commits them. Waits for the step if need be."""
        oldest = self.in_flight.steps[0]
        plan, executor, scheduler = oldest.plan, self._executor, self._scheduler
        damaged: list[Request] = []
        began = perf_counter()
        try:
            sampled = draw(executor, oldest)
            scheduler.can_guess = executor.n_guessing > 0
            if plan.scored:
                damaged = score(executor, oldest)
        except (ContextFullError, DecodeError) as e:  # a step that is computed asynchronously fails here
            self.in_flight.complete_oldest()
            self._failed(plan, e)
            return
        self.in_flight.complete_oldest()
        if self._n_wants_logprobs:
            record_logprobs(plan, sampled)
        drawn = perf_counter()
        if damaged:
            self._fail(damaged, DecodeError("a logit is not finite; the model or its weights are damaged"))
        if _LATER in sampled:
            self._late.add(plan, sampled)
        self._undelivered += scheduler.commit(plan, sampled)
        if scheduler.awaiting_end:
            self._await_end_states()
        if self._late.requests:
            self._look_after_late_draws()
        for request, *_ in plan.scored:
            if request.max_tokens == 0 and request.finish_reason is not None and request in self.open:
                self._finished(request)
        self._last_step = oldest.step_id
        self._step_times.add(drawn - oldest.began_s)
        scheduler.observe(plan, drawn - oldest.began_s)
        self._n_steps += 1
        n_sampled = len(sampled)
        if plan.n_guessed:
            n_sampled -= sampled.count(NoToken.NOT_DRAWN)
            n_accepted = scheduler.gate.n_accepted
            self._last_guesses = oldest.step_id, plan.n_guessed, n_accepted - self._n_accepted
            self._n_accepted = n_accepted
        self._n_generated += n_sampled
        self._n_prompt += len(plan.tokens) - plan.n_decode - plan.n_guessed - len(plan.padding)
        self._sample_s += drawn - began
        if not executor.overlaps:
            self._deliver()
        elif self._micro_batches.stepped(n_sampled):
            scheduler.split_decoding(self._micro_batches.n)

    def _deliver(self) -> None:
        """Gives the tokens sampled last to their sinks, and has the callers woken."""
        if not self._undelivered and not self.dispatcher.pending:
            return
        began = perf_counter()
        undelivered, self._undelivered = self._undelivered, []
        n_left = len(undelivered)
        for request, token in undelivered:
            n_left -= 1
            if request not in self.open:
                continue  # it was cancelled meanwhile
            has_more = (
                n_left > 0 and undelivered[-n_left][0] is request
            )  # a right guess: several tokens of one step
            if (
                token >= 0
                and request.error is None
                and token not in request.stop_tokens
                and request.sink.token(request, token)
            ):
                self._scheduler.stop(request, _n_tokens_of(request, undelivered[-n_left:]) if has_more else 0)
                has_more = False
            if request.finish_reason is not None and not has_more:
                self._finished(request)
        if self.dispatcher.pending:
            self._flush()
        ended = perf_counter()
        if undelivered and self._trace is not None and self._trace.on:
            step, *guesses = self._last_guesses
            self._trace.add(
                "deliver", self._last_step, began, ended, *guesses if step == self._last_step else ()
            )
        self._deliver_s += ended - began

    def _flush(self, together: bool = False) -> None:
        """Wakes callers; see ``ResultDispatcher.flush``. Requests of closed event loops are cancelled."""
        for request in self.dispatcher.flush(together):
            self.cancel(request)

    # ---- ends and failures
    def _finished(self, request: Request) -> None:
        """Delivers the end of a request. Frees its sampler unless the request may continue after a change."""
        if request.state is State.FINISHED:
            if request in self.open:
                del self.open[request]
                self._n_wants_logprobs -= request.wants_logprobs
            if request.sampler is not None:
                if self._late.requests:
                    self._late.forget(request.sampler)
                self.in_flight.retire(request.sampler)
                request.sampler = None
        request.sink.finish(request)

    def _fail(self, requests: Sequence[Request], error: Exception) -> None:
        for request in requests:
            if request in self.open:
                self._scheduler.fail(request, error)
                self._finished(request)

    def _failed(self, plan: BatchPlan, error: Exception) -> None:
        """Ends the requests of a step that failed, or makes room if it found no cells. The others continue."""
        self._deliver()
        if isinstance(error, StepAbortedError):
            for request in self._scheduler.drop(plan):
                if request.cancelled:
                    self.cancel(request)
        elif not isinstance(error, ContextFullError) or not self._scheduler.free_cells_after(plan):
            for request in self._scheduler.abort(plan, error):
                self._finished(request)

    def _end_waiting(self) -> None:
        """Continues or ends the requests that wait for a caller while the engine closes."""
        for request in list(self.open):
            if request.spec.resumable:
                self.cancel(request)
            else:
                self._run_to_end(request)

    def _run_to_end(self, request: Request) -> None:
        request.token_budget = UNLIMITED  # a stream's reader finds the rest in its mailbox
        self._scheduler.resume(request)

    def _serve_errors(self, error: BaseException) -> None:
        """After a defect of the loop itself: fails all requests, and those still to arrive, until ``stop``."""
        text = f"the engine thread failed ({error!r}); close this engine and make another"
        self.failure = BackendError(text)
        self.failure.__cause__ = error
        for request in list(self.open):
            self._give_up(request, self.failure)
        while True:
            self._flush(together=True)
            if self._stopping:
                return
            self.inbox.run_next()

    def _give_up(self, request: Request, error: BaseException) -> None:
        """Ends a request after a defect. Its caller must get an answer, whatever is broken by now."""
        with suppress(Exception):
            self._scheduler.fail(request, error)
        if request.state is not State.FINISHED:
            request.move(State.FINISHED)
        self._left_queue([request])
        request.error = error
        request.finish_reason = "cancelled"
        with suppress(Exception):
            self._finished(request)
