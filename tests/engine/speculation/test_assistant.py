"""What Gemma 4 assistants alone have; ``test_state_drafts.py`` has the tests of all kinds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.adapters import make_adapter
from support.assistant_models import assistant, assistant_target
from support.drafting import PROMPTS, RANDOM, Drafts, check_texts, params, share_alone, share_right, watch
from support.gguf_document import ARRAY, BOOL, Document, unpack
from support.media_models import gemma3_projector, picture

import llamapipe as lp
from llamapipe._engine.runtime.draft import AssistantDraft

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("eager")]
MakeEngine = Callable[..., lp.Engine]
LONG = [*range(40, 140)]  # more tokens than the windows have


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("assistant")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[lp.Model]:
    with lp.Model(assistant_target(folder / "model.gguf")) as model:
        yield model


@pytest.fixture(scope="module")
def right(folder: Path, model: lp.Model) -> Iterator[lp.Model]:
    with lp.Model(assistant(folder / "right.gguf", model.path)) as draft:
        yield draft


@pytest.fixture(scope="module")
def attentive(folder: Path, model: lp.Model) -> Iterator[lp.Model]:
    """An assistant whose drafts depend on the cells that it reads, and hardly on its input."""
    with lp.Model(assistant(folder / "attentive.gguf", model.path, None, added=8.0)) as draft:
        yield draft


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    return watch(monkeypatch, AssistantDraft)


MEMORIES: dict[str, dict[str, Any]] = {
    "all cells": {},
    "windows": {"swa_full": False},
    "unified": {"kv_unified": True},
    "unified windows": {"kv_unified": True, "swa_full": False},
    "packed": {"type_k": "q8_0", "type_v": "q8_0"},
    "packed keys without flash attention": {"type_k": "q8_0", "flash_attn": "off"},
    "invariant": {"batch_invariant": True},
    "ggml's attention": {"kernels": "ggml"},
}


@pytest.mark.parametrize("memory", MEMORIES)
def test_cells_of_every_kind_are_read(
    make_engine: MakeEngine, model: lp.Model, attentive: lp.Model, drafts: Drafts, memory: str
) -> None:
    """Drafts are those of the usual kind; of those that are rounded more, most."""
    options = dict(MEMORIES[memory])
    of_tuning = {key: options.pop(key) for key in ("swa_full", "kv_unified") if key in options}
    kernels = options.pop("kernels", "auto")
    prompts = [LONG, LONG[:80] + PROMPTS[1], *PROMPTS[:3]]
    with (
        lp.Model(model.path, kernels=kernels) as target,
        lp.Model(attentive.path, kernels=kernels) as draft,
        make_engine(
            target, n_ctx=256, n_seq_max=3, draft=draft, tuning=lp.EngineTuning(**of_tuning), **options
        ) as engine,
    ):
        expected = engine.generate(prompts, params(speculate="off"))
        done = engine.generate(prompts, params())
        assert [text.token_ids for text in done] == [text.token_ids for text in expected]
        engine.check_integrity()
    with make_engine(model, n_ctx=256, n_seq_max=1, draft=attentive, prefix_cache=False) as engine:
        assert share_alone(engine, drafts) >= (0.6 if "type_k" in options else 0.9)


def test_shared_cells_are_no_cause_for_warnings(
    make_engine: MakeEngine, model: lp.Model, right: lp.Model, caplog: pytest.LogCaptureFixture
) -> None:
    with make_engine(model, n_ctx=64, n_seq_max=2, draft=right, tuning=lp.EngineTuning(kv_unified=True)):
        pass
    assert not [
        record.message for record in caplog.records if "shar" in record.message and record.levelno > 10
    ]


def test_positions_that_move(make_engine: MakeEngine, model: lp.Model, right: lp.Model) -> None:
    with make_engine(model, n_ctx=96, n_seq_max=2, draft=right, overflow="shift", n_keep=4) as engine:
        done = engine.generate(PROMPTS[:3], params(200))
        assert {text.finish_reason for text in done} == {"length"}
        assert engine.stats().n_accepted_by_model > 100
        engine.check_integrity()


def test_adapters(make_engine: MakeEngine, tmp_path: Path, model: lp.Model, right: lp.Model) -> None:
    """The assistant computes without them."""
    adapter = model.load_adapter(make_adapter(tmp_path / "a.gguf", model.path))
    with make_engine(model, n_ctx=256, n_seq_max=4, draft=right, adapters=[adapter]) as engine:
        check_texts(engine, {"adapter": adapter.name})
    adapter.close()


def test_images(make_engine: MakeEngine, tmp_path: Path, model: lp.Model, right: lp.Model) -> None:
    """The assistant sees them in the model's cells."""
    projector = gemma3_projector(tmp_path / "mmproj.gguf", n_embd=model.n_embd)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    content = [
        {"type": "text", "text": "What"},
        {"type": "image", "image": picture()},
        {"type": "text", "text": "?"},
    ]
    with (
        lp.Model(model.path, mmproj=projector, chat_template=template) as seeing,
        make_engine(seeing, n_ctx=256, n_seq_max=2, draft=right) as engine,
    ):
        chats: list[list[dict[str, Any]]] = [
            [{"role": "user", "content": content}],
            [{"role": "user", "content": "Now"}],
        ]
        expected = engine.chat(chats, params(speculate="off", logprobs=0))
        assert engine.stats().n_encoded_media > 0
        before = engine.stats()
        done = engine.chat(chats[:1], params(logprobs=0))
        assert done[0].content == expected[0].content
        assert share_right(before, engine.stats()) > 0.8
        assert engine.stats().n_accepted_by_model > 8
        assert [chat.content for chat in engine.chat(chats, params())] == [chat.content for chat in expected]
        engine.check_integrity()


@pytest.mark.parametrize("windows", [(True, False), (False, True, False, True)])
def test_other_layers(
    make_engine: MakeEngine, tmp_path: Path, model: lp.Model, windows: tuple[bool, ...]
) -> None:
    path = assistant(tmp_path / "draft.gguf", model.path, 0.0, windows)
    with make_engine(model, n_ctx=256, n_seq_max=4, draft=path) as engine:
        check_texts(engine, RANDOM)


# ---- which assistant belongs to a model
def number(key: str, value: int) -> Callable[[Document], None]:
    return lambda document: document.put(f"gemma4-assistant.{key}", 4, value)


def pattern(*values: bool) -> Callable[[Document], None]:
    return lambda document: document.put(
        "gemma4-assistant.attention.sliding_window_pattern", ARRAY, list(values), BOOL
    )


def other_token(document: Document) -> None:
    document.entry("tokenizer.ggml.tokens").value[60] = b"other"


WRONG: dict[str, tuple[Callable[[Document], None], str]] = {
    "width": (
        number("embedding_length_out", 192),
        "its model's hidden states have 192 numbers .* this model's 128",
    ),
    "no width": (
        lambda document: document.remove("gemma4-assistant.embedding_length_out"),
        "it does not say how wide its model's hidden states are",
    ),
    "layers that do not draft": (number("nextn_predict_layers", 3), "3 of its 4 layers draft"),
    "tokens": (other_token, "their vocabularies differ .token 60 is "),
    "window": (number("attention.sliding_window", 512), "its sliding window has 512 tokens, this model's 64"),
    "all windows": (pattern(True, True, True, True), "some of its layers must have a sliding window"),
    "no windows": (pattern(False, False, False, False), "some of its layers must have a sliding window"),
    "too few windows": (pattern(True, False), "some of its layers must have a sliding window"),
}


@pytest.mark.parametrize("change", WRONG)
def test_other_sizes_are_refused(
    make_engine: MakeEngine, tmp_path: Path, model: lp.Model, right: lp.Model, change: str
) -> None:
    """Before llama.cpp sees the file, which compares nothing."""
    edit, reason = WRONG[change]
    document, _ = unpack(right.path.read_bytes())
    edit(document)
    path = tmp_path / "draft.gguf"
    path.write_bytes(document.pack())
    with pytest.raises(ValueError, match=f"draft: draft.gguf does not draft for model.gguf: {reason}"):
        make_engine(model, n_ctx=64, n_seq_max=1, draft=path)


def test_other_models_are_refused(
    make_engine: MakeEngine, tmp_path: Path, model: lp.Model, right: lp.Model, demo: lp.Model
) -> None:
    of_others = assistant_target(tmp_path / "others.gguf", "builtin-spm")
    heads = assistant(tmp_path / "heads.gguf", model.path, heads_kv=(2, 2, 2, 1))
    document, _ = unpack(model.path.read_bytes())
    document.put("gemma4.embedding_length_out", 4, 256)
    wide = tmp_path / "wide.gguf"
    wide.write_bytes(document.pack())
    for target, draft, reason in (
        (wide, right, "wide.gguf has hidden states of 128 numbers, and gemma4.embedding_length_out"),
        (demo, right, "the model is a llama; a Gemma 4 assistant drafts for gemma4"),
        (of_others, right.path, r"its vocabulary has 314 tokens, this model's 512"),
        (model, heads, "its layer 0 reads 2 heads of keys, and this model's layer 8 has 1"),
    ):
        with pytest.raises(ValueError, match=f"does not draft for .*: {re.escape(reason)}"):
            make_engine(target, n_ctx=64, n_seq_max=1, draft=draft)


def test_a_model_whose_last_layer_has_a_window_is_refused(
    make_engine: MakeEngine, tmp_path: Path, right: lp.Model
) -> None:
    """llama.cpp takes the cells of its last two layers for those of a window and of all tokens."""
    model = assistant_target(tmp_path / "model.gguf", n_layers=11)
    with pytest.raises(
        ValueError, match="the last but one of this model's layers must have a sliding window"
    ):
        make_engine(model, n_ctx=64, n_seq_max=1, draft=right.path)
