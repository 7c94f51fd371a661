"""Objects for one thread or task at a time: a second call is refused at once, and the first one is not disturbed."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import llamapipe as lp

MakeEngine = Callable[..., lp.Engine]
PARAMS = lp.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
IN_USE = "another call of this {} is running"


class Held:
    """A logits processor that keeps a token back until it is let go."""

    def __init__(self) -> None:
        self.reached, self.let_go = threading.Event(), threading.Event()

    def __call__(self, tokens: Any, logits: Any) -> None:
        self.reached.set()
        assert self.let_go.wait(60)


@contextmanager
def waiting(call: Callable[[lp.SamplingParams], Callable[[], object]]) -> Iterator[list[Any]]:
    """A thread is in the middle of the call; afterwards the list has what it returned or raised."""
    held = Held()
    step = call(lp.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logits_processors=[held]))
    got: list[Any] = []

    def work() -> None:
        try:
            got.append(step())
        except BaseException as error:
            got.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert held.reached.wait(60)
        yield got
    finally:
        held.let_go.set()
        thread.join()


class TestGeneration:
    @pytest.mark.parametrize(
        "call",
        [
            lambda g: g.next(),
            next,
            lambda g: g.trim(1),
            lambda g: g.append([5]),
            lambda g: g.fork(),
            lambda g: g.snapshot(),
        ],
        ids=["next", "iteration", "trim", "append", "fork", "snapshot"],
    )
    def test_second_calls_are_refused(
        self, make_engine: MakeEngine, call: Callable[[lp.Generation], object]
    ) -> None:
        engine = make_engine()
        generations: list[lp.Generation] = []

        def start(params: lp.SamplingParams) -> Callable[[], object]:
            generations.append(engine.start("a", params))
            return generations[0].next

        with waiting(start) as got, pytest.raises(RuntimeError, match=IN_USE.format("generation")):
            call(generations[0])
        assert got[0].id == generations[0].token_ids[-1]
        call(generations[0])  # now it may
        generations[0].close()

    @pytest.mark.parametrize("end", ["cancel", "close"])
    def test_another_thread_may_end_it(self, make_engine: MakeEngine, end: str) -> None:
        engine = make_engine()
        generations: list[lp.Generation] = []

        def start(params: lp.SamplingParams) -> Callable[[], object]:
            generations.append(engine.start("a", params))
            return generations[0].next

        with waiting(start) as got:
            getattr(generations[0], end)()
        assert got[0] is None or isinstance(got[0], lp.Token)  # cancelled before or after it was sampled
        assert generations[0].next() is None
        assert generations[0].finish_reason == "cancelled"

    @pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
    def test_a_signal_handler_of_the_same_thread(self, make_engine: MakeEngine) -> None:
        """It would take the token that the interrupted call waits for."""
        engine = make_engine()
        refused: list[str] = []

        def handle(number: int, frame: object) -> None:
            try:
                generation.next()
            except RuntimeError as error:
                refused.append(str(error))

        def ask(tokens: Any, logits: Any) -> None:
            if not refused:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)  # type: ignore[arg-type]

        before = signal.signal(signal.SIGUSR1, handle)
        try:
            params = lp.SamplingParams(
                max_tokens=4, temperature=0.0, logits_processors=[ask], ignore_eos=True
            )
            with engine.start("a", params) as generation:
                tokens = [token.id for token in generation]
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert len(tokens) == 4
        assert refused
        assert IN_USE.format("generation") in refused[0]


@pytest.mark.parametrize("kind", ["stream", "stream_chat"])
def test_a_second_thread_in_a_stream_is_refused(make_engine: MakeEngine, demo: lp.Model, kind: str) -> None:
    engine = make_engine(demo)
    streams: list[Any] = []

    def start(params: lp.SamplingParams) -> Callable[[], object]:
        prompt: Any = "a" if kind == "stream" else [{"role": "user", "content": "a"}]
        streams.append(getattr(engine, kind)(prompt, params))
        return lambda: next(streams[0])

    with waiting(start) as got, pytest.raises(RuntimeError, match=IN_USE.format("stream")):
        next(streams[0])
    assert isinstance(got[0], (lp.Delta, lp.ChatDelta))
    assert list(streams[0])[-1].finish_reason == "length"  # the refused call has not cancelled it


@pytest.mark.parametrize("kind", ["astream", "astream_chat"])
def test_a_second_task_in_a_stream_is_refused(make_engine: MakeEngine, demo: lp.Model, kind: str) -> None:
    engine = make_engine(demo)
    prompt: Any = "a" if kind == "astream" else [{"role": "user", "content": "a"}]

    async def main() -> None:
        stream: Any = getattr(engine, kind)(prompt, PARAMS)
        first, second = await asyncio.gather(*[anext(stream) for _ in range(2)], return_exceptions=True)
        assert isinstance(first, (lp.Delta, lp.ChatDelta)), first
        assert isinstance(second, RuntimeError), second
        assert IN_USE.format("stream") in str(second)
        assert [delta async for delta in stream][-1].finish_reason == "length"

    asyncio.run(main())
