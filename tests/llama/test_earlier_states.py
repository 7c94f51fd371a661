"""A recurrent memory goes back by the states that it keeps for the last tokens of a step, however long that was."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.gguf_models import tiny_architecture

import llamapipe as lp
from llamapipe._engine.policy.speculation import limit_to_undoable
from llamapipe.llama import Context, DecodeBatch

BEGIN = [20 + i * 7 % 90 for i in range(12)]
N_STATES = 4


@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "lfm2-1.2b", "nemotron-h-8b"])
def test_wrong_guesses_leave_nothing(tmp_path: Path, name: str) -> None:
    path = tiny_architecture(tmp_path / "model.gguf", name, type_name="f32")
    options = {"n_ctx": 64, "n_seq_max": 1, "n_threads": 1, "type_k": "f32", "type_v": "f32"}
    with lp.Model(path, kernels="ggml") as model:

        def rows(context: Context, *steps: list[int], n_back: int = 0) -> npt.NDArray[np.float32]:
            """The logits of the last step, before which the last tokens of the one before were taken back."""
            place = 0
            for i, step in enumerate(steps):
                if n_back and i == len(steps) - 1:
                    place -= n_back
                    assert context.seq_remove(0, place)
                context.decode(DecodeBatch.of_tokens(step, place))
                place += len(step)
            return context.logits(len(steps[-1]) - 1).copy()

        for n in range(1, 8):
            for n_back in range(min(n, N_STATES + 1)):
                step = [30 + i for i in range(n)]
                kept = step[: n - n_back]
                with Context(model, **options, n_states=N_STATES) as context:  # type: ignore[arg-type]
                    assert context.n_states == N_STATES
                    values = rows(context, BEGIN, step, [25, 26], n_back=n_back)
                with Context(model, **options) as context:  # type: ignore[arg-type]
                    expected = rows(context, BEGIN, kept, [25, 26])
                np.testing.assert_allclose(values, expected, atol=2e-3, err_msg=f"{n_back} of {n}")


def test_guesses_of_several_sequences_leave_nothing(tmp_path: Path) -> None:
    """A step is planned so that llama.cpp moves no state whose earlier ones are still needed.

    With any lengths it does: that is what ``limit_to_undoable`` is for, and what this test would find without it.
    """
    path = tiny_architecture(tmp_path / "model.gguf", "qwen3.5-0.8b", type_name="f32")
    options: dict[str, Any] = {"n_ctx": 64, "n_seq_max": 4, "n_threads": 1, "type_k": "f32", "type_v": "f32"}
    rng = random.Random(3)
    n_wrong = {True: 0, False: 0}
    with lp.Model(path, kernels="ggml") as model, Context(model, **options) as plain:
        for trial in range(80):
            is_planned = trial % 2 == 0
            slots = sorted(rng.sample(range(4), rng.choice([2, 3, 3, 4])))
            wanted = [rng.randrange(N_STATES + 1) for _ in slots]
            n_guessed = limit_to_undoable(slots, wanted) if is_planned else wanted
            n_kept = [1 + rng.randrange(n + 1) for n in n_guessed]
            with Context(model, **options, n_states=N_STATES) as context:
                for slot in rng.sample(range(4), 4):  # states lie in the order in which sequences began
                    context.decode(DecodeBatch(BEGIN, range(12), [slot] * 12, [0] * 11 + [1]))
                rows = [(slot, i) for slot, n in zip(slots, n_guessed, strict=True) for i in range(n + 1)]
                tokens = [30 + 5 * slot + i for slot, i in rows]
                positions, ids = [12 + i for _, i in rows], [slot for slot, _ in rows]
                context.decode(DecodeBatch(tokens, positions, ids, [1] * len(rows)))
                for slot, n, kept in zip(slots, n_guessed, n_kept, strict=True):
                    if kept < n + 1:
                        assert context.seq_remove(slot, 12 + kept)
                places = [12 + kept for kept in n_kept]
                context.decode(DecodeBatch([25] * len(slots), places, slots, [1] * len(slots)))
                values = [context.logits(i).copy() for i in range(len(slots))]
            for row, slot, kept in zip(values, slots, n_kept, strict=True):
                plain.seq_remove(0)
                text = [*BEGIN, *(30 + 5 * slot + i for i in range(kept)), 25]
                plain.decode(DecodeBatch.of_tokens(text, 0))
                n_wrong[is_planned] += bool(np.abs(row - plain.logits(len(text) - 1)).max() > 1e-2)
    assert n_wrong[True] == 0 < n_wrong[False]
