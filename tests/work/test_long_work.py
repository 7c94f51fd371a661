"""Work that leaves the event loop: whose comes next, how much at a time, and what may wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.control import PATIENCE_S, turn, until, wait_until

import llamapipe as lp
from llamapipe.errors import QueueFullError
from llamapipe.work.long_work import MOST_CONSTRAINTS, LongWork, is_long, size_of
from llamapipe.work.tenant import Tenant, tenant


def test_long_work_of_one_client_does_not_keep_others_out() -> None:
    async def main() -> None:
        work, opened = LongWork(), threading.Event()

        async def ask(share: str, function: Callable[[], object]) -> object:
            tenant.set(Tenant(share))
            return await work.run(function)

        long = [asyncio.create_task(ask("long", lambda: opened.wait(PATIENCE_S))) for _ in range(20)]
        await turn()
        assert await asyncio.wait_for(ask("other", lambda: tenant.get().share), PATIENCE_S) == "other"
        for task in long[10:]:
            task.cancel()
        opened.set()
        assert await asyncio.gather(*long[:10]) == [True] * 10
        with pytest.raises(ZeroDivisionError):
            await ask("other", lambda: 1 / 0)
        work.close()

    asyncio.run(main())


def test_large_work_waits_for_room() -> None:
    """Only large work does, in the order of its shares' turns, and none overtakes what needs more room."""
    most = 2**24

    async def main() -> None:
        work, begun, opened = LongWork(), threading.Event(), threading.Event()
        order: list[str] = []

        async def ask(share: str, name: str, size: int) -> None:
            tenant.set(Tenant(share))
            await work.run(lambda: order.append(name), size=size)

        def hold() -> None:
            begun.set()
            opened.wait(PATIENCE_S)

        held = asyncio.create_task(work.run(hold, size=most))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        large = [asyncio.create_task(ask("many", f"many {i}", most)) for i in range(3)]
        large += [
            asyncio.create_task(ask("few", "few", most)),
            asyncio.create_task(ask("other", "other", 2**17)),
        ]
        await turn()
        for share in ("many", "few", "other"):
            await asyncio.wait_for(ask(share, f"small of {share}", 2**10), PATIENCE_S)
        assert order == ["small of many", "small of few", "small of other"]
        order.clear()
        opened.set()
        await asyncio.gather(held, *large)
        assert set(order[:3]) == {"many 0", "few", "other"}
        assert order[3:] == ["many 1", "many 2"]
        both = threading.Barrier(2)  # together they are not too large
        await asyncio.gather(*(work.run(both.wait, PATIENCE_S, size=2**21) for _ in range(2)))
        wait_until(lambda: work._threads._size == 0)  # a job is told of before its thread notes its end
        work.close()

    asyncio.run(main())


def test_the_size_of_prompts() -> None:
    assert size_of("a" * 1000) == 1064
    assert size_of([{"role": "user", "content": "a" * 1000}]) > 1000
    assert 2**24 < size_of([{"content": "a"}] * 10**6) < 2**25
    assert size_of([[5, 6], "abc", [], ["ab"], {"x": "a"}]) == 64 * 8 + 5 + 2 + 3 + 1 + 2 + 1  # 8 values
    assert is_long("a" * 9000) and not is_long(["a" * 1000] * 8)


def test_long_constraints_of_a_client_wait_in_number_and_leave_threads_to_short_ones() -> None:
    gate, begun = threading.Event(), threading.Event()

    def compiled(params: lp.SamplingParams) -> str:
        begun.set()
        assert gate.wait(PATIENCE_S)
        return str(params.regex)

    async def twice(work: LongWork, params: lp.SamplingParams) -> None:
        await work.run(compiled, params)
        # What follows needs no compilation, so it is not behind the others.
        await work.run(str, params)
        finished.append(str(params.regex)[-2:])

    finished: list[str] = []

    async def main() -> None:
        work = LongWork()
        texts = [lp.SamplingParams(regex="a" * 2000 + f"{i:02}") for i in range(MOST_CONSTRAINTS + 2)]
        token = tenant.set(Tenant("client"))
        first = asyncio.ensure_future(twice(work, texts[0]))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        waiting = [asyncio.ensure_future(twice(work, params)) for params in texts[1:-1]]
        await turn()
        with pytest.raises(
            QueueFullError, match=f"{MOST_CONSTRAINTS} long schemas or grammars of this client"
        ):
            await work.run(compiled, texts[-1])
        again = [asyncio.ensure_future(twice(work, texts[1])) for _ in range(MOST_CONSTRAINTS)]  # counts once
        await turn()
        assert await work.run(str.upper, "short") == "SHORT"
        assert await work.run(lambda params: params.regex, lp.SamplingParams(regex="b")) == "b"
        tenant.reset(token)
        assert await work.run(lambda params: params.regex, texts[-1]) == texts[-1].regex
        gate.set()
        await asyncio.gather(first, *waiting, *again)
        assert list(dict.fromkeys(finished)) == [f"{i:02}" for i in range(MOST_CONSTRAINTS + 1)]
        tenant.set(Tenant("client"))
        for _ in range(2):  # it is known by now, so it is quick
            gate.clear()
            begun.clear()
            blocked = asyncio.ensure_future(work.run(compiled, texts[-1]))
            await asyncio.to_thread(begun.wait, PATIENCE_S)
            assert await work.run(lambda params: params.regex, texts[0]) == texts[0].regex
            gate.set()
            await blocked
        work.close()

    asyncio.run(main())


class CountingLoop(asyncio.SelectorEventLoop):
    n_timers = 0

    def call_at(self, *arguments: Any, **options: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        self.n_timers += 1
        return super().call_at(*arguments, **options)


def test_many_calls_that_wait_for_threads_take_no_time() -> None:
    """Each with a timer, a thousand took more than half of the event loop's time."""
    work, opened = LongWork(), threading.Event()

    async def several(loop: CountingLoop) -> int:
        tasks = [asyncio.ensure_future(work.run(opened.wait, PATIENCE_S)) for _ in range(200)]
        cancelled = [asyncio.ensure_future(work.run(opened.wait, PATIENCE_S)) for _ in range(20)]
        await until(lambda: loop.n_timers >= 5)
        for task in cancelled:
            task.cancel()
        await asyncio.wait(cancelled)
        opened.set()
        assert all(await asyncio.gather(*tasks))
        return loop.n_timers

    loop = CountingLoop()
    try:
        assert loop.run_until_complete(several(loop)) < 200
    finally:
        loop.close()
        work.close()
