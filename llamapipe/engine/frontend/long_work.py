"""What takes too long for an event loop: tokenizing long texts, rendering long conversations, compiling constraints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from llamapipe.engine.params import CONSTRAINTS

T = TypeVar("T")
_LONG = 8192  # characters


async def built(build: Callable[..., T], values: Any, params: Any, *others: Any) -> T:
    """``build(values, params, *others)``, in a thread if it may take long."""
    if not takes_long(values, params):
        return build(values, params, *others)
    import asyncio

    return await asyncio.to_thread(build, values, params, *others)


def takes_long(values: Any, params: Any) -> bool:
    """Whether prompts or messages are long, or params hold a constraint."""
    each = params if isinstance(params, Sequence) and not isinstance(params, (str, bytes)) else (params,)
    return is_long(values) or any(
        getattr(one, name, None) is not None for one in each for name in CONSTRAINTS
    )


def is_long(values: Any) -> bool:
    """Whether texts, or lists and messages of texts, have so many characters that they would hold up an event loop."""
    left = _LONG
    stack = [values]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            left -= len(value)
        elif isinstance(value, Mapping):
            stack.extend(value.values())
        elif isinstance(value, (list, tuple)):
            left -= len(value)
            if value and isinstance(value[0], (str, Mapping, list, tuple)):
                stack.extend(value)
        if left < 0:
            return True
    return False
