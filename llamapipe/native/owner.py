"""The base of objects that own native memory, or stand for something that does."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex


class Owner:
    """Cannot be copied or pickled: two owners would free the same memory."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"a {name} cannot be copied or pickled: it owns native memory; make another {name}")
