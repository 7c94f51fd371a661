"""Scores, log-probabilities and perplexity against numpy float64 on rows of a plain context."""

from __future__ import annotations

import asyncio
import math
import pickle
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.chains import Chain
from support.control import Worker, held, wait_until
from support.gguf_models import BROKEN, damaged_model
from support.inside import inbox_of

import llamapipe as lp
from llamapipe.errors import DecodeError, EngineClosedError, InvalidRequestError
from llamapipe.llama import Context, DecodeBatch

MakeEngine = Callable[..., lp.Engine]
Logprobs = npt.NDArray[np.float64]

N_CTX = 256
# A step of several sequences is rounded a little otherwise than one alone; the arithmetic itself has its own test.
BOUND = 0.02


class Rows:
    """Log-probabilities of every next token, from all rows of one sequence alone."""

    def __init__(self, model: lp.Model) -> None:
        self.model = model
        self._context = Context(
            model, n_ctx=N_CTX, n_batch=N_CTX, n_ubatch=32, n_outputs_max=N_CTX, n_threads=1
        )
        self._known: dict[tuple[int, ...], Logprobs] = {}

    def close(self) -> None:
        self._context.close()

    def __call__(self, tokens: Sequence[int]) -> Logprobs:
        """(n_tokens, n_vocab): row i is of what follows token i."""
        key = tuple(tokens)
        if key not in self._known:
            n = len(key)
            self._context.clear()
            batch = DecodeBatch(np.array(key), np.arange(n), np.zeros(n, int), np.ones(n, bool))
            self._context.decode(batch)
            rows = np.stack([self._context.logits(i) for i in range(n)]).astype(np.float64)
            top = rows.max(axis=1, keepdims=True)
            self._known[key] = rows - top - np.log(np.exp(rows - top).sum(axis=1, keepdims=True))
        return self._known[key]

    def of(self, context: Sequence[int], continuation: Sequence[int]) -> Logprobs:
        """Of each token of the continuation."""
        rows = self([*context, *continuation])
        first = len(context) - 1
        return np.array([rows[first + i, token] for i, token in enumerate(continuation)])

    def assert_is(self, score: lp.Score, context: Sequence[int], continuation: Sequence[int]) -> None:
        expected = self.of(context, continuation)
        assert score.token_ids.tolist() == list(continuation)
        assert (score.logprobs.dtype.name, score.token_ids.dtype.name) == ("float32", "int32")
        np.testing.assert_allclose(score.logprobs, expected, atol=BOUND)
        assert score.total == pytest.approx(float(score.logprobs.astype(np.float64).sum()))
        rows = self([*context, *continuation])[len(context) - 1 : -1]
        short = rows.max(axis=1) - expected
        if short.max() > 2 * BOUND:
            assert not score.is_greedy
        elif np.sort(rows, axis=1)[:, -2].max() < rows.max() and short.max() == 0 and _clear(rows):
            assert score.is_greedy


def _clear(rows: Logprobs) -> bool:
    best = np.sort(rows, axis=1)[:, -2:]
    return bool((best[:, 1] - best[:, 0] > 2 * BOUND).all())


@pytest.fixture(scope="module")
def rows(tiny: lp.Model) -> Iterator[Rows]:
    rows = Rows(tiny)
    yield rows
    rows.close()


def tokens_of(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(n)]


class TestScore:
    @pytest.mark.parametrize("graph_sampling", ["off", "on"])
    @pytest.mark.parametrize("unified", [False, True])
    @pytest.mark.parametrize("n_slots", [1, 4])
    def test_scores_of_any_shape_are_those_of_the_rows(
        self, make_engine: MakeEngine, rows: Rows, unified: bool, n_slots: int, graph_sampling: str
    ) -> None:
        engine = make_engine(
            n_seq_max=n_slots, n_ubatch=32, kv_unified=unified, graph_sampling=graph_sampling
        )
        rng = random.Random(n_slots)
        jobs = []
        for i in range(25):
            context = tokens_of(rng.choice([1, 2, 30, 100]), i % 17)
            jobs.append(
                (
                    context,
                    [tokens_of(rng.choice([1, 1, 2, 5, 60]), 100 * i + j) for j in range(rng.randint(1, 4))],
                )
            )
        scores = engine.score([c for c, _ in jobs], [list(c) for _, c in jobs])
        for (context, continuations), group in zip(jobs, scores, strict=True):
            assert len(group) == len(continuations)
            for continuation, score in zip(continuations, group, strict=True):
                rows.assert_is(score, context, continuation)

    def test_what_is_most_probable_is_greedy(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        context = tokens_of(20, 1)
        greedy = engine.generate(
            context, lp.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        ).token_ids
        assert engine.score(context, greedy).is_greedy
        assert not engine.score(context, [*greedy[:-1], (greedy[-1] + 1) % 500]).is_greedy

    def test_the_shapes_of_answers(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        score = engine.score([5, 6], [7])
        assert isinstance(score, lp.Score)
        assert engine.score([5, 6], [[7]])[0].logprobs == score.logprobs
        assert [s.token_ids.tolist() for s in engine.score([5, 6], [[7], [8, 9]])] == [[7], [8, 9]]
        assert [s.token_ids.tolist() for s in engine.score([[5], [6]], [[7], [8]])] == [[7], [8]]
        nested = engine.score([[5], [6], [5]], [[[7], [8]], [9], [[7]]])
        assert isinstance(nested[0], list) and isinstance(nested[1], lp.Score) and isinstance(nested[2], list)
        assert [s.token_ids.tolist() for s in nested[0]] == [[7], [8]]
        assert nested[1].token_ids.tolist() == [9]
        assert nested[2][0].logprobs.tolist() == nested[0][0].logprobs.tolist()

    def test_text_is_read_as_one(self, make_engine: MakeEngine, demo: lp.Model) -> None:
        engine = make_engine(demo)
        whole = demo.tokenize("What does a cow say? A cow says moo.")
        n = len(demo.tokenize("What does a cow say?"))
        score = engine.score("What does a cow say?", " A cow says moo.")
        assert score.token_ids.tolist() == whole[n:]
        best, *others = engine.score("What does a cow say? A cow says", [" moo", " meow", " woof"])
        assert best.total > max(s.total for s in others)
        assert best.is_greedy

    def test_a_prompt_that_ends_with_a_space(self, make_engine: MakeEngine, demo: lp.Model) -> None:
        """The space belongs to the first token of the answer, for all answers of the prompt."""
        engine = make_engine(demo, n_ctx=128, n_seq_max=4)
        texts = ["the", "a cat", "5"]
        expected = engine.score("Once upon a time:", [f" {text}" for text in texts])
        for spaced, score in zip(engine.score("Once upon a time: ", texts), expected, strict=True):
            assert demo.detokenize(spaced.token_ids) == demo.detokenize(score.token_ids)
            assert abs(spaced.total - score.total) < 0.01
        with pytest.raises(InvalidRequestError, match="adds no token"):
            engine.score("Once upon a time: ", ["the", ""])

    def test_answers_without_the_space_of_running_text(
        self, make_engine: MakeEngine, demo: lp.Model, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = make_engine(demo, n_ctx=128, n_seq_max=4)
        others = [("Is it: ", ["oui", "non"]), ("Is it:", [" oui", " non"]), ("Is it", ["oui", "non"])]
        others += [("Is it:", ["\noui", "\nnon"]), ("https:", ["//oui", "//non"]), ("Is it:", ["好", "不"])]
        for prompt, answers in others:
            engine.score(prompt, answers)
        engine.score("Is it:", "oui")
        assert not caplog.messages
        for _ in range(3):
            engine.score("Is it:", ["oui", "non"])
        assert [
            message for message in caplog.messages if "give ' oui' in place of 'oui'" in message
        ] == caplog.messages
        assert len(caplog.messages) == 1

    def test_a_context_is_computed_once(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        context = tokens_of(100, 3)
        before = engine.stats().n_prompt_tokens
        engine.score([context] * 4, [[7], [8], [9, 10, 11], [12, 13]])
        assert engine.stats().n_prompt_tokens - before == 100 + 2 + 1

    @pytest.mark.parametrize("n_context", [5, 90])
    def test_many_continuations_share_steps(
        self, make_engine: MakeEngine, rows: Rows, n_context: int
    ) -> None:
        """They are divided among requests, which copy the cells of a long context."""
        context = tokens_of(n_context, 3)
        continuations = [tokens_of(1 + i % 3, 200 + i) for i in range(90)]
        steps, prompt_tokens = {}, {}
        for shares in (True, False):
            engine = make_engine(n_seq_max=8, prefix_cache=shares)
            for continuation, score in zip(continuations, engine.score(context, continuations), strict=True):
                rows.assert_is(score, context, continuation)
            stats = engine.stats()
            steps[shares], prompt_tokens[shares] = stats.steps, stats.n_prompt_tokens
        assert steps[True] < 0.5 * steps[False]
        n_requests = 4  # half of the slots
        most = n_context if n_context < 16 else 4  # a short one is computed again, of a long one its last row
        assert prompt_tokens[True] - prompt_tokens[False] <= n_requests * most

    @pytest.mark.parametrize("options", [{"n_cells": 300}, {"max_queue": 2}])
    def test_continuations_stay_together(self, make_engine: MakeEngine, options: dict[str, int]) -> None:
        """Where cells are scarce, divided requests would compute the context again; a queue would refuse them."""
        engine = make_engine(n_seq_max=8, **options)
        before = engine.stats().n_prompt_tokens
        engine.score(tokens_of(90, 3), [tokens_of(3, 200 + i) for i in range(40)])
        assert engine.stats().n_prompt_tokens - before == 90 + 40 * 2

    def test_only_asked_rows_are_outputs(self, make_engine: MakeEngine) -> None:
        """A row costs a product with the whole vocabulary: the context has one."""
        engine = make_engine(trace=True)
        engine.score(tokens_of(100, 3), tokens_of(20, 4))
        spans = [s for s in engine.trace.spans() if s.stage == "launch"]
        assert sum(s.n_rows for s in spans) == 20

    def test_one_float_a_token_comes_from_the_graph(self, make_engine: MakeEngine, rows: Rows) -> None:
        """Rows with one target are scored there; a row that is asked for several is looked at."""
        engine = make_engine(n_ubatch=32, graph_sampling="on")
        context, continuation = tokens_of(40, 8), tokens_of(60, 9)
        rows.assert_is(engine.score(context, continuation), context, continuation)
        first, second = engine.score(context, [continuation[:5], continuation[5:9]])
        rows.assert_is(first, context, continuation[:5])
        rows.assert_is(second, context, continuation[5:9])

    def test_streams_beside_a_score_change_nothing(self, make_engine: MakeEngine, rows: Rows) -> None:
        engine = make_engine(n_seq_max=3, n_ubatch=32)
        streams = [
            engine.stream(tokens_of(5, i), lp.SamplingParams(max_tokens=200, ignore_eos=True))
            for i in range(2)
        ]
        context, continuation = tokens_of(90, 8), tokens_of(70, 9)
        for stream in streams:
            next(stream)
        rows.assert_is(engine.score(context, continuation), context, continuation)
        for stream in streams:
            assert sum(len(delta.token_ids) for delta in stream) == 199

    def test_when_cells_run_out(self, make_engine: MakeEngine, rows: Rows) -> None:
        """Scores are computed again after a preemption, and each row still counts once."""
        engine = make_engine(n_seq_max=4, n_ubatch=32, n_cells=256)
        contexts = [tokens_of(90, i) for i in range(6)]
        continuations = [tokens_of(50, 50 + i) for i in range(6)]
        for context, continuation, score in zip(
            contexts, continuations, engine.score(contexts, continuations), strict=True
        ):
            rows.assert_is(score, context, continuation)

    def test_a_recurrent_model(self, make_engine: MakeEngine, recurrent: lp.Model) -> None:
        engine = make_engine(recurrent, n_seq_max=2)
        context, continuations = [5, 6, 7, 8], [[9, 10, 11], [12], [13, 14]]
        together = engine.score(context, continuations)
        for continuation, score in zip(continuations, together, strict=True):
            np.testing.assert_allclose(
                score.logprobs, engine.score(context, continuation).logprobs, atol=BOUND
            )

    def test_a_whole_context(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        assert len(engine.score(tokens_of(200, 1), tokens_of(57, 2)).logprobs) == 57
        with pytest.raises(
            InvalidRequestError, match="prompt and continuation have 258 tokens; n_ctx is 256"
        ):
            engine.score(tokens_of(200, 1), tokens_of(58, 2))

    def test_wrong_arguments_are_refused(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        anything: Any = engine
        for arguments, error, message in (
            (([5], []), InvalidRequestError, "the continuation is empty"),
            (([5], [[]]), InvalidRequestError, "adds no token"),
            (("a", ""), InvalidRequestError, "adds no token"),
            (([5], [512]), ValueError, "512"),
            (([-1], [5]), ValueError, "-1"),
            (([5], 5), TypeError, "continuation must be a str"),
            ((None, [5]), TypeError, "prompt must be a str"),
            (([[5], [6]], [[5]]), ValueError, "2 prompts and 1 continuations"),
            ((["a", "b"], "ab"), TypeError, "prompt is a list of prompts"),
            (([5], [5, "a"]), TypeError, "mixes token ids"),
        ):
            with pytest.raises(error, match=message):
                anything.score(*arguments)
        engine.close()
        with pytest.raises(EngineClosedError):
            engine.score([5], [6])

    def test_nothing_before_it(self, make_engine: MakeEngine, rows: Rows) -> None:
        engine = make_engine(n_ubatch=32)
        bos = engine.model.bos
        assert bos is not None
        rows.assert_is(engine.score([], [5, 6, 7]), [bos], [5, 6, 7])

    def test_the_timeout_counts_what_is_prepared(self, make_engine: MakeEngine) -> None:
        """Long texts are tokenized in threads, and these are taken: each call ends in its time."""
        engine, opened = make_engine(), threading.Event()

        async def main() -> None:
            taken = [asyncio.create_task(engine._long_work.run(opened.wait, 60)) for _ in range(64)]
            long = "a " * 10_000
            try:
                for call in (
                    lambda: engine.ascore(long, "b", timeout=0.05),
                    lambda: engine.ascore([long], [["b", "c"]], timeout=0.05),
                    lambda: engine.aperplexity(long, timeout=0.05),
                ):
                    with pytest.raises(TimeoutError, match=r"timeout of 0\.05 s"):
                        await asyncio.wait_for(call(), 10)
            finally:
                opened.set()
            await asyncio.gather(*taken)

        asyncio.run(main())

    def test_a_timeout_leaves_nothing_behind(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        with pytest.raises(TimeoutError):
            engine.score(
                [tokens_of(200, i) for i in range(50)], [tokens_of(50, i) for i in range(50)], timeout=0
            )
        assert len(engine.score([5], [6]).logprobs) == 1

    @pytest.mark.parametrize("depth", [1, 2])
    def test_closing_early_never_gives_a_part(self, make_engine: MakeEngine, depth: int) -> None:
        engine = make_engine(pipeline_depth=depth)
        with held(engine):
            asked = [
                Worker(
                    engine.score,
                    [tokens_of(200, i) for i in range(20)],
                    [tokens_of(50, i) for i in range(20)],
                ),
                Worker(engine.perplexity, tokens_of(2000, 1), 200),
            ]
            wait_until(lambda: inbox_of(engine).qsize() >= 2)
        engine.close(drain=False)
        for worker in asked:
            with pytest.raises(EngineClosedError, match="closed before the text was scored"):
                worker.result()

    def test_damaged_weights_are_no_score(self, tmp_path: Path) -> None:
        with (
            lp.Model(damaged_model(tmp_path / "damaged.gguf")) as model,
            lp.Engine(model, n_ctx=64) as engine,
        ):
            with pytest.raises(DecodeError, match="not finite"):
                engine.score([5, BROKEN], [6, 7])
            assert np.isfinite(engine.score([5], [6, 7]).logprobs).all()

    def test_tasks_get_the_same_scores(self, make_engine: MakeEngine) -> None:
        engine = make_engine()

        async def both() -> list[Any]:
            asked = engine.ascore([5, 6], [7, 8]), engine.ascore([5, 6], [[9]], timeout=60)
            return list(await asyncio.gather(*asked))

        score, (other,) = asyncio.run(both())
        # ggml rounds products of floats by the number of rows.
        assert score.logprobs.tolist() == pytest.approx(
            engine.score([5, 6], [7, 8]).logprobs.tolist(), abs=1e-4
        )
        assert other.logprobs.tolist() == pytest.approx(engine.score([5, 6], [9]).logprobs.tolist(), abs=1e-4)


class TestTokens:
    def test_every_token_but_the_first(self, make_engine: MakeEngine, rows: Rows) -> None:
        engine = make_engine(n_ubatch=32)
        several = [tokens_of(n, n) for n in (2, 3, 40, 200)]
        for tokens, score in zip(several, engine.score_tokens(several), strict=True):
            rows.assert_is(score, tokens[:1], tokens[1:])
        rows.assert_is(engine.score_tokens(several[2]), several[2][:1], several[2][1:])

    def test_wrong_arguments_are_refused(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        anything: Any = engine
        for tokens, error, message in (
            ([5], InvalidRequestError, "at least two"),
            ([], InvalidRequestError, "empty"),
            ("ab", TypeError, "must be token ids"),
            (["a", "b"], TypeError, "tokens"),
            ([[5, 6], 7], TypeError, "mixes token ids"),
            (tokens_of(258, 1), InvalidRequestError, "n_ctx is 256"),
        ):
            with pytest.raises(error, match=message):
                anything.score_tokens(tokens)


class TestPerplexity:
    def expected(self, rows: Rows, tokens: Sequence[int], window: int) -> float:
        """llama.cpp's tool: its loop, on the rows of each window alone."""
        bos = rows.model.bos
        assert bos is not None
        total, count = 0.0, 0
        for start in range(0, len(tokens) // window * window, window):
            part = [bos, *tokens[start + 1 : start + window]]
            logprobs = rows(part)
            for i in range(window // 2, window - 1):
                total -= float(logprobs[i, part[i + 1]])
                count += 1
        return math.exp(total / count)

    @pytest.mark.parametrize("window", [4, 5, 32, 64, 256])
    def test_is_that_of_the_tool(self, make_engine: MakeEngine, rows: Rows, window: int) -> None:
        assert rows.model.vocab.add_bos
        engine = make_engine(n_ubatch=32)
        tokens = tokens_of(300, 5)
        perplexity = engine.perplexity(tokens, window)
        assert perplexity == pytest.approx(self.expected(rows, tokens, window), rel=1e-3)
        if window == 256:
            assert engine.perplexity(tokens, engine.n_ctx) == perplexity

    @pytest.mark.parametrize("n", [2, 40, 257, 258, 700])
    def test_of_every_token(self, make_engine: MakeEngine, rows: Rows, n: int) -> None:
        """By default each token but the first counts once, given as much of the text before it as fits."""
        engine = make_engine(n_ubatch=32)
        tokens = tokens_of(n, 7)
        perplexity = engine.perplexity(tokens)
        if n < 100:
            every = rows(tokens)
            total = sum(float(every[i - 1, tokens[i]]) for i in range(1, n))
            assert perplexity == pytest.approx(math.exp(-total / (n - 1)), rel=1e-3)
        elif n == 257:
            assert perplexity == pytest.approx(math.exp(-engine.score_tokens(tokens).total / 256), rel=1e-6)
        else:
            pairs = [(tokens[:1], tokens[1:257])]
            pairs += [
                (tokens[begin - 128 : begin], tokens[begin : begin + 129]) for begin in range(257, n, 129)
            ]
            assert sum(len(continuation) for _, continuation in pairs) == n - 1
            scores = [engine.score(context, continuation) for context, continuation in pairs]
            total = sum(score.total for score in scores)
            assert perplexity == pytest.approx(math.exp(-total / (n - 1)), rel=1e-6)

    def test_a_text_counts_as_its_tokens(self, make_engine: MakeEngine, demo: lp.Model) -> None:
        engine = make_engine(demo)
        text = "Once upon a time, there was a little fox."
        assert engine.perplexity(text) == engine.perplexity(demo.tokenize(text))
        assert engine.perplexity(text) < engine.perplexity("fox little upon a there was, Once a time.")

    @pytest.mark.parametrize("n_ctx", [1, 2, 3])
    def test_a_context_too_small_for_a_window(self, make_engine: MakeEngine, n_ctx: int) -> None:
        with pytest.raises(InvalidRequestError, match=f"n_ctx is {n_ctx} and a window needs 4 tokens"):
            make_engine(n_ctx=n_ctx).perplexity(tokens_of(100, 1), 4)

    def test_wrong_arguments_are_refused(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        with pytest.raises(InvalidRequestError, match="there are 100 tokens and a window has 256"):
            engine.perplexity(tokens_of(100, 1), 256)
        with pytest.raises(InvalidRequestError, match="the text has 1 tokens; perplexity needs at least 2"):
            engine.perplexity([5])
        with pytest.raises(ValueError, match="n_window"):
            engine.perplexity(tokens_of(300, 1), 257)


class TestLogprobs:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_of_generated_tokens(self, make_engine: MakeEngine, rows: Rows, temperature: float) -> None:
        """The model's own, whatever is done to them before the draw."""
        engine = make_engine(n_seq_max=3, n_ubatch=32)
        params = lp.SamplingParams(
            temperature=temperature,
            logprobs=4,
            max_tokens=20,
            seed=3,
            logit_bias={9: 3.0},
            repeat_penalty=1.2,
        )
        prompts = [tokens_of(n, n) for n in (3, 40, 70, 9)]
        for prompt, out in zip(prompts, engine.generate(prompts, params), strict=True):
            assert out.logprobs is not None and len(out.logprobs) == len(out.token_ids)
            every = rows([*prompt, *out.token_ids])
            for i, (token, entry) in enumerate(zip(out.token_ids, out.logprobs, strict=True)):
                row = every[len(prompt) - 1 + i]
                assert entry.id == token
                assert entry.logprob == pytest.approx(row[token], abs=BOUND)
                assert [p for _, p in entry.top] == pytest.approx(np.sort(row)[::-1][:4].tolist(), abs=BOUND)
                assert [row[t] for t, _ in entry.top] == pytest.approx([p for _, p in entry.top], abs=BOUND)

    def test_those_of_prompts_are_those_of_the_rows(self, make_engine: MakeEngine, rows: Rows) -> None:
        engine = make_engine(n_seq_max=3, n_ubatch=32)
        prompts = [tokens_of(n, n) for n in (1, 2, 33, 34, 150, 255)]
        params = lp.SamplingParams(prompt_logprobs=2, max_tokens=3, temperature=0, ignore_eos=True)
        plain = lp.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        for prompt, out, alike in zip(
            prompts, engine.generate(prompts, params), engine.generate(prompts, plain), strict=True
        ):
            assert out.token_ids == alike.token_ids
            assert out.logprobs is None and out.prompt_logprobs is not None
            assert [p.id for p in out.prompt_logprobs] == prompt[1:]
            every = rows(prompt)
            for i, entry in enumerate(out.prompt_logprobs):
                assert entry.logprob == pytest.approx(every[i, entry.id], abs=BOUND)
                assert [p for _, p in entry.top] == pytest.approx(
                    np.sort(every[i])[::-1][:2].tolist(), abs=BOUND
                )

    def test_none_of_the_most_probable(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        out = engine.generate(
            [5, 6], lp.SamplingParams(logprobs=0, prompt_logprobs=0, max_tokens=4, ignore_eos=True)
        )
        assert out.logprobs is not None and out.prompt_logprobs is not None
        assert [len(out.logprobs), len(out.prompt_logprobs)] == [4, 1]
        assert {p.top for p in (*out.logprobs, *out.prompt_logprobs)} == {()}

    def test_entries_have_the_text_of_their_tokens(self, make_engine: MakeEngine, demo: lp.Model) -> None:
        out = make_engine(demo).generate(
            "1, 2, 3,", lp.SamplingParams(logprobs=2, prompt_logprobs=1, max_tokens=6, temperature=0)
        )
        assert out.logprobs is not None and out.prompt_logprobs is not None
        assert "".join(entry.text for entry in out.logprobs) == out.text
        for entry in (*out.logprobs, *out.prompt_logprobs):
            assert entry.piece == demo.piece(entry.id)
            assert [top.piece for top in entry.top] == [demo.piece(top.id) for top in entry.top]
            assert dict(entry.top)[entry.top[0].id] == entry.top[0].logprob
        assert out.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in out.logprobs))
        copy = pickle.loads(pickle.dumps(out))
        assert copy == out and copy.logprobs[0].text == out.logprobs[0].text
        assert repr(out.logprobs[0].text) in repr(out.logprobs[0])

    def test_the_whole_vocabulary(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        out = engine.generate([5, 6], lp.SamplingParams(logprobs=512, max_tokens=2, ignore_eos=True))
        assert out.logprobs is not None
        for entry in out.logprobs:
            assert math.fsum(math.exp(p) for _, p in entry.top) == pytest.approx(1, abs=1e-5)
        with pytest.raises(InvalidRequestError, match="logprobs is 513; this vocabulary has 512 tokens"):
            engine.generate([5, 6], lp.SamplingParams(logprobs=513))

    def test_streams_and_generations(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        params = lp.SamplingParams(logprobs=1, max_tokens=10, seed=5, ignore_eos=True)
        out = engine.generate([5, 6], params)
        deltas = list(engine.stream([5, 6], params))
        assert [p for delta in deltas for p in delta.logprobs or ()] == out.logprobs
        with engine.start([5, 6], params) as generation:
            assert [(t.id, t.logprob, t.top) for t in generation] == out.logprobs

    def test_an_end_adds_none(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        eos = engine.model.eos
        assert eos is not None
        params = lp.SamplingParams(temperature=0, logit_bias={eos: 1000.0}, logprobs=1)
        assert engine.generate([5, 6], params).logprobs == []
        assert list(engine.stream([5, 6], params)) == [lp.Delta("", (), (), "stop")]

    def test_each_gets_as_many_as_it_asked_for(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        params = [
            lp.SamplingParams(prompt_logprobs=k, logprobs=k, max_tokens=3, ignore_eos=True) for k in (1, 5, 0)
        ]
        for k, out in zip((1, 5, 0), engine.generate([tokens_of(20, 1)] * 3, params), strict=True):
            assert out.prompt_logprobs is not None and out.logprobs is not None
            assert {len(p.top) for p in (*out.prompt_logprobs, *out.logprobs)} == {k}

    def test_a_prompt_given_up_before_it_is_scored(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        stream = engine.stream([5, 6], lp.SamplingParams(max_tokens=100, ignore_eos=True))
        with pytest.raises(TimeoutError):
            engine.generate(tokens_of(200, 1), lp.SamplingParams(prompt_logprobs=1), timeout=0)
        assert sum(len(d.token_ids) for d in stream) == 100

    def test_a_stop_string_while_the_next_step_runs(self, make_engine: MakeEngine) -> None:
        """The request is over, its step is not, and others want to know of theirs."""
        engine = make_engine(pipeline_depth=2, n_seq_max=4)
        params = [
            lp.SamplingParams(logprobs=1, max_tokens=40, seed=i, stop=["a", "e"][: i % 3]) for i in range(24)
        ]
        for out in engine.generate([[5, 6]] * 24, params):
            assert out.logprobs is not None and len(out.logprobs) == len(out.token_ids)

    def test_streams_have_no_place_for_prompts(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        for ask in (engine.stream, engine.start):
            with pytest.raises(InvalidRequestError, match="prompt_logprobs come with generate"):
                ask([5], lp.SamplingParams(prompt_logprobs=1))


class TestSeveral:
    """``n`` completions of one prompt."""

    @pytest.mark.parametrize("unified", [False, True])
    @pytest.mark.parametrize("n_slots", [1, 3, 8])
    def test_are_those_of_their_seeds(self, make_engine: MakeEngine, unified: bool, n_slots: int) -> None:
        engine = make_engine(n_seq_max=n_slots, n_ubatch=32, kv_unified=unified)
        prompt = tokens_of(100, 2)
        options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
        outs = engine.generate(prompt, lp.SamplingParams(n=5, seed=7, **options)).choices
        assert [out.index for out in outs] == [0, 1, 2, 3, 4]
        assert [out.seed for out in outs] == [7, 8, 9, 10, 11]
        alone = [
            engine.generate(prompt, lp.SamplingParams(seed=out.seed, **options)).token_ids for out in outs
        ]
        assert sum(out.token_ids == tokens for out, tokens in zip(outs, alone, strict=True)) >= 4
        assert len({tuple(tokens) for tokens in alone}) == 5

    def test_the_prompt_is_computed_once(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=8)
        engine.generate(tokens_of(100, 2), lp.SamplingParams(n=8, max_tokens=4, ignore_eos=True))
        assert engine.stats().n_prompt_tokens == 100

    @pytest.mark.parametrize("n_prompt", [1, 2, 120])
    @pytest.mark.parametrize("depth", [1, 2])
    def test_however_long_the_prompt_is(self, make_engine: MakeEngine, n_prompt: int, depth: int) -> None:
        """In the default mode, where whole streams are copied; one step a token, whatever n is."""
        engine = make_engine(n_seq_max=8, pipeline_depth=depth)
        params = lp.SamplingParams(n=8, temperature=0, max_tokens=10, ignore_eos=True)
        outs = engine.generate([tokens_of(n_prompt, 1)], params)
        alone = engine.generate(
            [tokens_of(n_prompt, 1)], lp.SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        )
        assert [out.token_ids for out in outs[0].choices].count(alone[0].token_ids) >= 7
        assert engine.stats().steps <= 2 * 10 + 2

    @pytest.mark.parametrize("max_queue", [1, 2, 3, None])
    @pytest.mark.parametrize("max_tokens", [1, 2])
    def test_a_short_queue(self, make_engine: MakeEngine, max_queue: int | None, max_tokens: int) -> None:
        engine = make_engine(n_seq_max=2, n_batch=16, n_ubatch=16, max_queue=max_queue)
        params = lp.SamplingParams(n=6, max_tokens=max_tokens, ignore_eos=True)
        (out,) = engine.generate([tokens_of(200, 1)], params, timeout=60)
        assert [len(choice.token_ids) for choice in out.choices] == [max_tokens] * 6
        if max_queue is not None:
            with pytest.raises(lp.errors.QueueFullError, match=f"max_queue is {max_queue}: that never fits"):
                engine.generate([tokens_of(200, 1)], params, block=False)

    def test_very_many_given_up_at_once(self, make_engine: MakeEngine) -> None:
        """Quadratic work on the engine thread would take minutes here."""
        engine = make_engine(n_seq_max=4)
        with pytest.raises(TimeoutError):
            engine.generate([tokens_of(200, 1)], lp.SamplingParams(n=10_000, max_tokens=50), timeout=0)
        assert len(engine.generate([5, 6], lp.SamplingParams(max_tokens=2, ignore_eos=True)).token_ids) == 2

    def test_lists_of_prompts(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=4)
        params = lp.SamplingParams(n=2, max_tokens=3, ignore_eos=True, prompt_logprobs=0)
        outs = engine.generate([tokens_of(3, 1), tokens_of(80, 2), tokens_of(1, 3)], params)
        assert [out.n_prompt_tokens for out in outs] == [3, 80, 1]
        assert [len(out.prompt_logprobs or ()) for out in outs] == [2, 79, 0]
        assert [len(out.choices) for out in outs] == [2, 2, 2]
        assert [out.n_completion_tokens for out in outs] == [6, 6, 6]
        completion = asyncio.run(engine.agenerate([5, 6], params))
        assert (completion.n_prompt_tokens, len(completion.choices)) == (2, 2)
        assert (completion.text, completion.token_ids) == (
            completion.choices[0].text,
            completion.choices[0].token_ids,
        )

    def test_when_cells_run_out(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=4, n_ubatch=32, n_cells=256)
        params = lp.SamplingParams(n=4, max_tokens=60, temperature=0, ignore_eos=True)
        first, *others = engine.generate(tokens_of(90, 2), params).choices
        assert len(first.token_ids) == 60
        assert [out.token_ids for out in others].count(first.token_ids) >= 2

    def test_one_cancelled_while_the_others_wait(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=2)
        with pytest.raises(TimeoutError):
            engine.generate(tokens_of(200, 2), lp.SamplingParams(n=6, max_tokens=50), timeout=0)
        assert len(engine.generate(tokens_of(20, 2), lp.SamplingParams(n=3, max_tokens=2)).choices) == 3

    def test_a_recurrent_model(self, make_engine: MakeEngine, recurrent: lp.Model) -> None:
        engine = make_engine(recurrent, n_seq_max=3)
        params = lp.SamplingParams(n=3, temperature=0, max_tokens=6, ignore_eos=True)
        outs = engine.generate([5, 6, 7, 8], params).choices
        assert len({tuple(out.token_ids) for out in outs}) == 1

    def test_a_stream_is_one(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        for ask in (engine.stream, engine.start):
            with pytest.raises(InvalidRequestError, match="n is 2; a stream is one completion"):
                ask([5], lp.SamplingParams(n=2))


def test_logprobs_of_2000_positions_are_those_of_raw_logits(demo: lp.Model) -> None:
    """The arithmetic alone, on rows of the model that both sides read: at most 1e-4 from numpy float64."""
    rng = np.random.default_rng(0)
    worst, n_positions = 0.0, 0
    with (
        Context(demo, n_ctx=250, n_batch=250, n_outputs_max=250) as context,
        Chain(demo.vocab, 1).set_logprobs(8) as chain,
    ):
        for _ in range(8):
            context.clear()
            tokens = rng.integers(300, demo.n_vocab, 250)
            context.decode(DecodeBatch(tokens, np.arange(250), np.zeros(250, int), np.ones(250, bool)))
            for i in range(250):
                row = context.logits(i)
                token = chain.sample(row)
                logprob, top = chain.logprobs()
                exact = row.astype(np.float64) - row.max()
                exact -= np.log(np.exp(exact).sum())
                worst = max(worst, abs(logprob - exact[token]), *(abs(p - exact[t]) for t, p in top))
                n_positions += 1
    assert n_positions == 2000
    assert worst <= 1e-4


@pytest.mark.parametrize("size", [0.1, 1.0, 30.0, 1e4])
def test_logprobs_of_any_size(demo: lp.Model, size: float) -> None:
    """As exact as a float32 can tell them."""
    rng = np.random.default_rng(1)
    with Chain(demo.vocab, 1).set_logprobs(8) as chain:
        for _ in range(100):
            row = (rng.standard_normal(demo.n_vocab) * size).astype(np.float32)
            token = chain.sample(row)
            logprob, top = chain.logprobs()
            exact = row.astype(np.float64) - row.max()
            exact -= np.log(np.exp(exact).sum())
            np.testing.assert_allclose(logprob, exact[token], rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose([p for _, p in top], exact[[t for t, _ in top]], rtol=1e-6, atol=1e-6)
