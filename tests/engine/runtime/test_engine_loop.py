"""The engine thread on a fake context: what fails fails alone, what ends ends at once, and nobody waits forever."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import pytest
from support.control import PATIENCE_S, Worker, all_results, wait_until
from support.engine_harness import N_CTX, EngineHarness, piece, prompt_of
from support.fakes import FakeSampler, continuation
from support.inside import request_of, wakers_of
from support.memory import cache_of
from support.run_script import run_script

import llamapipe as lp
from llamapipe._engine.policy.core import UNLIMITED, Request, State
from llamapipe._engine.runtime import loop as engine_loop_module
from llamapipe._engine.runtime import mailboxes as dispatcher_module
from llamapipe._engine.runtime.mailboxes import AsyncMailbox
from llamapipe._engine.runtime.sinks import Choices, CompletionSink, DeltaSink
from llamapipe._sync.streams import Generation, Stream
from llamapipe.errors import (
    BackendError,
    ContextFullError,
    DecodeError,
    EngineClosedError,
    InvalidRequestError,
    LlamapipeError,
)
from llamapipe.results import Token
from llamapipe.streams import BUFFER_TOKENS

pytestmark = pytest.mark.native


class Turnstile:
    """Stands before each launch of a fake context until the test lets it through."""

    def __init__(self) -> None:
        self._arrived = threading.Semaphore(0)
        self._pass = threading.Semaphore(0)
        self._open = False

    def __call__(self, n: int) -> None:
        if not self._open:
            self._arrived.release()
            assert self._pass.acquire(timeout=PATIENCE_S), "the test let no step through"

    def wait(self) -> None:
        """Returns once a step stands here."""
        assert self._arrived.acquire(timeout=PATIENCE_S), "no step came"

    def step(self) -> None:
        """Lets one step through and waits for the next."""
        self._pass.release()
        self.wait()

    def open(self) -> None:
        """Lets everything through."""
        self._open = True
        self._pass.release()


@pytest.fixture
def make_harness() -> Iterator[Callable[..., EngineHarness]]:
    """Makes harnesses, which are closed and checked after the test."""
    harnesses: list[EngineHarness] = []

    def make(*arguments: Any, **options: Any) -> EngineHarness:
        harnesses.append(EngineHarness(*arguments, **options))
        return harnesses[-1]

    yield make
    for harness in harnesses:
        harness.close(drain=False)


MakeHarness = Callable[..., EngineHarness]


def paused_stream(harness: EngineHarness) -> Stream:
    """A stream of 20 tokens more than it may be ahead of its reader, who has not read any yet."""
    stream = harness.stream(max_tokens=BUFFER_TOKENS + 20)
    wait_until(lambda: request_of(stream).state is State.PAUSED)
    assert harness.engine_thread.ask(lambda: request_of(stream).n_total) == BUFFER_TOKENS
    return stream


def rest_of(stream: Stream) -> list[int]:
    """The tokens of a stream that are left; AssertionError when its end does not come."""
    tokens: list[int] = Worker(lambda: [t for delta in stream for t in delta.token_ids]).result()
    return tokens


class TestWork:
    def test_everyone_gets_what_they_would_get_alone(self, make_harness: MakeHarness) -> None:
        harness = make_harness(n_slots=3)
        answers = [harness.complete(n_prompt=n, max_tokens=m) for n in (1, 5, 40) for m in (1, 2, 9, None)]
        for answer in answers:
            answer.check()
        assert harness.queue.n == 0

    def test_the_counters_say_what_was_done(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        with harness.held():
            answers = [harness.complete(n_prompt=4, max_tokens=5), harness.complete(n_prompt=6, max_tokens=3)]
        for answer in answers:
            answer.check()
        stats = harness.engine_thread.stats()
        assert (stats.steps, stats.n_requests, stats.n_preempted) == (5, 2, 0)
        assert (stats.n_prompt_tokens, stats.n_completion_tokens) == (10, 8)
        assert (stats.n_active, stats.n_queued) == (0, 0)

    def test_each_request_has_a_sampler_that_sees_its_tokens(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        answers = [harness.complete(max_tokens=n) for n in (3, 6)]
        results = [answer.result() for answer in answers]
        assert sorted(s.accepted for s in harness.samplers) == sorted(r.token_ids for r in results)
        harness.engine_thread.ask(harness.engine_thread.loop.check_integrity)
        assert [s.closed for s in harness.samplers] == [True, True]

    def test_cells_are_given_back_when_a_request_ends(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        harness.complete().check()
        assert harness.engine_thread.ask(lambda: harness.context.n_used) == 0

    def test_a_request_cancelled_before_it_arrived_costs_no_step(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        with harness.held():
            answer = harness.complete()
            answer.request.cancelled = True
        result = answer.result()
        assert (result.finish_reason, result.token_ids) == ("cancelled", [])
        assert harness.context.n_launches == 0

    def test_cancelling_what_never_arrived_does_nothing(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        harness.cancel(harness.request())
        harness.complete().check()

    def test_cancelled_within_a_step(self, make_harness: MakeHarness) -> None:
        gate = Turnstile()
        harness = make_harness(n_slots=1, before_launch=gate)
        running, queued = harness.complete(max_tokens=9), harness.complete()
        gate.wait()
        gate.step()
        harness.cancel(running.request)
        harness.cancel(queued.request)
        gate.open()
        result = running.result()
        assert (result.finish_reason, len(result.token_ids)) == ("cancelled", 2)
        assert queued.result().finish_reason == "cancelled"
        assert harness.engine_thread.ask(lambda: harness.context.n_launches) == 2

    def test_before_the_requests_that_wait_in_the_inbox(self, make_harness: MakeHarness) -> None:
        gate = Turnstile()
        harness = make_harness(n_slots=2, before_launch=gate)
        running, other = harness.complete(max_tokens=40), harness.complete(max_tokens=3)
        gate.wait()
        many = [harness.request(max_tokens=2) for _ in range(5 * engine_loop_module._MAX_COMMANDS)]
        for request in many:
            harness.submit(request)
        harness.engine_thread.cancel_soon(running.request)
        harness.engine_thread.cancel_soon(many[-1])  # it has not arrived yet
        gate.step()
        assert running.result().finish_reason == "cancelled"
        gate.open()
        other.check()
        wait_until(lambda: all(request.state is State.FINISHED for request in many))
        assert many[-1].finish_reason == "cancelled" and many[-1].n_generated == 0
        assert {request.finish_reason for request in many[:-1]} == {"length"}

    def test_of_a_generation_in_the_order_of_calls(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        generation = harness.start(n_prompt=6, max_tokens=None)
        assert generation.next() is not None
        with harness.held():
            generation.trim(5)
            child = generation.fork()
            generation.cancel()
        token = child.next()
        assert token is not None and child.token_ids == [*generation.token_ids, token.id]


class TestFailedSteps:
    def test_only_the_requests_of_the_step_fail(self, make_harness: MakeHarness) -> None:
        error = DecodeError("injected")
        harness = make_harness(n_slots=2, failures={3: error})
        with harness.held():
            a, b, c = (
                harness.complete(max_tokens=9),
                harness.complete(max_tokens=2),
                harness.complete(max_tokens=4),
            )
        b.check()
        for answer in (a, c):  # c has b's slot by then
            with pytest.raises(DecodeError, match="injected"):
                answer.result()
        harness.complete().check()
        assert harness.engine_thread.ask(lambda: harness.context.n_used) == 0

    def test_one_that_waits_for_its_reader_goes_on(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        stream = paused_stream(harness)
        harness.context.failures[harness.context.n_launches + 1] = DecodeError("injected")
        with pytest.raises(DecodeError, match="injected"):
            harness.complete().result()
        assert rest_of(stream) == continuation(prompt_of(4), BUFFER_TOKENS + 20)[0]

    def test_a_kept_request_that_failed_says_so_again(self, make_harness: MakeHarness) -> None:
        harness = make_harness(failures={1: DecodeError("injected")})
        generation = harness.start()
        assert generation.next() is not None
        for _ in range(2):
            with pytest.raises(DecodeError, match="injected"):
                generation.next()
        with pytest.raises(InvalidRequestError, match="start another"):
            generation.trim(2)

    def test_without_a_finite_logit_one_request_fails(self, make_harness: MakeHarness) -> None:
        first = continuation(prompt_of(4, 0), 1)[0]
        harness = make_harness(broken=first)
        a, b = harness.complete(), harness.complete()
        with pytest.raises(DecodeError, match="no logit of this request's row is finite"):
            a.result()
        b.check()

    def test_no_cells_for_everyone_is_no_failure(self, make_harness: MakeHarness) -> None:
        harness = make_harness(failures={n: ContextFullError("injected") for n in (1, 2, 5)})
        with harness.held():
            answers = [harness.complete() for _ in range(6)]
        for answer in answers:
            answer.check()
        assert harness.engine_thread.stats().n_preempted == 3

    def test_who_gave_way_goes_on_when_the_other_has_finished(self, make_harness: MakeHarness) -> None:
        harness = make_harness(failures={1: ContextFullError("injected")})
        with harness.held():
            answers = [harness.complete() for _ in range(2)]
        for answer in answers:
            answer.check()

    def test_no_cells_for_one_alone_is(self, make_harness: MakeHarness) -> None:
        harness = make_harness(failures={1: ContextFullError("injected")})
        with pytest.raises(ContextFullError, match="injected"):
            harness.complete().result()
        harness.complete().check()


class TestDefects:
    """What should not happen: everyone is told, nobody hangs, and closing works."""

    def everyone(self, harness: EngineHarness) -> list[Callable[[], Any]]:
        """Asks for one of each kind, more than there are slots; what then waits for each."""
        return [
            harness.complete().result,
            harness.stream().__next__,
            harness.start().next,
            harness.complete().result,
            harness.complete(token_budget=1).result,
        ]

    def assert_told(self, waits: list[Callable[[], Any]]) -> None:
        for worker in [Worker(wait) for wait in waits]:
            with pytest.raises(BackendError, match="the engine thread failed") as caught:
                worker.result()
            assert caught.value.__cause__ is not None

    def assert_dead(self, harness: EngineHarness) -> None:
        """Later requests fail too, questions are answered, and those who wait for room get it."""
        self.assert_told([harness.complete().result, harness.start().next])
        assert harness.engine_thread.stats().n_queued == 0
        wait_until(lambda: harness.queue.n == 0)

    def test_sampling_that_raises_ends_the_engine(self, make_harness: MakeHarness) -> None:
        harness = make_harness(n_slots=2, sample_failures={0: RuntimeError("sampling failed")})
        with harness.held():
            waits = self.everyone(harness)
        self.assert_told(waits)
        self.assert_dead(harness)

    def test_launching_raises_something_else(self, make_harness: MakeHarness) -> None:
        harness = make_harness(n_slots=2, failures={0: RuntimeError("another thread")})
        with harness.held():
            waits = self.everyone(harness)
        self.assert_told(waits)
        self.assert_dead(harness)

    def test_no_sampler_can_be_made(self, make_harness: MakeHarness) -> None:
        def make_sampler(request: Request) -> FakeSampler:
            raise RuntimeError("a defect")

        harness = make_harness(n_slots=2, make_sampler=make_sampler)
        with harness.held():
            waits = self.everyone(harness)
        self.assert_told(waits)
        self.assert_dead(harness)

    def test_no_memory_is_left_for_a_sampler(self, make_harness: MakeHarness) -> None:
        """That request fails, those beside it do not."""
        unlucky: list[Request] = []

        def make_sampler(request: Request) -> FakeSampler:
            if request in unlucky:
                raise MemoryError("no memory")
            return FakeSampler()

        harness = make_harness(n_slots=2, make_sampler=make_sampler)
        with harness.held():
            calls = [harness.complete() for _ in range(4)]
            unlucky += [calls[1].request, calls[2].request]
        for call in calls:
            if call.request in unlucky:
                with pytest.raises(MemoryError, match="no memory"):
                    call.result()
            else:
                call.check()

    def test_a_sink_raises_while_others_end_in_the_same_step(self, make_harness: MakeHarness) -> None:
        class BadSink(CompletionSink):
            def token(self, request: Request, token: int) -> bool:
                raise ValueError("no piece")

        harness = make_harness()
        with harness.held():
            bad = harness.complete(max_tokens=1)
            bad.request.sink = BadSink(Choices(bad.mailbox, 0), piece, (), 0)
            other = harness.complete(max_tokens=1)
        self.assert_told([bad.result, other.result])
        self.assert_dead(harness)

    def test_a_sink_that_cannot_even_be_told(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        with harness.held():
            bad, other = harness.complete(), harness.complete()
            bad.request.sink = None  # type: ignore[assignment]
        self.assert_told([other.result])
        self.assert_dead(harness)

    @pytest.mark.parametrize("method", ["plan", "commit", "take_dequeued", "add"])
    def test_the_scheduler_raises(
        self, make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, method: str
    ) -> None:
        harness = make_harness(n_slots=2)

        def broken(*arguments: Any) -> None:
            harness.scheduler._running.decoding.clear()  # and whatever else it was in the middle of
            raise KeyError("broken")

        with harness.held():
            waits = self.everyone(harness)
            monkeypatch.setattr(harness.scheduler, method, broken)
        self.assert_told(waits)
        self.assert_told([harness.complete().result])
        wait_until(lambda: harness.queue.n == 0)
        monkeypatch.undo()
        Worker(harness.engine_thread.close, True).result()
        assert harness.context.closed
        harness.scheduler.__init__(cache_of(1), 1, 1, 1, 1)  # type: ignore[misc]  # for the fixture: nothing is left to check

    def test_who_waits_for_room_gets_it_and_is_told(self, make_harness: MakeHarness) -> None:
        gate = Turnstile()
        harness = make_harness(
            n_slots=1, max_queue=1, sample_failures={0: RuntimeError("failed")}, before_launch=gate
        )
        running = harness.complete()
        gate.wait()
        queued = harness.complete()
        waiting = [Worker(lambda: harness.complete().result()) for _ in range(3)]
        gate.open()
        self.assert_told([running.result, queued.result, *(w.result for w in waiting)])

    def test_closing_without_drain_after_it(self, make_harness: MakeHarness) -> None:
        harness = make_harness(sample_failures={0: RuntimeError("failed")})
        self.assert_told([harness.complete().result])
        harness.close(drain=False)
        with pytest.raises(EngineClosedError):
            harness.complete()


class TestClose:
    def test_draining_finishes_what_callers_wait_for(self, make_harness: MakeHarness) -> None:
        gate = Turnstile()
        harness = make_harness(n_slots=2, before_launch=gate)
        with harness.held():
            answers = [harness.complete(max_tokens=6) for _ in range(5)]
        gate.wait()
        closing = Worker(harness.engine_thread.close, True)
        wait_until(lambda: harness.engine_thread.closing)
        with pytest.raises(EngineClosedError, match="the engine is closed"):
            harness.complete()
        assert not closing.is_alive() or not harness.context.closed
        gate.open()
        for answer in answers:
            answer.check()
        closing.result()
        assert harness.context.closed

    def test_without_draining_everything_is_cancelled(self, make_harness: MakeHarness) -> None:
        gate = Turnstile()
        harness = make_harness(n_slots=2, before_launch=gate)
        with harness.held():
            answers = [harness.complete(max_tokens=6) for _ in range(5)]
            generation = harness.start()
        gate.wait()
        closing = Worker(harness.engine_thread.close, False)
        wait_until(lambda: harness.engine_thread.closing)
        gate.open()
        assert [a.result().finish_reason for a in answers] == ["cancelled"] * 5
        closing.result()
        assert generation.finish_reason == "cancelled"
        assert (generation.next(), harness.context.n_launches) == (None, 1)

    def test_a_stream_that_waits_for_its_reader_gets_the_rest(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        stream = paused_stream(harness)
        harness.close()
        assert rest_of(stream) == continuation(prompt_of(4), BUFFER_TOKENS + 20)[0]

    def test_a_stream_whose_reader_reads_meanwhile_gets_the_rest_too(self, make_harness: MakeHarness) -> None:
        gate = Turnstile()
        harness = make_harness(before_launch=gate)
        stream = harness.stream(max_tokens=BUFFER_TOKENS + 20)
        gate.wait()
        closing = Worker(harness.engine_thread.close, True)
        wait_until(lambda: harness.engine_thread.closing)
        gate.step()  # the command to stop was taken before the step that stands here
        assert request_of(stream).token_budget == UNLIMITED
        request_of(stream).token_budget = (
            BUFFER_TOKENS + 1
        )  # what its reader makes of the limit that it read just before
        gate.open()
        closing.result()
        assert rest_of(stream) == continuation(prompt_of(4), BUFFER_TOKENS + 20)[0]

    def test_a_generation_gets_the_token_it_waits_for(self, make_harness: MakeHarness) -> None:
        gate = Turnstile()
        harness = make_harness(before_launch=gate)
        generation = harness.start()
        waiting = Worker(generation.next)
        gate.wait()
        closing = Worker(harness.engine_thread.close, True)
        wait_until(lambda: harness.engine_thread.closing)
        gate.open()
        assert waiting.result().id == continuation(prompt_of(4), 1)[0][0]
        closing.result()
        assert (generation.next(), generation.finish_reason) == (None, "cancelled")

    def test_a_generation_that_nobody_waits_for_is_cancelled(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        open_one, ended = harness.start(), harness.start(max_tokens=1)
        assert open_one.next() is not None
        assert ended.next() is not None
        harness.close()
        assert (open_one.finish_reason, ended.finish_reason) == ("cancelled", "cancelled")
        with pytest.raises(EngineClosedError):
            ended.append([1])

    def test_a_second_call_does_nothing(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        workers = [Worker(harness.engine_thread.close, n % 2 == 0) for n in range(6)]
        all_results(workers)
        harness.engine_thread.close(True)
        assert harness.engine_thread.closing

    def test_a_drain_can_still_be_cut_short(self, make_harness: MakeHarness) -> None:
        gate = Turnstile()
        harness = make_harness(before_launch=gate)
        answer = harness.complete(max_tokens=None)
        gate.wait()
        draining = Worker(harness.engine_thread.close, True)
        wait_until(lambda: harness.engine_thread.closing)
        gate.step()
        cutting = Worker(harness.engine_thread.close, False)
        wait_until(lambda: not harness.engine_thread.loop.inbox.empty())
        gate.open()
        assert answer.result().finish_reason == "cancelled"
        all_results([draining, cutting])

    def test_what_comes_after_the_end_is_dropped(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        answer = harness.complete()
        answer.check()
        harness.close()
        harness.cancel(answer.request)
        harness.engine_thread.call(harness.engine_thread.loop.resume, answer.request)
        with pytest.raises(EngineClosedError, match="make another"):
            harness.engine_thread.submit(harness.request())


class TestAsk:
    def test_answers_come_from_the_decoder_thread(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        assert harness.engine_thread.ask(lambda: threading.current_thread().name) == "llamapipe-engine"

    def test_what_the_question_raises_is_raised_here(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        with pytest.raises(ZeroDivisionError):
            harness.engine_thread.ask(lambda: 1 // 0)
        harness.complete().check()

    def test_after_the_end_this_thread_answers(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        harness.complete().check()
        harness.close()
        assert harness.engine_thread.ask(threading.current_thread) is threading.current_thread()
        assert harness.engine_thread.stats().steps == 5

    def test_asked_while_it_closes(self, make_harness: MakeHarness) -> None:
        for drain in (True, False) * 5:
            harness = make_harness()
            asked = threading.Semaphore(0)

            def ask(harness: EngineHarness = harness, asked: threading.Semaphore = asked) -> int:
                n = 0
                while not harness.context.closed:
                    assert harness.engine_thread.stats().n_queued >= 0
                    n += 1
                    asked.release()
                return n

            workers = [Worker(ask) for _ in range(4)]
            answers = [harness.complete() for _ in range(4)]
            for _ in workers:
                assert asked.acquire(timeout=PATIENCE_S)
            harness.close(drain)
            assert min(all_results(workers)) >= 0
            assert {a.result().finish_reason for a in answers} <= {"length", "cancelled"}

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork()")
    def test_in_a_forked_child_even_while_the_parent_was_asking(self, tiny: lp.Model) -> None:
        """A lock that some thread of the parent held is held in the child for ever."""
        program = """
import os, signal, llamapipe as lp
from support.inside import held_locks
with lp.Model(sys.argv[1]) as model, lp.Engine(model, n_ctx=64, n_threads=1) as engine:
    with held_locks(engine):
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            try:
                engine.stats()
            except lp.errors.EngineClosedError:
                os._exit(0)
            os._exit(1)
    say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
        # Newer Pythons warn at each fork of a process with threads.
        assert run_script(program, tiny.path, flags=("-W", "ignore::DeprecationWarning")) == "0\n"


class Clock:
    """Jumps by a day at each look while ``fast``, so that every window is over when it begins; else it stands."""

    fast = False
    now = 0.0

    def __call__(self) -> float:
        self.now += 86400.0 if self.fast else 0.0
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The engine loop's clock."""
    clock = Clock()
    monkeypatch.setattr(engine_loop_module, "perf_counter", clock)
    return clock


def test_compute_threads_rest_when_nothing_is_left_to_do(make_harness: MakeHarness) -> None:
    """Who asks next needs a core, too. Not between steps, and not for a caller that is alone and can ask no sooner."""
    harness = make_harness()
    engine_thread, context = harness.engine_thread, harness.context
    engine_thread.loop.inbox.single_caller = True
    engine_thread.ask(lambda: None)
    n_parks = context.n_parks
    harness.complete().check()
    harness.idle()
    assert context.n_parks == n_parks
    engine_thread.loop.inbox.single_caller = False
    generation = harness.start()  # who takes one token at a time would wake them for each
    for _ in range(3):
        next_token(harness, generation)
    harness.idle()
    assert context.n_parks == n_parks
    generation.cancel()
    wait_until(lambda: context.n_parks > n_parks)
    n_parks = context.n_parks
    harness.complete().check()
    wait_until(lambda: context.n_parks > n_parks)
    assert context.n_parks <= n_parks + 2


class TestWindow:
    """A window so long that a test which waits for its end fails."""

    HOUR_S = 3600.0

    def waiting_desk(self, make_harness: MakeHarness) -> tuple[EngineHarness, Generation]:
        """A harness in a window, and a generation whose next token ends it: it shows that all known ones go on."""
        harness = make_harness(window_s=self.HOUR_S)
        harness.engine_thread.loop.inbox.single_caller = True
        generation = harness.start(max_tokens=50)
        next_token(harness, generation)
        harness.idle()
        harness.engine_thread.loop.inbox.single_caller = False
        return harness, generation

    def assert_waits(self, harness: EngineHarness, generation: Generation, n: int) -> None:
        """A request waits for siblings: it runs in the same step as `n` - 1 others and the generation."""
        n_before = harness.context.n_launches
        answers = [harness.complete(max_tokens=1) for _ in range(n)]
        next_token(harness, generation)
        for answer in answers:
            answer.check()
        assert len(set(harness.context.launches[n_before].seq_ids)) == 1 + n
        harness.idle()

    def test_siblings_share_the_first_step(self, make_harness: MakeHarness) -> None:
        harness, generation = self.waiting_desk(make_harness)
        self.assert_waits(harness, generation, 3)

    def test_alone_there_is_nothing_to_wait_for(self, make_harness: MakeHarness) -> None:
        harness = make_harness(window_s=self.HOUR_S)
        harness.engine_thread.loop.inbox.single_caller = True
        harness.complete().check()

    def test_when_all_known_requests_may_go_on_nobody_waits(self, make_harness: MakeHarness) -> None:
        harness, generation = self.waiting_desk(make_harness)
        for _ in range(3):
            next_token(harness, generation)

    def test_questions_open_no_window(self, make_harness: MakeHarness, clock: Clock) -> None:
        """A window in vain would keep the next one from opening."""
        harness, generation = self.waiting_desk(make_harness)
        clock.fast = True
        for _ in range(3):
            assert harness.engine_thread.stats().n_requests == 1
            harness.idle()
        clock.fast = False
        self.assert_waits(harness, generation, 1)

    @pytest.mark.parametrize("drain", [True, False])
    def test_closing_does_not_wait_for_siblings(self, make_harness: MakeHarness, drain: bool) -> None:
        harness = make_harness(window_s=self.HOUR_S)
        answer = harness.complete()
        harness.close(drain)
        assert answer.result().finish_reason == ("length" if drain else "cancelled")
        make_harness(window_s=self.HOUR_S).close(drain)

    def test_waiting_in_vain_is_not_repeated_at_once(self, make_harness: MakeHarness, clock: Clock) -> None:
        harness = make_harness(window_s=self.HOUR_S)
        for n_skipped in (1, 3, 7, 7):
            clock.fast = True
            harness.finish_one()  # its window is in vain
            clock.fast = False
            for _ in range(n_skipped):
                harness.finish_one()
        clock.fast = True
        generation = harness.start(max_tokens=50)
        next_token(harness, generation)  # in vain again
        harness.idle()
        clock.fast = False
        for _ in range(7):
            harness.finish_one()
        # The eighth waits; a sibling makes windows worth their time again.
        self.assert_waits(harness, generation, 2)
        self.assert_waits(harness, generation, 1)


def next_token(harness: EngineHarness, generation: Generation) -> Token:
    """``generation.next`` as if others could come meanwhile."""
    request = request_of(generation)
    request.token_budget = request.n_total + 1
    harness.engine_thread.call(harness.engine_thread.loop.resume, request)
    token: Token = generation._mailbox.get(perf_counter() + PATIENCE_S)
    assert isinstance(token, Token)
    generation._tokens.append(token.id)
    return token


class TestKept:
    def test_cut_and_continued_at_once(self, make_harness: MakeHarness) -> None:
        """Both commands come before the next step, also where only whole sequences can be removed."""
        harness = make_harness(recurrent=True)
        generation, other = harness.start(n_prompt=6), harness.complete(max_tokens=30)
        for _ in range(3):
            assert generation.next() is not None
        with harness.held():
            generation.trim(4)
            waiting = Worker(generation.next)
            wait_until(lambda: harness.engine_thread.loop.inbox.qsize() >= 2)
        base = prompt_of(6)[:4]
        expected, _ = continuation(base, 5)
        assert waiting.result().id == expected[0]
        assert [t.id for t in generation] == expected[1:]
        assert generation.token_ids == base + expected
        other.check()

    def test_the_sampler_sees_the_changed_sequence(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        generation = harness.start(n_prompt=6, max_tokens=3)
        assert len(list(generation)) == 3
        generation.trim(5)
        generation.append([40, 41])
        harness.engine_thread.ask(harness.engine_thread.loop.check_integrity)
        (sampler,) = harness.samplers
        assert (sampler.accepted, sampler.n_resets) == ([*prompt_of(6)[:5], 40, 41], 2)
        token = generation.next()
        assert token is not None
        assert sampler.accepted[-1] == token.id

    def test_nothing_is_computed_ahead(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        generation = harness.start()
        generation.append([3])
        generation.trim(2)
        harness.complete(max_tokens=1).check()
        assert [len(launch.tokens) for launch in harness.context.launches] == [4]
        assert generation.next() is not None
        harness.engine_thread.ask(harness.engine_thread.loop.check_integrity)
        assert len(harness.context.launches) == 2

    def test_the_end_is_known_with_the_last_token(self, make_harness: MakeHarness) -> None:
        """By a stop string, by the number of tokens: its reader may continue at once."""
        harness = make_harness()
        second = continuation(prompt_of(4), 2)[0][1]
        for _ in range(50):
            generation = harness.start(stops=(f"{second} ",))
            harness.n_asked = 0
            assert generation.next() is not None
            assert generation.next() is not None
            assert generation.finish_reason == "stop"
            generation.trim(4)
            assert generation.finish_reason is None
            assert generation.next() is not None
            generation.cancel()

    def test_text_held_for_a_stop_string_goes_with_what_is_cut(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        first, second = continuation(prompt_of(4), 2)[0]
        generation = harness.start(stops=(f"{first} {second} ",))
        for _ in range(3):
            token = generation.next()
            assert token is not None
            assert (token.id, token.text) == (first, "")
            generation.trim(4)

    def test_after_the_end_there_is_none(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        generation = harness.start(max_tokens=2)
        assert len(list(generation)) == 2
        n = harness.context.n_launches
        assert [generation.next(), generation.next()] == [None, None]
        assert (harness.context.n_launches, generation.finish_reason) == (n, "length")

    def test_a_stop_token_gives_none(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        tokens, _ = continuation(prompt_of(4), 3)
        generation = harness.start(stop_tokens=frozenset([tokens[2]]))
        assert [t.id for t in generation] == tokens[:2]
        assert generation.finish_reason == "stop"
        generation.append([9])
        assert generation.next() is not None

    def test_a_full_context_must_be_cut_to_go_on(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        generation = harness.start(n_prompt=N_CTX - 2, max_tokens=None)
        tokens = generation.token_ids + [t.id for t in generation]
        assert (len(tokens), generation.finish_reason) == (N_CTX, "length")
        with pytest.raises(InvalidRequestError, match=f"n_ctx is {N_CTX} .* keep at most {N_CTX - 1}"):
            generation.trim(N_CTX)
        assert (generation.n_tokens, generation.finish_reason, generation.next()) == (N_CTX, "length", None)
        generation.trim(N_CTX - 1)
        assert [t.id for t in generation] == tokens[-1:]

    def test_cancelled_while_it_waits(self, make_harness: MakeHarness) -> None:
        gate = Turnstile()
        harness = make_harness(n_slots=1, before_launch=gate)
        harness.complete()
        gate.wait()
        generation = harness.start()
        waiting = Worker(generation.next)
        wait_until(lambda: harness.engine_thread.loop.inbox.qsize() >= 2)
        generation.cancel()
        gate.open()
        assert waiting.result() is None


class TestQueueAccounting:
    def test_generations_do_not_count(self, make_harness: MakeHarness) -> None:
        harness = make_harness(max_queue=2)
        generations = [harness.start() for _ in range(5)]
        for generation in generations:
            assert generation.next() is not None
        harness.complete().check()
        assert harness.queue.n == 0

    def test_a_stream_counts_until_it_has_a_slot(self, make_harness: MakeHarness) -> None:
        gate = Turnstile()
        harness = make_harness(n_slots=1, before_launch=gate)
        first = harness.stream()
        gate.wait()
        second = harness.stream()
        assert harness.queue.n == 1
        gate.open()
        assert len(rest_of(first)) == len(rest_of(second)) == 5
        assert harness.queue.n == 0

    @pytest.mark.parametrize("seed", range(4))
    def test_whatever_happens_it_comes_back_to_nothing(self, make_harness: MakeHarness, seed: int) -> None:
        seeds = random.Random(seed)
        failures: dict[int, Exception] = {n: DecodeError("injected") for n in range(11, 2000, 37)}
        failures |= {n: ContextFullError("injected") for n in range(5, 2000, 13)}
        harness = make_harness(n_slots=3, max_queue=4, failures=failures)

        def call(seed: float) -> int:
            chance, n_right = random.Random(seed), 0
            for _ in range(25):
                if chance.random() < 0.3:
                    stream = harness.stream(chance.randint(1, 40), chance.randint(1, 9))
                    try:
                        for _ in range(chance.randint(0, 4)):
                            next(stream, None)
                    except LlamapipeError:
                        pass
                    stream.close()
                    continue
                answer = harness.complete(chance.randint(1, 40), chance.randint(1, 9))
                if chance.random() < 0.3:
                    harness.cancel(answer.request)
                try:
                    result = answer.result()
                except (DecodeError, ContextFullError):
                    continue
                r = answer.request
                expected, _ = continuation(r.tokens[: r.n_prompt], r.max_tokens)
                assert result.token_ids == expected[: len(result.token_ids)]
                n_right += result.finish_reason == "length" and result.token_ids == expected
            return n_right

        workers = [Worker(call, seeds.random()) for _ in range(8)]
        assert sum(all_results(workers)) > 20
        harness.close()


class TestEventLoops:
    def test_results_of_a_closed_loop_cancel_its_requests(self, make_harness: MakeHarness) -> None:
        harness = make_harness(n_slots=1)
        loop = asyncio.new_event_loop()
        loop.close()
        mailbox = AsyncMailbox(loop, harness.engine_thread.dispatcher)
        request = harness.request(max_tokens=60, sink=DeltaSink(mailbox, piece, ()))
        mailbox.requests.append(request)
        harness.submit(request)
        harness.complete().check()  # gets the slot when the other has lost it
        assert (request.finish_reason, request.n_generated) == ("cancelled", 1)

    @pytest.mark.parametrize("watches", [True, False])
    def test_a_loop_is_woken_once_a_step(
        self, make_harness: MakeHarness, watches: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whether or not it can watch files; some loops of Windows cannot."""
        harness = make_harness()
        receive = dispatcher_module.receive

        async def main() -> list[int]:
            loop, woken = asyncio.get_running_loop(), []

            def count(items: deque[Any]) -> None:
                woken.append(len(items))
                receive(items)

            def watch_nothing(*arguments: Any) -> None:
                raise NotImplementedError

            monkeypatch.setattr(dispatcher_module, "receive", count)
            if not watches:
                monkeypatch.setattr(loop, "add_reader", watch_nothing)
            mailboxes = [AsyncMailbox(loop, harness.engine_thread.dispatcher) for _ in range(3)]
            assert bool(wakers_of(harness.engine_thread.dispatcher)) == watches
            with harness.held():
                for mailbox in mailboxes:
                    request = harness.request(max_tokens=4, sink=DeltaSink(mailbox, piece, ()))
                    mailbox.requests.append(request)
                    harness.submit(request)
            for mailbox in mailboxes:
                for _ in range(4):
                    await mailbox.get()
            return woken

        assert asyncio.run(main()) == [3, 3, 3, 3]


def test_a_turn_has_no_copies_of_states(make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted apart. Those before the step of a prompt belong to no later step, either."""
    clock = [0.0]
    monkeypatch.setattr(engine_loop_module, "perf_counter", lambda: clock[0])
    gate = Turnstile()
    harness = make_harness(n_slots=1, before_launch=gate)
    scheduler, context = harness.scheduler, harness.context
    scheduler.gate.copies_states = True
    change, observe = context.change_cells, scheduler.observe
    turns: list[float | None] = []

    def slow_change(ops: Any) -> Any:
        clock[0] += 100 * len(ops)
        return change(ops)

    def noted(plan: Any, seconds: float, turn_s: float | None = None) -> None:
        turns.append(turn_s)
        observe(plan, seconds, turn_s)

    monkeypatch.setattr(context, "change_cells", slow_change)
    monkeypatch.setattr(scheduler, "observe", noted)
    running = harness.complete()
    gate.wait()
    queued = harness.complete()  # which removes what the other one leaves
    gate.open()
    running.check()
    queued.check()
    assert clock[0] > 0 and set(turns) == {0.0}
