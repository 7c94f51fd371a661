"""What takes too long for an event loop: tokenizing long texts, rendering long conversations, compiling constraints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from llamapipe._engine.sampling import SamplingThreads
from llamapipe._engine.tenant import tenant
from llamapipe._sampling_table import CONSTRAINTS
from llamapipe.media.decode import is_media
from llamapipe.params import SamplingParams

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
_LONG = 8192  # characters
_LARGE = 2**16  # characters: beyond them memory matters
_MOST = 2**24  # characters that are counted
_VALUE = 64  # characters: about what a dict, a list or a text needs besides its contents
_N_THREADS = 8
_LOOK_S = 0.02  # between two looks at jobs that take long


class LongWork:
    """Threads of one engine for the work of event loops, fair to shares. Any thread.

    Of large work only so much is done at a time: tokenizing 15 million characters of English took 27 bytes for each one
    with Qwen2.5's vocabulary, and 58 with the bundled model's.

    The default executor of asyncio has few threads, in the order of calls: a client with long schemas would keep all
    others from it.
    """

    def __init__(self) -> None:
        self._threads = SamplingThreads(_N_THREADS)
        self._looks: dict[asyncio.AbstractEventLoop, _Looks] = {}  # of the loops that wait

    def __repr__(self) -> str:
        return f"<LongWork {self._threads!r}>"

    async def run(self, function: Callable[..., T], *arguments: Any, size: int = 0) -> T:
        """``function(*arguments)`` in a thread, with the context variables of this task.

        ``size``: the characters that it converts, as ``size_of`` counts them.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        context = copy_context()

        def job() -> None:
            if future.cancelled():
                return
            result, error = None, None
            try:
                result = context.run(function, *arguments)
            except BaseException as e:
                error = e
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, future, result, error)

        self._threads.run(job, tenant.get().share, is_python=True, size=size if size > _LARGE else 0)
        looks = self._looks.get(loop)
        if looks is None:
            looks = self._looks[loop] = _Looks(loop, self._threads.add_spare_thread)
        looks.n_waiting += 1
        try:
            return await future
        finally:
            looks.n_waiting -= 1
            if not looks.n_waiting:
                looks.stop()
                del self._looks[loop]

    async def run_off_loop(self, build: Callable[..., T], values: Any, params: Any, *others: Any) -> T:
        """``build(values, params, *others)``, in a thread if it may take long."""
        if not takes_long(values, params, *others):
            return build(values, params, *others)
        return await self.run(build, values, params, *others, size=size_of([values, params]))

    def close(self) -> None:
        """Ends the threads after their jobs. Later work is done at once."""
        self._threads.close()


class _Looks:
    """Calls ``look`` every 20 ms: one timer for a loop, because those of a thousand calls would take half its time."""

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


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


async def to_thread(function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)`` in a thread of asyncio's, for what waits and hardly computes."""
    import asyncio

    return await asyncio.to_thread(function, *arguments)


def takes_long(values: Any, params: Any, *others: Any) -> bool:
    """Whether texts are long, params hold a constraint, or the options of a chat ask for much."""
    each = params if isinstance(params, Sequence) and not isinstance(params, (str, bytes)) else (params,)
    return (
        is_long(values)
        or is_long(params)
        or any(
            isinstance(its, SamplingParams)
            and (is_long(its.prediction) or any(getattr(its, name) is not None for name in CONSTRAINTS))
            for its in each
        )
        or any(getattr(other, "takes_long", False) for other in others if isinstance(other, tuple))
    )


def is_long(values: Any) -> bool:
    """Whether texts, or lists and messages of texts, have so many characters that they would hold up an event loop."""
    return _n_characters(values, _LONG, 0) > _LONG


def size_of(values: Any) -> int:
    """The characters of texts, or of lists and messages of texts, and of what holds them; at most about 16 million."""
    return _n_characters(values, _MOST, _VALUE)


def _n_characters(values: Any, most: int, each: int) -> int:
    """Counts characters, and ``each`` for a value, until there are more than ``most``; an image is a long text."""
    n = 0
    stack = [values]
    while stack and n <= most:
        value = stack.pop()
        n += each
        if isinstance(value, str):
            n += len(value)
        elif isinstance(value, Mapping):
            n += _LONG + 1 if is_media(value) else 0
            stack.extend(value.values())
        elif isinstance(value, (list, tuple)):
            n += len(value)
            if n <= most and value and isinstance(value[0], (str, Mapping, list, tuple)):
                # Most are texts or lists of numbers. One by one, 250,000 of them would take 0.3 s.
                flat = [inner for inner in value if _is_flat(inner)]
                n += each * len(flat) + sum(map(len, flat))
                if len(flat) < len(value):
                    stack.extend([inner for inner in value if not _is_flat(inner)])
    return n


def _is_flat(value: Any) -> bool:
    """Whether it is a text or a list of numbers."""
    return type(value) is str or (type(value) is list and (not value or type(value[0]) is int))
