"""Generations: one token a call, nothing ahead of it, on a sequence that can be cut and lengthened."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.control import Gate, Worker, all_results, wait_until
from support.inside import inbox_of
from support.plain import PlainLoop, greedy

import llamapipe as lp
from llamapipe.errors import EngineClosedError, InvalidRequestError

MakeEngine = Callable[..., lp.Engine]

PROMPT = "Once upon a time there was"
OTHER = "In a house near the mill"


def take(generation: lp.Generation, n: int) -> list[int]:
    """The next ``n`` tokens; fewer when it ends."""
    tokens = []
    for _ in range(n):
        token = generation.next()
        if token is None:
            break
        tokens.append(token.id)
    return tokens


class TestNext:
    def test_computes_one_step_a_call_and_nothing_before(self, engine: lp.Engine, loop: PlainLoop) -> None:
        ids = engine.model.tokenize(PROMPT)
        expected = loop.greedy(ids, 10)
        with engine.start(PROMPT, greedy(10)) as generation:
            stats = engine.stats()
            assert (stats.steps, stats.n_prompt_tokens, stats.n_active, stats.n_queued) == (0, 0, 0, 0)
            assert (generation.token_ids, generation.n_tokens) == (ids, len(ids))
            for i, token_id in enumerate(expected, 1):
                token = generation.next()
                assert token is not None
                assert (token.id, token.piece) == (token_id, engine.model.piece(token_id))
                assert engine.stats().steps == i
                assert generation.token_ids == ids + expected[:i]
            assert generation.finish_reason == "length"
            assert generation.next() is None
            assert generation.next() is None
            assert engine.stats().steps == 10

    def test_iterates(self, engine: lp.Engine, loop: PlainLoop) -> None:
        ids = engine.model.tokenize(PROMPT)
        with engine.start(ids, greedy(12)) as generation:
            assert [token.id for token in generation] == loop.greedy(ids, 12)

    def test_text_is_that_of_generate(self, engine: lp.Engine) -> None:
        """Also where the end comes inside a character, or while a possible stop string is held back."""
        for n in range(1, 24):
            out = engine.generate(PROMPT, greedy(n))
            for stop in ((), (out.text[-1:] + "\N{SNOWMAN}",)):
                with engine.start(PROMPT, greedy(n, stop=stop)) as generation:
                    assert "".join(token.text for token in generation) == out.text

    def test_stop_token_is_not_given(self, engine: lp.Engine, loop: PlainLoop) -> None:
        ids = engine.model.tokenize(PROMPT)
        expected = loop.greedy(ids, 12)
        n = next(i for i in range(3, 12) if expected[i] not in expected[:i])
        with engine.start(ids, greedy(40, stop_token_ids=[expected[n]])) as generation:
            assert take(generation, 40) == expected[:n]
            assert generation.finish_reason == "stop"
            assert generation.token_ids == ids + expected[:n]
            steps = engine.stats().steps
            assert steps == n + 1
            assert generation.next() is None
            assert engine.stats().steps == steps

    def test_goes_to_the_end_of_the_context(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        engine = make_engine(n_seq_max=2, n_ctx=64)
        ids = engine.model.tokenize(PROMPT)
        with engine.start(ids, greedy(None)) as generation:
            assert take(generation, 100) == loop.greedy(ids, 64 - len(ids))
            assert (generation.n_tokens, generation.finish_reason) == (64, "length")
            with pytest.raises(InvalidRequestError, match="65"):
                generation.append([5])
            generation.trim(40)
            assert take(generation, 100) == loop.greedy(generation.token_ids[:40], 24)

    def test_many_in_few_slots(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        """Each gives way to the others when its turn is over."""
        engine = make_engine(n_seq_max=2, n_ubatch=32)
        rng = random.Random(3)
        prompts = [[1, *rng.choices(range(259, 512), k=n)] for n in range(3, 40, 5)]
        generations = [engine.start(prompt, greedy(8)) for prompt in prompts]
        outputs: list[list[int]] = [[] for _ in prompts]
        for _ in range(8):
            for generation, output in zip(generations, outputs, strict=True):
                output.extend(take(generation, 1))
            engine.check_integrity()
        assert outputs == [loop.greedy(prompt, 8) for prompt in prompts]
        assert engine.stats().n_preempted > 0
        for generation in generations:
            generation.close()


class TestFork:
    def test_goes_its_own_way(self, engine: lp.Engine, loop: PlainLoop) -> None:
        ids = engine.model.tokenize(PROMPT)
        expected = loop.greedy(ids, 20)
        with engine.start(ids, greedy(20)) as parent:
            assert take(parent, 5) == expected[:5]
            with parent.fork() as child, child.fork() as grandchild:
                assert child.token_ids == ids + expected[:5]
                child.append([7, 8])
                other = loop.greedy(ids + expected[:5] + [7, 8], 10)
                for i in range(10):  # by turns
                    assert take(child, 1) == [other[i]]
                    assert take(parent, 1) == [expected[5 + i]]
                    engine.check_integrity()
                parent.close()
                assert take(grandchild, 50) == expected[5:]
                assert grandchild.finish_reason == "length"  # max_tokens counts on

    def test_computes_one_token(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=4)
        with engine.start([1] * 40, greedy(20)) as parent:
            take(parent, 6)
            n_before = engine.stats().n_prompt_tokens
            forks = [parent.fork() for _ in range(3)]
            assert engine.stats().n_active == 1
            for fork in forks:
                take(fork, 1)
            assert (
                engine.stats().n_prompt_tokens - n_before == 0
            )  # the last token of each is a step of decoding
            assert len({fork.token_ids[-1] for fork in forks}) == 1
            for fork in forks:
                fork.close()

    def test_more_forks_than_slots(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        engine = make_engine(n_seq_max=2)
        ids = engine.model.tokenize(PROMPT)
        with engine.start(ids, greedy(12)) as parent:
            take(parent, 2)
            forks = [parent.fork() for _ in range(5)]
            for _ in range(10):
                for fork in forks:
                    take(fork, 1)
                engine.check_integrity()
            for fork in forks:
                assert fork.token_ids == ids + loop.greedy(ids, 12)
                fork.close()

    def test_without_a_prefix_cache(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        engine = make_engine(prefix_cache=False)
        ids = engine.model.tokenize(PROMPT)
        with engine.start(ids, greedy(9)) as parent:
            take(parent, 4)
            with parent.fork() as child:
                assert take(child, 9) == loop.greedy(ids, 9)[4:]

    def test_before_the_first_token_and_after_the_end(self, engine: lp.Engine, loop: PlainLoop) -> None:
        ids = engine.model.tokenize(PROMPT)
        expected = loop.greedy(ids, 6)
        with engine.start(ids, greedy(6)) as parent, parent.fork() as first:
            assert take(parent, 9) == expected
            with parent.fork() as last:
                assert (last.finish_reason, last.next()) == ("length", None)
                last.trim(len(ids) + 2)
                assert take(last, 4) == expected[2:]
            assert take(first, 9) == expected

    def test_after_a_change_that_was_not_computed(self, engine: lp.Engine, loop: PlainLoop) -> None:
        ids = engine.model.tokenize(PROMPT)
        with engine.start(ids, greedy(8)) as parent:
            take(parent, 4)
            parent.trim(3)
            parent.append([300, 301])
            with parent.fork() as child:
                assert take(child, 3) == loop.greedy([*ids[:3], 300, 301], 3)
            assert take(parent, 3) == loop.greedy([*ids[:3], 300, 301], 3)

    def test_draws_with_seeds_of_its_own(self, engine: lp.Engine) -> None:
        params = lp.SamplingParams(max_tokens=12, temperature=1.5, seed=9, ignore_eos=True)
        outputs = []
        for _ in range(2):
            with engine.start(PROMPT, params) as parent:
                take(parent, 2)
                forks = [parent.fork(), parent.fork(), parent.fork(seed=9), parent.fork(seed=9)]
                forks.append(forks[0].fork())
                outputs.append([take(fork, 10) for fork in forks])
                for fork in forks:
                    fork.close()
        assert outputs[0] == outputs[1]
        assert outputs[0][2] == outputs[0][3]
        assert len({tuple(output) for output in outputs[0]}) == 4

    def test_begins_with_held_text(self, engine: lp.Engine) -> None:
        """A half character and what may become a stop string come with the fork's first text."""
        for n in range(1, 16):
            whole = engine.generate(PROMPT, greedy(16)).text
            with engine.start(PROMPT, greedy(16, stop=[whole[-2:] + "\N{SNOWMAN}"])) as parent:
                text = "".join(parent.next().text for _ in range(n))  # type: ignore[union-attr]
                with parent.fork() as child:
                    assert text + "".join(token.text for token in child) == whole

    @pytest.mark.parametrize("option", [{"grammar": 'root ::= "ab" [a-z]*'}, {"regex": "ab[a-z]*"}])
    def test_keeps_to_the_constraints(self, engine: lp.Engine, option: dict[str, str]) -> None:
        params = lp.SamplingParams(max_tokens=8, temperature=2.0, seed=4, **option)  # type: ignore[arg-type]
        with engine.start(PROMPT, params) as parent:
            take(parent, 1)
            n = len(engine.model.tokenize(PROMPT))
            for _ in range(4):
                with parent.fork() as child:
                    take(child, 8)
                    text = engine.model.detokenize(child.token_ids[n:])
                    assert text.startswith("ab"[: len(text)]) and text.isalpha() and text.islower()

    def test_of_what_has_ended(self, engine: lp.Engine) -> None:
        parent = engine.start(PROMPT, greedy(5))
        parent.cancel()
        with pytest.raises(InvalidRequestError, match="cancelled"):
            parent.fork()
        for bad in (-1, 2**64, 1.5, "1"):
            with engine.start(PROMPT) as other, pytest.raises((TypeError, ValueError), match="seed"):
                other.fork(bad)  # type: ignore[arg-type]

    def test_of_a_parent_that_fails_meanwhile(self, engine: lp.Engine) -> None:
        """Its change is refused on the engine thread, after `fork` has returned."""
        pytest.importorskip("llguidance")
        parent = engine.start(PROMPT, lp.SamplingParams(max_tokens=8, regex="ab[a-z]*"))
        take(parent, 3)
        parent.append(engine.model.tokenize("123", add_special=False))
        child = parent.fork()
        for generation in (parent, child):
            with pytest.raises(InvalidRequestError):
                generation.next()
        assert engine.stats().n_active == 0

    def test_cancelled_at_once(self, engine: lp.Engine) -> None:
        with engine.start(PROMPT, greedy(5)) as parent:
            take(parent, 2)
            for _ in range(50):
                parent.fork().cancel()
            assert len(take(parent, 5)) == 3
        wait_until(lambda: engine.stats().n_active == 0)
        engine.check_integrity()


class TestCancel:
    @pytest.mark.parametrize("n_before", [0, 1, 5])
    def test_ends_without_a_step(self, engine: lp.Engine, n_before: int) -> None:
        generation = engine.start(PROMPT, greedy(40))
        assert len(take(generation, n_before)) == n_before
        steps = engine.stats().steps
        generation.cancel()
        generation.cancel()
        assert generation.finish_reason == "cancelled"
        assert generation.next() is None
        assert generation.next() is None
        stats = engine.stats()
        assert (stats.steps, stats.n_active, stats.n_queued) == (steps, 0, 0)
        with pytest.raises(InvalidRequestError, match="cancelled"):
            generation.trim(1)
        with pytest.raises(InvalidRequestError, match="cancelled"):
            generation.append([5])

    @pytest.mark.parametrize("n_before", [0, 3])
    def test_while_next_waits(self, engine: lp.Engine, n_before: int) -> None:
        """The step that runs is the last one."""
        generation = engine.start(PROMPT, greedy(40))
        take(generation, n_before)
        with Gate(engine) as gate:
            waiting = Worker(generation.next)
            gate.wait()
            generation.cancel()
            gate.open()
            waiting.result()  # a token or None: the step was running
            assert generation.next() is None
            assert engine.stats().steps == n_before + 1
            assert engine.stats().n_active == 0

    def test_while_next_is_queued(self, engine: lp.Engine) -> None:
        """No step computes it at all."""
        generation = engine.start(PROMPT, greedy(40))
        with Gate(engine) as gate:
            busy = Worker(engine.generate, OTHER, greedy(1))
            gate.wait()
            waiting = Worker(generation.next)
            wait_until(lambda: inbox_of(engine).qsize() == 1)
            generation.cancel()
            gate.open()
            assert waiting.result() is None
            assert len(busy.result().token_ids) == 1
        assert engine.stats().steps == 1

    def test_after_the_end(self, engine: lp.Engine) -> None:
        generation = engine.start(PROMPT, greedy(2))
        assert len(take(generation, 5)) == 2
        assert engine.stats().n_active == 1
        generation.cancel()
        assert engine.stats().n_active == 0
        assert generation.next() is None

    def test_dropped(self, engine: lp.Engine) -> None:
        generation = engine.start(PROMPT, greedy(40))
        take(generation, 3)
        assert engine.stats().n_active == 1
        del generation
        gc.collect()
        stats = engine.stats()
        assert (stats.steps, stats.n_active) == (3, 0)

    def test_dropped_before_its_start(self, engine: lp.Engine) -> None:
        engine.start(PROMPT, greedy(40))
        gc.collect()
        engine.close()  # hangs when something is left

    def test_left_by_an_exception(self, engine: lp.Engine) -> None:
        generation = engine.start(PROMPT, greedy(40))

        def leave() -> None:
            with generation:
                take(generation, 2)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            leave()
        assert generation.next() is None
        assert engine.stats().n_active == 0


class TestTrimAndAppend:
    def test_against_fresh_requests(self, engine: lp.Engine, loop: PlainLoop) -> None:
        """Whatever was done to the sequence, it goes on as a new request with its tokens would."""
        rng = random.Random(7)
        with engine.start(PROMPT, greedy(None)) as generation:
            for _ in range(60):
                if rng.random() < 0.5 and generation.n_tokens > 1:
                    generation.trim(rng.randint(1, generation.n_tokens))
                if rng.random() < 0.5 and generation.n_tokens < 180:
                    generation.append(rng.choices(range(259, 512), k=rng.choice([1, 2, 5, 40])))
                before = generation.token_ids
                n = rng.choice([0, 1, 2, 7])
                assert take(generation, n) == loop.greedy(before, n)[:n] if n else True
                engine.check_integrity()

    def test_beside_others(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        """The same with eight of them in three slots, so that they lose their cells at any moment."""
        engine = make_engine(n_seq_max=3, n_ubatch=32)

        def edit(seed: int) -> None:
            rng = random.Random(seed)
            history = []
            with engine.start(OTHER[: seed + 1], greedy(None)) as generation:
                for _ in range(12):
                    generation.trim(rng.randint(1, generation.n_tokens))
                    generation.append(rng.choices(range(259, 512), k=rng.choice([1, 3, 20])))
                    before = generation.token_ids
                    history.append((before, take(generation, rng.randint(1, 6))))
            histories.append(history)

        histories: list[list[tuple[list[int], list[int]]]] = []
        all_results([Worker(edit, seed) for seed in range(8)])
        assert len(histories) == 8
        for history in histories:
            for before, tokens in history:
                assert tokens == loop.greedy(before, len(tokens))

    @pytest.mark.parametrize("reason", ["length", "stop"])
    def test_goes_on_after_the_end(self, engine: lp.Engine, loop: PlainLoop, reason: str) -> None:
        """With the tokens it has and a new count of ``max_tokens``."""
        ids = engine.model.tokenize(PROMPT)
        expected = loop.greedy(ids, 30)
        stop = [] if reason == "length" else [next(t for t in expected[4:] if t not in expected[:4])]
        with engine.start(ids, greedy(9, stop_token_ids=stop)) as generation:
            first = take(generation, 30)
            assert generation.finish_reason == reason
            before = generation.token_ids
            generation.append([300])
            assert generation.finish_reason is None
            again = loop.greedy([*before, 300], 9)
            n = next((i for i, t in enumerate(again) if t in stop), 9)
            assert take(generation, 30) == again[:n]
            generation.trim(len(ids))
            assert generation.finish_reason is None
            assert take(generation, 30) == first

    def test_trim_to_the_same_length_reopens(self, engine: lp.Engine, loop: PlainLoop) -> None:
        ids = engine.model.tokenize(PROMPT)
        with engine.start(ids, greedy(4)) as generation:
            first = take(generation, 9)
            generation.trim(generation.n_tokens)
            assert first + take(generation, 9) == loop.greedy(ids, 8)

    def test_computes_nothing(self, engine: lp.Engine) -> None:
        with engine.start(PROMPT, greedy(40)) as generation:
            take(generation, 4)
            generation.trim(3)
            generation.append([300, 301])
            assert engine.stats().steps == 4
            take(generation, 1)
            stats = engine.stats()
            n_prompt = len(engine.model.tokenize(PROMPT))
            # The last kept token's logits are needed again only when nothing follows it.
            assert (stats.steps, stats.n_prompt_tokens) == (5, n_prompt + 3)

    def test_penalties_see_the_sequence_as_it_is(self, engine: lp.Engine) -> None:
        params = greedy(None, presence_penalty=1000.0, repeat_last_n=-1)
        with engine.start(PROMPT, params) as generation:
            take(generation, 10)
            generation.trim(generation.n_tokens - 6)
            generation.append([400, 401])
            before = generation.token_ids
            tokens = take(generation, 20)
        assert (
            engine.generate(before, greedy(20, presence_penalty=1000.0, repeat_last_n=-1)).token_ids == tokens
        )
        assert len({*before, *tokens}) == len({*before}) + 20

    def test_stop_string_does_not_span_a_change(self, engine: lp.Engine) -> None:
        """What was held back of a text that was cut away is forgotten."""
        text = engine.generate(PROMPT, greedy(30)).text
        n = next(i for i in range(2, 30) if text[i - 1 : i + 1] not in text[:i])
        stop = text[n - 1 : n + 1]
        with engine.start(PROMPT, greedy(30, stop=[stop])) as generation:
            shown = "".join(token.text for token in generation)
            assert (shown, generation.finish_reason) == (text[: n - 1], "stop")
            generation.trim(len(engine.model.tokenize(PROMPT)))
            assert "".join(token.text for token in generation) == shown

    def test_numpy_tokens(self, engine: lp.Engine, loop: PlainLoop) -> None:
        ids: Any = np.array(engine.model.tokenize(PROMPT))
        with engine.start(ids, greedy(5)) as generation:
            generation.append(np.array([300, 301], dtype=np.int32))
            assert generation.token_ids == [*ids.tolist(), 300, 301]
            assert take(generation, 5) == loop.greedy(generation.token_ids[: len(ids) + 2], 5)

    @pytest.mark.parametrize("n_keep", [0, -1, 1000])
    def test_trim_outside(self, engine: lp.Engine, n_keep: int) -> None:
        with engine.start(PROMPT) as generation, pytest.raises(ValueError, match=f"n_keep is {n_keep}"):
            generation.trim(n_keep)

    @pytest.mark.parametrize("tokens", [[-1], [512], [2**40]])
    def test_append_unknown_tokens(self, engine: lp.Engine, tokens: list[int]) -> None:
        with engine.start(PROMPT, greedy(5)) as generation:
            with pytest.raises(ValueError, match=str(tokens[0])):
                generation.append(tokens)
            assert len(take(generation, 2)) == 2


class TestGivingWay:
    def test_idle_one_to_a_queued_request(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        engine = make_engine(n_seq_max=1, n_ubatch=32)
        ids = engine.model.tokenize(PROMPT)
        with engine.start(ids, greedy(20)) as generation:
            first = take(generation, 5)
            other = engine.generate(OTHER, greedy(9)).token_ids
            assert other == loop.greedy(engine.model.tokenize(OTHER), 9)
            assert engine.stats().n_preempted == 1
            assert first + take(generation, 20) == loop.greedy(ids, 20)
            assert generation.finish_reason == "length"

    def test_finished_one_to_a_queued_request(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        engine = make_engine(n_seq_max=1, n_ubatch=32)
        ids = engine.model.tokenize(PROMPT)
        with engine.start(ids, greedy(5)) as generation:
            take(generation, 9)
            engine.generate(OTHER, greedy(9))
            assert generation.next() is None
            generation.trim(len(ids) + 2)
            assert take(generation, 9) == loop.greedy(generation.token_ids[: len(ids) + 2], 5)

    def test_reopened_one_computes_nothing_by_itself(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        """It ended at a stop token, so it was allowed one token more than it gave."""
        engine = make_engine(n_seq_max=1, n_ubatch=32)
        ids = engine.model.tokenize(PROMPT)
        expected = loop.greedy(ids, 12)
        n = next(i for i in range(3, 12) if expected[i] not in expected[:i])
        with engine.start(ids, greedy(40, stop_token_ids=[expected[n]])) as generation:
            assert take(generation, 40) == expected[:n]
            generation.trim(len(ids) + 1)
            engine.generate(OTHER, greedy(9))
            stats = engine.stats()
            assert (stats.steps, stats.n_active, stats.n_queued) == (n + 1 + 9, 0, 0)
            generation.trim(len(ids))
            assert take(generation, 2) == expected[:2]

    def test_two_in_one_slot_from_two_threads(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        engine = make_engine(n_seq_max=1, n_ubatch=32)
        prompts = [engine.model.tokenize(text) for text in (PROMPT, OTHER)]

        def run(prompt: list[int]) -> list[int]:
            with engine.start(prompt, greedy(25)) as generation:
                return take(generation, 25)

        assert all_results([Worker(run, prompt) for prompt in prompts]) == [
            loop.greedy(prompt, 25) for prompt in prompts
        ]


class TestClose:
    def test_open_one_does_not_hold_it_up(self, engine: lp.Engine) -> None:
        generation = engine.start(PROMPT, greedy(40))
        take(generation, 3)
        engine.close()
        assert generation.finish_reason == "cancelled"
        assert generation.next() is None

    def test_while_next_waits(self, make_engine: MakeEngine) -> None:
        """It gets its token, some steps later; then nobody can ask for another, so nothing waits for it."""
        engine = make_engine(n_batch=8)
        generation = engine.start(PROMPT, greedy(40))
        with Gate(engine) as gate:
            waiting = Worker(generation.next)
            gate.wait()
            closing = Worker(engine.close)
            wait_until(lambda: engine.closed)
            gate.open()
            assert waiting.result() is not None
            closing.result()
        with pytest.raises(EngineClosedError):
            engine.start(PROMPT)
        assert generation.next() is None

    def test_without_draining_while_next_waits(self, engine: lp.Engine) -> None:
        generation = engine.start(PROMPT, greedy(40))
        with Gate(engine) as gate:
            waiting = Worker(generation.next)
            gate.wait()
            closing = Worker(engine.close, False)
            wait_until(lambda: engine.closed)
            gate.open()
            waiting.result()
            closing.result()
        assert generation.next() is None

    def test_race(self, make_engine: MakeEngine) -> None:
        """Threads that step generations see the end of the engine as an error or as the end; none hangs."""
        for drain in (True, False) * 10:
            engine = make_engine(n_seq_max=2)
            barrier = threading.Barrier(5)

            def run(engine: lp.Engine = engine, barrier: threading.Barrier = barrier) -> None:
                generation = engine.start(PROMPT, greedy(None))
                barrier.wait()
                try:
                    while generation.next() is not None:
                        pass
                except EngineClosedError:
                    pass

            workers = [Worker(run) for _ in range(4)]
            barrier.wait()
            engine.close(drain)
            all_results(workers)


class TestSharedSteps:
    def test_lockstep(self, make_engine: MakeEngine) -> None:
        """Three threads, each with its own generation: the window brings their tokens into the same steps."""
        engine = make_engine(n_seq_max=3, batch_window_us=1_000_000)
        n = 60
        generations = [engine.start(text, greedy(n)) for text in (PROMPT, OTHER, "The owl")]
        outputs = all_results([Worker(take, generation, n) for generation in generations])
        assert [len(tokens) for tokens in outputs] == [n] * 3
        # One step for each of their tokens, and some more where the machine stood still; else it would be two.
        assert n <= engine.stats().steps <= 1.5 * n
        for generation in generations:
            generation.cancel()

    def test_no_window_when_nobody_else_can_come(self, tiny: lp.Model) -> None:
        """In a process with no other thread, requests one after the other never wait for company."""
        program = """
import sys, time
import llamapipe as lp
tuning = lp.EngineTuning(batch_window_us=1_000_000)
with lp.Model(sys.argv[1]) as model, lp.Engine(model, n_ctx=64, n_threads=1, tuning=tuning) as engine:
    params = lp.SamplingParams(max_tokens=2, ignore_eos=True)
    took = []
    while len(took) < 3 and min(took, default=1) >= 1:  # more than once only when the machine stands still
        started = time.perf_counter()
        for _ in range(20):
            engine.generate("a", params)
        with engine.start("a", params) as generation:
            assert len(list(generation)) == 2
        took.append(time.perf_counter() - started)
    print(min(took))
"""
        done = subprocess.run(
            [sys.executable, "-c", program, str(tiny.path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) < 1.0
