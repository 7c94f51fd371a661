"""Models with states are drafted for, and draft: texts are the same, and a draft is what its model would write."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from support.drafting import PROMPTS, RANDOM, Drafts, check_fork_and_snapshot, params
from support.gguf_models import tiny_architecture, tiny_model
from support.inside import scheduler_of
from support.plain import plain_loop

import llamapipe as lp
from llamapipe._engine.policy.core import Request
from llamapipe._engine.runtime.draft import DraftModel, RecurrentDraft
from llamapipe.errors import DecodeError
from llamapipe.llama.native_pipeline import SavedCells

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("eager")]
MakeEngine = Callable[..., lp.Engine]
KINDS = ("mamba2-1.3b", "rwkv7-0.4b", "qwen3.5-0.8b", "granite4-h-1b", "lfm2-1.2b")
COPIED = KINDS[0]


def like(model: Path, path: Path) -> Path:
    """Writes the model with noise in its weights: it is right now and then."""
    shutil.copyfile(model, path)
    rng = np.random.default_rng(1)
    data = np.memmap(path, np.uint8, "r+")
    for tensor in GGUFReader(path).tensors:
        if tensor.tensor_type.name == "F32" and len(tensor.shape) > 1 and "conv" not in tensor.name:
            first = int(tensor.data_offset)
            values = data[first : first + tensor.n_bytes].view(np.float32)
            values *= 1 + 0.3 * rng.standard_normal(values.shape, np.float32)
    data.flush()
    return path


Models = dict[str, lp.Model]


@pytest.fixture(scope="module", params=KINDS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """A tiny model of each kind; one that is like it; and one that has cells, and none of the three's weights."""
    folder = tmp_path_factory.mktemp(request.param)
    path = tiny_architecture(folder / "model.gguf", request.param, "builtin-bpe", "f32")
    paths = {
        "itself": path,
        "like it": like(path, folder / "like.gguf"),
        "of cells": tiny_model(folder / "cells.gguf", "builtin-bpe"),
    }
    with ExitStack() as stack:
        yield {name: stack.enter_context(lp.Model(path)) for name, path in paths.items()}


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    """The tokens of each request that something is drafted for, and the draft."""
    seen: Drafts = []
    draft = DraftModel.draft

    def watched(self: DraftModel, chosen: Mapping[Request, int]) -> dict[Request, Sequence[int]]:
        drafted = draft(self, chosen)
        seen.extend((tuple(request.tokens), tuple(tokens)) for request, tokens in drafted.items())
        return drafted

    monkeypatch.setattr(DraftModel, "draft", watched)
    return seen


@pytest.mark.parametrize("draft", ["itself", "like it", "of cells"])
def test_texts_are_those_without_drafts(
    make_engine: MakeEngine, models: Models, drafts: Drafts, draft: str
) -> None:
    """And each draft is what its model writes after the same tokens, in five requests on three slots."""
    model = models["itself"]
    with make_engine(model, n_ctx=256, n_seq_max=3, draft=models[draft]) as engine:
        done = engine.generate(PROMPTS[:5], params())
        stats = engine.stats()
        assert stats.n_drafted_by_model > 30 and stats.n_accepted_by_model <= stats.n_drafted_by_model
        if draft == "itself":
            assert stats.n_accepted_by_model > 0.8 * stats.n_drafted_by_model
        engine.check_integrity()
        with plain_loop(model) as plain:
            for prompt, completion in zip(PROMPTS, done, strict=False):
                assert plain.agrees(prompt, completion.token_ids)
    assert len(drafts) > 10
    with plain_loop(models[draft], ignore_eos=False) as plain:
        for tokens, drafted in drafts[:: max(len(drafts) // 12, 1)]:
            assert plain.agrees(tokens, drafted)


@pytest.mark.parametrize(
    "options",
    [RANDOM, {"speculate": None}, {"stop": ["z"]}, {"logprobs": 2}, {"min_tokens": 20, "ignore_eos": False}],
    ids=("seeded", "with other guesses", "stop", "logprobs", "at least"),
)
def test_ways_to_sample(make_engine: MakeEngine, models: Models, options: dict[str, Any]) -> None:
    with make_engine(models["itself"], n_ctx=256, n_seq_max=1, draft=models["like it"]) as engine:
        for i in range(3):
            expected = engine.generate(PROMPTS[i], params(seed=i, **options | {"speculate": "off"}))
            completion = engine.generate(PROMPTS[i], params(seed=i, **options))
            assert (
                completion.token_ids == expected.token_ids
                and completion.finish_reason == expected.finish_reason
            )
        assert engine.stats().n_drafted_by_model > 10
        engine.check_integrity()


def test_a_model_with_cells_is_drafted_for(make_engine: MakeEngine, models: Models, drafts: Drafts) -> None:
    model = models["of cells"]
    with make_engine(model, n_ctx=256, n_seq_max=3, draft=models["itself"]) as engine:
        done = engine.generate(PROMPTS[:5], params())
        assert engine.stats().n_drafted_by_model > 30
    with plain_loop(model) as plain:
        assert all(plain.agrees(p, out.token_ids) for p, out in zip(PROMPTS, done, strict=False))


@pytest.mark.parametrize("options", [{"n_cells": 200}, {"overflow": "recompute"}], ids=str)
def test_scarce_cells_cut_no_text(make_engine: MakeEngine, models: Models, options: dict[str, Any]) -> None:
    model, draft = models["itself"], models["like it"]
    with make_engine(model, n_ctx=96, n_seq_max=4, draft=draft, **options) as engine:
        done = engine.generate(PROMPTS, params(150))
        assert {completion.finish_reason for completion in done} == {"length"}
        assert engine.stats().n_drafted_by_model > 0
        engine.check_integrity()


def test_fork_and_snapshot(make_engine: MakeEngine, models: Models) -> None:
    with make_engine(models["itself"], n_ctx=256, n_seq_max=3, draft=models["itself"]) as engine:
        check_fork_and_snapshot(engine)


# ---- a draft model with a state
def test_wrong_tokens_cost_no_prompt(
    make_engine: MakeEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's sequence returns to the copy: it computes the prompt once."""
    computed: list[int] = []
    decode = RecurrentDraft._decode

    def counted(self: RecurrentDraft, entries: Sequence[tuple[Request, Sequence[int]]]) -> Any:
        computed.append(sum(len(tokens) for _, tokens in entries))
        return decode(self, entries)

    monkeypatch.setattr(RecurrentDraft, "_decode", counted)
    prompt = [*range(40, 140)]
    with make_engine(models["itself"], n_ctx=256, n_seq_max=1, draft=models["like it"]) as engine:
        engine.generate(prompt, params(60))
        stats = engine.stats()
        assert stats.n_accepted_by_model < stats.n_drafted_by_model
    assert computed[0] == 101 and max(computed[1:]) < 20


@pytest.mark.parametrize("models", [COPIED], indirect=True)
def test_no_copy_outlives_its_tokens(make_engine: MakeEngine, models: Models, drafts: Drafts) -> None:
    """The second request makes none, and the third begins like the second."""
    second = [*range(40, 100)]
    with make_engine(models["itself"], n_ctx=256, n_seq_max=1, draft=models["like it"]) as engine:
        engine.generate(PROMPTS[0], params(20))
        engine.generate(second, params(3))
        engine.generate([*second[:50], 120, 121], params(20))
    assert len(drafts) > 5
    with plain_loop(models["like it"], ignore_eos=False) as plain:
        assert all(plain.agrees(tokens, drafted) for tokens, drafted in drafts)


@pytest.mark.parametrize("models", [COPIED], indirect=True)
@pytest.mark.parametrize("fails", ["of_state", "load_state"])
def test_a_copy_that_fails_costs_only_time(
    make_engine: MakeEngine, models: Models, monkeypatch: pytest.MonkeyPatch, drafts: Drafts, fails: str
) -> None:
    with make_engine(models["itself"], n_ctx=256, n_seq_max=2, draft=models["like it"]) as engine:
        expected = engine.generate(PROMPTS[1], params(speculate="off")).token_ids
        if fails == "of_state":
            monkeypatch.setattr(SavedCells, "of_state", lambda *_: None)
        else:
            monkeypatch.setattr(SavedCells, "load_state", lambda *_: False)
        assert engine.generate(PROMPTS[1], params()).token_ids == expected
    with plain_loop(models["like it"], ignore_eos=False) as plain:
        assert all(plain.agrees(tokens, drafted) for tokens, drafted in drafts)


@pytest.mark.parametrize("models", [COPIED], indirect=True)
def test_an_error_of_a_copy_ends_no_request(
    make_engine: MakeEngine, models: Models, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> bool:
        raise DecodeError("broken")

    with make_engine(models["itself"], n_ctx=256, n_seq_max=2, draft=models["like it"]) as engine:
        expected = engine.generate(PROMPTS[1], params(speculate="off")).token_ids
        monkeypatch.setattr(SavedCells, "load_state", fail)
        assert engine.generate(PROMPTS[1], params()).token_ids == expected
        assert "the draft model is not used any more: broken" in caplog.text


@pytest.mark.parametrize("models", [COPIED], indirect=True)
def test_copies_of_states_are_closed_with_the_engine(make_engine: MakeEngine, models: Models) -> None:
    with make_engine(models["itself"], n_ctx=256, n_seq_max=2, draft=models["like it"]) as engine:
        engine.generate(PROMPTS[:2], params())
        drafter = scheduler_of(engine).gate.drafter
        assert isinstance(drafter, RecurrentDraft)
        copies = [copy for _, copy in drafter._copies.values()]
        assert len(copies) == 2 and all(copy.handle is not None for copy in copies)
    assert all(copy.handle is None for copy in copies)


def test_a_window_does_not_draft(make_engine: MakeEngine, models: Models, tmp_path: Path) -> None:
    path = tiny_architecture(tmp_path / "window.gguf", "gemma3-270m", "builtin-bpe")
    with pytest.raises(ValueError, match=r"window\.gguf, has a sliding window"):
        make_engine(models["itself"], n_ctx=64, n_seq_max=1, draft=path)
