"""The engine from asyncio: many tasks, cancellation at every point, several event loops, loops that go away."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from time import perf_counter
from typing import Any

import pytest
from support.backends import BOUND
from support.clock import Clock
from support.control import PATIENCE_S, Gate, Worker, all_results, held, turn, wait_until
from support.inside import queue_of
from support.plain import PlainLoop, greedy

import llamapipe as lp
from llamapipe.errors import EngineClosedError, InvalidRequestError, QueueFullError
from llamapipe.streams import BUFFER_TOKENS

MakeEngine = Callable[..., lp.Engine]

PROMPT = "Once upon a time there was"
OTHER = "In a house near the mill"


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine in a new event loop, in debug mode: what it complains about is an error."""
    return asyncio.run(asyncio.wait_for(main, PATIENCE_S), debug=True)


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls what blocks without blocking the event loop."""
    return await asyncio.to_thread(function, *arguments)


async def tokens_of(stream: lp.AsyncStream) -> list[int]:
    return [token async for delta in stream for token in delta.token_ids]


class TestGenerate:
    def test_equals_the_blocking_call(self, engine: lp.Engine) -> None:
        expected = engine.generate([PROMPT, OTHER], [greedy(9), greedy(14)])

        async def main() -> None:
            out = await engine.agenerate(PROMPT, greedy(9))
            assert (out.text, out.token_ids) == (expected[0].text, expected[0].token_ids)
            assert out.finish_reason == "length"
            outs = await engine.agenerate([PROMPT, OTHER], [greedy(9), greedy(14)])
            assert [o.token_ids for o in outs] == [o.token_ids for o in expected]

        run(main())

    def test_tasks_share_steps(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=4, prefix_cache=False)

        async def main() -> None:
            with held(engine):
                tasks = [asyncio.ensure_future(engine.agenerate(PROMPT, greedy(30))) for _ in range(4)]
                await turn()  # they run until they wait
            outs = await asyncio.gather(*tasks)
            assert len({out.text for out in outs}) == 1

        run(main())
        assert engine.stats().steps == 30

    def test_bad_arguments_raise_at_the_call(self, engine: lp.Engine) -> None:
        async def main() -> None:
            with pytest.raises(TypeError):
                await engine.agenerate(3)  # type: ignore[call-overload]
            with pytest.raises(ValueError, match="timeout"):
                await engine.agenerate(PROMPT, timeout=-1)
            with pytest.raises(ValueError, match="timeout"):
                engine.astream(PROMPT, timeout=float("nan"))
            with pytest.raises(TypeError):
                engine.astream(None)  # type: ignore[arg-type]

        run(main())


class TestIterCompleted:
    def test_completions_as_they_finish(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=2)
        prompts = ["" if i == 7 else f"{PROMPT} {i}" for i in range(40)]
        expected = [engine.generate(p, greedy(3)).token_ids for p in prompts if p]

        async def main() -> None:
            read: list[int] = []

            async def feed() -> AsyncIterator[str]:
                for i, prompt in enumerate(prompts):
                    read.append(i)
                    yield prompt

            seen: dict[int, Any] = {}
            async for index, out in engine.aiter_completed(feed(), greedy(3), n_ahead=4, on_error="return"):
                seen[index] = out
                assert len(read) <= len(seen) + 4 + 1
            assert isinstance(seen.pop(7), InvalidRequestError)
            assert [seen[i].token_ids for i in sorted(seen)] == expected

        run(main())

    def test_a_feed_that_waits_holds_up_no_completion(self, engine: lp.Engine) -> None:
        async def main() -> None:
            received = asyncio.Event()

            async def feed() -> AsyncIterator[str]:
                yield PROMPT
                await received.wait()  # set by the reader, when it has the first completion
                yield OTHER

            indices = []
            async for index, _ in engine.aiter_completed(feed(), greedy(3)):
                indices.append(index)
                received.set()
            assert indices == [0, 1]

        run(main())

    def test_nothing_is_left_after_a_close_a_cancel_or_an_error(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=2)

        def idle() -> bool:
            return engine.stats().n_active == engine.stats().n_queued == 0 and queue_of(engine).n == 0

        async def main() -> None:
            results = engine.aiter_completed([PROMPT] * 100, [greedy(3), *[greedy(200)] * 99])
            await anext(results)
            await results.aclose()
            await in_thread(wait_until, idle)

            async def read() -> None:
                async for _ in engine.aiter_completed([PROMPT] * 100, greedy(200)):
                    pass

            task = asyncio.ensure_future(read())
            await in_thread(wait_until, lambda: engine.stats().n_active == 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await in_thread(wait_until, idle)

            with pytest.raises(InvalidRequestError, match=r"\(prompt 1 of the list\)"):
                async for _ in engine.aiter_completed([PROMPT, ""], greedy(200)):
                    pass
            await in_thread(wait_until, idle)
            with pytest.raises(TimeoutError):
                async for _ in engine.aiter_completed([PROMPT] * 9, greedy(200), timeout=0):
                    pass
            await in_thread(wait_until, idle)

            async def broken() -> AsyncIterator[str]:
                yield PROMPT
                raise OSError("the feed failed")

            with pytest.raises(OSError, match="the feed failed"):
                async for _ in engine.aiter_completed(broken(), greedy(200)):
                    pass
            await in_thread(wait_until, idle)

        run(main())

    def test_one_params_for_each_prompt(self, engine: lp.Engine) -> None:
        async def lengths(n_params: int) -> list[int]:
            params = [greedy(n + 1) for n in range(n_params)]
            completions = {i: out async for i, out in engine.aiter_completed([PROMPT] * 3, params)}
            return [completions[i].n_completion_tokens for i in range(3)]

        assert run(lengths(3)) == [1, 2, 3]
        with pytest.raises(ValueError, match="params has 2 items"):
            run(lengths(2))
        with pytest.raises(ValueError, match="there are 3 prompts"):
            run(lengths(4))
        with pytest.raises(TypeError, match="iterable of prompts"):
            engine.aiter_completed(PROMPT)


class TestStream:
    def test_equals_the_blocking_stream(self, engine: lp.Engine) -> None:
        expected = list(engine.stream(PROMPT, greedy(40, stop=["zzz"])))

        async def main() -> list[lp.Delta]:
            return [delta async for delta in engine.astream(PROMPT, greedy(40, stop=["zzz"]))]

        assert run(main()) == expected

    def test_starts_with_its_first_delta(self, engine: lp.Engine) -> None:
        async def main() -> None:
            stream = engine.astream(PROMPT, greedy(5))
            assert "not started" in repr(stream)
            assert (await in_thread(engine.stats)).n_requests == 0
            await anext(stream)
            assert "open" in repr(stream)
            assert (await in_thread(engine.stats)).n_requests == 1
            await stream.aclose()
            assert "done" in repr(stream)

        run(main())

    def test_closed_before_its_start(self, engine: lp.Engine) -> None:
        async def main() -> None:
            stream = engine.astream(PROMPT, greedy(5))
            await stream.aclose()
            assert await tokens_of(stream) == []
            async with engine.astream(PROMPT, greedy(5)) as other:
                pass
            assert await tokens_of(other) == []

        run(main())
        assert engine.stats().n_requests == 0

    def test_slow_reader_pauses_alone(self, engine: lp.Engine, loop: PlainLoop) -> None:
        expected = loop.greedy(engine.model.tokenize(PROMPT), 200)

        async def main() -> None:
            slow = engine.astream(PROMPT, greedy(200))
            first = await anext(slow)
            outs = await engine.agenerate([OTHER] * 3, greedy(200))
            assert len(outs) == 3
            # It pauses 64 tokens ahead, or one later if the first was read before that.
            await in_thread(wait_until, lambda: engine.stats().n_completion_tokens >= 600 + BUFFER_TOKENS)
            assert (await in_thread(engine.stats)).n_completion_tokens <= 600 + BUFFER_TOKENS + 1
            assert engine.stats().n_active == 1
            assert [*first.token_ids, *await tokens_of(slow)] == expected

        run(main())

    def test_gives_its_slot_up_and_comes_back(self, make_engine: MakeEngine, loop: PlainLoop) -> None:
        engine = make_engine(n_seq_max=1, n_ubatch=32)
        texts = [PROMPT, OTHER, "The owl"]

        async def main() -> list[list[int]]:
            streams = [engine.astream(text, greedy(150)) for text in texts]
            outputs: list[list[int]] = [[] for _ in texts]
            for _ in range(150):
                for stream, output in zip(streams, outputs, strict=True):
                    output.extend((await anext(stream)).token_ids)
            return outputs

        for text, output in zip(texts, run(main()), strict=True):
            assert len(output) == 150
            assert loop.agrees(engine.model.tokenize(text), output, BOUND)
        assert engine.stats().n_preempted >= 2


async def cancel_task(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class TestCancel:
    @pytest.mark.parametrize("call", ["agenerate", "list", "astream", "wait_for", "timeout"])
    @pytest.mark.parametrize("n_steps", [0, 1, 2, 3, 4])
    def test_task_within_one_step(
        self, make_engine: MakeEngine, clock: Clock, call: str, n_steps: int
    ) -> None:
        """The prompt takes three steps. The step that runs is the last one."""
        engine = make_engine(n_batch=8, n_ubatch=8)
        ids = engine.model.tokenize(PROMPT)[:20]
        stop_waiting = asyncio.Event()

        async def impatient() -> None:
            waiting = asyncio.ensure_future(engine.agenerate(ids, greedy(None)))
            await stop_waiting.wait()
            await asyncio.wait_for(waiting, 0)

        async def main() -> None:
            clock.set_timers_of(asyncio.get_running_loop())
            with Gate(engine) as gate:
                work: Awaitable[Any]
                if call == "agenerate":
                    work = engine.agenerate(ids, greedy(None))
                elif call == "list":
                    work = engine.agenerate([ids], greedy(None))
                elif call == "astream":
                    work = tokens_of(engine.astream(ids, greedy(None)))
                elif call == "wait_for":
                    work = impatient()
                else:
                    work = engine.agenerate(ids, greedy(None), timeout=60)
                task = asyncio.ensure_future(work)
                await in_thread(gate.wait)
                await in_thread(gate.step, n_steps)
                if call in ("wait_for", "timeout"):
                    stop_waiting.set()
                    clock.pass_time(60 if call == "timeout" else 0)
                    with pytest.raises((TimeoutError, asyncio.TimeoutError)):
                        await task
                else:
                    await cancel_task(task)
                gate.open()
                stats = engine.stats()
                assert (stats.n_active, stats.n_queued) == (0, 0)
                assert stats.steps <= n_steps + 1

        run(main())
        engine.check_integrity()

    @pytest.mark.parametrize("how", ["close", "cancel", "drop", "leave"])
    @pytest.mark.parametrize("n_steps", [1, 2])
    def test_stream_within_one_step(self, engine: lp.Engine, how: str, n_steps: int) -> None:
        async def main() -> None:
            with Gate(engine) as gate:
                stream = engine.astream(PROMPT, greedy(None))
                first = asyncio.ensure_future(anext(stream))
                await in_thread(gate.wait)
                await in_thread(gate.step, n_steps)
                assert len((await first).token_ids) == 1
                del first
                if how == "close":
                    await stream.aclose()
                elif how == "cancel":
                    stream.cancel()
                elif how == "leave":
                    async with stream:
                        pass
                if how == "drop":
                    del stream
                    gc.collect()
                else:
                    assert await tokens_of(stream) == []
                gate.open()
                stats = engine.stats()
                assert (stats.steps, stats.n_active) == (n_steps + 1, 0)

        run(main())

    def test_breaking_out_of_a_loop(self, engine: lp.Engine) -> None:
        async def main() -> None:
            async for delta in engine.astream(PROMPT, greedy(None)):
                assert delta.token_ids
                break
            gc.collect()
            assert engine.stats().n_active == 0

        run(main())

    def test_in_the_engines_queue(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=1)

        async def main() -> None:
            with Gate(engine) as gate:
                busy = asyncio.ensure_future(engine.agenerate(OTHER, greedy(5)))
                await in_thread(gate.wait)
                tasks = [asyncio.ensure_future(engine.agenerate(PROMPT, greedy(None))) for _ in range(3)]
                await turn()
                for task in tasks:
                    await cancel_task(task)
                gate.open()
                assert len((await busy).token_ids) == 5

        run(main())
        assert engine.stats().steps == 5

    def test_stream_after_its_task_was_cancelled(self, engine: lp.Engine) -> None:
        """Cancelling who waits for a delta ends the stream."""

        async def main() -> None:
            with Gate(engine) as gate:
                stream = engine.astream(PROMPT, greedy(None))
                task = asyncio.ensure_future(anext(stream))
                await in_thread(gate.wait)
                await cancel_task(task)
                gate.open()
                assert await tokens_of(stream) == []
                assert engine.stats().n_active == 0

        run(main())

    def test_timeout_of_a_stream(self, engine: lp.Engine) -> None:
        async def main() -> None:
            with Gate(engine) as gate:
                stream = engine.astream(PROMPT, greedy(None), timeout=0.01)
                with pytest.raises(TimeoutError, match="timeout"):
                    await anext(stream)
                assert await tokens_of(stream) == []
                gate.open()
            assert engine.stats().n_active == 0

        run(main())

    def test_timeout_of_a_slow_reader(self, engine: lp.Engine) -> None:
        """What came in time but was not read does not put the end off; what was finished in time can be read."""

        async def main() -> None:
            for n, ends in ((None, True), (20, False)):
                n_before = engine.stats().n_completion_tokens
                stream = engine.astream(PROMPT, greedy(n), timeout=PATIENCE_S)
                await anext(stream)
                await in_thread(wait_until, lambda n=n_before: engine.stats().n_completion_tokens >= n + 20)
                stream._deadline = perf_counter()  # it passes now
                if ends:
                    with pytest.raises(TimeoutError):
                        await anext(stream)
                else:
                    assert len(await tokens_of(stream)) == 19
            assert engine.stats().n_active == 0

        run(main())

    def test_one_bad_prompt_of_a_list_starts_nothing(self, engine: lp.Engine) -> None:
        async def main() -> None:
            with pytest.raises(ValueError, match="512"):
                await engine.agenerate([[5], [512]])

        run(main())
        assert engine.stats().n_requests == 0

    def test_at_random_moments(self, engine: lp.Engine, loop: PlainLoop) -> None:
        """Rounds of tasks cancelled after a random number of turns of the event loop; the others are right."""
        rng = random.Random(1)
        expected = loop.greedy(engine.model.tokenize(PROMPT), 30)

        async def streamed() -> list[int]:
            return await tokens_of(engine.astream(PROMPT, greedy(30)))

        async def generated() -> list[int]:
            out: lp.Completion = await engine.agenerate(PROMPT, greedy(30))
            return out.token_ids

        async def main() -> None:
            for _ in range(12):
                tasks = [asyncio.ensure_future(rng.choice([streamed, generated])()) for _ in range(10)]
                for task in rng.sample(tasks, 5):
                    await turn(rng.randrange(8))
                    task.cancel()
                for result in await asyncio.gather(*tasks, return_exceptions=True):
                    assert isinstance(result, asyncio.CancelledError) or result == expected
                engine.check_integrity()
            assert engine.stats().n_active == 0

        run(main())


class TestQueue:
    def test_a_full_queue_refuses_who_does_not_wait(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=1, max_queue=1)

        async def main() -> None:
            with Gate(engine) as gate:
                first = asyncio.ensure_future(engine.agenerate(OTHER, greedy(2)))
                await in_thread(gate.wait)
                second = asyncio.ensure_future(engine.agenerate(OTHER, greedy(2)))
                await turn()
                with pytest.raises(QueueFullError, match="max_queue is 1"):
                    await engine.agenerate(OTHER, greedy(2), block=False)
                with pytest.raises(QueueFullError):  # at the call: a web service can still set the status
                    engine.astream(OTHER, greedy(2), block=False)
                waiting = asyncio.ensure_future(engine.agenerate(OTHER, greedy(2)))
                streaming = asyncio.ensure_future(tokens_of(engine.astream(OTHER, greedy(2))))
                await turn()
                with pytest.raises(TimeoutError):
                    await engine.agenerate(OTHER, greedy(2), timeout=0.01)
                with pytest.raises(TimeoutError):
                    await anext(engine.astream(OTHER, greedy(2), timeout=0.01))
                dropped = asyncio.ensure_future(engine.agenerate(OTHER, greedy(2)))
                await turn()
                await cancel_task(dropped)
                assert queue_of(engine).n == 1
                gate.open()
                expected = (await first).token_ids
                assert (await second).token_ids == expected
                assert [(await waiting).token_ids, await streaming] == [expected] * 2

        run(main())
        assert engine.stats().n_requests == 4
        assert queue_of(engine).n == 0

    def test_streams_that_do_not_wait_start_at_the_call(
        self, make_engine: MakeEngine, demo: lp.Model
    ) -> None:
        """A conversation that is rendered in a thread is refused at the call, too, if the queue is full then."""
        engine = make_engine(demo, n_seq_max=1, max_queue=1)
        # Of chats: one with another truncation takes long.
        long: Any = {"truncation": "auto", "block": False}

        async def main() -> None:
            with Gate(engine) as gate:
                first = engine.astream(OTHER, greedy(2), block=False)
                await in_thread(gate.wait)
                second = engine.astream(OTHER, greedy(2), block=False)
                assert queue_of(engine).n == 1
                for refused in (
                    lambda: engine.astream(OTHER, greedy(2), block=False),
                    lambda: engine.astream_chat("Hello", greedy(2), block=False),
                    lambda: engine.astream_chat("Hello", greedy(2), **long),
                ):
                    with pytest.raises(QueueFullError, match="max_queue is 1"):
                        refused()
                dropped = second
                del second
                await dropped.aclose()
                gate.open()
                assert len(await tokens_of(first)) == 2

        run(main())
        engine.check_integrity()
        outside = engine.astream(OTHER, greedy(2), block=False)  # no task: it starts with its first delta
        assert run(tokens_of(outside))

    def test_more_than_fits(self, make_engine: MakeEngine) -> None:
        """Tasks and threads wait for room side by side; a list longer than the queue trickles in."""
        engine = make_engine(n_seq_max=2, max_queue=2)
        expected = engine.generate(PROMPT, greedy(4)).token_ids

        async def main() -> list[lp.Completion]:
            outs, together = await asyncio.gather(
                asyncio.gather(*[engine.agenerate(PROMPT, greedy(4)) for _ in range(40)]),
                engine.agenerate([PROMPT] * 20, greedy(4)),
            )
            return [*outs, *together]

        workers = [Worker(engine.generate, PROMPT, greedy(4)) for _ in range(20)]
        workers += [Worker(run, main()) for _ in range(2)]
        results = all_results(workers)
        outs = results[:20] + results[20] + results[21]
        assert [out.token_ids for out in outs] == [expected] * 140
        assert queue_of(engine).n == 0

    def test_closed_while_waiting(self, make_engine: MakeEngine) -> None:
        for drain in (True, False):
            engine = make_engine(n_seq_max=1, max_queue=1)

            async def main(engine: lp.Engine = engine, drain: bool = drain) -> None:
                with Gate(engine) as gate:
                    running = asyncio.ensure_future(engine.agenerate(OTHER, greedy(3)))
                    await in_thread(gate.wait)
                    queued = asyncio.ensure_future(engine.agenerate(OTHER, greedy(3)))
                    await turn()
                    waiting = [asyncio.ensure_future(engine.agenerate(OTHER, greedy(3))) for _ in range(5)]
                    await turn()
                    closing = asyncio.ensure_future(engine.aclose(drain))
                    await in_thread(wait_until, lambda: engine.closed)
                    gate.open()
                    await closing
                    reasons = [(await task).finish_reason for task in (running, queued)]
                    assert reasons == (["length"] * 2 if drain else ["cancelled"] * 2)
                    for task in waiting:
                        with pytest.raises(EngineClosedError):
                            await task

            run(main())


class TestClose:
    def test_async_with_drains(self, tiny: lp.Model) -> None:
        async def main() -> list[lp.Completion]:
            async with lp.Engine(tiny, n_ctx=64, n_seq_max=2, n_threads=1) as engine:
                tasks = [asyncio.ensure_future(engine.agenerate(PROMPT, greedy(20))) for _ in range(5)]
                await turn()
            assert engine.closed
            with pytest.raises(EngineClosedError):
                await engine.agenerate(PROMPT)
            with pytest.raises(EngineClosedError):
                engine.astream(PROMPT)
            await engine.aclose()
            outs: list[lp.Completion] = await asyncio.gather(*tasks)
            return outs

        outs = run(main())
        assert [out.finish_reason for out in outs] == ["length"] * 5
        assert len({out.text for out in outs}) == 1

    def test_async_with_left_by_an_exception_cancels(self, tiny: lp.Model) -> None:
        async def main() -> None:
            engine = lp.Engine(tiny, n_ctx=512, n_seq_max=2, n_threads=1)
            tasks: list[asyncio.Future[Any]] = []

            async def leave() -> None:
                async with engine:
                    tasks.extend(
                        asyncio.ensure_future(engine.agenerate(PROMPT, greedy(None))) for _ in range(5)
                    )
                    await turn()
                    with Gate(engine) as gate:
                        await in_thread(gate.wait)
                        raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await leave()
            outs = await asyncio.gather(*tasks)
            assert "cancelled" in {out.finish_reason for out in outs}

        run(main())

    def test_from_a_thread_while_tasks_wait(self, make_engine: MakeEngine) -> None:
        for drain in (True, False):
            engine = make_engine(n_seq_max=2)

            async def main(engine: lp.Engine = engine, drain: bool = drain) -> None:
                tasks = [asyncio.ensure_future(engine.agenerate(PROMPT, greedy(60))) for _ in range(6)]
                streams = [
                    asyncio.ensure_future(tokens_of(engine.astream(PROMPT, greedy(60)))) for _ in range(6)
                ]
                await turn()
                await in_thread(engine.close, drain)
                outs = await asyncio.gather(*tasks)
                lengths = [len(tokens) for tokens in await asyncio.gather(*streams)]
                if drain:
                    assert [len(out.token_ids) for out in outs] + lengths == [60] * 12

            run(main())

    def test_blocking_close_in_the_event_loop(self, make_engine: MakeEngine) -> None:
        """It needs nothing of the loop that it blocks."""
        engine = make_engine(n_seq_max=2)

        async def main() -> None:
            tasks = [asyncio.ensure_future(engine.agenerate(PROMPT, greedy(20))) for _ in range(4)]
            streams = [engine.astream(PROMPT, greedy(200)) for _ in range(2)]
            first = [await anext(stream) for stream in streams]
            engine.close()
            assert [(await task).finish_reason for task in tasks] == ["length"] * 4
            assert [len(await tokens_of(stream)) for stream in streams] == [199] * 2
            assert len(first) == 2

        run(main())


class TestLoops:
    def test_two_at_once(self, engine: lp.Engine, loop: PlainLoop) -> None:
        """Each task gets its own deltas in its own loop."""
        texts = [PROMPT, OTHER, "The owl", "A"]
        expected = [loop.greedy(engine.model.tokenize(text), 40) for text in texts]

        async def main() -> list[list[int]]:
            return await asyncio.gather(*[tokens_of(engine.astream(t, greedy(40))) for t in texts * 5])

        for outputs in all_results([Worker(run, main()) for _ in range(3)]):
            assert outputs == expected * 5

    def test_one_after_the_other(self, engine: lp.Engine) -> None:
        outs = [run(engine.agenerate(PROMPT, greedy(5))).token_ids for _ in range(5)]
        assert outs == [outs[0]] * 5

    @pytest.mark.parametrize("running", [True, False])
    def test_closed_with_an_open_stream(self, engine: lp.Engine, running: bool) -> None:
        """It cannot be read any more: it ends with its next delta, or when another request needs its slot."""
        streams = []

        async def main() -> None:
            stream = engine.astream(PROMPT, greedy(None))
            await anext(stream)
            streams.append(stream)
            if not running:
                await in_thread(wait_until, lambda: engine.stats().n_completion_tokens >= BUFFER_TOKENS)

        run(main())
        outs = engine.generate([OTHER] * 4, greedy(100))
        assert len({out.text for out in outs}) == 1
        engine.check_integrity()
        if running:
            wait_until(lambda: engine.stats().n_active in (0, 1))
        streams.clear()
        gc.collect()
        assert engine.stats().n_active == 0

    def test_closed_with_a_request_in_a_step(self, engine: lp.Engine) -> None:
        """The loop stops while a step computes; what the step delivers finds it closed."""
        kept: list[Any] = []
        with Gate(engine) as gate:
            event_loop = asyncio.new_event_loop()
            stream = engine.astream(PROMPT, greedy(None))
            kept.append(stream)

            async def main() -> None:
                waiting = stream._next()  # not through __anext__, which would cancel when it is thrown away
                kept.append(waiting)
                waiting.send(None)

            event_loop.run_until_complete(main())
            gate.wait()
            event_loop.close()
            gate.open()
            wait_until(lambda: engine.stats().n_active == 0)
            assert engine.stats().steps == 1
        kept[1].close()
        assert len(engine.generate(OTHER, greedy(5)).token_ids) == 5

    def test_threads_and_tasks_together(self, engine: lp.Engine, loop: PlainLoop) -> None:
        expected = loop.greedy(engine.model.tokenize(PROMPT), 30)
        barrier = threading.Barrier(3)

        async def main() -> list[list[int]]:
            return await asyncio.gather(*[tokens_of(engine.astream(PROMPT, greedy(30))) for _ in range(10)])

        def tasks() -> list[list[int]]:
            barrier.wait()
            result: list[list[int]] = run(main())
            return result

        def calls() -> list[list[int]]:
            barrier.wait()
            return [engine.generate(PROMPT, greedy(30)).token_ids for _ in range(5)]

        results = all_results([Worker(tasks), Worker(calls), Worker(calls)])
        assert [tokens for some in results for tokens in some] == [expected] * 20


class TestTwins:
    """Calls for asyncio that give what those for threads give."""

    def test_a_generation_gives_the_same_tokens(self, engine: lp.Engine) -> None:
        expected = engine.generate(PROMPT, greedy(9)).token_ids

        async def main() -> None:
            async with await engine.astart(PROMPT, greedy(9)) as generation:
                assert isinstance(generation, lp.AsyncGeneration)
                assert [token.id async for token in generation] == expected
                assert generation.finish_reason == "length" and await generation.next() is None
                generation.trim(generation.n_tokens - 4)
                fork = generation.fork()
                again = [await generation.next() for _ in range(4)]
                assert [token.id for token in again if token is not None] == expected[-4:]
                forked = await fork.next()
                assert forked is not None and forked.id == expected[-4]
                await fork.aclose()
                assert fork.finish_reason == "cancelled" and await fork.next() is None

        run(main())

    def test_a_snapshot_is_restored(self, engine: lp.Engine) -> None:
        expected = engine.generate(PROMPT, greedy(9)).token_ids

        async def main() -> None:
            async with await engine.astart(PROMPT, greedy(9)) as generation:
                for _ in range(3):
                    await generation.next()
                snapshot = await generation.snapshot()
            async with await engine.arestore(snapshot, greedy(6)) as restored:
                assert [token.id async for token in restored] == expected[3:]
            with pytest.raises(InvalidRequestError, match="are not a snapshot"):
                await engine.arestore(b"other bytes")

        run(main())

    def test_cancelling_a_task_that_waits_for_a_token_ends_the_generation(self, engine: lp.Engine) -> None:
        async def main() -> None:
            generation = await engine.astart(PROMPT, greedy(9))
            with held(engine):
                waiting = asyncio.ensure_future(generation.next())
                await turn()
                with pytest.raises(RuntimeError, match="one task at a time"):
                    await generation.next()
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            assert generation.finish_reason == "cancelled"

        run(main())

    def test_a_cached_prefix(self, engine: lp.Engine) -> None:
        prompt = list(range(5, 45))

        async def main() -> None:
            with await engine.acache_prefix(prompt) as prefix:
                assert prefix.n_tokens == len(prompt) and prefix.n_bytes > 0
            with pytest.raises(InvalidRequestError, match="fewer than 16"):
                await engine.acache_prefix(prompt[:5])

        run(main())

    def test_scores_are_those_for_threads(self, engine: lp.Engine) -> None:
        tokens = list(range(5, 25))

        async def main() -> list[Any]:
            return [
                await engine.ascore_tokens(tokens),
                await engine.ascore_tokens([tokens, tokens[:9]]),
                await engine.aperplexity(tokens),
                await engine.ascore([1, 5], [[7], [8, 9]]),
            ]

        single, pair, perplexity, continuations = run(main())
        assert single.logprobs == pytest.approx(engine.score_tokens(tokens).logprobs, abs=BOUND)
        assert [len(score.logprobs) for score in pair] == [19, 8]
        assert perplexity == pytest.approx(engine.perplexity(tokens), rel=BOUND)
        assert [len(score.logprobs) for score in continuations] == [1, 2]

    def test_a_progress_bar_is_shown(self, engine: lp.Engine) -> None:
        pytest.importorskip("tqdm")

        async def main() -> None:
            assert len(await engine.agenerate([PROMPT, OTHER], greedy(3), progress=True)) == 2
            completed = engine.aiter_completed([PROMPT, OTHER], greedy(3), progress=True)
            assert sorted([index async for index, _ in completed]) == [0, 1]

        run(main())


def test_tasks_of_other_libraries_are_told_what_to_call(make_engine: Callable[..., lp.Engine]) -> None:
    """As trio runs them: without an event loop of asyncio."""
    engine = make_engine()
    params = lp.SamplingParams(max_tokens=2)
    for coroutine in (
        engine.agenerate([5, 6], params),
        engine.agenerate(["a", "b"], params),
        engine.ascore([5, 6], [[7]]),
        engine.aperplexity([5, 6, 7]),
        anext(engine.aiter_completed(["a"], params)),
        engine.astream([5, 6], params).__anext__(),
    ):
        with pytest.raises(RuntimeError, match=r"trio\.to_thread\.run_sync\(engine\.generate"):
            coroutine.send(None)
        coroutine.close()
    assert len(engine.generate([5, 6], params).token_ids) == 2
