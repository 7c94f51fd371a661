"""The engine loop in virtual time: scheduler, loop and delivery as they are, over a simulated executor and callers.

    PYTHONPATH=.:tests python tests/support/simulation.py N_SEEDS [FIRST_SEED]

One thread runs everything. Wherever the engine loop would wait, or compute, the world lets time pass: callers act, and
faults happen. Callers are coroutines (generators). They stand for threads, which wait on a simulated wake queue, and
for tasks of event loops. A seed decides everything, so it always replays the same run.

Checked after every event: the scheduler's books. Checked of each caller: its result against the sequential model of
``fakes``, and that it is woken at all. Checked at the end: nothing is left of anybody.
"""

from __future__ import annotations

import heapq
import random
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Empty
from typing import Any
from unittest.mock import patch

from llamapipe._engine.calls import call_options, queue_limit
from llamapipe._engine.calls.queue_limit import QueueLimit
from llamapipe._engine.policy import kv, scheduler
from llamapipe._engine.policy.core import Activation, CellChanges, MemoryOp, Request, RequestSpec, State
from llamapipe._engine.policy.kv import KvCache
from llamapipe._engine.policy.overflow import Overflow
from llamapipe._engine.policy.scheduler import Scheduler
from llamapipe._engine.policy.speculation import EVERY, MOST_GUESSED, Gate, Guess, Worth
from llamapipe._engine.runtime import late_draws, mailboxes, micro_batches, sinks
from llamapipe._engine.runtime import loop as engine_loop
from llamapipe._engine.runtime.inbox import Inbox
from llamapipe._engine.runtime.loop import EngineLoop
from llamapipe._engine.runtime.mailboxes import AsyncMailbox, ThreadMailbox
from llamapipe._engine.runtime.sinks import Choices, CompletionSink, DeltaSink, Failure, TokenSink
from llamapipe.errors import ContextFullError, DecodeError, InvalidRequestError, NoToken
from llamapipe.results import Completion, Delta, Token, TokenLogprob

sys.path[0:0] = [str(Path(__file__).resolve().parents[1])]
from support.fakes import Adapters, FakeContext, FakeSampler, FakeSaved, Switch, continuation, next_token  # noqa: E402
from support.inside import keep_micro_batches  # noqa: E402

N_CTX, N_VOCAB = 48, 13
_MOST_LOOKS = 1_000
_MOST_EVENTS = 5_000  # a run that takes more makes no progress
Caller = Generator[Any, Any, None]


class InjectedError(DecodeError):
    """A fault of the simulation."""


class World:
    """Virtual time, and what happens in it. ``failure``: the first thing that was wrong."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.failure: BaseException | None = None
        self.checks: list[Callable[[], object]] = []
        self.n_events = 0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._n = 0

    def clock(self) -> float:
        """As ``perf_counter``: it moves a little with each look."""
        self.now += 1e-7
        return self.now

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Has something happen."""
        self._n += 1
        heapq.heappush(self._events, (self.now + seconds, self._n, action))

    def soon(self, action: Callable[[], object], most_s: float = 0.001) -> None:
        """Has something happen within a moment."""
        self.after(self.rng.random() * most_s, action)

    def step(self) -> bool:
        """Lets the next thing happen. False if nothing would."""
        if not self._events or self.failure is not None:
            return False
        at, _, action = heapq.heappop(self._events)
        self.now = max(self.now, at)
        self.n_events += 1
        try:
            assert self.n_events < _MOST_EVENTS, "no progress"
            action()
            for check in self.checks:
                check()
        except BaseException as e:
            self.fail(e)
        return True

    def pass_time(self, seconds: float) -> None:
        """Lets everything happen that is due within this time."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end and self.step():
            pass
        self.now = max(self.now, end)

    def next_event_s(self) -> float | None:
        """When the next thing happens."""
        return self._events[0][0] if self._events else None

    def fail(self, error: BaseException) -> None:
        """Notes what was wrong; the run ends soon."""
        if self.failure is None:
            self.failure = error


# ---- waking callers, as ``wake_queue`` does natively
class SimWaiter:
    """A thread sleeps on it."""

    def __init__(self) -> None:
        self.wake: Callable[[], object] | None = None
        self.kept = False

    def ring(self) -> bool:
        """Wakes the thread, or notes that it need not sleep."""
        wake, self.wake = self.wake, None
        if wake is None:
            self.kept = True
            return False
        wake()
        return True


class SimWakeQueue:
    """Threads that wake one another."""

    world: World

    def __init__(self) -> None:
        self.handle = None
        self.queue: deque[SimWaiter] = deque()

    def waiter(self) -> SimWaiter:
        return SimWaiter()

    def add(self, waiters: Sequence[SimWaiter]) -> None:
        self.queue += waiters

    def next(self) -> None:
        while self.queue and not self.queue.popleft().ring():
            pass

    def all(self) -> None:
        while self.queue:
            self.queue.popleft().ring()


class SimWakeList:
    """What the next launch wakes."""

    def __init__(self, wake_queue: SimWakeQueue) -> None:
        self.handle = None
        self.files: list[int] = []
        self.sleepers = wake_queue
        self._waiters: list[SimWaiter] = []

    def add(self, waiters: Sequence[SimWaiter]) -> None:
        self._waiters += waiters

    def remove_file(self, fd: int) -> None:
        raise AssertionError("no simulated loop has a pipe")

    def begin(self) -> None:
        self.sleepers.add(self._waiters)
        self._waiters = []
        self.sleepers.next()

    def now(self) -> None:
        self.begin()
        self.sleepers.all()


class SimLoop:
    """An event loop that cannot watch files."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.closed = False
        self._last_at = 0.0

    def add_reader(self, fd: int, callback: object) -> None:
        raise NotImplementedError

    def remove_reader(self, fd: int) -> None:
        raise NotImplementedError

    def is_closed(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def call_soon_threadsafe(self, function: Callable[..., object], *arguments: object) -> None:
        if self.closed:
            raise RuntimeError("the loop is closed")
        world = self.world
        self._last_at = max(world.now + world.rng.random() * 0.001, self._last_at + 1e-9)  # in their order
        world.after(self._last_at - world.now, lambda: self.closed or function(*arguments))

    def create_future(self) -> Any:
        raise AssertionError("tasks of the simulation look at their mailboxes")


class SimAsyncMailbox(AsyncMailbox):
    """One whose reader is a coroutine of the simulation."""

    wake: Callable[[], object] | None = None

    def receive(self, item: object) -> None:
        super().receive(item)
        wake, self.wake = self.wake, None
        if wake is not None:
            wake()


class SimInbox(Inbox):
    """Time passes while the engine thread waits for a command."""

    def __init__(self, world: World, stop: Callable[[], object], n_launches: Callable[[], int]) -> None:
        super().__init__()
        self._n_launches = n_launches
        self._world = world
        self._stop = stop
        self._n_looks, self._seen = 0, -1
        self.empty = self._look

    def _look(self) -> bool:
        """The loop asks this at least once a turn: it must not turn for ever while nothing happens."""
        progress = self._world.n_events + self._n_launches()
        self._n_looks = self._n_looks + 1 if progress == self._seen else 0
        self._seen = progress
        if self._n_looks > _MOST_LOOKS:
            self._world.fail(AssertionError("the engine loop spins"))
            self._n_looks = 0
            self._stop()
            raise self._world.failure or AssertionError
        return self._commands.empty()

    def run_next(self, timeout: float | None = None) -> None:
        world = self._world
        deadline = None if timeout is None else world.now + timeout
        while self.empty():
            if world.failure is not None:
                self._stop()
                return
            at = world.next_event_s()
            if deadline is not None and (at is None or at > deadline):
                world.now = deadline
                raise Empty
            if not world.step():
                world.fail(AssertionError("deadlock: the engine waits for a command, and nobody acts"))
        super().run_next()


class SimSampler(FakeSampler):
    """Sometimes another thread draws, and the end of a text is known late."""

    def __init__(self, world: World, request: Request) -> None:
        super().__init__()
        self.is_slow = world.rng.random() < 0.3
        self.n_draws = 0
        self.noted: list[int] = []  # the tokens of the last call that drew
        self._world = world
        self._request = request

    def draw(self, token: int) -> int:
        self.noted.append(token)
        return super().draw(token)

    def logprobs(self, i: int = 0) -> tuple[float, Sequence[tuple[int, float]]]:
        """They tell whose they are."""
        assert self._request.wants_logprobs
        return -float(self.noted[i]), [(self.noted[i], -float(self.noted[i]))]

    def guess(self, n: int) -> tuple[Sequence[int], float]:
        """What follows, now and then with a mistake."""
        rng, tokens = self._world.rng, list(self._request.tokens)
        spec: Any = self._request.spec
        adapters = Switch(spec.adapters, self._request.active_from, spec.all_adapters)
        if rng.random() < 0.3:
            return (), 0.0
        guessed = []
        for _ in range(rng.randrange(1, n + 1)):
            guessed.append(
                next_token(tokens, N_VOCAB, adapters) if rng.random() < 0.85 else rng.randrange(N_VOCAB)
            )
            tokens.append(guessed[-1])
        return guessed, 0.85

    def expect(self, tokens: Sequence[int]) -> int:
        """A constraint forbids some of them, now and then."""
        rng = self._world.rng
        return rng.randrange(len(tokens) + 1) if rng.random() < 0.1 else super().expect(tokens)


class SimDrafter:
    """Drafts what follows, at times less than was asked for, nothing, or something wrong."""

    def __init__(self, world: World, n_ctx: int) -> None:
        self._world = world
        self._n_ctx = n_ctx
        self.closed = False
        self.took_s = 0.0

    def begin(self) -> None:
        """As a draft model does."""

    def guess(self, request: Request, n: int) -> Guess | None:
        """As a draft model does."""
        assert not self.closed and request.slot >= 0 and len(request.tokens) + n <= self._n_ctx
        return None if self._world.rng.random() < 0.1 else Guess(request, range(n), 0.9, is_draft=True)

    def seconds(self, chosen: Mapping[Request, int], whole: bool = False) -> float:
        """As a draft model does."""
        return 1e-4 * max(chosen.values(), default=0)

    def draft(self, chosen: Mapping[Request, int], worth: Worth = EVERY) -> dict[Request, Sequence[int]]:
        """As a draft model does."""
        rng = self._world.rng
        self.took_s = self.seconds(chosen)
        drafts: dict[Request, Sequence[int]] = {}
        for request, n in chosen.items():
            tokens = list(request.tokens)
            for _ in range(rng.randrange(n + 1)):
                right = rng.random() < 0.85
                tokens.append(next_token(tokens, N_VOCAB) if right else rng.randrange(N_VOCAB))
            if len(tokens) > len(request.tokens):
                drafts[request] = tokens[len(request.tokens) :]
        return drafts

    def close(self) -> None:
        """As a draft model does."""
        assert not self.closed, "a drafter was closed twice"
        self.closed = True


class SimExecutor(FakeContext):
    """Steps that take time, fail, are aborted or find no cells, and rows that are drawn from late."""

    def __init__(self, world: World, faults: float, **options: Any) -> None:
        super().__init__(n_ctx=N_CTX, n_vocab=N_VOCAB, **options)
        self.world = world
        self.faults = faults
        rng = world.rng
        self.overlaps = rng.random() < 0.4
        self.late_errors = self.overlaps
        self.depth = 2 if self.overlaps else 1
        self.step_s = rng.choice((0.0005, 0.002, 0.01))
        self._done_at: dict[int, float] = {}
        self._rows_of: dict[int, dict[int, int]] = {}
        self._errors: dict[int, Exception] = {}
        self._late: list[tuple[Any, int, int]] = []
        self._notify: Callable[[], object] = lambda: None

    def launch(self, tokens: Sequence[int], *others: Any, **more: Any) -> int:
        world, rng = self.world, self.world.rng
        n = self.n_launches
        if self.faults and rng.random() < self.faults:
            error = rng.choice(
                (InjectedError("a step failed"), ContextFullError("no cells"), InjectedError("damage"))
            )
            if self.late_errors and not isinstance(error, ContextFullError):
                self._errors[n] = error
            else:
                self.failures[n] = error
        step = super().launch(tokens, *others, **more)
        self._rows_of[step], self._rows = self._rows, {}
        self._done_at[step] = world.now + self.step_s * (1 + len(tokens) / 16) * rng.choice((0.5, 1, 1, 3))
        if not self.overlaps:
            world.pass_time(self._done_at[step] - world.now)
            self._wake_rest()
        return step

    def _wake_rest(self) -> None:
        """As launches do if the woken threads take long."""
        dispatcher = getattr(self._wake, "__self__", None)
        if isinstance(dispatcher, SimWakeList):
            dispatcher.sleepers.all()

    def sample(
        self, step: int, rows: Sequence[int], samplers: Sequence[Any], guessed: Sequence[int] = ()
    ) -> list[int]:
        self.world.pass_time(max(self._done_at[step] - self.world.now, 0.0))
        if step in self._errors:
            raise self._errors.pop(step)
        for sampler in filter(None, samplers):
            sampler.noted.clear()
        self._asked = (rows, samplers)
        self._sampled = self._draw_all([self._rows_of[step][row] for row in rows], samplers, guessed)
        return self._sampled.copy()

    def _draw(self, token: int, sampler: SimSampler) -> int:
        if not sampler.is_slow or self.world.rng.random() < 0.5:
            return sampler.draw(token)
        sampler.n_draws += 1
        self._later(sampler, sampler.n_draws, token)
        return NoToken.LATER

    def _later(self, sampler: SimSampler, number: int, token: int) -> None:
        def arrive() -> None:
            self._late.append(
                (sampler, number, token if sampler.closed or token < 0 else sampler.draw(token))
            )
            self._notify()

        self.world.soon(arrive, 5 * self.step_s)

    def take_drawn(self) -> list[tuple[Any, int, int]]:
        late, self._late = self._late, []
        return late

    def notify_drawn(self, notify: Callable[[], object]) -> None:
        self._notify = notify

    def launching(self) -> int:
        return self.n_launches - 1

    def change_cells(self, ops: Sequence[MemoryOp]) -> CellChanges:
        """Without faults, cells to spare or steps that overlap, the cache asks for nothing that is impossible."""
        changes = super().change_cells(ops)
        if not self.faults and not self.shares_cells and not self.overlaps:
            assert not changes.lost, f"sequences {changes.lost} have lost their cells: {ops}"
        return changes

    def save(self, seq_id: int, max_bytes: int, only_state: bool = False) -> FakeSaved | None:
        self.refuses_saves = self.faults > 0 and self.world.rng.random() < 0.2
        return super().save(seq_id, max_bytes, only_state)

    def _claim(self) -> None:
        assert not self.closed, "a closed context was used"


class Simulation:
    """One seed."""

    def __init__(self, world: World) -> None:
        self.world = world
        rng = world.rng
        faults = rng.choice((0.0, 0.0, 0.03, 0.1))
        n_slots = rng.choice((1, 2, 3, 5, 5))
        whole = N_CTX * n_slots
        n_cells = rng.choice((None, None, N_CTX, max(N_CTX, whole // 2)))
        context = SimExecutor(
            world,
            faults,
            n_seq_max=n_slots,
            n_cells=n_cells,
            n_batch=rng.choice((8, 32)),
            recurrent=(is_recurrent := rng.random() < 0.25),
            n_states=rng.choice((0, 4)),
            has_cells=not is_recurrent or rng.random() < 0.7,
            window=rng.choice((3, 8)) if not is_recurrent and rng.random() < 0.3 else 0,
        )
        self.context = context
        cache = KvCache(
            n_slots,
            rng.random() < 0.7,
            has_states=context.recurrent,
            has_cells=context.has_cells,
            window=context.window,
            shares_cells=context.shares_cells,
            cell_bytes=1,
            host_bytes=rng.choice((0, 60, 3_000, 20_000)),
            min_prefix=rng.choice((1, 4)),
            min_save=rng.choice((2, 32)),
        )
        # How full sequences go on. Cells that sequences share, and states, cannot be shifted.
        self.overflow, self.n_keep = "stop", 0
        if not context.recurrent and rng.random() < 0.4:
            self.overflow = (
                "recompute" if context.shares_cells else rng.choice(("recompute", "shift", "shift"))
            )
            self.n_keep = rng.choice(
                (2, N_CTX - 4, N_CTX - 4)
            )  # they are full after two tokens with the others
        self.can_overflow = self.overflow != "stop"  # full sequences drop tokens
        self.scheduler = Scheduler(
            cache,
            N_CTX,
            context.n_cells,
            context.n_batch,
            rng.choice((4, 8)) if context.n_batch == 8 else 16,
            padding_token=None if context.shares_cells or context.recurrent else 0,
            prefill_cutoff=rng.choice((None, 4, 4)),
            overflow=Overflow(self.overflow, self.n_keep),
            gate=Gate(
                0 if rng.random() < 0.3 else rng.choice((3, 8)),
                drafter=SimDrafter(world, N_CTX) if rng.random() < 0.4 else None,
                has_window=context.window > 0,
                copies_states=context.recurrent and not context.n_states,
                n_longest=context.n_states if context.recurrent and context.n_states else MOST_GUESSED,
            ),
            carries=carries if rng.random() < 0.5 else None,
        )
        self.queue = QueueLimit(rng.choice((None, None, 2, 5)))
        self.loop = EngineLoop(self.scheduler, context, rng.choice((0.0, 0.001)), self.queue.remove)
        if context.overlaps and rng.random() < 0.5:
            keep_micro_batches(self.loop)
            self.scheduler.split_decoding(2)
        self.loop.inbox = self.inbox = SimInbox(
            world, lambda: self.loop.stop(False), lambda: context.n_launches
        )
        context.notify_drawn(lambda: self.inbox.put(self.loop.take_drawn))
        if not context.overlaps:
            wakes: Any = self.loop.dispatcher.wakes  # a SimWakeList
            context.wake_at_launch(wakes)
            context._wake = wakes.begin
        self.loops = [SimLoop(world) for _ in range(2)]
        self.samplers: list[SimSampler] = []
        self.prefixes = [[rng.randrange(N_VOCAB) for _ in range(20)] for _ in range(3)]
        is_plain = rng.random() < (0.8 if self.overflow == "shift" else 0.5)
        self.sets = (None,) if is_plain else rng.choice(((None, 1), (1, 2), (None, 1, 2, 3)))
        self.has_faults = faults > 0
        self.n_open = 0
        self.n_checked = 0
        world.checks.append(self.check)
        for _ in range(rng.randrange(2, 13)):
            self.n_open += 1
            world.soon(lambda: self._advance(self._caller()), 0.05)
        if rng.random() < 0.2:  # an engine that is closed in the middle
            world.soon(lambda: self.inbox.put(self.loop.stop, rng.random() < 0.5), 0.08)
        if rng.random() < 0.1:
            world.soon(self._jump, 0.05)
        for loop in self.loops:
            if rng.random() < 0.15:
                world.soon(loop.close, 0.05)

    # ---- the run
    def run(self) -> None:
        """Raises what was wrong."""
        world = self.world
        try:
            self.loop.run()
        except BaseException as e:
            world.fail(e)
        if world.failure is not None:
            raise world.failure
        if self.loop.failure is not None:
            raise self.loop.failure
        while world.step():
            pass
        if world.failure is not None:
            raise world.failure
        assert self.n_open == 0, f"{self.n_open} callers still wait"
        assert self.queue.n == 0, "the queue holds a request that has ended"
        assert not self.scheduler.live() and not self.loop.open, "requests are left"
        assert all(sampler.closed for sampler in self.samplers), "a sampler was not closed"
        drafter = self.scheduler.gate.drafter
        assert not isinstance(drafter, SimDrafter) or drafter.closed, "the drafter was not closed"
        assert all(saved.closed for saved in self.context.saved), "saved cells were not freed"

    def check(self) -> None:
        """The books."""
        self.n_checked += 1
        if self.n_checked % 4 == 0:
            self.scheduler.check_integrity()

    def _jump(self) -> None:
        self.world.now += self.world.rng.choice((1.0, 3600.0))

    def _answer(self, mailbox: Any, loop: SimLoop | None) -> Generator[Any, Any, Any]:
        """The item of a request that will be answered; None if its loop is closed."""
        if loop is None:
            return (yield self._item(mailbox))
        for _ in range(3):  # a jump of the clock may end one wait
            item = yield self._item(mailbox, 30.0)
            if item is not Empty:
                return item
            if loop.closed:
                return None
        raise AssertionError("a task was never answered")

    # ---- callers
    def _advance(self, caller: Caller, value: object = None) -> None:
        """Continues a caller until it waits again."""
        try:
            wait = caller.send(value)
        except StopIteration:
            self.n_open -= 1
            if self.n_open == 0:
                self.world.after(0.001, lambda: self.inbox.put(self.loop.stop, True))
            return
        wait(caller)

    def _sleep(self, seconds: float) -> Callable[[Caller], object]:
        return lambda caller: self.world.after(seconds, lambda: self._advance(caller))

    def _item(self, mailbox: Any, timeout_s: float | None = None) -> Callable[[Caller], object]:
        """Waits as ``mailbox.get`` does; the caller gets the item, or Empty after the timeout."""
        world, dispatcher = self.world, self.loop.dispatcher
        deadline = None if timeout_s is None else world.now + timeout_s

        def look(caller: Caller) -> None:
            if mailbox._items:
                self._advance(caller, mailbox._items.popleft())
                return
            if deadline is not None and world.now >= deadline:
                self._advance(caller, Empty)
                return
            done = [False]

            def again() -> None:
                if not done[0]:
                    done[0] = True
                    look(caller)

            if isinstance(mailbox, SimAsyncMailbox):
                mailbox.wake = lambda: world.soon(again)
            else:
                if mailbox.waiter is None:
                    mailbox.waiter = dispatcher.waiter()
                    world.soon(lambda: look(caller))
                    return
                dispatcher._wake_queue.next()  # before it sleeps, it wakes the next thread
                if mailbox.waiter.kept:
                    mailbox.waiter.kept = False
                    world.soon(lambda: look(caller))
                    return
                mailbox.waiter.wake = lambda: world.soon(again)
            if deadline is not None:
                world.after(max(deadline - world.now, 0.0), again)

        return look

    def _mailbox(self) -> tuple[Any, SimLoop | None]:
        rng = self.world.rng
        if rng.random() < 0.3:
            loop = rng.choice(self.loops)
            if not loop.closed:
                return SimAsyncMailbox(loop, self.loop.dispatcher), loop  # type: ignore[arg-type]
        return ThreadMailbox(self.loop.dispatcher), None

    def _prompt(self) -> list[int]:
        rng = self.world.rng
        shared = rng.choice(self.prefixes)[: rng.randrange(0, 20)]
        return shared + [rng.randrange(N_VOCAB) for _ in range(rng.randrange(1, 16))]

    def _request(self, tokens: list[int], **options: Any) -> Request:
        rng = self.world.rng
        spec = RequestSpec(
            rng.randrange(1, 120 if self.can_overflow else 30),
            frozenset([0] if rng.random() < (0.2 if self.can_overflow else 0.5) else []),
            sampler_factory=self,
            priority=rng.choice((0, 0, 0, 1, -1)),
            uses_cache=rng.random() < 0.9,
            caller=rng.randrange(3),
            adapters=(adapters := rng.choice(self.sets)),
            activation=self._activation(adapters),
            cache_key=adapters,
            wants_logprobs=rng.random() < 0.4,
            places=tuple(rng.randrange(1, 30) for _ in range(rng.choice((0, 0, 1, 2)))),
            speculates=not options.get("resumable"),
            drafts=not options.get("resumable"),
            **options,
        )
        return Request(tokens, spec)

    def _activation(self, adapters: int | None) -> Activation | None:
        """An activated LoRA besides the adapters, whose invocation occurs in most texts."""
        rng = self.world.rng
        if len(self.sets) == 1 or rng.random() < 0.5:
            return None
        n = rng.choice((1, 1, 2))
        return Activation((adapters or 0) + rng.choice((10, 20)), tuple(rng.randrange(4) for _ in range(n)))

    def make(self, request: Request) -> SimSampler:
        """As a sampler factory does."""
        self.samplers.append(SimSampler(self.world, request))
        return self.samplers[-1]

    def rebuild(self, sampler: SimSampler, request: Request) -> None:
        """As a sampler factory does."""
        sampler.reset()

    def _ask(self, request: Request, mailbox: Any, loop: SimLoop | None) -> Generator[Any, Any, bool]:
        """Waits for room in the queue, and submits the request. False if nobody would answer."""
        if loop is not None:
            mailbox.requests.append(request)
        while not self.queue.try_enter(request):
            yield self._room
        if loop is not None and loop.closed:  # its task is gone
            self._cancel(request)
            return False
        return self._submit(request)

    def _room(self, caller: Caller) -> None:
        """Continues a caller when room may have come free."""
        self.queue._waiters.append(lambda: self.world.soon(lambda: self._advance(caller)))

    def _cancel(self, request: Request) -> None:
        """As ``Submission.cancel`` and ``EngineThread.cancel_soon``."""
        self.queue.discard([request])
        self.inbox.put(self.loop.cancel, request)
        request.cancelled = True
        self.loop.in_flight.abort_cancelled()

    def _caller(self) -> Caller:
        if (
            self.overflow == "shift" and self.world.rng.random() < 0.7
        ):  # decoding requests have gaps between them
            return self._completes()
        return self.world.rng.choice((self._completes, self._completes, self._streams, self._generates))()

    def _submit(self, request: Request) -> bool:
        if self.loop._stopping:
            self.queue.discard([request])
            return False
        self.inbox.put(self.loop.add, request)
        return True

    def _completes(self) -> Caller:
        """Asks for whole completions, one after the other."""
        rng = self.world.rng
        thinks_s = rng.choice((0.0, 0.05))
        for _ in range(rng.randrange(1, 6)):
            prompt = self._prompt()
            mailbox, loop = self._mailbox()
            request = self._request(prompt.copy(), sink=CompletionSink(Choices(mailbox, 0), _piece, (), 0))
            if not (yield from self._ask(request, mailbox, loop)):
                return
            timeout_s = rng.choice((None, None, None, 0.003, 0.05))
            item: Any = Empty if timeout_s is None else (yield self._item(mailbox, timeout_s))
            if item is Empty:
                if timeout_s is not None:
                    self._cancel(request)
                item = yield from self._answer(mailbox, loop)
                if item is None:
                    return
            self._check_completion(request, prompt, item[1])
            if thinks_s:
                yield self._sleep(thinks_s * rng.random())

    def _check_completion(self, request: Request, prompt: list[int], result: object) -> None:
        if isinstance(result, Failure):
            self._check_failure(result.error)
            return
        assert isinstance(result, Completion)
        self._check_tokens(request, prompt, result.token_ids, result.finish_reason)
        assert result.text == "".join(f"{token} " for token in result.token_ids)
        (choice,) = result.choices
        self._check_logprobs(request, choice.token_ids, choice.logprobs)
        if choice.stop_token is not None and choice.stop_logprob is not None:
            self._check_logprobs(request, [choice.stop_token], [choice.stop_logprob])

    def _check_logprobs(
        self, request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        """Each token has its own."""
        pairs = [(entry.id, entry.logprob) for entry in logprobs or ()]
        expected = [(token, -float(token)) for token in tokens] if request.wants_logprobs else []
        assert pairs == expected, (pairs, expected)

    def _check_failure(self, error: BaseException) -> None:
        if isinstance(error, InvalidRequestError):
            assert str(error) == "the generation was cancelled", error  # a fork of one that had ended
        else:
            assert self.has_faults and isinstance(error, (InjectedError, ContextFullError)), repr(error)

    def _check_tokens(
        self, request: Request, prompt: list[int], tokens: Sequence[int], reason: str | None
    ) -> None:
        expected, ends = continuation(
            prompt,
            request.max_tokens,
            request.stop_tokens,
            N_CTX,
            N_VOCAB,
            adapters_of(request, prompt),
            self.n_keep if self.can_overflow else None,
        )
        if reason == "cancelled":
            assert list(tokens) == expected[: len(tokens)], (tokens, expected)
        else:
            assert (list(tokens), reason) == (expected, ends), (tokens, reason, expected, ends)

    def _streams(self) -> Caller:
        """Reads token by token, sometimes slowly, and sometimes leaves."""
        rng = self.world.rng
        prompt, n_ahead = self._prompt(), rng.choice((1, 3, 64))
        mailbox, loop = self._mailbox()
        sink = DeltaSink(mailbox, _piece, ())
        request = self._request(prompt.copy(), token_budget=n_ahead, sink=sink)
        if not (yield from self._ask(request, mailbox, loop)):
            return
        leaves_after = rng.choice((None, None, 0, 3))
        pause_s = rng.choice((0.0, 0.0, 0.004, 0.02))
        got: list[int] = []
        while True:
            if leaves_after is not None and len(got) >= leaves_after:
                self._cancel(request)
                return
            item = yield from self._answer(mailbox, loop)
            if item is None:
                return
            if isinstance(item, Failure):
                self._check_failure(item.error)
                return
            assert isinstance(item, Delta)
            self._check_logprobs(request, item.token_ids, item.logprobs)
            got += item.token_ids
            if item.finish_reason is not None:
                self._check_tokens(request, prompt, got, item.finish_reason)
                return
            if pause_s:
                yield self._sleep(pause_s * rng.random())
            request.token_budget = len(got) + n_ahead
            if request.n_total >= request.token_budget - n_ahead:
                self.inbox.put(self.loop.resume, request)

    def _generates(self) -> Caller:
        """One token at a time; changes the sequence, and forks it."""
        prompt = self._prompt()
        mailbox = ThreadMailbox(self.loop.dispatcher)
        sink = TokenSink(mailbox, _piece, ())
        request = self._request(prompt.copy(), token_budget=0, resumable=True, sink=sink)
        if not self._submit(request):
            return
        yield from self._go_on(request, mailbox, prompt, 0, adapters_of(request, prompt))

    def _go_on(
        self, request: Request, mailbox: ThreadMailbox, whole: list[int], n_made: int, adapters: Adapters
    ) -> Iterator[Any]:
        rng = self.world.rng
        for _ in range(rng.randrange(1, 12)):
            action = rng.random()
            if action < 0.1:
                self._cancel(request)
                return
            if request.state is State.FINISHED:
                return
            if action < 0.2 and len(whole) > 2:
                n = rng.randrange(1, len(whole))
                del whole[n:]
                n_made, adapters = 0, adapters_of(request, whole)
                request.reopen()
                self.inbox.put(self.loop.change, request, n, [])
            elif action < 0.3 and len(whole) < N_CTX - 6:
                more = [rng.randrange(N_VOCAB) for _ in range(3)]
                whole += more
                n_made, adapters = 0, adapters_of(request, whole)
                request.reopen()
                self.inbox.put(self.loop.change, request, None, more)
            elif action < 0.36 and not request.cancelled:
                yield from self._forks(request, whole, n_made, adapters)
            elif request.finish_reason is None:
                request.token_budget = request.n_total + 1
                self.inbox.put(self.loop.resume, request)
                item = yield self._item(mailbox)
                if isinstance(item, Failure):
                    self._check_failure(item.error)
                    return
                if item is None:
                    assert request.finish_reason is not None, request
                    if request.finish_reason == "stop" and request.max_tokens > n_made:
                        assert next_token(whole, N_VOCAB, adapters) in request.stop_tokens, (whole, request)
                    continue
                assert isinstance(item, Token)
                assert item.logprob == (-float(item.id) if request.wants_logprobs else None)
                assert item.id == next_token(whole, N_VOCAB, adapters), (item, whole)
                whole.append(item.id)
                n_made += 1
                if self.can_overflow and request.dropped:
                    self._cancel(request)
                    return
            yield self._sleep(rng.random() * 0.004)
        self._cancel(request)

    def _forks(self, parent: Request, whole: list[int], n_made: int, adapters: Adapters) -> Iterator[Any]:
        mailbox = ThreadMailbox(self.loop.dispatcher)
        assert isinstance(parent.sink, TokenSink)
        child = parent.fork(0, parent.sink.fork(mailbox, keeps_text=False))
        self.inbox.put(self.loop.fork, parent, child)
        yield from self._go_on(child, mailbox, whole.copy(), n_made, adapters)


def _piece(token: int) -> bytes:
    return b"%d " % token


def carries(carrier: Any, adapters: Any) -> bool:
    """Whether steps with one set can have requests with another: some sets carry those before them, others none."""
    if carrier is None or carrier % 3 == 0:
        return False
    return adapters is None or (adapters % 3 > 0 and adapters <= carrier)


def adapters_of(request: Request, tokens: Sequence[int]) -> Adapters:
    """What a text is computed with whose caller gave these tokens last."""
    spec: Any = request.spec
    if spec.activation is None:
        return spec.adapters  # type: ignore[no-any-return]
    return Switch(spec.adapters, spec.activation.begin(tokens), spec.activation.adapters)


@contextmanager
def virtual_time(world: World) -> Iterator[None]:
    """The modules that look at the clock or wake threads do so in the simulation."""
    with ExitStack() as stack:
        for module in (engine_loop, late_draws, micro_batches, sinks, mailboxes, call_options, queue_limit):
            stack.enter_context(patch.object(module, "perf_counter", world.clock))
        stack.enter_context(patch.object(mailboxes, "WakeQueue", SimWakeQueue))
        stack.enter_context(patch.object(mailboxes, "LaunchWakeList", SimWakeList))
        # A run has few steps.
        stack.enter_context(patch.object(scheduler, "_LEAST_GAPS", world.rng.choice((1, 1, 1, 8))))
        # Its prompts are short.
        for name, values in (
            ("_BEFORE_END", (1, 4)),
            ("_LEAST_BETWEEN", (1, 4)),
            ("_INTERVAL", (5, 512)),
        ):
            stack.enter_context(patch.object(kv, name, world.rng.choice(values)))
        stack.enter_context(patch.object(kv, "MIN_FOLLOW", world.rng.choice((2, 16))))
        yield


def simulate(seed: int) -> tuple[int, float, int]:
    """Runs one seed. Returns the number of events, the time at the end, and the number of steps.

    Raises what was wrong.
    """
    world = World(seed)
    with virtual_time(world):
        simulation = Simulation(world)
        simulation.run()
    return world.n_events, world.now, simulation.context.n_launches


def main() -> None:
    """The command line."""
    n, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    n_events = 0
    failed: list[int] = []
    for seed in range(first, first + n):
        try:
            n_events += simulate(seed)[0]
        except BaseException:
            failed.append(seed)
            if len(failed) == 1 or n == 1:
                traceback.print_exc()
            if len(failed) > 20:
                break
    sys.stdout.write(f"{n} seeds, {n_events} events, failed: {failed or 'none'}\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
