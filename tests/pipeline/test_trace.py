"""Traces: every stage of every step, as Chrome's trace events and as a picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.backends import ON_DEVICE
from support.plain import greedy

import llamapipe as lp
from llamapipe.llama import DecodeBatch

MakeEngine = Callable[..., lp.Engine]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def traced(make_engine: MakeEngine) -> lp.Engine:
    """An engine that has generated for three requests, under a trace."""
    engine = make_engine(n_seq_max=4, trace=True)
    engine.generate([[5, 6, 7], [8, 9], [10]], greedy(6))
    settle(engine)
    engine.trace.stop()
    return engine


def settle(engine: lp.Engine) -> None:
    """Callers have their results before the delivery that brought them is over, and noted."""
    engine.stats()


class TestEngine:
    @pytest.mark.device
    def test_every_step_has_its_stages(self, traced: lp.Engine) -> None:
        spans = traced.trace.spans()
        n_steps = traced.stats().steps
        for stage in ("plan", "launch", "compute", "sample", "deliver"):
            steps = [span.step for span in spans if span.stage == stage]
            assert sorted(set(steps)) == list(range(n_steps)), stage
        assert ("copy" in {span.stage for span in spans}) == ON_DEVICE

    @pytest.mark.device
    def test_stages_of_a_step_follow_one_another(self, traced: lp.Engine) -> None:
        spans = {(span.stage, span.step): span for span in traced.trace.spans()}
        for step in range(traced.stats().steps):
            launch, compute, sample = (spans[stage, step] for stage in ("launch", "compute", "sample"))
            assert spans["plan", step].end_s <= launch.begin_s + 1e-4
            assert launch.begin_s <= compute.begin_s <= compute.end_s <= sample.begin_s <= sample.end_s
            assert all(span.begin_s <= span.end_s for span in spans.values())

    def test_it_tells_who_was_in_a_step(self, traced: lp.Engine) -> None:
        launches = [span for span in traced.trace.spans() if span.stage == "launch"]
        assert launches[0].n_tokens == 6 and launches[0].n_rows == 3
        assert {span.sequences for span in launches} == {"0-2"}

    def test_it_can_be_turned_on_and_off(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=2)
        engine.generate([5, 6], greedy(4))
        assert not engine.trace.on and engine.trace.spans() == []
        settle(engine)
        engine.trace.start()
        engine.generate([5, 6], greedy(4))
        settle(engine)
        first = engine.trace.spans()
        engine.trace.stop()
        engine.generate([5, 6], greedy(4))
        settle(engine)
        assert engine.trace.spans() == first and first
        engine.trace.start()
        assert engine.trace.spans() == []

    def test_the_oldest_are_dropped(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=1)
        engine.trace.start(max_spans=10)
        engine.generate([5, 6], greedy(40))
        assert len(engine.trace.spans()) == 10
        assert max(span.step for span in engine.trace.spans()) == 39

    def test_a_path_is_written_at_the_end(self, make_engine: MakeEngine, tmp_path: Path) -> None:
        for name in ("trace.json", "trace.svg"):
            with make_engine(n_seq_max=1, trace=tmp_path / name) as engine:
                engine.generate([5, 6], greedy(3))
            assert (tmp_path / name).stat().st_size > 1000

    @pytest.mark.parametrize(
        ("trace", "error"),
        [("trace.png", ValueError), (5, TypeError), ("", ValueError), (b"x.svg", TypeError)],
    )
    def test_a_path_that_tells_no_format_is_refused(
        self, make_engine: MakeEngine, trace: object, error: type[Exception]
    ) -> None:
        with pytest.raises(error):
            make_engine(trace=trace)

    @pytest.mark.device
    def test_overlap_shows(self, make_engine: MakeEngine) -> None:
        """With two steps under way at most, a step is delivered after the next one was launched."""
        engine = make_engine(n_seq_max=2, pipeline_depth=2, trace=True)
        engine.generate([[5, 6], [7, 8]], greedy(12))
        spans = {(span.stage, span.step): span for span in engine.trace.spans()}
        for step in range(2, 10):
            assert spans["plan", step + 1].end_s <= spans["deliver", step].begin_s


class TestFormats:
    def test_chrome_trace_events(self, traced: lp.Engine, tmp_path: Path) -> None:
        trace = json.loads(traced.trace.save(tmp_path / "t.json").read_text())
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        lanes = {
            event["tid"]: event["args"]["name"]
            for event in trace["traceEvents"]
            if event["name"] == "thread_name"
        }
        assert len(events) == len(traced.trace.spans())
        for event, span in zip(events, traced.trace.spans(), strict=True):
            assert lanes[event["tid"]] == span.stage == event["cat"]
            assert event["args"]["step"] == span.step
            assert event["dur"] == pytest.approx((span.end_s - span.begin_s) * 1e6, abs=1e-2)
        assert min(event["ts"] for event in events) == 0
        launch = next(event for event in events if event["cat"] == "launch")
        assert launch["args"] == {"step": 0, "tokens": 6, "rows": 3, "sequences": "0-2"}

    def test_a_picture_of_its_own(self, traced: lp.Engine, tmp_path: Path) -> None:
        path = traced.trace.save(tmp_path / "t.svg", first_step=1, n_steps=3, title="a <title> & more")
        root = ET.fromstring(path.read_text(encoding="utf-8"))
        bars = root.findall(f"{SVG}rect")
        shown = [span for span in traced.trace.spans() if 1 <= span.step <= 3]
        assert len(bars) == len(shown)
        width = float(root.attrib["viewBox"].split()[2])
        for bar in bars:
            assert (
                float(bar.attrib["x"]) >= 0 and float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width
            )
        texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
        assert "a <title> & more" in texts and "compute" in texts
        for reference in ("http://", "https://", "url(", "href"):
            assert reference not in path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")

    def test_an_empty_trace(self, make_engine: MakeEngine, tmp_path: Path) -> None:
        engine = make_engine()
        assert json.loads(engine.trace.save(tmp_path / "t.json").read_text())["traceEvents"][0]["ph"] == "M"
        ET.fromstring(engine.trace.save(tmp_path / "t.svg").read_text(encoding="utf-8"))


class TestPipeline:
    @pytest.mark.device
    def test_what_readers_do_can_be_marked(self, tiny: lp.Model) -> None:
        with lp.Pipeline(tiny, n_ctx=64, n_threads=1) as pipe:
            pipe.trace.start()
            output = pipe.submit(DecodeBatch.of_tokens([5, 6, 7]))
            pipe.memory.remove(0, 2)
            with pipe.trace.span("consume", 0):
                np.asarray(output.logits)
            pipe.submit(DecodeBatch.of_tokens([8], 2)).wait()
            spans = pipe.trace.spans()
        stages = {span.stage for span in spans}
        assert {"launch", "compute", "consume", "memory"} <= stages
        assert [span.step for span in spans if span.stage == "memory"] == [-1]

    def test_it_can_be_read_after_the_end(self, tiny: lp.Model) -> None:
        with lp.Pipeline(tiny, n_ctx=64, n_threads=1) as pipe:
            pipe.trace.start()
            pipe.submit(DecodeBatch.of_tokens([5, 6, 7])).wait()
        assert [span.step for span in pipe.trace.spans() if span.stage == "launch"] == [0]
