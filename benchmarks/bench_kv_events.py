"""What KV events cost: the same prompts in two engines of one process, with and without events, in turns.

    python benchmarks/bench_kv_events.py MODEL.gguf --requests 64 --rounds 9

A subscriber in a process of its own receives the events. Rates are generated and prompt tokens per second. ``flush`` is
the processor time of the engine thread for events.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import llamapipe as lp

SUBSCRIBER = """
import sys, zmq
sub = zmq.Context().socket(zmq.SUB)
sub.connect(sys.argv[1])
sub.subscribe("")
while True:
    sub.recv_multipart()
"""


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt; half of them are shared")
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--n-seq-max", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    options = {"n_ctx": 1024, "n_seq_max": args.n_seq_max, "n_threads": args.threads}
    params = lp.SamplingParams(temperature=0, max_tokens=args.generate, ignore_eos=True, speculate="off")
    events = lp.KvEvents("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    with (
        lp.Model(args.model) as model,
        lp.Engine(model, **options) as without,
        lp.Engine(model, tuning=lp.EngineTuning(kv_events=events), **options) as with_events,
    ):
        assert with_events.kv_events is not None
        with subprocess.Popen(
            [sys.executable, "-c", SUBSCRIBER, with_events.kv_events.endpoint]
        ) as subscriber:
            spent = _timed_flush(with_events)
            rates: dict[str, list[float]] = {"without": [], "with": []}
            rng = random.Random(1)
            for i in range(args.rounds + 1):
                shared = [rng.randrange(300, model.n_vocab) for _ in range(args.prompt // 2)]
                prompts = [
                    shared + [rng.randrange(300, model.n_vocab) for _ in range(args.prompt // 2)]
                    for _ in range(args.requests)
                ]
                for name in sorted(rates, reverse=bool(i % 2)):
                    engine = with_events if name == "with" else without
                    began = time.perf_counter()
                    engine.generate(prompts, params)
                    seconds = time.perf_counter() - began
                    if i:
                        rates[name].append(args.requests * (args.prompt + args.generate) / seconds)
                    if not i:  # the first round warms up
                        spent[0] = 0.0
            subscriber.kill()
    ratio = statistics.median(a / b for a, b in zip(rates["with"], rates["without"], strict=True))
    for name, results in rates.items():
        print(
            f"{name:8} {statistics.median(results):8.0f} tokens/s ({min(results):.0f} to {max(results):.0f})"
        )
    each_us = spent[0] / (args.rounds * args.requests) * 1e6
    print(f"with events: {ratio:.3f} of the rate without; flush takes {each_us:.0f} us of a request")
    return 0


def _timed_flush(engine: lp.Engine) -> list[float]:
    """Has the engine's publisher add up the time of its flushes in the list's only entry."""
    publisher = engine._engine_thread.loop._kv_events
    assert publisher is not None
    flush, spent = publisher.flush, [0.0]

    def timed() -> None:
        began = time.thread_time()
        flush()
        spent[0] += time.thread_time() - began

    publisher.flush = timed  # type: ignore[method-assign]
    return spent


if __name__ == "__main__":
    sys.exit(main())
