"""Measures sampling: of whole rows, and in the graph, with what a request's start and a step cost.

python benchmarks/bench_sampling.py MODEL start     # make a request's sampler, prepare its first row; fails over 10 us
python benchmarks/bench_sampling.py MODEL rows      # a draw on the CPU from random rows, by the request's options
python benchmarks/bench_sampling.py MODEL graph     # the subgraph alone on random rows, by device and number of rows
python benchmarks/bench_sampling.py MODEL engine    # an engine's steps, sampled in the graph and on the CPU, in turns
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import numpy as np

import llamapipe as lp
from llamapipe._engine.policy.core import Request, RequestSpec
from llamapipe._engine.runtime.samplers import SamplerFactoryCache
from llamapipe.llama.devices import device_handles
from llamapipe.llama.sampler import SamplerChain
from llamapipe.native.load import last_error, native

MOST_US = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a GGUF file, or 'demo'")
    parser.add_argument("what", choices=sorted(BENCHMARKS), nargs="+")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--n-vocab", type=int, default=32000, help="of the random rows")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--n-threads", type=int, default=None)
    args = parser.parse_args(argv)
    with lp.Model.demo() if args.model == "demo" else lp.Model(Path(args.model)) as model:
        print(
            f"{model.path.name}: n_vocab {model.n_vocab}, {', '.join(d.description for d in model.devices)}"
        )
        return max([BENCHMARKS[what](model, args) for what in args.what])


def start(model: lp.Model, args: argparse.Namespace) -> int:
    """A request's start: its sampler with the default stages, and whether the graph can do them, as a launch asks."""
    sampler_factory = SamplerFactoryCache(model.vocab, model.n_ctx_train).sampler_factory(
        lp.SamplingParams(seed=7)
    )
    in_graph = native().lib.lp_in_graph
    request = Request([1], RequestSpec(seed=7))
    n, times = 2000, []
    for _ in range(args.repeats):
        began = perf_counter()
        chains = []
        for _ in range(n):
            chain = sampler_factory.make(request)
            assert isinstance(chain, SamplerChain)
            in_graph(chain.handle)
            chains.append(chain)
        times.append((perf_counter() - began) / n * 1e6)
        assert in_graph(chains[0].handle)
        for chain in chains:
            chain.close()
    best = min(times)  # a busy machine makes it slower, nothing makes it faster
    print(f"start: {best:.2f} us a request (median {median(times):.2f}); at most {MOST_US:g}")
    return int(best > MOST_US)


ROWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy, tokens banned": {"temperature": 0, "logit_bias": dict.fromkeys(range(5), float("-inf"))},
    "default (top_k 40)": {},
    "default, tokens banned": {"logit_bias": dict.fromkeys(range(5), float("-inf"))},
    "default, logprobs 5": {"logprobs": 5},
    "temperature alone": {"top_k": 0, "top_p": 1, "min_p": 0},
    "top_p 0.95 alone": {"top_k": 0, "top_p": 0.95, "min_p": 0},
    "min_p 0.05 alone": {"top_k": 0, "top_p": 1, "min_p": 0.05},
}


def rows(model: lp.Model, args: argparse.Namespace) -> int:
    """Processor time of a draw. Rows of 128 values are those of made models whose matrices repeat 128 rows."""
    cache = SamplerFactoryCache(model.vocab, model.n_ctx_train)
    n, rng = model.n_vocab, np.random.default_rng(1)
    for n_values in (n, 128):
        for spread in (2.0, 4.0):
            samples = [
                np.resize((rng.standard_normal(n_values) * spread).astype(np.float32), n) for _ in range(8)
            ]
            for name, options in ROWS.items():
                chain = cache.sampler_factory(lp.SamplingParams(seed=7, **options)).make(
                    Request([1], RequestSpec(seed=7))
                )
                assert isinstance(chain, SamplerChain)
                times = []
                for i in range(args.repeats * len(samples)):
                    began = thread_time()
                    chain.sample(samples[i % len(samples)])
                    times.append(thread_time() - began)
                chain.close()
                us = median(times) * 1e6
                print(
                    f"row of {n}, {n_values} values, deviation {spread:g}, {name:24} "
                    f"{us:10.1f} us, {us / n * 1e3:8.3f} ns a logit"
                )
    return 0


def graph(model: lp.Model, args: argparse.Namespace) -> int:
    """Setting up and running the subgraph once, minus the same for one row of the smallest vocabulary."""
    module = native()
    ffi, lib = module.ffi, module.lib
    for device, handle in device_handles():
        for n in args.rows:

            def run(n_vocab: int, n: int, handle: object = handle) -> float:
                rows = np.random.default_rng(1).normal(size=(n, n_vocab)).astype(np.float32)
                out, some = ffi.new("float[]", n * lib.LP_GRAPH_RESULTS), ffi.new("float[]", n * 2 * 64)
                no_samplers = ffi.new("lp_sampler *[]", n)
                values, targets = ffi.from_buffer("float[]", rows), ffi.new("int32_t[]", n)
                times = []
                for _ in range(args.repeats):
                    began = perf_counter()
                    if lib.lp_graph_sample(handle, n_vocab, n, values, no_samplers, targets, out, some) != 0:
                        raise RuntimeError(last_error(module))
                    times.append(perf_counter() - began)
                return min(times) * 1e3

            whole, least = run(args.n_vocab, n), run(64, 1)
            print(f"graph, {device.name} ({device.description}), {n:3} rows of {args.n_vocab}: {whole:8.2f} ms, "
                  f"one row of 64: {least:.2f} ms")  # fmt: skip
    return 0


def engine(model: lp.Model, args: argparse.Namespace) -> int:
    """Steps of decoding requests with the default sampling, on both routes in turns."""
    for n in args.rows:
        with ExitStack() as stack:
            engines = {
                choice: stack.enter_context(
                    closing(
                        lp.Engine(
                            model,
                            256,
                            n,
                            n_threads=args.n_threads,
                            tuning=lp.EngineTuning(graph_sampling=choice),
                        )
                    )
                )
                for choice in ("off", "on")
            }
            prompts = [[5 + i, 6, 7] for i in range(n)]
            params = [lp.SamplingParams(seed=i, max_tokens=64, ignore_eos=False) for i in range(n)]
            times: dict[str, list[float]] = {choice: [] for choice in engines}
            for i in range(args.repeats + 1):
                for choice, e in engines.items():
                    steps, began = e.stats().steps, perf_counter()
                    e.generate(prompts, params)
                    if i:  # the first one warms up
                        times[choice].append((perf_counter() - began) / (e.stats().steps - steps) * 1e6)
            us = {choice: median(values) for choice, values in times.items()}
            share = engines["on"].stats().n_graph_sampled / engines["on"].stats().n_completion_tokens
            print(f"engine, {n:3} requests: {us['on']:9.1f} us a step in the graph ({share:.0%} of the tokens), "
                  f"{us['off']:9.1f} us outside")  # fmt: skip
            for choice, e in engines.items():
                stats = e.stats()
                print(
                    f"    {choice}: {stats.n_copied_bytes / stats.n_completion_tokens:.0f} bytes a token to the host"
                )
    return 0


BENCHMARKS: dict[str, Callable[[lp.Model, argparse.Namespace], int]] = {
    "start": start,
    "rows": rows,
    "graph": graph,
    "engine": engine,
}

if __name__ == "__main__":
    sys.exit(main())
