"""What one API key sees of another's work, on every route of a server with several keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from support.control import PATIENCE_S, wait_until
from support.fleet_servers import pool_server, worker_server
from support.served import http_client

import llamapipe as lp

MARK = "patient-4711"  # in everything that the first key names or writes
CHAT = {"messages": [{"role": "user", "content": MARK}], "max_tokens": 4}
ENDLESS = ("/models/sse",)
LATER = {"model": "demo", "max_output_tokens": 4, "background": True}


class Keys(NamedTuple):
    """A server's clients, one for each of its keys. ``has_files``: it saves conversations."""

    mine: httpx.Client
    others: httpx.Client
    has_files: bool


@contextmanager
def served(kind: str, folder: Path) -> Iterator[Keys]:
    store, keys, slots = folder / "answers.db", folder / "keys", folder / "slots"
    keys.write_text("mine\nother\n")
    slots.mkdir()
    options = ("--api-key-file", str(keys), "--store", str(store), "--ollama", "--alias", "demo")
    with ExitStack() as stack:
        if kind == "one model":
            engine = stack.enter_context(lp.Engine(lp.demo_model_path(), n_ctx=512, n_seq_max=2))
            settings: dict[str, Any] = {"store": store, "ollama": True, "model_names": ("demo",)}
            server = http_client(engine, api_keys=("mine", "other"), slot_save_path=slots, **settings)
            base = stack.enter_context(server).base_url
        elif kind == "workers":
            base = stack.enter_context(worker_server(2, *options, log=folder / "log")).client.base_url
        else:
            models = folder / "models.toml"
            models.write_text(f'[models.demo]\nfile = "{lp.demo_model_path()}"\nn_ctx = 512\n')
            more = (*options[:-2], "--slot-save-path", str(slots))
            base = stack.enter_context(pool_server(models, *more, log=folder / "log")).client.base_url
        clients = (
            httpx.Client(base_url=base, timeout=PATIENCE_S, headers={"authorization": f"Bearer {key}"})
            for key in ("mine", "other")
        )
        own, others = map(stack.enter_context, clients)
        yield Keys(own, others, kind != "workers")


@pytest.fixture(scope="module", params=["one model", "workers", "models"])
def keys(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    with served(request.param, tmp_path_factory.mktemp("keys")) as keys:
        yield keys


def listed(client: httpx.Client) -> list[dict[str, Any]]:
    """The list of requests."""
    return list(client.get("/requests").raise_for_status().json()["data"])


def work(client: httpx.Client, with_files: bool) -> dict[str, str]:
    """Use every route that leaves something on the server. Returns paths of it, by what is in their place."""
    named = {"x-request-id": MARK}

    def post(path: str, body: Any = None, **more: Any) -> Any:
        answer = client.post(path, json=body, headers=named, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()

    post("/v1/chat/completions", {"model": "demo", **CHAT, "id_slot": MARK})
    refused = client.post("/v1/completions", json={"prompt": MARK, "temperature": -1}, headers=named)
    assert refused.status_code == 400
    answer = post("/v1/responses", {**LATER, "background": False, "input": MARK, "metadata": {"who": MARK}})
    later = post("/v1/responses", {**LATER, "input": MARK})
    thread = post(
        "/v1/conversations", {"items": [{"role": "user", "content": MARK}], "metadata": {"who": MARK}}
    )
    line = {
        "custom_id": MARK,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "demo", **CHAT},
    }
    uploaded = client.post(
        "/v1/files",
        data={"purpose": "batch"},
        files={"file": (f"{MARK}.jsonl", json.dumps(line))},
        headers=named,
    )
    file = uploaded.raise_for_status().json()
    batch = post(
        "/v1/batches",
        {
            "input_file_id": file["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "metadata": {"who": MARK},
        },
    )
    wait_until(lambda: client.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed")
    wait_until(lambda: client.get(f"/v1/responses/{later['id']}").json()["status"] == "incomplete")
    paths = {
        "/v1/responses/{id}": f"/v1/responses/{answer['id']}",
        "/v1/responses/{id}?stream=true": f"/v1/responses/{later['id']}?stream=true",
        "/v1/conversations/{id}": f"/v1/conversations/{thread['id']}",
        "/v1/files/{id}": f"/v1/files/{file['id']}",
        "/v1/batches/{id}": f"/v1/batches/{batch['id']}",
    }
    if with_files:
        saved = f"{MARK}.bin"
        assert post(f"/slots/{MARK}?action=save", {"filename": saved})["n_saved"] > 0
        paths["/slots/files/{filename}"] = f"/slots/files/{saved}"
    return paths


def test_no_route_shows_the_work_of_another_key(keys: Keys) -> None:
    left = work(keys.mine, keys.has_files)
    # All of it is there for the one that made it.
    wait_until(lambda: len([entry for entry in listed(keys.mine) if entry["id"] == MARK]) >= 3)
    for path in ("/v1/files", "/v1/batches", "/jobs", *(["/slots/files"] if keys.has_files else [])):
        assert MARK in keys.mine.get(path).text, path

    paths: dict[str, Any] = keys.others.get("/openapi.json").json()["paths"]
    shown = {
        path: keys.others.get(path)
        for path, methods in paths.items()
        if "get" in methods and "{" not in path and path not in ENDLESS
    }
    shown |= {path: keys.others.get(path) for path in ("/timeline", "/openapi.json", "/v1/models/demo")}
    assert len(shown) > 15 and "/requests" in shown
    assert [
        path for path, answer in shown.items() if MARK in answer.text or MARK in str(answer.headers)
    ] == []
    assert listed(keys.others) == []
    assert shown["/v1/files"].json()["data"] == shown["/v1/batches"].json()["data"] == []

    for path in left.values():
        if "files/" + MARK not in path:
            assert keys.others.get(path).status_code == 404, path
        assert keys.others.delete(path.partition("?")[0]).status_code in (404, 405), path
    for path in (left["/v1/responses/{id}"], left["/v1/batches/{id}"]):
        assert keys.others.post(f"{path}/cancel").status_code == 404, path
    if keys.has_files:  # a name is each key's own
        named = {"filename": f"{MARK}.bin"}
        assert keys.others.post(f"/slots/{MARK}?action=restore", json=named).status_code == 404
        assert keys.others.post(f"/slots/{MARK}?action=erase").json()["n_erased"] == 0
    assert [path for path in left.values() if keys.mine.get(path).status_code == 404] == []


def test_both_keys_have_their_own_requests(keys: Keys) -> None:
    for client, name in ((keys.mine, "first"), (keys.others, "second")):
        answer = client.post(
            "/v1/chat/completions", json={"model": "demo", **CHAT}, headers={"x-request-id": name}
        )
        assert answer.status_code == 200, answer.text
        wait_until(lambda: name in [entry["id"] for entry in listed(client)])  # noqa: B023
    assert "second" not in [entry["id"] for entry in listed(keys.mine)]
    assert "first" not in [entry["id"] for entry in listed(keys.others)]
    assert not any("owner" in entry for entry in listed(keys.mine))


def test_a_refusal_before_the_body_has_an_owner(demo: lp.Model) -> None:
    """As by the limit of requests, and what has no owner, because no key was looked at, is nobody's."""
    with (
        lp.Engine(demo, n_ctx=1024, n_seq_max=1) as engine,
        http_client(engine, api_keys=("mine", "other"), max_requests=1) as client,
    ):
        own, others = ({"authorization": f"Bearer {key}", "x-request-id": key} for key in ("mine", "other"))
        endless = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=endless, headers=own) as running:
            lines = running.iter_lines()  # a variable, because the answer is closed with it
            next(lines)
            assert client.post("/v1/completions", json={"prompt": "a"}, headers=others).status_code == 429
        foreign = {**own, "x-request-id": "nobody", "sec-fetch-site": "same-origin"}
        assert client.post("/v1/completions", content="prompt=a", headers=foreign).status_code == 415

        def ids(headers: dict[str, str]) -> list[str]:  # none while another request counts
            data = client.get("/requests", headers=headers).json().get("data", ())
            return [entry["id"] for entry in data]

        wait_until(lambda: ids(own) == ["mine"])
        wait_until(lambda: ids(others) == ["other"])


def test_one_key_sees_all_requests(demo: lp.Model) -> None:
    with lp.Engine(demo, n_ctx=256, n_seq_max=1) as engine, http_client(engine, api_keys=("key",)) as client:
        client.headers["authorization"] = "Bearer key"
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "one"})
        wait_until(lambda: [entry["id"] for entry in listed(client)] == ["one"])
