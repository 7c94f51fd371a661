"""Large bodies: while one is decoded and refused, the event loop serves the others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from time import thread_time
from typing import Any

import httpx
import pytest

import llamapipe as lp
from llamapipe.server import ServerSettings, app

MANY = 15_000_000  # bytes
TURN = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def engine(demo: lp.Model) -> Iterator[lp.Engine]:
    with lp.Engine(demo, n_ctx=256, n_seq_max=2) as engine:
        yield engine


async def longest_hold_s(engine: lp.Engine, path: str, body: bytes) -> tuple[httpx.Response, float]:
    """The answer, and the most processor time that the loop's thread took for one turn of the loop meanwhile."""
    longest_s, is_over = 0.0, False

    async def watch() -> None:
        nonlocal longest_s
        before_s = thread_time()
        while not is_over:
            await asyncio.sleep(0)
            now_s = thread_time()
            longest_s, before_s = max(longest_s, now_s - before_s), now_s

    transport = httpx.ASGITransport(app(engine, ServerSettings(model_names=("demo",))))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def parts() -> Any:
            for start in range(0, len(body), 2**16):
                yield body[start : start + 2**16]

        watching = asyncio.ensure_future(watch())
        answer = await client.post(path, content=parts())
        is_over = True
        await watching
    return answer, longest_s


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 1480}] * 9999}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "é\n" * (MANY // 8)}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [TURN] * (MANY // 40)}]}),
        ("/v1/chat/completions", {"messages": [TURN], "metadata": {"x": [1] * (MANY // 3)}}),
        ("/v1/completions", {"prompt": "a" * MANY}),
        ("/v1/completions", {"prompt": [12345] * (MANY // 7)}),
        ("/tokenize", {"content": "a" * MANY}),
        ("/tokenize", {"content": "\U0001f600" * 200_000}),
        ("/detokenize", {"tokens": [12345] * (MANY // 7)}),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_the_loop_is_not_held(engine: lp.Engine, path: str, body: dict[str, Any]) -> None:
    answer, longest_s = asyncio.run(longest_hold_s(engine, path, json.dumps(body).encode()))
    assert answer.status_code in (200, 400)
    assert longest_s < 0.14  # 0.01 s here, 0.1 s for the 9999 messages; before, up to 0.38 s
