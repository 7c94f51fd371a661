"""Steps that overlap: what is delivered late, who waits for what, what is aborted, and what fails alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from support.backends import BOUND, ON_DEVICE, RINGS
from support.control import Worker, held, wait_until
from support.inside import (
    executor_of,
    fail_next,
    fix_micro_batches,
    inbox_of,
    n_decoding_of,
    pipeline_of,
    set_micro_batches,
    thread_of,
)
from support.plain import PlainLoop, greedy, plain_loop, random_prompt

import llamapipe as lp
from llamapipe.errors import DecodeError

pytestmark = pytest.mark.native

MakeEngine = Callable[..., lp.Engine]
# Every way an engine can run its steps here.
WAYS = [{"ring": ring, "pipeline_depth": depth} for ring in RINGS for depth in (1, 2)]


@pytest.fixture(params=WAYS, ids=lambda way: f"{way['ring']} {way['pipeline_depth']}")
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


@pytest.fixture
def engine(make_engine: MakeEngine, way: dict[str, Any]) -> lp.Engine:
    return make_engine(n_seq_max=4, n_ubatch=32, **way)


@pytest.fixture(scope="module")
def loop(tiny: lp.Model) -> Iterator[PlainLoop]:
    with plain_loop(tiny, n_ubatch=32) as loop:
        yield loop


def prompts(model: lp.Model, n: int) -> list[list[int]]:
    import numpy as np

    rng = np.random.default_rng(3)
    return [random_prompt(rng, model, 3 + 9 * i) for i in range(n)]


class TestSame:
    @pytest.mark.device
    def test_every_way_says_the_same(self, engine: lp.Engine, loop: PlainLoop) -> None:
        inputs = prompts(engine.model, 6)
        for prompt, said in zip(inputs, engine.generate(inputs, greedy(20)), strict=True):
            assert loop.agrees(prompt, said.token_ids, BOUND)

    @pytest.mark.device
    def test_cohorts_say_the_same(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        """Two steps under way all the time, whatever it costs."""
        engine = make_engine(n_seq_max=4, n_ubatch=32, pipeline_depth=2)
        fix_micro_batches(engine, 2)
        inputs = prompts(engine.model, 9)
        for prompt, said in zip(inputs, engine.generate(inputs, greedy(20)), strict=True):
            assert loop.agrees(prompt, said.token_ids, BOUND)
        assert engine.stats().n_micro_batches == 2

    def test_cohorts_in_scarce_cells(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        """Requests lose their slots while a step of theirs is under way."""
        engine = make_engine(n_seq_max=4, n_ubatch=32, n_cells=256, pipeline_depth=2)
        fix_micro_batches(engine, 2)
        inputs = prompts(engine.model, 8)
        for prompt, said in zip(inputs, engine.generate(inputs, greedy(90)), strict=True):
            assert loop.agrees(prompt, said.token_ids, BOUND)
        assert engine.stats().n_preempted > 0

    def test_what_is_thrown_away_was_never_drawn(self, make_engine: MakeEngine) -> None:
        """A request preempted while its step is under way: its generator and grammar know nothing of that step."""
        literal = "abcdefghijklmnopqrstuvwxyz" * 2
        wild = lp.SamplingParams(temperature=1e4, top_k=0, top_p=1, min_p=0, max_tokens=80, ignore_eos=True)
        params = [replace(wild, seed=i) for i in range(6)]
        params += [
            lp.SamplingParams(grammar=f'root ::= "{literal}"', seed=i, max_tokens=80) for i in range(6)
        ]
        prompts = [[5, 6, 7 + i] for i in range(12)]
        expected = make_engine(n_seq_max=1).generate(prompts, params)
        engine = make_engine(n_seq_max=6, n_cells=256, pipeline_depth=2)
        fix_micro_batches(engine, 2)
        outs = engine.generate(prompts, params)
        assert engine.stats().n_preempted > 0
        assert [out.text for out in outs[6:]] == [literal] * 6
        # So hot that no rounding of logits matters.
        assert [out.token_ids for out in outs[:6]] == [out.token_ids for out in expected[:6]]

    def test_cohorts_come_and_go(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        """The change comes while a step is under way: nobody is in two of them."""
        engine = make_engine(n_seq_max=4, n_ubatch=32, pipeline_depth=2)
        fix_micro_batches(engine)
        inputs = prompts(engine.model, 6)
        results = Worker(lambda: engine.generate(inputs, greedy(60)))
        n = 1
        while results.is_alive():
            n = 3 - n
            set_micro_batches(engine, n)
        for prompt, said in zip(inputs, results.result(), strict=True):
            assert loop.agrees(prompt, said.token_ids, BOUND)


class TestLate:
    def test_a_stop_string_found_late_ends_the_text_where_it_stands(
        self, engine: lp.Engine, loop: PlainLoop
    ) -> None:
        """The next step has this request in it already; its token belongs to nobody."""
        prompt = prompts(engine.model, 1)[0]
        (whole,) = engine.generate([prompt], greedy(30))
        stop = whole.text[8:11]
        at = whole.text.index(stop)
        for _ in range(2):  # and its cells are clean for the next
            (cut,) = engine.generate([prompt], greedy(30, stop=(stop,)))
            assert (cut.text, cut.finish_reason) == (whole.text[:at], "stop")
            assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        (again,) = engine.generate([prompt], greedy(30))
        assert again.token_ids == whole.token_ids

    def test_streams_get_every_token_once(self, engine: lp.Engine, loop: PlainLoop) -> None:
        inputs = prompts(engine.model, 4)
        streams = [engine.stream(prompt, greedy(25)) for prompt in inputs]
        for stream, prompt in zip(streams, inputs, strict=True):
            tokens = [token for delta in stream for token in delta.token_ids]
            assert len(tokens) == 25 and loop.agrees(prompt, tokens, BOUND)

    @pytest.mark.device
    def test_cancelled_at_every_token(self, engine: lp.Engine, loop: PlainLoop) -> None:
        """Whatever is under way then, the others go on and nothing is left."""
        inputs = prompts(engine.model, 3)
        for n in range(6):
            cancelled = engine.stream(inputs[0], greedy(200))
            others = [Worker(lambda p=p: engine.generate(p, greedy(12))) for p in inputs[1:]]
            for _ in range(n):
                next(cancelled)
            cancelled.close()
            for other, prompt in zip(others, inputs[1:], strict=True):
                said = other.result().token_ids
                assert len(said) == 12 and loop.agrees(prompt, said, BOUND)
        engine.check_integrity()


@pytest.mark.device
class TestWaits:
    """The invariants of the design: at most one wait a step, and of which kind."""

    def test_nobody_waits_more_than_once_a_step(self, engine: lp.Engine, way: dict[str, Any]) -> None:
        engine.generate(prompts(engine.model, 4), greedy(20))
        before = engine.stats()
        engine.generate(prompts(engine.model, 4), greedy(20))
        stats = engine.stats()
        steps = stats.steps - before.steps
        n_waits, n_syncs = stats.n_waits - before.n_waits, stats.n_syncs - before.n_syncs
        assert n_waits <= steps and n_syncs <= steps
        mode = pipeline_of(engine).mode
        if mode in ("host", "events"):
            assert n_syncs == 0
        if mode == "host" and way["pipeline_depth"] == 1:
            assert n_waits == 0 and stats.n_copies == 0
        if mode == "events":
            assert stats.n_copies <= stats.steps

    def test_graphs_are_reused(self, engine: lp.Engine) -> None:
        engine.generate(prompts(engine.model, 4), greedy(20))
        stats = engine.stats()
        assert stats.n_reused > stats.steps // 2


class TestAbort:
    @pytest.mark.skipif(ON_DEVICE, reason="only what a CPU computes can be aborted")
    def test_a_prompt_nobody_waits_for_is_not_computed(self, make_engine: MakeEngine, demo: lp.Model) -> None:
        """A prompt of a second, one step of one ubatch: cancelled, it ends in the middle."""
        engine = make_engine(demo, n_ctx=32768, n_batch=32768, n_ubatch=32768, n_seq_max=2)
        executor = executor_of(engine)
        prompt = [5] * 30000
        stream = engine.stream(prompt, greedy(5))
        wait_until(lambda: executor.launching() >= 0)
        stream.close()
        engine.check_integrity()
        stats = engine.stats()
        assert stats.steps == 0, "the step was computed to its end"
        assert (stats.n_active, stats.n_queued) == (0, 0)
        assert engine.generate("Once upon a time", greedy(5)).finish_reason == "length"
        # its cells are free again: all of them can be used by another
        assert engine.generate([5] * 500, greedy(3)).finish_reason == "length"

    @pytest.mark.skipif(ON_DEVICE, reason="only what a CPU computes can be aborted")
    def test_a_step_with_somebody_in_it_goes_on(self, make_engine: MakeEngine, demo: lp.Model) -> None:
        engine = make_engine(demo, n_ctx=4096, n_batch=4096, n_ubatch=4096, n_seq_max=2)
        executor = executor_of(engine)
        stays = engine.stream("Count from 3 to 9:", greedy(40))
        next(stays)
        goes = engine.stream([5] * 3000, greedy(5))
        wait_until(lambda: executor.launching() >= 0)
        goes.close()
        assert sum(len(delta.token_ids) for delta in stays) == 39

    @pytest.mark.skipif(ON_DEVICE, reason="only what a CPU computes can be aborted")
    @pytest.mark.parametrize("depth", [1, 2])
    def test_closing_does_not_wait_for_a_long_prompt(
        self, make_engine: MakeEngine, demo: lp.Model, depth: int
    ) -> None:
        engine = make_engine(
            demo, n_ctx=32768, n_batch=32768, n_ubatch=32768, n_seq_max=1, pipeline_depth=depth
        )
        executor = executor_of(engine)
        waiting = Worker(lambda: engine.generate([5] * 30000, greedy(5)))
        wait_until(lambda: executor.launching() >= 0)
        engine.close(drain=False)
        assert waiting.result().finish_reason == "cancelled"
        assert engine.stats().steps == 0


class TestFailures:
    @pytest.mark.device
    @pytest.mark.parametrize("code", [-1, -2, -3])
    def test_a_failed_launch_ends_its_own_requests(self, engine: lp.Engine, code: int) -> None:
        inputs = prompts(engine.model, 2)
        whole = [engine.generate(prompt, greedy(10)) for prompt in inputs]
        fail_next(pipeline_of(engine), "launch", code)
        with pytest.raises(DecodeError):
            engine.generate(inputs[0], greedy(10))
        for prompt, completion in zip(inputs, whole, strict=True):
            assert engine.generate(prompt, greedy(10)).token_ids == completion.token_ids
        engine.check_integrity()

    def test_a_failure_in_the_middle(self, engine: lp.Engine) -> None:
        """Those in the step fail, the one that waits for a slot does not."""
        inputs = prompts(engine.model, 5)
        whole = [engine.generate(prompt, greedy(10)) for prompt in inputs]
        fix_micro_batches(engine, 1)
        with held(engine):
            asked = [Worker(engine.generate, prompt, greedy(200)) for prompt in inputs[:4]]
            wait_until(lambda: inbox_of(engine).qsize() == 4)
            waiting = Worker(engine.generate, inputs[4], greedy(10))
            wait_until(lambda: inbox_of(engine).qsize() == 5)

        def fail() -> bool:
            """Between two steps: the next one fails if all four are in it."""
            all_decode = n_decoding_of(engine) == 4
            if all_decode:
                fail_next(pipeline_of(engine), "launch", -3)
            return all_decode

        wait_until(lambda: thread_of(engine).ask(fail))
        for worker in asked:
            with pytest.raises(DecodeError):
                worker.result()
        assert waiting.result().token_ids == whole[4].token_ids

    @pytest.mark.device
    @pytest.mark.skipif(not ON_DEVICE, reason="rows are not copied out where the ring is host memory")
    def test_a_failed_copy_ends_its_own_requests(self, engine: lp.Engine, way: dict[str, Any]) -> None:
        if way["ring"] == "off":
            pytest.skip("rows are copied by llama.cpp")
        prompt = prompts(engine.model, 1)[0]
        whole = engine.generate(prompt, greedy(5))
        fail_next(pipeline_of(engine), "copy", -3)
        with pytest.raises(DecodeError):
            engine.generate(prompt, greedy(5))
        assert engine.generate(prompt, greedy(5)).token_ids == whole.token_ids


class TestCohortSwitch:
    """On numbers alone: when it is tried, kept and given up."""

    class Executor:
        overlaps, depth = True, 2

        def __init__(self) -> None:
            self.compute = 0.0

        def compute_s(self) -> float:
            return self.compute

    def run(
        self, monkeypatch: pytest.MonkeyPatch, compute_s: float, other_s: float, effect: float
    ) -> list[int]:
        """The number of micro-batches after each of 40 windows, where two are `effect` times faster."""
        from llamapipe._engine.runtime import micro_batches

        now = [0.0]
        monkeypatch.setattr(micro_batches, "perf_counter", lambda: now[0])
        executor = self.Executor()
        switch = micro_batches.MicroBatchSwitch(executor)  # type: ignore[arg-type]
        counts = []
        for _ in range(40):
            for _ in range(micro_batches._WINDOW):
                now[0] += (compute_s + other_s) / (effect if switch.n == 2 else 1.0) / switch.n
                executor.compute += compute_s / switch.n
                switch.observe_step(8 // switch.n)
            counts.append(switch.n)
        return counts

    def test_computing_that_dominates_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert set(self.run(monkeypatch, 1.0, 0.5, 2.0)) == {1}

    def test_a_gain_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counts = self.run(monkeypatch, 1.0, 3.0, 1.3)
        assert counts[:1] == [2] and set(counts) == {2}

    def test_a_gain_that_does_not_come_is_given_up_and_tried_ever_more_rarely(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counts = self.run(monkeypatch, 1.0, 3.0, 0.9)
        tries = [i for i, n in enumerate(counts) if n == 2]
        gaps = [b - a for a, b in pairwise(tries)]
        assert tries[0] == 0 and len(tries) <= 6
        assert gaps == sorted(gaps) and gaps[-1] >= 8

    @pytest.mark.parametrize(
        ("compute_s", "other_s", "expected"),
        [(1.0, 1.0, 1.0), (1.0, 2.0, 1.5), (1.0, 10.0, 1.1), (0.0, 0.0, 1.0)],
    )
    def test_the_gain_follows_its_formula(self, compute_s: float, other_s: float, expected: float) -> None:
        from llamapipe._engine.runtime.micro_batches import gain

        assert math.isclose(gain(compute_s, other_s), expected)
