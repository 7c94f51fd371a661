"""What every route does with a model that is not served, and with values of 100,000 characters."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.bert_model import bert_model
from support.fleet_servers import pool_server
from support.served import http_client

import llamapipe as lp
from llamapipe.server.application import OLLAMA_ROUTES, ROUTES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "server.md"
TURNS = [{"role": "user", "content": "Hello"}]
ABOUT_A_MODEL = ("/props", "/slots", "/model_info", "/tokenizer_info", "/lora-adapters", "/timeline")
# A request of each route that names a model in its body, without the name.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/chat/completions/input_tokens": {"messages": TURNS},
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/v1/completions": {"prompt": "Hello"},
    "/completion": {"prompt": "Hello"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/v1/fim/completions": {"prompt": "a"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": TURNS},
    "/v1/embeddings": {"input": "Hello"},
    "/embedding": {"content": "Hello"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/tokenize": {"content": "Hello"},
    "/detokenize": {"tokens": [5]},
    "/apply-template": {"messages": TURNS},
    "/api/chat": {"messages": []},
    "/api/generate": {"keep_alive": 0},
    "/api/embed": {"input": "Hello"},
    "/api/embeddings": {"prompt": "Hello"},
    "/api/show": {},
    "/api/copy": {"destination": "b"},
}
# Names of other files than the models that are served: of the hub, or what --models does not allow at all.
OTHER_NAMES = {"/api/pull", "/api/delete"}


@pytest.fixture(scope="module")
def one_model(demo: lp.Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    file, _ = bert_model(tmp_path_factory.mktemp("models") / "bert.gguf")
    with (
        lp.Engine(demo, n_ctx=256) as engine,
        lp.Embedder(file) as embedder,
        http_client(engine, embedder=embedder, ollama=True, allow_pull=True) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def many_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "models.toml").write_text(f'[models.demo]\nfile = "{lp.demo_model_path()}"\n')
    with pool_server(folder / "models.toml", "--ollama", log=folder / "log") as server:
        yield server.client


def check(client: httpx.Client, bodies: dict[str, dict[str, Any]]) -> None:
    answers = {("GET", path): client.get(path, params={"model": "no such"}) for path in ABOUT_A_MODEL}
    answers |= {
        ("POST", path): client.post(path, json={**body, "source" if "copy" in path else "model": "no such"})
        for path, body in bodies.items()
    }
    answers |= {(method, ""): client.request(method, "/v1/models/no%20such") for method in ("GET", "DELETE")}
    assert {key: answer.status_code for key, answer in answers.items()} == dict.fromkeys(answers, 404)
    assert all("'no such'" in answer.text for answer in answers.values())
    assert client.delete("/v1/models/demo").status_code == 403
    assert client.get("/v1/models/demo").json()["id"] == "demo"
    assert client.get("/model_info", params={"model": "demo:latest"}).status_code == 200


def test_of_one_model(one_model: httpx.Client) -> None:
    check(one_model, BODIES)


def test_of_many_models(many_models: httpx.Client) -> None:
    """There, the list says which models there are: nothing can be copied."""
    check(many_models, {path: body for path, body in BODIES.items() if path != "/api/copy"})


def test_every_route_with_a_model_is_here() -> None:
    routes = (*ROUTES, *OLLAMA_ROUTES)
    named = {
        route.path
        for route in routes
        if route.body is not None and {"model", "source"} & set(route.body.__struct_fields__)
    }
    tested = BODIES.keys() | OTHER_NAMES
    untested, unknown = named - tested, tested - named
    assert not untested, "add a request of these routes to BODIES"
    assert not unknown, "these are in BODIES or OTHER_NAMES, but no route with a body that has a field model"


def test_types_of_bodies_have_different_names(one_model: httpx.Client) -> None:
    """Types of one name get longer ones in the document, which references do not follow."""
    document = one_model.get("/openapi.json").json()
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    unknown = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(document))) - known
    assert not unknown, "several types have this name: rename one"


def test_the_page_has_every_route() -> None:
    routes = PAGE.read_text(encoding="utf-8").partition("\n## Routes\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"[` ](/[^`?]*)", routes))
    paths = {route.path.replace(":path", "") for route in ROUTES if route.summary}
    missing = paths - named
    assert not missing, f"{PAGE}: add these to the table of routes"


LONG = "x" * 100_000
VALUES: tuple[Any, ...] = (LONG, {LONG: 1}, [{"type": LONG}], [LONG], 10**4000)


def test_errors_are_short(one_model: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    """No answer and no line of the log quotes more than a piece of what a client sent, and none is a failure."""
    caplog.set_level(logging.INFO)
    n_refused = 0
    for route in (*ROUTES, *OLLAMA_ROUTES):
        if route.body is None:
            continue
        fields = route.body.__struct_fields__
        shared = {"max_tokens": 1, "n_predict": 1, "model": "demo"}
        body = {name: value for name, value in shared.items() if name in fields} | BODIES.get(route.path, {})
        for i, field in enumerate((*fields, LONG)):
            for value in (VALUES[i % len(VALUES)], VALUES[(i + 1) % len(VALUES)]):
                answer = one_model.request(
                    route.method, route.path, content=json.dumps({**body, field: value})
                )
                assert answer.status_code < 500, (route.path, field[:50])
                assert sum(map(len, answer.headers.values())) < 1000, (route.path, field[:50])
                if answer.status_code != 200:
                    n_refused += 1
                    assert len(answer.content) < 2500, (route.path, field[:50])
    assert n_refused > 500
    assert max(len(logging.Formatter().format(record)) for record in caplog.records) < 5000


def test_errors_of_several_models_are_short(many_models: httpx.Client) -> None:
    for path in ("/v1/completions", "/v1/embeddings", "/api/chat", "/api/show", "/api/pull", "/models/load"):
        for value in VALUES:
            answer = many_models.post(path, content=json.dumps({"model": value}))
            assert 400 <= answer.status_code < 500, path
            assert len(answer.content) < 2500, path
    answer = many_models.get("/v1/models/" + "x" * 50_000)
    assert (answer.status_code, len(answer.content) < 2500) == (404, True)
