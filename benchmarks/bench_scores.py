"""Scoring and sampling against llama-cpp-python and llama.cpp's own sampler, in one run, in turns.

    python benchmarks/bench_scores.py choices MODEL.gguf --peer PYTHON    100 questions, four choices, 200 tokens
    python benchmarks/bench_scores.py tokens MODEL.gguf --peer PYTHON     every token of a text of 512
    python benchmarks/bench_scores.py candidates MODEL.gguf               top_k 40 against llama_sampler_sample

PYTHON is the interpreter of an environment that has llama-cpp-python. Each side is a process of its own, which loads
the model once and then works when told to; memory is the most that process ever held (VmHWM), the model included.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

N_QUESTIONS, N_CONTEXT, N_CHOICES, N_CHOICE = 100, 200, 4, 4
N_TOKENS = 512
N_THREADS = 2


def tokens_of(n: int, seed: int) -> list[int]:
    """The same tokens in every process."""
    rng = random.Random(seed)
    return [rng.randrange(300, 30_000) for _ in range(n)]


def questions() -> list[tuple[list[int], list[list[int]]]]:
    """Contexts with their choices."""
    return [
        (tokens_of(N_CONTEXT, q), [tokens_of(N_CHOICE, 1000 * q + c) for c in range(1, N_CHOICES + 1)])
        for q in range(N_QUESTIONS)
    ]


# ---- workers: one line in, one line of JSON out
def peer_worker(workload: str, path: str, reuse: bool) -> Callable[[], list[float]]:
    """llama-cpp-python with ``logits_all``; ``reuse`` keeps a context's cells for its next choice."""
    import numpy as np
    from llama_cpp import Llama

    n_ctx = 512 if workload == "tokens" else 256
    llama = Llama(
        path,
        n_ctx=n_ctx,
        n_batch=512,
        n_threads=N_THREADS,
        n_threads_batch=N_THREADS,
        logits_all=True,
        verbose=False,
    )

    def logprobs(first: int, tokens: list[int]) -> float:
        rows = llama.scores[first - 1 : first - 1 + len(tokens)]
        rows = Llama.logits_to_logprobs(rows)
        return float(np.take_along_axis(rows, np.array(tokens)[:, None], 1).sum())

    def run() -> list[float]:
        if workload == "tokens":
            tokens = tokens_of(N_TOKENS, 1)
            llama.reset()
            llama.eval(tokens)
            return [logprobs(1, tokens[1:])]
        totals = []
        for context, choices in questions():
            for i, choice in enumerate(choices):
                if reuse and i:
                    llama.n_tokens = len(context)  # eval removes the cells after these
                    llama.eval(choice)
                else:
                    llama.reset()
                    llama.eval([*context, *choice])
                totals.append(logprobs(len(context), choice))
        return totals

    return run


def own_worker(workload: str, path: str) -> Callable[[], list[float]]:
    """An engine."""
    import llamapipe as lp

    n_ctx = 512 if workload == "tokens" else 256
    engine = lp.Engine(
        lp.Model(path), n_ctx=n_ctx, n_seq_max=1 if workload == "tokens" else 8, n_threads=N_THREADS
    )

    def run() -> list[float]:
        if workload == "tokens":
            return [engine.score_tokens(tokens_of(N_TOKENS, 1)).total]
        asked = questions()
        scores = engine.score([context for context, _ in asked], [choices for _, choices in asked])
        return [score.total for four in scores for score in four]

    return run


def work(arguments: argparse.Namespace) -> None:
    """The loop of a worker process."""
    if arguments.worker == "own":
        run = own_worker(arguments.workload, arguments.model)
    else:
        run = peer_worker(arguments.workload, arguments.model, arguments.worker == "reuse")
    print("ready", flush=True)
    for _ in sys.stdin:
        started = perf_counter()
        totals = run()
        seconds = perf_counter() - started
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        print(json.dumps({"seconds": seconds, "peak_mib": peak / 1024, "totals": totals}), flush=True)


# ---- the comparison
class Worker:
    """A worker process; it runs on command and answers with its figures."""

    def __init__(self, python: str, kind: str, arguments: argparse.Namespace) -> None:
        command = [python, __file__, arguments.workload, arguments.model, "--worker", kind]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != "ready":
            raise SystemExit(f"the worker {kind!r} of {python} did not start")

    def run(self) -> dict[str, Any]:
        """One run: seconds, peak memory, and results."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print("go", file=self.process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(arguments: argparse.Namespace) -> None:
    """Runs both sides in turns and prints medians and ratios."""
    kinds = {"own": sys.executable, "plain": arguments.peer}
    if arguments.workload == "choices":
        kinds["reuse"] = arguments.peer
    workers = {kind: Worker(python, kind, arguments) for kind, python in kinds.items()}
    answers: dict[str, list[dict[str, Any]]] = {kind: [] for kind in workers}
    for _ in range(arguments.repeats):
        for kind, worker in workers.items():
            answers[kind].append(worker.run())
    for worker in workers.values():
        worker.close()
    own = answers.pop("own")
    seconds = statistics.median(a["seconds"] for a in own)
    print(f"llamapipe: {seconds * 1e3:.1f} ms, peak {own[-1]['peak_mib']:.0f} MiB")
    for kind, theirs in answers.items():
        ratios = [t["seconds"] / o["seconds"] for t, o in zip(theirs, own, strict=True)]
        worst = max(abs(t - o) for t, o in zip(theirs[-1]["totals"], own[-1]["totals"], strict=True))
        print(
            f"llama-cpp-python ({kind}): {statistics.median(t['seconds'] for t in theirs) * 1e3:.1f} ms, "
            f"peak {theirs[-1]['peak_mib']:.0f} MiB; takes {statistics.median(ratios):.2f} times as long "
            f"({min(ratios):.2f} to {max(ratios):.2f}), "
            f"memory {theirs[-1]['peak_mib'] / own[-1]['peak_mib']:.2f} times; totals differ by {worst:.3f} at most"
        )


def candidates(arguments: argparse.Namespace) -> None:
    """Samples from one row with top_k 40 and a temperature: llamapipe and ``llama_sampler_sample`` in turns."""
    import llamapipe as lp
    from llamapipe.llama import Context, DecodeBatch, SamplerChain
    from llamapipe.llama.sampling_options import SamplingOptions

    order = ("top_k", "temperature")
    from llamapipe.native.load import LIB_DIR

    model = lp.Model(arguments.model)
    context = Context(model, n_ctx=256, n_threads=N_THREADS)
    context.decode(DecodeBatch.of_tokens(tokens_of(20, 1) if model.n_vocab > 30_000 else [5, 6, 7]))
    native = model.vocab._native
    ffi = native.ffi
    last = 19 if model.n_vocab > 30_000 else 2
    row = ffi.from_buffer("float[]", context.logits(last).copy())
    chain = SamplerChain(model.vocab, 1, SamplingOptions(order, top_k=40, temperature=0.8))
    token = ffi.new("int32_t *")

    path, *_ = LIB_DIR.glob("libllamapipe-llama.*")
    lib = ctypes.CDLL(str(path))
    pointer = ctypes.c_void_p

    class Params(ctypes.Structure):
        _fields_ = (("no_perf", ctypes.c_bool),)

    for name, takes in (
        ("chain_init", (Params,)),
        ("init_top_k", (ctypes.c_int32,)),
        ("init_temp", (ctypes.c_float,)),
        ("init_dist", (ctypes.c_uint32,)),
    ):
        function = getattr(lib, f"llama_sampler_{name}")
        function.argtypes, function.restype = takes, pointer
    lib.llama_sampler_chain_add.argtypes = (pointer, pointer)
    lib.llama_sampler_sample.argtypes = (pointer, pointer, ctypes.c_int32)
    theirs = lib.llama_sampler_chain_init(Params(True))
    for stage in (
        lib.llama_sampler_init_top_k(40),
        lib.llama_sampler_init_temp(0.8),
        lib.llama_sampler_init_dist(1),
    ):
        lib.llama_sampler_chain_add(theirs, stage)
    handle = int(ffi.cast("uintptr_t", context.llama))

    def own() -> None:
        native.lib.lp_sampler_draw(chain.handle, row, token)

    def peer() -> None:
        lib.llama_sampler_sample(theirs, handle, last)

    def microseconds(call: Callable[[], None]) -> float:
        started = perf_counter()
        for _ in range(200):
            call()
        return (perf_counter() - started) / 200 * 1e6

    pairs = [(microseconds(own), microseconds(peer)) for _ in range(arguments.repeats)]
    ratios = [p / o for o, p in pairs]
    print(
        f"{model.n_vocab} tokens: llamapipe {statistics.median(o for o, _ in pairs):.1f} us, llama_sampler_sample "
        f"{statistics.median(p for _, p in pairs):.1f} us a row; {statistics.median(ratios):.1f} times "
        f"({min(ratios):.1f} to {max(ratios):.1f})"
    )
    whole = SamplerChain(model.vocab, 1, SamplingOptions(("top_p",), top_p=0.95))
    nucleus = statistics.median(
        microseconds(lambda: native.lib.lp_sampler_draw(whole.handle, row, token) and None) for _ in range(3)
    )
    noted = SamplerChain(model.vocab, 1, SamplingOptions(order, top_k=40, temperature=0.8, n_logprobs=5))
    logprobs = statistics.median(
        microseconds(lambda: native.lib.lp_sampler_draw(noted.handle, row, token) and None) for _ in range(3)
    )
    print(f"top_p 0.95 without top_k: {nucleus:.1f} us; top_k 40 with logprobs=5: {logprobs:.1f} us")
    if math.isnan(nucleus):
        raise SystemExit("nothing was measured")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=("choices", "tokens", "candidates"))
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument(
        "--peer", metavar="PYTHON", help="interpreter of an environment with llama-cpp-python"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--worker", choices=("own", "plain", "reuse"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
    elif arguments.workload == "candidates":
        candidates(arguments)
    elif arguments.peer is None:
        parser.error("--peer is needed: an interpreter of an environment with llama-cpp-python")
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
