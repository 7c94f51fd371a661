"""The client that requests belong to: a server sets it, and every request submitted in that context has it.

Open this file to add a limit for each client of a server.

The principle: the tenant is a context variable, so no route and no call can forget to pass it on. Tasks inherit it, and
so do the threads that ``asyncio.to_thread`` uses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import NamedTuple


class Tenant(NamedTuple):
    """One client, or several that count as one.

    ``share``: requests of different shares take turns, however many each has. ``cache``: the name of its own prefix
    cache; None: the common one. ``grammar_timeout``: seconds of processor time that the constraint of a request may
    take, even if its params allow more; None: no such limit. ``max_sound_s``: maximum seconds of a sound; None: all of
    it. ``priority``: added to the priority of its requests.
    """

    share: Hashable = None
    cache: str | None = None
    grammar_timeout: float | None = None
    max_sound_s: float | None = None
    priority: int = 0


NOBODY = Tenant()
tenant: ContextVar[Tenant] = ContextVar("tenant", default=NOBODY)
# The name under which the engine remembers the sequence of a request; None: under none.
conversation: ContextVar[str | None] = ContextVar("conversation", default=None)


def grammar_limit(timeout: float | None) -> float | None:
    """Return the time for a constraint whose params allow ``timeout``."""
    most = tenant.get().grammar_timeout
    return timeout if most is None else most if timeout is None else min(timeout, most)


def is_of(owner: str | None) -> Callable[[Hashable], bool]:
    """Return a test for a ``cache_key`` of this tenant's cache, whatever the salt and the adapters."""
    return lambda key: (key[0] if isinstance(key, tuple) else None) == owner


def conversation_key(name: str | None) -> Hashable:
    """Return the key of a conversation of this tenant; None if ``name`` is None."""
    return None if name is None else (tenant.get().cache, name)


def cache_key(salt: str | None, adapters: Hashable = None) -> Hashable:
    """Return the key of the cells that a request may use: the tenant's cache, the salt and the adapters' key."""
    own = tenant.get().cache
    return None if own is None and salt is None and adapters is None else (own, salt, adapters)


def own_key(key: Hashable) -> Hashable:
    """Return this tenant's equivalent of another tenant's ``cache_key``. Raises ValueError for an invalid key."""
    if key is None:
        return cache_key(None)
    if not isinstance(key, tuple) or len(key) != 3 or not isinstance(key[1], (str, type(None))):
        raise ValueError("its key is not a key of cells")
    return cache_key(*key[1:])
