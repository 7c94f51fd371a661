"""Two servers behind sglang-router against the same servers without it: streams of one client, in turns.

    python benchmarks/bench_routers.py MODEL.gguf --streams 32 --rounds 9

``direct`` sends every second request to each server. The router shares them in turn, too. Rates are generated tokens
per second from the first request to the last answer; ratios are medians of the ratios of a round's neighbours. Needs
sglang-router (the dependency group ``routers``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
from pathlib import Path

from bench_server import Round, Side, over_http
from local_server import SERVE, free_port, running

WORDS = "fox bird tree house river stone cloud small old red green quick she he found lost under over home song".split()


def measure(args: argparse.Namespace) -> dict[str, list[Round]]:
    """All rounds of both sides."""
    rounds: dict[str, list[Round]] = {"direct": [], "router": []}
    with contextlib.ExitStack() as stack:
        command = [*SERVE, "-m", args.model, "--n-seq-max", args.streams, "--n-ctx", 512]
        command += ["--n-threads", args.threads, "--alias", "local", "--no-page"]
        ports = [stack.enter_context(running(*command)).port for _ in range(2)]
        command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
        command += ["--policy", "round_robin", "--prometheus-port", free_port()]
        command += ["--log-level", "error", "--worker-urls", *(f"http://127.0.0.1:{port}" for port in ports)]
        router = stack.enter_context(running(*command)).port
        sides: dict[str, Side] = {
            "direct": over_http(ports, args.generate, "local"),
            "router": over_http(router, args.generate, "local"),
        }
        rng = random.Random(1)
        for i in range(args.rounds + 1):
            for name in sorted(sides, reverse=bool(i % 2)):
                # New prompts for each side: with the same ones the second side would find them in the prefix cache.
                prompts = [" ".join(rng.choices(WORDS, k=args.prompt)) for _ in range(args.streams)]
                result = sides[name](prompts)
                if i:  # the first round warms up
                    rounds[name].append(result)
    return rounds


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prompt", type=int, default=40, help="words of a prompt")
    parser.add_argument("--generate", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of each server")
    parser.add_argument("--json", type=Path, help="write all rounds here")
    args = parser.parse_args()
    rounds = measure(args)
    for name, results in rounds.items():
        rates = sorted(result.rate for result in results)
        first_ms = 1e3 * statistics.median(result.first_s for result in results)
        middle = statistics.median(rates)
        print(
            f"{name:7} {middle:7.0f} tokens/s ({rates[0]:.0f} to {rates[-1]:.0f})  first {first_ms:6.1f} ms"
        )
    pairs = zip(rounds["router"], rounds["direct"], strict=True)
    ratio = statistics.median(a.rate / b.rate for a, b in pairs)
    print(f"the router gives {ratio:.2f} of the rate without it")
    if args.json:
        args.json.write_text(
            json.dumps({"rounds": rounds, "ratio": ratio}, indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
