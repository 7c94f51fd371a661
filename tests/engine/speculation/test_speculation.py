"""Guessed tokens change how many steps a text takes, and not the text."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.control import Gate as StepGate
from support.eager_gate import EagerGate
from support.gguf_models import hybrid_model, sliding_window_model
from support.inside import fix_micro_batches
from support.plain import plain_loop

import llamapipe as lp
from llamapipe._engine.policy.core import BatchPlan, Request
from llamapipe._engine.policy.planner import BatchBuilder
from llamapipe._engine.policy.speculation import Gate, Guess, StepTimes
from llamapipe._engine.runtime.background_sampler import BackgroundSampler
from llamapipe._engine.runtime.samplers import SamplerFactoryCache
from llamapipe._sync.streams import Stream
from llamapipe.errors import ConstraintError
from llamapipe.llama import SamplerChain
from llamapipe.llama.vocab import Vocab
from llamapipe.native.load import native
from llamapipe.structured._guide import Guide
from llamapipe.structured.budget import GrammarBudget
from llamapipe.work.long_work import takes_long

pytestmark = pytest.mark.native
MakeEngine = Callable[..., lp.Engine]
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
PROMPT = f"{STORY} {STORY} One day"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "colour": {"enum": ["red", "green", "blue"]},
        "happy": {"type": "boolean"},
    },
    "required": ["name", "colour", "happy"],
}


@pytest.fixture
def engine(eager: None, make_engine: MakeEngine, demo: lp.Model) -> lp.Engine:
    if not native().lib.lp_kernels_attend():
        pytest.skip("rows depend on one another without llamapipe's kernels")
    return make_engine(demo, n_ctx=512, n_seq_max=4, batch_invariant=True)


def forbid_last(tokens: list[int], row: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    """Depends on the tokens that it is told of."""
    row[tokens[-1]] = -np.inf
    row[tokens[-4:-1]] -= len(tokens) % 3


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {},
    "everything": {"temperature": 1.2, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "penalties": {"repeat_penalty": 1.1, "presence_penalty": 0.2},
    "dry": {"dry_multiplier": 0.8},
    "mirostat": {"mirostat": 2},
    "xtc": {"xtc_probability": 0.5},
    "bias": {"logit_bias": {300: 2.0}, "min_tokens": 30},
    "stop": {"temperature": 0, "stop": ["park", "said"]},
    "GBNF": {"grammar": 'root ::= ([a-zA-Z ,]+ ".")+'},
    "schema": {"json_schema": SCHEMA},
    "regex": {"regex": "([a-zA-Z, ]+[.])+", "logprobs": 1},
    "lark": {"lark": 'start: (/[a-zA-Z ,]+/ ".")+', "temperature": 0},
    "choice": {"choice": ["a little girl named Lily", "a little boy named Tim", "a big dog"]},
    "processor": {"logits_processors": (forbid_last,)},
    "processor of a schema": {"logits_processors": (lambda row: None,), "json_schema": SCHEMA},
    "logprobs": {"logprobs": 2},
    "logprobs of a schema": {"logprobs": 3, "json_schema": SCHEMA},
    "logprobs of a changed row": {"logprobs": 1, "logit_bias": {300: 2.0}, "repeat_penalty": 1.2},
}


def texts(engine: lp.Engine, prediction: str | None, **options: Any) -> list[tuple[lp.Choice, ...]]:
    params = [
        lp.SamplingParams(
            **{
                "max_tokens": 80,
                "seed": seed,
                "prediction": prediction,
                **({"speculate": "off"} if prediction is None else {}),
                **options,
            }
        )
        for seed in range(6)
    ]
    done = engine.generate([f"{PROMPT}{' ' * (i % 2)}" for i in range(6)], params)
    return [completion.choices for completion in done]


@pytest.mark.parametrize("way", WAYS)
def test_texts_are_those_without_guesses(engine: lp.Engine, way: str) -> None:
    expected = texts(engine, None, **WAYS[way])
    assert engine.stats().n_drafted == 0
    assert texts(engine, f"{STORY} They walked home.", **WAYS[way]) == expected
    stats = engine.stats()
    assert stats.n_accepted <= stats.n_drafted
    assert stats.n_drafted > 0
    engine.check_integrity()


def test_a_right_prediction_saves_steps(engine: lp.Engine) -> None:
    text = engine.generate(PROMPT, lp.SamplingParams(temperature=0, max_tokens=100, speculate="off")).text
    before = engine.stats()
    changed = text.replace(" and", " but", 1)
    for prediction, most in ((text, 45), (changed, 55)):
        done = engine.generate(
            PROMPT, lp.SamplingParams(temperature=0, max_tokens=100, prediction=prediction)
        )
        after = engine.stats()
        assert done.text == text
        assert done.n_accepted_tokens == after.n_accepted - before.n_accepted > 0
        assert done.n_drafted_tokens == after.n_drafted - before.n_drafted
        assert after.steps - before.steps < most
        before = after


def test_a_long_prediction_costs_little(demo: lp.Model) -> None:
    """An event loop does not tokenize it, and what can be no part of the output is neither tokenized nor kept."""
    params = lp.SamplingParams(prediction="\U0001f600" * 1_000_000)
    assert takes_long("", params) and takes_long("", [params])
    assert not takes_long("", lp.SamplingParams(prediction="short"))
    kept = SamplerFactoryCache(demo.vocab, 64).sampler_factory(params).params
    assert kept.prediction is not None and len(kept.prediction) <= 1024


def test_forced_text_saves_steps(engine: lp.Engine) -> None:
    params: dict[str, Any] = {"json_schema": SCHEMA, "temperature": 0, "max_tokens": 100}
    plain = engine.generate(PROMPT, lp.SamplingParams(**params, speculate="off"))
    before = engine.stats()
    done = engine.generate(PROMPT, lp.SamplingParams(**params))
    stats = engine.stats()
    assert done.token_ids == plain.token_ids
    assert 0 < stats.n_forced <= stats.n_accepted
    assert stats.steps - before.steps < before.steps


def test_a_constraint_that_fails_before_its_guess_adds_no_token(
    engine: lp.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are not drawn from, also where the failure arrives after the step."""
    params = lp.SamplingParams(json_schema=SCHEMA, temperature=0, max_tokens=60)
    whole = engine.generate(PROMPT, params).token_ids
    left = 0

    def error(budget: GrammarBudget) -> ConstraintError | None:
        nonlocal left
        left -= 1
        return ConstraintError("too long") if left < 0 else None

    monkeypatch.setattr(GrammarBudget, "error", error)
    for n_jobs in range(4, 80, 3):
        left = n_jobs
        token_ids: list[int] = []
        with suppress(ConstraintError):
            for delta in engine.stream(PROMPT, params):
                token_ids += delta.token_ids
        assert token_ids == whole[: len(token_ids)]


def test_streams_give_every_token(engine: lp.Engine) -> None:
    expected = engine.generate(PROMPT, lp.SamplingParams(temperature=0, max_tokens=60, speculate="off"))
    params = lp.SamplingParams(temperature=0, max_tokens=60, prediction=expected.text)
    deltas = list(engine.stream(PROMPT, params))
    assert [token for delta in deltas for token in delta.token_ids] == expected.token_ids
    assert "".join(delta.text for delta in deltas) == expected.text
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert engine.stats().n_steps_saved == engine.stats().n_accepted > 0


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_nothing_follows_a_stop_string(engine: lp.Engine, way: str) -> None:
    """It ends in the middle of a right guess: the tokens after it are not part of the result."""
    whole = engine.generate(PROMPT, lp.SamplingParams(temperature=0, max_tokens=60, speculate="off"))
    words = whole.text.split()
    for word in (words[5], words[12], words[20]):
        plain = engine.generate(
            PROMPT, lp.SamplingParams(temperature=0, max_tokens=60, speculate="off", stop=word)
        )
        params = lp.SamplingParams(temperature=0, max_tokens=60, prediction=whole.text, stop=word)
        if way == "generate":
            done = engine.generate(PROMPT, params)
            result = done.text, done.token_ids, done.finish_reason
        else:
            deltas = list(engine.stream(PROMPT, params))
            result = (
                "".join(delta.text for delta in deltas),
                [token for delta in deltas for token in delta.token_ids],
                deltas[-1].finish_reason or "stop",
            )
        assert result == (plain.text, plain.token_ids, plain.finish_reason)
        engine.check_integrity()


@pytest.mark.parametrize("n_masks", [0, 1, 3, None])
def test_rows_whose_masks_are_late_are_drawn_from_in_other_threads(
    engine: lp.Engine, monkeypatch: pytest.MonkeyPatch, n_masks: int | None
) -> None:
    """The masks along a guess are computed while its step is: those that are missing then, after it."""
    options: dict[str, Any] = {"regex": "([a-zA-Z, ]+[.])+", "logprobs": 1}
    expected = texts(engine, None, **options)
    follow, n_used = Guide.follow, 0

    def some(
        self: Guide, tokens: Sequence[int], n_known: int = 0
    ) -> Iterator[np.ndarray[Any, np.dtype[np.uint32]]]:
        yield from islice(follow(self, tokens, n_known), n_masks)

    draw_along = BackgroundSampler.draw_along

    def counted(self: BackgroundSampler, *arguments: Any) -> list[int]:
        nonlocal n_used
        tokens = draw_along(self, *arguments)
        n_used += len(tokens) - 1
        return tokens

    monkeypatch.setattr(Guide, "follow", some)
    monkeypatch.setattr(BackgroundSampler, "draw_along", counted)
    # Which masks are there in time depends on other threads. Again only where all of them were late.
    for _ in range(10):
        assert texts(engine, f"{STORY} They walked home.", **options) == expected
        if n_used or n_masks == 0:
            break
    assert engine.stats().n_accepted > 0
    assert (n_used == 0) if n_masks == 0 else n_used > 0
    engine.check_integrity()


def test_what_a_constraint_forbids_is_not_computed(
    engine: lp.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prediction with numbers, for a text that has none: its rows would be drawn from in vain."""
    regex = "[a-zA-Z,.!?'\" ]{150,}"
    options: dict[str, Any] = {"regex": regex, "temperature": 0, "max_tokens": 60, "seed": 1}
    plain = engine.generate(PROMPT, lp.SamplingParams(**options, speculate="off"))
    words = plain.text.split(" ")
    prediction = " ".join(f"{word} 7" if i % 3 == 2 else word for i, word in enumerate(words))
    choose = EagerGate.choose
    guessed: list[Sequence[int]] = []

    def watched(self: EagerGate, *arguments: Any) -> dict[Request, Sequence[int]]:
        chosen = choose(self, *arguments)
        guessed.extend(chosen.values())
        return chosen

    monkeypatch.setattr(EagerGate, "rng", SimpleNamespace(randrange=lambda start, stop: stop - 1))
    monkeypatch.setattr(EagerGate, "choose", watched)
    n_forbidden = []
    for _ in range(2):
        guessed.clear()
        before = engine.stats()
        done = engine.generate(PROMPT, lp.SamplingParams(**options, prediction=prediction, cache=False))
        after = engine.stats()
        assert done.choices == plain.choices
        assert after.n_accepted > before.n_accepted
        n_forbidden.append(sum("7" in engine.model.detokenize(tokens) for tokens in guessed))
        monkeypatch.setattr(Guide, "n_allowed", lambda self, tokens, limit_s: len(tokens))
    n_cut, n_whole = n_forbidden
    assert n_cut == 0 < n_whole
    engine.check_integrity()


@pytest.mark.parametrize("n_before", [1, 2, 5, 9, 14])
def test_a_guess_ends_where_a_processor_takes_long(engine: lp.Engine, n_before: int) -> None:
    """Others continue, and the request has the tokens before it, its own later, and those after it in other steps."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 30, "seed": 1, "logprobs": 1}
    plain = engine.generate(PROMPT, lp.SamplingParams(**options, speculate="off"))
    blocked, go = threading.Event(), threading.Event()
    n_calls = 0

    def wait(row: object) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls == n_before:
            blocked.set()
            go.wait()

    params = lp.SamplingParams(**options, prediction=plain.text, logits_processors=(wait,))
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(engine.generate, PROMPT, params)
        assert blocked.wait(60)
        try:
            assert len(list(engine.stream("The dog", lp.SamplingParams(max_tokens=20, ignore_eos=True)))) > 5
        finally:
            go.set()
        assert slow.result(60).choices == plain.choices
    assert n_calls == len(plain.token_ids) + (plain.finish_reason == "stop")
    assert engine.stats().n_accepted > 0
    engine.check_integrity()


@pytest.mark.parametrize("n_after", [0, 1])
def test_log_probabilities_of_a_text_that_ends_within_a_guess(engine: lp.Engine, n_after: int) -> None:
    """With the stop string, or with a stop token after it: the tokens after it are told to nobody."""
    whole = engine.generate(PROMPT, lp.SamplingParams(temperature=0, max_tokens=40, speculate="off"))
    for i in range(8, 24):
        word = engine.model.detokenize(whole.token_ids[i : i + 1])
        options: dict[str, Any] = {
            "temperature": 0,
            "seed": 1,
            "max_tokens": 40,
            "logprobs": 1,
            "stop": word,
            "stop_token_ids": [whole.token_ids[i + n_after]],
        }
        plain = engine.generate(PROMPT, lp.SamplingParams(**options, speculate="off"))
        assert engine.generate(PROMPT, lp.SamplingParams(**options, prediction=whole.text)).choices == (
            plain.choices
        )
        deltas = list(engine.stream(PROMPT, lp.SamplingParams(**options, prediction=whole.text)))
        entries = [entry for delta in deltas for entry in delta.logprobs or ()]
        assert entries == plain.logprobs
    assert engine.stats().n_accepted > 0
    engine.check_integrity()


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_a_text_has_at_most_max_tokens(engine: lp.Engine, n: int) -> None:
    text = engine.generate(PROMPT, lp.SamplingParams(temperature=0, max_tokens=40, speculate="off"))
    done = engine.generate(PROMPT, lp.SamplingParams(temperature=0, max_tokens=n, prediction=text.text))
    assert (done.token_ids, done.finish_reason) == (text.token_ids[:n], "length")


def test_a_context_is_filled_to_its_last_position(
    eager: None, make_engine: MakeEngine, demo: lp.Model
) -> None:
    with make_engine(demo, n_ctx=64, n_seq_max=2) as engine:
        prompt = engine.model.tokenize(PROMPT)[:40]
        options: dict[str, Any] = {"temperature": 0, "max_tokens": None, "ignore_eos": True}
        plain = engine.generate(prompt, lp.SamplingParams(**options, speculate="off"))
        done = engine.generate(prompt, lp.SamplingParams(**options, prediction=plain.text))
        assert len(done.token_ids) == len(plain.token_ids) == 24
        engine.check_integrity()


@pytest.mark.parametrize("options", [{"n_cells": 200}, {"overflow": "recompute"}, {"overflow": "shift"}])
def test_scarce_cells_cut_no_text(
    eager: None, make_engine: MakeEngine, demo: lp.Model, options: dict[str, Any]
) -> None:
    with make_engine(demo, n_ctx=96, n_seq_max=4, **options) as engine:
        params = lp.SamplingParams(temperature=0, max_tokens=150, prediction=STORY, ignore_eos=True)
        done = engine.generate([PROMPT[: 100 + i] for i in range(6)], params)
        assert {completion.finish_reason for completion in done} == {"length"}
        assert engine.stats().n_drafted > 0
        engine.check_integrity()


def test_another_request_finds_the_prefix(engine: lp.Engine) -> None:
    params = lp.SamplingParams(temperature=0, max_tokens=40, prediction=STORY)
    first = engine.generate(PROMPT, params)
    prompt = engine.model.tokenize(PROMPT) + first.token_ids
    again = engine.generate(prompt, lp.SamplingParams(temperature=0, max_tokens=20))
    assert again.n_cached_tokens >= len(prompt) - 2
    alone = engine.generate(
        prompt, lp.SamplingParams(temperature=0, max_tokens=20, cache=False, speculate="off")
    )
    assert again.token_ids == alone.token_ids


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"speculate": "on"}, ValueError, "speculate is 'on'; it must be"),
        ({"speculate": 1}, ValueError, "speculate is 1; it must be"),
        ({"prediction": ["a"]}, TypeError, "prediction must be a str or None, not list"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        lp.SamplingParams(**options)


# ---- where guesses come from
@pytest.fixture
def chain(demo: lp.Model) -> Iterator[SamplerChain]:
    with SamplerChain(demo.vocab) as chain:
        yield chain


def test_what_followed_the_same_tokens_is_guessed(chain: SamplerChain) -> None:
    chain.watch([], [5, 6, 7, 8, 9, 10, 5, 6, 7], own=True)
    assert chain.guess(3)[0] == [8, 9, 10]
    chain.accept_drawn([8])
    assert chain.guess(2)[0] == [9, 10]
    chain.accept_drawn([20])  # wrong: nothing like it came before
    assert chain.guess(2)[0] == []
    chain.accept_drawn([21, 22, 5, 6, 7])
    assert chain.guess(2)[0] == [8, 20], "the newest place counts"


def test_a_repetition_continues(chain: SamplerChain) -> None:
    chain.watch([], [1, 2, 3, 1, 2, 3, 1, 2, 3], own=True)
    assert chain.guess(7)[0] == [1, 2, 3, 1, 2, 3, 1]


def test_the_share_of_right_guesses_is_learned(chain: SamplerChain) -> None:
    chain.watch([], [1, 2, 3, 4, 1, 2, 3], own=True)
    shares = []
    for token in (90, 1, 2, 3, 91, 1, 2, 3, 92, 1, 2, 3, 93, 1, 2, 3, 94, 1, 2, 3):
        tokens, share = chain.guess(1)
        shares += [share] * len(tokens)
        chain.accept_drawn([token])
    assert shares[-1] < shares[0]
    assert chain.guess(4)[0] == [], "guesses that are never right are given up"


def test_a_prediction_is_followed_past_a_difference(chain: SamplerChain) -> None:
    predicted = list(range(100, 200))
    chain.watch(predicted, [1, 2, 3], own=True)
    assert chain.guess(3)[0] == [100, 101, 102]
    chain.accept_drawn([100, 101, 50])  # one token for another
    assert chain.guess(2)[0] == [103, 104]
    chain.accept_drawn([51, 52, 110, 111])  # tokens were added, others left out
    assert chain.guess(2)[0] == [112, 113]
    chain.accept_drawn([112, 60, 113, 114])  # one was added
    assert chain.guess(2)[0] == [115, 116]


def test_what_was_changed_once_is_changed_again(chain: SamplerChain) -> None:
    predicted = [*range(100, 108), 7, *range(110, 118), 7, *range(120, 128), 7, 130, 131]
    chain.watch(predicted, [1, 2, 3], own=True)
    chain.accept_drawn([*range(100, 108), 8, 110, 111])  # 8 for 7
    assert chain.guess(9)[0] == [112, 113, 114, 115, 116, 117, 8, 120, 121]
    chain.accept_drawn([*range(112, 118), 7])  # not everywhere
    assert chain.guess(10)[0] == [*range(120, 128), 7, 130]


@pytest.mark.parametrize("is_predicted", [True, False])
def test_several_tokens_for_one(chain: SamplerChain, is_predicted: bool) -> None:
    source = [*range(100, 110), 7, *range(110, 118), 7, *range(120, 128)]
    if is_predicted:
        chain.watch(source, [1, 2, 3], own=True)
    else:
        chain.watch([], [*source, 50, *range(100, 103)], own=True)
    chain.accept_drawn(list(range(100 if is_predicted else 103, 110)))
    chain.accept_drawn([8])
    assert chain.guess(2)[0] == [110, 111], "one for one"
    chain.accept_drawn([9])
    assert chain.guess(2)[0] == [110, 111], "then two for one"
    chain.accept_drawn([110, 111])
    assert chain.guess(9)[0] == [*range(112, 118), 8, 9, 120]


FEW_TOKENS = st.integers(1, 6)


@given(st.lists(FEW_TOKENS, max_size=60), st.lists(FEW_TOKENS, max_size=120), st.booleans())
def test_guesses_are_of_tokens_that_came(
    demo: lp.Model, predicted: list[int], text: list[int], own: bool
) -> None:
    with SamplerChain(demo.vocab) as chain:
        chain.watch(predicted, [1, 2, 3, 4], own=own)
        for i, token in enumerate(text):
            tokens, share = chain.guess(8)
            assert len(tokens) <= 8
            assert 0 <= share <= 1
            assert set(tokens) <= {*predicted, 1, 2, 3, 4, *text[:i]}
            chain.accept_drawn([token])


def test_a_prediction_ends(chain: SamplerChain) -> None:
    chain.watch([7, 8], [1, 2, 3], own=False)
    assert chain.guess(5)[0] == [7, 8]
    chain.accept_drawn([7, 8])
    assert chain.guess(5)[0] == []


# ---- the gate
def guesses_of(*lengths: int, share: float = 0.9) -> list[Guess]:
    return [Guess(Request([1]), [5] * n, share) for n in lengths]


def chosen(gate: Gate, n_decoding: int, guesses: list[Guess]) -> list[int]:
    guessed = gate.choose(n_decoding, guesses, 512)
    return [len(guessed.get(guess.request, ())) for guess in guesses]


def taught(seconds: Callable[[int], float], ns: Sequence[int], splits: bool = False) -> Gate:
    gate = Gate(32, splits)
    for n in [*ns] * 8:  # the first step of a number counts half
        gate.observe(n, 0, seconds(n))
    return gate


def test_tokens_that_cost_nothing_are_all_taken() -> None:
    gate = taught(lambda n: 0.01, range(1, 33))
    assert chosen(gate, 1, guesses_of(24, share=0.95)) == [24]
    assert chosen(gate, 1, guesses_of(5)) == [5]


def test_tokens_that_cost_as_much_as_a_step_are_not_taken() -> None:
    gate = taught(lambda n: 0.01 * n, range(1, 33))
    for _ in range(50):
        assert chosen(gate, 1, guesses_of(10)) == [0]


def test_now_and_then_it_looks_again() -> None:
    gate = taught(lambda n: 0.01 * n, range(1, 33))
    tries = [sum(chosen(gate, 1, guesses_of(10))) > 0 for _ in range(300)]
    assert sum(tries) == 3


def test_surer_guesses_are_longer() -> None:
    gate = taught(lambda n: 0.01 * (0.8 + 0.2 * n), range(1, 33))
    lengths = [chosen(gate, 1, guesses_of(24, share=share))[0] for share in (0.2, 0.6, 0.9, 0.98)]
    assert lengths == sorted(lengths) and lengths[0] == 0 and lengths[-1] > 8


def test_a_full_batch_leaves_no_room_for_guesses() -> None:
    """The first tokens are free, those of a full batch are not."""
    gate = taught(lambda n: 0.01 * max(1.0, n / 8), range(1, 65))
    assert chosen(gate, 1, guesses_of(24, share=0.8))[0] >= 6
    assert chosen(gate, 16, guesses_of(*[24] * 16, share=0.8)) == [0] * 16


def test_sequences_of_different_lengths_are_passes() -> None:
    def pass_s(n: int) -> float:
        return 0.01

    together, alone = taught(pass_s, range(1, 33)), taught(pass_s, range(1, 33), splits=True)
    guesses = guesses_of(3)
    assert chosen(together, 4, guesses) == [3]
    assert chosen(alone, 4, guesses) == [0], "another pass for three tokens of one"
    assert chosen(alone, 4, guesses_of(3, 3, 3, 3)) == [3, 3, 3, 3]


def test_nothing_is_known_before_the_first_step() -> None:
    assert chosen(Gate(32), 1, guesses_of(8)) == [0]
    assert StepTimes().of(3) == 0.0


def test_times_between_and_beyond_those_that_are_known() -> None:
    times = StepTimes()
    for _ in range(30):
        times.observe(4, 0.04)
        times.observe(8, 0.06)
    assert times.of(6) == pytest.approx(0.05, rel=1e-3)
    assert times.of(12) == pytest.approx(0.08, rel=1e-3)
    assert 0.01 <= times.of(1) <= 0.04
    times.observe(8, 10.0)  # it waited for a core
    assert times.of(8) < 0.1


def test_the_first_step_of_a_number_counts_half() -> None:
    """Its graph was new: a guess that pays would not be made a second time."""
    times = StepTimes()
    for n in (1, 1, 2):
        times.observe(n, 0.01 if n == 1 else 0.014)
    assert times.of(2) == pytest.approx(0.0125)
    times.observe(2, 0.0115)
    assert times.of(2) == pytest.approx(0.012)


def test_times_that_are_not_measured_follow_those_that_are() -> None:
    """A processor becomes slower and faster while only steps of one token are measured, or only those of two."""
    times = StepTimes()
    for _ in range(60):
        for n, seconds in ((1, 0.007), (2, 0.008), (8, 0.02)):
            times.observe(n, seconds)
    for n, seconds in ((1, 0.007), (2, 0.008)):
        for speed in (1.0, 2.0, 1.0):
            for _ in range(60):
                times.observe(n, seconds * speed)
            assert times.of(1) == pytest.approx(0.007 * speed, rel=0.05)
            assert times.of(2) == pytest.approx(0.008 * speed, rel=0.05)
            assert times.of(8) == pytest.approx(0.02 * speed, rel=0.05)


@pytest.mark.parametrize("way", ["seeded", "schema", "GBNF", "logprobs"])
def test_guesses_in_micro_batches_change_no_text(
    eager: None, make_engine: MakeEngine, demo: lp.Model, way: str
) -> None:
    """Wrong guesses of one are removed while the other is computed."""
    if not native().lib.lp_kernels_attend():
        pytest.skip("rows depend on one another without llamapipe's kernels")
    with make_engine(demo, n_ctx=512, n_seq_max=4, batch_invariant=True, pipeline_depth=2) as engine:
        fix_micro_batches(engine, 2)
        expected = texts(engine, None, **WAYS[way])
        assert texts(engine, f"{STORY} They walked home.", **WAYS[way]) == expected
        stats = engine.stats()
        assert stats.n_micro_batches == 2 and 0 < stats.n_accepted < stats.n_drafted
        engine.check_integrity()


# ---- which requests and models have none, and why
@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Model]:
    with lp.Model(sliding_window_model(tmp_path_factory.mktemp("models") / "model.gguf")) as model:
        yield model


@pytest.fixture
def often_wrong(eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, guess = random.Random(1), SamplerChain.guess

    def changed(self: SamplerChain, n: int) -> tuple[list[int], float]:
        tokens, share = guess(self, n)
        return [rng.randrange(5, 105) if rng.random() < 0.2 else token for token in tokens], share

    monkeypatch.setattr(SamplerChain, "guess", changed)


def prompts_of(n: int) -> list[list[int]]:
    return [[5 + (i * 37 + j * 11 + j * j) % 100 for j in range(30 + i)] for i in range(n)]


@pytest.mark.parametrize("n", [1, 5])
def test_wrong_guesses_beside_a_window_change_no_text(
    often_wrong: None, make_engine: MakeEngine, windowed: lp.Model, n: int
) -> None:
    """Wrong guesses are removed after the window has moved on, many times over: its cells are used again."""
    if not native().lib.lp_kernels_attend():
        pytest.skip("rows depend on one another without llamapipe's kernels")
    with make_engine(windowed, n_ctx=256, n_seq_max=4, batch_invariant=True) as engine:
        params = [
            lp.SamplingParams(max_tokens=150, ignore_eos=True, logprobs=1, temperature=0.2 * i, seed=i)
            for i in range(1, n + 1)
        ]
        plain = engine.generate(prompts_of(n), [replace(asked, speculate="off") for asked in params])
        assert engine.stats().n_drafted == 0
        completions = engine.generate(prompts_of(n), params)
        assert [completion.choices for completion in completions] == [
            completion.choices for completion in plain
        ]
        stats = engine.stats()
        assert 0 < stats.n_accepted < stats.n_drafted and not stats.no_guesses
        engine.check_integrity()


def test_sliding_windows_in_one_cache(often_wrong: None, make_engine: MakeEngine, windowed: lp.Model) -> None:
    params = lp.SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
    with (
        make_engine(windowed, n_ctx=256, n_seq_max=4, kv_unified=True) as engine,
        plain_loop(windowed) as plain,
    ):
        done = engine.generate(prompts_of(5), params)
        for prompt, completion in zip(prompts_of(5), done, strict=True):
            assert plain.agrees(prompt, completion.token_ids)
        assert 0 < engine.stats().n_accepted < engine.stats().n_drafted
        engine.check_integrity()


@pytest.mark.parametrize("kv_unified", [False, True])
def test_guesses_beside_a_window_are_of_one_length(
    often_wrong: None,
    make_engine: MakeEngine,
    windowed: lp.Model,
    monkeypatch: pytest.MonkeyPatch,
    kv_unified: bool,
) -> None:
    """They are one ubatch then, also beside requests that have none, and after a constraint has cut some."""
    plan, steps = BatchBuilder.plan, []

    def watched(self: BatchBuilder, *arguments: Any) -> BatchPlan:
        batch = plan(self, *arguments)
        if batch.n_guessed:
            steps.append({n - 1 for _, n in batch.scheduled})
        return batch

    monkeypatch.setattr(BatchBuilder, "plan", watched)
    with (
        make_engine(windowed, n_ctx=256, n_seq_max=6, kv_unified=kv_unified) as engine,
        plain_loop(windowed) as plain,
    ):
        options: list[dict[str, Any]] = [
            {"ignore_eos": True},
            {"ignore_eos": True, "speculate": "off"},
            {"grammar": 'root ::= ("w" [1-9]+)+'},
        ]
        params = [lp.SamplingParams(max_tokens=100, temperature=0, **options[i % 3]) for i in range(9)]
        done = engine.generate(prompts_of(9), params)
        for prompt, completion, asked in zip(prompts_of(9), done, params, strict=True):
            assert asked.grammar or plain.agrees(prompt, completion.token_ids)
        assert all(len(lengths - {0}) == 1 for lengths in steps)
        assert any(0 in lengths for lengths in steps) and max(map(max, steps)) > 3
        assert 0 < engine.stats().n_accepted < engine.stats().n_drafted
        engine.check_integrity()


def test_no_guesses_beside_a_window_while_another_step_is_computed(
    often_wrong: None, make_engine: MakeEngine, windowed: lp.Model
) -> None:
    params = lp.SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
    with (
        make_engine(windowed, n_ctx=256, n_seq_max=4, pipeline_depth=2) as engine,
        plain_loop(windowed) as plain,
    ):
        fix_micro_batches(engine, 2)
        done = engine.generate(prompts_of(4), params)
        for prompt, completion in zip(prompts_of(4), done, strict=True):
            assert plain.agrees(prompt, completion.token_ids)
        stats = engine.stats()
        assert stats.n_micro_batches == 2 and stats.n_drafted == 0
        engine.check_integrity()


# ---- recurrent states
@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Model]:
    with lp.Model(hybrid_model(tmp_path_factory.mktemp("models") / "model.gguf")) as model:
        yield model


@pytest.mark.parametrize("kv_unified", [False, True])
@pytest.mark.parametrize("n", [1, 5])
def test_states_go_back_before_wrong_guesses(
    often_wrong: None, make_engine: MakeEngine, hybrid: lp.Model, n: int, kv_unified: bool
) -> None:
    """Many times over, also while others have no guesses, and with a token that is drawn after its step."""
    with (
        make_engine(hybrid, n_ctx=256, n_seq_max=4, kv_unified=kv_unified) as engine,
        plain_loop(hybrid) as plain,
    ):
        options: list[dict[str, Any]] = [
            {},
            {},
            {"logits_processors": (lambda row: None,)},
            {"speculate": "off"},
        ]
        params = [
            lp.SamplingParams(max_tokens=150, ignore_eos=True, temperature=0, **options[i % 4])
            for i in range(n)
        ]
        for prompt, completion in zip(prompts_of(n), engine.generate(prompts_of(n), params), strict=True):
            assert plain.agrees(prompt, completion.token_ids)
        stats = engine.stats()
        assert 0 < stats.n_accepted < stats.n_drafted and not stats.no_guesses
        engine.check_integrity()


@pytest.mark.parametrize("options", [{"n_seq_max": 2}, {"n_seq_max": 4, "cache_bytes": 100_000}], ids=str)
def test_states_are_copied_saved_and_restored_between_guesses(
    often_wrong: None, make_engine: MakeEngine, hybrid: lp.Model, options: dict[str, Any]
) -> None:
    """Sequences that begin alike, for fewer slots, of three priorities: the first ones are preempted.

    They come at fixed steps, not when a thread happens to run, and write enough to repeat themselves: the n-grams of 40
    tokens had three guesses, which a step with a prompt may leave out.
    """
    with make_engine(hybrid, n_ctx=256, **options) as engine, plain_loop(hybrid) as plain:
        base = prompts_of(1)[0]
        prompts = [[*base[: 6 + 5 * (i % 5)], 5 + i] for i in range(12)]
        params = lp.SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
        streams: list[Stream] = []
        with StepGate(engine) as gate:
            for priority in range(3):
                some = prompts[4 * priority : 4 * priority + 4]
                streams += [engine.stream(prompt, replace(params, priority=priority)) for prompt in some]
                if priority == 0:
                    gate.wait()
                gate.step(30)  # sequences of less than 32 tokens are computed again, not saved
        with ThreadPoolExecutor(12) as pool:  # nobody pauses because another one is read
            done = list(
                pool.map(lambda stream: [token for delta in stream for token in delta.token_ids], streams)
            )
        for prompt, tokens in zip(prompts, done, strict=True):
            assert plain.agrees(prompt, tokens)
        several = engine.generate(base, replace(params, n=4))
        for choice in several.choices:
            assert plain.agrees(base, choice.token_ids)
        stats = engine.stats()
        assert 0 < stats.n_accepted < stats.n_drafted
        assert stats.n_preempted >= options["n_seq_max"] and stats.n_saved > 0 and stats.n_restored > 0
        engine.check_integrity()


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets predictions be tokenized by a vocabulary of w0, w1 and so on, which has no single letters."""

    def tokenize(self: Vocab, text: str, **options: Any) -> list[int]:
        return [int(number) + 3 for number in text.split("w")[1:]]

    monkeypatch.setattr(Vocab, "tokenize", tokenize)


@pytest.mark.parametrize("n", [1, 2, 6])
def test_states_are_copied_before_guesses(
    often_wrong: None, words: None, make_engine: MakeEngine, recurrent: lp.Model, n: int
) -> None:
    """Where llama.cpp keeps none: after wrong guesses a sequence returns to the copy, also if its draw is late.

    Six requests are more than the copies that a step may have.
    """
    options: list[dict[str, Any]] = [{}, {}, {"logits_processors": (lambda row: None,)}, {"speculate": "off"}]
    params = [
        lp.SamplingParams(max_tokens=100, ignore_eos=True, temperature=0, **options[i % 4]) for i in range(n)
    ]
    with make_engine(recurrent, n_ctx=256, n_seq_max=6) as engine, plain_loop(recurrent) as plain:
        texts = [done.text for done in engine.generate(prompts_of(n), params)]
        params = [replace(asked, prediction=text) for asked, text in zip(params, texts, strict=True)]
        for prompt, completion in zip(prompts_of(n), engine.generate(prompts_of(n), params), strict=True):
            assert plain.agrees(prompt, completion.token_ids)
        stats = engine.stats()
        assert 0 < stats.n_accepted < stats.n_drafted and not stats.no_guesses
        n_cached = stats.n_cache_hit_tokens
        assert stats.n_prompt_tokens + n_cached == 2 * sum(
            map(len, prompts_of(n))
        )  # nothing that came after them
        engine.check_integrity()


def test_a_text_that_ends_among_right_guesses_leaves_its_sequence(
    eager: None, words: None, make_engine: MakeEngine, recurrent: lp.Model
) -> None:
    """Its state is after the stop string: the sequence returns to the copy, and the next request begins there."""
    [prompt], params = prompts_of(1), lp.SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
    with make_engine(recurrent, n_ctx=256, n_seq_max=1) as engine, plain_loop(recurrent) as plain:
        text = engine.generate(prompt, replace(params, speculate="off")).text
        for end in (40, 81, 122):
            stop = text[end : end + 9]
            done = engine.generate(prompt, replace(params, prediction=text, stop=stop))
            assert done.text == text[: text.index(stop)] and done.n_accepted_tokens > 0
            told = [*prompt, *done.token_ids]
            again = engine.generate([*told, 7], replace(params, max_tokens=10, speculate="off"))
            assert again.n_cached_tokens > 0 and plain.agrees([*told, 7], again.token_ids)
        engine.check_integrity()


@pytest.mark.parametrize("n_back", [1, 2, 5, 8, 9])
def test_states_of_earlier_steps_are_not_gone_back_to(
    make_engine: MakeEngine, hybrid: lp.Model, n_back: int
) -> None:
    """llama.cpp would take what it kept when a step had as many tokens."""
    prompt = prompts_of(1)[0]
    params = lp.SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    with make_engine(hybrid, n_ctx=256, n_seq_max=3) as engine, plain_loop(hybrid) as plain:
        with engine.start(prompt, params) as generation:
            told = prompt + [next(generation).id for _ in range(12)]
            kept = told[: len(told) - n_back]
            generation.trim(len(kept))
            assert plain.agrees(kept, [next(generation).id for _ in range(12)])
        for tokens in (told, told[:-n_back]):  # a saved sequence, and a part of it
            done = engine.generate(tokens, replace(params, max_tokens=12))
            assert plain.agrees(tokens, done.token_ids)
        engine.check_integrity()


@pytest.mark.parametrize("n_ubatch", [1, 2, 3, 5])
def test_states_need_room_in_a_ubatch(make_engine: MakeEngine, hybrid: lp.Model, n_ubatch: int) -> None:
    """llama.cpp aborts where more would be kept. Where none are, a state is copied before guesses."""
    with (
        make_engine(hybrid, n_ctx=64, n_seq_max=1, n_ubatch=n_ubatch) as engine,
        plain_loop(hybrid) as plain,
    ):
        params = lp.SamplingParams(max_tokens=30, ignore_eos=True, temperature=0)
        assert plain.agrees(prompts_of(1)[0], engine.generate(prompts_of(1)[0], params).token_ids)
        assert ("n_ubatch" in engine.stats().no_guesses) == (n_ubatch == 1)


@pytest.mark.parametrize("kind", ["sliding window", "recurrent states"])
def test_a_conversation_keeps_its_cells(
    often_wrong: None, make_engine: MakeEngine, windowed: lp.Model, hybrid: lp.Model, kind: str
) -> None:
    """Although its last step had wrong guesses, whose cells are removed when it leaves its slot."""
    with make_engine(windowed if kind == "sliding window" else hybrid, n_ctx=256, n_seq_max=2) as engine:
        told, n_known = prompts_of(1)[0], 0
        for i in range(5):
            params = lp.SamplingParams(max_tokens=38 + i, ignore_eos=True, temperature=0)
            done = engine.generate(told, params)
            assert done.n_cached_tokens == n_known
            n_known = len(told) + len(done.token_ids) - 1
            told = told + done.token_ids + [5 + i, 9]
        assert 0 < engine.stats().n_accepted < engine.stats().n_drafted
        engine.check_integrity()


def test_statistics_say_why_nothing_is_guessed(
    engine: lp.Engine, make_engine: MakeEngine, recurrent: lp.Model
) -> None:
    engine.generate("a", lp.SamplingParams(max_tokens=2))
    assert (engine.stats().no_guesses, engine.stats().unguessed) == ("", {})
    engine.generate(["a", "b"], lp.SamplingParams(max_tokens=2, speculate="off"))
    with engine.start("a") as generation:
        generation.next()
    reasons = {reason.partition(":")[0]: n for reason, n in engine.stats().unguessed.items()}
    assert reasons == {"speculate is 'off'": 2, "engine.start": 1}
    with make_engine(recurrent, n_ctx=64, n_seq_max=1, n_ubatch=1) as other:
        other.generate([5, 6], lp.SamplingParams(max_tokens=2, speculate="off"))
        assert "n_ubatch" in other.stats().no_guesses
        assert other.stats().unguessed == {}
        assert other.trace.to_chrome()["otherData"] == {"no_guesses": other.stats().no_guesses}


def test_a_trace_has_guesses(engine: lp.Engine) -> None:
    text = engine.generate(PROMPT, lp.SamplingParams(temperature=0, max_tokens=40, speculate="off")).text
    engine.trace.start()
    done = engine.generate(PROMPT, lp.SamplingParams(temperature=0, max_tokens=40, prediction=text))
    engine.stats()  # the last step is delivered
    engine.trace.stop()
    spans = engine.trace.spans()
    assert sum(span.n_drafted for span in spans) == done.n_drafted_tokens
    assert sum(span.n_accepted for span in spans) == done.n_accepted_tokens > 0
    arguments = [event["args"] for event in engine.trace.to_chrome()["traceEvents"]]
    assert sum(event.get("accepted", 0) for event in arguments) == done.n_accepted_tokens


def test_the_first_copy_of_a_state_says_little() -> None:
    """It is into new memory."""
    gate = Gate(32, copies_states=True)
    gate.observe_copies(2, 1.0)
    gate.observe_copies(2, 0.004)
    assert gate._copy_s == pytest.approx(0.002)
