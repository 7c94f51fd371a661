"""Samplers that take long: other requests go on, and nothing else changes."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.control import PATIENCE_S, Worker, wait_until

import llamapipe as lp
from llamapipe._engine.runtime.background_sampler import BackgroundSampler
from llamapipe.errors import DecodeError, InvalidRequestError, QueueFullError
from llamapipe.llama.sampler import SamplerChain
from llamapipe.structured.compile import compile_guide
from llamapipe.work.long_work import MOST_CONSTRAINTS, LongWork, is_long, size_of
from llamapipe.work.tenant import Tenant, tenant
from llamapipe.work.threads import WORK_THREAD_NAME, FairThreads, Place, on_slowed_thread

pytestmark = pytest.mark.native
Row = npt.NDArray[np.float32]
START = [310, 320, 330]


@pytest.fixture
def engine(demo: lp.Model) -> Iterator[lp.Engine]:
    with lp.Engine(demo, n_ctx=256, n_seq_max=4) as engine:
        yield engine
        engine.check_integrity()


class Gate:
    """A logits processor that waits until it is opened, from its ``n_free``-th call on."""

    def __init__(self, n_free: int = 0) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self._n_free = n_free

    def __call__(self, row: Row) -> None:
        self._n_free -= 1
        if self._n_free < 0:
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)


def greedy(**options: object) -> lp.SamplingParams:
    return lp.SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("n_free", [0, 3])
def test_others_go_on_while_a_processor_waits(engine: lp.Engine, n_free: int) -> None:
    expected = engine.generate(START, greedy())
    gate = Gate(n_free)
    slow = Worker(engine.generate, START, greedy(logits_processors=[gate]))
    assert gate.reached.wait(PATIENCE_S)
    for _ in range(3):
        assert engine.generate([5, 6, 7], greedy()).finish_reason == "length"
    assert engine.stats().n_active == 1
    engine.check_integrity()
    gate.opened.set()
    assert slow.result().token_ids == expected.token_ids


def test_processors_that_hang_do_not_stop_constraints(engine: lp.Engine) -> None:
    gates = [Gate() for _ in range(3)]
    slow = [Worker(engine.generate, START, greedy(logits_processors=[gate])) for gate in gates]
    for gate in gates:
        assert gate.reached.wait(PATIENCE_S)
    schema = lp.SamplingParams(json_schema={"enum": ["a", "b"]}, max_tokens=None)
    assert engine.generate(START, schema, timeout=PATIENCE_S).text in ('"a"', '"b"')
    for gate, worker in zip(gates, slow, strict=True):
        gate.opened.set()
        assert worker.result().finish_reason == "length"


def test_cancelled_while_it_waits(engine: lp.Engine) -> None:
    gate = Gate(2)
    stream = engine.stream(START, greedy(logits_processors=[gate], max_tokens=100))
    assert gate.reached.wait(PATIENCE_S)
    stream.close()
    wait_until(lambda: engine.stats().n_active == 0)
    assert engine.generate(START, greedy()).finish_reason == "length"
    gate.opened.set()
    assert engine.generate(START, greedy()).finish_reason == "length"


def test_preempted_while_it_waits(demo: lp.Model) -> None:
    """It gets its slot back after its token has come, and computes its text again."""
    with lp.Engine(demo, n_ctx=256, n_seq_max=1, prefix_cache=False) as engine:
        expected = engine.generate(START, greedy()).token_ids
        gate = Gate(3)
        slow = Worker(engine.generate, START, greedy(logits_processors=[gate]))
        assert gate.reached.wait(PATIENCE_S)
        assert engine.generate([5, 6, 7], greedy(priority=1)).finish_reason == "length"
        assert engine.stats().n_preempted == 1
        engine.check_integrity()
        gate.opened.set()
        assert slow.result().token_ids == expected


def test_its_slot_is_lent(demo: lp.Model) -> None:
    """A request whose token is late waits without a slot, and returns when its token has come."""
    with lp.Engine(demo, n_ctx=256, n_seq_max=1) as engine:
        expected = engine.generate(START, greedy()).token_ids
        gates = [Gate(3) for _ in range(3)]
        slow = [Worker(engine.generate, START, greedy(logits_processors=[gate])) for gate in gates]
        for gate in gates:  # each gets the slot of the one before
            assert gate.reached.wait(PATIENCE_S)
        assert engine.generate([5, 6, 7], greedy()).finish_reason == "length"
        assert engine.stats().n_preempted == 3
        engine.check_integrity()
        for gate in gates:
            gate.opened.set()
        assert all(worker.result().token_ids == expected for worker in slow)


def test_patience_grows_within_a_share(demo: lp.Model) -> None:
    """A request that takes long for each token does not wait for another one's answer before each of them."""
    begun = threading.Event()

    def draw(row: object) -> None:
        begun.set()
        time.sleep(0.12)

    with lp.Engine(demo, n_ctx=512, n_seq_max=1) as engine:
        slow = Worker(engine.generate, START, greedy(logits_processors=[draw], max_tokens=20))
        assert begun.wait(PATIENCE_S)
        others = [Worker(engine.generate, START, greedy(max_tokens=100)) for _ in range(20)]
        assert len(slow.result().token_ids) == 20
        assert 1 <= engine.stats().n_preempted < 6
        for other in others:
            other.result()


def test_a_slot_that_nobody_wants_is_kept(demo: lp.Model) -> None:
    with lp.Engine(demo, n_ctx=256, n_seq_max=2) as engine:
        sleepy = greedy(logits_processors=[lambda row: time.sleep(0.07)], max_tokens=3)
        engine.generate([START] * 2, sleepy)
        assert engine.stats().n_preempted == 0


def test_the_time_of_a_tenant_is_limited(demo: lp.Model) -> None:
    params = lp.SamplingParams(regex=r"(\p{L}{1,40} ){100,199}", max_tokens=None, grammar_timeout=None)
    with lp.Engine(demo, n_ctx=256, n_seq_max=2) as engine:
        token = tenant.set(Tenant(grammar_timeout=0.001))
        try:
            with pytest.raises(DecodeError, match=r"grammar_timeout is 0\.001 s"):
                engine.generate(START, params)
        finally:
            tenant.reset(token)


def test_long_work_of_one_client_does_not_keep_others_out() -> None:
    async def main() -> None:
        work, opened = LongWork(), threading.Event()

        async def ask(share: str, function: Callable[[], object]) -> object:
            tenant.set(Tenant(share))
            return await work.run(function)

        long = [asyncio.create_task(ask("long", lambda: opened.wait(PATIENCE_S))) for _ in range(20)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(ask("other", lambda: tenant.get().share), PATIENCE_S) == "other"
        for task in long[10:]:
            task.cancel()
        opened.set()
        assert await asyncio.gather(*long[:10]) == [True] * 10
        with pytest.raises(ZeroDivisionError):
            await ask("other", lambda: 1 / 0)
        work.close()

    asyncio.run(main())


def test_large_work_waits_for_room() -> None:
    """Only large work does, in the order of its shares' turns, and none overtakes what needs more room."""
    most = 2**24

    async def main() -> None:
        work, begun, opened = LongWork(), threading.Event(), threading.Event()
        order: list[str] = []

        async def ask(share: str, name: str, size: int) -> None:
            tenant.set(Tenant(share))
            await work.run(lambda: order.append(name), size=size)

        def hold() -> None:
            begun.set()
            opened.wait(PATIENCE_S)

        held = asyncio.create_task(work.run(hold, size=most))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        large = [asyncio.create_task(ask("many", f"many {i}", most)) for i in range(3)]
        large += [
            asyncio.create_task(ask("few", "few", most)),
            asyncio.create_task(ask("other", "other", 2**17)),
        ]
        await asyncio.sleep(0)
        for share in ("many", "few", "other"):
            await asyncio.wait_for(ask(share, f"small of {share}", 2**10), PATIENCE_S)
        assert order == ["small of many", "small of few", "small of other"]
        order.clear()
        opened.set()
        await asyncio.gather(held, *large)
        assert set(order[:3]) == {"many 0", "few", "other"}
        assert order[3:] == ["many 1", "many 2"]
        both = threading.Barrier(2)  # together they are not too large
        await asyncio.gather(*(work.run(both.wait, PATIENCE_S, size=2**21) for _ in range(2)))
        wait_until(lambda: work._threads._size == 0)  # a job is told of before its thread notes its end
        work.close()

    asyncio.run(main())


def test_the_size_of_prompts() -> None:
    assert size_of("a" * 1000) == 1064
    assert size_of([{"role": "user", "content": "a" * 1000}]) > 1000
    assert 2**24 < size_of([{"content": "a"}] * 10**6) < 2**25
    assert size_of([[5, 6], "abc", [], ["ab"], {"x": "a"}]) == 64 * 8 + 5 + 2 + 3 + 1 + 2 + 1  # 8 values
    assert is_long("a" * 9000) and not is_long(["a" * 1000] * 8)


@pytest.mark.parametrize("drain", [True, False])
def test_closed_while_it_waits(engine: lp.Engine, drain: bool) -> None:
    gate = Gate(2)
    slow = Worker(engine.generate, START, greedy(logits_processors=[gate]))
    assert gate.reached.wait(PATIENCE_S)
    closing = Worker(engine.close, drain=drain)
    if not drain:
        assert slow.result().finish_reason == "cancelled"
    gate.opened.set()
    closing.result()
    assert slow.result().finish_reason == ("length" if drain else "cancelled")
    assert WORK_THREAD_NAME not in {thread.name for thread in threading.enumerate()}


def test_a_stop_string_while_the_next_token_waits(engine: lp.Engine) -> None:
    whole = engine.generate(START, greedy(max_tokens=30)).text
    stop = whole[4:9]
    for _ in range(10):
        sleepy = greedy(max_tokens=30, stop=stop, logits_processors=[lambda row: time.sleep(0.002)])
        answer = engine.generate(START, sleepy)
        assert (answer.text, answer.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_log_probabilities_of_tokens_that_come_late(engine: lp.Engine) -> None:
    fast = engine.generate(START, greedy(logprobs=2))
    slow = engine.generate(START, greedy(logprobs=2, logits_processors=[lambda row: time.sleep(0.01)]))
    assert slow.logprobs is not None and fast.logprobs is not None
    assert [one.id for one in slow.logprobs] == [one.id for one in fast.logprobs]
    assert [one.logprob for one in slow.logprobs] == pytest.approx(
        [one.logprob for one in fast.logprobs], abs=1e-5
    )


@pytest.mark.parametrize("kind", ["regex", "lark", "grammar"])
def test_a_text_that_is_complete_with_its_last_token_has_stopped(engine: lp.Engine, kind: str) -> None:
    """Also where the limit is reached with that token."""
    text = {
        "regex": "[ab]{6}",
        "lark": "start: /[ab]{6}/",
        "grammar": "root ::= [ab] [ab] [ab] [ab] [ab] [ab]",
    }[kind]
    for seed in range(5):
        params = lp.SamplingParams(seed=seed, max_tokens=None, logprobs=0, **{kind: text})  # type: ignore[arg-type]
        free = engine.generate(START, params)
        assert free.finish_reason == "stop" and len(free.text) == 6
        n = len(free.token_ids) - (kind == "grammar")  # a GBNF ends with an end of generation
        if kind != "grammar":
            params = lp.SamplingParams(seed=seed, max_tokens=n, **{kind: text})  # type: ignore[arg-type]
            limited = engine.generate(START, params)
            assert (limited.token_ids, limited.finish_reason) == (free.token_ids, "stop")
        params = lp.SamplingParams(seed=seed, max_tokens=n - 1, **{kind: text})  # type: ignore[arg-type]
        assert engine.generate(START, params).finish_reason == "length"


def test_a_generation_goes_on_after_its_constraint_is_complete(engine: lp.Engine) -> None:
    with engine.start(START, lp.SamplingParams(regex="[ab]{3}", max_tokens=None)) as generation:
        assert len("".join(token.text for token in generation)) == 3
        assert generation.finish_reason == "stop"
        n = generation.n_tokens
        engine.check_integrity()
        generation.trim(len(START))
        assert len("".join(token.text for token in generation)) == 3
        assert generation.n_tokens <= n + 3
        generation.trim(len(START) + 1)
        generation.append([300])
        with pytest.raises(InvalidRequestError):
            generation.next()


def test_the_time_of_a_constraint_is_limited(engine: lp.Engine) -> None:
    params = lp.SamplingParams(regex=r"(\p{L}{1,40} ){100,200}", max_tokens=None, grammar_timeout=0.001)
    with pytest.raises(DecodeError, match=r"grammar_timeout is 0\.001 s: simplify"):
        engine.generate([START] * 50, params)
    assert engine.generate(START, greedy()).finish_reason == "length"


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "1", True])
def test_a_bad_time_limit(value: object) -> None:
    with pytest.raises((TypeError, ValueError), match="grammar_timeout"):
        lp.SamplingParams(grammar_timeout=value)  # type: ignore[arg-type]


class TestLongPrompts:
    """They are refused before the work that their length would take."""

    @pytest.mark.parametrize("text", ["word and " * 10**6, " " * 10**7, "\N{GRINNING FACE}" * 10**6])
    def test_texts(self, engine: lp.Engine, text: str) -> None:
        with pytest.raises(InvalidRequestError, match=rf"{len(text)} characters, at least \d+ tokens; n_ctx"):
            engine.generate(text)
        with pytest.raises(InvalidRequestError, match=r"the conversation has .*at least"):
            engine.chat(text)

    def test_a_text_that_may_fit_is_tokenized(self, engine: lp.Engine) -> None:
        with pytest.raises(InvalidRequestError, match=r"the prompt has 8.. tokens"):
            engine.generate("a b " * 410)

    @pytest.mark.parametrize(
        "ids", [[5] * 10**6 + ["x"], (5,) * 10**6, np.full(10**6, 5), np.full(10**6, 5, object)]
    )
    def test_token_ids(self, engine: lp.Engine, ids: object) -> None:
        with pytest.raises(InvalidRequestError, match=r"the prompt has 100000[01] tokens; n_ctx is 256"):
            engine.generate(ids)  # type: ignore[call-overload]


def test_forced_text_is_known_before_the_mask(demo: lp.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step waits for what it may guess, which takes a fraction of a mask's time."""
    guide, gate = compile_guide(demo, json_schema={"const": {"name": "Rome"}}).new(), threading.Event()
    forced = guide.forced(9)
    assert demo.vocab.detokenize(forced).startswith('{"name')
    threads = FairThreads(1)
    sampler = BackgroundSampler(
        lambda: SamplerChain(demo.vocab, guide=guide), None, is_python=False, guesses=True
    )
    sampler.start(threads)
    wait_until(lambda: sampler.is_ready)
    compute, looked = guide.prepare, threading.Event()

    def prepare() -> None:
        assert gate.wait(PATIENCE_S)
        compute()

    monkeypatch.setattr(guide, "prepare", prepare)
    sampler.looked = looked.set
    sampler.took(forced[0])
    assert looked.wait(PATIENCE_S)
    assert sampler.guess(9)[0] == guide.forced(9)
    assert sampler.is_busy
    assert not sampler.is_ready
    assert sampler.expect(forced[1:3]) == 2
    gate.set()
    wait_until(lambda: sampler.is_ready)
    assert sampler.expects(forced[1:3])
    sampler.close()
    threads.close()


def test_long_constraints_of_a_client_wait_in_number_and_leave_threads_to_short_ones() -> None:
    gate, begun = threading.Event(), threading.Event()

    def compiled(params: lp.SamplingParams) -> str:
        begun.set()
        assert gate.wait(PATIENCE_S)
        return str(params.regex)

    async def twice(work: LongWork, params: lp.SamplingParams) -> None:
        await work.run(compiled, params)
        # What follows needs no compilation, so it is not behind the others.
        await work.run(str, params)
        finished.append(str(params.regex)[-2:])

    finished: list[str] = []

    async def main() -> None:
        work = LongWork()
        texts = [lp.SamplingParams(regex="a" * 2000 + f"{i:02}") for i in range(MOST_CONSTRAINTS + 2)]
        token = tenant.set(Tenant("client"))
        first = asyncio.ensure_future(twice(work, texts[0]))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        waiting = [asyncio.ensure_future(twice(work, params)) for params in texts[1:-1]]
        await asyncio.sleep(0)
        with pytest.raises(
            QueueFullError, match=f"{MOST_CONSTRAINTS} long schemas or grammars of this client"
        ):
            await work.run(compiled, texts[-1])
        again = [asyncio.ensure_future(twice(work, texts[1])) for _ in range(MOST_CONSTRAINTS)]  # counts once
        await asyncio.sleep(0)
        assert await work.run(str.upper, "short") == "SHORT"
        assert await work.run(lambda params: params.regex, lp.SamplingParams(regex="b")) == "b"
        tenant.reset(token)
        assert await work.run(lambda params: params.regex, texts[-1]) == texts[-1].regex
        gate.set()
        await asyncio.gather(first, *waiting, *again)
        assert list(dict.fromkeys(finished)) == [f"{i:02}" for i in range(MOST_CONSTRAINTS + 1)]
        tenant.set(Tenant("client"))
        for _ in range(2):  # it is known by now, so it is quick
            gate.clear()
            begun.clear()
            blocked = asyncio.ensure_future(work.run(compiled, texts[-1]))
            await asyncio.to_thread(begun.wait, PATIENCE_S)
            assert await work.run(lambda params: params.regex, texts[0]) == texts[0].regex
            gate.set()
            await blocked
        work.close()

    asyncio.run(main())


class TestThreads:
    def test_a_job_that_hangs_gets_a_thread_beside_it(self) -> None:
        threads = FairThreads(8)
        gates, ran = [threading.Event() for _ in range(4)], threading.Event()
        for gate in gates:
            threads.run(lambda gate=gate: gate.wait(PATIENCE_S))  # type: ignore[misc]
        threads.run(ran.set)

        def relieved() -> bool:
            threads.add_spare_thread()
            return ran.is_set()

        wait_until(relieved)
        for gate in gates:
            gate.set()
        threads.close()

    def test_jobs_end_before_close_does_and_run_at_once_afterwards(self) -> None:
        threads, ran = FairThreads(2), list[int]()
        for i in range(100):
            threads.run(lambda i=i: ran.append(i))  # type: ignore[misc]
        threads.close()
        assert sorted(ran) == list(range(100))
        threads.run(lambda: ran.append(-1))
        assert ran[-1] == -1

    def test_jobs_that_may_take_long_leave_a_thread_to_short_ones(self) -> None:
        """Of one share one long job runs at a time, cheap ones first."""
        threads, gate, begun = FairThreads(8, most_slow=1), threading.Event(), threading.Event()
        order: list[int] = []

        def hold() -> None:
            begun.set()
            gate.wait(PATIENCE_S)

        threads.run(hold, "share", place=Place(9.0))
        assert begun.wait(PATIENCE_S)
        for i, expected_s in enumerate((5.0, 1.0, 3.0)):
            threads.run(lambda i=i: order.append(i), "share", place=Place(expected_s))  # type: ignore[misc]
        quick = threading.Event()
        threads.run(quick.set, "share", place=Place(0.001))

        def has_run() -> bool:
            threads.add_spare_thread()
            return quick.is_set()

        wait_until(has_run)
        assert order == []
        gate.set()
        threads.close()
        assert order == [1, 2, 0]

    def test_of_a_share_the_sampler_that_took_least_comes_first(self) -> None:
        """A quick one is not behind the jobs of all slow ones."""
        threads, gate, done = FairThreads(1), threading.Event(), threading.Event()
        order: list[str] = []
        slow = [Place() for _ in range(3)]
        threads.run(lambda: gate.wait(PATIENCE_S), "share")
        for n, place in enumerate(slow):
            place.at_s = 1.0 + n
            threads.run(lambda n=n: order.append(f"slow {n}"), "share", place=place)  # type: ignore[misc]
        quick = Place()
        for _ in range(2):
            threads.run(lambda: order.append("quick"), "share", place=quick)
        gate.set()
        threads.run(done.set, "other")
        assert done.wait(PATIENCE_S)
        threads.close()
        assert order == ["quick", "quick", "slow 0", "slow 1", "slow 2"]

    def test_a_share_leaves_a_thread_to_samplers_that_are_quick(self) -> None:
        threads, gate, quick = FairThreads(8), threading.Event(), threading.Event()
        n_running = 0

        def wait() -> None:
            nonlocal n_running
            n_running += 1
            assert gate.wait(PATIENCE_S)

        for _ in range(10):
            place = Place()
            place.is_slow = True
            threads.run(wait, "share", place=place)

        def begun() -> bool:
            threads.add_spare_thread()
            return n_running == 3

        wait_until(begun)
        threads.run(quick.set, "share", place=Place())

        def served() -> bool:
            threads.add_spare_thread()
            return quick.is_set()

        wait_until(served)
        assert n_running == 3
        gate.set()
        threads.close()
        assert n_running == 10

    def test_shares_take_turns_and_none_has_all_threads(self) -> None:
        threads, gate, other = FairThreads(12), threading.Event(), threading.Event()
        n_running = 0

        def wait() -> None:
            nonlocal n_running
            n_running += 1
            assert gate.wait(PATIENCE_S)
            n_running -= 1

        for _ in range(30):
            threads.run(wait, "many")
        threads.run(other.set, "other")

        def relieved() -> bool:
            threads.add_spare_thread()
            return other.is_set()

        wait_until(relieved)
        assert n_running <= 4
        gate.set()
        threads.close()
        assert n_running == 0 and "n_jobs=0" in repr(threads)

    def test_two_shares_leave_threads_to_others(self) -> None:
        threads, gate = FairThreads(8), threading.Event()
        n_running = Counter[str]()

        def wait(share: str) -> None:
            n_running[share] += 1
            assert gate.wait(PATIENCE_S)
            n_running[share] -= 1

        def run(share: str, n: int, n_in_all: int) -> None:
            for _ in range(n):
                threads.run(lambda: wait(share), share)

            def relieved() -> bool:
                threads.add_spare_thread()
                return n_running.total() == n_in_all

            wait_until(relieved)

        run("a", 20, 4)
        run("b", 20, 6)
        run("c", 20, 7)
        run("d", 20, 8)
        assert n_running == {"a": 4, "b": 2, "c": 1, "d": 1}
        gate.set()
        threads.close()
        assert not n_running.total() and "n_jobs=0" in repr(threads)

    @pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux only")
    def test_a_long_job_gets_a_lower_priority(self) -> None:
        threads, gate = FairThreads(2), threading.Event()
        slowed: list[bool] = []

        def job() -> None:
            assert gate.wait(PATIENCE_S)
            slowed.append(on_slowed_thread())

        threads.run(job)

        def is_slowed() -> bool:
            threads.add_spare_thread()
            return any(thread.is_slowed for thread in threads._threads)

        wait_until(is_slowed)
        gate.set()
        wait_until(lambda: not threads._threads)
        threads.run(job)
        threads.run(job, is_python=True)
        threads.close()
        assert slowed == [True, False, False]

    def test_no_more_threads_than_allowed(self) -> None:
        threads, gate = FairThreads(3), threading.Event()
        for _ in range(20):
            threads.run(lambda: gate.wait(PATIENCE_S))
        before = time.perf_counter()
        while time.perf_counter() < before + 0.1:
            threads.add_spare_thread()
        n = sum(thread.name == WORK_THREAD_NAME for thread in threading.enumerate())
        gate.set()
        threads.close()
        assert n == 3


class CountingLoop(asyncio.SelectorEventLoop):
    n_timers = 0

    def call_at(self, *arguments: Any, **options: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        self.n_timers += 1
        return super().call_at(*arguments, **options)


def test_many_calls_that_wait_for_threads_take_no_time() -> None:
    """Each with a timer, a thousand took more than half of the event loop's time."""
    work, opened = LongWork(), threading.Event()

    async def several(loop: CountingLoop) -> int:
        tasks = [asyncio.ensure_future(work.run(opened.wait, PATIENCE_S)) for _ in range(200)]
        cancelled = [asyncio.ensure_future(work.run(opened.wait, PATIENCE_S)) for _ in range(20)]
        await asyncio.wait(tasks, timeout=0.2)
        for task in cancelled:
            task.cancel()
        await asyncio.wait(cancelled)
        opened.set()
        assert all(await asyncio.gather(*tasks))
        return loop.n_timers

    loop = CountingLoop()
    try:
        assert loop.run_until_complete(several(loop)) < 200
    finally:
        loop.close()
        work.close()
