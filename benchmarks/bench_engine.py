"""Compares the engine with bare native loops, all in one run and in turns; prints medians and ratios.

    python benchmarks/bench_engine.py [MODEL.gguf ...] [--n 8] [--prompt 64] [--generate 64] [--repeats 7] [--json FILE]
    python benchmarks/bench_engine.py --contexts --n 4 ...     # also against a context for each request

For each model: one request alone (bare loop against engine), and N requests, one by one and at once (bare loops against
engines). The bare loop decodes and samples through the same native entries, without scheduler, threads or text. Times
include the prompts. Greedy, end of generation ignored, no prefix is shared.

With ``--contexts``, N threads ask at the same time: each a context of its own, which has its share of the cores, or all
the one they share. Bare, sharing is the loop of all sequences; an engine is asked by N threads either way.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import llamapipe as lp
from llamapipe.llama import Context, SamplerChain
from llamapipe.llama.sampling_options import SamplingOptions
from llamapipe.native.load import build_info

_SETTLE_S = 0.003  # the threads of the context that computed before spin a little longer
_ROUNDS_ALONE = 10


class BareLoop:
    """``n`` sequences from prompt to last token in lockstep, straight on the native entries."""

    def __init__(self, model: lp.Model, n: int, n_ctx: int, n_threads: int | None = None) -> None:
        self.n = n
        self.context = Context(model, n_ctx=n_ctx, n_seq_max=n, n_outputs_max=n, n_threads=n_threads)
        self.module = model.vocab._native
        new = self.module.ffi.new
        size = self.context.n_batch
        self.arrays = [
            new("int32_t[]", size),
            new("int32_t[]", size),
            new("int32_t[]", size),
            new("int8_t[]", size),
        ]
        greedy = SamplingOptions(("temperature",), temperature=0.0)
        self.chains = [SamplerChain(model.vocab, options=greedy) for _ in range(n)]
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
        self.context.release_thread()  # the next run may be another thread's
        return ended - started, ended - prefilled

    def _sample(self) -> Any:
        lib, ffi = self.module.lib, self.module.ffi
        assert lib.lp_sample_context(self.context.handle, self.n, self.rows, self.samplers, self.sampled) == 0
        return ffi.unpack(self.sampled, self.n)

    def close(self) -> None:
        """Frees the native memory."""
        for chain in self.chains:
            chain.close()
        self.context.close()


class Ways:
    """The ways that are compared, over one model; each returns its seconds."""

    def __init__(self, model: lp.Model, n: int, n_prompt: int, n_generate: int, contexts: bool) -> None:
        n_ctx = n_prompt + n_generate + 8
        self.n, self.n_generate = n, n_generate
        # No two prompts share a prefix.
        self.prompts = [
            [(7 * i + 3 * j) % (model.n_vocab - 300) + 290 for j in range(n_prompt)] for i in range(n)
        ]
        self.params = lp.SamplingParams(
            temperature=0, max_tokens=n_generate, ignore_eos=True, speculate="off"
        )
        self.one, self.many = BareLoop(model, 1, n_ctx), BareLoop(model, n, n_ctx)
        self.blocking = lp.Engine(model, n_ctx=n_ctx, n_seq_max=1)
        self.engine = lp.Engine(model, n_ctx=n_ctx, n_seq_max=n)
        share = max((os.cpu_count() or 1) // n, 1)
        own = range(n if contexts else 0)
        self.loops = [BareLoop(model, 1, n_ctx, share) for _ in own]
        self.pool = ThreadPoolExecutor(n)
        self.engines = [lp.Engine(model, n_ctx=n_ctx, n_seq_max=1, n_threads=share) for _ in own]

    def bare_alone(self) -> float:
        """One request."""
        return self.one.run(self.prompts[:1], self.n_generate)[0]

    def engine_alone(self) -> float:
        """One request."""
        return timed(lambda: self.engine.generate(self.prompts[0], self.params))

    def bare_one_by_one(self) -> float:
        """All requests, one after another."""
        return sum(self.one.run([p], self.n_generate)[0] for p in self.prompts)

    def engine_one_by_one(self) -> float:
        """All requests, one after another, on an engine with one sequence."""
        return timed(lambda: [self.blocking.generate(p, self.params) for p in self.prompts])

    def bare_at_once(self) -> float:
        """All requests together."""
        return self.many.run(self.prompts, self.n_generate)[0]

    def engine_at_once(self) -> float:
        """All requests together."""
        return timed(lambda: self.engine.generate(self.prompts, self.params))

    def bare_contexts(self) -> float:
        """A context and a thread for each request."""
        return self._in_threads(
            BareLoop.run, self.loops, ([p] for p in self.prompts), repeat(self.n_generate)
        )

    def engine_contexts(self) -> float:
        """An engine and a thread for each request."""
        return self._in_threads(lp.Engine.generate, self.engines, self.prompts, repeat(self.params))

    def engine_shared(self) -> float:
        """A thread for each request, all on one engine."""
        return self._in_threads(self.engine.generate, self.prompts, repeat(self.params))

    def _in_threads(self, task: Callable[..., object], *arguments: Iterable[Any]) -> float:
        return timed(lambda: list(self.pool.map(task, *arguments)))

    def close(self) -> None:
        """Frees the native memory."""
        self.pool.shutdown()
        parts: list[BareLoop | lp.Engine] = [self.one, self.many, self.blocking, self.engine]
        for part in (*parts, *self.loops, *self.engines):
            part.close()


def timed(task: Callable[[], object]) -> float:
    """Seconds that ``task`` takes."""
    started = perf_counter()
    task()
    return perf_counter() - started


def measure(
    path: Path, n: int, n_prompt: int, n_generate: int, repeats: int, contexts: bool
) -> dict[str, list[float]]:
    """Seconds of each way in each round. One request alone is timed in more rounds: it is short."""
    alone = ["bare_alone", "engine_alone"]
    several = ["bare_one_by_one", "engine_one_by_one", "bare_at_once", "engine_at_once"]
    if contexts:
        several += ["bare_contexts", "engine_contexts", "engine_shared"]
    seconds: dict[str, list[float]] = {name: [] for name in alone + several}
    with lp.Model(path) as model:
        ways = Ways(model, n, n_prompt, n_generate, contexts)
        for names, rounds in ((alone, _ROUNDS_ALONE * repeats), (several, repeats)):
            for i in range(rounds + 1):
                for name in names if i % 2 else names[::-1]:
                    sleep(_SETTLE_S)
                    took = getattr(ways, name)()
                    if i:  # the first round warms up
                        seconds[name].append(took)
                if i % repeats == 0:
                    print(f"{path.name}, {names[0]} …: round {i} of {rounds}", file=sys.stderr, flush=True)
        ways.close()
    return seconds


def report(name: str, rounds: dict[str, list[float]], n: int, n_generate: int) -> dict[str, float]:
    """Prints a model's figures. Returns the ratios: medians over the rounds."""

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(rounds[a], rounds[b], strict=True))

    bare, engine = ratio("bare_one_by_one", "bare_at_once"), ratio("engine_one_by_one", "engine_at_once")
    ratios = {
        "one request alone, engine / bare": ratio("engine_alone", "bare_alone"),
        "gain of bare batching": bare,
        "gain of the engine": engine,
        "gain of the engine / gain of bare batching": engine / bare,
        "all at once, engine / bare": ratio("engine_at_once", "bare_at_once"),
    }
    if "bare_contexts" in rounds:
        bare, engine = ratio("bare_contexts", "bare_at_once"), ratio("engine_contexts", "engine_shared")
        ratios |= {
            "a shared context against one each, bare": bare,
            "a shared context against one each, engines": engine,
            "the engines' gain / the bare one": engine / bare,
        }
    print(f"\n{name}: N = {n}, {n_generate} tokens each; medians")
    for way, values in rounds.items():
        seconds = statistics.median(values)
        n_tokens = n_generate * (1 if "alone" in way else n)
        print(f"  {way.replace('_', ' '):<24}{seconds * 1e3:9.1f} ms {n_tokens / seconds:9.0f} tok/s")
    for what, value in ratios.items():
        print(f"  {what:<48}{value:6.3f}")
    return ratios


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--contexts", action="store_true", help="also a context for each request")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    results["build"] = build_info()
    for path in args.models or [lp.demo_model_path()]:
        seconds = measure(path, args.n, args.prompt, args.generate, args.repeats, args.contexts)
        ratios = report(path.name, seconds, args.n, args.generate)
        results[path.name] = {"seconds": seconds, "ratios": ratios}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
