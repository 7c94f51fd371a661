"""An EAGLE-3 draft changes how many steps a text takes, and not the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from support.drafting import PROMPTS, RANDOM, Drafts, check_fork_and_snapshot, check_texts, params, watch
from support.eagle3_models import eagle3_draft, eagle3_target, n_tokens
from support.gguf_document import STRING, unpack
from support.plain import plain_loop

import llamapipe as lp
from llamapipe._engine.runtime.draft import Eagle3Draft
from llamapipe.errors import InvalidRequestError
from llamapipe.llama.batch import DecodeBatch
from llamapipe.llama.context import Context

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("eager")]
MakeEngine = Callable[..., lp.Engine]
# By the noise in the draft; the model's texts are alike. The last one guesses few tokens of the vocabulary.
HEADS: dict[str, dict[str, Any]] = {
    "right": {"noise": 0.0},
    "often right": {"noise": 0.6},
    "wrong": {"noise": None},
    "of few tokens": {"noise": 0.0, "tokens": [*range(3, 70), *range(80, 200, 2)]},
    "with the model's matrices": {"noise": 0.0, "lent": ["token_embd.weight", "output.weight"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eagle3")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[lp.Model]:
    with lp.Model(eagle3_target(folder / "model.gguf")) as found:
        yield found


@pytest.fixture(scope="module")
def heads(folder: Path, model: lp.Model) -> Iterator[dict[str, lp.Model]]:
    found = {
        name: lp.Model(eagle3_draft(folder / f"{i}.gguf", model.path, **options))
        for i, (name, options) in enumerate(HEADS.items())
    }
    yield found
    for head in found.values():
        head.close()


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    return watch(monkeypatch, Eagle3Draft)


def share_right(before: lp.EngineStats, after: lp.EngineStats) -> float:
    n = after.n_drafted_by_model - before.n_drafted_by_model
    return (after.n_accepted_by_model - before.n_accepted_by_model) / max(n, 1)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "with other guesses": {"speculate": None},
    "seeded": RANDOM,
    "penalties": {"repeat_penalty": 1.1, "presence_penalty": 0.2},
    "logprobs": {"logprobs": 2},
    "GBNF": {"grammar": r"root ::= [\x20-\x7e]+", "ignore_eos": False, "max_tokens": 25},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head", HEADS)
def test_texts_are_those_without_drafts(
    make_engine: MakeEngine, model: lp.Model, heads: dict[str, lp.Model], head: str, way: str
) -> None:
    """Seven requests in four slots; a seed's text shows that the distribution is the same."""
    with make_engine(model, n_ctx=256, n_seq_max=4, draft=heads[head]) as engine:
        check_texts(engine, WAYS[way])


@pytest.mark.parametrize("head", ["right", "with the model's matrices"])
def test_a_right_draft_saves_steps(
    make_engine: MakeEngine, model: lp.Model, heads: dict[str, lp.Model], head: str
) -> None:
    """It reads the state of the right token, also after its own drafts: with another all drafts would be wrong."""
    with make_engine(model, n_ctx=256, n_seq_max=1, draft=heads[head]) as engine:
        engine.generate(PROMPTS[1], params(90))
        stats = engine.stats()
        assert stats.n_accepted_by_model > 0.9 * stats.n_drafted_by_model > 30
        assert stats.steps < 60


def test_only_tokens_of_its_own_vocabulary_are_drafted(
    make_engine: MakeEngine, model: lp.Model, heads: dict[str, lp.Model], drafts: list[Any]
) -> None:
    with make_engine(model, n_ctx=256, n_seq_max=2, draft=heads["of few tokens"]) as engine:
        engine.generate(PROMPTS, params())
        assert engine.stats().n_accepted_by_model > 0
    drafted = {token for _, tokens in drafts for token in tokens}
    assert len(drafted) > 5
    assert drafted <= set(HEADS["of few tokens"]["tokens"])


@pytest.mark.parametrize("kv_unified", [False, True])
def test_drafts_beside_others_are_those_alone(
    make_engine: MakeEngine, model: lp.Model, heads: dict[str, lp.Model], drafts: list[Any], kv_unified: bool
) -> None:
    """Each is what a new engine drafts after the same tokens, as one prompt."""
    head, tuning = heads["often right"], lp.EngineTuning(kv_unified=kv_unified)
    with make_engine(model, n_ctx=256, n_seq_max=3, draft=head, prefix_cache=False, tuning=tuning) as engine:
        engine.generate(PROMPTS, params())
        engine.generate(
            [prompt * 8 for prompt in PROMPTS], params()
        )  # more missing tokens than one decode may have
    found = drafts.copy()
    assert len(found) > 20
    with make_engine(model, n_ctx=256, n_seq_max=1, prefix_cache=False, draft=head) as engine:
        for tokens, made in found[:: len(found) // 20]:
            drafts.clear()
            engine.generate(list(tokens[:-1]), params(8, logit_bias={tokens[-1]: 1e4}))
            again = next((one for after, one in drafts if after == tokens), None)
            assert again is not None
            n = min(len(made), len(again))
            assert made[:n] == again[:n]


def test_drafts_of_requests_share_a_batch(
    make_engine: MakeEngine, model: lp.Model, heads: dict[str, lp.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    n_sequences: list[int] = []
    compute = Eagle3Draft._compute

    def counted(self: Eagle3Draft, batch: Any) -> None:
        n_sequences.append(len(set(batch.seq_ids)))
        compute(self, batch)

    monkeypatch.setattr(Eagle3Draft, "_compute", counted)
    with make_engine(model, n_ctx=256, n_seq_max=4, draft=heads["often right"]) as engine:
        engine.generate(PROMPTS[:4], params())
    assert max(n_sequences) == 4


def test_cached_and_saved_prefixes(
    make_engine: MakeEngine, model: lp.Model, heads: dict[str, lp.Model]
) -> None:
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


def test_fork_snapshot_and_choices(
    make_engine: MakeEngine, model: lp.Model, heads: dict[str, lp.Model]
) -> None:
    with make_engine(model, n_ctx=256, n_seq_max=3, draft=heads["right"]) as engine:
        check_fork_and_snapshot(engine)
        done = engine.generate(PROMPTS[6] * 3, params(20, n=4, seed=1, **RANDOM))
        assert len({tuple(choice.token_ids) for choice in done.choices}) > 1
        engine.check_integrity()


@pytest.mark.parametrize("options", [{"n_cells": 200}, {"overflow": "recompute"}], ids=str)
def test_scarce_cells(
    make_engine: MakeEngine, model: lp.Model, heads: dict[str, lp.Model], options: dict[str, Any]
) -> None:
    with make_engine(model, n_ctx=96, n_seq_max=4, draft=heads["right"], **options) as engine:
        done = engine.generate(PROMPTS, params(150))
        assert {completion.finish_reason for completion in done} == {"length"}
        assert engine.stats().n_accepted_by_model > 0
        engine.check_integrity()


def test_a_prompt_of_one_token(make_engine: MakeEngine, model: lp.Model, heads: dict[str, lp.Model]) -> None:
    with make_engine(model, n_ctx=64, n_seq_max=1, draft=heads["right"]) as engine:
        expected = engine.generate([40], params(20, speculate="off")).token_ids
        assert engine.generate([40], params(20)).token_ids == expected
        assert engine.stats().n_accepted_by_model > 5


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3moe"])
def test_other_architectures(make_engine: MakeEngine, tmp_path: Path, architecture: str) -> None:
    target = eagle3_target(tmp_path / "model.gguf", architecture)
    with (
        lp.Model(target) as model,
        make_engine(
            model, n_ctx=256, n_seq_max=2, draft=eagle3_draft(tmp_path / "draft.gguf", target)
        ) as engine,
    ):
        expected = engine.generate(PROMPTS, params(speculate="off"))
        before = engine.stats()
        found = engine.generate(PROMPTS, params())
        assert [done.token_ids for done in found] == [done.token_ids for done in expected]
        assert share_right(before, engine.stats()) > 0.9


def test_states_are_the_inputs_of_layers(model: lp.Model) -> None:
    """The first layer's is the embedding; the states follow the cells."""
    rows = next(t.data for t in GGUFReader(model.path).tensors if t.name == "token_embd.weight").astype(
        np.float32
    )
    tokens = PROMPTS[6]
    with Context(model, n_ctx=64, n_seq_max=2, kv_unified=True) as context:
        context.keep_states(64, [0, 2, 3])
        context.decode(DecodeBatch.of_tokens(tokens, 0))
        states = context.states(0)
        assert states.shape == (len(tokens), 3 * model.n_embd)
        np.testing.assert_allclose(states[:, : model.n_embd], rows[tokens], rtol=1e-6)
        assert np.abs(states[:, model.n_embd :] - np.tile(rows[tokens], 2)).max() > 1e-3
        context.seq_remove(0, 3)
        assert context.kept_states(0) == (0, 3)
        context.seq_copy(0, 1, 0, 2)
        np.testing.assert_array_equal(context.states(1), states[:2])


# ---- which draft belongs to a model
def edited(path: Path, source: Path, key: str, value: int) -> Path:
    """A copy of a file with another number in its metadata."""
    document, _ = unpack(source.read_bytes())
    document.put(key, 4, value)
    path.write_bytes(document.pack())
    return path


def test_drafts_of_other_models_are_refused(
    make_engine: MakeEngine, model: lp.Model, heads: dict[str, lp.Model], demo: lp.Model, tmp_path: Path
) -> None:
    """With what differs, before llama.cpp sees it; nothing stays open."""
    right, n_vocab = heads["right"].path, n_tokens(model.path)
    wrong_width = edited(tmp_path / "a.gguf", right, "eagle3.target_hidden_size", 64)
    two_layers = edited(tmp_path / "b.gguf", right, "eagle3.block_count", 2)
    of_others = [eagle3_draft(tmp_path / f"{i}.gguf", model.path, None, [5, i]) for i in (n_vocab + 7, -1)]
    no_output = eagle3_draft(tmp_path / "c.gguf", model.path, tokens=[5, 6], lent=["output.weight"])
    with lp.Model(eagle3_target(tmp_path / "qwen2.gguf", "qwen2")) as qwen2:
        for draft, target, reason in (
            (wrong_width, model, "hidden states have 64 numbers .* this model's 128"),
            (right, qwen2, "the model is a qwen2; llamapipe drafts with EAGLE-3 for llama, qwen3"),
            (heads["right"], demo, r"hidden states have 128 numbers"),
            (two_layers, model, "it has 2 layers"),
            (of_others[0], model, f"has the token {n_vocab + 7}; they are from 0 to {n_vocab - 1}"),
            (of_others[1], model, "has the token -1"),
            (no_output, model, "no output.weight"),
        ):
            with pytest.raises(ValueError, match=f"draft: .* does not draft for .*: .*{reason}"):
                make_engine(target, n_ctx=64, n_seq_max=1, draft=draft)
    with pytest.raises(ValueError, match="pipeline_depth is 2, and an EAGLE-3 draft reads"):
        make_engine(model, draft=heads["right"], tuning=lp.EngineTuning(pipeline_depth=2))
    with pytest.raises(InvalidRequestError, match="not a whole model: it drafts for another one"):
        make_engine(heads["right"], n_ctx=64, n_seq_max=1)


@pytest.mark.parametrize("kind", ["dflash", "gemma4-assistant"])
def test_other_kinds_are_refused_by_name(
    make_engine: MakeEngine, model: lp.Model, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "draft.gguf"
    document, _ = unpack(eagle3_draft(path, model.path).read_bytes())
    document.put("general.architecture", STRING, kind.encode())
    for entry in document.entries:
        entry.key = entry.key.replace(b"eagle3.", kind.encode() + b".")
    path.write_bytes(document.pack())
    with pytest.raises(
        ValueError, match=r"draft: draft.gguf is a .*; llamapipe drafts with whole models, MTP layers"
    ):
        make_engine(model, n_ctx=64, n_seq_max=1, draft=path)
