"""The client that requests belong to. A server sets it, and every request submitted in that context belongs to it.

Open this file to add a limit for each client of a server.

The principle: the tenant is a context variable, so no route and no call can forget to pass it on. Tasks and the threads
of ``asyncio.to_thread`` inherit it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import NamedTuple


class Tenant(NamedTuple):
    """One client, or several that count as one.

    ``share``: requests of different shares take turns, however many each has. ``cache``: the name of the tenant's own
    prefix cache; None: the common cache. ``grammar_timeout``: maximum seconds of processor time for the constraint of a
    request, even if its params allow more; None: no such limit. ``max_sound_s``: maximum seconds of a sound; None: no
    limit. ``priority``: is added to the priority of the tenant's requests.
    """

    share: Hashable = None
    cache: str | None = None
    grammar_timeout: float | None = None
    max_sound_s: float | None = None
    priority: int = 0


NOBODY = Tenant()
tenant: ContextVar[Tenant] = ContextVar("tenant", default=NOBODY)
# The name under which the engine remembers a request's sequence; None: it does not remember the sequence.
conversation: ContextVar[str | None] = ContextVar("conversation", default=None)


def grammar_limit(timeout: float | None) -> float | None:
    """Return the lower of ``timeout`` and this tenant's ``grammar_timeout``, in seconds; None: no limit."""
    most = tenant.get().grammar_timeout
    return timeout if most is None else most if timeout is None else min(timeout, most)


def is_of(owner: str | None) -> Callable[[Hashable], bool]:
    """Return a test whether a ``cache_key`` belongs to the cache ``owner``, whatever its salt and adapters."""
    return lambda key: (key[0] if isinstance(key, tuple) else None) == owner


def conversation_key(name: str | None) -> Hashable:
    """Return the key of this tenant's conversation ``name``; None if ``name`` is None."""
    return None if name is None else (tenant.get().cache, name)


def cache_key(salt: str | None, adapters: Hashable = None) -> Hashable:
    """Return the key of the cells that a request may use: the tenant's cache, the salt and the adapters' key."""
    own = tenant.get().cache
    return None if own is None and salt is None and adapters is None else (own, salt, adapters)


def own_key(key: Hashable) -> Hashable:
    """Return another tenant's ``cache_key`` with this tenant's cache. Raises ValueError for an invalid key."""
    if key is None:
        return cache_key(None)
    if not isinstance(key, tuple) or len(key) != 3 or not isinstance(key[1], (str, type(None))):
        raise ValueError("its key is not a key of cells")
    return cache_key(*key[1:])
