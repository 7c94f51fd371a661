"""Runs a real engine under varying load and records what each step computed and how long it took.

A step's time is measured from the end of the previous step, so it includes planning, sampling and delivery. Steps after
a pause are left out. In a served run, requests arrive as in a simulation, so that the two can be compared.
"""

from __future__ import annotations

import json
import math
import random
import threading
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import llamapipe as lp
from llamapipe._engine.policy.core import BatchPlan, MemoryOp
from simulate.cost import Load, Pass, load_of
from simulate.node import NodeOptions, count_copies
from simulate.workload import WORKLOADS, Conversation, Workload, arrivals, scaled

STREAMS = "streams"  # traffic besides the workloads: prompts of random lengths that share nothing
FITTED = (STREAMS, "conversation", "chat")  # traffic of the runs with even seeds, which are fitted
HELD_OUT = ("agents", "coding", STREAMS)  # traffic of the runs with odd seeds
_N_PHASES = 4  # of a run, each with a different number of callers


@dataclass
class Run:
    """The steps of one run, and the latencies that its callers saw, in seconds.

    ``traffic``: a workload's name, or STREAMS. Runs with the same ``traffic`` and ``seed`` repeat each other.
    """

    traffic: str
    seed: int
    loads: list[Load] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        """Tokens that callers received."""
        return len(self.first_s) + len(self.gaps_s)


@dataclass
class Recording:
    """Runs of one engine."""

    model: str
    options: NodeOptions
    runs: list[Run] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Writes JSON."""
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Reads what ``save`` wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        runs = [Run(**{**run, "loads": [_load(*load) for load in run["loads"]]}) for run in fields["runs"]]
        return cls(fields["model"], NodeOptions(**fields["options"]), runs)


def _load(repeats: bool, passes: list[list[int]], *counts: int) -> Load:
    return Load(repeats, tuple(Pass(*p) for p in passes), *counts)


class _Observer:
    """Records each step when it ends, on the engine thread."""

    def __init__(self, engine: lp.Engine, n_ubatch: int) -> None:
        self._n_ubatch = n_ubatch
        self._loop = engine._engine_thread.loop
        self._last_s = self._idle_s = 0.0
        self._load = Load(False, (), 0, 0)
        self._n_copies = self._n_copied = 0
        self._loads: list[Load] = []
        self._seconds: list[float] = []
        scheduler = self._loop._scheduler
        self._observe, self._take_memory_ops = scheduler.observe, scheduler.cache.take_memory_ops
        self._cache = scheduler.cache
        scheduler.observe = self.observe  # type: ignore[method-assign]
        scheduler.cache.take_memory_ops = self.take_memory_ops  # type: ignore[method-assign]

    def take_memory_ops(self) -> list[MemoryOp]:
        """Wraps ``KvCache.take_memory_ops``, and counts the copies."""
        ops = self._take_memory_ops()
        n_copies, n_copied = count_copies(ops, self._cache)
        self._n_copies += n_copies
        self._n_copied += n_copied
        return ops

    def observe(self, plan: BatchPlan, seconds: float, turn_s: float | None = None) -> None:
        """Wraps ``Scheduler.observe``, and records the step."""
        self._observe(plan, seconds, turn_s)
        now_s, idle_s = perf_counter(), self._loop._idle_s
        if plan.repeats:
            self._load = self._load.repeated()
        else:
            self._load = load_of(plan, self._n_ubatch, self._n_copies, self._n_copied)
        self._n_copies = self._n_copied = 0
        if idle_s == self._idle_s and self._last_s:
            self._loads.append(self._load)
            self._seconds.append(now_s - self._last_s)
        self._last_s, self._idle_s = now_s, idle_s

    def move_to(self, run: Run) -> None:
        """Moves the steps recorded since the last call to a run."""
        run.loads, run.seconds = self._loads, self._seconds
        self._loads, self._seconds, self._last_s = [], [], 0.0


def record(
    model: lp.Model,
    options: NodeOptions,
    n_runs: int,
    seconds: float,
    n_again: int = 0,
    **engine_options: Any,
) -> Recording:
    """Makes several runs with different traffic and numbers of callers, then repeats ``n_again`` of the held-out ones.

    Lengths are in proportion to ``n_ctx``.
    """
    with _engine(model, options, **engine_options) as engine:
        recording = Recording(model.path.name, _with_sizes(options, engine))
        observer = _Observer(engine, options.n_ubatch)
        # The first copies to host memory are far slower than later ones, which reuse memory.
        warm_up = Run("conversation", -1)
        _vary(engine, warm_up, random.Random(0), seconds, n_callers=options.n_seq_max)
        observer.move_to(warm_up)
        for seed in [*range(n_runs), *range(1, 2 * n_again, 2)]:
            kinds = HELD_OUT if seed % 2 else FITTED
            run = Run(kinds[seed // 2 % len(kinds)], seed)
            for phase in range(_N_PHASES):
                _vary(engine, run, random.Random(f"{seed} {phase}"), seconds / _N_PHASES)
            observer.move_to(run)
            recording.runs.append(run)
    return recording


def serve(
    model: lp.Model,
    options: NodeOptions,
    workload: Workload,
    per_s: float,
    warm_up_s: float,
    seconds: float,
    seed: int,
    **engine_options: Any,
) -> tuple[Run, float]:
    """Serves conversations that arrive as in a simulation, each in its own thread. Returns the run and its duration.

    The run does not contain turns that begin in the first ``warm_up_s``.
    """
    with _engine(model, options, **engine_options) as engine:
        observer = _Observer(engine, options.n_ubatch)
        run, warm_up = Run("served", seed), Run("served", seed)
        begin_s = perf_counter()
        counts_s = begin_s + warm_up_s

        def converse(conversation: Conversation) -> None:
            while (turn := conversation.next_turn()) is not None:
                seen = run if perf_counter() >= counts_s else warm_up
                _read(engine, _prompt(engine, conversation, turn[0], seed), turn[1], seen)
                if conversation.n_left <= 0:
                    return
                sleep(conversation.think_s())

        threads = []
        has_warmed_up = False
        for at_s, conversation in arrivals(workload, per_s, warm_up_s + seconds, seed):
            _sleep_until(begin_s + min(at_s, warm_up_s))
            if at_s >= warm_up_s and not has_warmed_up:
                has_warmed_up = True
                engine._engine_thread.ask(lambda: observer.move_to(warm_up))
            _sleep_until(begin_s + at_s)
            threads.append(threading.Thread(target=converse, args=(conversation,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        observer.move_to(run)
        return run, perf_counter() - counts_s


def _sleep_until(at_s: float) -> None:
    sleep(max(at_s - perf_counter(), 0))


def _engine(model: lp.Model, options: NodeOptions, **engine_options: Any) -> lp.Engine:
    return lp.Engine(
        model,
        n_ctx=options.n_ctx,
        n_seq_max=options.n_seq_max,
        cache_bytes=options.cache_bytes,
        prefix_cache=options.prefix_cache,
        tuning=lp.EngineTuning(n_batch=options.n_batch, n_ubatch=options.n_ubatch),
        **engine_options,
    )


def _with_sizes(options: NodeOptions, engine: lp.Engine) -> NodeOptions:
    scheduler = engine._engine_thread.loop._scheduler
    cutoff = scheduler.batch_builder._prefill_cutoff
    fields = {**asdict(options), "cell_bytes": scheduler.cache._cell_bytes, "prefill_cutoff": cutoff}
    return NodeOptions(**fields)


def _vary(
    engine: lp.Engine, run: Run, rng: random.Random, seconds: float, n_callers: int | None = None
) -> None:
    """Runs callers at the same time. Each makes requests with random prompts, or of a workload, one after the other."""
    n_callers = round(2 ** rng.uniform(-0.4, 4.1)) if n_callers is None else n_callers
    end_s = perf_counter() + seconds

    def work(chance: random.Random) -> None:
        while perf_counter() < end_s:
            if run.traffic == STREAMS:
                _stream(engine, chance, run, end_s)
            else:
                workload = scaled(WORKLOADS[run.traffic], engine.n_ctx / 4096, engine.n_ctx)
                workload = replace(workload, think_s=0.1 * seconds * chance.random())
                _converse(engine, Conversation(workload, 0, chance), run, chance.getrandbits(32), end_s)

    threads = [threading.Thread(target=work, args=(random.Random(rng.random()),)) for _ in range(n_callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _stream(engine: lp.Engine, rng: random.Random, run: Run, end_s: float) -> None:
    n_prompt = min(int(2 ** rng.uniform(3, 12)), engine.n_ctx // 2)
    prompt = [rng.randrange(300, engine.model.n_vocab) for _ in range(n_prompt)]
    n_tokens = min(int(2 ** rng.uniform(3, 8)), engine.n_ctx - n_prompt)
    _read(engine, prompt, n_tokens, run, end_s, cache=False)


def _converse(engine: lp.Engine, conversation: Conversation, run: Run, salt: int, end_s: float) -> None:
    while perf_counter() < end_s and (turn := conversation.next_turn()) is not None:
        _read(engine, _prompt(engine, conversation, turn[0], salt), turn[1], run, end_s)
        if conversation.n_left <= 0:
            return
        sleep(min(conversation.think_s(), max(end_s - perf_counter(), 0)))


def _prompt(engine: lp.Engine, conversation: Conversation, tokens: list[int], salt: int) -> list[int]:
    """Maps the ids of a simulation to ids of the vocabulary; equal ids stay equal. System prompts ignore ``salt``."""
    n_ids, n_shared = engine.model.n_vocab - 300, conversation.n_shared
    prompt = [hash((token, 1)) % n_ids + 300 for token in tokens[:n_shared]]
    return prompt + [hash((token, salt, conversation.number)) % n_ids + 300 for token in tokens[n_shared:]]


def _read(
    engine: lp.Engine, prompt: list[int], n_tokens: int, run: Run, end_s: float = math.inf, cache: bool = True
) -> None:
    """Reads a stream and records its time to first token and its gaps."""
    # The simulated requests get one token a step.
    params = lp.SamplingParams(max_tokens=n_tokens, ignore_eos=True, cache=cache, speculate="off")
    last_s, times = perf_counter(), run.first_s
    for _ in engine.stream(prompt, params):
        now_s = perf_counter()
        times.append(now_s - last_s)
        last_s, times = now_s, run.gaps_s
        if now_s > end_s:
            return
