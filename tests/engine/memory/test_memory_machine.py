"""Random sequences of everything that changes KV cells, against lists of tokens.

After each action the scheduler's books must equal what the context holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.eager_gate import EagerGate
from support.engine_harness import N_CTX, EngineHarness
from support.fakes import N_VOCAB, next_token
from support.gguf_models import hybrid_model, recurrent_model, sliding_window_model, tiny_architecture
from support.inside import request_of, scheduler_of, thread_of, told_and_cached
from support.kv_subscriber import Subscriber
from support.memory import cache_of
from support.plain import PlainLoop, greedy, plain_loop

import llamapipe as lp
from llamapipe._sync.streams import Generation
from llamapipe.engine import with_tuning

MOST = 8  # generations at once
picks = st.integers(0, 10**6)
# Few different tokens in runs, so that sequences share prefixes of all lengths.
texts = st.lists(st.tuples(st.integers(5, 7), st.integers(1, 30)), min_size=1, max_size=3).map(
    lambda runs: [token for token, n in runs for _ in range(n)]
)


class MemoryMachine(RuleBasedStateMachine):
    """Generations and what their tokens must be. Subclasses say where they run."""

    n_ctx: int
    n_vocab: int

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[Generation, list[int]]] = []
        self.snapshots: list[tuple[bytes, list[int]]] = []
        self.seen: list[list[int]] = []  # sequences that were in cells

    # ---- where it runs
    def start(self, tokens: list[int]) -> Generation:
        raise NotImplementedError

    def restore(self, snapshot: bytes) -> Generation:
        raise NotImplementedError

    def complete(self, tokens: list[int], n: int) -> list[int]:
        raise NotImplementedError

    def expected(self, tokens: list[int], n: int, generated: list[int]) -> list[int]:
        """What must follow these tokens; ``generated`` where only rounding decides."""
        raise NotImplementedError

    def preempt(self, generation: Generation) -> None:
        raise NotImplementedError

    def check_integrity(self) -> None:
        raise NotImplementedError

    # ---- actions
    @initialize(prompt=texts)
    def begin(self, prompt: list[int]) -> None:
        self.open.append((self.start(prompt), prompt))

    @precondition(lambda self: len(self.open) < MOST)
    @rule(prompt=texts)
    def another(self, prompt: list[int]) -> None:
        self.open.append((self.start(prompt), prompt))

    @precondition(lambda self: self.seen and len(self.open) < MOST)
    @rule(pick=picks, n=picks, more=texts)
    def share(self, pick: int, n: int, more: list[int]) -> None:
        """Begins as a sequence did that was changed since."""
        seen = self.seen[-1 - pick % min(len(self.seen), 4)]
        prompt = (seen[: len(seen) - n % len(seen) // 2] + more)[: self.n_ctx - 1]
        generation = self.start(prompt)
        self.open.append((generation, prompt))
        token = generation.next()
        assert token is not None
        assert [token.id] == self.expected(prompt, 1, [token.id])
        prompt.append(token.id)

    @precondition(lambda self: self.open)
    @rule(pick=picks, n=st.integers(1, 12))
    def go_on(self, pick: int, n: int) -> None:
        generation, tokens = self.open[pick % len(self.open)]
        generated = []
        for _ in range(n):
            token = generation.next()
            if token is None:
                break
            generated.append(token.id)
        assert len(generated) == min(n, self.n_ctx - len(tokens))
        assert generated == self.expected(tokens, len(generated), generated)
        tokens += generated

    @precondition(lambda self: self.open)
    @rule(pick=picks, n=picks)
    def trim(self, pick: int, n: int) -> None:
        generation, tokens = self.open[pick % len(self.open)]
        n = 1 + n % min(len(tokens), self.n_ctx - 1)
        self.seen.append(tokens.copy())
        generation.trim(n)
        del tokens[n:]

    @precondition(lambda self: self.open)
    @rule(pick=picks, more=texts)
    def append(self, pick: int, more: list[int]) -> None:
        generation, tokens = self.open[pick % len(self.open)]
        more = more[: max(self.n_ctx - 1 - len(tokens), 0)]
        if more:
            generation.append(more)
            tokens += more

    @precondition(lambda self: 0 < len(self.open) < MOST)
    @rule(pick=picks)
    def fork(self, pick: int) -> None:
        generation, tokens = self.open[pick % len(self.open)]
        self.open.append((generation.fork(), tokens.copy()))

    @precondition(lambda self: len(self.open) > 1)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        generation, tokens = self.open.pop(pick % len(self.open))
        self.seen.append(tokens)
        generation.cancel()

    @precondition(lambda self: self.open)
    @rule(pick=picks)
    def preempted(self, pick: int) -> None:
        self.preempt(self.open[pick % len(self.open)][0])

    @precondition(lambda self: self.open)
    @rule(pick=picks)
    def snapshot(self, pick: int) -> None:
        generation, tokens = self.open[pick % len(self.open)]
        self.snapshots.append((generation.snapshot(), tokens.copy()))

    @precondition(lambda self: self.snapshots and len(self.open) < MOST)
    @rule(pick=picks)
    def restored(self, pick: int) -> None:
        snapshot, tokens = self.snapshots[pick % len(self.snapshots)]
        if len(tokens) < self.n_ctx:
            self.open.append((self.restore(snapshot), tokens.copy()))

    @rule(prompts=st.lists(texts, min_size=1, max_size=3), n=st.integers(1, 9))
    def completions(self, prompts: list[list[int]], n: int) -> None:
        for prompt in prompts:
            generated = self.complete(prompt, n)
            assert generated == self.expected(prompt, n, generated)

    @invariant()
    def books_are_right(self) -> None:
        self.check_integrity()
        for generation, tokens in self.open:
            assert generation.token_ids == tokens

    def teardown(self) -> None:
        for generation, _ in self.open:
            generation.cancel()
        if self.open:
            self.check_integrity()


def run(machine: type[MemoryMachine], n_examples: int, n_steps: int) -> None:
    """Tries random sequences of actions."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=n_examples,
            stateful_step_count=n_steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


# ---- on a fake context
@pytest.mark.native
@pytest.mark.parametrize(
    ("n_slots", "n_cells", "host_bytes"),
    [(3, None, 0), (3, None, 200), (3, None, 10**6), (4, 200, 400), (1, None, 500)],
)
def test_on_a_fake_context(n_slots: int, n_cells: int | None, host_bytes: int) -> None:
    """Every token is a hash of those before it, so a cell too many, too few or of another sequence shows."""

    class OnFake(MemoryMachine):
        n_ctx = N_CTX

        def __init__(self) -> None:
            super().__init__()
            cache = cache_of(n_slots, True, host_bytes=host_bytes, min_save=4)
            self.harness = EngineHarness(n_slots, cache=cache, n_cells=n_cells)

        def start(self, tokens: list[int]) -> Generation:
            return self.harness.start(max_tokens=None, tokens=tokens.copy())

        def restore(self, snapshot: bytes) -> Generation:
            return self.harness.restore(snapshot)

        def complete(self, tokens: list[int], n: int) -> list[int]:
            return self.harness.complete(max_tokens=n, tokens=tokens.copy()).result().token_ids

        def expected(self, tokens: list[int], n: int, generated: list[int]) -> list[int]:
            whole = tokens.copy()
            for _ in range(n):
                whole.append(next_token(whole, N_VOCAB))
            return whole[len(tokens) :]

        def preempt(self, generation: Generation) -> None:
            request, scheduler = request_of(generation), self.harness.scheduler
            self.harness.engine_thread.ask(lambda: scheduler.preempt(request) if request.slot >= 0 else None)

        def check_integrity(self) -> None:
            self.harness.engine_thread.ask(self.harness.engine_thread.loop.check_integrity)

        def teardown(self) -> None:
            super().teardown()
            self.harness.close()
            assert all(saved.closed for saved in self.harness.context.saved)

    run(OnFake, 40, 40)


# ---- on llama.cpp
@pytest.mark.device
def test_on_a_device(tiny: lp.Model, loop: PlainLoop) -> None:
    """A few sequences; software devices are slow."""
    with machine_on(tiny, loop, {"n_seq_max": 3}) as machine:
        run(machine, 3, 12)


@pytest.mark.parametrize(
    "options",
    [{"n_seq_max": 3}, {"n_seq_max": 3, "kv_unified": True}, {"n_seq_max": 4, "n_cells": 320}],
    ids=str,
)
def test_on_llama_cpp(tiny: lp.Model, loop: PlainLoop, options: dict[str, Any]) -> None:
    with machine_on(tiny, loop, options) as machine:
        run(machine, 12, 25)


@pytest.mark.parametrize("guesses", [False, True])
@pytest.mark.parametrize("kind", ["recurrent", "sliding window", "hybrid", "delta net"])
def test_on_other_memories(tmp_path: Path, kind: str, guesses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if guesses:
        monkeypatch.setattr("llamapipe._engine.assembly.Gate", EagerGate)
    makers: dict[str, Callable[[Path], Path]] = {
        "recurrent": recurrent_model,
        "sliding window": sliding_window_model,
        "hybrid": hybrid_model,
        "delta net": partial(tiny_architecture, name="qwen3.5-0.8b", type_name="f32"),
    }
    make = makers[kind]
    with (
        lp.Model(make(tmp_path / "model.gguf")) as model,
        plain_loop(model) as loop,
        machine_on(model, loop, {"n_seq_max": 3}) as machine,
    ):
        run(machine, 12, 25)


@pytest.mark.parametrize("kind", ["cells", "sliding window", "recurrent"])
def test_kv_events_tell_every_change(tiny: lp.Model, tmp_path: Path, kind: str) -> None:
    """After each action a subscriber has the blocks that the engine's tree holds."""
    events = lp.KvEvents("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", block_size=4, n_replay=20)
    with ExitStack() as stack:
        model = tiny
        if kind != "cells":
            make = recurrent_model if kind == "recurrent" else sliding_window_model
            model = stack.enter_context(lp.Model(make(tmp_path / "model.gguf")))
        loop = stack.enter_context(plain_loop(model))
        machine = stack.enter_context(machine_on(model, loop, {"n_seq_max": 3, "kv_events": events}))
        run(machine, 8, 30)


@contextmanager
def machine_on(model: lp.Model, loop: PlainLoop, options: dict[str, Any]) -> Iterator[type[MemoryMachine]]:
    """One engine for all sequences: each finds what the ones before have left."""
    with (
        lp.Engine(
            model, n_ctx=256, n_threads=1, cache_bytes=400_000, **with_tuning({"n_ubatch": 32, **options})
        ) as engine,
        Subscriber(engine.kv_events) if engine.kv_events is not None else nullcontext() as subscriber,
    ):

        class OnEngine(MemoryMachine):
            n_ctx = engine.n_ctx

            def start(self, tokens: list[int]) -> Generation:
                return engine.start(tokens, greedy(None))

            def restore(self, snapshot: bytes) -> Generation:
                return engine.restore(snapshot, greedy(None))

            def complete(self, tokens: list[int], n: int) -> list[int]:
                return engine.generate(tokens, greedy(n)).token_ids

            def expected(self, tokens: list[int], n: int, generated: list[int]) -> list[int]:
                assert loop.agrees(tokens, generated)
                return generated

            def preempt(self, generation: Generation) -> None:
                request, thread = request_of(generation), thread_of(engine)
                scheduler = scheduler_of(engine)
                thread.ask(lambda: scheduler.preempt(request) if request.slot >= 0 else None)

            def check_integrity(self) -> None:
                engine.check_integrity()
                if subscriber is not None:
                    n_put, cached = told_and_cached(engine, 4)
                    subscriber.replay(n_put)
                    assert subscriber.index.prefixes == cached

        yield OnEngine
        assert engine.stats().n_active == engine.stats().n_queued == 0
