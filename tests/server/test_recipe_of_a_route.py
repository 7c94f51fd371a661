"""The program of the recipe for routes in CONTRIBUTING.md, as a route."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from support.loop_hold import longest_hold_s

import llamapipe as lp
from llamapipe.server import ServerSettings
from llamapipe.server.application import application_of
from llamapipe.server.endpoint import Exchange, JsonResponse, post
from llamapipe.server.requests.limits import check_n_messages, refuse_long
from llamapipe.server.state import ServerState
from llamapipe.work.long_work import size_of

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


class TextsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    texts: list[str]
    model: str | None = None


@pytest.fixture(scope="module")
def application(demo: lp.Model) -> Iterator[Starlette]:
    match = re.search(r"```\n( *async def count\(.*?)\n *```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    names: dict[str, Any] = {
        "TextsRequest": TextsRequest,
        "Exchange": Exchange,
        "JsonResponse": JsonResponse,
        "Response": Response,
        "check_n_messages": check_n_messages,
        "refuse_long": refuse_long,
        "size_of": size_of,
    }
    exec(dedent(match[1]), names)
    with lp.Engine(demo, n_ctx=256) as engine:
        state = ServerState(engine, ServerSettings(model_names=("demo",)))
        yield application_of(state, [post("/v1/count", names["count"], TextsRequest, "Count tokens.")])


def answer_and_hold(application: Starlette, body: dict[str, Any]) -> tuple[httpx.Response, float]:
    return asyncio.run(longest_hold_s(application, "/v1/count", json.dumps(body).encode()))


def test_the_route_counts_tokens(application: Starlette, demo: lp.Model) -> None:
    texts = ["", "Hello", "Once upon a time"]
    answer, _ = answer_and_hold(application, {"texts": texts})
    assert answer.json() == {"counts": [len(demo.tokenize(text)) for text in texts]}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "texts"),
        ({"texts": ["a"], "other": 1}, 400, "other"),
        ({"texts": ["a", "a" * 3_000_000]}, 400, "the text has 3000000 characters"),
        ({"texts": ["a"] * 300_000}, 400, "texts has 300000 items"),
        ({"texts": ["a"], "model": "no such"}, 404, "'no such'"),
    ],
)
def test_the_route_refuses_bad_bodies(
    application: Starlette, body: dict[str, Any], status: int, message: str
) -> None:
    answer, _ = answer_and_hold(application, body)
    assert (answer.status_code, message in answer.text) == (status, True)


@pytest.mark.parametrize(("text", "n"), [("Once upon a time, " * 50, 3000), ("a", 10_000)])
def test_many_texts_do_not_hold_the_loop(application: Starlette, text: str, n: int) -> None:
    answer, longest_s = answer_and_hold(application, {"texts": [text] * n})
    assert (answer.status_code, len(answer.json()["counts"])) == (200, n)
    assert longest_s < 0.3, longest_s
