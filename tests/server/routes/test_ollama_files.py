"""Ollama's routes for files: downloads from a hub on loopback, further names, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.control import PATIENCE_S
from support.gguf_models import tiny_model
from support.ollama_store import put_model
from support.server_process import ServerProcess
from support.small_hub import SmallHub, small_hub

import llamapipe as lp
from llamapipe.server import ServerSettings, serve

pytest.importorskip("huggingface_hub")
REPO = "hf.co/some/model"
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallHub]:
    folder = tmp_path_factory.mktemp("hub")
    f16 = tiny_model(folder / "one.gguf").read_bytes()
    other = tiny_model(folder / "other.gguf", type_name="q8_0").read_bytes()
    with small_hub({"some/model": {"m-F16.gguf": f16, "m-Q8_0.gguf": other}}) as hub:
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of huggingface_hub."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def client(hub: SmallHub, home: Path) -> Iterator[httpx.Client]:
    """A client of a server in a process of its own: huggingface_hub reads its settings when it is imported."""
    variables = hub.variables(home) | {"OLLAMA_MODELS": str(home / "ollama")}
    put_model(home / "ollama", "registry.ollama.ai/library/theirs/latest", b"GGUF")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        options = ("--n-ctx", "64", "--ollama", "--allow-pull", "--allow-delete")
        with (
            ServerProcess(*options, cwd=home) as server,
            httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
        ):
            yield client


@pytest.fixture(autouse=True)
def empty_cache(home: Path) -> None:
    shutil.rmtree(home / "hub", ignore_errors=True)


def pull(client: httpx.Client, name: str) -> list[dict[str, Any]]:
    answer = client.post("/api/pull", json={"model": name})
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def files(home: Path) -> set[str]:
    return {path.name for path in (home / "hub").rglob("*.gguf")}


def refused(answer: httpx.Response, status: int = 403) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert isinstance(error, str)
    return error


@pytest.mark.parametrize("name", [f"{REPO}:Q8_0", "hf:some/model:q8_0", f"https://{REPO}:Q8_0"])
def test_a_pull_with_its_progress(client: httpx.Client, hub: SmallHub, home: Path, name: str) -> None:
    progress = pull(client, name)
    size = len(hub.files["some/model"]["m-Q8_0.gguf"])
    assert progress[0] == {"status": "pulling manifest"} and progress[-1] == {"status": "success"}
    counts = [(line["total"], line["completed"]) for line in progress if "total" in line]
    assert counts[-1] == (size, size) and counts == sorted(counts)
    assert files(home) == {"m-Q8_0.gguf"}
    assert pull(client, name)[-1] == {"status": "success"}  # from the cache


def test_a_pull_without_a_stream(client: httpx.Client, home: Path) -> None:
    answer = client.post("/api/pull", json={"name": f"{REPO}:F16", "stream": False})
    assert (answer.status_code, answer.json()) == (200, {"status": "success"})
    assert files(home) == {"m-F16.gguf"}
    again = {"model": f"{REPO}:F16", "stream": False, "insecure": True}  # Open WebUI's form
    answer = client.post("/api/pull", json=again)
    assert (answer.status_code, answer.headers["x-llamapipe-unused"]) == (200, "insecure")


def test_what_cannot_be_pulled(client: httpx.Client, home: Path) -> None:
    last = pull(client, "hf.co/no/such")[-1]
    assert "there is no such repository" in last["error"]
    assert "name one of m-F16.gguf, m-Q8_0.gguf" in pull(client, REPO)[-1]["error"]
    answer = client.post("/api/pull", json={"model": "hf.co/no/such", "stream": False})
    assert "there is no such repository" in refused(answer, 404)
    for name in ("llama3.2", "library/llama3.2:1b", "hf.co/../etc", "../x", "hf.co/a/b/c"):
        answer = client.post("/api/pull", json={"model": name, "stream": False})
        assert answer.status_code in (400, 404) and isinstance(answer.json()["error"], str)
    for body in ({}, {"model": 3}, {"model": ""}, {"model": "x", "y": 1}):
        refused(client.post("/api/pull", json=body), 400)
    assert not files(home)


def test_a_broken_download_continues(client: httpx.Client, hub: SmallHub, home: Path) -> None:
    hub.cut_after = 10_000
    pull(client, f"{REPO}:F16")
    assert pull(client, f"{REPO}:F16")[-1] == {"status": "success"}
    assert files(home) == {"m-F16.gguf"}


def test_a_served_model_is_there(client: httpx.Client, hub: SmallHub) -> None:
    hub.requests.clear()
    assert (
        pull(client, "demo")
        == pull(client, "demo:latest")
        == [
            {"status": "pulling manifest"},
            {"status": "success"},
        ]
    )
    assert not hub.requests


def test_a_deleted_file_is_gone_and_no_other(client: httpx.Client, home: Path) -> None:
    for name in (f"{REPO}:F16", f"{REPO}:Q8_0"):
        pull(client, name)
    assert files(home) == {"m-F16.gguf", "m-Q8_0.gguf"}
    assert client.request("DELETE", "/api/delete", json={"model": f"{REPO}:F16"}).status_code == 200
    assert files(home) == {"m-Q8_0.gguf"}
    blobs = [path for path in (home / "hub").rglob("blobs/*") if path.is_file() and not path.is_symlink()]
    assert len(blobs) == 1
    assert "m-Q8_0" in refused(client.request("DELETE", "/api/delete", json={"model": f"{REPO}:F16"}), 404)
    assert "is loaded" in refused(client.request("DELETE", "/api/delete", json={"model": "demo"}))
    assert "belongs to Ollama" in refused(client.request("DELETE", "/api/delete", json={"model": "theirs"}))
    refused(client.request("DELETE", "/api/delete", json={"model": "other"}), 400)
    for rest in ("/../../etc/passwd", "/[a-", "/blob/main/README.md"):  # not the whole repository
        refused(client.request("DELETE", "/api/delete", json={"model": REPO + rest}), 400)
    refused(client.request("DELETE", "/api/delete", json={}), 400)


def test_a_copy_is_another_name(client: httpx.Client) -> None:
    body = {"source": "demo", "destination": "user/demo"}
    for _ in range(2):
        assert client.post("/api/copy", json=body).status_code == 200
    names = [model["name"] for model in client.get("/api/tags").json()["models"]]
    assert names == ["demo:latest", "user/demo:latest"]
    chat = {"model": "user/demo", "messages": HELLO, "stream": False}
    assert client.post("/api/chat", json=chat).json()["model"] == "user/demo"
    assert (
        client.post("/v1/chat/completions", json={"model": "user/demo", "messages": HELLO}).status_code == 200
    )
    assert client.request("DELETE", "/api/delete", json={"model": "user/demo:latest"}).status_code == 200
    refused(client.post("/api/chat", json=chat), 404)
    refused(client.post("/api/copy", json={**body, "source": "other"}), 404)
    for destination in ("", "a b", "é", "\n", "x" * 300, "-x"):
        refused(client.post("/api/copy", json={**body, "destination": destination}), 400)
    for i in range(100):
        client.post("/api/copy", json={**body, "destination": f"copy{i}"})
    assert "which is the limit" in refused(
        client.post("/api/copy", json={**body, "destination": "more"}), 400
    )


REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/api/pull", {"model": f"{REPO}:F16"}),
    ("DELETE", "/api/delete", {"model": f"{REPO}:F16"}),
    ("POST", "/api/copy", {"source": "demo", "destination": "other"}),
]


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_only_if_the_operator_allows_it(demo: lp.Model, method: str, path: str, body: dict[str, Any]) -> None:
    allowed = ServerSettings(ollama=True, allow_pull=True, allow_delete=True)
    with (
        lp.Engine(demo, n_ctx=64, n_seq_max=1) as engine,
        serve(engine, settings=ServerSettings(ollama=True)) as plain,
        serve(engine, host="0.0.0.0", settings=allowed) as public,
        serve(engine, settings=allowed) as local,
    ):
        assert "start it with --allow-" in refused(httpx.request(method, f"{plain.url}{path}", json=body))
        url = f"http://127.0.0.1:{public.port}{path}"
        assert "needs an API key" in refused(httpx.request(method, url, json=body))
        headers = {"origin": "https://evil.example"}
        answer = httpx.request(method, f"{local.url}{path}", json=body, headers=headers)
        assert "may not use this server" in refused(answer)
        key = {"content-type": "text/plain", "origin": "http://localhost"}
        if method == "POST":
            answer = httpx.post(f"{local.url}{path}", content=json.dumps(body), headers=key)
            assert refused(answer, 415)


def test_the_options_need_ollama() -> None:
    with pytest.raises(ValueError, match="allow_pull needs ollama"):
        ServerSettings(allow_pull=True)
    with pytest.raises(ValueError, match="allow_delete needs ollama"):
        ServerSettings(allow_delete=True)
