"""Compares the engine with bare native loops, all in one run and in turns; prints medians and ratios.

    python tools/bench_engine.py [MODEL.gguf ...] [--n 8] [--prompt 64] [--generate 64] [--repeats 7] [--json FILE]

For each model: one request alone (bare loop against engine), and N requests, one by one and at once (bare loops against
engine). The bare loop decodes and samples through the same native entries, without scheduler, threads or text. Greedy,
end of generation ignored, no prefix is shared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import llamapipe as lp
from llamapipe.llama import Context, SamplerChain
from llamapipe.native.load import build_info

_SETTLE_S = 0.05  # libgomp's threads go on spinning for about 15 ms after their last work


class BareLoop:
    """``n`` sequences from prompt to last token in lockstep, straight on the native entries."""

    def __init__(self, model: lp.Model, n: int, n_ctx: int) -> None:
        self.n = n
        self.context = Context(model, n_ctx=n_ctx, n_seq_max=n, n_outputs_max=n)
        self.module = model.vocab._native
        new = self.module.ffi.new
        size = self.context.n_batch
        self.arrays = [
            new("int32_t[]", size),
            new("int32_t[]", size),
            new("int32_t[]", size),
            new("int8_t[]", size),
        ]
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


class Ways:
    """The ways to be timed of one process; each gives its seconds."""

    def __init__(self, kind: str, path: Path, n: int, n_prompt: int, n_generate: int) -> None:
        self.model = lp.Model(path)
        n_ctx = n_prompt + n_generate + 8
        n_vocab = self.model.n_vocab
        self.n_generate = n_generate
        self.prompts = [[(7 * i + 3 * j) % (n_vocab - 300) + 290 for j in range(n_prompt)] for i in range(n)]
        self.params = lp.SamplingParams(temperature=0, max_tokens=n_generate, ignore_eos=True)
        if kind == "bare":
            self.one, self.many = BareLoop(self.model, 1, n_ctx), BareLoop(self.model, n, n_ctx)
        else:
            self.engine = lp.Engine(self.model, n_ctx=n_ctx, n_seq_max=1 if kind == "blocking" else n)
        self.kind = kind

    def alone(self) -> float:
        """One request."""
        if self.kind == "bare":
            return self.one.run(self.prompts[:1], self.n_generate)[0]
        return timed(lambda: self.engine.generate(self.prompts[0], self.params))

    def one_by_one(self) -> float:
        """All requests, one after another."""
        if self.kind == "bare":
            return sum(self.one.run([p], self.n_generate)[0] for p in self.prompts)
        return timed(lambda: [self.engine.generate(p, self.params) for p in self.prompts])

    def at_once(self) -> float:
        """All requests together."""
        if self.kind == "bare":
            return self.many.run(self.prompts, self.n_generate)[0]
        return timed(lambda: self.engine.generate(self.prompts, self.params))

    def decode_alone(self) -> float:
        """Only the steps after the first token, of one request."""
        return self.one.run(self.prompts[:1], self.n_generate)[1]

    def decode_at_once(self) -> float:
        """Only the steps after the first token, of all requests."""
        return self.many.run(self.prompts, self.n_generate)[1]

    def close(self) -> None:
        """Frees the native memory."""
        if self.kind == "bare":
            self.one.close()
            self.many.close()
        else:
            self.engine.close()
        self.model.close()


def work(connection: Connection, kind: str, path: Path, n: int, n_prompt: int, n_generate: int) -> None:
    """A process that times what it is asked for, until it is asked for nothing."""
    ways = Ways(kind, path, n, n_prompt, n_generate)
    while name := connection.recv():
        connection.send(getattr(ways, name)())
    ways.close()


def timed(task: Callable[[], object]) -> float:
    """Seconds that ``task`` takes."""
    started = perf_counter()
    task()
    return perf_counter() - started


WAYS = {
    "bare, 1 alone": ("bare", "alone"),
    "engine, 1 alone": ("engine", "alone"),
    "bare, one by one": ("bare", "one_by_one"),
    "blocking engine, one by one": ("blocking", "one_by_one"),
    "bare, at once": ("bare", "at_once"),
    "engine, at once": ("engine", "at_once"),
    "bare decode, 1": ("bare", "decode_alone"),
    "bare decode, N": ("bare", "decode_at_once"),
}


def measure(path: Path, n: int, n_prompt: int, n_generate: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each way in each round.

    A process each for the bare loops, the blocking engine and the engine: libgomp keeps a team of threads for every
    thread that computes, and makes all of them sleep at barriers once there are more than cores.
    """
    spawn = multiprocessing.get_context("spawn")
    workers = {}
    for kind in ("bare", "blocking", "engine"):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=work, args=(theirs, kind, path, n, n_prompt, n_generate), daemon=True)
        process.start()
        theirs.close()  # so that a process that died is noticed
        workers[kind] = (ours, process)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for repeat in range(repeats + 1):
        for name, (kind, method) in WAYS.items():
            connection = workers[kind][0]
            sleep(_SETTLE_S)
            connection.send(method)
            took = connection.recv()
            if repeat:  # the first round warms up
                seconds[name].append(took)
    for connection, process in workers.values():
        connection.send("")
        process.join()
    return seconds


def report(name: str, rounds: dict[str, list[float]], n: int, n_generate: int) -> dict[str, float]:
    """Prints a model's figures; returns the ratios, of medians except where a pair is compared round by round."""
    s = {way: statistics.median(values) for way, values in rounds.items()}
    pairs = zip(rounds["engine, 1 alone"], rounds["bare, 1 alone"], strict=True)
    ratios = {
        "one request alone, engine / bare": statistics.median(engine / bare for engine, bare in pairs),
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        seconds = measure(path, args.n, args.prompt, args.generate, args.repeats)
        ratios = report(path.name, seconds, args.n, args.generate)
        results[path.name] = {"seconds": seconds, "ratios": ratios}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
