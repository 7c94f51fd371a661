"""A draft that reads what the model computes changes how many steps a text takes, and not the text.

The tests here are those of all kinds of such files; others are in files named after the kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.assistant_models import assistant, assistant_target
from support.dflash_models import dflash_draft
from support.drafting import (
    PROMPTS,
    RANDOM,
    Drafts,
    check_fork_and_snapshot,
    check_texts,
    params,
    share_alone,
    share_right,
    watch,
)
from support.eagle3_models import eagle3_draft, eagle3_target
from support.plain import plain_loop

import llamapipe as lp
from llamapipe._engine.runtime.draft import AssistantDraft, DFlashDraft, DraftModel, Eagle3Draft
from llamapipe.errors import DecodeError, InvalidRequestError

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("eager")]
MakeEngine = Callable[..., lp.Engine]
Heads = dict[str, lp.Model]


class Kind(NamedTuple):
    """The class that drafts, and what writes a model, and a draft for it with some noise: 0: right; None: random."""

    drafter: type[DraftModel]
    target: Callable[[Path], Path]
    draft: Callable[[Path, Path, float | None], Path]


KINDS = {
    "DFlash": Kind(DFlashDraft, eagle3_target, dflash_draft),
    "EAGLE-3": Kind(Eagle3Draft, eagle3_target, eagle3_draft),
    "assistant": Kind(AssistantDraft, assistant_target, assistant),
}
NOISE = {"right": 0.0, "often right": 0.6, "wrong": None}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(scope="module")
def model(folder: Path, kind: Kind) -> Iterator[lp.Model]:
    with lp.Model(kind.target(folder / f"{kind.drafter.__name__}.gguf")) as model:
        yield model


@pytest.fixture(scope="module")
def heads(folder: Path, model: lp.Model, kind: Kind) -> Iterator[Heads]:
    paths = {name: folder / f"{kind.drafter.__name__} {i}.gguf" for i, name in enumerate(NOISE)}
    heads = {name: lp.Model(kind.draft(path, model.path, NOISE[name])) for name, path in paths.items()}
    yield heads
    for head in heads.values():
        head.close()


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> Drafts:
    return watch(monkeypatch, kind.drafter)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "with other guesses": {"speculate": None},
    "seeded": RANDOM,
    "penalties": {"repeat_penalty": 1.1, "presence_penalty": 0.2},
    "logprobs": {"logprobs": 2},
    "GBNF": {"grammar": r"root ::= [\x20-\x7e]+", "ignore_eos": False, "max_tokens": 25},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head", NOISE)
def test_texts_are_those_without_drafts(
    make_engine: MakeEngine, model: lp.Model, heads: Heads, head: str, way: str
) -> None:
    """Seven requests in four slots; a seed's text shows that the distribution is the same."""
    with make_engine(model, n_ctx=256, n_seq_max=4, draft=heads[head]) as engine:
        check_texts(engine, WAYS[way])


def test_a_right_draft_saves_steps(make_engine: MakeEngine, model: lp.Model, heads: Heads) -> None:
    """It reads the state of the right token, also after its own drafts: with another all drafts would be wrong."""
    with make_engine(model, n_ctx=256, n_seq_max=1, draft=heads["right"]) as engine:
        engine.generate(PROMPTS[1], params(90))
        stats = engine.stats()
        assert stats.n_accepted_by_model > 0.9 * stats.n_drafted_by_model > 30
        assert stats.steps < 60


@pytest.mark.parametrize("kv_unified", [False, True])
def test_drafts_beside_others_are_those_alone(
    make_engine: MakeEngine, model: lp.Model, heads: Heads, drafts: list[Any], kv_unified: bool
) -> None:
    """Each is what a new engine drafts after the same tokens, as one prompt."""
    head, tuning = heads["often right"], lp.EngineTuning(kv_unified=kv_unified)
    with make_engine(model, n_ctx=256, n_seq_max=3, draft=head, prefix_cache=False, tuning=tuning) as engine:
        engine.generate(PROMPTS, params())
        engine.generate(
            [prompt * 8 for prompt in PROMPTS], params()
        )  # more missing tokens than one decode may have
    with make_engine(model, n_ctx=256, n_seq_max=1, prefix_cache=False, draft=head) as engine:
        assert share_alone(engine, drafts) == 1.0


def test_drafts_of_requests_share_a_batch(
    make_engine: MakeEngine, model: lp.Model, heads: Heads, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_sequences: list[int] = []
    compute = kind.drafter._compute

    def counted(self: DraftModel, batch: Any) -> None:
        n_sequences.append(len(set(batch.seq_ids)))
        compute(self, batch)

    monkeypatch.setattr(kind.drafter, "_compute", counted)
    with make_engine(model, n_ctx=256, n_seq_max=4, draft=heads["often right"]) as engine:
        engine.generate(PROMPTS[:4], params())
    assert max(n_sequences) == 4


def test_cached_and_saved_prefixes(make_engine: MakeEngine, model: lp.Model, heads: Heads) -> None:
    """States are copied with cells; those that were saved have none, and the draft begins after them."""
    prefix, other = [*range(40, 80), *range(90, 120)], [*range(120, 170)]
    with (
        make_engine(model, n_ctx=256, n_seq_max=1, draft=heads["right"]) as engine,
        plain_loop(model) as plain,
    ):
        first = engine.generate(prefix, params())
        for prompt in ([*prefix, *first.token_ids, 50, 51], [*prefix, 70], other, prefix) * 2:
            before = engine.stats()
            done = engine.generate(prompt, params())
            assert plain.agrees(prompt, done.token_ids)
            assert share_right(before, engine.stats()) > 0.8
        assert engine.stats().n_cache_hit_tokens > 0 < engine.stats().n_restored
        engine.check_integrity()


def test_fork_snapshot_and_choices(make_engine: MakeEngine, model: lp.Model, heads: Heads) -> None:
    with make_engine(model, n_ctx=256, n_seq_max=3, draft=heads["right"]) as engine:
        check_fork_and_snapshot(engine)
        done = engine.generate(PROMPTS[6] * 3, params(20, n=4, seed=1, **RANDOM))
        assert len({tuple(choice.token_ids) for choice in done.choices}) > 1
        engine.check_integrity()


@pytest.mark.parametrize("options", [{"n_cells": 200}, {"overflow": "recompute"}], ids=str)
def test_scarce_cells(
    make_engine: MakeEngine, model: lp.Model, heads: Heads, options: dict[str, Any]
) -> None:
    with make_engine(model, n_ctx=96, n_seq_max=4, draft=heads["right"], **options) as engine:
        done = engine.generate(PROMPTS, params(150))
        assert {completion.finish_reason for completion in done} == {"length"}
        assert engine.stats().n_accepted_by_model > 0
        engine.check_integrity()


def test_drafts_change_no_bit_of_an_invariant_text(
    make_engine: MakeEngine, model: lp.Model, heads: Heads
) -> None:
    options: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 4, "batch_invariant": True}
    with make_engine(model, draft=heads["often right"], **options) as engine:
        plain = engine.generate(PROMPTS, params(logprobs=2, speculate="off"))
        for done, expected in zip(engine.generate(PROMPTS, params(logprobs=2)), plain, strict=True):
            assert (done.token_ids, done.logprobs) == (expected.token_ids, expected.logprobs)
        assert engine.stats().n_accepted_by_model > 0


def test_a_prompt_of_one_token(make_engine: MakeEngine, model: lp.Model, heads: Heads) -> None:
    with make_engine(model, n_ctx=64, n_seq_max=1, draft=heads["right"]) as engine:
        expected = engine.generate([40], params(20, speculate="off")).token_ids
        assert engine.generate([40], params(20)).token_ids == expected
        assert engine.stats().n_accepted_by_model > 5


def test_a_failing_draft_ends_no_request(
    make_engine: MakeEngine, model: lp.Model, heads: Heads, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise DecodeError("no memory")

    with make_engine(model, n_ctx=256, n_seq_max=2, draft=heads["right"]) as engine:
        expected = engine.generate(PROMPTS[4], params(speculate="off")).token_ids
        monkeypatch.setattr(kind.drafter, "_compute", fail)
        assert engine.generate(PROMPTS[4], params()).token_ids == expected
        assert engine.stats().n_drafted == 0


def test_a_cancelled_request_leaves_the_others_alone(
    make_engine: MakeEngine, model: lp.Model, heads: Heads
) -> None:
    """After each number of tokens, so after a draft, within one and at its end; its slot is the next one's."""
    with make_engine(model, n_ctx=256, n_seq_max=2, draft=heads["often right"]) as engine:
        expected = [engine.generate(prompt, params(60, speculate="off")).token_ids for prompt in PROMPTS]
        with engine.start(PROMPTS[0], params(200)) as other:
            for n in range(12):
                with engine.start(PROMPTS[n % 6 + 1], params(200)) as generation:
                    tokens = [
                        token.id for token in (generation.next() for _ in range(n)) if token is not None
                    ]
                assert tokens == expected[n % 6 + 1][:n]
            rest = [token.id for token in other]
        assert rest[:60] == expected[0]
        with pytest.raises(TimeoutError):
            engine.generate([prompt * 8 for prompt in PROMPTS], params(120), timeout=1e-3)
        again = engine.generate(PROMPTS, params(60))
        assert [completion.token_ids for completion in again] == expected
        assert engine.stats().n_accepted_by_model > 0
        engine.check_integrity()


def test_an_engine_that_is_closed_while_it_drafts(
    make_engine: MakeEngine, model: lp.Model, heads: Heads
) -> None:
    for n in range(6):
        engine = make_engine(model, n_ctx=256, n_seq_max=2, draft=heads["often right"])
        running = [engine.start(prompt, params(200)) for prompt in PROMPTS[:4]]
        for _ in range(n):
            running[0].next()
        engine.close(drain=False)
        for generation in running:
            assert len(list(generation)) < 200
            assert generation.finish_reason == "cancelled"


def test_a_draft_needs_its_model(make_engine: MakeEngine, model: lp.Model, heads: Heads) -> None:
    with pytest.raises(ValueError, match=r"pipeline_depth is 2, and an? .* reads the states of one step"):
        make_engine(model, draft=heads["right"], tuning=lp.EngineTuning(pipeline_depth=2))
    with pytest.raises(InvalidRequestError, match="not a whole model: it drafts for another one"):
        make_engine(heads["right"], n_ctx=64, n_seq_max=1)
