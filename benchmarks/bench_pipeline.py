"""Measures the pipeline: staged against plain decoding, overlapped against serial reading, where a step's time goes.

Everything compared runs in one process, in turns, and medians of pairs are printed with their ratios.

    python benchmarks/bench_pipeline.py MODEL decode     # the ring against llama.cpp's own buffer, by sequences
    python benchmarks/bench_pipeline.py MODEL overlap    # a numpy consumer of all rows, pipelined against serial
    python benchmarks/bench_pipeline.py MODEL engine     # an engine's steps one by one and overlapped
    python benchmarks/bench_pipeline.py MODEL stages     # launch, compute, copy and wait of a step, and of `submit`
    python benchmarks/bench_pipeline.py MODEL memory     # what operations on KV cells cost and wait for
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import llamapipe as lp
from llamapipe._engine.policy.core import Remove
from llamapipe._engine.runtime.executor import StepExecutor
from llamapipe.llama import DecodeBatch
from llamapipe.llama.context import Context
from llamapipe.llama.native_pipeline import engine_pipeline, ring_slots

Result = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a GGUF file, or 'demo'")
    parser.add_argument("what", choices=sorted(BENCHMARKS), nargs="+")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--n-threads", type=int, default=None)
    parser.add_argument("--rows", type=int, default=128, help="rows of a step that is read whole")
    parser.add_argument("--steps", type=int, default=8, help="steps of a pipelined run")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args(argv)
    results: Result = {}
    with lp.Model.demo() if args.model == "demo" else lp.Model(args.model) as model:
        print(f"{model.path.name}: {model.n_params / 1e6:.1f}M weights, n_vocab {model.n_vocab}, "
              f"{', '.join(d.description for d in model.devices)}")  # fmt: skip
        for what in args.what:
            results[what] = BENCHMARKS[what](model, args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


# ---- decoding: the cost of the ring if nothing overlaps
def decode(model: lp.Model, args: argparse.Namespace) -> Result:
    """Steps of one token a sequence, sampled greedily: the ring and llama.cpp's own buffer in turns."""
    result = {}
    for n_seq in args.sequences:
        with ExitStack() as stack:
            runs = {ring: Steps(stack, model, n_seq, ring, args.n_threads) for ring in ("auto", "off")}
            times: dict[str, list[float]] = {ring: [] for ring in runs}
            for i in range(args.repeats + 2):
                for ring in ("auto", "off") if i % 2 else ("off", "auto"):
                    elapsed = runs[ring].run(64)
                    if i >= 2:  # the first ones warm up
                        times[ring].append(elapsed)
        ratios = [off / ring for ring, off in zip(times["auto"], times["off"], strict=True)]
        us = {ring: median(values) * 1e6 for ring, values in times.items()}
        print(f"decode, {n_seq:3} sequences: ring {us['auto']:9.1f} us a step, plain {us['off']:9.1f} us, "
              f"speed of the ring {median(ratios):.3f} (quartiles {_quartiles(ratios)})")  # fmt: skip
        result[n_seq] = {**us, "ratio": median(ratios)}
    return result


class Steps:
    """An executor whose sequences decode from the same place again and again."""

    def __init__(
        self, stack: ExitStack, model: lp.Model, n_seq: int, ring: str, n_threads: int | None
    ) -> None:
        context = Context(
            model,
            n_ctx=256,
            n_seq_max=n_seq,
            n_outputs_max=n_seq,
            n_threads=n_threads,
            n_ring_slots=ring_slots(model, ring, 1),
        )
        self.executor = StepExecutor(engine_pipeline(context, ring, 1))
        stack.callback(self.executor.close)
        from llamapipe.llama import SamplerChain
        from llamapipe.llama.sampling_options import SamplingOptions

        self.samplers = [
            stack.enter_context(
                SamplerChain(model.vocab, options=SamplingOptions(("temperature",), temperature=0.0))
            )
            for _ in range(n_seq)
        ]
        self.n_seq = n_seq

    def run(self, n_steps: int) -> float:
        """Seconds of a step: the median over several steps after a prompt of 64 tokens."""
        n, executor = self.n_seq, self.executor
        for seq_id in range(n):
            executor.change_cells([Remove(seq_id, 0)])
            executor.launch([5] * 64, range(64), [seq_id] * 64, [0] * 64)
        rows = list(range(n))
        step = executor.launch([7] * n, [64] * n, rows, [1] * n)
        executor.sample(step, rows, self.samplers)
        times = []
        for _ in range(n_steps):
            began = perf_counter()
            executor.sample_repeat(executor.launch_repeat())
            times.append(perf_counter() - began)
        return median(times)


# ---- reading all rows
def overlap(model: lp.Model, args: argparse.Namespace) -> Result:
    """Prompts whose every row numpy reads: one step after another, and with the next step computed meanwhile."""
    n, n_steps = args.rows, args.steps
    options = {"n_ctx": n * n_steps, "n_batch": n, "n_ubatch": n, "n_threads": args.n_threads}
    tokens = (7 * np.arange(n) + 3) % model.n_vocab
    batches = [
        DecodeBatch(tokens, np.arange(i * n, (i + 1) * n), np.zeros(n, int), np.ones(n, bool))
        for i in range(n_steps)
    ]
    with (
        lp.Pipeline(model, ring="off", depth=1, **options) as serial,
        lp.Pipeline(model, depth=2, **options) as pipe,
    ):
        step_s = _serial(serial, batches, 0)[0] / n_steps
        _pipelined(pipe, batches, 0)
        consume_s = _serial(serial, batches, 1)[1] / n_steps
        # A consumer that takes as long as the step computes.
        passes = max(round(step_s / consume_s), 1)
        serials, pipelined = [], []
        for _ in range(args.repeats):
            serials.append(sum(_serial(serial, batches, passes)))
            pipelined.append(_pipelined(pipe, batches, passes))
        stats = pipe.stats()
    ratios = [a / b for a, b in zip(serials, pipelined, strict=True)]
    print(f"all rows, {n} a step: compute {step_s * 1e3:.2f} ms, numpy {passes * consume_s * 1e3:.2f} ms a step; "
          f"serial {median(serials) / n_steps * 1e3:.2f} ms, pipelined {median(pipelined) / n_steps * 1e3:.2f} ms "
          f"({pipe.mode}), {median(ratios):.2f} times the speed (quartiles {_quartiles(ratios)}); "
          f"waits {stats.n_waits}, syncs {stats.n_syncs}, copies {stats.n_copies}")  # fmt: skip
    return {"compute_s": step_s, "consume_s": passes * consume_s, "ratio": median(ratios), "mode": pipe.mode}


def _consume(rows: np.ndarray[Any, Any], passes: int) -> float:
    """Log-sum-exp of every row, `passes` times."""
    total = 0.0
    for _ in range(passes):
        total += float(np.log(np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1)).sum())
    return total


def _serial(pipe: lp.Pipeline, batches: Sequence[DecodeBatch], passes: int) -> tuple[float, float]:
    """Seconds computing and seconds reading."""
    pipe.memory.clear()
    compute_s = read_s = 0.0
    for batch in batches:
        began = perf_counter()
        with pipe.submit(batch) as output:
            output.wait()
            computed = perf_counter()
            _consume(np.asarray(output.logits), passes)
        compute_s += computed - began
        read_s += perf_counter() - computed
    return compute_s, read_s


def _pipelined(pipe: lp.Pipeline, batches: Sequence[DecodeBatch], passes: int) -> float:
    pipe.memory.clear()
    began = perf_counter()
    waiting: list[lp.lowlevel.StepOutput] = []
    for batch in batches:
        waiting.append(pipe.submit(batch))
        if len(waiting) == pipe.depth:
            with waiting.pop(0) as output:
                _consume(np.asarray(output.logits), passes)
    for output in waiting:
        with output:
            _consume(np.asarray(output.logits), passes)
    return perf_counter() - began


# ---- engines
def engine(model: lp.Model, args: argparse.Namespace) -> Result:
    """The same requests through an engine that runs one step at a time, and one whose steps overlap."""
    params = lp.SamplingParams(max_tokens=64, temperature=0, ignore_eos=True, speculate="off")
    prompts = [[(5 * i + j) % model.n_vocab for j in range(64)] for i in range(max(args.sequences))]
    result = {}
    for n_seq in args.sequences:
        with ExitStack() as stack:
            options = {"n_ctx": 256, "n_seq_max": n_seq, "n_threads": args.n_threads}
            engines = {
                depth: stack.enter_context(
                    lp.Engine(model, tuning=lp.EngineTuning(pipeline_depth=depth), **options)
                )
                for depth in (1, 2)
            }
            times: dict[int, list[float]] = {depth: [] for depth in engines}
            for i in range(args.repeats + 2):
                for depth in (1, 2) if i % 2 else (2, 1):
                    began = perf_counter()
                    streams = [engines[depth].stream(prompt, params) for prompt in prompts[:n_seq]]
                    for stream in streams:
                        for _ in stream:
                            pass
                    if i >= 2:
                        times[depth].append(perf_counter() - began)
            stats = {depth: e.stats() for depth, e in engines.items()}
        ratios = [a / b for a, b in zip(times[1], times[2], strict=True)]
        print(f"engine, {n_seq:3} streams: depth 1 {median(times[1]) * 1e3:8.1f} ms, depth 2 "
              f"{median(times[2]) * 1e3:8.1f} ms, speed of depth 2 {median(ratios):.3f} "
              f"(quartiles {_quartiles(ratios)}; micro-batches {stats[2].n_micro_batches})")  # fmt: skip
        result[n_seq] = {
            "depth_1_s": median(times[1]),
            "depth_2_s": median(times[2]),
            "ratio": median(ratios),
        }
    return result


# ---- stages
def stages(model: lp.Model, args: argparse.Namespace) -> Result:
    """Medians of the stages of a step, from traces, for steps launched one at a time and `depth` ahead."""
    result: Result = {}
    for rows in sorted({1, 8, args.rows}):
        for depth in (1, 3):
            options = {
                "n_ctx": rows * (args.steps + 3),
                "n_batch": rows,
                "n_ubatch": rows,
                "n_threads": args.n_threads,
            }
            with lp.Pipeline(model, depth=depth, **options) as pipe:
                pipe.submit(_chunk(model, 0, rows)).wait()
                pipe.submit(_chunk(model, 1, rows)).wait()
                pipe.trace.start()
                submit_s: list[float] = []
                outputs: list[lp.lowlevel.StepOutput] = []
                for i in range(2, args.steps + 2):
                    if len(outputs) >= depth:
                        outputs.pop(0).wait()
                    began = perf_counter()
                    outputs.append(pipe.submit(_chunk(model, i, rows)))
                    submit_s.append(perf_counter() - began)
                for output in outputs:
                    output.wait()
                spans = pipe.trace.spans()
                mode = pipe.mode
            times = {"submit": (median(submit_s), max(submit_s))}
            for stage in ("launch", "compute", "copy", "wait"):
                values = [span.end_s - span.begin_s for span in spans if span.stage == stage]
                if values:
                    times[stage] = (median(values), max(values))
            text = ", ".join(
                f"{stage} {m * 1e3:.3f} (at most {most * 1e3:.3f})" for stage, (m, most) in times.items()
            )
            print(f"stages, {rows:4} rows, depth {depth}, {mode}: ms {text}")
            result[f"{rows} rows, depth {depth}"] = {stage: m for stage, (m, _) in times.items()}
    return result


def _chunk(model: lp.Model, i: int, n: int) -> DecodeBatch:
    tokens = (7 * np.arange(n) + 3) % model.n_vocab
    return DecodeBatch(tokens, np.arange(i * n, i * n + n), np.zeros(n, int), np.ones(n, bool))


# ---- memory
def memory(model: lp.Model, args: argparse.Namespace) -> Result:
    """Each operation on a sequence of 1024 tokens: the call itself, and the step after it against a step without it."""
    result = {}
    n = 1024
    for unified in (True, False):
        operations: dict[str, Callable[[lp.Pipeline], object]] = {
            "nothing": lambda _: None,
            "remove a tail": lambda pipe: pipe.memory.remove(0, n - 8),
            "remove a sequence": lambda pipe: pipe.memory.remove(2),
            "copy a sequence": lambda pipe: pipe.memory.copy(0, 1),
            "keep one": lambda pipe: pipe.memory.keep(0),
            "shift": _shift,
        }
        for name, operation in operations.items():
            operation_s, step_s = [], []
            with lp.Pipeline(
                model, n_ctx=2 * n, n_seq_max=3, kv_unified=unified, n_batch=n, n_threads=args.n_threads
            ) as pipe:
                for i in range(max(args.repeats // 3, 3) + 1):
                    pipe.memory.clear()
                    for seq_id in (0, 2):
                        tokens = np.full(n, 7)
                        pipe.submit(
                            DecodeBatch(tokens, np.arange(n), np.full(n, seq_id), np.zeros(n, bool))
                        ).wait()
                    pipe.trace.start()
                    operation(pipe)
                    past = pipe._pipeline.next_position(0)
                    began = perf_counter()
                    pipe.submit(DecodeBatch([5], [past], [0], [1])).wait()
                    elapsed = perf_counter() - began
                    spans = [
                        span.end_s - span.begin_s for span in pipe.trace.spans() if span.stage == "memory"
                    ]
                    if i:
                        operation_s.append(sum(spans))
                        step_s.append(elapsed)
            mode = "unified" if unified else "streams"
            print(f"memory, {mode}: {name:18} {median(operation_s) * 1e6:9.1f} us, "
                  f"the step after it {median(step_s) * 1e3:8.3f} ms")  # fmt: skip
            result[f"{mode}, {name}"] = {"operation_s": median(operation_s), "step_s": median(step_s)}
    return result


def _shift(pipe: lp.Pipeline) -> None:
    """Removes the oldest eight tokens and shifts the others to their positions."""
    pipe.memory.remove(0, 0, 8)
    pipe.memory.shift(0, 8, -1, -8)


def _quartiles(values: Sequence[float]) -> str:
    low, high = np.percentile(values, [25, 75])
    return f"{low:.3f} to {high:.3f}"


BENCHMARKS: dict[str, Callable[[lp.Model, argparse.Namespace], Result]] = {
    "decode": decode,
    "overlap": overlap,
    "engine": engine,
    "stages": stages,
    "memory": memory,
}

if __name__ == "__main__":
    sys.exit(main())
