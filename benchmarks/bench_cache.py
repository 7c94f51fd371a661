"""What the parts of the prefix cache cost: lookups, forks, preemption, and a long trace of requests.

    python benchmarks/bench_cache.py 15m.gguf

Each figure is the median of several runs in this process.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path[0:0] = [str(Path(__file__).resolve().parent.parent)]

import llamapipe as lp  # noqa: E402
from llamapipe._engine.policy.core import Request, RequestSpec  # noqa: E402
from llamapipe._engine.policy.kv import KvCache  # noqa: E402
from llamapipe._engine.policy.prefix_tree import PrefixTree  # noqa: E402
from llamapipe._engine.policy.scheduler import Scheduler  # noqa: E402


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--requests", type=int, default=100_000, help="of the trace")
    args = parser.parse_args()
    lookups()
    trace(args.requests)
    with lp.Model(args.model) as model:
        for unified in (False, True):
            forks(model, unified, args.rounds)
        preemption(model, args.rounds)


def lookups(n_tokens: int = 600) -> None:
    """The tree with more and more sequences, a tenth of which share their first half with another one."""
    rng = random.Random(1)
    tree: PrefixTree[int] = PrefixTree()
    sequences: list[list[int]] = []
    print(f"prefix tree, sequences of {n_tokens} tokens, microseconds")
    for n in (100, 1_000, 10_000):
        insert_s = []
        while len(sequences) < n:
            sequence = [rng.randrange(32_000) for _ in range(n_tokens)]
            if sequences and rng.random() < 0.1:
                sequence[: n_tokens // 2] = rng.choice(sequences)[: n_tokens // 2]
            insert_s.append(timed(partial(tree.insert, len(sequences), sequence)))
            sequences.append(sequence)
        find_s = []
        for sequence in rng.choices(sequences, k=1000):
            prompt = [*sequence[: rng.randrange(1, n_tokens)], 1, 2, 3]
            find_s.append(timed(partial(first_found, tree, prompt)))
        print(f"  {n:6d}: lookup {us(find_s)}, insert {us(insert_s)}")


def first_found(tree: PrefixTree[int], prompt: list[int]) -> object:
    """A sequence that shares the most tokens."""
    return next(tree.find(prompt, len(prompt) - 1))


def trace(n_requests: int, n_slots: int = 16, n_cells: int = 8_192) -> None:
    """Requests that share some of 500 prefixes, through the scheduler alone; a step takes one unit of virtual time."""
    rng = random.Random(2)
    prefixes = [[rng.randrange(32_000) for _ in range(rng.randrange(20, 400))] for _ in range(500)]
    cache = KvCache(n_slots, host_bytes=2**28, cell_bytes=8192, min_prefix=16, max_parked=512)
    scheduler = Scheduler(cache, 1024, n_cells, 2048, 512)
    n_added, costs, n_prompt, n_hit = 0, list[float](), 0, 0
    print(f"{n_requests} requests in virtual time, microseconds a step (planning and recording)")
    n_reports = 5
    while n_added < n_requests or scheduler.has_work:
        while n_added < n_requests and scheduler.n_queued < 64:
            own = [rng.randrange(32_000) for _ in range(rng.randrange(5, 100))]
            spec = RequestSpec(rng.randrange(1, 60), priority=rng.choice((0, 0, 0, 1)))
            request = Request(rng.choice(prefixes) + own, spec)
            scheduler.add(request)
            n_prompt += len(request.tokens)
            n_added += 1
            if n_added % (n_requests // n_reports) == 0:
                print(f"  after {n_added:7d}: {us(costs)}")
                costs.clear()
        begin = time.perf_counter()
        plan = scheduler.plan()
        if plan is None:
            break
        scheduler.commit(plan, [rng.randrange(32_000) for _ in plan.requests])
        scheduler.cache.take_memory_ops()
        scheduler.take_dequeued()
        costs.append(time.perf_counter() - begin)
        if rng.random() < 0.01 and scheduler.n_active:
            scheduler.cancel(rng.choice(scheduler.live()))
    scheduler.check_integrity()
    n_hit = cache.n_hit_tokens
    print(f"  {n_hit} of {n_prompt} prompt tokens were cached; {scheduler.n_preempted} preemptions")


def forks(model: lp.Model, unified: bool, n_rounds: int, n_tokens: int = 1000) -> None:
    """The first token of a fork, beyond what the next token of its parent takes."""
    rng = random.Random(3)
    params = lp.SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, speculate="off")
    fork_s, next_s = [], []
    with lp.Engine(model, n_ctx=2048, n_seq_max=4, tuning=lp.EngineTuning(kv_unified=unified)) as engine:
        prompt = [rng.randrange(300, 30_000) for _ in range(n_tokens)]
        with engine.start(prompt, params) as parent:
            parent.next()
            next_s += [timed(parent.next) for _ in range(n_rounds)]
            for _ in range(n_rounds):
                parent.next()  # so that the last fork has fewer of its cells than the parent
                parent.next()
                begin = time.perf_counter()
                with parent.fork() as child:
                    child.next()
                    fork_s.append(time.perf_counter() - begin)
                engine.stats()  # the fork has ended
    more_ms = (statistics.median(fork_s) - statistics.median(next_s)) * 1e3
    kind = "unified KV" if unified else "per-sequence KV"
    print(f"fork of {n_tokens} tokens, {kind}: {more_ms:.2f} ms more than a next token")


def preemption(model: lp.Model, n_rounds: int, n_tokens: int = 1000) -> None:
    """Saving and loading a sequence, and computing it again."""
    rng = random.Random(4)
    params = lp.SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, speculate="off")
    extra_ms = {}
    for enabled in (True, False):
        resume_s, next_s = [], []
        with lp.Engine(model, n_ctx=2048, n_seq_max=1, prefix_cache=enabled) as engine:
            thread = engine._engine_thread
            scheduler = thread.loop._scheduler
            prompt = [rng.randrange(300, 30_000) for _ in range(n_tokens)]
            with engine.start(prompt, params) as generation:
                generation.next()
                for _ in range(n_rounds if enabled else 5):
                    next_s.append(timed(generation.next))
                    begin = time.perf_counter()
                    thread.ask(partial(scheduler.preempt, generation._request))
                    generation.next()
                    resume_s.append(time.perf_counter() - begin)
        extra_ms[enabled] = (statistics.median(resume_s) - statistics.median(next_s)) * 1e3
    print(
        f"preempt and resume {n_tokens} tokens: {extra_ms[True]:.2f} ms more than a next token, computed again "
        f"{extra_ms[False]:.1f} ms, {extra_ms[False] / extra_ms[True]:.0f} times as much"
    )


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def us(seconds: list[float]) -> str:
    """The median and the 99th percentile in microseconds."""
    ordered = sorted(seconds)
    return f"{statistics.median(ordered) * 1e6:.1f} (p99 {ordered[int(0.99 * len(ordered))] * 1e6:.0f})"


if __name__ == "__main__":
    main()
