"""A model's own MTP layer changes how many steps a text takes, and not the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.drafting import (
    PROMPTS,
    RANDOM,
    Drafts,
    check_fork_and_snapshot,
    check_texts,
    params,
    share_right,
    watch,
)
from support.gguf_document import Document, unpack
from support.gguf_models import tiny_architecture
from support.inside import scheduler_of
from support.mtp_models import mtp_model
from support.plain import plain_loop

import llamapipe as lp
from llamapipe._engine.policy.core import Request
from llamapipe._engine.policy.speculation import Gate, StepTimes, Worth
from llamapipe._engine.runtime.draft import MtpLayer
from llamapipe.errors import DecodeError
from llamapipe.gguf.draft_file import MTP_ARCHITECTURES

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("eager")]
MakeEngine = Callable[..., lp.Engine]
# By the noise in the layer; the texts of all three are alike.
HEADS = {"right": 0.0, "often right": 0.6, "wrong": 30.0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, lp.Model]]:
    folder = tmp_path_factory.mktemp("mtp")
    loaded = {
        name: lp.Model(mtp_model(folder / f"{i}.gguf", noise), load_mtp=True)
        for i, (name, noise) in enumerate(HEADS.items())
    }
    yield loaded
    for model in loaded.values():
        model.close()


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    return watch(monkeypatch, MtpLayer)


def as_alone(model: lp.Model, make_engine: MakeEngine, drafts: list[Any]) -> None:
    """Checks that each of these drafts is what a new engine drafts after the same tokens, as one prompt."""
    recorded = drafts.copy()
    assert len(recorded) > 5
    with make_engine(model, n_ctx=256, n_seq_max=1, prefix_cache=False, draft="mtp") as engine:
        for tokens, draft in recorded[:: max(len(recorded) // 12, 1)]:
            drafts.clear()
            engine.generate(list(tokens[:-1]), params(8, logit_bias={tokens[-1]: 1e4}))
            again = next((other for after, other in drafts if after == tokens), None)
            assert again is not None
            n = min(len(draft), len(again))
            assert draft[:n] == again[:n]


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "with other guesses": {"speculate": None},
    "seeded": RANDOM,
    "penalties": {"repeat_penalty": 1.1, "presence_penalty": 0.2},
    "logprobs": {"logprobs": 2},
    "stop": {"stop": ["z"]},
    "at least": {"min_tokens": 20, "ignore_eos": False},
    "GBNF": {"grammar": r"root ::= [\x20-\x7e]+", "ignore_eos": False, "max_tokens": 25},
    "processor": {"logits_processors": (lambda row: None,)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head", HEADS)
def test_texts_are_those_without_drafts(
    make_engine: MakeEngine, models: dict[str, lp.Model], head: str, way: str
) -> None:
    """Seven requests in four slots; a seed's text shows that the distribution is the same."""
    with make_engine(models[head], n_ctx=256, n_seq_max=4, draft="mtp") as engine:
        check_texts(engine, WAYS[way])


def test_a_right_layer_saves_steps(make_engine: MakeEngine, models: dict[str, lp.Model]) -> None:
    """It reads the state of the right token, also after its own drafts: with another all drafts would be wrong."""
    with make_engine(models["right"], n_ctx=256, n_seq_max=1, draft="mtp") as engine:
        engine.generate(PROMPTS[1], params(90))
        stats = engine.stats()
        assert stats.n_accepted_by_model > 0.9 * stats.n_drafted_by_model > 30
        assert stats.steps < 60


@pytest.mark.parametrize("row_s", [0.0, 0.3], ids=("rows cost nothing", "seldom sure enough"))
def test_a_bad_layer_is_given_up(
    make_engine: MakeEngine, models: dict[str, lp.Model], monkeypatch: pytest.MonkeyPatch, row_s: float
) -> None:
    """Also one that is never sure: a draft of no tokens took its time as well."""
    drafted: list[int] = []
    draft = MtpLayer.draft

    def counted(self: MtpLayer, chosen: Mapping[Request, int], worth: Worth) -> dict[Request, Sequence[int]]:
        drafted.append(len(chosen))
        return draft(self, chosen, worth)

    monkeypatch.setattr("llamapipe._engine.assembly.Gate", Gate)
    monkeypatch.setattr(Gate, "next_drafter", lambda self: self.drafter)
    monkeypatch.setattr(StepTimes, "of", lambda self, n: 1.0 + row_s * (n - 1))
    monkeypatch.setattr(MtpLayer, "draft", counted)
    monkeypatch.setattr(MtpLayer, "seconds", lambda self, chosen, whole=False: 0.01)
    with make_engine(models["wrong"], n_ctx=256, n_seq_max=1, draft="mtp") as engine:
        engine.generate(PROMPTS[1], params(150))
        assert 2 < len(drafted) < 40


def test_a_layer_begins_with_the_last_tokens_of_a_prompt(
    make_engine: MakeEngine, models: dict[str, lp.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it would take as long as several steps."""
    computed: list[int] = []
    compute = MtpLayer._compute

    def counted(self: MtpLayer, batch: Any) -> None:
        computed.append(len(batch.tokens))
        compute(self, batch)

    monkeypatch.setattr(MtpLayer, "_compute", counted)
    with make_engine(models["right"], n_ctx=256, n_seq_max=1, draft="mtp") as engine:
        engine.generate([*range(40, 140)], params())
        stats = engine.stats()
    assert computed[0] == 32 and max(computed[1:]) < 12
    assert stats.n_accepted_by_model > 0.8 * stats.n_drafted_by_model > 8


def test_no_states_are_kept(make_engine: MakeEngine, models: dict[str, lp.Model]) -> None:
    """They would take memory and time of each step: states are copied before guesses."""
    for draft in ("auto", "mtp"):
        for n_slots in (1, 64):
            with make_engine(models["right"], n_ctx=64, n_seq_max=n_slots, draft=draft) as engine:
                gate = scheduler_of(engine).gate
                assert gate.drafter is not None and gate.copies_states and not gate.keeps_states


def test_other_guesses_are_counted_apart(make_engine: MakeEngine, models: dict[str, lp.Model]) -> None:
    with make_engine(models["wrong"], n_ctx=256, n_seq_max=1, draft="mtp") as engine:
        engine.generate(PROMPTS[1] * 6, params(60, speculate="ngram"))
        stats = engine.stats()
        assert stats.n_drafted_by_model == stats.n_accepted_by_model == 0


def test_drafts_of_requests_share_a_batch(
    make_engine: MakeEngine, models: dict[str, lp.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    n_sequences: list[int] = []
    compute = MtpLayer._compute

    def counted(self: MtpLayer, batch: Any) -> None:
        n_sequences.append(len(set(batch.seq_ids)))
        compute(self, batch)

    monkeypatch.setattr(MtpLayer, "_compute", counted)
    with make_engine(models["often right"], n_ctx=256, n_seq_max=4, draft="mtp") as engine:
        engine.generate(PROMPTS[:4], params())
    assert max(n_sequences) == 4


@pytest.mark.parametrize("head", ["wrong", "often right"])
@pytest.mark.parametrize("kv_unified", [False, True])
def test_drafts_beside_others_are_those_alone(
    make_engine: MakeEngine, models: dict[str, lp.Model], drafts: list[Any], kv_unified: bool, head: str
) -> None:
    model = models[head]
    tuning = lp.EngineTuning(kv_unified=kv_unified)
    with make_engine(model, n_ctx=256, n_seq_max=3, draft="mtp", prefix_cache=False, tuning=tuning) as engine:
        engine.generate(PROMPTS, params())
    as_alone(model, make_engine, drafts)


@pytest.mark.parametrize("head", ["wrong", "often right"])
def test_choices_share_the_states_of_a_prompt(
    make_engine: MakeEngine, models: dict[str, lp.Model], drafts: list[Any], head: str
) -> None:
    model = models[head]
    with make_engine(model, n_ctx=256, n_seq_max=8, draft="mtp") as engine:
        done = engine.generate(PROMPTS[6] * 3, params(20, n=4, seed=1, **RANDOM))
        assert len({tuple(choice.token_ids) for choice in done.choices}) > 1
        engine.check_integrity()
    as_alone(model, make_engine, drafts)


def test_a_cached_prefix(make_engine: MakeEngine, models: dict[str, lp.Model]) -> None:
    """Also one that was saved, whose states are lost: the layer begins after it."""
    prefix = [*range(40, 80), *range(90, 120)]
    with (
        make_engine(models["right"], n_ctx=256, n_seq_max=2, draft="mtp") as engine,
        plain_loop(models["right"]) as plain,
    ):
        first = engine.generate(prefix, params())
        for prompt in ([*prefix, *first.token_ids, 50, 51], [*prefix, *first.token_ids, 70], PROMPTS[2]) * 2:
            before = engine.stats()
            done = engine.generate(prompt, params())
            assert plain.agrees(prompt, done.token_ids)
            after = engine.stats()
            n_drafted = after.n_drafted - before.n_drafted
            assert after.n_accepted - before.n_accepted > 0.8 * n_drafted > 8
        assert engine.stats().n_cache_hit_tokens > 0
        engine.check_integrity()


def test_saved_cells_have_no_states(make_engine: MakeEngine, models: dict[str, lp.Model]) -> None:
    """The layer begins after them."""
    first, second = [*range(40, 90)], [*range(120, 170)]
    with make_engine(models["right"], n_ctx=256, n_seq_max=1, draft="mtp") as engine:
        for prompt in (first, second, first, second):
            before = engine.stats()
            engine.generate(prompt, params())
            after = engine.stats()
            n_drafted = after.n_drafted - before.n_drafted
            assert after.n_accepted - before.n_accepted > 0.8 * n_drafted > 8
        assert engine.stats().n_restored > 0
        engine.check_integrity()


def test_fork_and_snapshot(make_engine: MakeEngine, models: dict[str, lp.Model]) -> None:
    with make_engine(models["right"], n_ctx=256, n_seq_max=3, draft="mtp") as engine:
        check_fork_and_snapshot(engine)


@pytest.mark.parametrize("options", [{"n_cells": 200}, {"overflow": "recompute"}], ids=str)
def test_scarce_cells_cut_no_text(
    make_engine: MakeEngine, models: dict[str, lp.Model], options: dict[str, Any]
) -> None:
    with make_engine(models["right"], n_ctx=96, n_seq_max=4, draft="mtp", **options) as engine:
        done = engine.generate(PROMPTS, params(150))
        assert {completion.finish_reason for completion in done} == {"length"}
        assert engine.stats().n_accepted_by_model > 0
        engine.check_integrity()


def test_streams_that_end_early(make_engine: MakeEngine, models: dict[str, lp.Model]) -> None:
    with make_engine(models["often right"], n_ctx=256, n_seq_max=2, draft="mtp") as engine:
        expected = engine.generate(PROMPTS[4], params(60, speculate="off")).token_ids
        for n in range(0, 40, 3):
            with engine.stream(PROMPTS[4], params(60)) as stream:
                tokens = [
                    token for _, delta in zip(range(n), stream, strict=False) for token in delta.token_ids
                ]
            assert tuple(tokens) == tuple(expected[: len(tokens)])
        engine.check_integrity()


def test_a_failing_layer_ends_no_request(
    make_engine: MakeEngine, models: dict[str, lp.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise DecodeError("no memory")

    with make_engine(models["right"], n_ctx=256, n_seq_max=2, draft="mtp") as engine:
        expected = engine.generate(PROMPTS[4], params(speculate="off")).token_ids
        monkeypatch.setattr(MtpLayer, "_compute", fail)
        assert engine.generate(PROMPTS[4], params()).token_ids == expected
        assert engine.stats().n_drafted == 0


@pytest.mark.parametrize(
    ("architecture", "n_layers"), [*((name, 1) for name in MTP_ARCHITECTURES), ("mimo2", 2), ("step35", 3)]
)
def test_every_architecture(
    make_engine: MakeEngine, tmp_path: Path, drafts: list[Any], architecture: str, n_layers: int
) -> None:
    """A right layer is right only with the state of the right token. Of several the first one drafts."""
    for noise in (0.0, 0.6):
        path = mtp_model(tmp_path / f"{noise}.gguf", noise, n_layers, architecture=architecture)
        with lp.Model(path, load_mtp=True) as model:
            with make_engine(model, n_ctx=256, n_seq_max=4, draft="mtp", prefix_cache=False) as engine:
                check_texts(engine, {})
                drafts.clear()
                before = engine.stats()
                engine.generate(PROMPTS, params())
                if not noise:
                    assert share_right(before, engine.stats()) > 0.9
            as_alone(model, make_engine, drafts)


def test_layers_without_tensors(make_engine: MakeEngine, models: dict[str, lp.Model], tmp_path: Path) -> None:
    """Converters can leave the layers out and their number in: llama.cpp takes such a file."""
    document = Document.read(models["right"].path)
    document.tensors = [tensor for tensor in document.tensors if not tensor.name.startswith(b"blk.4.")]
    with lp.Model(document.write(tmp_path / "cut.gguf"), load_mtp=True) as model:
        with pytest.raises(
            ValueError, match=r"cut\.gguf lacks the tensors .* \(blk\.4\.nextn\.eh_proj\.weight\)"
        ):
            make_engine(model, draft="mtp")
        with make_engine(model, draft="auto") as engine:
            engine.generate(PROMPTS[0], params(4, speculate=None))


def test_what_cannot_draft_is_refused(
    make_engine: MakeEngine, models: dict[str, lp.Model], demo: lp.Model, tmp_path: Path
) -> None:
    """And "auto" leaves it out."""
    path = models["right"].path
    without = tiny_architecture(tmp_path / "without.gguf", "qwen3.5-0.8b", "builtin-bpe")
    document, _ = unpack(path.read_bytes())
    document.put("qwen35.embedding_length_out", 4, 64)
    (tmp_path / "narrow.gguf").write_bytes(document.pack())
    several = mtp_model(tmp_path / "several.gguf", 0.0, n_layers=2)
    with (
        lp.Model(path) as not_loaded,
        lp.Model(several, load_mtp=True) as two,
        lp.Model(without) as plain,
        lp.Model(tmp_path / "narrow.gguf", load_mtp=True) as narrow,
    ):
        for model, reason in (
            (demo, r"has no MTP layers \(llama\.nextn_predict_layers"),
            (plain, "has no MTP layers"),
            (not_loaded, "was loaded without its MTP layers: use lp.Model"),
            (
                narrow,
                "has hidden states of 128 numbers, and qwen35.embedding_length_out in its metadata is 64",
            ),
            (two, "has 2 MTP layers, and llama.cpp computes only one of a qwen35"),
        ):
            with pytest.raises(ValueError, match=f"draft is 'mtp', but .*{reason}"):
                make_engine(model, n_ctx=64, n_seq_max=1, draft="mtp")
            with make_engine(model, n_ctx=64, n_seq_max=1, draft="auto") as engine:
                assert scheduler_of(engine).gate.drafter is None
                engine.generate([40, 41], params(4, speculate=None))
    with pytest.raises(ValueError, match="pipeline_depth is 2"):
        make_engine(models["right"], draft="mtp", tuning=lp.EngineTuning(pipeline_depth=2))


@pytest.mark.parametrize("draft", ["auto", "mtp"])
def test_a_path_is_loaded_with_its_layer(models: dict[str, lp.Model], draft: str) -> None:
    with lp.Engine(models["right"].path, n_ctx=64, n_seq_max=1, draft=draft) as engine:
        assert engine.model.load_mtp and engine.model.n_mtp_layers == 1
        assert "draft='mtp'" in repr(engine)
        engine.generate(PROMPTS[0], params(20))
        assert engine.stats().n_accepted_by_model > 0
