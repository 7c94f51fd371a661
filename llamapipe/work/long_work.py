"""Work that takes too long for an event loop: tokenizing long texts, rendering long chats, compiling constraints.

Open this file to change which work leaves the event loop, or when such work ends early.

The principle: an event loop never computes for long. ``takes_long`` estimates the work from the length of its texts,
``LongWork`` does it in threads that are fair to clients, and a deadline, a cancelled task or a closed engine ends it.

The compilation of a schema or a grammar cannot be interrupted. Within a client, short constraints come first, long ones
leave cores to other work, and only a limited number of long ones may wait.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from llamapipe._sampling_table import CONSTRAINTS
from llamapipe.errors import EngineClosedError, QueueFullError
from llamapipe.host.cores import usable_cores
from llamapipe.locks import Lock
from llamapipe.media.decode import is_media
from llamapipe.params import SamplingParams
from llamapipe.wanted import Limit, check_wanted, deadline, limited
from llamapipe.work.tenant import tenant
from llamapipe.work.threads import FairThreads, Place

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
_LONG = 8192  # characters
_LARGE = 2**16  # characters: beyond them memory matters
_MOST = 2**24  # characters: counting stops here
_VALUE = 64  # characters: about what a dict, a list or a text needs besides its contents
_N_THREADS = 8
_S_PER_CHARACTER = 1e-4  # seconds to compile a character of a slow constraint, approximately
MOST_CONSTRAINTS = 32  # different long constraints of one client that wait to be compiled
_MOST_COMPILED = 64  # compiled constraints that are remembered; fewer than the compiler keeps
_LOOK_S = 0.02  # seconds between two checks for jobs that take long


# Whether this task has compiled its constraint. The compiler keeps the result, so later calls of the task are quick.
_has_compiled: ContextVar[bool] = ContextVar("has_compiled", default=False)


class LongWork:
    """Runs the long work of event loops on up to ``n_threads`` threads that are fair to shares. Any thread.

    The total size of the large jobs that run at the same time is limited, because they need memory: tokenizing
    15 million characters of English took 27 bytes per character with Qwen2.5's vocabulary, and 58 with the bundled
    model's.

    asyncio's default executor has few threads and runs calls in order. One client with long schemas would block all
    others there.
    """

    def __init__(self, n_threads: int = _N_THREADS) -> None:
        self._threads = FairThreads(n_threads, most_slow=max(usable_cores() // 2, 1))
        self._looks: dict[asyncio.AbstractEventLoop, _Looks] = {}  # by event loop that waits for a job
        self._is_closed = False
        self._lock = Lock()  # for the two attributes below
        # By client: the long constraints that wait or are being compiled. ``_compiled`` has the latest compiled ones.
        self._compiling: dict[Hashable, Counter[Hashable]] = {}
        self._compiled: OrderedDict[Hashable, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<LongWork {self._threads!r}>"

    async def run(self, function: Callable[..., T], *arguments: object, size: int = 0) -> T:
        """Call ``function(*arguments)`` in a thread, with the context variables of this task.

        ``size``: the number of characters that the function converts, as ``size_of`` counts them. A deadline in the
        context ends the wait. ``check_wanted`` ends the function itself at the deadline, when the task is cancelled
        and when the engine is closed.

        Raises QueueFullError if too many long constraints of the same client wait, TimeoutError at the deadline.
        """
        loop, share = running_loop(), tenant.get().share
        constraints = [] if _has_compiled.get() else _constraints(function, arguments)
        # Measuring the constraints may take long, too, so another thread measures them.
        n, digest = await self.run(_measure, constraints) if constraints else (0, 0)
        place = Place(n * _S_PER_CHARACTER)
        key = (share, digest) if place.is_slow else None
        if key is not None and not self._begin_wait(share, key):
            place, key = Place(), None
        future: asyncio.Future[T] = loop.create_future()
        context = copy_context()

        def check() -> None:
            if future.done():
                raise asyncio.CancelledError
            if self._is_closed:
                raise EngineClosedError("the engine was closed; make a new one")

        def work() -> T:
            with limited(Limit(check)):
                return function(*arguments)

        def job() -> None:
            if future.done():
                return
            result, error = None, None
            try:
                result = context.run(work)
            except BaseException as e:
                error = e
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, future, result, error)

        size = size if size > _LARGE else 0
        self._threads.run(job, share, is_python=True, size=size, place=place)
        looks = self._looks.get(loop)
        if looks is None:
            looks = self._looks[loop] = _Looks(loop, self._threads.add_spare_thread)
        looks.n_waiting += 1
        until = deadline()
        timer = (
            None if until is None else loop.call_later(max(until - perf_counter(), 0), _expire, future, loop)
        )
        try:
            result = await future
            if constraints:
                _has_compiled.set(True)
            if key is not None:
                with self._lock:
                    self._compiled[key] = None
                    while len(self._compiled) > _MOST_COMPILED:
                        self._compiled.popitem(last=False)
            return result
        finally:
            if key is not None:
                self._end_wait(share, key)
            if timer is not None:
                timer.cancel()
            looks.n_waiting -= 1
            if not looks.n_waiting:
                looks.stop()
                del self._looks[loop]

    def _begin_wait(self, share: Hashable, key: Hashable) -> bool:
        """Count a long constraint as waiting; return False if it was compiled before. Raises QueueFullError."""
        with self._lock:
            if key in self._compiled:
                return False
            waiting = self._compiling.setdefault(share, Counter())
            if share is not None and key not in waiting and len(waiting) > MOST_CONSTRAINTS:
                raise QueueFullError(
                    f"{MOST_CONSTRAINTS} long schemas or grammars of this client wait to be compiled, and no more may: "
                    "retry later, or give shorter ones"
                )
            waiting[key] += 1
            return True

    def _end_wait(self, share: Hashable, key: Hashable) -> None:
        """End the wait that ``_begin_wait`` counted."""
        with self._lock:
            waiting = self._compiling[share]
            waiting[key] -= 1
            if not waiting[key]:
                del waiting[key]
            if not waiting:
                del self._compiling[share]

    async def run_off_loop(self, build: Callable[..., T], values: Any, params: Any, *others: Any) -> T:
        """Return ``build(values, params, *others)``, called in a thread if it may take long."""
        if not takes_long(values, params, *others):
            return build(values, params, *others)
        return await self.run(build, values, params, *others, size=size_of([values, params]))

    def close(self) -> None:
        """End the threads after their jobs; jobs that call ``check_wanted`` end early.

        Later work runs in the thread that calls ``run``.
        """
        self._is_closed = True
        self._threads.close()


class _Looks:
    """Calls ``look`` every 20 ms. An event loop has one such timer: a thousand timers would take half its time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, look: Callable[[], object]) -> None:
        self.n_waiting = 0
        self._loop = loop
        self._look = look
        self._timer = loop.call_later(_LOOK_S, self._tick)

    def __repr__(self) -> str:
        return f"<_Looks n_waiting={self.n_waiting}>"

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_LOOK_S, self._tick)
        self._look()

    def stop(self) -> None:
        self._timer.cancel()


def _expire(future: asyncio.Future[Any], loop: asyncio.AbstractEventLoop) -> None:
    """End the wait for a job whose deadline has passed."""
    try:
        check_wanted()
    except TimeoutError as error:
        settle(future, None, error)
    else:
        loop.call_later(_LOOK_S, _expire, future, loop)  # the loop's clock is ahead of the deadline's


def settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Set a future's error, or its result if ``error`` is None, unless it is done. For its event loop's thread."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def running_loop() -> asyncio.AbstractEventLoop:
    """Return this task's event loop. Raises RuntimeError in tasks of other libraries; it says what to call instead."""
    import asyncio

    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "no asyncio event loop runs here, and methods such as agenerate() need one: with trio, call the blocking "
            "method in a thread, trio.to_thread.run_sync(engine.generate, prompt, params); elsewhere use asyncio.run()"
        ) from None


async def to_thread(function: Callable[..., T], *arguments: object) -> T:
    """Return ``function(*arguments)``, called in a thread of asyncio's. Use it for work that mostly waits."""
    import asyncio

    return await asyncio.to_thread(function, *arguments)


def takes_long(values: Any, params: Any, *others: Any) -> bool:
    """Return whether texts are long, params hold a constraint, or the options of a chat need much work."""
    all_params = (
        params if isinstance(params, Sequence) and not isinstance(params, (str, bytes)) else (params,)
    )
    return (
        is_long(values)
        or is_long(params)
        or any(
            isinstance(item, SamplingParams)
            and (is_long(item.prediction) or any(getattr(item, name) is not None for name in CONSTRAINTS))
            for item in all_params
        )
        or any(getattr(other, "takes_long", False) for other in others if isinstance(other, tuple))
    )


def _constraints(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    """Return the schemas, grammars and tools in a call's arguments."""
    if isinstance(function, partial):
        arguments = (*function.args, *arguments)
    constraints: list[Any] = []
    for argument in arguments:
        if isinstance(argument, SamplingParams):
            constraints += [getattr(argument, name) for name in CONSTRAINTS]
        elif getattr(argument, "takes_long", False):
            constraints += [getattr(argument, name, None) for name in ("tools", "response_format")]
    return [constraint for constraint in constraints if constraint is not None]


def _measure(constraints: list[Any]) -> tuple[int, int]:
    """Return the number of characters of constraints, and a hash that identifies slow ones (0 for others)."""
    n = _n_characters(constraints, _MOST, 0)
    return n, hash(repr(constraints)) if Place(n * _S_PER_CHARACTER).is_slow else 0


def is_long(values: Any) -> bool:
    """Return whether texts, or lists and messages of texts, are long enough to hold up an event loop."""
    return _n_characters(values, _LONG, 0) > _LONG


def size_of(values: Any) -> int:
    """Return the number of characters in texts, in lists and messages of texts, and in mappings of them.

    Each value counts as 64 characters more. The count stops at about 16 million.
    """
    return _n_characters(values, _MOST, _VALUE)


def _n_characters(values: Any, most: int, per_value: int) -> int:
    """Count characters, and ``per_value`` for each value, to a count above ``most``. An image counts as a long text."""
    n = 0
    stack = [values]
    while stack and n <= most:
        value = stack.pop()
        n += per_value
        if isinstance(value, str):
            n += len(value)
        elif isinstance(value, Mapping):
            n += _LONG + 1 if is_media(value) else 0
            stack.extend(value.values())
        elif isinstance(value, (list, tuple)):
            n += len(value)
            if n <= most and value and isinstance(value[0], (str, Mapping, list, tuple)):
                # Most values are texts or lists of numbers. One by one, 250,000 values would take 0.3 s.
                flat = [inner for inner in value if _is_flat(inner)]
                n += per_value * len(flat) + sum(map(len, flat))
                if len(flat) < len(value):
                    stack.extend([inner for inner in value if not _is_flat(inner)])
    return n


def _is_flat(value: Any) -> bool:
    """Return whether the value is a text, an empty list or a list of integers."""
    return type(value) is str or (type(value) is list and (not value or type(value[0]) is int))
