"""How long an ASGI application holds its event loop while it answers."""

from __future__ import annotations

import asyncio
import gc
from time import thread_time
from typing import Any

import httpx
from starlette.applications import Starlette

from support.control import turn


async def longest_hold_s(application: Starlette, path: str, body: bytes) -> tuple[httpx.Response, float]:
    """The answer, and the most processor time that the loop's thread took for one turn of the loop meanwhile.

    Without garbage collections, which walk whatever other tests have left in the process.
    """
    longest_s, is_over = 0.0, False

    async def watch() -> None:
        nonlocal longest_s
        before_s = thread_time()
        while not is_over:
            await turn()
            now_s = thread_time()
            longest_s, before_s = max(longest_s, now_s - before_s), now_s

    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def parts() -> Any:
            for start in range(0, len(body), 2**16):
                yield body[start : start + 2**16]

        gc.disable()
        try:
            watching = asyncio.ensure_future(watch())
            await turn()  # it begins before the request, which may never give up its turn
            answer = await client.post(path, content=parts())
            is_over = True
            await watching
        finally:
            gc.enable()
    return answer, longest_s
