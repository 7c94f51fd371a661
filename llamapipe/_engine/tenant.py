"""The client for whom requests are made: a server sets it, and every request submitted meanwhile has it.

It is a context variable, so that no route and no call can forget to pass it on: tasks, and threads that
``asyncio.to_thread`` uses, inherit it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llamapipe.llama.adapter import AdapterSet


class Tenant(NamedTuple):
    """One client, or several that count as one.

    ``share``: requests of different shares take turns, however many each has. ``cache``: names its own prefix cache;
    None: the common one. ``grammar_timeout``: seconds of processor time that the constraint of a request may take, also
    where its params allow more; None: no such limit.
    """

    share: Hashable = None
    cache: str | None = None
    grammar_timeout: float | None = None


NOBODY = Tenant()
tenant: ContextVar[Tenant] = ContextVar("tenant", default=NOBODY)


def grammar_limit(timeout: float | None) -> float | None:
    """The time for a constraint whose params allow ``timeout``."""
    most = tenant.get().grammar_timeout
    return timeout if most is None else most if timeout is None else min(timeout, most)


def is_of(owner: str | None) -> Callable[[Hashable], bool]:
    """Whether a ``cache_key`` is one of this tenant's cache, whatever the salt and the adapters."""
    return lambda key: (key[0] if isinstance(key, tuple) else None) == owner


def cache_key(salt: str | None, adapters: AdapterSet | None = None) -> Hashable:
    """Whose cells a request may use: those of the same tenant's cache, the same salt and the same adapters."""
    own = tenant.get().cache
    key = None if adapters is None else adapters.key
    return None if own is None and salt is None and key is None else (own, salt, key)
