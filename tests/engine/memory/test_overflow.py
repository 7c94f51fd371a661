"""What happens when a request has filled its context: it ends, or drops old tokens and goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.backends import FEW
from support.gguf_models import tiny_architecture
from support.plain import PlainLoop, greedy, plain_loop

import llamapipe as lp
from llamapipe.errors import InvalidRequestError

MakeEngine = Callable[..., lp.Engine]

PROMPT = [1, *range(300, 340)]
N_CTX = 64


def check_recomputed(
    loop: PlainLoop, prompt: list[int], generated: list[int], n_keep: int, n_ctx: int = N_CTX
) -> None:
    """These tokens continue a sequence that drops the older half of all but the first whenever it is full."""
    tokens = list(prompt)
    while generated:
        new, generated = generated[: n_ctx - len(tokens)], generated[n_ctx - len(tokens) :]
        assert loop.agrees(tokens, new)
        tokens += new
        if len(tokens) == n_ctx:
            del tokens[n_keep : n_keep + (n_ctx - n_keep) // 2]


ALL_OPTIONS: list[dict[str, Any]] = [{}, {"kv_unified": True}, {"n_seq_max": 1}, {"prefix_cache": False}]
OPTIONS = ALL_OPTIONS[1:2] if FEW else ALL_OPTIONS


@pytest.mark.parametrize("n_keep", [0, 1, pytest.param(10, marks=pytest.mark.device), 60])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_recompute_drops_the_older_half(
    make_engine: MakeEngine, loop: PlainLoop, options: dict[str, Any], n_keep: int
) -> None:
    """Three times the context; the BOS token stays in any case."""
    engine = make_engine(n_ctx=N_CTX, overflow="recompute", n_keep=n_keep, **options)
    prompts = [PROMPT, PROMPT[:20], PROMPT[:5] + PROMPT]
    outs = engine.generate(prompts, greedy(180))
    for prompt, out in zip(prompts, outs, strict=True):
        check_recomputed(loop, prompt, out.token_ids, max(n_keep, 1))
        assert (out.n_prompt_tokens, out.n_completion_tokens, out.finish_reason) == (
            len(prompt),
            180,
            "length",
        )
        pieces = b"".join(map(engine.model.piece, out.token_ids))
        assert out.text == pieces.decode("utf-8", "replace")


@pytest.mark.parametrize("mode", ["recompute", "shift"])
def test_of_a_recurrent_model(make_engine: MakeEngine, recurrent: lp.Model, mode: str) -> None:
    """Nothing can be taken out of its state. A shift only changes positions, so it goes on as in a larger context."""
    engine = make_engine(recurrent, n_ctx=N_CTX, overflow=mode, n_keep=3)
    prompt = [5 + i % 60 for i in range(40)]
    token_ids = engine.generate(prompt, greedy(150)).token_ids
    with plain_loop(recurrent) as loop:
        if mode == "shift":
            assert loop.agrees(prompt, token_ids)
        else:
            check_recomputed(loop, prompt, token_ids, 3)


class TestShift:
    @pytest.mark.parametrize("n_seq_max", [1, pytest.param(3, marks=pytest.mark.device)])
    def test_a_shift_moves_cells_and_computes_nothing_twice(
        self, make_engine: MakeEngine, tiny: lp.Model, n_seq_max: int
    ) -> None:
        """The same tokens as a plain loop that removes and shifts; nothing is computed twice."""
        engine = make_engine(n_ctx=N_CTX, overflow="shift", n_keep=4, n_seq_max=n_seq_max)
        out = engine.generate(PROMPT, greedy(100))
        assert out.token_ids == self.shifted(tiny, 100, 4)
        assert engine.stats().n_prompt_tokens == len(PROMPT)
        others = engine.generate([PROMPT] * 4, greedy(100))
        assert all(other.token_ids == out.token_ids for other in others)

    def shifted(self, model: lp.Model, n: int, n_keep: int) -> list[int]:
        out: list[int] = []
        with lp.Pipeline(model, n_ctx=N_CTX, n_threads=1) as pipe:
            n_cells, tokens = 0, list(PROMPT)
            for _ in range(n):
                step = pipe.submit(lp.DecodeBatch.of_tokens(tokens, n_cells))
                n_cells += len(tokens)
                row = np.array(step.logits[-1])
                row[list(model.vocab.eog_tokens)] = -np.inf
                tokens = [int(row.argmax())]
                out += tokens
                if n_cells + 1 == N_CTX:
                    end = n_keep + (N_CTX - n_keep) // 2
                    pipe.memory.remove(0, n_keep, end)
                    pipe.memory.shift(0, end, -1, n_keep - end)
                    n_cells -= end - n_keep
        return out

    def test_slots_are_not_moved_before_keys_are_rotated(self, make_engine: MakeEngine) -> None:
        """The gap beside a shifted sequence is closed one step later: its text and log-probabilities stay the same."""
        n_ctx, params = 96, greedy(200, logprobs=0)
        prompts = [PROMPT, PROMPT[:30], [1, *range(400, 440)]]
        engine = make_engine(n_ctx=n_ctx, overflow="shift", n_keep=4, n_seq_max=3, prefix_cache=False)
        alone = [engine.generate(prompt, params) for prompt in prompts]
        first_full = n_ctx - len(prompts[0])
        for n in range(
            first_full - 14, first_full + 1
        ):  # the middle one ends at each step around the first shift
            lengths = [params, greedy(n, logprobs=0), params]
            outs = engine.generate(prompts, lengths)
            for out, expected in zip(outs[::2], alone[::2], strict=True):
                assert out.token_ids == expected.token_ids, n
                logprobs = [entry.logprob for entry in out.logprobs or ()]
                assert logprobs == pytest.approx(
                    [entry.logprob for entry in expected.logprobs or ()], abs=0.01
                ), n

    def test_no_other_request_uses_moved_cells(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        engine = make_engine(n_ctx=N_CTX, overflow="shift", n_keep=4, n_seq_max=2)
        out = engine.generate(PROMPT, greedy(40))
        left = PROMPT + out.token_ids
        left = left[:4] + left[4 + (N_CTX - 4) // 2 : N_CTX]
        following = engine.generate([*left[:30], 7], greedy(5))
        assert following.n_cached_tokens == 0
        assert loop.agrees([*left[:30], 7], following.token_ids)


class TestGenerations:
    @pytest.mark.parametrize("mode", ["recompute", "shift"])
    def test_show_what_is_left(self, make_engine: MakeEngine, loop: PlainLoop, mode: str) -> None:
        engine = make_engine(n_ctx=N_CTX, overflow=mode, n_keep=5)
        with engine.start(PROMPT, greedy(None)) as generation:
            tokens = list(PROMPT)
            for _ in range(120):
                token = generation.next()
                assert token is not None
                tokens.append(token.id)
                if len(tokens) == N_CTX:
                    del tokens[5 : 5 + (N_CTX - 5) // 2]
                assert generation.token_ids == tokens
            with generation.fork() as child:
                generation.trim(30)
                after = [next(generation).id for _ in range(40)]
                assert mode == "shift" or loop.agrees(tokens[:30], after[:34])
                assert child.token_ids == tokens
                assert len([next(child) for _ in range(70)]) == 70
            if mode == "recompute":
                with engine.restore(generation.snapshot(), greedy(80)) as restored:
                    assert len(list(restored)) == 80

    def test_constraints_go_on(self, make_engine: MakeEngine) -> None:
        """Also after a change, for which a grammar reads the whole text again."""
        pytest.importorskip("llguidance")
        engine = make_engine(n_ctx=N_CTX, overflow="recompute", n_keep=5)
        params = lp.SamplingParams(regex="(ab)*c", max_tokens=None, temperature=0, logit_bias={})
        with engine.start(PROMPT, params) as generation:
            ids: list[int] = []
            while len(ids) < 150 and (token := generation.next()) is not None:
                ids.append(token.id)
            with generation.fork() as child:
                while len(ids) < 200 and (token := child.next()) is not None:
                    ids.append(token.id)
        text = engine.model.detokenize(ids)
        assert set(text) <= set("abc") and "aa" not in text and "bb" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overflow": "wrap"}, "overflow is 'wrap'; it must be one of"),
        ({"n_keep": 4}, "n_keep is 4, but overflow is 'stop'"),
        ({"overflow": "recompute", "n_keep": -1}, "n_keep"),
        ({"overflow": "recompute", "n_keep": 61}, "n_keep is 61 and n_ctx 64"),
        ({"overflow": "shift", "kv_unified": True}, "requests share them"),
        ({"overflow": "shift", "n_cells": 100}, "requests share them"),
        ({"overflow": "shift", "type_k": "bf16"}, "cannot be shifted with type_k='bf16': use"),
    ],
)
def test_bad_options_are_refused(make_engine: MakeEngine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(n_ctx=N_CTX, **options)


@pytest.mark.parametrize(
    ("architecture", "type_k"), [("gemma3-270m", "q8_0"), ("gpt-oss-20b", "q4_0"), ("granite4-h-1b", "f16")]
)
def test_keys_that_cannot_be_rotated_are_refused(
    make_engine: MakeEngine, tmp_path: Path, architecture: str, type_k: str
) -> None:
    """llama.cpp ends the process where 64 does not divide heads of quantized keys, and fails where no key rotates."""
    with lp.Model(tiny_architecture(tmp_path / "model.gguf", architecture)) as model:
        with pytest.raises(ValueError, match="cannot be shifted"):
            make_engine(model, n_ctx=N_CTX, overflow="shift", type_k=type_k)
        engine = make_engine(model, n_ctx=N_CTX, overflow="recompute", type_k=type_k)
        assert len(engine.generate(PROMPT, greedy(60)).token_ids) == 60
        engine.close()


def test_a_prompt_that_is_too_long_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match="n_ctx is 64"):
        make_engine(n_ctx=N_CTX, overflow="recompute").generate([5] * 64)
