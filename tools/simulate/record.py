"""Runs a real engine under varying load and records what each step computed and how long it took.

A step's time is counted from the end of the step before it, so it includes planning, sampling and delivery; steps after
a pause are left out. In a served run, requests arrive as in a simulation, so that both can be compared.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import llamapipe as lp
from llamapipe.engine.scheduler.batch_plan import BatchPlan
from simulate.cost import Load, load_of
from simulate.node import NodeOptions
from simulate.workload import Conversation, Workload, arrivals


@dataclass
class Run:
    """The steps of one run, and what its callers saw, in seconds."""

    loads: list[Load] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


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
        runs = [Run(**{**run, "loads": [Load(*load) for load in run["loads"]]}) for run in fields["runs"]]
        return cls(fields["model"], NodeOptions(**fields["options"]), runs)


class _Observer:
    """Hears of each step's end, on the engine thread."""

    def __init__(self, engine: lp.Engine) -> None:
        self.run = Run()
        self._loop = engine._engine_thread.loop
        self._last_s = 0.0
        self._idle_s = 0.0
        self._load = Load(0, 0, 0, 0)
        scheduler = self._loop._scheduler
        self._observe = scheduler.observe
        scheduler.observe = self.observe  # type: ignore[method-assign]

    def observe(self, plan: BatchPlan, seconds: float) -> None:
        """``Scheduler.observe``, noted."""
        self._observe(plan, seconds)
        now_s, idle_s = perf_counter(), self._loop._idle_s
        if plan.repeats:
            n_decode, n_cells, _, _ = self._load
            self._load = Load(n_decode, n_cells + n_decode, 0, 0)
        else:
            self._load = load_of(plan)
        if idle_s == self._idle_s and self._last_s:
            self.run.loads.append(self._load)
            self.run.seconds.append(now_s - self._last_s)
        self._last_s, self._idle_s = now_s, idle_s

    def take(self) -> Run:
        """What was noted since the last call."""
        run, self.run = self.run, Run()
        self._last_s = 0.0
        return run


def record(
    model: lp.Model, options: NodeOptions, n_runs: int, seconds: float, **engine_options: Any
) -> Recording:
    """Several runs, each with other numbers of streams and other lengths."""
    with _engine(model, options, **engine_options) as engine:
        recording = Recording(model.path.name, _with_sizes(options, engine))
        observer = _Observer(engine)
        for number in range(n_runs):
            _vary(engine, random.Random(number), seconds)
            recording.runs.append(observer.take())
    return recording


def serve(
    model: lp.Model,
    options: NodeOptions,
    workload: Workload,
    per_s: float,
    seconds: float,
    seed: int,
    **engine_options: Any,
) -> tuple[Run, NodeOptions]:
    """A run in which conversations arrive as in a simulation, each turn in a thread of its own."""
    with _engine(model, options, **engine_options) as engine:
        observer = _Observer(engine)
        n_vocab, run = model.n_vocab, Run()
        threads = []
        begin_s = perf_counter()
        for at_s, conversation in arrivals(workload, per_s, seconds, seed):
            sleep(max(begin_s + at_s - perf_counter(), 0))
            threads.append(threading.Thread(target=_converse, args=(engine, conversation, run, n_vocab)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        made = observer.take()
        return Run(made.loads, made.seconds, run.first_s, run.gaps_s), _with_sizes(options, engine)


def _engine(model: lp.Model, options: NodeOptions, **engine_options: Any) -> lp.Engine:
    return lp.Engine(
        model,
        n_ctx=options.n_ctx,
        n_seq_max=options.n_seq_max,
        n_batch=options.n_batch,
        n_ubatch=options.n_ubatch,
        cache_bytes=options.cache_bytes,
        prefix_cache=options.prefix_cache,
        **engine_options,
    )


def _with_sizes(options: NodeOptions, engine: lp.Engine) -> NodeOptions:
    scheduler = engine._engine_thread.loop._scheduler
    cutoff = scheduler.batch_builder._prefill_cutoff
    fields = {**asdict(options), "cell_bytes": scheduler.cache._cell_bytes, "prefill_cutoff": cutoff}
    return NodeOptions(**fields)


def _vary(engine: lp.Engine, rng: random.Random, seconds: float) -> None:
    """Streams that come and go: at first many, then fewer, with random lengths."""
    n_streams = rng.choice([1, 2, 3, 4, 6, 8, 12, 16])
    end_s = perf_counter() + seconds
    n_vocab = engine.model.n_vocab

    def work(seed: int) -> None:
        mine = random.Random(seed)
        while perf_counter() < end_s:
            n_prompt = min(int(2 ** mine.uniform(3, 12)), engine.n_ctx // 2)
            prompt = [mine.randrange(300, n_vocab) for _ in range(n_prompt)]
            n_tokens = min(int(2 ** mine.uniform(3, 8)), engine.n_ctx - n_prompt)
            for _ in engine.stream(
                prompt, lp.SamplingParams(max_tokens=n_tokens, ignore_eos=True, cache=False)
            ):
                if perf_counter() > end_s:
                    break

    threads = [threading.Thread(target=work, args=(rng.random(),)) for _ in range(n_streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _converse(engine: lp.Engine, conversation: Conversation, run: Run, n_vocab: int) -> None:
    for tokens, n_answer in _turns(conversation):
        # The simulated ids do not fit a vocabulary; equal ids stay equal.
        prompt = [hash((token, 1)) % (n_vocab - 300) + 300 for token in tokens]
        last_s = perf_counter()
        first = True
        params = lp.SamplingParams(max_tokens=n_answer, ignore_eos=True)
        for _ in engine.stream(prompt, params):
            now_s = perf_counter()
            (run.first_s if first else run.gaps_s).append(now_s - last_s)
            first, last_s = False, now_s


def _turns(conversation: Conversation) -> Iterator[tuple[list[int], int]]:
    while (turn := conversation.next_turn()) is not None:
        yield turn
        if conversation.n_left <= 0:
            return
        sleep(conversation.think_s())
