"""DFlash and DSpark drafts: the kinds of files, their blocks, and which are refused.

``test_state_drafts.py`` has what they share with other drafts that read what the model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.dflash_models import dflash_draft
from support.drafting import PROMPTS, RANDOM, check_texts, params, watch
from support.eagle3_models import eagle3_target
from support.gguf_document import ARRAY, STRING, Document, unpack
from support.inside import scheduler_of

import llamapipe as lp
from llamapipe._engine.policy.core import Request, RequestSpec
from llamapipe._engine.policy.speculation import StepTimes, Worth
from llamapipe._engine.runtime.draft import DFlashDraft
from llamapipe.errors import ContextFullError, ModelLoadError
from llamapipe.gguf.draft_file import LAYER_INPUT_TARGETS
from llamapipe.llama.context import Context

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("eager")]
MakeEngine = Callable[..., lp.Engine]
Heads = dict[str, lp.Model]
FEW = [*range(3, 70), *range(80, 200, 2)]
LENT = ["token_embd.weight", "output.weight"]
LONG = [40 + i % 90 for i in range(300)]
GUESS: dict[str, Any] = {"right": "guess before", "is_dspark": True}
# What writes each draft, of a path and the model's.
HEADS: dict[str, Callable[[Path, Path], Path]] = {
    "wrong": partial(dflash_draft, noise=None, window=24),
    "of few tokens": partial(dflash_draft, tokens=FEW),
    "with the model's matrices": partial(dflash_draft, right="token", lent=LENT),
    "with sections": partial(dflash_draft, has_sections=True),
    "causal, wrong": partial(dflash_draft, noise=None, is_causal=True),
    "causal": partial(dflash_draft, right="token", is_causal=True, block=5),
    "DSpark": partial(dflash_draft, **GUESS),
    "DSpark, wrong": partial(dflash_draft, noise=None, is_dspark=True),
    "DSpark, of few tokens": partial(dflash_draft, from_anchor=False, tokens=FEW, **GUESS),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dflash")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[lp.Model]:
    with lp.Model(eagle3_target(folder / "model.gguf")) as model:
        yield model


@pytest.fixture(scope="module")
def heads(folder: Path, model: lp.Model) -> Iterator[Heads]:
    heads = {
        name: lp.Model(write(folder / f"{i}.gguf", model.path))
        for i, (name, write) in enumerate(HEADS.items())
    }
    yield heads
    for head in heads.values():
        head.close()


@pytest.mark.parametrize("way", [{}, RANDOM], ids=["greedy", "seeded"])
@pytest.mark.parametrize("head", HEADS)
def test_texts_are_those_without_drafts(
    make_engine: MakeEngine, model: lp.Model, heads: Heads, head: str, way: dict[str, Any]
) -> None:
    with make_engine(model, n_ctx=256, n_seq_max=4, draft=heads[head]) as engine:
        check_texts(engine, way)


@pytest.mark.parametrize("head", ["causal", "with sections", "DSpark"])
def test_a_right_draft_saves_steps(make_engine: MakeEngine, model: lp.Model, heads: Heads, head: str) -> None:
    with make_engine(model, n_ctx=256, n_seq_max=1, draft=heads[head]) as engine:
        engine.generate(PROMPTS[1], params(90))
        stats = engine.stats()
        assert stats.n_accepted_by_model > 0.9 * stats.n_drafted_by_model > 30
        assert stats.steps < 60


@pytest.mark.parametrize("head", ["of few tokens", "DSpark, of few tokens"])
def test_only_tokens_of_its_own_vocabulary_are_drafted(
    make_engine: MakeEngine,
    model: lp.Model,
    heads: Heads,
    monkeypatch: pytest.MonkeyPatch,
    head: str,
) -> None:
    drafts = watch(monkeypatch, DFlashDraft)
    with make_engine(model, n_ctx=256, n_seq_max=2, draft=heads[head]) as engine:
        engine.generate(PROMPTS, params())
        assert engine.stats().n_accepted_by_model > 0
    drafted = {token for _, tokens in drafts for token in tokens}
    assert len(drafted) > 5
    assert drafted <= set(FEW)


@pytest.mark.parametrize("head", ["wrong", "DSpark, wrong"])
def test_blocks_beside_others_are_those_alone(
    make_engine: MakeEngine,
    model: lp.Model,
    heads: Heads,
    monkeypatch: pytest.MonkeyPatch,
    head: str,
) -> None:
    """The tokens of a block depend on all of it, so on its length, and on no other block of the decode."""
    seen: list[tuple[tuple[int, ...], int, tuple[int, ...]]] = []
    n_blocks: list[int] = []
    length: list[int] = []
    draft, compute = DFlashDraft.draft, DFlashDraft._compute

    def watched(self: DFlashDraft, chosen: Mapping[Request, int], *worth: Worth) -> dict[Request, Any]:
        drafted = draft(self, dict.fromkeys(chosen, length[0]) if length else chosen, *worth)
        seen.extend((tuple(r.tokens), chosen[r], tuple(tokens)) for r, tokens in drafted.items())
        return {request: tokens[: chosen[request]] for request, tokens in drafted.items()}

    def counted(self: DFlashDraft, batch: Any) -> None:
        n_blocks.append(len(set(batch.seq_ids)))
        compute(self, batch)

    monkeypatch.setattr(DFlashDraft, "draft", watched)
    monkeypatch.setattr(DFlashDraft, "_compute", counted)
    options: dict[str, Any] = {"n_ctx": 256, "prefix_cache": False, "draft": heads[head]}
    with make_engine(model, n_seq_max=4, **options) as engine:
        engine.generate(PROMPTS, params())
        engine.generate([prompt * 8 for prompt in PROMPTS], params())
    assert max(n_blocks) > 1
    beside = [entry for entry in seen if len(entry[2]) > 1]
    assert len(beside) > 20
    with make_engine(model, n_seq_max=1, **options) as engine:
        for tokens, n, drafted in beside[:: len(beside) // 20]:
            seen.clear()
            length[:] = [n]
            engine.generate(list(tokens[:-1]), params(8, logit_bias={tokens[-1]: 1e4}))
            assert drafted == next((entry[2] for entry in seen if entry[0] == tokens), None)


@pytest.mark.parametrize("head", ["wrong", "causal, wrong"])
def test_a_block_sees_all_of_itself(
    make_engine: MakeEngine, model: lp.Model, heads: Heads, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    """So its first token depends on its length, unless the file says otherwise."""
    length: list[int] = []
    draft = DFlashDraft.draft
    firsts: dict[int, list[int]] = {1: [], 7: []}

    def watched(self: DFlashDraft, chosen: Mapping[Request, int], *worth: Worth) -> dict[Request, Any]:
        drafted = draft(self, dict.fromkeys(chosen, length[0]), *worth)
        firsts[length[0]].extend(tokens[0] for tokens in drafted.values())
        return {}

    monkeypatch.setattr(DFlashDraft, "draft", watched)
    with make_engine(model, n_ctx=256, n_seq_max=1, draft=heads[head]) as engine:
        for length[:] in [1], [7]:
            for prompt in PROMPTS:
                engine.generate(prompt, params(12))
    assert len(firsts[1]) == len(firsts[7]) > 20
    assert (firsts[1] == firsts[7]) == ("causal" in head)


def test_cells_are_computed_in_parts(
    make_engine: MakeEngine, model: lp.Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So that other requests need not wait for all of them. A draft begins with the newest 256 tokens of a prompt."""
    computed: list[tuple[int, ...]] = []
    inject = Context.inject

    def counted(self: Context, positions: Sequence[int], seq_ids: Sequence[int]) -> None:
        computed.append((positions[0], len(positions)))
        inject(self, positions, seq_ids)

    monkeypatch.setattr(Context, "inject", counted)
    draft, tuning = dflash_draft(tmp_path / "draft.gguf", model.path), lp.EngineTuning(n_ubatch=128)
    with make_engine(model, n_ctx=512, n_seq_max=1, draft=draft, tuning=tuning) as engine:
        expected = engine.generate(LONG, params(speculate="off")).token_ids
        assert engine.generate(LONG, params()).token_ids == expected
        stats = engine.stats()
    first = len(LONG) + 1 - 256
    assert [entry for entry in computed if entry[1] > 8] == [(first, 128), (first + 128, 128)]
    assert stats.n_accepted_by_model > 0.8 * stats.n_drafted_by_model > 8


def test_a_block_costs_one_decode(make_engine: MakeEngine, model: lp.Model, heads: Heads) -> None:
    """Whatever its length; other lengths, and more cells, cost what was measured for them."""
    with make_engine(model, n_ctx=256, n_seq_max=1, draft=heads["wrong"]) as engine:
        drafter = scheduler_of(engine).gate.drafter
        assert isinstance(drafter, DFlashDraft)
        engine.generate(PROMPTS[0], params())
        drafter.times, drafter._injections, drafter._rest = StepTimes(0.5), StepTimes(0.0), StepTimes()
        drafter.times.observe(3, 0.010)
        drafter.times.observe(7, 0.011)
        drafter._injections.observe(2, 0.001)
        request = Request(PROMPTS[0], RequestSpec(10, speculates=True, drafts=True))
        request.slot = 0
        drafter._held[0].n_missing = 3
        costs = [drafter.seconds({request: n}) for n in range(1, 8)]
        assert costs[1] == pytest.approx(0.011) and costs[5] == pytest.approx(0.012)
        assert max(costs) - min(costs) < 0.006


@pytest.mark.parametrize("n_ctx", [1, 8, 33])
def test_small_contexts(make_engine: MakeEngine, model: lp.Model, heads: Heads, n_ctx: int) -> None:
    """Those with fewer cells than a decode of blocks usually has entries."""
    with make_engine(model, n_ctx=n_ctx, n_seq_max=2, draft=heads["with sections"]) as engine:
        for n in range(1, n_ctx):
            prompts = [prompt[:n] for prompt in PROMPTS[:3]]
            expected = engine.generate(prompts, params(n_ctx - n, speculate="off"))
            done = engine.generate(prompts, params(n_ctx - n))
            assert [text.token_ids for text in done] == [text.token_ids for text in expected]
        assert n_ctx == 1 or engine.stats().n_accepted_by_model > 0
        engine.check_integrity()


def test_a_failed_draft_leaves_no_cells(
    make_engine: MakeEngine, model: lp.Model, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a block whose decode failed: the next one would begin after them."""
    n_failed = 0
    best = Context.best

    def fail(self: Context, row: int) -> tuple[int, float]:
        nonlocal n_failed
        n_failed += 1
        if n_failed % 3:
            raise ContextFullError("no KV cells are left")
        return best(self, row)

    monkeypatch.setattr(Context, "best", fail)
    monkeypatch.setattr(DFlashDraft, "_make_room", lambda *_: True)
    drafts = watch(monkeypatch, DFlashDraft)
    with make_engine(model, n_ctx=256, n_seq_max=2, draft=heads["with sections"]) as engine:
        expected = engine.generate(PROMPTS, params(speculate="off"))
        done = engine.generate(PROMPTS, params())
        assert [completion.token_ids for completion in done] == [
            completion.token_ids for completion in expected
        ]
    assert n_failed > 20 and drafts


@pytest.mark.parametrize("architecture", LAYER_INPUT_TARGETS)
def test_every_architecture(make_engine: MakeEngine, tmp_path: Path, architecture: str) -> None:
    """A right draft is right less often where the layers change the states much."""
    target = eagle3_target(tmp_path / "model.gguf", architecture)
    has_sections = architecture.startswith("qwen35")
    right = dflash_draft(tmp_path / "draft.gguf", target, has_sections=has_sections)
    is_tied = architecture != "gpt-oss"  # which always has an output matrix
    tied = eagle3_target(tmp_path / "tied.gguf", architecture, is_tied)
    wrong = dflash_draft(tmp_path / "lent.gguf", tied, None, lent=LENT)
    with lp.Model(target) as model, make_engine(model, n_ctx=256, n_seq_max=2, draft=right) as engine:
        check_texts(engine, {})
        stats = engine.stats()
        least = 0.2 if architecture == "gpt-oss" else 0.7
        assert stats.n_accepted_by_model > least * stats.n_drafted_by_model
    with lp.Model(tied) as model, make_engine(model, n_ctx=256, n_seq_max=2, draft=wrong) as engine:
        check_texts(engine, {})


# ---- which draft belongs to a model
I32, U32, F32 = 5, 4, 6


def rename(document: Document, name: str, other: str) -> None:
    next(t for t in document.tensors if t.name == name.encode()).name = other.encode()


# What is changed in a file, and what the error says.
DAMAGE: dict[str, tuple[Callable[[Document], None], str]] = {
    "a layer too many": (lambda d: d.put("dflash.target_layers", ARRAY, [0, 4], I32), "this model has 4"),
    "a negative layer": (
        lambda d: d.put("dflash.target_layers", ARRAY, [-1], I32),
        r"\[-1\].*this model has 4",
    ),
    "no layers": (
        lambda d: d.put("dflash.target_layers", ARRAY, [], I32),
        "which layers of the model it reads",
    ),
    "layers in a number": (
        lambda d: d.put("dflash.target_layers", U32, 1),
        "which layers of the model it reads",
    ),
    "layers that are no integers": (
        lambda d: d.put("dflash.target_layers", ARRAY, [1.0, float("nan"), 2.0], F32),
        "which layers of the model it reads",
    ),
    "fewer layers": (
        lambda d: d.put("dflash.target_layers", ARRAY, [1, 2], I32),
        "fc.weight.* has wrong shape",
    ),
    "blocks of one token": (lambda d: d.put("dflash.block_size", U32, 1), "blocks have 1 tokens"),
    "huge blocks": (lambda d: d.put("dflash.block_size", U32, 4096), "blocks have 4096 tokens .* 2 to 64"),
    "no mask token": (lambda d: d.remove("tokenizer.ggml.mask_token_id"), "mask token is None"),
    "another mask token": (
        lambda d: d.put("tokenizer.ggml.mask_token_id", U32, 99_999),
        "mask token is 99999",
    ),
    "other values": (lambda d: d.put("dflash.attention.value_length", U32, 16), "attn_v.weight has 64 rows"),
    "no heads": (lambda d: d.put("dflash.attention.head_count", U32, 0), "head"),
    "sections": (
        lambda d: d.put("dflash.rope.dimension_sections", ARRAY, [8, 4, 4, 0], I32),
        r"positions have several parts \(\[8, 4, 4, 0\]",
    ),
    "a selector": (
        lambda d: rename(d, "blk.1.ffn_norm.weight", "selector_hidden.weight"),
        "a DFlash 2 draft",
    ),
    "DeepSeek V4": (lambda d: d.put("dflash.hyper_connection_count", U32, 4), "DeepSeek V4"),
    "an activation": (lambda d: d.put("dflash.hidden_activation", STRING, b"relu"), "activation: relu"),
    "half of DSpark": (lambda d: rename(d, "blk.1.ffn_norm.weight", "markov_w1.weight"), "markov_w1"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused(
    make_engine: MakeEngine, model: lp.Model, damage: str, tmp_path: Path
) -> None:
    path = dflash_draft(tmp_path / "draft.gguf", model.path, None)
    document, _ = unpack(path.read_bytes())
    change, reason = DAMAGE[damage]
    change(document)
    path.write_bytes(document.pack())
    with pytest.raises((ValueError, ModelLoadError), match=f"draft.gguf.*{reason}"):
        make_engine(model, n_ctx=64, n_seq_max=1, draft=path)


def test_drafts_of_other_models_are_refused(
    make_engine: MakeEngine, model: lp.Model, heads: Heads, demo: lp.Model, tmp_path: Path
) -> None:
    """With what differs, before llama.cpp sees it."""
    n_vocab = model.n_vocab
    of_others = [dflash_draft(tmp_path / f"{i}.gguf", model.path, None, tokens=[5, i]) for i in (n_vocab, -1)]
    no_output = dflash_draft(tmp_path / "c.gguf", model.path, None, tokens=[5, 6], lent=["output.weight"])
    with lp.Model(eagle3_target(tmp_path / "qwen2.gguf", "qwen2")) as qwen2:
        for draft, target, reason in (
            (heads["DSpark"], qwen2, "the model is a qwen2; llamapipe drafts with DFlash for llama, qwen3"),
            (heads["DSpark"], demo, "it is 128 numbers wide"),
            (of_others[0], model, f"has the token {n_vocab}; they are from 0 to {n_vocab - 1}"),
            (of_others[1], model, "has the token -1"),
            (no_output, model, "no output.weight"),
        ):
            with pytest.raises(ValueError, match=f"draft: .* does not draft for .*: .*{reason}"):
                make_engine(target, n_ctx=64, n_seq_max=1, draft=draft)
