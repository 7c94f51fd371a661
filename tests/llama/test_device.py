"""What is only true of devices that compute on their own: launches that return early, copies behind graphs, overlap."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.backends import BACKEND, ON_DEVICE

import llamapipe as lp
from llamapipe.llama import DecodeBatch

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not ON_DEVICE, reason='needs a device beside the CPU: `nox -s "tests(vulkan)"`'),
]


@pytest.fixture
def pipe(demo: lp.Model) -> Iterator[lp.Pipeline]:
    with lp.Pipeline(demo, n_ctx=512, n_ubatch=64, depth=3) as pipe:
        chunk(pipe, 0).wait()  # shaders are compiled with the first step
        yield pipe


def chunk(pipe: lp.Pipeline, i: int) -> lp.lowlevel.StepOutput:
    """The i-th chunk of a prompt, all of it outputs."""
    tokens = (7 * np.arange(32) + 3) % pipe.model.n_vocab
    return pipe.submit(
        DecodeBatch(tokens, np.arange(32 * i, 32 * i + 32), np.zeros(32, int), np.ones(32, bool))
    )


def test_the_device_is_used(demo: lp.Model) -> None:
    assert [device.backend.lower() for device in demo.devices] == [BACKEND]
    assert demo.devices[0].async_compute


def test_events_order_what_is_read(pipe: lp.Pipeline) -> None:
    assert pipe.mode == ("events" if pipe.model.devices[0].events else "sync")
    before = pipe.stats()
    outputs = [chunk(pipe, i) for i in range(1, 5)]
    for output in outputs:
        assert np.isfinite(np.asarray(output.logits)).all()
    after = pipe.stats()
    assert after.n_syncs == before.n_syncs
    assert after.n_copies - before.n_copies == 4
    assert after.n_bytes - before.n_bytes == 4 * 32 * pipe.model.n_vocab * 4


def test_the_next_step_computes_while_rows_are_consumed(pipe: lp.Pipeline) -> None:
    """From the trace: step N + 1 was computing when the rows of step N were in a reader's hands."""
    pipe.trace.start()
    outputs = [chunk(pipe, i) for i in (1, 2, 3)]
    for output in outputs:
        rows = np.asarray(output.logits)
        with pipe.trace.span("consume", output.number):
            np.log(np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1))
    spans = {(span.stage, span.step): span for span in pipe.trace.spans()}
    for step in (1, 2):
        consumed, computed = spans["consume", step], spans["compute", step + 1]
        assert computed.begin_s < consumed.begin_s and consumed.end_s < computed.end_s


def test_a_launch_returns_before_its_step_is_computed(pipe: lp.Pipeline) -> None:
    pipe.trace.start()
    output = chunk(pipe, 1)
    output.wait()
    spans = {span.stage: span for span in pipe.trace.spans()}
    assert spans["launch"].end_s < spans["compute"].end_s


def test_flash_attention_is_left_off_on_software_devices(
    demo: lp.Model, caplog: pytest.LogCaptureFixture
) -> None:
    if not demo.devices[0].is_software:
        pytest.skip(f"{demo.devices[0].description} is real")
    with lp.Pipeline(demo, n_ctx=64, flash_attn="on") as pipe:
        assert "known to crash" in caplog.text
        assert pipe.mode == "events"
    caplog.clear()
    with lp.Pipeline(demo, n_ctx=64):
        assert "crash" not in caplog.text
