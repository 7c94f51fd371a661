"""Activated LoRAs: what precedes the last invocation is the model's and shares its cells, the rest is the adapter's."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.adapters import make_adapter
from support.gguf_models import tiny_model
from support.run_script import environment, run_script

import llamapipe as lp
from llamapipe._engine.policy.core import UNLIMITED, Activation, Request, RequestSpec
from llamapipe.llama.context import Context

A, B = [200, 201], [210]  # what invokes the adapters "a" and "b"; "c" is an ordinary one
SHARED = [1, 40, 77, 103, 55, 61, 92, 38, 99, 120, 47, 88, 130, 42, 51, 66, 73, 81, 45, 59, 62, 70, 84, 97]
CHOICES: tuple[dict[str, float] | str | None, ...] = (None, "a", "b", "c", {"c": 0.5, "a": 1.5})


def params(adapter: object = None, **more: object) -> lp.SamplingParams:
    options = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "adapter": adapter, **more}
    return lp.SamplingParams(**options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Model]:
    path = tiny_model(tmp_path_factory.mktemp("activated") / "tiny.gguf", type_name="f32")
    with lp.Model(path) as model:
        for i, (name, invocation) in enumerate((("a", A), ("b", B), ("c", None))):
            file = path.with_name(f"{name}.gguf")
            model.load_adapter(make_adapter(file, path, seed=i, invocation=invocation))
        yield model


def engine_of(model: lp.Model, **options: object) -> lp.Engine:
    # Rows must not depend on what else a step computes, and cells be as exact as weights.
    settings = {"n_ctx": 128, "n_seq_max": 4, "n_threads": 1, "type_k": "f32", "type_v": "f32", **options}
    return lp.Engine(model, **settings)  # type: ignore[arg-type]


class Reference:
    """Plain calls of llama.cpp that change the adapters at a position."""

    def __init__(self, model: lp.Model, context: Context) -> None:
        self._model = model
        self._context = context

    def logprobs(self, tokens: Sequence[int], adapter: object, begin: int) -> npt.NDArray[np.float64]:
        """Each row's log-probabilities; the tokens from ``begin`` on are computed with all of the adapter."""
        context, everything = self._context, self._model.adapters.choose(adapter)  # type: ignore[arg-type]
        before = everything.before if everything is not None and everything.invocation else everything
        begin = min(begin, len(tokens))
        context.clear()
        rows = []
        for first, end, chosen in ((0, begin, before), (begin, len(tokens), everything)):
            if first < end:
                n = end - first
                context.set_adapters(chosen)
                context.decode(lp.DecodeBatch(tokens[first:end], range(first, end), [0] * n, [1] * n))
                rows += [context.logits(i).astype(np.float64) for i in range(n)]
        logprobs = np.array(rows)
        logprobs -= logprobs.max(axis=1, keepdims=True)
        logprobs -= np.log(np.exp(logprobs).sum(axis=1, keepdims=True))
        return logprobs

    def greedy(self, prompt: Sequence[int], adapter: object, begin: int, n: int = 8) -> list[int]:
        """What follows a prompt, without an end of generation."""
        tokens = list(prompt)
        for _ in range(n):
            row = self.logprobs(tokens, adapter, begin)[-1]
            row[list(self._model.vocab.eog_tokens)] = -np.inf
            tokens.append(int(row.argmax()))
        return tokens[len(prompt) :]

    def is_near_tie(
        self,
        prompt: Sequence[int],
        adapter: object,
        begin: int,
        tokens: Sequence[int],
        expected: Sequence[int],
    ) -> bool:
        """Whether two texts part where their next tokens are nearly equally likely."""
        n = next(i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b)
        row = self.logprobs([*prompt, *expected[:n]], adapter, begin)[-1]
        return abs(float(row[expected[n]] - row[tokens[n]])) < 0.01


@pytest.fixture(scope="module")
def reference(model: lp.Model) -> Iterator[Reference]:
    with Context(model, n_ctx=256, type_k="f32", type_v="f32", n_threads=1) as context:
        yield Reference(model, context)
        context.set_adapters(None)


def of_next(rows: npt.NDArray[np.float64], tokens: Sequence[int]) -> list[float]:
    """The log-probability of each token but the first."""
    return [float(rows[i, token]) for i, token in enumerate(tokens[1:])]


# ---- where it begins
small = st.integers(0, 2)


@given(st.lists(small, max_size=30), st.lists(small, min_size=1, max_size=4))
def test_the_last_occurrence_is_found(tokens: list[int], invocation: list[int]) -> None:
    n = len(invocation)
    places = [i for i in range(len(tokens) - n + 1) if tokens[i : i + n] == invocation]
    assert Activation("a", tuple(invocation)).begin(tokens) == max(places, default=UNLIMITED)


@given(st.integers(0, 19), st.integers(0, 18), st.integers(1, 10))
def test_dropped_tokens_move_the_place(begin: int, first: int, n: int) -> None:
    tokens = list(range(20))
    request = Request(tokens.copy(), RequestSpec(activation=Activation("a", (begin,))))
    activated = set(tokens[begin:])
    request.drop_between(first, min(first + n, 20))
    assert request.tokens[request.active_from :] == [token for token in request.tokens if token in activated]
    where = request.active_from
    assert request.find_activation() == UNLIMITED and request.active_from == where  # also in what was dropped


# ---- exactness
@pytest.mark.parametrize(
    "adapter", ["a", {"a": 0.5}, {"a": 1.0, "c": 0.7}], ids=["one", "scaled", "with another"]
)
@pytest.mark.parametrize("n_before", [0, 1, 17, 24])
@pytest.mark.parametrize("n_after", [0, 9])
def test_logits_are_those_of_llama_cpp(
    model: lp.Model, reference: Reference, adapter: object, n_before: int, n_after: int
) -> None:
    prompt = [*SHARED[:n_before], *A, *SHARED[3 : 3 + n_after]]
    rows = reference.logprobs(prompt, adapter, n_before)
    for cache in (False, True):
        with engine_of(model, prefix_cache=cache) as engine:
            engine.generate(prompt, params(adapter))
            out = engine.generate(prompt, params(adapter, prompt_logprobs=0))
            logprobs = [entry.logprob for entry in out.prompt_logprobs or ()]
            assert logprobs[-len(prompt) + 1 :] == pytest.approx(of_next(rows, prompt), abs=1e-4)
            assert list(out.token_ids) == reference.greedy(prompt, adapter, n_before)
    if n_before:
        base = reference.logprobs(prompt, adapter, len(prompt))
        assert logprobs[-len(prompt) + 1 :][: n_before - 1] == pytest.approx(
            of_next(base, prompt)[: n_before - 1], abs=1e-4
        )
        assert np.abs(rows - base).max(axis=1)[n_before:].min() > 0.1, "the adapter changes nothing"
        whole = reference.logprobs(prompt, adapter, 0)
        assert np.abs(rows - whole).max() > 0.1


def test_only_the_last_invocation_counts(model: lp.Model, reference: Reference) -> None:
    prompt = [*SHARED[:18], *A, 50, 51, 52, *A, 53]
    with engine_of(model) as engine:
        for _ in range(2):
            assert list(engine.generate(prompt, params("a")).token_ids) == reference.greedy(prompt, "a", 23)
        first = engine.generate(prompt[:22], params("a"))  # the cells from 18 on are not those of the first
        assert (first.n_cached_tokens, list(first.token_ids)) == (18, reference.greedy(prompt[:22], "a", 18))


def test_without_an_invocation_it_is_the_model(model: lp.Model, reference: Reference) -> None:
    with engine_of(model) as engine:
        for prompt in (SHARED, [*SHARED, A[0]], [*SHARED, A[1], A[0]]):
            assert list(engine.generate(prompt, params("a")).token_ids) == reference.greedy(prompt, None, 0)
            assert engine.generate(prompt, params()).n_cached_tokens == len(prompt) - 1
        out = engine.generate(SHARED, params({"a": 1.0, "c": 0.5}))
        assert list(out.token_ids) == reference.greedy(SHARED, {"c": 0.5}, 0)


# ---- shared cells
def test_the_models_cells_are_shared(model: lp.Model) -> None:
    n = len(SHARED)
    with engine_of(model) as engine:

        def computed(prompt: list[int], adapter: object) -> int:
            before = engine.stats().n_prompt_tokens
            out = engine.generate(prompt, params(adapter))
            n_computed = len(prompt) - out.n_cached_tokens
            counted = engine.stats().n_prompt_tokens - before
            assert counted == (n_computed if n_computed > 1 else 0)  # the last token alone counts as decoded
            return n_computed

        assert computed([*SHARED, *A, 5], "a") == n + 3  # computes the model's part for all
        assert computed([*SHARED, *A, 5], "a") == 1  # its own part
        assert computed([*SHARED, 9], None) == 1
        assert computed([*SHARED, *B, 5, 6], "b") == 3
        assert computed([*SHARED, *A, 5], {"a": 0.5}) == 3  # of another scale
        assert computed([*SHARED, *A, 5], None) == 3  # the model's row after these tokens is another
        assert computed([*SHARED, *A, 5], {"a": 1.0, "c": 1.0}) == n + 3  # not the model's
        assert computed([*SHARED, *A, 5], "c") == 3  # "c" alone, which the one before has computed


def test_cells_in_host_memory_are_shared(model: lp.Model, reference: Reference) -> None:
    with engine_of(model, n_seq_max=1, cache_bytes=2**24) as engine:
        long = SHARED * 2
        engine.generate([*long, 7], params())
        engine.generate([33 + i for i in range(60)], params())  # takes the slot
        out = engine.generate([*long, *A, 5], params("a"))
        assert (out.n_cached_tokens, engine.stats().n_restored) == (len(long), 1)
        assert list(out.token_ids) == reference.greedy([*long, *A, 5], "a", len(long))


def test_requests_at_the_same_time_compute_the_prefix_once(model: lp.Model, reference: Reference) -> None:
    long = SHARED * 3
    prompts = [[*long, *A, 5], [*long, *B, 6], [*long, 9], [*long, *A, 7]]
    adapters: list[object] = ["a", "b", None, "a"]
    with engine_of(model) as engine:
        completions = engine.generate(prompts, [params(adapter) for adapter in adapters])
        stats = engine.stats()
        # The last two requests compute one token, which counts as decoded.
        assert stats.n_prompt_tokens == len(long) + len([*A, 5]) + len([*B, 6])
    expected = [reference.greedy(p, adapter, len(long)) for p, adapter in zip(prompts, adapters, strict=True)]
    assert [list(completion.token_ids) for completion in completions] == expected


def test_a_cached_prefix(model: lp.Model) -> None:
    with engine_of(model) as engine, engine.cache_prefix(SHARED, adapter="a"):
        for adapter, more in (("a", A), ("b", B), (None, [9])):
            assert engine.generate([*SHARED, *more, 5], params(adapter)).n_cached_tokens == len(SHARED)
    invoked = [*SHARED, *A, 50]
    with engine_of(model) as engine, engine.cache_prefix(invoked, adapter="a"):
        assert engine.generate([*invoked, 5], params("a")).n_cached_tokens == len(invoked)
        assert engine.generate([*invoked, 5], params()).n_cached_tokens == len(SHARED)


# ---- texts that change
def rest(generation: lp.Generation) -> list[int]:
    return [token.id for token in generation]


def test_appended_and_trimmed_tokens_invoke_it_or_not(model: lp.Model, reference: Reference) -> None:
    with engine_of(model) as engine, engine.start(SHARED, params("a", max_tokens=4)) as generation:
        whole = [*SHARED, *rest(generation)]
        assert whole[len(SHARED) :] == reference.greedy(SHARED, "a", UNLIMITED, 4)
        n_invoked = len(whole)
        generation.append([A[0]])
        generation.append([A[1], 50])
        whole += [*A, 50]
        whole += rest(generation)
        assert whole[-4:] == reference.greedy(whole[:-4], "a", n_invoked, 4)
        before = engine.stats().n_prompt_tokens
        generation.append([51])  # stays
        whole += [51, *rest(generation)]
        assert whole[-4:] == reference.greedy(whole[:-4], "a", n_invoked, 4)
        assert engine.stats().n_prompt_tokens - before <= 2
        generation.append([*A, 52])  # what it computed before is the model's now
        whole += [*A, 52]
        whole += rest(generation)
        assert whole[-4:] == reference.greedy(whole[:-4], "a", len(whole) - 7, 4)
        generation.trim(n_invoked + 1)  # half of an invocation is none
        whole = [*whole[: n_invoked + 1], *rest(generation)]
        assert whole[-4:] == reference.greedy(whole[:-4], "a", UNLIMITED, 4)


def test_forks_and_snapshots(model: lp.Model, reference: Reference) -> None:
    prompt = [*SHARED, *A, 50]
    expected = reference.greedy(prompt, "a", len(SHARED), 10)
    with engine_of(model) as engine, engine_of(model, n_seq_max=2) as other:
        generation = engine.start(prompt, params("a", max_tokens=10))
        begin = [generation.next().id for _ in range(4)]  # type: ignore[union-attr]
        fork, snapshot = generation.fork(), generation.snapshot()
        engine.generate(SHARED, params("b"))
        restored = other.restore(snapshot, params("a", max_tokens=6))
        assert [*begin, *rest(restored)] == [*begin, *rest(fork)] == [*begin, *rest(generation)] == expected
        n = other.stats().n_prompt_tokens
        assert n <= 1, "the cells of the snapshot were not used"
        with pytest.raises(lp.errors.InvalidRequestError, match="with other adapters"):
            other.restore(snapshot, params("b"))


def test_a_snapshot_knows_what_its_cells_were_computed_with(model: lp.Model, reference: Reference) -> None:
    """Generated tokens that look like an invocation are none, also after they were restored."""
    like = {A[0]: 100.0}
    with engine_of(model) as engine:
        generation = engine.start(SHARED, params("a", max_tokens=1, logit_bias=like))
        assert rest(generation) == [A[0]]
        fork = engine.restore(generation.snapshot(), params("a", max_tokens=1, logit_bias={A[1]: 100.0}))
        assert rest(fork) == [A[1]]
        again = engine.restore(fork.snapshot(), params("a", max_tokens=4))
        more = rest(again)
        assert more == reference.greedy([*SHARED, *A], "a", UNLIMITED, 4)
        again.append([50])  # now they are given
        assert rest(again) == reference.greedy([*SHARED, *A, *more, 50], "a", len(SHARED), 4)


def test_saved_caches_have_the_cells_of_each_set(
    model: lp.Model, reference: Reference, tmp_path: Path
) -> None:
    """They are of another process, where the hashes of texts and bytes are others."""
    options = {"n_ctx": 256, "cache_bytes": 2**24, "cache_dir": str(tmp_path / "cache")}
    prompt, n = [*SHARED * 4, *A, *SHARED * 4], 4 * len(SHARED)
    saved = (None, "a", "c", {"c": 0.5, "a": 1.5})
    program = f"""
from pathlib import Path
import llamapipe as lp
from test_activated_loras import engine_of, params
with lp.Model({str(model.path)!r}) as model:
    for name in "abc":
        model.load_adapter(Path(model.path).with_name(name + ".gguf"))
    with engine_of(model, **{options}) as engine:
        for adapter in {saved}:
            engine.generate({prompt}, params(adapter))
"""
    folders = [environment()["PYTHONPATH"], str(Path(__file__).parent)]
    run_script(program, env={"PYTHONPATH": os.pathsep.join(folders)})
    others = (
        ("b", len(prompt) - 1),
        ({"a": 0.5}, n),
        ({"c": 0.5}, n),
        ({"c": 0.4}, 0),
        ({"a": 1.5, "c": 0.4}, n),
    )
    with engine_of(model, **options) as engine:
        for adapter, n_cached in (*((choice, len(prompt) - 1) for choice in saved), *others):
            out = engine.generate(prompt, params(adapter))
            begin = UNLIMITED if adapter == "b" else n
            assert list(out.token_ids) == reference.greedy(prompt, adapter, begin), adapter
            assert out.n_cached_tokens == n_cached, adapter
        engine.check_integrity()


def test_a_context_that_is_full(model: lp.Model) -> None:
    prompt = [*SHARED, *A, 50]
    with engine_of(model, n_ctx=40, overflow="recompute", n_keep=4) as engine:
        for adapter in ("a", "b"):
            out = engine.generate(prompt, params(adapter, max_tokens=60))
            assert len(out.token_ids) == 60
        engine.check_integrity()


# ---- scores
def test_scores_are_those_of_llama_cpp(model: lp.Model, reference: Reference) -> None:
    prompt, n = [*SHARED, *A], len(SHARED)
    continuations = [[50, 51, 52], [60], [*A, 61]]
    texts = [[*SHARED[:9], *A, 5, 6], [*SHARED, *A, 7], [*SHARED, 8], [*SHARED[:1], *A, 9]]
    places = [9, n, UNLIMITED, 1]
    with engine_of(model) as engine:
        of_continuations = engine.score(prompt, continuations, adapter="a")
        for score, more in zip(of_continuations, continuations, strict=True):
            whole = [*prompt, *more]
            expected = of_next(reference.logprobs(whole, "a", n), whole)[-len(more) :]
            assert score.logprobs == pytest.approx(expected, abs=1e-4)
        scores = engine.score_tokens(texts, adapter="a")
        for score, whole, place in zip(scores, texts, places, strict=True):
            assert score.logprobs == pytest.approx(
                of_next(reference.logprobs(whole, "a", place), whole), abs=1e-4
            )
        whole = texts[0]
        mean = -float(np.mean(of_next(reference.logprobs(whole, "a", 9), whole)))
        assert engine.perplexity(whole, adapter="a") == pytest.approx(np.exp(mean), rel=1e-3)
        engine.check_integrity()


# ---- many callers
def prompt_of(i: int) -> list[int]:
    """Some begin alike; some invoke nothing, or twice."""
    invocation = (A, B, [], [*A, 39, *B, 44, *A])[i % 4]
    return [*SHARED[: 16 + i % 8], *invocation, 33 + i]


def place_of(i: int, choice: object) -> int:
    """Where the adapter of a choice begins in a prompt."""
    name = choice if isinstance(choice, str) else "a" if choice else ""
    if name == "c" or not name:
        return 0
    return Activation(None, tuple(A if name == "a" else B)).begin(prompt_of(i))


@pytest.fixture(scope="module")
def alone(reference: Reference) -> dict[tuple[int, int], list[int]]:
    return {
        (i, c): reference.greedy(prompt_of(i), choice, place_of(i, choice), 10)
        for i in range(12)
        for c, choice in enumerate(CHOICES)
    }


@pytest.mark.parametrize(
    "options",
    [{}, {"n_cells": 160}, {"prefix_cache": "exact"}, {"cache_bytes": 0}, {"max_itl_ms": 1},
     {"tuning": lp.EngineTuning(n_ubatch=16)}, {"tuning": lp.EngineTuning(pipeline_depth=2)}],
    ids=["default", "few cells", "exact", "no host memory", "short turns", "small steps", "threaded"],
)  # fmt: skip
def test_many_callers_get_the_texts_of_each_alone(
    model: lp.Model,
    reference: Reference,
    alone: dict[tuple[int, int], list[int]],
    options: dict[str, object],
) -> None:
    wrong: list[tuple[int, int, list[int], list[int]]] = []
    with engine_of(model, **options) as engine:

        def check(i: int, c: int, got: list[int]) -> None:
            if got != alone[i, c][: len(got)]:
                wrong.append((i, c, got, alone[i, c]))

        def calls(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(6):
                i, c, action = rng.randrange(12), rng.randrange(len(CHOICES)), rng.random()
                chosen = params(CHOICES[c], max_tokens=10, priority=rng.choice((0, 0, 1)))
                if action < 0.2:  # leaves in the middle
                    with engine.stream(prompt_of(i), chosen) as stream:
                        check(i, c, [*next(stream).token_ids])
                elif action < 0.5:
                    generation = engine.start(prompt_of(i), chosen)
                    begin = [generation.next().id for _ in range(3)]  # type: ignore[union-attr]
                    fork = generation.fork()
                    check(i, c, [*begin, *rest(fork)])
                    fork = engine.restore(generation.snapshot(), params(CHOICES[c], max_tokens=7))
                    check(i, c, [*begin, *rest(fork)])
                    check(i, c, [*begin, *rest(generation)])
                else:
                    check(i, c, list(engine.generate(prompt_of(i), chosen).token_ids))

        threads = [threading.Thread(target=calls, args=(seed,)) for seed in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        engine.check_integrity()
    if not model.attends:  # ggml's attention depends on the order of unified cells
        wrong = [
            (i, c, got, expected)
            for i, c, got, expected in wrong
            if not reference.is_near_tie(prompt_of(i), CHOICES[c], place_of(i, CHOICES[c]), got, expected)
        ]
    assert not wrong
