"""The size of KV cells, computed from the metadata, is the size that llama.cpp allocates."""

from __future__ import annotations

import logging
import re

import pytest

import llamapipe as lp
from llamapipe.llama import Context
from llamapipe.llama.kv_memory import kv_bytes
from llamapipe.native.load import drain_log, native

_LOGGED = re.compile(r"KV buffer size = +([\d.]+) MiB")


@pytest.mark.parametrize(("type_k", "type_v"), [("f16", "f16"), ("f32", "f16"), ("q8_0", "q8_0")])
def test_the_size_is_the_one_llama_cpp_logs(
    demo: lp.Model, caplog: pytest.LogCaptureFixture, type_k: str, type_v: str
) -> None:
    drain_log(native())
    with (
        caplog.at_level(logging.DEBUG, "llamapipe.native"),
        Context(demo, n_ctx=1024, n_seq_max=2, type_k=type_k, type_v=type_v, flash_attn="on") as context,
    ):
        drain_log(native())
        logged = sum(float(size) for size in _LOGGED.findall(caplog.text))
        computed = kv_bytes(demo, context.n_cells, type_k, type_v)
    assert computed is not None
    assert computed / 2**20 == pytest.approx(logged, abs=0.02)


def test_a_model_with_a_state_instead_of_cells_has_no_size(recurrent: lp.Model) -> None:
    assert kv_bytes(recurrent, 100, "f16", "f16") is None
