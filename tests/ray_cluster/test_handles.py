"""Deployments called through handles: results, streams, the choice of replicas, and replicas that are not healthy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.ray_programs import RayProgram

import llamapipe as lp

pytest.importorskip("ray", reason='needs Ray: nox -s ray, or pip install "llamapipe[ray]"')

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

BEGIN = """
import asyncio, json, time
from ray import serve
start(num_cpus=8)
params = lp.SamplingParams(max_tokens=12, temperature=0.0)
spec = lr.EngineSpec(lp.demo_model_path(), {"n_ctx": 1024, "n_seq_max": 4})
serve.start(http_options={"location": "NoServer"}, logging_config={"log_level": "ERROR"})
def run(**options):
    return serve.run(lr.deployment(spec, **options), route_prefix=None)
"""


def result(folder: Path, text: str) -> Any:
    """What a program has printed last, as JSON."""
    with RayProgram(folder, BEGIN + text) as program:
        return json.loads(program.end().splitlines()[-1])


def test_handles_return_what_the_engine_does(tmp_path: Path) -> None:
    answers = result(
        tmp_path,
        """
handle = run()
done = handle.generate.remote("Once upon a time", params).result()
deltas = list(handle.options(stream=True).stream.remote("Once upon a time", params))
try:
    handle.generate.remote("x" * 10_000, params).result()
    error = ""
except Exception as e:
    error = str(e)
serve.shutdown()
print(json.dumps([type(done).__name__, done.text, "".join(d.text for d in deltas), deltas[-1].finish_reason, error]))
""",
    )
    with lp.Engine(lp.demo_model_path(), n_ctx=1024) as engine:
        text = engine.generate("Once upon a time", lp.SamplingParams(max_tokens=12, temperature=0.0)).text
    assert answers[:4] == ["Completion", text, text, "length"]
    assert "n_ctx" in answers[4]


def test_requests_go_where_their_prefix_is(tmp_path: Path) -> None:
    answers = result(
        tmp_path,
        """
from dataclasses import replace
letters = {"letters": lp.demo_model_path().with_name("letters.gguf")}
handle = serve.run(lr.deployment(replace(spec, adapters=letters), replicas=2), route_prefix=None)
def prompt(family, i):
    return f"{family} lived in a house by the sea. " * 80 + f"{i} times"
cached = {}
for i in range(6):
    for family, adapter in (("Anna", None), ("Bert", None), ("Carl", "letters"), ("Anna", "letters")):
        done = handle.generate.remote(prompt(family, i), replace(params, adapter=adapter)).result()
        cached.setdefault(f"{family} {adapter}", []).append(done.n_cached_tokens)
        # The handle learns a little later that a request has ended: by then it has done these.
        for other in "abc":
            handle.generate.remote(other, params).result()
serve.shutdown()
print(json.dumps(cached))
""",
    )
    for counts in answers.values():
        assert counts[0] < 20, "nothing could be cached yet"
        assert min(counts[1:]) > 700, f"a later request went to the other replica: {counts}"


def test_a_replica_whose_engine_is_closed_is_replaced(tmp_path: Path) -> None:
    answers = result(
        tmp_path,
        """
handle = run(options={"health_check_period_s": 1})
first = handle.generate.remote("Once upon a time", params).result().text
handle.close.remote().result()
deadline = time.monotonic() + 120
while True:
    try:
        again = handle.generate.remote("Once upon a time", params).result().text
        break
    except Exception as e:
        kind = type(getattr(e, "cause", None) or e).__name__
        assert time.monotonic() < deadline, kind
serve.shutdown()
print(json.dumps([first, again, kind]))
""",
    )
    assert answers[0] == answers[1]
    assert answers[2] == "EngineClosedError"
