"""The engine's blocking calls: what comes out, options, the queue, and how it ends."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
import random
import struct
import termios
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from support.backends import BOUND, same_rounding
from support.clock import Clock
from support.control import Gate, Worker, all_results, held, submitted, wait_until
from support.inside import (
    children_of,
    inbox_of,
    loop_of,
    n_requests_of,
    n_waiting_threads,
    queue_of,
    thread_of,
    wake_waiting_callers,
)
from support.plain import PlainLoop, greedy

import llamapipe as lp
from llamapipe._engine.calls.queue_limit import QueueLimit
from llamapipe._engine.policy.core import Request
from llamapipe.errors import EngineClosedError, InvalidRequestError, QueueFullError

MakeEngine = Callable[..., lp.Engine]

PROMPT = "Once upon a time there was"
OTHER = "In a house near the mill"


class TestGenerate:
    def test_a_completion_is_that_of_a_plain_loop(self, engine: lp.Engine, loop: PlainLoop) -> None:
        ids = engine.model.tokenize(PROMPT)
        out = engine.generate(PROMPT, greedy(20, seed=77))
        assert out.token_ids == loop.greedy(ids, 20)
        assert out.text == b"".join(map(engine.model.piece, out.token_ids)).decode("utf-8", "replace")
        assert (out.finish_reason, out.n_prompt_tokens, out.seed) == ("length", len(ids), 77)
        assert out.timings.first_token_s is not None
        assert 0 < out.timings.first_token_s <= out.timings.total_s

    def test_one_step_a_token(self, engine: lp.Engine) -> None:
        """The first token is drawn from the prompt's own last row; nothing is computed after the last one."""
        engine.generate(PROMPT, greedy(12))
        stats = engine.stats()
        n_prompt = len(engine.model.tokenize(PROMPT))
        assert (stats.steps, stats.n_prompt_tokens, stats.n_completion_tokens) == (12, n_prompt, 12)
        assert (stats.n_requests, stats.n_preempted, stats.n_active, stats.n_queued) == (1, 0, 0, 0)
        assert min(stats.plan_s, stats.launch_s, stats.sample_s, stats.deliver_s, stats.idle_s) > 0

    def test_shipped_model_ends_by_itself(self, demo: lp.Model, make_engine: MakeEngine) -> None:
        engine = make_engine(demo, n_ctx=512, n_seq_max=2)
        out = engine.generate("1, 2, 3, 4,", lp.SamplingParams(temperature=0, max_tokens=None))
        assert out.finish_reason == "stop"
        assert out.text.startswith(" 5, 6, 7")
        assert not any(map(demo.is_eog, out.token_ids))
        assert engine.generate(PROMPT, greedy(None)).finish_reason == "length"

    @pytest.mark.parametrize("kind", ["text", "ids", "tuple", "int32", "int64", "uint16"])
    def test_kinds_of_prompt(self, engine: lp.Engine, kind: str) -> None:
        ids = engine.model.tokenize(PROMPT)
        prompt: Any = {
            "text": PROMPT,
            "ids": ids,
            "tuple": tuple(ids),
            "int32": np.array(ids, dtype=np.int32),
            "int64": np.array(ids),
            "uint16": np.array(ids, dtype=np.uint16),
        }[kind]
        out: lp.Completion = engine.generate(prompt, greedy(6))
        assert out.token_ids == engine.generate(ids, greedy(6)).token_ids
        assert isinstance(engine.generate([prompt], greedy(6)), list)

    def test_list_of_prompts(self, engine: lp.Engine, loop: PlainLoop) -> None:
        """In their order, text and ids mixed, more than there are slots."""
        texts = [PROMPT, OTHER, "The owl", "A", "1, 2, 3", PROMPT, "What", "B C D"]
        ids = [engine.model.tokenize(text) for text in texts]
        prompts: list[Any] = [i if n % 2 else t for n, (t, i) in enumerate(zip(texts, ids, strict=True))]
        outs = engine.generate(prompts, greedy(15))
        assert all(loop.agrees(i, out.token_ids, BOUND) for i, out in zip(ids, outs, strict=True))
        assert [len(out.token_ids) for out in outs] == [15] * len(ids)
        assert [out.n_prompt_tokens for out in outs] == [len(i) for i in ids]
        matrix: Any = np.array([[1, 300, 301], [1, 302, 303]])
        outs = engine.generate(matrix, greedy(5))
        for row, out in zip(matrix.tolist(), outs, strict=True):
            assert len(out.token_ids) == 5 and loop.agrees(row, out.token_ids, BOUND)

    def test_params_for_each_prompt(self, engine: lp.Engine, loop: PlainLoop) -> None:
        params = [greedy(n) for n in (3, 9, 1, 20, 5, 7)]
        outs = engine.generate([PROMPT] * 6, params)
        expected = loop.greedy(engine.model.tokenize(PROMPT), 20)
        assert [out.token_ids for out in outs] == [expected[: p.max_tokens] for p in params]
        with pytest.raises(ValueError, match="2 prompts and 3 params"):
            engine.generate([PROMPT] * 2, params[:3])

    def test_progress_off_a_terminal_shows_nothing(
        self, engine: lp.Engine, capfd: pytest.CaptureFixture[str]
    ) -> None:
        outs = engine.generate([PROMPT] * 3, greedy(3), progress=True)
        assert len(outs) == 3
        assert capfd.readouterr() == ("", "")

    def test_progress_on_a_terminal(self, engine: lp.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        """A real terminal, seen from its other end."""
        controller, terminal = os.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        shown = b""
        with open(terminal, "w") as err:
            monkeypatch.setattr("sys.stderr", err)
            engine.generate([PROMPT] * 3, greedy(3), progress=True)
            monkeypatch.undo()
            while b"3/3" not in shown and b"\n" not in shown:
                shown += os.read(controller, 100_000)
        os.close(controller)
        assert b"3/3" in shown

    def test_a_failing_prompt_of_a_list_is_named_and_the_others_are_kept(self, engine: lp.Engine) -> None:
        def fail(row: Any) -> None:
            raise ArithmeticError("no row for you")

        prompts = [PROMPT, "", PROMPT, PROMPT]
        params = [greedy(5), greedy(5), greedy(5, logits_processors=[fail]), greedy(5)]
        with pytest.raises(InvalidRequestError, match=r"^the prompt is empty.* \(prompt 1 of the list\)$"):
            engine.generate(prompts, params)
        outs = engine.generate(prompts, params, on_error="return")
        assert isinstance(outs[1], InvalidRequestError) and isinstance(outs[2], Exception)
        for out in (outs[0], outs[3]):
            assert isinstance(out, lp.Completion) and out.n_completion_tokens == 5
        assert isinstance(engine.generate("", on_error="return"), InvalidRequestError)
        with pytest.raises(ValueError, match="on_error"):
            engine.generate(PROMPT, on_error="keep")  # type: ignore[call-overload]

    def test_a_timeout_can_return_what_was_generated(self, make_engine: MakeEngine, clock: Clock) -> None:
        engine = make_engine(n_seq_max=1, max_queue=1)
        with Gate(engine) as gate:
            worker = Worker(
                lambda: engine.generate([PROMPT] * 3, greedy(20), timeout=60, on_timeout="return")
            )
            gate.wait()
            wait_until(lambda: n_waiting_threads(queue_of(engine)) == 1)
            clock.pass_time(60)
            wake_waiting_callers(engine)
            wait_until(lambda: any(request.cancelled for request in loop_of(engine).open))
            gate.open()
            outs = worker.result()
        assert [out.finish_reason for out in outs] == ["timeout"] * 3
        assert all(len(out.token_ids) < 20 for out in outs)
        assert queue_of(engine).n == 0
        assert engine.generate(PROMPT, greedy(3), timeout=60, on_timeout="return").finish_reason == "length"

    def test_completions_as_they_finish(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=2)
        read: list[int] = []

        def prompts() -> Iterator[str]:
            for i in range(40):
                read.append(i)
                yield "" if i == 7 else f"{PROMPT} {i}"

        seen: dict[int, Any] = {}
        for index, out in engine.iter_completed(prompts(), greedy(3), on_error="return"):
            seen[index] = out
            assert len(read) <= len(seen) + 4 + 1
        assert sorted(seen) == list(range(40))
        assert isinstance(seen.pop(7), InvalidRequestError)
        assert all(out.n_completion_tokens == 3 for out in seen.values())
        rest = engine.iter_completed([PROMPT] * 100, greedy(200))
        next(rest)
        rest.close()  # type: ignore[attr-defined]
        wait_until(lambda: engine.stats().n_active == engine.stats().n_queued == 0)
        with pytest.raises(InvalidRequestError, match=r"\(prompt 1 of the list\)"):
            list(engine.iter_completed([PROMPT, ""], greedy(3)))

    def test_completions_have_one_params_for_each_prompt(self, engine: lp.Engine) -> None:
        params_of = [greedy(3), greedy(1), greedy(2)]
        completions = dict(engine.iter_completed([PROMPT] * 2, params_of[1:]))
        assert [completions[i].n_completion_tokens for i in range(2)] == [1, 2]
        with pytest.raises(ValueError, match="params has 1 items"):
            list(engine.iter_completed([PROMPT] * 2, params_of[1:2]))
        with pytest.raises(ValueError, match="there are 2 prompts"):
            list(engine.iter_completed([PROMPT] * 2, params_of))

    def test_unknown_keywords_show_the_call_that_was_meant(self, engine: lp.Engine) -> None:
        with pytest.raises(TypeError, match=r"generate\(prompt, lp.SamplingParams\(max_tokens=3\)\)"):
            engine.generate("a", max_tokens=3)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match=r"stream\(\) has no option 'timout'; did you mean timeout"):
            engine.stream("a", timout=3)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"generate\(prompt, lp.SamplingParams\(max_tokens=100\)\)"):
            engine.generate("a", {"max_tokens": 3})  # type: ignore[call-overload]

    def test_what_a_completion_says_of_itself(self, engine: lp.Engine) -> None:
        out = engine.generate(PROMPT, greedy(7))
        assert (out.n_prompt_tokens, out.n_cached_tokens) == (len(engine.model.tokenize(PROMPT)), 0)
        assert (out.n_completion_tokens, out.cumulative_logprob) == (7, None)
        assert out.tokens_per_s == pytest.approx(7 / out.timings.total_s)
        assert f"{out.text!r}, n_tokens=7, 'length'" in repr(out)
        long = replace(out, choices=(replace(out.choices[0], text="a" * 1000), *out.choices))
        assert "n_choices=2" in repr(long) and len(repr(long)) < 160

    def test_repr_has_the_sizes_and_says_whether_it_is_closed(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_ctx=100, n_seq_max=3)
        for part in ("n_ctx=100", "n_seq_max=3", "n_cells=300", "tiny.gguf"):
            assert part in repr(engine)
        engine.close()
        assert "closed" in repr(engine)


class TestEnd:
    def test_end_of_the_context(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        """Prompt and answer have exactly ``n_ctx`` tokens, in both KV modes and whatever else runs."""
        for unified in (False, True):
            engine = make_engine(n_ctx=50, n_seq_max=3, n_ubatch=32, kv_unified=unified)
            for n_prompt in (1, 20, 48, 49):
                prompt = [1, *range(300, 299 + n_prompt)]
                outs = engine.generate([prompt] * 5, greedy(None))
                assert {len(out.token_ids) for out in outs} == {50 - n_prompt}
                assert {out.finish_reason for out in outs} == {"length"}
                if not unified:
                    assert outs[4].token_ids == loop.greedy(prompt, 50 - n_prompt)
            with pytest.raises(InvalidRequestError, match="50 tokens; n_ctx is 50"):
                engine.generate([1] * 50)

    def test_a_stop_token_ends_the_text_and_is_left_out(self, engine: lp.Engine, loop: PlainLoop) -> None:
        expected = loop.greedy(engine.model.tokenize(PROMPT), 30)
        for token in set(expected):
            out = engine.generate(PROMPT, greedy(30, stop_token_ids=(5, token)))
            assert (out.token_ids, out.finish_reason) == (expected[: expected.index(token)], "stop")

    def test_eos_ends_a_text_unless_it_is_ignored(self, engine: lp.Engine) -> None:
        eos = engine.model.eos
        assert eos is not None
        out = engine.generate(PROMPT, greedy(5, logit_bias={eos: 1000.0}, ignore_eos=False))
        assert (out.text, out.token_ids, out.finish_reason) == ("", [], "stop")
        out = engine.generate(PROMPT, greedy(5, logit_bias={eos: 1000.0}))
        assert (len(out.token_ids), out.finish_reason) == (5, "length")
        assert eos not in out.token_ids

    def test_stop_string_with_the_last_token(self, engine: lp.Engine) -> None:
        """It ended the text, whatever else ended with it; all ways of asking agree."""
        n_tried = 0
        outs = engine.generate([PROMPT] * 24, [greedy(n) for n in range(1, 25)])
        for n, (before, whole) in enumerate(itertools.pairwise(outs), 2):
            stop = whole.text[-3:]
            if whole.text.count(stop) > 1 or stop in before.text or "\N{REPLACEMENT CHARACTER}" in stop:
                continue
            n_tried += 1
            params = greedy(n, stop=stop)
            out = engine.generate(PROMPT, params)
            assert (out.text, out.token_ids, out.finish_reason) == (whole.text[:-3], whole.token_ids, "stop")
            assert list(engine.stream(PROMPT, params))[-1].finish_reason == "stop"
            with engine.start(PROMPT, params) as generation:
                assert [token.id for token in generation] == whole.token_ids
                assert generation.finish_reason == "stop"
        assert n_tried >= 5


class TestSampling:
    @same_rounding
    def test_same_seed_same_text(self, make_engine: MakeEngine) -> None:
        """Alone, among others, in another slot, in an engine with more slots."""
        params = lp.SamplingParams(max_tokens=40, temperature=1.2, seed=123)
        noise = [lp.SamplingParams(max_tokens=n, temperature=2.0) for n in (3, 11, 60)]
        alone = set()
        for n_seq_max in (1, 3, 8):
            engine = make_engine(n_seq_max=n_seq_max, n_ubatch=32)
            alone.add(engine.generate(PROMPT, params).text)
            for place in range(4):
                mixed = [*noise[:place], params, *noise[place:]]
                texts = [PROMPT if p is params else OTHER for p in mixed]
                alone.add(engine.generate(texts, mixed)[place].text)
        assert len(alone) == 1

    def test_random_seeds_are_told_and_repeat_their_texts(self, engine: lp.Engine) -> None:
        outs = engine.generate([PROMPT] * 8, lp.SamplingParams(max_tokens=20))
        assert len({out.seed for out in outs}) == 8
        assert len({out.text for out in outs}) > 1
        again = engine.generate([PROMPT] * 8, [lp.SamplingParams(max_tokens=20, seed=o.seed) for o in outs])
        assert [out.text for out in again] == [out.text for out in outs]

    @pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 1e-6}])
    def test_all_but_the_first_cut_off(
        self, engine: lp.Engine, loop: PlainLoop, options: dict[str, Any]
    ) -> None:
        params = lp.SamplingParams(max_tokens=20, ignore_eos=True, **{"temperature": 1.5, **options})
        expected = loop.greedy(engine.model.tokenize(PROMPT), 20)
        assert engine.generate(PROMPT, params).token_ids == expected

    def test_forbidden_tokens_never_come(self, engine: lp.Engine, loop: PlainLoop) -> None:
        """Each time the token that would have come first is forbidden; the plain loop with the same bans agrees."""
        banned: list[int] = []
        for _ in range(5):
            out = engine.generate(PROMPT, greedy(10, logit_bias=dict.fromkeys(banned, -math.inf)))
            assert not set(banned) & set(out.token_ids)
            banned.append(out.token_ids[0])
        assert len(set(banned)) == 5
        assert banned[0] == loop.greedy(engine.model.tokenize(PROMPT), 1)[0]

    def test_a_large_bias_forces_a_token(self, engine: lp.Engine) -> None:
        out = engine.generate(PROMPT, greedy(10, logit_bias={321: 1000.0}))
        assert out.token_ids == [321] * 10

    def test_bias_is_added(self, engine: lp.Engine, tiny: lp.Model) -> None:
        """Just enough for the second to come first, and just not."""
        from llamapipe.llama import Context, DecodeBatch

        ids = tiny.tokenize(PROMPT)
        with Context(tiny, n_ctx=64, n_threads=1) as context:
            context.decode(DecodeBatch.of_tokens(ids))
            logits = context.logits(len(ids) - 1)
        first, second = np.argsort(-logits)[:2].tolist()
        gap = float(logits[first] - logits[second])
        for bias, expected in ((gap + 0.01, second), (gap - 0.01, first)):
            assert engine.generate(PROMPT, greedy(1, logit_bias={second: bias})).token_ids == [expected]

    @pytest.mark.parametrize(
        "penalty", [{"presence_penalty": 1e3}, {"frequency_penalty": 1e3}, {"repeat_penalty": 1e6}]
    )
    def test_strong_penalties_allow_no_repeat_in_their_window(
        self, engine: lp.Engine, penalty: dict[str, float]
    ) -> None:
        """So strong that nothing comes again, within the window they look at; the prompt counts."""
        prompt = [1, *range(300, 340)]
        out = engine.generate(prompt, greedy(100, repeat_last_n=-1, **penalty))
        if "repeat_penalty" not in penalty:  # which only shrinks a logit to 0: a repeat may still be largest
            assert len({*prompt, *out.token_ids}) == 141
        out = engine.generate(prompt, greedy(100, repeat_last_n=5, **penalty))
        tokens = prompt + out.token_ids
        for i in range(len(prompt), len(tokens)):
            assert tokens[i] not in tokens[i - 5 : i]
        plain = engine.generate(prompt, greedy(100, repeat_last_n=0, **penalty))
        assert plain.token_ids == engine.generate(prompt, greedy(100)).token_ids

    def test_penalties_are_each_requests_own(self, engine: lp.Engine) -> None:
        params = [greedy(30, presence_penalty=1e3, repeat_last_n=-1), greedy(30)] * 4
        outs = engine.generate([PROMPT] * 8, params)
        assert len({tuple(out.token_ids) for out in outs}) == 2
        assert outs[0].token_ids == engine.generate(PROMPT, params[0]).token_ids

    @same_rounding
    def test_penalties_survive_preemption(self, make_engine: MakeEngine) -> None:
        """A stream that lost its slot goes on with the same counts and the same random numbers."""
        engine = make_engine(n_seq_max=1, n_ubatch=32)
        for params in (
            greedy(150, presence_penalty=0.7, frequency_penalty=0.3, repeat_last_n=30),
            lp.SamplingParams(max_tokens=150, seed=9, temperature=1.3, repeat_penalty=1.3, ignore_eos=True),
        ):
            alone = engine.generate(PROMPT, params).token_ids
            stream = engine.stream(PROMPT, params)
            tokens = [*next(stream).token_ids]
            engine.generate(OTHER, greedy(3))
            tokens += [token for delta in stream for token in delta.token_ids]
            assert tokens == alone
        assert engine.stats().n_preempted == 2


class TestCancel:
    @pytest.mark.device
    @pytest.mark.parametrize("n_steps", [0, 1, 2, 3, 4])
    def test_timeout_within_one_step(self, make_engine: MakeEngine, clock: Clock, n_steps: int) -> None:
        """The prompt takes three steps. The step that runs is the last one; those beside it go on."""
        engine = make_engine(n_batch=8, n_ubatch=8)
        prompt = engine.model.tokenize(PROMPT)[:20]
        with Gate(engine) as gate:
            call = Worker(engine.generate, [prompt, prompt], greedy(None), timeout=60)
            gate.wait()
            gate.step(n_steps)
            clock.pass_time(60)
            with pytest.raises(TimeoutError, match="60 s"):
                call.result()
            gate.open()
            stats = engine.stats()
            assert (stats.n_active, stats.n_queued) == (0, 0)
            assert stats.steps <= n_steps + 1

    def test_timeout_while_queued(self, make_engine: MakeEngine) -> None:
        """What never got a slot never gets a step."""
        engine = make_engine(n_seq_max=1)
        with Gate(engine) as gate:
            busy = Worker(engine.generate, OTHER, greedy(3))
            gate.wait()
            with pytest.raises(TimeoutError):
                engine.generate([PROMPT] * 3, greedy(None), timeout=0.01)
            gate.open()
            assert len(busy.result().token_ids) == 3
        stats = engine.stats()
        assert (stats.steps, stats.n_active, stats.n_queued) == (3, 0, 0)

    def test_a_timeout_of_zero_raises_at_once(self, engine: lp.Engine) -> None:
        with pytest.raises(TimeoutError):
            engine.generate(PROMPT, greedy(None), timeout=0)
        assert engine.stats().n_active == 0

    def test_error_in_the_middle_of_a_list(self, make_engine: MakeEngine) -> None:
        """A bad prompt among good ones: nothing is started."""
        engine = make_engine()
        with pytest.raises(ValueError, match="512"):
            engine.generate([[5], [512], [6]])
        with pytest.raises(InvalidRequestError, match="empty"):
            engine.generate([[5], []])
        assert engine.stats().n_requests == 0


class TestQueue:
    def test_a_full_queue_refuses_who_does_not_wait(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=1, max_queue=2)
        with Gate(engine) as gate:
            workers = [Worker(engine.generate, OTHER, greedy(2))]
            gate.wait()
            workers += [Worker(engine.generate, OTHER, greedy(2)) for _ in range(2)]
            wait_until(lambda: queue_of(engine).n == 2)
            with pytest.raises(QueueFullError, match=r"max_queue is 2 and the queue has 2"):
                engine.generate(PROMPT, greedy(2), block=False)
            with pytest.raises(QueueFullError):
                engine.stream(PROMPT, greedy(2), block=False)
            with pytest.raises(QueueFullError):
                engine.generate([PROMPT] * 3, greedy(2), block=False)
            with pytest.raises(TimeoutError, match="queue"):
                engine.generate(PROMPT, greedy(2), timeout=0.01)
            with pytest.raises(TimeoutError, match="queue"):
                engine.stream(PROMPT, greedy(2), timeout=0)
            waiting = Worker(engine.stream, PROMPT, greedy(2))
            gate.open()
            assert [len(out.token_ids) for out in all_results(workers)] == [2] * 3
            assert len(list(waiting.result())) == 2
        assert engine.stats().n_requests == 4
        assert len(engine.generate([PROMPT] * 2, greedy(2), block=False)) == 2
        assert queue_of(engine).n == 0

    def test_list_longer_than_the_queue(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        engine = make_engine(n_seq_max=2, max_queue=1, n_ubatch=32)
        outs = engine.generate([PROMPT] * 30, greedy(3))
        assert {tuple(out.token_ids) for out in outs} == {
            tuple(loop.greedy(engine.model.tokenize(PROMPT), 3))
        }
        assert queue_of(engine).n == 0

    def test_waiting_threads_all_get_in(self, make_engine: MakeEngine) -> None:
        """All get in sooner or later, though some of those that waited gave up."""
        engine = make_engine(n_seq_max=2, max_queue=1)
        expected = engine.generate(PROMPT, greedy(5)).token_ids

        def call(i: int) -> bool:
            try:
                out = engine.generate(PROMPT, greedy(5), timeout=0.001 if i % 3 == 0 else None)
            except TimeoutError:
                return i % 3 == 0
            return out.token_ids == expected

        assert all(all_results([Worker(call, i) for i in range(48)]))
        assert queue_of(engine).n == 0

    def test_who_gives_up_takes_nobodys_turn(self) -> None:
        """Room comes in the moment the first of two waiting threads gives up; the second must hear of it."""
        queue = QueueLimit(1)
        inside, leaving, staying = (Request([1]) for _ in range(3))
        queue.enter_at_once(inside)
        n_waiting = 0
        while not n_waiting:  # again when the machine was so slow that it gave up before it waited
            deadline = perf_counter() + 0.1
            first = Worker(queue.enter, leaving, deadline)
            while not n_waiting and first.is_alive():
                n_waiting = n_waiting_threads(queue)
        second = Worker(queue.enter, staying, None)
        wait_until(lambda: n_waiting_threads(queue) == 2)
        with queue._entering:  # keeps the first from trying again
            wait_until(lambda: perf_counter() > deadline + 0.01)
            queue.remove([inside])
        with contextlib.suppress(TimeoutError):
            first.result()
            queue.remove([leaving])
        second.result()

    def test_generations_do_not_count(self, make_engine: MakeEngine) -> None:
        """They wait for their callers, not in the queue; the limit stays what it is."""
        engine = make_engine(n_seq_max=1, max_queue=1)
        generations = [engine.start(PROMPT, greedy(2)) for _ in range(5)]
        engine.stats()
        assert "n_queued=0" in repr(engine)
        with Gate(engine) as gate:
            running = Worker(engine.generate, OTHER, greedy(2))
            gate.wait()
            queued = Worker(engine.generate, OTHER, greedy(2))
            wait_until(lambda: queue_of(engine).n == 1)
            with pytest.raises(QueueFullError):
                engine.generate(OTHER, block=False)
            gate.open()
            all_results([running, queued])
        for generation in generations:
            generation.cancel()


class TestClose:
    def test_close_drains(self, make_engine: MakeEngine) -> None:
        """What was asked for before comes, what waits in the queue too; what comes later is refused."""
        engine = make_engine(n_seq_max=2)
        with Gate(engine) as gate:
            workers = [Worker(engine.generate, PROMPT, greedy(9)) for _ in range(6)]
            gate.wait()
            wait_until(lambda: queue_of(engine).n + inbox_of(engine).qsize() >= 4)
            closing = Worker(engine.close)
            wait_until(lambda: engine.closed)
            with pytest.raises(EngineClosedError, match="closed"):
                engine.generate(PROMPT)
            gate.open()
            closing.result()
        outs = []
        for worker in workers:
            try:
                outs.append(worker.result())
            except EngineClosedError:  # it had not come far enough when the engine closed
                continue
        assert len(outs) >= 4
        assert [out.finish_reason for out in outs] == ["length"] * len(outs)
        assert len({out.text for out in outs}) == 1

    def test_close_without_draining_cancels(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=2)
        with Gate(engine) as gate:
            call = Worker(engine.generate, [PROMPT] * 6, greedy(None))
            gate.wait()
            wait_until(lambda: inbox_of(engine).qsize() + queue_of(engine).n >= 4)
            gate.step(5)
            closing = Worker(engine.close, False)
            wait_until(lambda: engine.closed)
            n_steps = gate.n_steps
            gate.open()
            closing.result()
            outs = call.result()
        assert {out.finish_reason for out in outs} == {"cancelled"}
        assert engine.stats().steps == n_steps + 1
        assert 0 < max(len(out.token_ids) for out in outs) <= n_steps + 1

    def test_frees_the_context_and_ends_the_thread(self, tiny: lp.Model) -> None:
        before = threading.active_count()
        engine = lp.Engine(tiny, n_ctx=64, n_threads=1)
        assert threading.active_count() == before + 1
        engine.generate(PROMPT, greedy(2))
        with pytest.raises(EngineClosedError, match="the model is in use; first close"):
            tiny.close()
        engine.close()
        engine.close()
        engine.close(drain=False)
        assert threading.active_count() == before
        assert id(engine) not in children_of(tiny)
        assert engine.stats().n_completion_tokens == 2
        engine.check_integrity()
        for call in (engine.generate, engine.stream, engine.start):
            with pytest.raises(EngineClosedError):
                call(PROMPT)

    def test_leaving_with_drains(self, tiny: lp.Model) -> None:
        with lp.Engine(tiny, n_ctx=64, n_threads=1) as engine:
            call = submitted(engine, engine.generate, PROMPT, greedy(20))
        assert call.result().finish_reason == "length"
        assert engine.closed

    def test_with_left_by_an_exception(self, tiny: lp.Model) -> None:
        """Nothing is waited for."""
        engine = lp.Engine(tiny, n_ctx=512, n_threads=1)
        gate = Gate(engine)
        calls = []

        def leave() -> None:
            with engine, gate:
                calls.append(submitted(engine, engine.generate, [PROMPT] * 2, greedy(None)))
                gate.wait()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            leave()
        assert engine.closed
        assert {out.finish_reason for out in calls[0].result()} <= {"cancelled", "length"}

    def test_from_many_threads_while_busy(self, make_engine: MakeEngine) -> None:
        """Each caller gets its result, a part of it, or EngineClosedError; every closer returns."""
        rng = random.Random(2)
        for _ in range(15):
            engine = make_engine(n_seq_max=2, max_queue=3)
            barrier = threading.Barrier(9)

            def call(engine: lp.Engine = engine, barrier: threading.Barrier = barrier) -> str:
                barrier.wait()
                try:
                    while True:
                        reason = engine.generate(PROMPT, greedy(5)).finish_reason
                        if reason == "cancelled":
                            return reason
                        assert reason == "length"
                except EngineClosedError:
                    return "closed"

            def close(drain: bool, engine: lp.Engine = engine, barrier: threading.Barrier = barrier) -> str:
                barrier.wait()
                engine.close(drain)
                return "closed"

            workers = [Worker(call) for _ in range(6)]
            workers += [Worker(close, rng.random() < 0.5) for _ in range(3)]
            assert set(all_results(workers)) <= {"closed", "cancelled"}
            engine.check_integrity()

    def test_counters_can_be_read_while_it_closes(self, engine: lp.Engine) -> None:
        with Gate(engine) as gate:
            call = Worker(engine.generate, PROMPT, greedy(20))
            gate.wait()
            closing = Worker(engine.close)
            wait_until(lambda: engine.closed)
            readers = [Worker(engine.stats) for _ in range(4)]
            gate.open()
            assert {stats.steps for stats in all_results(readers)} == {20}
            assert len(call.result().token_ids) == 20
            closing.result()

    def test_dropped_without_close_warns(self, tiny: lp.Model) -> None:
        engine = lp.Engine(tiny, n_ctx=64, n_threads=1)
        engine_thread = thread_of(engine)
        with pytest.warns(ResourceWarning, match="never closed"):
            del engine
        engine_thread.close(False)


class TestSharing:
    @pytest.mark.device
    def test_engines_of_one_model_at_once(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        engines = [make_engine(n_seq_max=n, n_ubatch=32) for n in (1, 2, 4)]
        workers = [Worker(e.generate, [PROMPT, OTHER] * 3, greedy(20)) for e in engines for _ in range(2)]
        expected = [loop.greedy(engines[0].model.tokenize(text), 20) for text in (PROMPT, OTHER)]
        for outs in all_results(workers):
            assert [out.token_ids for out in outs] == expected * 3

    @pytest.mark.device
    def test_by_default_each_sequence_has_a_full_context(
        self, demo: lp.Model, make_engine: MakeEngine
    ) -> None:
        engine = make_engine(demo, n_ctx=None, n_threads=None)
        assert (engine.n_ctx, engine.n_seq_max, engine.n_cells) == (demo.n_ctx_train, 8, demo.n_ctx_train * 8)
        outs = engine.generate([PROMPT] * 3, greedy(10))
        assert len({out.text for out in outs}) == 1

    @pytest.mark.device
    def test_one_slot_gives_the_text_of_a_plain_loop(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        """One slot: the baseline."""
        engine = make_engine(n_seq_max=1, n_ubatch=32, batch_window_us=0)
        for _ in range(3):
            assert engine.generate(PROMPT, greedy(9)).token_ids == loop.greedy(
                engine.model.tokenize(PROMPT), 9
            )

    def test_a_list_shares_every_step(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=3, prefix_cache=False)
        engine.generate([PROMPT] * 3, greedy(7))
        assert engine.stats().steps == 7

    def test_requests_that_come_together_share_steps(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=4, prefix_cache=False)
        with held(engine):
            workers = [Worker(engine.generate, PROMPT, greedy(10)) for _ in range(4)]
            wait_until(lambda: inbox_of(engine).qsize() >= 4)
        all_results(workers)
        assert engine.stats().steps == 10

    def test_idle_engine_waits_a_moment_for_company(self, make_engine: MakeEngine) -> None:
        """A second request that comes within the window shares every step with the one that woke the engine."""
        n_steps: list[int] = []
        while len(n_steps) < 3 and 20 not in n_steps:  # more than once only when the machine stands still
            engine = make_engine(n_seq_max=4, batch_window_us=1_000_000, prefix_cache=False)
            n_known = partial(n_requests_of, engine)  # stats() would wake it before
            first = Worker(engine.generate, PROMPT, greedy(20))
            wait_until(n_known)
            second = Worker(engine.generate, PROMPT, greedy(20))
            assert len({out.text for out in all_results([first, second])}) == 1
            n_steps.append(engine.stats().steps)
        assert 20 in n_steps
