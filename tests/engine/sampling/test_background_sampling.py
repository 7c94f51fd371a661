"""Samplers that take long: other requests go on, and nothing else changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
from support.control import PATIENCE_S, Worker, wait_until
from support.inside import n_late_of

import llamapipe as lp
from llamapipe._engine.runtime import loop
from llamapipe._engine.runtime.background_sampler import BackgroundSampler
from llamapipe.errors import DecodeError, InvalidRequestError
from llamapipe.llama.sampler import SamplerChain
from llamapipe.structured.compile import compile_guide
from llamapipe.work.tenant import Tenant, tenant
from llamapipe.work.threads import WORK_THREAD_NAME, FairThreads

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


def late(engine: lp.Engine) -> Callable[[Row], None]:
    """A logits processor for a request that is alone: each of its steps has given up waiting for the token."""
    return lambda row: wait_until(lambda: n_late_of(engine))


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


def test_the_slot_of_a_late_request_is_lent(demo: lp.Model) -> None:
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


def test_a_slot_that_nobody_wants_is_kept(demo: lp.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    n_looks, look = 0, loop.EngineLoop._look_after_late_draws

    def look_and_count(self: loop.EngineLoop) -> bool:
        nonlocal n_looks
        n_looks += 1
        return look(self)

    def draw(row: Row) -> None:
        n = n_looks + 1  # the next look may be under way
        wait_until(lambda: n_looks > n)

    monkeypatch.setattr(loop.EngineLoop, "_look_after_late_draws", look_and_count)
    monkeypatch.setattr(loop, "_LEND_S", 1e-9)
    with lp.Engine(demo, n_ctx=256, n_seq_max=2) as engine:
        engine.generate([START] * 2, greedy(logits_processors=[draw], max_tokens=3))
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
    answer = engine.generate(START, greedy(max_tokens=30, stop=stop, logits_processors=[late(engine)]))
    assert (answer.text, answer.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_log_probabilities_of_tokens_that_come_late(engine: lp.Engine) -> None:
    fast = engine.generate(START, greedy(logprobs=2))
    slow = engine.generate(START, greedy(logprobs=2, logits_processors=[late(engine)]))
    assert slow.logprobs is not None and fast.logprobs is not None
    assert [entry.id for entry in slow.logprobs] == [entry.id for entry in fast.logprobs]
    assert [entry.logprob for entry in slow.logprobs] == pytest.approx(
        [entry.logprob for entry in fast.logprobs], abs=1e-5
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
    def test_texts_are_refused_by_their_characters(self, engine: lp.Engine, text: str) -> None:
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
    def test_token_ids_are_refused_by_their_number(self, engine: lp.Engine, ids: object) -> None:
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
    sampler.accept_drawn(forced[0])
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


@pytest.mark.parametrize("is_right", [True, False], ids=["right", "wrong"])
def test_a_guess_that_is_given_up_while_its_first_token_arrives(demo: lp.Model, is_right: bool) -> None:
    """The number of the draw that the engine then waits for is that token's: no other one comes."""
    rows = [np.full(demo.vocab.n_vocab, -100, np.float32) for _ in range(3)]
    for row, token in zip(rows, START, strict=True):
        row[token] = 100
    guessed = [START[0] if is_right else START[1], START[1], -1]
    numbers: list[int] = []

    def drawn(sampler: BackgroundSampler, number: int, token: int) -> None:
        assert token == START[0]
        sampler.give_up_guess()
        numbers.extend((number, sampler.n_draws))

    threads = FairThreads(1)
    sampler = BackgroundSampler(lambda: SamplerChain(demo.vocab), None, is_python=False)
    sampler.start(threads)
    sampler.draw(rows, guessed, drawn)
    wait_until(lambda: not sampler.is_busy)
    assert numbers == [1, 1]
    sampler.close()
    threads.close()
