"""An editor that completes while its user types: a request with each key, which cancels the last one.

    python benchmarks/bench_infill.py MODEL.gguf [--file FILE.py] [--keys 200] [--every-ms 120] [--order psm spm]

Lines of a Python file are removed and typed again, and each key sends ``/infill`` in llama.vim's form to a server in
this process. For each order of the prompt it prints the prompt tokens that a key computed, by the timings of the first
event, and the time to that event. ``--patient`` waits for the first token before the next key, so that each key counts.
``--quality N`` removes the ends of N lines and compares what is filled in: the share of lines that are equal at
temperature 0, and the log-probability of the true tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from pathlib import Path
from typing import Any, get_args

import httpx

import llamapipe as lp
from llamapipe.llama.fim import FimOrder
from llamapipe.server import ServerSettings, serve

PACKAGE = Path(__file__).resolve().parent.parent / "llamapipe"


def body(before: list[str], line: str, after: list[str], extra: list[dict[str, str]]) -> dict[str, Any]:
    """A request of llama.vim, streamed."""
    return {
        "id_slot": 0,
        "input_prefix": "".join(before),
        "input_suffix": "".join(["\n", *after]),
        "input_extra": extra,
        "prompt": line,
        "n_predict": 64,
        "stop": [],
        "n_indent": 0,
        "top_k": 40,
        "top_p": 0.9,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "stream": True,
        "timings_per_token": True,
        "response_fields": ["timings", "truncated"],
    }


async def one_key(client: httpx.AsyncClient, request: dict[str, Any]) -> tuple[float, int]:
    """The milliseconds to the first token, and the prompt tokens that were computed for it."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    first: tuple[float, int] | None = None
    async with client.stream("POST", "/infill", json=request) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and first is None:
                first = (loop.time() - began) * 1e3, json.loads(line[6:])["timings"]["prompt_n"]
                FIRSTS.append(first)
    assert first is not None
    return first


FIRSTS: list[tuple[float, int]] = []


async def rhythm(
    url: str, lines: list[str], after: list[str], typed: str, every_s: float, extra: list[Any]
) -> list[int]:
    """Types after ``lines``. Returns the keys without a first token before the next one. 0 seconds: it waits."""
    missed: list[int] = []
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await one_key(client, {**body([], "", [], extra), "n_predict": 0})
        await one_key(client, body(lines, "", after, extra))  # the editor was opened a while ago
        FIRSTS.clear()
        task: asyncio.Task[Any] | None = None
        for i in range(1, len(typed) + 1):
            began = asyncio.get_running_loop().time()
            before, _, line = typed[:i].rpartition("\n")
            above = lines + [line + "\n" for line in before.split("\n") if before]
            n_told = len(FIRSTS)
            task = asyncio.ensure_future(one_key(client, body(above, line, after, extra)))
            while not every_s and len(FIRSTS) == n_told:
                await asyncio.sleep(0.01)
            await asyncio.sleep(every_s - (asyncio.get_running_loop().time() - began))
            if len(FIRSTS) == n_told:
                missed.append(i)
            task.cancel()
            await asyncio.wait([task])
    return missed


def quality(engine: lp.Engine, lines: list[str], n: int, order: FimOrder) -> tuple[float, float]:
    """The share of lines that are filled in as they were, and the mean log-probability of their tokens."""
    chosen = random.Random(1).sample([i for i, line in enumerate(lines) if len(line.strip()) > 12], n)
    equal, logprobs = [], []
    for i in chosen:
        line = lines[i].rstrip("\n")
        cut = len(line) - len(line.lstrip()) + 4  # the user has typed four characters
        before, after = "".join(lines[max(i - 20, 0) : i]) + line[:cut], "\n" + "".join(lines[i + 1 :][:8])
        params = lp.SamplingParams(max_tokens=48, temperature=0, stop="\n")
        equal.append(engine.infill(before, after, params, order=order).text.rstrip() == line[cut:].rstrip())
        prompt = engine.model.tokenize_fim(before, after, order=order)
        target = engine.model.tokenize(line[cut:], add_special=False)
        logprobs.append(engine.score(prompt, target).total / len(target))
    return statistics.mean(equal), statistics.mean(logprobs)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--file", type=Path, default=PACKAGE / "params.py")
    parser.add_argument("--at", type=int, default=150, help="the first line that is typed")
    parser.add_argument("--keys", type=int, default=200)
    parser.add_argument("--prefix-lines", type=int, default=256, help="default: llama.vim's")
    parser.add_argument("--suffix-lines", type=int, default=64, help="default: llama.vim's")
    parser.add_argument("--patient", action="store_true", help="wait for the first token before the next key")
    parser.add_argument("--every-ms", type=float, default=120)
    parser.add_argument("--n-ctx", type=int, default=4096)
    parser.add_argument("--order", nargs="+", choices=get_args(FimOrder), default=list(get_args(FimOrder)))
    parser.add_argument("--quality", type=int, default=0)
    args = parser.parse_args()
    lines = args.file.read_text(encoding="utf-8").splitlines(keepends=True)
    extra = [{"filename": "errors.py", "text": (PACKAGE / "errors.py").read_text(encoding="utf-8")}]
    with lp.Model(args.model) as model:
        for order in args.order:
            with (
                lp.Engine(model, n_ctx=args.n_ctx, n_seq_max=4) as engine,
                serve(engine, settings=ServerSettings(fim_order=order)) as server,
            ):
                after = lines[args.at + 8 :][: args.suffix_lines]
                n_suffix = len(model.tokenize_fim("", "".join(["\n", *after])))
                typed = "".join(lines[args.at :])[: args.keys]
                every_s = 0.0 if args.patient else args.every_ms / 1e3
                missed = asyncio.run(
                    rhythm(
                        server.url,
                        lines[max(args.at - args.prefix_lines, 0) : args.at],
                        after,
                        typed,
                        every_s,
                        extra,
                    )
                )
                print(f"{order}: {len(typed)} keys, {len(missed)} without a first token before the next one")
                if FIRSTS:
                    times, counts = zip(*FIRSTS, strict=True)
                    n_over = sum(n > (15 if order == "spm" else 15 + n_suffix) for n in counts)
                    most = 15 if order == "spm" else 15 + n_suffix
                    print(
                        f"{order}: prompt tokens computed per key: median {statistics.median(counts):.0f}, p95 "
                        f"{quantile(counts, 0.95):.0f}, most {max(counts)}, over {most}: {n_over}; "
                        f"first token: median {statistics.median(times):.0f} ms, p95 {quantile(times, 0.95):.0f} ms "
                        f"(the suffix has {n_suffix} tokens)"
                    )
                if args.quality:
                    equal, logprob = quality(engine, lines, args.quality, order)
                    print(f"{order}: {equal:.0%} of {args.quality} lines equal, {logprob:.3f} a token")
                stats = engine.stats()
                print(f"{order}: {stats.compute_s / stats.steps * 1e3:.0f} ms a step, mean of {stats.steps}")


def quantile(values: Any, share: float) -> float:
    """The smallest value that at least this share of all does not exceed."""
    return float(sorted(values)[min(int(share * len(values)), len(values) - 1)])


if __name__ == "__main__":
    main()
