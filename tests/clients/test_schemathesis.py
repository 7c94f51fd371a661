"""Requests made from the server's OpenAPI document by schemathesis: no undocumented status, and none from 500 on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import llamapipe as lp
from llamapipe.server import ServerSettings, serve
from llamapipe.server.application import OLLAMA_ROUTES, ROUTES

pytest.importorskip("schemathesis", reason="needs schemathesis: nox -s clients")

from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, openapi
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = pytest.mark.clients
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
BUSY = ("503", "504")  # documented, but not to be seen here


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("kept")
    limits = ServerSettings(max_n=16, ollama=True, store=folder / "answers.db", slot_save_path=folder)
    with (
        lp.Engine(lp.demo_model_path(), n_ctx=256, n_seq_max=16) as engine,
        serve(engine, settings=limits) as server,
    ):
        yield openapi.from_url(f"{server.url}/openapi.json")
        engine.check_integrity()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
@pytest.mark.parametrize(
    "route",
    [route for route in (*ROUTES, *OLLAMA_ROUTES) if route.summary],
    ids=lambda route: f"{route.method} {route.path}",
)
def test_only_documented_answers(schema: Any, route: Any, mode: Any) -> None:
    described = schema[route.path.replace(":path", "")][route.method]
    if mode is GenerationMode.NEGATIVE and route.body is None:
        pytest.skip("nothing of this request can be wrong")

    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=described.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        response = case.call(timeout=120)
        assert str(response.status_code) not in BUSY, response.text
        case.validate_response(response, checks=CHECKS)

    run()
