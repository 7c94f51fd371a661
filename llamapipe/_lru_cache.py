"""An LRU cache that creates its values without holding its lock.

Use it where ``functools.lru_cache`` does not fit: where a value may become invalid, or where the cache must not keep
the arguments alive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from llamapipe.locks import Lock

T = TypeVar("T")


class LruCache(Generic[T]):
    """The ``n`` most recently used values, by key. Any thread."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._lock = Lock()
        self._values: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T], is_good: Callable[[T], bool] = lambda _: True) -> T:
        """Return the cached value of ``key`` if it is valid, else call ``make``, perhaps in two threads at once."""
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
