"""The base class of objects that own native memory, directly or indirectly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

from llamapipe._messages import unknown_attribute
from llamapipe._names_elsewhere import INSTEAD


class NotCopyable:
    """A base that forbids copying and pickling, so memory is freed once. Misspelt attributes raise with a hint."""

    __slots__ = ()

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError with a hint. Python calls this if there is no attribute of this name."""
            if name.startswith("_") or hasattr(type(self), name):  # private, or a property that raised
                return object.__getattribute__(self, name)
            place = next((base.__name__ for base in type(self).__mro__ if base.__name__ in INSTEAD), "")
            raise unknown_attribute(f"{type(self).__name__!r} object", name, dir(self), place)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"a {name} cannot be copied or pickled: it owns native memory; make another {name}")
