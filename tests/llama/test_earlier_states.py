"""A recurrent memory goes back by the states that it keeps for the last tokens of a step, however long that was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from support.gguf_models import tiny_architecture

import llamapipe as lp
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
                    found = rows(context, BEGIN, step, [25, 26], n_back=n_back)
                with Context(model, **options) as context:  # type: ignore[arg-type]
                    expected = rows(context, BEGIN, kept, [25, 26])
                np.testing.assert_allclose(found, expected, atol=2e-3, err_msg=f"{n_back} of {n}")
