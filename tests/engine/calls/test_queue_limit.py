"""The count of waiting requests, and the threads and tasks that wait for room."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import pytest
from support.control import PATIENCE_S, Worker, all_results, turn, until, wait_until
from support.inside import n_waiting_threads

from llamapipe._engine.calls.queue_limit import QueueLimit
from llamapipe._engine.policy.core import Request
from llamapipe.errors import QueueFullError


def enter(queue: QueueLimit, deadline: float | None = None) -> None:
    """One more that nobody knows."""
    queue.enter(Request([1]), deadline)


def enter_at_once(queue: QueueLimit, n: int = 1) -> None:
    queue.enter_at_once(*(Request([1]) for _ in range(n)))


async def aenter(queue: QueueLimit) -> None:
    await queue.aenter(Request([1]), None)


def leave(queue: QueueLimit, n: int) -> None:
    """Any `n` of those that are in."""
    queue.remove(list(queue._inside.copy())[:n])


def has_left(waiting: Sequence[asyncio.Future[None]], n: int) -> bool:
    return sum(not task.done() for task in waiting) <= n


class TestCount:
    def test_without_a_limit_everybody_enters(self) -> None:
        queue = QueueLimit(None)
        enter_at_once(queue, 1000)
        enter(queue, perf_counter())
        assert queue.try_enter(*(Request([1]) for _ in range(1000)))
        assert queue.n == 2001
        leave(queue, 2001)
        assert queue.n == 0

    def test_several_enter_together_or_not_at_all(self) -> None:
        queue = QueueLimit(3)
        assert queue.try_enter(Request([1]), Request([1]))
        assert not queue.try_enter(Request([1]), Request([1]))
        assert queue.n == 2
        enter_at_once(queue)
        assert queue.n == 3

    def test_a_full_queue_says_what_is_in_it(self) -> None:
        queue = QueueLimit(3)
        enter_at_once(queue, 2)
        with pytest.raises(
            QueueFullError,
            match=r"^max_queue is 3 and the queue has 2: there is no room for 2 more; retry later",
        ):
            enter_at_once(queue, 2)
        assert queue.n == 2

    def test_more_than_fit_at_all(self) -> None:
        with pytest.raises(
            QueueFullError, match=r"^4 requests are submitted at once and max_queue is 3: that never fits"
        ):
            enter_at_once(QueueLimit(3), 4)

    def test_leaving_twice_or_without_having_come_in_is_no_mistake(self) -> None:
        queue = QueueLimit(3)
        a, b, c, d = (Request([1]) for _ in range(4))
        queue.enter_at_once(a, b)
        queue.remove([a, c])
        queue.remove([a])
        assert queue.n == 1
        assert queue.try_enter(c, d)


class TestThreads:
    def test_one_waits_until_there_is_room(self) -> None:
        queue = QueueLimit(1)
        enter(queue)
        waiting = Worker(enter, queue)
        wait_until(lambda: n_waiting_threads(queue) == 1)
        assert waiting.is_alive()
        leave(queue, 1)
        waiting.result()
        assert queue.n == 1

    def test_as_many_enter_as_there_is_room_for(self) -> None:
        queue = QueueLimit(4)
        enter_at_once(queue, 4)
        workers = [Worker(enter, queue) for _ in range(7)]
        wait_until(lambda: n_waiting_threads(queue) == 7)
        leave(queue, 3)
        wait_until(lambda: n_waiting_threads(queue) == 4)
        assert queue.n == 4
        leave(queue, 4)
        all_results(workers)
        assert (queue.n, n_waiting_threads(queue)) == (4, 0)

    @pytest.mark.parametrize("wait_s", [-1.0, 0.0, 0.01])
    def test_a_deadline_ends_the_wait(self, wait_s: float) -> None:
        queue = QueueLimit(1)
        enter(queue, perf_counter() + wait_s)  # there is room: no time is needed
        with pytest.raises(TimeoutError, match="no room came free"):
            enter(queue, perf_counter() + wait_s)
        assert (queue.n, n_waiting_threads(queue)) == (1, 0)

    def test_room_that_comes_with_the_deadline_is_taken(self) -> None:
        """Woken or out of time: which it was, the thread cannot know."""

        class LastMoment(QueueLimit):
            n_tried = 0

            def try_enter(self, *requests: Request) -> bool:
                self.n_tried += 1
                if self.n_tried == 4:  # after the wait
                    self._inside.clear()
                return super().try_enter(*requests)

        queue = LastMoment(1)
        enter(queue)
        enter(queue, perf_counter() + 0.001)
        assert (queue.n, queue.n_tried) == (1, 4)

    def test_who_is_interrupted_when_woken_wakes_another(self) -> None:
        """Ctrl-C in a thread that was just told of room: it does not take it."""
        interrupted: list[threading.Thread] = []

        class Interrupted(QueueLimit):
            def try_enter(self, *requests: Request) -> bool:
                if threading.current_thread() in interrupted:
                    raise KeyboardInterrupt
                return super().try_enter(*requests)

        queue = Interrupted(1)
        enter(queue)
        first = Worker(enter, queue)
        wait_until(lambda: n_waiting_threads(queue) == 1)
        second = Worker(enter, queue)
        wait_until(lambda: n_waiting_threads(queue) == 2)
        interrupted.append(first)
        leave(queue, 1)
        with pytest.raises(KeyboardInterrupt):
            first.result()
        second.result()
        assert queue.n == 1

    def test_the_engine_thread_waits_for_no_caller(self) -> None:
        """A caller that stands still with the lock of the callers, as long as it likes."""
        queue = QueueLimit(1)
        enter(queue)
        with queue._entering:
            Worker(queue.remove, list(queue._inside)).result()
        assert queue.n == 0


class TestTasks:
    def test_a_task_waits_without_blocking_its_loop(self) -> None:
        async def main() -> None:
            queue = QueueLimit(1)
            await aenter(queue)
            waiting = asyncio.ensure_future(aenter(queue))
            await turn()
            assert not waiting.done()
            await asyncio.to_thread(leave, queue, 1)
            await asyncio.wait_for(waiting, PATIENCE_S)
            assert queue.n == 1

        asyncio.run(main())

    def test_as_many_enter_as_there_is_room_for(self) -> None:
        async def main() -> None:
            queue = QueueLimit(2)
            enter_at_once(queue, 2)
            waiting = [asyncio.ensure_future(aenter(queue)) for _ in range(5)]
            await turn()
            for n_left in (3, 1):
                leave(queue, 2)
                await until(partial(has_left, waiting, n_left))
                assert queue.n == 2
            leave(queue, 2)
            await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE_S)
            assert queue.n == 1

        asyncio.run(main())

    def test_a_cancelled_wait_takes_no_room(self) -> None:
        async def main() -> None:
            queue = QueueLimit(1)
            enter_at_once(queue)
            gone, stays = (asyncio.ensure_future(aenter(queue)) for _ in range(2))
            await turn()
            gone.cancel()
            leave(queue, 1)
            await asyncio.wait_for(stays, PATIENCE_S)
            assert (gone.cancelled(), queue.n) == (True, 1)

        asyncio.run(main())

    def test_room_that_comes_before_the_wait_is_noted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def main() -> None:
            queue = QueueLimit(1)
            enter_at_once(queue)
            tried = queue.try_enter

            def try_enter(*requests: Request) -> bool:
                monkeypatch.setattr(queue, "try_enter", tried)
                entered = tried(*requests)
                leave(queue, 1)  # nobody is noted yet
                return entered

            monkeypatch.setattr(queue, "try_enter", try_enter)
            await asyncio.wait_for(aenter(queue), PATIENCE_S)
            assert queue.n == 1

        asyncio.run(main())

    def test_a_closed_loop_is_no_obstacle(self) -> None:
        queue = QueueLimit(1)
        enter_at_once(queue)
        loop = asyncio.new_event_loop()
        task = loop.create_task(aenter(queue))
        loop.run_until_complete(turn())
        task.cancel()
        loop.close()
        waiting = Worker(enter, queue)
        wait_until(lambda: n_waiting_threads(queue) == 1)
        leave(queue, 1)
        waiting.result()
        assert queue.n == 1
        del task


class TestTogether:
    def test_threads_and_tasks_all_get_in_in_the_end(self) -> None:
        queue = QueueLimit(3)
        most, lock = [0], threading.Lock()

        def inside(request: Request) -> None:
            with lock:
                most[0] = max(most[0], queue.n)
            queue.remove([request])

        def thread() -> None:
            for request in [Request([1]) for _ in range(60)]:
                queue.enter(request, perf_counter() + PATIENCE_S)
                inside(request)

        async def task() -> None:
            for request in [Request([1]) for _ in range(60)]:
                await queue.aenter(request, None)
                await turn()
                inside(request)

        async def tasks() -> None:
            await asyncio.wait_for(asyncio.gather(*(task() for _ in range(6))), PATIENCE_S)

        calls: list[Callable[[], Any]] = [thread] * 6 + [lambda: asyncio.run(tasks())] * 2
        all_results([Worker(call) for call in calls])
        assert (queue.n, n_waiting_threads(queue)) == (0, 0)
        assert 1 <= most[0] <= 3
