"""A draft model changes how many steps a text takes, and not the text."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from support.bert_model import bert_model
from support.fakes import FakeSampler
from support.gguf_models import tiny_model
from support.inside import scheduler_of, step_executor_of
from support.memory import cache_of

import llamapipe as lp
from llamapipe._engine.policy.core import Request, RequestSpec
from llamapipe._engine.policy.scheduler import Scheduler
from llamapipe._engine.policy.speculation import EVERY, Gate, Guess, Mean, Worth
from llamapipe._engine.runtime.draft import DraftModel
from llamapipe.errors import BackendError, ContextFullError, DecodeError, InvalidRequestError
from llamapipe.native.load import native

pytestmark = pytest.mark.native
MakeEngine = Callable[..., lp.Engine]
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


@pytest.fixture(scope="module")
def similar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Model]:
    """The bundled model with noise in its weights: it is right now and then."""
    path = tmp_path_factory.mktemp("similar") / "similar.gguf"
    shutil.copyfile(lp.demo_model_path(), path)
    rng = np.random.default_rng(1)
    data = np.memmap(path, np.uint8, "r+")
    for tensor in GGUFReader(path).tensors:
        if tensor.tensor_type.name == "Q8_0" and "ffn" in tensor.name:
            first = int(tensor.data_offset)
            blocks = data[first : first + tensor.n_bytes].reshape(-1, 34)[:, 2:].view(np.int8)
            blocks[:] = np.clip(blocks + rng.integers(-30, 31, blocks.shape), -127, 127)
    data.flush()
    with lp.Model(path) as model:
        yield model


@pytest.fixture(params=["itself", "similar"])
def draft(request: pytest.FixtureRequest, demo: lp.Model, similar: lp.Model) -> lp.Model:
    return demo if request.param == "itself" else similar


@pytest.fixture
def engine(eager: None, make_engine: MakeEngine, demo: lp.Model, draft: lp.Model) -> lp.Engine:
    if not native().lib.lp_kernels_attend():
        pytest.skip("rows depend on one another without llamapipe's kernels")
    return make_engine(demo, n_ctx=256, n_seq_max=4, batch_invariant=True, draft=draft)


def drafter_of(engine: lp.Engine) -> DraftModel:
    drafter = scheduler_of(engine).gate.drafter
    assert isinstance(drafter, DraftModel)
    return drafter


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {},
    "penalties": {"repeat_penalty": 1.1, "presence_penalty": 0.2},
    "schema": {"json_schema": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}},
    "stop": {"temperature": 0, "stop": ["park", "said"]},
    "GBNF": {"grammar": 'root ::= ([a-zA-Z ,]+ ".")+', "logprobs": 1},
    "regex": {"regex": "([a-zA-Z, ]+[.])+", "logprobs": 1},
    "processor": {"logits_processors": (lambda row: None,), "logprobs": 1},
    "prediction": {"temperature": 0, "prediction": f"{STORY} They walked home."},
}


@pytest.mark.parametrize("way", WAYS)
def test_texts_are_those_without_drafts(engine: lp.Engine, way: str) -> None:
    def texts(speculate: str | None) -> list[tuple[lp.Choice, ...]]:
        params = [
            lp.SamplingParams(max_tokens=60, seed=i, speculate=speculate, **WAYS[way])  # type: ignore[arg-type]
            for i in range(7)
        ]
        done = engine.generate([STORY[: 40 + 8 * i] for i in range(7)], params)
        return [completion.choices for completion in done]

    expected = texts("off")
    assert engine.stats().n_drafted == 0
    for speculate in (None, "draft"):
        assert texts(speculate) == expected
    stats = engine.stats()
    assert stats.n_accepted <= stats.n_drafted
    assert stats.n_accepted > 0 or way == "schema"
    engine.check_integrity()


def test_a_right_draft_saves_steps(eager: None, make_engine: MakeEngine, demo: lp.Model) -> None:
    with make_engine(demo, n_ctx=256, n_seq_max=2, draft=demo) as engine:
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 90, "ignore_eos": True}
        plain = engine.generate(STORY, lp.SamplingParams(**options, speculate="off"))
        before = engine.stats()
        done = engine.generate(STORY, lp.SamplingParams(**options, speculate="draft"))
        after = engine.stats()
        assert done.text == plain.text
        assert after.steps - before.steps < 40
        assert done.n_accepted_tokens == after.n_accepted > 45


@pytest.mark.parametrize(
    "constraint",
    [{"regex": "[a-df-zA-DF-Z,. ]{200,}"}, {"grammar": "root ::= [a-df-zA-DF-Z,. ]+"}],
    ids=("regex", "GBNF"),
)
def test_a_draft_ends_where_a_constraint_forbids_a_token(
    eager: None,
    make_engine: MakeEngine,
    demo: lp.Model,
    monkeypatch: pytest.MonkeyPatch,
    constraint: dict[str, str],
) -> None:
    """No row is computed for it, and nothing is drafted after it."""
    options: dict[str, Any] = {**constraint, "max_tokens": 60, "temperature": 0}
    drafted: list[list[int]] = []
    draft = DraftModel.draft

    def watched(self: DraftModel, chosen: Mapping[Request, int]) -> dict[Request, Sequence[int]]:
        drafts = draft(self, chosen)
        drafted.extend(map(list, drafts.values()))
        return drafts

    monkeypatch.setattr(DraftModel, "draft", watched)
    with make_engine(demo, n_ctx=256, n_seq_max=2, draft=demo) as engine:
        # The sampler's jobs are run where they are added: what a test finds must not depend on other threads.
        step_executor_of(engine).threads.close()
        plain = engine.generate(STORY, lp.SamplingParams(**options, speculate="off"))
        done = engine.generate(STORY, lp.SamplingParams(**options, speculate="draft"))
        assert done.token_ids == plain.token_ids
        wrong = [["e" in demo.detokenize([token]) for token in tokens] for tokens in drafted]
        assert sum(map(any, wrong)) > 5 and not any(any(flags[:-1]) for flags in wrong)
        assert done.n_drafted_tokens <= sum(map(len, drafted)) - sum(flags[-1] for flags in wrong)
        assert done.n_accepted_tokens > 5


def test_ngram_does_not_draft(engine: lp.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftModel, "guess", lambda *arguments: pytest.fail("asked for a draft"))
    engine.generate(STORY, lp.SamplingParams(max_tokens=20, speculate="ngram"))
    engine.generate(STORY, lp.SamplingParams(max_tokens=20, speculate="off"))


def test_a_draft_needs_a_draft_model(make_engine: MakeEngine, demo: lp.Model) -> None:
    with make_engine(demo, n_ctx=64, n_seq_max=1) as engine:
        with pytest.raises(InvalidRequestError, match=r"no draft model; give Engine\(draft=\.\.\.\)"):
            engine.generate("a", lp.SamplingParams(speculate="draft"))
        engine.generate("a", lp.SamplingParams(max_tokens=2))


@pytest.mark.parametrize(
    "options", [{}, {"n_cells": 200}, {"overflow": "recompute"}, {"overflow": "shift"}], ids=str
)
def test_scarce_cells_cut_no_text(
    eager: None, make_engine: MakeEngine, demo: lp.Model, options: dict[str, Any]
) -> None:
    with make_engine(demo, n_ctx=96, n_seq_max=4, draft=demo, **options) as engine:
        params = lp.SamplingParams(temperature=0, max_tokens=150, speculate="draft", ignore_eos=True)
        done = engine.generate([STORY[: 70 + i] for i in range(6)], params)
        assert {completion.finish_reason for completion in done} == {"length"}
        assert engine.stats().n_accepted > 0
        engine.check_integrity()


def test_streams_that_end_early(engine: lp.Engine) -> None:
    params = lp.SamplingParams(temperature=0, max_tokens=60, speculate="draft")
    expected = engine.generate(STORY, lp.SamplingParams(temperature=0, max_tokens=60, speculate="off"))
    for n in range(0, 40, 3):
        with engine.stream(STORY, params) as stream:
            tokens = [token for _, delta in zip(range(n), stream, strict=False) for token in delta.token_ids]
        assert tokens == expected.token_ids[: len(tokens)]
    engine.check_integrity()


def test_a_request_begins_with_the_cells_of_another(
    eager: None, make_engine: MakeEngine, demo: lp.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not with those of others: the time would tell what their prompts were."""
    computed: list[int] = []
    decode = DraftModel._decode

    def counted(self: DraftModel, entries: Sequence[tuple[Request, Sequence[int]]]) -> Any:
        computed.append(sum(len(tokens) for _, tokens in entries))
        return decode(self, entries)

    monkeypatch.setattr(DraftModel, "_decode", counted)
    with make_engine(demo, n_ctx=256, n_seq_max=4, draft=demo) as engine:
        prompt = engine.model.tokenize(STORY * 4)

        def longest(**options: Any) -> int:
            computed.clear()
            engine.generate(
                prompt, lp.SamplingParams(max_tokens=8, temperature=0, speculate="draft", **options)
            )
            return max(computed)

        assert longest() >= len(prompt)
        assert longest() < 5
        assert longest(cache_salt="other") >= len(prompt)
        assert longest(cache_salt="other") < 5
        assert longest(cache=False) >= len(prompt)
        computed.clear()
        several = lp.SamplingParams(max_tokens=8, n=4, speculate="draft", cache_salt="third")
        engine.generate(prompt, several)
        assert sum(computed) < 2 * len(prompt)


@pytest.mark.parametrize("error", [DecodeError("broken"), BackendError("lost"), MemoryError()])
def test_an_error_of_the_draft_model_ends_no_request(
    eager: None,
    make_engine: MakeEngine,
    demo: lp.Model,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*arguments: object) -> None:
        raise error

    with make_engine(demo, n_ctx=128, n_seq_max=2, draft=demo) as engine:
        expected = engine.generate(STORY, lp.SamplingParams(temperature=0, max_tokens=30, speculate="off"))
        monkeypatch.setattr(DraftModel, "_decode", broken)
        with caplog.at_level(logging.WARNING, "llamapipe"):
            done = engine.generate([STORY, STORY], lp.SamplingParams(temperature=0, max_tokens=30))
        assert [completion.text for completion in done] == [expected.text] * 2
        assert sum("draft model is not used any more" in record.message for record in caplog.records) == 1
        engine.check_integrity()


def test_a_full_draft_context_drops_idle_sequences(
    eager: None, make_engine: MakeEngine, demo: lp.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_engine(demo, n_ctx=128, n_seq_max=3, draft=demo) as engine:
        drafter = drafter_of(engine)
        params = lp.SamplingParams(temperature=0, max_tokens=20, speculate="draft")
        engine.generate([STORY, STORY[:50]], params)
        decode, n_failed = DraftModel._decode, 0

        def full(self: DraftModel, entries: Any) -> Any:
            nonlocal n_failed
            if n_failed == 0:
                n_failed += 1
                raise ContextFullError("no cells")
            return decode(self, entries)

        monkeypatch.setattr(DraftModel, "_decode", full)
        before = engine.stats().n_accepted
        engine.generate("The dog", params)
        assert n_failed == 1 and engine.stats().n_accepted > before
        assert sum(bool(held.tokens) for held in drafter._held) == 1


def test_long_prompts_are_computed_in_parts(eager: None, make_engine: MakeEngine, demo: lp.Model) -> None:
    """So that other requests need not wait for all of it."""
    with make_engine(demo, n_ctx=256, n_seq_max=2, draft=demo, tuning=lp.EngineTuning(n_ubatch=32)) as engine:
        params = lp.SamplingParams(temperature=0, max_tokens=40, speculate="draft")
        done = engine.generate(engine.model.tokenize(STORY * 8)[:200], params)
        assert max(drafter_of(engine).times._ns) <= 32
        assert done.n_accepted_tokens > 0


def test_streams_wait_no_longer_for_a_prompt_of_the_draft_model_than_for_others(
    eager: None, make_engine: MakeEngine, demo: lp.Model
) -> None:
    with make_engine(demo, n_ctx=256, n_seq_max=2, draft=demo, max_itl_ms=5) as engine:
        params = lp.SamplingParams(temperature=0, max_tokens=40, speculate="draft")
        engine.generate(engine.model.tokenize(STORY * 8)[:200], params)
        assert max(drafter_of(engine).times._ns) <= 64


def test_who_owns_the_draft_model(make_engine: MakeEngine, demo: lp.Model) -> None:
    with make_engine(demo, n_ctx=64, n_seq_max=1, draft=lp.demo_model_path()) as engine:
        loaded = engine._draft_model
        assert loaded is not None and not loaded.closed
    assert loaded.closed and not demo.closed


def test_unfit_models_are_refused(make_engine: MakeEngine, demo: lp.Model, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other.gguf", "gpt-2")
    embedding, _ = bert_model(tmp_path / "bert.gguf")
    for path, match in (
        (other, "the vocabularies of demo.gguf and other.gguf differ"),
        (embedding, "is not causal|vocabularies|not a decoder"),
    ):
        with pytest.raises((ValueError, InvalidRequestError), match=match):
            make_engine(demo, n_ctx=64, n_seq_max=1, draft=path)
    with pytest.raises(
        TypeError, match='draft must be a Model, the path of a GGUF file, "mtp", "auto" or None, not int'
    ):
        make_engine(demo, n_ctx=64, n_seq_max=1, draft=1)


# ---- when it pays
class Paid:
    """A drafter that takes as long as a test says, and thinks that a share of its tokens is right."""

    def __init__(self, seconds: float, share: float = 0.9) -> None:
        self.seconds_a_token = seconds
        self.share = share
        self.prompt_s = 0.0  # of which a share is next to nothing
        self.n_calls = 0
        self.worth = EVERY
        self.took_s = 0.0

    def begin(self) -> None:
        pass

    def guess(self, request: Request, n: int) -> Guess:
        return Guess(request, range(n), self.share, is_draft=True)

    def seconds(self, chosen: Mapping[Request, int], whole: bool = False) -> float:
        return self.seconds_a_token * max(chosen.values(), default=0) + self.prompt_s * whole

    def draft(self, chosen: Mapping[Request, int], worth: Worth = EVERY) -> dict[Request, Sequence[int]]:
        self.n_calls += 1
        self.worth = worth
        self.took_s = self.seconds(chosen)
        return {request: [7] * n for request, n in chosen.items()}

    def close(self) -> None:
        pass


def learn(gate: Gate, step_s: Callable[[int], float]) -> None:
    """Show a gate what steps take, before it has a drafter."""
    drafter, gate.drafter = gate.drafter, None
    for n in [*range(1, 33)] * 8:
        gate.observe(n, 0, step_s(n))
    gate.drafter = drafter


def play(
    gate: Gate,
    n_tokens: int,
    step_s: Callable[[int], float],
    share: float,
) -> tuple[list[int], float]:
    """Generate tokens, of which a share is what the draft said.

    Returns how many tokens each step guessed, and the time over that without guesses.
    """
    rng = random.Random(1)
    request, lengths, n, seconds = Request([1]), [], 0, 0.0
    while n < n_tokens:
        drafter, chosen = gate.next_drafter(), {}
        n_calls = drafter.n_calls if isinstance(drafter, Paid) else 0
        draft = None if drafter is None else drafter.guess(request, 24)
        if draft is not None:
            chosen = gate.choose(1, [draft], 512)
        n_guessed = sum(map(len, chosen.values()))
        n_right = next((i for i in range(n_guessed) if rng.random() >= share), n_guessed)
        gate.n_accepted += n_right
        took_s = step_s(1 + n_guessed)
        if isinstance(drafter, Paid) and drafter.n_calls > n_calls:
            took_s += drafter.took_s
        gate.observe(1, n_guessed, took_s)
        lengths.append(n_guessed)
        seconds += took_s
        n += 1 + n_right
    return lengths, seconds / (n * step_s(1))


def slowly(n: int) -> float:
    """Seconds of a step with ``n`` rows."""
    return 0.01 + 0.002 * (n - 1)


def test_cheap_drafts_are_long_and_dear_ones_are_not_made() -> None:
    longest = []
    for seconds in (0.0001, 0.002, 0.004, 0.02):
        drafter = Paid(seconds)
        gate = Gate(32, drafter=drafter)
        learn(gate, lambda n: 0.01 + 0.0002 * n)
        longest.append(max(play(gate, 60, lambda n: 0.01 + 0.0002 * n, 0.9)[0]))
        if seconds == 0.02:
            assert drafter.n_calls == 0
    assert longest == sorted(longest, reverse=True)
    assert longest[0] >= 10 and longest[2] > 0 and longest[3] == 0


def test_drafts_that_do_not_pay_are_seldom_tried() -> None:
    gate = Gate(32, drafter=Paid(0.02))
    learn(gate, lambda n: 0.01)
    lengths, _ = play(gate, 30_000, lambda n: 0.01, 0.0)
    tries = [i for i, n in enumerate(lengths) if n]
    assert 5 < len(tries) < 15
    gaps = [b - a for a, b in pairwise(tries)]
    assert gaps == sorted(gaps)


@pytest.mark.parametrize("draft_s", [0.0005, 0.002, 0.005])
@pytest.mark.parametrize("share", [0.0, 0.1])
def test_drafts_that_promise_too_much_lose_little(draft_s: float, share: float) -> None:
    """Less than two steps of a hundred, from the first text on."""
    gate = Gate(32, drafter=Paid(draft_s, share=0.9))
    learn(gate, slowly)
    lengths, relative = play(gate, 256, slowly, share)
    assert 0 < sum(map(bool, lengths)) < 30
    assert relative < 1.02
    assert play(gate, 2560, slowly, share)[1] < 1.01


def test_a_draft_that_is_only_tried_pays_for_its_prompt() -> None:
    """Nothing else follows it. At first the credit does not suffice, and a hundred steps add half a step to it."""
    drafter = Paid(0.004, share=0.2)
    drafter.prompt_s = 0.04
    gate = Gate(32, drafter=drafter)
    learn(gate, lambda n: 0.01)
    lengths, _ = play(gate, 2000, lambda n: 0.01, 0.0)
    tries = [i for i, n in enumerate(lengths) if n]
    assert len(tries) > 1
    assert all(b - a > 250 for a, b in pairwise([0, *tries]))


class Unmeasured(Paid):
    """Knows nothing of its time before the first draft, in which it also computes a long prompt."""

    def seconds(self, chosen: Mapping[Request, int], whole: bool = False) -> float:
        return super().seconds(chosen, whole) if self.n_calls else 0.0

    def draft(self, chosen: Mapping[Request, int], worth: Worth = EVERY) -> dict[Request, Sequence[int]]:
        is_first = not self.n_calls
        drafted = super().draft(chosen, worth)
        self.took_s += self.prompt_s * is_first
        return drafted


def test_the_prompt_of_the_first_draft_does_not_end_drafts() -> None:
    """It takes as long as fifty steps, which steps without drafts would pay back in ten thousand."""
    drafter = Unmeasured(0.0005, share=0.8)
    drafter.prompt_s = 0.5
    gate = Gate(32, drafter=drafter)
    learn(gate, lambda n: 0.01 + 0.0002 * n)
    play(gate, 100, lambda n: 0.01 + 0.0002 * n, 0.8)
    assert play(gate, 1000, lambda n: 0.01 + 0.0002 * n, 0.8)[1] < 0.6


class Repeating(FakeSampler):
    """Guesses what the text repeats."""

    def guess(self, n: int) -> tuple[Sequence[int], float]:
        return [7] * n, 0.9


def test_guesses_from_the_text_are_not_counted_as_drafts() -> None:
    """A draft was on offer as well, which costs more than it brings."""
    gate = Gate(32, drafter=Paid(0.02, share=0.95))
    learn(gate, lambda n: 0.01 + 0.0002 * n)
    scheduler = Scheduler(cache_of(1), 64, 64, 32, 16, gate=gate)
    request = Request([1, 2, 3], RequestSpec(20, speculates=True, drafts=True))
    request.sampler = Repeating()
    scheduler.add(request)
    for _ in range(2):  # the prompt, then guesses
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, [7] * len(plan.requests))
        scheduler.can_guess = True
    assert gate.n_drafted == gate.n_accepted > 0
    assert gate.n_drafted_by_model == gate.n_accepted_by_model == 0


def test_drafts_that_promise_too_much_are_taken_where_they_pay() -> None:
    gate = Gate(32, drafter=Paid(0.001, share=0.9))
    learn(gate, slowly)
    assert play(gate, 2560, slowly, 0.7)[1] < 0.97


def test_a_step_without_guesses_is_measured_again() -> None:
    """It was slow when the drafts began. Now they are all that makes a step slow."""
    gate = Gate(32, drafter=Paid(0.001, share=0.5))
    learn(gate, lambda n: 0.02 if n == 1 else 0.021)
    lengths, _ = play(gate, 200, lambda n: 0.02 if n == 1 else 0.021, 0.5)
    assert sum(map(bool, lengths)) > 100 and max(_runs(lengths)) == 32
    lengths, _ = play(gate, 1000, lambda n: 0.01 if n == 1 else 0.021, 0.5)
    assert sum(map(bool, lengths[200:])) < 10


def _runs(lengths: Sequence[int]) -> list[int]:
    """The lengths of the runs of steps with guesses."""
    return [len(list(run)) for is_guessed, run in groupby(lengths, bool) if is_guessed]


def test_a_free_guess_is_taken_where_a_draft_brings_little_more() -> None:
    for draft_s, from_draft in ((0.0001, True), (0.004, False)):
        drafter = Paid(draft_s, share=0.7)
        gate = Gate(32, drafter=drafter)
        learn(gate, slowly)
        free = Guess(Request([1]), [5] * 8, 0.6)
        chosen = gate.choose(1, [drafter.guess(free.request, 8), free], 512)
        assert set(chosen[free.request]) == ({7} if from_draft else {5})
        assert drafter.n_calls == from_draft


def test_a_draft_is_made_beside_free_guesses_of_others() -> None:
    drafter = Paid(0.0001, share=0.7)
    gate = Gate(32, drafter=drafter)
    learn(gate, lambda n: 0.01 + 0.0002 * n)
    free, other = Guess(Request([1]), [5] * 8, 0.99), Request([1])
    chosen = gate.choose(2, [free, drafter.guess(free.request, 8), drafter.guess(other, 8)], 512)
    assert set(chosen[free.request]) == {5} and set(chosen[other]) == {7}


@pytest.mark.parametrize(("n_requests", "splits"), [(1, False), (1, True), (3, False), (3, True)])
def test_a_draft_is_told_what_a_row_is_worth(n_requests: int, splits: bool) -> None:
    """But not where rows of one length are one pass, and drafts of several requests should have the same."""
    drafter = Paid(0.001)
    gate = Gate(32, splits, drafter=drafter)
    learn(gate, lambda n: 0.01 + 0.001 * n)
    guesses = [drafter.guess(Request([1]), 4) for _ in range(n_requests)]
    assert gate.choose(n_requests, guesses, 512)
    if splits and n_requests > 1:
        assert drafter.worth == EVERY
    else:
        assert drafter.worth.row_s == pytest.approx(0.001, rel=0.05)
        assert drafter.worth.rate > n_requests / (0.01 + 0.001 * n_requests)


def test_a_mean_knows_the_newest_best() -> None:
    mean = Mean(0.8, 2, 4)
    mean.observe(0.0)
    assert mean.mean == pytest.approx(0.8 * 2 / 3)
    for _ in range(50):
        mean.observe(1.0)
    mean.observe(0.0)
    assert mean.mean == pytest.approx(0.75, abs=1e-4)


def test_a_token_that_is_not_worth_its_row_is_not_drafted(
    eager: None, make_engine: MakeEngine, demo: lp.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft ends before it. Whether it was right is known all the same."""
    draft = DraftModel.draft
    lengths: dict[float, list[int]] = {}
    for least in (0.0, 0.5):
        counts = lengths[least] = []

        def worth(
            self: DraftModel, chosen: Mapping[Request, int], least: float = least, counts: list[int] = counts
        ) -> dict[Request, Sequence[int]]:
            drafted = draft(self, chosen, Worth(1.0, least))
            counts += map(len, drafted.values())
            for request in chosen:
                held = self._held[request.slot]
                chances = [self._chances[n_bin].mean for _, n_bin in held.drafted]
                assert len(drafted.get(request, ())) == held.n_sure >= len(held.drafted) - 1
                assert all(chance >= least for chance in chances[: held.n_sure])
            return drafted

        monkeypatch.setattr(DraftModel, "draft", worth)
        with make_engine(demo, n_ctx=256, n_seq_max=1, draft=demo) as engine:
            params = lp.SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, speculate="draft")
            engine.generate(STORY, params)
            drafter = drafter_of(engine)
            assert (drafter._sure.mean > 0.95) == (least == 0)
            assert sum(mean.n for mean in drafter._chances) > 60
    assert sum(lengths[0.5]) / len(lengths[0.5]) < sum(lengths[0.0]) / len(lengths[0.0])


def test_the_gate_learns_from_whole_turns(
    make_engine: MakeEngine, demo: lp.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning and delivery are part of what a caller waits for, and a draft is not part of its step."""
    seen: list[tuple[float, float, float]] = []
    observe = Gate.observe

    def observed(self: Gate, n_decoding: int, n_guessed: int, seconds: float) -> None:
        seen.append((n_guessed, self._apart_s, seconds))
        observe(self, n_decoding, n_guessed, seconds)

    monkeypatch.setattr(Gate, "observe", observed)
    monkeypatch.setattr(DraftModel, "seconds", lambda self, chosen, whole=False: 0.0)
    with make_engine(demo, n_ctx=256, n_seq_max=1, draft=demo) as engine:
        engine.generate(STORY, lp.SamplingParams(temperature=0, max_tokens=60, speculate="draft"))
        n_steps = engine.stats().steps
    assert len(seen) == n_steps - 1, "all but that of the prompt"
    assert all(0 < apart_s < seconds for n, apart_s, seconds in seen if n)
    assert any(n for n, *_ in seen)
