"""``Engine(batch_invariant=True)``: the same request gives the same text, whatever else runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from support.gguf_models import Shape, hybrid_model, make_model, recurrent_model, sliding_window_model
from support.mixed_requests import mixed_requests, told_alone, told_among_others

import llamapipe as lp
from llamapipe._engine.runtime.invariance import _is_invariant
from llamapipe.engine import with_tuning
from llamapipe.llama import Context
from llamapipe.native.load import native

pytestmark = pytest.mark.native
SHAPE = Shape(layers=2, width=256, heads=4, heads_kv=2, ffn=512, context=512)
MODELS = ["demo", "q4_k_m", "q8_0", "f16", "f32", "sliding window", "recurrent", "hybrid"]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Model]:
    if not native().lib.lp_kernels_attend():
        pytest.skip("this processor has no kernels")
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    if request.param == "demo":
        path = lp.demo_model_path()
    elif request.param == "sliding window":
        sliding_window_model(path)
    elif request.param == "recurrent":
        recurrent_model(path)
    elif request.param == "hybrid":
        hybrid_model(path)
    else:
        make_model(path, shape=SHAPE, type_name=request.param, vocab="builtin-spm")
    with lp.Model(path) as model:
        yield model


def test_a_text_does_not_depend_on_what_else_runs(model: lp.Model) -> None:
    jobs = mixed_requests(24, list(range(5, 50)), n_shared=90)
    alone = told_alone(model, jobs, n_ctx=256)
    assert told_among_others(model, jobs, n_ctx=256, n_seq_max=3) == alone
    assert told_among_others(model, jobs, n_ctx=256, n_seq_max=16) == alone
    assert told_among_others(model, jobs, n_ctx=256, n_seq_max=8, max_itl_ms=1.0) == alone


def test_what_depends_is_refused(model: lp.Model) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"kv_unified": True}, "share one KV cache"),
        ({"n_cells": 300}, "share one KV cache"),
        ({"flash_attn": "off"}, "flash_attn"),
    ]
    for options, why in refused:
        with pytest.raises(ValueError, match=f"batch_invariant=True, but .*{why}"):
            lp.Engine(model, n_ctx=256, batch_invariant=True, **with_tuning(options))


def test_ggmls_kernels_are_refused(demo: lp.Model) -> None:
    reason = "kernels='ggml'" if demo.attends else "no kernels for this processor"
    with (
        lp.Model(lp.demo_model_path(), kernels="ggml") as model,
        pytest.raises(ValueError, match=reason),
    ):
        lp.Engine(model, n_ctx=256, batch_invariant=True)


def test_operations_of_ggml_are_found(demo: lp.Model) -> None:
    """The check computes: it finds that ggml's loops depend on the number of rows."""
    if not demo.attends:
        pytest.skip("this processor has no kernels")
    with lp.Model(lp.demo_model_path(), kernels="ggml") as plain:
        assert not _is_invariant(partial(Context, plain, n_threads=2, batch_invariant=True))
    assert _is_invariant(partial(Context, demo, n_threads=2, batch_invariant=True))
