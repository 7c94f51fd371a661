"""A cache of the values used last, whose values are made outside its lock.

Use it where ``functools.lru_cache`` does not fit: where a value may turn bad, or where its arguments must not be kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from llamapipe.locks import Lock

T = TypeVar("T")


class LruCache(Generic[T]):
    """The ``n`` values used last, by their keys. Any thread."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._lock = Lock()
        self._values: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T], is_good: Callable[[T], bool] = lambda _: True) -> T:
        """Return the good value kept for ``key``, else what ``make`` gives, which two threads may call at once."""
        with self._lock:
            if key in self._values and is_good(self._values[key]):
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            self._values[key] = value
            if len(self._values) > self._n:
                self._values.popitem(last=False)
        return value
