"""The base of objects that own native memory, or stand for something that does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, SupportsIndex

from llamapipe.arguments import unknown_attribute


class Owner:
    """Cannot be copied or pickled: two owners would free the same memory. A misspelt attribute raises with a hint."""

    __slots__ = ()
    # What to use in place of attributes that people look for here.
    _elsewhere: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            """Raises AttributeError: no attribute of this name was found."""
            if name.startswith("_") or hasattr(type(self), name):  # private, or a property that raised
                return object.__getattribute__(self, name)
            raise unknown_attribute(f"{type(self).__name__!r} object", name, dir(self), self._elsewhere)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"a {name} cannot be copied or pickled: it owns native memory; make another {name}")
