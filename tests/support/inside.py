"""The inside of engines and pipelines, as tests need it: the one place in the tests that knows private attributes.

A test that has to look behind the public names asks a function of this file. When the inside changes, so does this
file, and the tests stay as they are. The functions return the owners themselves, so the rules of their threads hold:
change a loop, scheduler or executor of a running engine only through ``thread_of(engine).ask``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import llamapipe as lp
from llamapipe._engine.runtime.executor import StepExecutor
from llamapipe.native.load import native

if TYPE_CHECKING:
    from llamapipe._engine.calls.queue_limit import QueueLimit
    from llamapipe._engine.policy.core import Cells, Request
    from llamapipe._engine.policy.prefix_tree import PrefixTree
    from llamapipe._engine.policy.scheduler import Scheduler
    from llamapipe._engine.runtime.disk_cache import DiskCache
    from llamapipe._engine.runtime.executor import Executor
    from llamapipe._engine.runtime.inbox import Inbox
    from llamapipe._engine.runtime.loop import EngineLoop
    from llamapipe._engine.runtime.mailboxes import AsyncMailbox, ResultDispatcher
    from llamapipe._engine.runtime.thread import EngineThread
    from llamapipe._engine.runtime.wakers import LoopWaker
    from llamapipe.llama.embedding_context import EmbeddingContext
    from llamapipe.llama.native_pipeline import NativePipeline


# ---- from the engine to its parts
def thread_of(engine: lp.Engine) -> EngineThread:
    """The engine thread: ``ask`` and ``call`` run functions on it between two steps."""
    return engine._engine_thread


def loop_of(engine: lp.Engine) -> EngineLoop:
    """The loop that plans, launches and delivers steps."""
    return engine._engine_thread.loop


def disk_cache_of(engine: lp.Engine) -> DiskCache:
    """The prefix cache of an engine with ``cache_dir`` on disk."""
    cache = loop_of(engine)._disk
    assert cache is not None
    return cache


def inbox_of(engine: lp.Engine) -> Inbox:
    """The commands that the loop has not executed yet; any thread may count them."""
    return loop_of(engine).inbox


def scheduler_of(engine: lp.Engine) -> Scheduler:
    """The loop's scheduler."""
    return loop_of(engine)._scheduler


def executor_of(engine: lp.Engine) -> Executor:
    """What runs the loop's steps now: a ``Gate`` while one stands before the engine."""
    return loop_of(engine)._executor


def step_executor_of(engine: lp.Engine) -> StepExecutor:
    """The executor over the native pipeline."""
    executor = executor_of(engine)
    assert isinstance(executor, StepExecutor), f"{executor!r} runs the steps"
    return executor


def pipeline_of(owner: lp.Engine | lp.Pipeline) -> NativePipeline:
    """The native pipeline of an engine, or of a public pipeline."""
    return owner._pipeline if isinstance(owner, lp.Pipeline) else step_executor_of(owner).pipeline


def fail_next(pipeline: NativePipeline, stage: str, code: int = -3) -> None:
    """The next ``"launch"``, ``"rows"`` or ``"copy"`` of the pipeline fails with this code."""
    lib = lib_for_tests()
    lib.lp_fail_next(pipeline.handle, getattr(lib, f"LP_FAULT_{stage.upper()}"), code)


def lib_for_tests() -> Any:
    """The native library with the entries that only tests call; skips the test where it was built without them."""
    lib = native().lib
    if not hasattr(lib, "lp_fail_next"):
        pytest.skip("the native library was built without testing=on: run python build_native.py")
    return lib


def embedding_context_of(embedder: lp.Embedder) -> EmbeddingContext:
    """The context of an embedder, which its thread owns."""
    return embedder._worker._context


def queue_of(engine: lp.Engine) -> QueueLimit:
    """The requests that were accepted and have no slot yet."""
    return engine._queue


# ---- counters and states
def n_steps_of(engine: lp.Engine) -> int:
    """Steps computed so far. Does not ask the engine thread, so read it while a step is held."""
    return loop_of(engine)._n_steps


def n_requests_of(engine: lp.Engine) -> int:
    """Requests the loop has accepted so far. Does not ask the engine thread, which that would wake."""
    return loop_of(engine)._n_requests


def n_decoding_of(engine: lp.Engine) -> int:
    """Requests that decode; for the engine thread."""
    return len(scheduler_of(engine)._running.decoding)


def n_late_of(engine: lp.Engine) -> int:
    """Requests whose tokens come after their steps. Does not ask the engine thread."""
    return len(loop_of(engine)._late.requests)


def n_waiting_threads(queue: QueueLimit) -> int:
    """Threads that wait for room in the queue."""
    return sum(not isinstance(waiter, partial) for waiter in list(queue._waiters))


def request_of(handle: lp.Stream | lp.AsyncStream | lp.Generation) -> Request:
    """The request that a stream or a generation reads."""
    return handle._request


def wakers_of(dispatcher: ResultDispatcher) -> list[LoopWaker[deque[tuple[AsyncMailbox, object]]]]:
    """The wakers of the event loops that wait for results."""
    return list(dispatcher._wakers.values())


def children_of(model: lp.Model) -> Mapping[int, object]:
    """What keeps the model open, by id: its contexts and engines."""
    return model._children


def forget_children(model: lp.Model) -> None:
    """Lets the model close although a child was never closed. The test has freed it."""
    model._children.clear()


def told_and_cached(engine: lp.Engine, block_size: int) -> tuple[int, set[tuple[int, ...]]]:
    """Puts all changes so far. How many batches of KV events were put; every prefix of whole blocks in the tree."""
    loop = loop_of(engine)

    def look() -> tuple[int, set[tuple[int, ...]]]:
        assert loop._kv_events is not None
        loop._kv_events.flush()
        tree, cached = loop._scheduler.cache._tree, set()
        for holder in tree._ends:
            tokens = tree.tokens_of(holder)[: holder.n]
            ends = range(block_size, len(tokens) + 1, block_size)
            cached |= {tuple(tokens[:end]) for end in ends}
        return loop._kv_events.n_put, cached

    return thread_of(engine).ask(look)


def tree_of(engine: lp.Engine) -> PrefixTree[Cells]:
    """The prefix tree; for the engine thread."""
    return loop_of(engine)._scheduler.cache._tree


# ---- changes
def wake_waiting_callers(engine: lp.Engine) -> None:
    """Lets callers that wait for room in the queue look again."""
    engine._queue._wake_all()


@contextmanager
def stalled_events(engine: lp.Engine) -> Iterator[None]:
    """Keeps the thread that publishes KV events waiting."""
    publisher = loop_of(engine)._kv_events
    assert publisher is not None
    with publisher._lock:
        yield


def n_waiting_events(engine: lp.Engine) -> int:
    """Batches of KV events that the publishing thread has not taken; while there are many, no more are put."""
    publisher = loop_of(engine)._kv_events
    assert publisher is not None
    return publisher._queue.qsize()


def fix_micro_batches(engine: lp.Engine, n: int | None = None) -> None:
    """Stops the engine from choosing the number of micro-batches by its own times; sets it to ``n`` if given.

    On a busy machine the times make it look as if splitting the batch could pay.
    """
    keep_micro_batches(loop_of(engine))
    if n is not None:
        set_micro_batches(engine, n)


def keep_micro_batches(loop: EngineLoop) -> None:
    """Stops a loop from choosing the number of micro-batches."""
    loop._micro_batches._able = False


def set_micro_batches(engine: lp.Engine, n: int) -> None:
    """Sets the number of micro-batches between two steps, and returns then."""
    scheduler = scheduler_of(engine)

    def change() -> None:
        scheduler.split_decoding(n)

    thread_of(engine).ask(change)


@contextmanager
def held_locks(engine: lp.Engine) -> Iterator[None]:
    """Holds the locks that callers of the engine take, as a thread of the parent may when another one forks."""
    with engine._engine_thread._lock, engine._queue._entering:
        yield


def replace_executor(engine: lp.Engine, executor: Any) -> None:
    """Runs the next steps of an engine on another executor, between two steps."""
    loop = loop_of(engine)

    def replace() -> None:
        loop._executor = loop.in_flight.executor = executor

    thread_of(engine).ask(replace)


def swap_native(engine: lp.Engine, native: Any) -> Any:
    """Sends the executor's native calls to another module, and returns the one they went to. Only while it is idle."""
    executor = step_executor_of(engine)
    replaced, executor._native = executor._native, native
    return replaced
