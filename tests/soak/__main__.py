"""Runs mixed traffic for hours and fails if the process grows.

    python tests/soak --hours 2 [--csv FILE]
    python tests/soak --minutes 10 --leak 100     # must fail: 100 bytes of each request are never freed
    python tests/soak --minutes 5 --only stream --clients 0     # where does a leak come from?

Rounds of traffic (threads, coroutines, HTTP clients) end with a quiet moment: all requests have ended, and memory,
descriptors, threads and owners of native memory are counted. The first quarter of the rounds, 5 at least, is the
warm-up: caches fill. After it, memory may grow by 1 MB an hour at most, beyond a 95 % interval, and nothing else may.
The types whose objects have grown most since the warm-up are printed: look for a leak there.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import ctypes
import faulthandler
import logging
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

sys.path[0:0] = [str(Path(__file__).resolve().parents[1])]

from support.adapters import make_adapter  # noqa: E402
from support.control import wait_until  # noqa: E402

import llamapipe as lp  # noqa: E402
from llamapipe.server import ServerSettings, serve  # noqa: E402
from soak.http_clients import Clients  # noqa: E402
from soak.levels import Level, level, slope, types  # noqa: E402
from soak.traffic import TEMPLATE, Traffic, bert  # noqa: E402

# What may grow without doubt (the lower end of the interval): by this much an hour, or by this much in all.
_LIMITS = {
    "rss_mb": (1.0, 0.0),
    "malloc_mb": (1.0, 0.0),
    "n_python_blocks": (0.0, 2000.0),
    "n_objects": (0.0, 500.0),
    "n_owners": (0.0, 8.0),
    "n_descriptors": (0.0, 1.5),
    "n_threads": (0.0, 1.5),
}
_N_THREADS = 3
_HANG_S = 120.0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--round", type=float, default=15.0, help="seconds of traffic between quiet moments")
    parser.add_argument("--clients", type=int, default=8, help="HTTP clients")
    parser.add_argument("--idle", type=int, default=8, help="connections that stay open without a request")
    parser.add_argument("--only", default="", help="only calls whose names contain this text; `-` for none")
    parser.add_argument("--leak", type=int, default=0, help="bytes to leak with each request")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--csv", type=Path, help="writes the samples to this file")
    args = parser.parse_args()
    seconds = args.hours * 3600 + args.minutes * 60
    if not seconds >= 20 * args.round:
        parser.error(f"{seconds:.0f} s are fewer than 20 rounds of {args.round:.0f} s")
    logging.disable(logging.CRITICAL)  # thousands of requests are broken on purpose
    levels = run(args, seconds)
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Level)])
            writer.writeheader()
            writer.writerows(asdict(level) for level in levels)
    return judge(levels)


def run(args: argparse.Namespace, seconds: float) -> list[Level]:
    """Rounds of traffic, and the levels after each."""
    levels: list[Level] = []
    # Connections stay open without a request for a round, which may take longer than it should.
    settings = ServerSettings(max_requests=1024, head_timeout_s=args.round + _HANG_S)
    with (
        tempfile.TemporaryDirectory() as folder,
        lp.Model(lp.demo_model_path(), chat_template=TEMPLATE) as model,
        lp.Engine(model, n_ctx=256, n_seq_max=8, cache_bytes=4_000_000) as engine,
        lp.Engine(model, n_ctx=256, n_seq_max=4, n_cells=256, cache_bytes=1_000_000) as small,
        lp.Embedder(bert(Path(folder)), n_seq_max=4) as embedder,
        serve(engine, settings=settings) as server,
        ThreadPoolExecutor(_N_THREADS + 2) as pool,
    ):
        adapter = make_adapter(Path(folder) / "adapter.gguf", lp.demo_model_path())
        traffic = Traffic(engine, small, embedder, model, adapter)
        warm: Counter[str] = Counter()
        began = time.monotonic()
        n_round = 0
        n_http = 0
        while (now := time.monotonic()) - began < seconds:
            faulthandler.dump_traceback_later(args.round + _HANG_S, exit=True)
            n_round += 1
            end = now + args.round
            clients = Clients(server.port, end, engine.n_ctx)
            seed = args.seed * 1_000_003 + n_round * 101
            jobs = [pool.submit(traffic.run, seed + i, end, args.only) for i in range(_N_THREADS)]
            jobs.append(pool.submit(asyncio.run, traffic.arun(seed + 50, end, args.only)))
            jobs.append(pool.submit(asyncio.run, clients.run(args.clients, args.idle, seed + 51)))
            for job in jobs:
                job.result()
            assert not clients.unexpected(), clients.counts
            n_http += clients.counts.total()
            _wait_until_quiet(engine, small)
            n = traffic.counts.total() + n_http
            if args.leak:
                _leak(args.leak, n - (levels[-1].n_requests if levels else 0))
            levels.append(level((time.monotonic() - began) / 3600, n))
            if not warm and time.monotonic() - began > seconds / 4:
                warm = types()
            sys.stdout.write(f"{levels[-1]}\n")
            sys.stdout.flush()
        faulthandler.cancel_dump_traceback_later()
        for name, n in sorted(traffic.counts.items()):
            sys.stdout.write(f"{name:40} {n:9}\n")
        for name, n in (types() - warm).most_common(10):
            sys.stdout.write(f"{name:60} {warm[name]:9} {n:+9}\n")
        traffic.close()
    return levels


def _is_quiet(engine: lp.Engine) -> bool:
    stats = engine.stats()
    return not stats.n_active and not stats.n_queued


def _wait_until_quiet(*engines: lp.Engine) -> None:
    """Requests that were left or cancelled end within a step."""
    for engine in engines:
        wait_until(partial(_is_quiet, engine))
        engine.check_integrity()


def _leak(n_bytes: int, n_times: int) -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    for _ in range(n_times):
        ctypes.memset(libc.malloc(n_bytes), 1, n_bytes)


def judge(levels: list[Level]) -> int:
    """Prints how everything grew; 1 if something grew too much."""
    warm = max(len(levels) // 4, 5)
    rest = levels[warm:]
    hours = [level.hours for level in rest]
    duration = hours[-1] - hours[0]
    n_requests = rest[-1].n_requests - rest[0].n_requests
    sys.stdout.write(
        f"{levels[-1].hours:.2f} hours, {levels[-1].n_requests} requests; without the warm-up: "
        f"{duration:.2f} hours, {n_requests} requests\n"
    )
    failures = []
    for name, (per_hour, at_all) in _LIMITS.items():
        values = [float(getattr(level, name)) for level in rest]
        growth = slope(hours, values)
        line = f"{name:15} {values[0]:10.1f} to {values[-1]:10.1f}: {growth}"
        if name.endswith("_mb"):
            line += f", {growth.per_hour * 1e6 * duration / n_requests:+.1f} bytes a request"
        sys.stdout.write(f"{line}\n")
        if growth.is_above(max(per_hour, at_all / duration)):
            failures.append(name)
    sys.stdout.write(f"{', '.join(failures)}: grew too much\n" if failures else "nothing grew\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
