"""The engine's thread: its start, its commands, its shutdown, and its state after ``fork()``.

Open this file when closing, forking or Ctrl-C leaves an engine in a bad state.

The principle: callers never touch the scheduler or the context. They put commands into the inbox, and the loop executes
the commands between two steps, in order. Nothing here knows how steps are planned or run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TypeVar
from weakref import WeakSet

from llamapipe._engine.policy.core import Request
from llamapipe._engine.runtime.encoder import ENCODER_THREAD_NAME
from llamapipe._engine.runtime.loop import EngineLoop
from llamapipe._engine.runtime.snapshot import Snapshot
from llamapipe.errors import BackendError, EngineClosedError
from llamapipe.host.at_exit import close_at_exit, end_thread_at_exit, forget
from llamapipe.kv_events import EVENTS_THREAD_NAME
from llamapipe.locks import Lock
from llamapipe.results import EngineStats
from llamapipe.work.threads import WORK_THREAD_NAME

T = TypeVar("T")
_JOIN_S = 1.0  # Ctrl-C that arrives just before Python blocks in join() does not interrupt it: join in slices
_THREAD_NAME = "llamapipe-engine"
_OURS = (_THREAD_NAME, WORK_THREAD_NAME, EVENTS_THREAD_NAME, ENCODER_THREAD_NAME)
_threads: WeakSet[EngineThread] = WeakSet()


def _mark_forked() -> None:
    for thread in list(_threads):
        thread.forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_forked)


class EngineThread:
    """Runs an ``EngineLoop`` on its thread, from ``start`` to ``close``. Methods are for any thread.

    ``forked``: this process was forked from the engine's process, so the thread does not exist here. This is a plain
    attribute, because readers check it once per token. ``dispatcher``: wakes the mailboxes of this engine's callers.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self.forked = False
        self.loop = loop
        self.dispatcher = loop.dispatcher
        self._pid = os.getpid()
        _threads.add(self)
        self._inbox = loop.inbox
        self._lock = Lock()  # no request is submitted after the command that ends the loop
        self._closing = False
        self._stopped = False  # the command that ends the loop was sent, or is about to be
        self._lists: dict[object, Callable[[], None]] = {}  # by list: submits its remaining part
        self._thread = threading.Thread(target=loop.run, name=_THREAD_NAME, daemon=True)

    def __repr__(self) -> str:
        state = "closing" if self._closing else "open"
        return f"<EngineThread {state} {self.loop!r}>"

    # ---- start, checks
    def start(self) -> None:
        """Start the thread. If Ctrl-C interrupts this call, close the engine thread, because it may be running."""
        with self._lock:  # closing at interpreter exit waits until the thread has started
            close_at_exit(self)
            self._thread.start()

    @property
    def failure(self) -> BackendError | None:
        """The defect that every request fails with; None while the engine works."""
        return self.loop.failure

    @property
    def closing(self) -> bool:
        """Whether ``close`` was called."""
        return self._closing

    def in_child(self) -> bool:
        """Return whether the thread belongs to another process; detects even forks in C code, which run no hooks."""
        return self.forked or self._pid != os.getpid()

    def check_caller(self) -> None:
        """Raise EngineClosedError in a fork of the engine's process, RuntimeError in the engine's own threads."""
        if self.forked or self._pid != os.getpid():  # as ``in_child``
            raise EngineClosedError(
                "the engine was made before fork(); make one in the child process, or use the spawn start method"
            )
        caller = threading.current_thread()
        if caller is self._thread or caller.name == WORK_THREAD_NAME:
            raise RuntimeError(
                "this runs in a thread of the engine (in a logits processor?), which cannot wait for the engine"
            )

    def check_open(self) -> None:
        """Raise EngineClosedError if the engine is closed; also raise as ``check_caller`` does."""
        self.check_caller()
        if self._closing:
            end_thread_at_exit()
            raise EngineClosedError("the engine is closed; make another")

    # ---- commands
    def submit(self, *requests: Request, of_list: bool = False) -> None:
        """Queue new requests as one command, so that one step can take them all. Raises EngineClosedError.

        ``of_list``: the requests belong to a list that was begun before ``close``.
        """
        with self._lock:
            if not of_list or self._stopped:
                self.check_open()
            self._inbox.put(self.loop.add, *requests)

    def begin_list(self, key: object, submit_rest: Callable[[], None]) -> None:
        """Record a list that is submitted in parts.

        ``close`` calls ``submit_rest``, because a caller waits for the whole list. Raises EngineClosedError.
        """
        with self._lock:
            self.check_open()
            self._lists[key] = submit_rest

    def end_list(self, key: object) -> None:
        """Forget a list, if it is known."""
        self._lists.pop(key, None)

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on the engine thread, between two steps and in order. Does not wait."""
        self._inbox.put(function, *arguments)

    def note_waiting_thread(self) -> None:
        """Record that the calling thread is about to submit a request and to wait for it.

        If no other thread could submit first, an idle engine starts its step immediately.
        """
        caller = threading.current_thread()
        is_single = True
        # Like threading.enumerate(), but without its lock, which an interrupted thread may keep (llamapipe/locks.py).
        for thread in list(threading._active.values()):  # type: ignore[attr-defined]
            if thread is not caller and thread.name not in _OURS:
                is_single = False
        self._inbox.single_caller = is_single

    def note_waiting_task(self) -> None:
        """Record that a task is about to submit: other tasks of its event loop may submit before the step."""
        self._inbox.single_caller = False

    def fork(self, parent: Request, child: Request) -> None:
        """Submit a request that continues the sequence of ``parent``, a resumable request that does not run."""
        self._inbox.put(self.loop.fork, parent, child)

    def change(self, request: Request, n_keep: int | None, tokens: Sequence[int]) -> None:
        """Trim or lengthen the sequence of a resumable request that does not run."""
        self._inbox.put(self.loop.change, request, n_keep, tokens)

    def restore(self, request: Request, snapshot: Snapshot) -> None:
        """Submit a resumable request with the cells and states of a snapshot."""
        self._inbox.put(self.loop.restore, request, snapshot)

    def release(self, request: Request) -> None:
        """Unpin the saved cells of a request that has ended, so that they may be dropped."""
        self._inbox.put(self.loop.release, request)

    def resume(self, request: Request) -> None:
        """Continue a paused request, as far as its token budget allows."""
        self._inbox.put(self.loop.resume, request)

    def cancel_soon(self, request: Request) -> None:
        """End a request soon. A step that computes nothing but cancelled requests is aborted."""
        if not request.spec.resumable:  # a generation's trims, forks and cancel happen in the order of calls
            self._inbox.urgent.append(request)
        self._inbox.put(self.loop.cancel, request)  # also wakes the loop
        request.cancelled = True  # last: a caller that is interrupted before this line can cancel again
        self.loop.in_flight.abort_cancelled()

    def ask(self, question: Callable[[], T]) -> T:
        """Call a function on the engine thread between two steps, or here after the thread's end. Return its result.

        Raises the function's error, EngineClosedError in a forked process, RuntimeError in the engine's own threads.
        """
        self.check_caller()  # before the lock: in a forked child another thread may hold it forever
        replies: SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = SimpleQueue()

        def answer() -> None:
            try:
                replies.put((question(), None))
            except Exception as e:
                replies.put((None, e))

        with self._lock:
            if not self._stopped:
                self._inbox.put(answer)
        if self._stopped:
            self._thread.join()
            if replies.empty():
                answer()
        result, error = replies.get()
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def snapshot(self, request: Request) -> Snapshot:
        """See ``EngineLoop.snapshot``. Waits for the running step."""
        return self.ask(partial(self.loop.snapshot, request))

    def saved_sizes(self, request: Request) -> tuple[int, int, int]:
        return self.ask(partial(self.loop.saved_sizes, request))

    def check_integrity(self) -> None:
        """Raise AssertionError when the engine's bookkeeping is inconsistent."""
        self.ask(self.loop.check_integrity)

    def stats(self) -> EngineStats:
        """Return a consistent copy of the counters. Waits for the end of the running step."""
        return self.ask(self.loop.stats)

    # ---- end
    def close_soon(self) -> None:
        """Close like ``close(drain=False)``, for destructors: take no lock of the engine, wait at most a second."""
        self._closing = self._stopped = True
        self._inbox.put(self.loop.stop, False)
        self.loop.in_flight.abort_all()
        if threading.current_thread().name != _THREAD_NAME:
            self._thread.join(_JOIN_S)
        forget(self)

    def close(self, drain: bool) -> None:
        """End the thread, wait for it and so free the context. Does nothing in a forked child.

        ``drain``: finish the open requests first; otherwise cancel them.
        """
        if self.in_child():
            return
        self.check_caller()
        with self._lock:
            self._closing = True  # no new calls
        for submit_rest in list(self._lists.values()):
            submit_rest()
        with self._lock:
            # After Ctrl-C, the exit calls this again, without drain. It cancels what the first call waits for.
            if not self._stopped or not drain:
                self._stopped = True
                self._inbox.put(self.loop.stop, drain)
        if not drain:
            self.loop.in_flight.abort_all()
        while self._thread.is_alive():
            self._thread.join(_JOIN_S)
        forget(self)
