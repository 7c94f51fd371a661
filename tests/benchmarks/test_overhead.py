"""What Python adds: to a step, to a submitted request, to requests that wait, to an import.

    pytest tests/benchmarks --benchmark-only

Goals on two cores: a step of one request has at most 60 us outside native calls, one of 32 at most 250 us; a request is
submitted in 50 us; 10,000 waiting ones take at most 30 MB and make steps at most 1.1 times as long as ten do; importing
llamapipe takes at most 50 ms more than importing numpy.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
from support.control import held
from support.inside import swap_native

import llamapipe as lp
from llamapipe.native.load import native

N_GENERATE = 128
PARAMS = lp.SamplingParams(temperature=0, max_tokens=N_GENERATE, ignore_eos=True)
NATIVE = ("lp_launch", "lp_launch_again", "lp_sample_rows", "lp_score_rows", "lp_memory")


class TimedLibrary:
    """The native library; how long calls of it took is added up."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib
        self.seconds = 0.0
        for name in NATIVE:
            setattr(self, name, self._timed(getattr(lib, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = perf_counter()
            result = function(*arguments)
            self.seconds += perf_counter() - began
            return result

        return call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)


def prompts(n: int) -> list[list[int]]:
    return [[300 + (7 * i + j) % 2000 for j in range(8)] for i in range(n)]


@pytest.mark.parametrize("way", ["whole", "streams"])
@pytest.mark.parametrize("n", [1, 8, 32])
def test_python_of_a_step(benchmark: Any, demo: lp.Model, n: int, way: str) -> None:
    """Microseconds of a step outside native calls, in place: with the caches as decoding leaves them."""
    with lp.Engine(demo, n_ctx=256, n_seq_max=n) as engine:
        module = native()
        library = TimedLibrary(module.lib)
        swap_native(engine, SimpleNamespace(ffi=module.ffi, lib=library))
        outside_us = []

        def run() -> None:
            steps, library.seconds = engine.stats().steps, 0.0
            began = perf_counter()
            if way == "whole":
                engine.generate(prompts(n), PARAMS)
            else:
                read_all([engine.stream(prompt, PARAMS) for prompt in prompts(n)])
            elapsed = perf_counter() - began
            outside_us.append((elapsed - library.seconds) / (engine.stats().steps - steps) * 1e6)

        benchmark.pedantic(run, rounds=9, warmup_rounds=2)
        benchmark.extra_info["python_of_a_step_us"] = round(statistics.median(outside_us), 1)
        swap_native(engine, module)


def read_all(streams: list[lp.Stream]) -> None:
    """Each in turn, on this thread: the reader is not part of the measurement."""
    open_ones = streams
    while open_ones:
        open_ones = [stream for stream in open_ones if next(stream).finish_reason is None]


def test_submitting(benchmark: Any, demo: lp.Model) -> None:
    """A request of given tokens behind others, until the call that submits it returns."""
    with lp.Engine(demo, n_ctx=64, n_seq_max=1) as engine:
        tokens = prompts(1)[0]
        waiting: list[lp.Stream] = []

        def submit() -> None:
            waiting.append(engine.stream(tokens, PARAMS))

        benchmark.pedantic(submit, rounds=2000, warmup_rounds=100)
        engine.close(drain=False)


def test_memory_of_waiting_requests(benchmark: Any, demo: lp.Model) -> None:
    """10,000 requests behind one that is being computed; bytes that Python holds for them."""
    with lp.Engine(demo, n_ctx=64, n_seq_max=1) as engine:
        tokens = prompts(1)[0]
        held: list[lp.Stream] = []

        def wait() -> None:
            held.extend(engine.stream(tokens, PARAMS) for _ in range(10_000))

        tracemalloc.start()
        benchmark.pedantic(wait, rounds=1)
        benchmark.extra_info["megabytes"] = round(tracemalloc.get_traced_memory()[0] / 1e6, 1)
        tracemalloc.stop()
        engine.close(drain=False)


def test_a_step_with_many_waiting(benchmark: Any, demo: lp.Model) -> None:
    """Steps of eight requests with 10,000 waiting, over steps with ten waiting; in turns."""
    ratios = []

    def step_s(n_waiting: int) -> float:
        with lp.Engine(demo, n_ctx=256, n_seq_max=8) as engine:
            with held(engine):  # else the first ones run ahead, and pause
                first = [engine.stream(prompt, PARAMS) for prompt in prompts(8)]
                waiting = [engine.stream(prompts(1)[0], PARAMS) for _ in range(n_waiting)]
            for stream in first:
                next(stream)
            before = engine.stats()
            read_all(first)
            after = engine.stats()
            assert after.n_queued >= len(waiting) - 8
            engine.close(drain=False)
        stages = ("plan_s", "launch_s", "sample_s", "deliver_s")
        spent = sum(getattr(after, name) - getattr(before, name) for name in stages)
        return float(spent / (after.steps - before.steps))

    def run() -> None:
        many, few = step_s(10_000), step_s(10)
        ratios.append(many / few)

    benchmark.pedantic(run, rounds=9, warmup_rounds=1)
    benchmark.extra_info["many / few"] = round(statistics.median(ratios), 3)


@pytest.mark.parametrize("what", ["import numpy", "import numpy; import llamapipe"])
def test_import(benchmark: Any, what: str, tmp_path: Path) -> None:
    """A new process each time, with compiled modules as an installation has them."""
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    options = {"check": True, "env": environment}
    benchmark.pedantic(subprocess.run, ([sys.executable, "-c", what],), options, rounds=15, warmup_rounds=2)


def test_first_token(benchmark: Any) -> None:
    """From nothing loaded to the bundled model's first token; goal 0.5 s."""

    def first_token() -> None:
        with lp.Model.demo() as model, lp.Engine(model) as engine:
            next(engine.stream("Once", lp.SamplingParams(max_tokens=2)))

    benchmark.pedantic(first_token, rounds=9, warmup_rounds=1)
