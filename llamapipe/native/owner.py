"""Base classes of objects that must be closed: they support ``with`` and warn about objects that were never closed."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import TypeVar

from llamapipe.native.not_copyable import NotCopyable

_O = TypeVar("_O", bound="Owner")


class Owner(NotCopyable):
    """An object that must be closed; ``with`` closes it. A ResourceWarning names an object that was never closed."""

    __slots__ = ()

    def close(self) -> None:
        """Free the object; a second call does nothing."""
        raise NotImplementedError

    def _is_left_open(self) -> bool:
        """Return whether the destructor must warn. It also asks if ``__init__`` did not return."""
        return False

    def _abandon(self) -> None:
        """Free what the destructor may free, after the warning."""

    def __enter__(self: _O) -> _O:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._is_left_open():
            warnings.warn(
                f"{self!r} was never closed; use `with` or close()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
            self._abandon()


class DrainingOwner(Owner):
    """An ``Owner`` with waiting work, which ``with`` finishes unless the block raises."""

    __slots__ = ()

    def close(self, drain: bool = True) -> None:
        """Free the object, as ``Owner.close`` does. ``drain``: finish waiting work first; if False, that work fails."""
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)


class AsyncOwner(DrainingOwner):
    """A ``DrainingOwner`` that asyncio can close, too."""

    __slots__ = ()

    async def aclose(self, drain: bool = True) -> None:
        """Call ``close`` without blocking the event loop."""
        import asyncio

        await asyncio.to_thread(self.close, drain)

    async def __aenter__(self: _O) -> _O:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose(drain=kind is None)
