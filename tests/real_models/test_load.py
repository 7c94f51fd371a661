"""200 requests to real models give the same texts alone and in crowds."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.mixed_requests import mixed_requests, told_alone, told_among_others
from support.real_weights import needs_all, real_model

import llamapipe as lp
from llamapipe.native.load import native

HERE = Path(__file__).resolve().parents[2]


@needs_all
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["smollm2", "gemma3", "qwen-0.5b"])
def test_texts_do_not_depend_on_the_load(name: str) -> None:
    if not native().lib.lp_kernels_attend():
        pytest.skip("this processor has no kernels")
    text = (HERE / "README.md").read_text(encoding="utf-8")
    with lp.Model(real_model(name)) as model:
        jobs = mixed_requests(200, model.tokenize(text), n_shared=150, n_most=16)
        alone = told_alone(model, jobs, n_ctx=512)
        for n_seq_max in (2, 8, 32):
            assert told_among_others(model, jobs, n_ctx=512, n_seq_max=n_seq_max) == alone
