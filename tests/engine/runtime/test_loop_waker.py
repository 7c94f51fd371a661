"""The pipe that wakes an asyncio loop: nothing is lost, nothing stays open."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.control import turn, until
from support.inside import thread_of, wakers_of
from support.native_wakes import begin_launch
from support.run_script import run_script

import llamapipe as lp
from llamapipe._engine.runtime import mailboxes as module
from llamapipe._engine.runtime.mailboxes import AsyncMailbox, ResultDispatcher
from llamapipe._engine.runtime.wakers import LoopWaker

SHORT = lp.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="its default loop cannot watch files")


def n_open() -> int:
    """Open files of this process."""
    gc.collect()
    return len(list(Path("/dev/fd").iterdir()))


def test_what_was_put_comes_in_order_however_rarely_it_rings() -> None:
    async def main() -> list[int]:
        came: list[int] = []
        waker = LoopWaker(asyncio.get_running_loop(), came.append)
        for i in range(100_000):  # more than a pipe holds
            if waker.put(i) or i % 2:
                waker.ring()
        assert not came
        await until(lambda: came)
        assert came == [*range(100_000)]
        assert waker.put(-1)
        waker.dismiss()  # has the loop take the rest
        await until(lambda: not waker._open)
        return came

    assert asyncio.run(main()) == [*range(100_000), -1]


def test_a_ring_that_comes_while_one_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer's read takes both, so what comes behind it has to ring again."""
    read = os.read

    async def main() -> None:
        came: list[int] = []
        waker = LoopWaker(asyncio.get_running_loop(), came.append)

        def read_late(fd: int, n: int) -> bytes:
            if fd == waker._read_end and waker.put(2):
                waker.ring()
            return read(fd, n)

        monkeypatch.setattr(os, "read", read_late)
        assert waker.put(1)
        waker.ring()
        await until(lambda: came)
        monkeypatch.setattr(os, "read", read)
        assert came == [1, 2]
        assert waker.put(3)
        waker.dismiss()
        await until(lambda: not waker._open)
        assert came == [1, 2, 3]

    asyncio.run(main())


def test_what_an_interrupted_answer_leaves_comes_when_the_loop_goes_on() -> None:
    loop = asyncio.new_event_loop()
    came: list[int] = []
    interruptions = [KeyboardInterrupt()]

    def take(item: int) -> None:
        if interruptions:
            raise interruptions.pop()
        came.append(item)

    async def wait() -> None:
        await until(lambda: came)

    waker = LoopWaker(loop, take)
    assert waker.put(1)
    assert not waker.put(2)
    waker.ring()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(wait())
    loop.run_until_complete(wait())
    assert came == [1, 2]
    waker.dismiss()
    loop.run_until_complete(turn())
    loop.close()


def test_a_ring_at_launch_waits_for_it_and_no_longer() -> None:
    """Without a launch, those who wait are woken with the end of the work."""

    async def main() -> None:
        dispatcher = ResultDispatcher(at_launch=True)
        mailbox = AsyncMailbox(asyncio.get_running_loop(), dispatcher)
        (waker,) = wakers_of(dispatcher)
        for launched in (True, False):
            mailbox.put("a")
            dispatcher.flush()
            assert dispatcher.wakes.files == [waker.fd]
            reading = asyncio.ensure_future(mailbox.get())
            await turn(10)
            assert not reading.done()
            if launched:
                begin_launch(dispatcher.wakes)
            else:
                dispatcher.flush(together=True)
            assert await reading == "a"
            assert dispatcher.wakes.files == []
        dispatcher.flush()
        assert dispatcher.wakes.files == []  # it has seen all
        dispatcher.close()

    asyncio.run(main())


def test_files_are_closed_with_their_loop_and_with_the_engine(demo: lp.Model) -> None:
    before = n_open()
    with lp.Engine(demo, n_ctx=64, n_seq_max=2, n_threads=1) as engine:
        alone = engine.generate("a", SHORT).token_ids
        for _ in range(20):
            assert asyncio.run(engine.agenerate("a", SHORT)).token_ids == alone
        engine.generate("a", SHORT)  # the engine thread looks for closed loops when it is idle
        assert n_open() <= before + 4  # at most the last loop's

        async def main() -> None:
            loop = asyncio.get_running_loop()
            async with lp.Engine(demo, n_ctx=64, n_threads=1) as other:
                await other.agenerate("a", SHORT)
                (waker,) = wakers_of(thread_of(other).dispatcher)
            await until(lambda: not waker._open)
            assert not loop.remove_reader(waker._read_end)  # not watched any more
            assert (await engine.agenerate("a", SHORT)).token_ids == alone

        asyncio.run(main())
    assert n_open() <= before


def test_the_next_launch_does_not_write_to_files_of_closed_loops() -> None:
    """Others may have their numbers by then."""
    dispatcher = ResultDispatcher(at_launch=True)

    async def visit() -> None:
        AsyncMailbox(asyncio.get_running_loop(), dispatcher).put("unread")
        dispatcher.flush()

    asyncio.run(visit())
    assert len(dispatcher.wakes.files) == 1
    dispatcher.flush(together=True)  # there is nothing to do
    assert dispatcher.wakes.files == []
    assert not wakers_of(dispatcher)

    asyncio.run(visit())
    assert len(dispatcher.wakes.files) == 1

    async def another() -> None:
        AsyncMailbox(asyncio.get_running_loop(), dispatcher)
        dispatcher.flush()

    asyncio.run(another())
    assert dispatcher.wakes.files == []
    assert len(wakers_of(dispatcher)) == 1


def test_closed_loops_are_forgotten_while_others_work() -> None:
    """An engine that always has something to do never comes to look for them."""
    dispatcher = ResultDispatcher(at_launch=True)
    before = n_open()

    async def visit() -> None:
        AsyncMailbox(asyncio.get_running_loop(), dispatcher).put("unread")
        dispatcher.flush()

    async def main() -> None:
        mailbox = AsyncMailbox(asyncio.get_running_loop(), dispatcher)
        for _ in range(10):
            await asyncio.to_thread(asyncio.run, visit())
            mailbox.put("a")
            dispatcher.flush()
            assert len(wakers_of(dispatcher)) <= 2  # the last one is forgotten when another comes
        dispatcher.close()
        assert [await mailbox.get() for _ in range(10)] == ["a"] * 10

    asyncio.run(main())
    assert n_open() <= before


def test_an_engine_that_ends_while_a_loop_gets_its_waker(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = ResultDispatcher()

    class Late(LoopWaker[object]):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            dispatcher.close()

    monkeypatch.setattr(module, "LoopWaker", Late)

    async def main() -> None:
        before = n_open()
        AsyncMailbox(asyncio.get_running_loop(), dispatcher)
        assert not wakers_of(dispatcher)
        await until(lambda: n_open() <= before)

    asyncio.run(main())


def test_loops_of_several_threads(demo: lp.Model) -> None:
    with lp.Engine(demo, n_ctx=64, n_seq_max=4, n_threads=1) as engine:
        alone = engine.generate("a", SHORT).token_ids

        async def read() -> list[int]:
            return [token async for delta in engine.astream("a", SHORT) for token in delta.token_ids]

        async def main() -> None:
            ways = [asyncio.to_thread(asyncio.run, read()) for _ in range(4)]
            assert await asyncio.gather(read(), *ways) == [alone] * 5

        asyncio.run(main())


def test_a_loop_that_stops_for_good_holds_up_nobody(demo: lp.Model) -> None:
    """Its pipe fills up; the others' streams go on, and the process ends."""
    program = """
import asyncio
import llamapipe as lp
with lp.Model(sys.argv[1]) as model, lp.Engine(model, n_ctx=64, n_seq_max=2, n_threads=1) as engine:
    params = lp.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    loop = asyncio.new_event_loop()
    stream = engine.astream("a", params)
    loop.run_until_complete(stream.__anext__())
    say(len(engine.generate("a", params).token_ids))
say("closed")
loop.close()
"""
    assert run_script(program, demo.path) == "40\nclosed\n"
