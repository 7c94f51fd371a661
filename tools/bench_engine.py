"""Compares the engine with bare native loops, all in one run and in turns; prints medians and ratios.

    python tools/bench_engine.py [MODEL.gguf ...] [--n 8] [--prompt 64] [--generate 64] [--repeats 7] [--json FILE]

For each model: one request alone (bare loop against engine), and N requests, one by one and at once (bare loops against
engine). The bare loop decodes and samples through the same native entries, without scheduler, threads or text. Greedy,
end of generation ignored, no prefix is shared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import llamapipe as lp
from llamapipe.llama import Context, SamplerChain
from llamapipe.native.load import build_info


class BareLoop:
    """``n`` sequences from prompt to last token in lockstep, straight on the native entries."""

    def __init__(self, model: lp.Model, n: int, n_ctx: int) -> None:
        self.n = n
        self.context = Context(model, n_ctx=n_ctx, n_seq_max=n, n_outputs_max=n)
        self.module = model.vocab._native
        new = self.module.ffi.new
        size = self.context.n_batch
        self.arrays = [new("int32_t[]", size), new("int32_t[]", size), new("int32_t[]", size), new("int8_t[]", size)]
        self.chains = [SamplerChain(model.vocab).add_temperature(0.0) for _ in range(n)]
        self.samplers = new("lp_sampler *[]", [c.handle for c in self.chains])
        self.rows, self.sampled = new("int32_t[]", n), new("int32_t[]", n)
        self.sample = True

    def run(self, prompts: list[list[int]], n_generate: int) -> tuple[float, float]:
        """(seconds in all, seconds of decoding after the first tokens)."""
        started = perf_counter()
        self.context.clear()
        tokens, positions, seq_ids, outputs = self.arrays
        length = len(prompts[0])
        count = 0
        for seq_id, prompt in enumerate(prompts):
            end = count + length
            tokens[count:end] = prompt
            positions[count:end] = range(length)
            seq_ids[count:end] = [seq_id] * length
            outputs[count:end] = [0] * (length - 1) + [1]
            self.rows[seq_id] = end - 1
            count = end
        assert self.context.decode_arrays(count, *self.arrays) == 0
        sampled = self._sample()
        prefilled = perf_counter()
        self.rows[0 : self.n] = range(self.n)
        for step in range(n_generate - 1):
            tokens[0 : self.n] = sampled
            positions[0 : self.n] = [length + step] * self.n
            seq_ids[0 : self.n] = range(self.n)
            outputs[0 : self.n] = [1] * self.n
            assert self.context.decode_arrays(self.n, *self.arrays) == 0
            if self.sample:
                sampled = self._sample()
        ended = perf_counter()
        return ended - started, ended - prefilled

    def _sample(self) -> Any:
        lib, ffi = self.module.lib, self.module.ffi
        assert lib.lp_sample_rows(self.context.handle, self.n, self.rows, self.samplers, self.sampled) == 0
        return ffi.unpack(self.sampled, self.n)

    def close(self) -> None:
        """Frees the native memory."""
        for chain in self.chains:
            chain.close()
        self.context.close()


def measure(model: lp.Model, n: int, n_prompt: int, n_generate: int, repeats: int) -> dict[str, float]:
    """Median seconds of each way, and ratios of medians."""
    n_ctx = n_prompt + n_generate + 8
    params = lp.SamplingParams(temperature=0, max_tokens=n_generate, ignore_eos=True)
    prompts = [[(7 * i + 3 * j) % (model.n_vocab - 300) + 290 for j in range(n_prompt)] for i in range(n)]
    one, many = BareLoop(model, 1, n_ctx), BareLoop(model, n, n_ctx)
    with (
        lp.Engine(model, n_ctx=n_ctx, n_seq_max=1) as blocking,
        lp.Engine(model, n_ctx=n_ctx, n_seq_max=n) as engine,
    ):
        ways: dict[str, Callable[[], float]] = {
            "bare, 1 alone": lambda: one.run(prompts[:1], n_generate)[0],
            "engine, 1 alone": lambda: timed(lambda: engine.generate(prompts[0], params)),
            "bare, one by one": lambda: sum(one.run([p], n_generate)[0] for p in prompts),
            "bare, at once": lambda: many.run(prompts, n_generate)[0],
            "blocking engine, one by one": lambda: timed(lambda: [blocking.generate(p, params) for p in prompts]),
            "engine, at once": lambda: timed(lambda: engine.generate(prompts, params)),
            "bare decode, 1": lambda: one.run(prompts[:1], n_generate)[1],
            "bare decode, N": lambda: many.run(prompts, n_generate)[1],
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(repeats + 1):
            for name, way in ways.items():
                took = way()
                if repeat:  # the first round warms up
                    seconds[name].append(took)
    one.close()
    many.close()
    return {name: statistics.median(values) for name, values in seconds.items()}


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    started = perf_counter()
    work()
    return perf_counter() - started


def report(name: str, s: dict[str, float], n: int, n_generate: int) -> dict[str, float]:
    """Prints a model's figures; returns the ratios."""
    ratios = {
        "one request alone, engine / bare": s["engine, 1 alone"] / s["bare, 1 alone"],
        "gain of bare batching, prefill included": s["bare, one by one"] / s["bare, at once"],
        "gain of bare batching, decode only": n * s["bare decode, 1"] / s["bare decode, N"],
        "gain of the engine": s["blocking engine, one by one"] / s["engine, at once"],
        "time at once, bare / engine": s["bare, at once"] / s["engine, at once"],
    }
    ratios["gain of the engine / gain of bare batching"] = (
        ratios["gain of the engine"] / ratios["gain of bare batching, prefill included"]
    )
    print(f"\n{name}: N = {n}, medians")
    for way, seconds in s.items():
        n_tokens = n_generate * (1 if "1 alone" in way or way == "bare decode, 1" else n)
        print(f"  {way:<42}{seconds * 1e3:9.1f} ms {n_tokens / seconds:9.0f} tok/s")
    for what, ratio in ratios.items():
        print(f"  {what:<48}{ratio:6.3f}")
    return ratios


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    results["build"] = build_info()
    for path in args.models or [lp.demo_model_path()]:
        with lp.Model(path) as model:
            seconds = measure(model, args.n, args.prompt, args.generate, args.repeats)
        ratios = report(path.name, seconds, args.n, args.generate)
        results[path.name] = {"seconds": seconds, "ratios": ratios}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
