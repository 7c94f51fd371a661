"""Lets a test decide when an engine's steps run, and wait for what threads and tasks do without sleeping."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import monotonic
from typing import Any, NamedTuple

import llamapipe as lp
from llamapipe._engine.runtime.thread import EngineThread
from support.inside import executor_of, inbox_of, n_steps_of, replace_executor, thread_of

PATIENCE_S = 120.0  # a test that waits longer fails; busy machines were seen to stand still for half a minute


class Launch(NamedTuple):
    """A batch as it went to llama.cpp."""

    tokens: list[int]
    positions: list[int]
    seq_ids: list[int]
    outputs: list[int]


class Gate:
    """Stands before an engine's real executor: each step waits at it until the test lets it through.

    Use with ``with``; it opens for good at the end. The test's thread may look at counters while a step waits.
    ``launches``: every batch that went through, from the first one whose tokens it was given.
    """

    def __init__(self, engine: lp.Engine) -> None:
        self._engine = engine
        self._executor = executor_of(engine)
        self._waiting = threading.Semaphore(0)
        self._leave = threading.Semaphore(0)
        self._open = False
        self.launches: list[Launch] = []
        self._sampled: list[int] = []  # from the last of them

    def __enter__(self) -> Gate:
        replace_executor(self._engine, self)
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
        if not self._engine.closed:
            replace_executor(self._engine, self._executor)

    # ---- the test
    def wait(self) -> None:
        """Returns once a step stands at the gate: planned, not computed."""
        if not self._waiting.acquire(timeout=PATIENCE_S):
            raise AssertionError("no step came")

    def step(self, n: int = 1) -> None:
        """Lets ``n`` steps through, each after the one before it, and returns with the next one at the gate."""
        for _ in range(n):
            self._leave.release()
            self.wait()

    def open(self) -> None:
        """Lets everything through from now on."""
        self._open = True
        self._leave.release()

    @property
    def n_steps(self) -> int:
        """Steps computed so far; to be read while one waits."""
        return n_steps_of(self._engine)

    # ---- the executor's part
    def launch(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        seq_ids: Sequence[int],
        outputs: Sequence[int],
        *more: Any,
    ) -> int:
        self._pass()
        self.launches.append(Launch(list(tokens), list(positions), list(seq_ids), list(outputs)))
        return self._executor.launch(tokens, positions, seq_ids, outputs, *more)

    def launch_repeat(self) -> int:
        self._pass()
        if self.launches:  # else it repeats a batch from before this gate was there
            last = self.launches[-1]
            self.launches.append(
                last._replace(tokens=self._sampled, positions=[p + 1 for p in last.positions])
            )
        return self._executor.launch_repeat()

    def sample(
        self, step: int, rows: Sequence[int], samplers: Sequence[Any], guessed: Sequence[int] = ()
    ) -> list[int]:
        self._sampled = self._executor.sample(step, rows, samplers, guessed)
        return self._sampled.copy()

    def sample_repeat(self, step: int) -> list[int]:
        self._sampled = self._executor.sample_repeat(step)
        return self._sampled.copy()

    def _pass(self) -> None:
        thread_of(self._engine).dispatcher.wake()  # those who were to be woken by the launch that stops here
        if not self._open:
            self._waiting.release()
            if not self._leave.acquire(timeout=PATIENCE_S):
                raise AssertionError("the test let no step through")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def held(engine: lp.Engine) -> AbstractContextManager[None]:
    """Holds the engine thread between two steps, so that requests arrive together. A list is one command."""
    return held_thread(thread_of(engine))


@contextmanager
def held_thread(thread: EngineThread) -> Iterator[None]:
    """The same with the thread."""
    reached, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        reached.set()
        go_on.wait(PATIENCE_S)

    thread.call(stand)
    assert reached.wait(PATIENCE_S)
    try:
        yield
    finally:
        go_on.set()


def submitted(engine: lp.Engine, function: Callable[..., Any], *arguments: Any) -> Worker:
    """Calls ``function`` in a thread; returns once the engine has been asked for what it wants."""
    with held(engine):
        worker = Worker(function, *arguments)
        wait_until(lambda: inbox_of(engine).qsize() > 0)
    return worker


def wait_until(
    condition: Callable[[], object], every_s: float = 0.001, within_s: float | None = None
) -> None:
    """Looks every ``every_s`` seconds until ``condition`` holds.

    Raises AssertionError, which shows the condition and its last value, when it does not ``within_s``, or within
    ``PATIENCE_S``.
    """
    deadline = monotonic() + (PATIENCE_S if within_s is None else within_s)
    pause = threading.Event()
    while not (value := condition()):
        assert monotonic() < deadline, f"waited in vain for {_source(condition)}; it was {value!r}"
        pause.wait(every_s)


async def until(condition: Callable[[], object]) -> None:
    """The same for a task: the others of its loop run between two looks."""
    deadline = monotonic() + PATIENCE_S
    while not (value := condition()):
        assert monotonic() < deadline, f"waited in vain for {_source(condition)}; it was {value!r}"
        await turn()


async def turn(n: int = 1) -> None:
    """Lets every other task of the loop that is ready run until it waits, ``n`` times."""
    for _ in range(n):
        await asyncio.sleep(0)  # noqa: TID251  (no time passes)


def _source(function: Callable[..., object]) -> str:
    """The text of a function; of a lambda, the statement that has it."""
    try:
        return inspect.getsource(getattr(function, "func", function)).strip()
    except (OSError, TypeError):  # it is no Python, or was not read from a file
        return repr(function)


class Worker(threading.Thread):
    """A thread whose result, or exception, is asked for with ``result``."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        super().__init__(daemon=True)
        self._call = function, arguments, options
        self._outcome: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        function, arguments, options = self._call
        try:
            self._outcome = function(*arguments, **options)
        except BaseException as e:
            self._error = e

    def result(self) -> Any:
        """What the function returned; raises what it raised, AssertionError when it does not return."""
        self.join(PATIENCE_S)
        assert not self.is_alive(), "the thread hangs"
        if self._error is not None:
            raise self._error
        return self._outcome


def all_results(workers: Sequence[Worker]) -> list[Any]:
    return [worker.result() for worker in workers]
