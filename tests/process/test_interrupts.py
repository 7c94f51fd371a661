"""Ctrl-C at every line of our own code that a call runs on its caller's thread: nothing is left behind.

A trace function is told of every line, so it can raise KeyboardInterrupt at the first line of a call, at the second,
and so on to the last. Real signals come through between lines, too, but only where something is called.
"""

from __future__ import annotations

import asyncio
import functools
import linecache
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from support.control import wait_until
from support.inside import children_of, queue_of

import llamapipe as lp

PACKAGE = str(Path(lp.__file__).parent)
EVENT_WAIT = threading.Event.wait.__code__
PARAMS = lp.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
# Every third line of a call is tried, from another one on for each call: most lines are the same in all. `nox -s fuzz`
# tries all.
STRIDE = 1 if os.environ.get("LLAMAPIPE_INTERRUPTED_LINES") == "all" else 3


class Interrupter:
    """Raises KeyboardInterrupt at the ``n``-th line of our own code on this thread, if there is one (``reached``).

    Lines count, too, where Python waits for a thread to come up, which may run by then or not. A line in a loop counts
    twice: the first time, and once with what that has left behind.
    """

    def __init__(self, n: int) -> None:
        self._left = n
        self._passed: Counter[tuple[CodeType, int]] = Counter()
        self.reached = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not (code.co_filename.startswith(PACKAGE) or code is EVENT_WAIT) or _dropping(frame):
            return None
        if event == "line" and not _releases(code.co_filename, frame.f_lineno):
            self._passed[code, frame.f_lineno] += 1
            if self._passed[code, frame.f_lineno] <= 2:
                self._left -= 1
                if self._left == 0:
                    self.reached = True
                    sys.settrace(None)
                    raise KeyboardInterrupt
        return self


@functools.cache
def _releases(file: str, line: int) -> bool:
    """The line of a ``with`` comes again at its end, where no signal comes through before it has released."""
    return linecache.getline(file, line).lstrip().startswith("with ")


def _dropping(frame: FrameType | None) -> bool:
    """Python itself swallows what is raised in a destructor."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def interrupted(n: int, use: Callable[[], object]) -> bool:
    """Whether ``use`` has an ``n``-th line, at which it was then interrupted."""
    interrupter = Interrupter(n)
    sys.settrace(interrupter)
    try:
        use()
        assert not interrupter.reached
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return interrupter.reached


def generate(engine: lp.Engine) -> None:
    engine.generate("a", PARAMS)


def generate_several(engine: lp.Engine) -> None:
    engine.generate(["a", "b", "c", "d"], PARAMS)


def generate_without_waiting(engine: lp.Engine) -> None:
    engine.generate(["a", "b"], PARAMS, block=False)


def stream(engine: lp.Engine) -> None:
    for _ in engine.stream("a", PARAMS):
        pass


def stream_without_waiting(engine: lp.Engine) -> None:
    with engine.stream("a", PARAMS, block=False) as deltas:
        next(deltas)


def start(engine: lp.Engine) -> None:
    with engine.start("a", PARAMS) as generation:
        for _ in generation:
            pass
        generation.trim(2)
        generation.append([5, 6])
        generation.next()


def agenerate(engine: lp.Engine) -> None:
    async def run() -> None:
        await engine.agenerate(["a", "b", "c", "d"], PARAMS)

    asyncio.run(run())


def astream(engine: lp.Engine) -> None:
    async def run() -> None:
        async for _ in engine.astream("a", PARAMS):
            pass

    asyncio.run(run())


@pytest.fixture
def engine(make_engine: Callable[..., lp.Engine]) -> Iterator[lp.Engine]:
    """An engine whose queue is short enough for a lost place to be noticed."""
    engine = make_engine(n_seq_max=2, max_queue=3)
    yield engine
    sys.settrace(None)


USES: list[Callable[[lp.Engine], None]] = [
    generate,
    generate_several,
    generate_without_waiting,
    stream,
    stream_without_waiting,
    start,
    agenerate,
    astream,
]


@pytest.mark.parametrize("use", USES)
def test_nothing_is_left_behind(engine: lp.Engine, use: Callable[[lp.Engine], None]) -> None:
    expected = engine.generate("still alive", PARAMS).token_ids
    n = 1 + USES.index(use) % STRIDE - STRIDE
    reached = True
    while reached:
        n += STRIDE
        reached = interrupted(n, lambda: use(engine))
        wait_until(lambda: _is_idle(engine))
    assert n > 50
    engine.check_integrity()
    assert engine.generate("still alive", PARAMS).token_ids == expected


def _is_idle(engine: lp.Engine) -> bool:
    stats = engine.stats()
    return (stats.n_active, stats.n_queued, queue_of(engine).n) == (0, 0, 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_that_is_half_made_leaves_nothing_behind(tiny: lp.Model, depth: int) -> None:
    """No context of the model and no thread of ours; what a native call had just returned is not seen here.

    Most lines are the same at both depths, which begin with different ones.
    """
    before = dict(children_of(tiny))
    engines: list[lp.Engine] = []
    n = 1 + depth % STRIDE - STRIDE
    reached = True
    while reached:
        n += STRIDE
        reached = interrupted(
            n,
            lambda: engines.append(
                lp.Engine(
                    tiny, n_ctx=64, n_seq_max=1, n_threads=1, tuning=lp.EngineTuning(pipeline_depth=depth)
                )
            ),
        )
        for engine in engines:
            assert len(engine.generate("a", PARAMS).token_ids) == 5
            engine.close()
        engines.clear()
        assert children_of(tiny) == before
        wait_until(lambda: not _engine_threads())
    assert n > 50


def _engine_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "llamapipe-engine" and t.is_alive()]
