"""A prefix that stays in the prefix cache until it is released."""

from __future__ import annotations

from types import TracebackType

from llamapipe._engine.request import Request
from llamapipe._engine.thread import EngineThread
from llamapipe.native.owner import Owner


class CachedPrefix(Owner):
    """What ``Engine.cache_prefix`` returns. Any thread.

    ``n_tokens``: of the prefix. ``n_bytes``: of host memory that it takes. The prefix stays also if this object is
    dropped; ``release`` it, or use ``with``, when it is not needed any more.
    """

    def __init__(self, engine_thread: EngineThread, request: Request, n_tokens: int, n_bytes: int) -> None:
        self._engine_thread = engine_thread
        self._request = request
        self.n_tokens = n_tokens
        self.n_bytes = n_bytes

    def __repr__(self) -> str:
        return f"<CachedPrefix n_tokens={self.n_tokens} n_bytes={self.n_bytes}>"

    def release(self) -> None:
        """Lets the cache drop the prefix when it needs the memory. A second call does nothing."""
        self._engine_thread.call(self._engine_thread.loop.release, self._request)

    def __enter__(self) -> CachedPrefix:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
