"""What EAGLE-3 drafts alone have; ``test_state_drafts.py`` has the tests of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from support.drafting import PROMPTS, RANDOM, Drafts, check_texts, params, share_right, watch
from support.eagle3_models import eagle3_draft, eagle3_target
from support.gguf_document import unpack

import llamapipe as lp
from llamapipe._engine.runtime.draft import Eagle3Draft
from llamapipe.gguf.draft_file import LAYER_INPUT_TARGETS
from llamapipe.llama.batch import DecodeBatch
from llamapipe.llama.context import Context

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("eager")]
MakeEngine = Callable[..., lp.Engine]
HEADS: dict[str, dict[str, Any]] = {
    "right": {"noise": 0.0},
    "of few tokens": {"noise": 0.0, "tokens": [*range(3, 70), *range(80, 200, 2)]},
    "with the model's matrices": {"noise": 0.0, "lent": ["token_embd.weight", "output.weight"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eagle3")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[lp.Model]:
    with lp.Model(eagle3_target(folder / "model.gguf")) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def heads(folder: Path, model: lp.Model) -> Iterator[dict[str, lp.Model]]:
    by_name = {
        name: lp.Model(eagle3_draft(folder / f"{i}.gguf", model.path, **options))
        for i, (name, options) in enumerate(HEADS.items())
    }
    yield by_name
    for head in by_name.values():
        head.close()


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    return watch(monkeypatch, Eagle3Draft)


@pytest.mark.parametrize("head", ["of few tokens", "with the model's matrices"])
@pytest.mark.parametrize(
    "way", [{}, RANDOM, {"speculate": None}], ids=("greedy", "seeded", "with other guesses")
)
def test_texts_are_those_without_drafts(
    make_engine: MakeEngine, model: lp.Model, heads: dict[str, lp.Model], head: str, way: dict[str, Any]
) -> None:
    with make_engine(model, n_ctx=256, n_seq_max=4, draft=heads[head]) as engine:
        check_texts(engine, way)


def test_a_draft_with_the_models_matrices_saves_steps(
    make_engine: MakeEngine, model: lp.Model, heads: dict[str, lp.Model]
) -> None:
    with make_engine(model, n_ctx=256, n_seq_max=1, draft=heads["with the model's matrices"]) as engine:
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


@pytest.mark.parametrize("architecture", LAYER_INPUT_TARGETS[1:])
def test_drafts_for_other_architectures_change_no_text(
    make_engine: MakeEngine, tmp_path: Path, architecture: str
) -> None:
    """The made draft is right only where the layers change the states little, and nothing scales embeddings."""
    target = eagle3_target(tmp_path / "model.gguf", architecture)
    with (
        lp.Model(target) as model,
        make_engine(
            model, n_ctx=256, n_seq_max=2, draft=eagle3_draft(tmp_path / "draft.gguf", target)
        ) as engine,
    ):
        expected = engine.generate(PROMPTS, params(speculate="off"))
        before = engine.stats()
        completions = engine.generate(PROMPTS, params())
        assert [done.token_ids for done in completions] == [done.token_ids for done in expected]
        assert share_right(before, engine.stats()) > (0.8 if architecture.startswith("qwen") else -1)
        assert engine.stats().n_drafted_by_model > 100


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
    right, n_vocab = heads["right"].path, model.n_vocab
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
