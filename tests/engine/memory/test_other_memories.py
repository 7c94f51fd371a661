"""The prefix cache with models whose memory cannot give back a part of a sequence, or only some of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.control import Worker, all_results
from support.gguf_models import hybrid_model, sliding_window_model
from support.inside import pipeline_of, step_executor_of
from support.plain import PlainLoop, greedy, plain_loop, tokens_of

import llamapipe as lp
from llamapipe._engine.policy.core import CellChanges, MemoryOp, Remove

MakeEngine = Callable[..., lp.Engine]
KINDS = {"sliding window": sliding_window_model, "hybrid": hybrid_model}


@pytest.fixture(scope="module", params=[*KINDS, "recurrent"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, recurrent: lp.Model
) -> Iterator[lp.Model]:
    """A small model of each kind."""
    if request.param == "recurrent":
        yield recurrent
        return
    path: Path = tmp_path_factory.mktemp("models") / "model.gguf"
    with lp.Model(KINDS[request.param](path)) as loaded:
        yield loaded


@pytest.mark.parametrize("kv_unified", [False, True])
class TestKinds:
    def test_a_conversation_is_reused_as_a_whole(
        self, make_engine: MakeEngine, model: lp.Model, plain: PlainLoop, kv_unified: bool
    ) -> None:
        """What was told so far is in one sequence, which is reused as a whole."""
        engine = make_engine(model, n_seq_max=2, kv_unified=kv_unified)
        told = tokens_of(40, 1)
        for turn in range(5):
            out = engine.generate(told, greedy(6))
            assert plain.agrees(told, out.token_ids)
            assert out.n_cached_tokens == (len(told) - 8 if turn else 0)  # all but the new message
            told = told + out.token_ids + tokens_of(7, turn)
        engine.check_integrity()

    def test_going_back_beyond_the_window(
        self, make_engine: MakeEngine, model: lp.Model, plain: PlainLoop, kv_unified: bool
    ) -> None:
        """Cells that the window has left may be missing in a copy, or after other sequences; they are computed anew."""
        engine = make_engine(model, n_seq_max=3, n_ctx=256, kv_unified=kv_unified)
        told = tokens_of(60, 3)
        with engine.start(told, greedy(None)) as first:
            assert first.next() is not None
            with first.fork() as second:
                assert second.next() is not None
                engine.generate(tokens_of(200, 4), greedy(4))
                second.trim(5)
                engine.check_integrity()
                token_ids = [token.id for token in (second.next(), second.next()) if token is not None]
                assert plain.agrees(told[:5], token_ids)
            engine.check_integrity()

    def test_prefixes_of_all_lengths(
        self, make_engine: MakeEngine, model: lp.Model, plain: PlainLoop, kv_unified: bool
    ) -> None:
        """Shared in part, so hardly any cells can be used; with few slots, little memory, and preemption."""
        engine = make_engine(
            model,
            n_seq_max=3,
            kv_unified=kv_unified,
            cache_bytes=100_000,
            n_cells=320 if kv_unified else None,
        )
        base = tokens_of(120, 2)
        prompts = [base[: 10 + 7 * i % 110] + tokens_of(5 + i % 9, i) for i in range(30)]
        workers = [Worker(engine.generate, prompt, greedy(8 + i % 20)) for i, prompt in enumerate(prompts)]
        for prompt, out in zip(prompts, all_results(workers), strict=True):
            assert plain.agrees(prompt, out.token_ids)
        for prompt in prompts[:10]:
            assert plain.agrees(prompt, engine.generate(prompt, greedy(9)).token_ids)
        engine.check_integrity()

    def test_generations_are_cut_forked_and_restored(
        self, make_engine: MakeEngine, model: lp.Model, plain: PlainLoop, kv_unified: bool
    ) -> None:
        engine = make_engine(model, n_seq_max=3, kv_unified=kv_unified)
        prompt = tokens_of(50, 3)
        with engine.start(prompt, greedy(None)) as generation:
            generated = [next(generation).id for _ in range(10)]
            assert plain.agrees(prompt, generated)
            with generation.fork() as child, engine.restore(generation.snapshot(), greedy(None)) as restored:
                for other in (child, restored):
                    assert plain.agrees(prompt + generated, [next(other).id for _ in range(12)])
            generation.trim(45)
            generation.append([7, 8])
            assert plain.agrees([*prompt[:45], 7, 8], [next(generation).id for _ in range(12)])
            engine.check_integrity()


@pytest.mark.parametrize("is_checked", [True, False])
def test_windows_whose_cells_others_have_taken(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_checked: bool
) -> None:
    """Sequences that share cells take those that windows have left, in any order, and then go back.

    Whether one can is told by its first position: llama.cpp removes all positions before one that it gives away, so
    that none is missing between the first and the last. Without that check texts are wrong.
    """
    n_back = n_lost = n_wrong = 0
    with (
        lp.Model(sliding_window_model(tmp_path / "model.gguf")) as model,
        plain_loop(model) as loop,
        make_engine(
            model, n_seq_max=4, kv_unified=True, n_cells=320, n_ubatch=16, prefix_cache=False
        ) as engine,
    ):
        executor = step_executor_of(engine)
        if not is_checked:
            monkeypatch.setattr(executor, "_is_checked", False)
        change_cells = executor.change_cells

        def counting(ops: Sequence[MemoryOp]) -> CellChanges:
            nonlocal n_back, n_lost
            changes = change_cells(ops)
            n_back += sum(isinstance(op, Remove) and op.position > 0 for op in ops)
            n_lost += len(changes.lost)
            return changes

        monkeypatch.setattr(executor, "change_cells", counting)
        chance = random.Random(3)
        running: list[lp.Generation] = []
        for _ in range(120):
            if len(running) < 4 and sum(len(sequence.token_ids) for sequence in running) < 170:
                told = tokens_of(chance.randrange(20, 90), chance.randrange(100))
                running.append(engine.start(told, greedy(None)))
            generation = chance.choice(running)
            n = len(generation.token_ids)
            if n > 200 or chance.random() < 0.08:
                running.remove(generation)
                generation.close()
                continue
            if chance.random() < 0.4 and n > 30:
                generation.trim(n - chance.randrange(1, 28))
            told = generation.token_ids
            generated = [next(generation).id for _ in range(chance.randrange(1, 9))]
            try:
                loop.agrees(told, generated)
            except AssertionError:
                n_wrong += 1
            engine.check_integrity()
        for generation in running:
            generation.close()
    assert n_back > 30
    if is_checked:
        assert n_wrong == 0 and 5 < n_lost < n_back - 5
    else:
        assert n_wrong > 5


@pytest.mark.parametrize("n_ubatch", [3, 16])
def test_windows_in_scarce_cells(make_engine: MakeEngine, tmp_path: Path, n_ubatch: int) -> None:
    """Their rows are staged, unless a step of all decoding requests is several ubatches."""
    chance = random.Random(n_ubatch)

    def prompt(i: int) -> list[int]:
        begin = tokens_of(chance.randrange(30, 150), i % 2)
        return begin + tokens_of(chance.randrange(1, 60), chance.randrange(99))

    options = {"n_ctx": 250, "n_seq_max": 4, "n_cells": 256, "n_ubatch": n_ubatch, "cache_bytes": 2**20}
    with (
        lp.Model(sliding_window_model(tmp_path / "model.gguf")) as model,
        make_engine(model, **options) as engine,
        plain_loop(model) as plain,
    ):
        assert (pipeline_of(engine).mode == "direct") == (n_ubatch < 4)
        for _ in range(4):
            prompts = [prompt(i) for i in range(6)]
            done = engine.generate(prompts, greedy(chance.randrange(2, 40)))
            for asked, out in zip(prompts, done, strict=True):
                assert plain.agrees(asked, out.token_ids)
        assert engine.stats().n_preempted > 0 and engine.stats().n_cache_hit_tokens > 0
        engine.check_integrity()
