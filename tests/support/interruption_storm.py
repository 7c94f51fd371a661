"""Interrupts calls at random instants with an exception of a signal handler. Run as a program: it needs a main thread.

    python interruption_storm.py N_INTERRUPTIONS SEED

Two other threads check all the time that their texts are right. Prints the numbers at the end; any failure ends the
program with an exit code other than 0, a hang with all stacks.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import llamapipe as lp
from llamapipe.errors import EngineClosedError, QueueFullError

sys.path[0:0] = [str(Path(__file__).resolve().parents[1])]
from support.control import wait_until  # noqa: E402
from support.inside import queue_of  # noqa: E402

_HANG_S = 90
_PROMPT = [310, 320, 330]
_PARAMS = lp.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
Call = Callable[[lp.Engine], object]


class Storm:
    """One-shot timers whose handler raises. Main thread."""

    def __init__(self, seed: int) -> None:
        self.n = 0
        self.by_call: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._armed = False
        self._mean_s: dict[str, float] = {}
        signal.signal(signal.SIGALRM, self._handle)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, number: int, frame: object) -> None:
        if not self._armed:
            return
        self._armed = False
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):  # asyncio.run() has one that cancels its task
            handler(number, frame)  # type: ignore[arg-type]

    def _arm(self, name: str) -> None:
        self._armed = True
        delay_s = self._rng.random() * self._mean_s.get(name, 0.002) * 1.1
        signal.setitimer(signal.ITIMER_REAL, max(delay_s, 1e-6))

    def interrupt(self, name: str, call: Callable[[], object]) -> None:
        """Makes a call that is interrupted at a random instant, or not at all.

        A coroutine is interrupted only while it runs: an event loop does not survive an exception in its own code.
        """
        began = time.perf_counter()

        async def run(coroutine: Coroutine[Any, Any, object]) -> None:
            self._arm(name)
            try:
                await coroutine
            finally:
                self._armed = False

        try:
            if asyncio.iscoroutinefunction(CALLS[name][1] if name in CALLS else call):
                asyncio.run(run(call()))  # type: ignore[arg-type]
            else:
                self._arm(name)
                try:
                    call()
                finally:
                    self._armed = False
            self._mean_s[name] = 0.95 * self._mean_s.get(name, 0.002) + 0.05 * (time.perf_counter() - began)
        except (KeyboardInterrupt, asyncio.CancelledError):
            self._armed = False
            self.n += 1
            self.by_call[name] += 1
        except QueueFullError:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _part_of_a_stream(engine: lp.Engine) -> None:
    with engine.stream(_PROMPT, _PARAMS) as stream:
        next(stream)


def _start(engine: lp.Engine) -> None:
    with engine.start(_PROMPT, _PARAMS) as generation:
        for _ in generation:
            pass
        generation.trim(2)
        generation.append([300])
        generation.next()


def _fork(engine: lp.Engine) -> None:
    with engine.start(_PROMPT, _PARAMS) as generation:
        generation.next()
        with generation.fork() as other:
            other.next()


async def _agenerate(engine: lp.Engine) -> None:
    await engine.agenerate([_PROMPT] * 3, _PARAMS)


async def _astream(engine: lp.Engine) -> None:
    async for _ in engine.astream(_PROMPT, _PARAMS):
        pass


CALLS: dict[str, tuple[int, Call]] = {  # with their shares
    "generate": (8, lambda engine: engine.generate(_PROMPT, _PARAMS)),
    "list": (6, lambda engine: engine.generate([_PROMPT] * 4, _PARAMS)),
    "without waiting": (4, lambda engine: engine.generate([_PROMPT] * 2, _PARAMS, block=False)),
    "constrained": (
        4,
        lambda engine: engine.generate(_PROMPT, lp.SamplingParams(regex="[ab]{4}", max_tokens=None)),
    ),
    "iter_completed": (3, lambda engine: list(engine.iter_completed([_PROMPT] * 4, _PARAMS))),
    "stream": (8, lambda engine: list(engine.stream(_PROMPT, _PARAMS))),
    "part of a stream": (6, _part_of_a_stream),
    "start": (6, _start),
    "fork": (2, _fork),
    "score": (6, lambda engine: engine.score(_PROMPT, [300, 301])),
    "stats": (4, lambda engine: engine.stats()),
    "agenerate": (2, _agenerate),
    "astream": (2, _astream),
}


def main() -> None:
    """The command line."""
    n_wanted, seed = int(sys.argv[1]), int(sys.argv[2])
    storm, rng = Storm(seed), random.Random(seed)
    sys.unraisablehook = lambda args: None  # an interruption of a destructor is printed and goes no further
    threads_before = threading.active_count()
    with lp.Model.demo() as model:
        with lp.Engine(model, n_ctx=64, n_seq_max=4, max_queue=6) as engine:
            expected = engine.generate(_PROMPT, _PARAMS).token_ids
            # Imports llguidance, whose dataclasses execute text: CPython ends a process by SIGINT once an
            # interruption has passed through such text, even where the program has handled it.
            CALLS["constrained"][1](engine)
            ended, wrong, checked = threading.Event(), list[object](), Counter[str]()

            def check(name: str) -> None:
                while not ended.is_set():
                    try:
                        token_ids = engine.generate(_PROMPT, _PARAMS).token_ids
                    except BaseException as e:
                        wrong.append(e)
                        return
                    checked[name] += 1
                    if token_ids != expected:
                        wrong.append(token_ids)

            checkers = [threading.Thread(target=check, args=(name,)) for name in "ab"]
            for checker in checkers:
                checker.start()
            names = [name for name, (share, _) in CALLS.items() for _ in range(share)]
            while storm.n < n_wanted and not wrong:
                faulthandler.dump_traceback_later(_HANG_S, exit=True)
                name = rng.choice(names)
                storm.interrupt(name, lambda name=name: CALLS[name][1](engine))  # type: ignore[misc]
                if storm.n % 500 == 0:
                    storm.interrupt("with", lambda: _engine(model))
            faulthandler.dump_traceback_later(_HANG_S, exit=True)
            ended.set()
            for checker in checkers:
                checker.join()
            assert not wrong, wrong
            gc.collect()
            wait_until(lambda: not engine.stats().n_active and not engine.stats().n_queued)
            wait_until(lambda: queue_of(engine).n == 0)
            engine.check_integrity()
            assert engine.generate(_PROMPT, _PARAMS).token_ids == expected
        gc.collect()
        # Of engines that were interrupted while they were made.
        wait_until(lambda: threading.active_count() <= threads_before)
    counts = ", ".join(f"{name} {n}" for name, n in sorted(storm.by_call.items()))
    sys.stdout.write(f"{storm.n} interruptions, {sum(checked.values())} texts of others checked\n{counts}\n")


def _engine(model: lp.Model) -> None:
    try:
        with lp.Engine(model, n_ctx=64, n_seq_max=2) as engine:
            engine.generate(_PROMPT, _PARAMS)
    except EngineClosedError:
        pass


if __name__ == "__main__":
    main()
