"""``llamapipe serve --models`` over stores: what Ollama has downloaded, the hub's cache, and what clients pull."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.control import wait_until
from support.fleet_servers import PoolServer, pool_server
from support.gguf_models import tiny_model
from support.ollama_store import put_model
from support.small_hub import SmallHub, small_hub

import llamapipe as lp
from llamapipe.cli._models_file import entries_of
from llamapipe.cli.parser import UsageError
from llamapipe.fleet.catalog import ModelEntry

pytest.importorskip("huggingface_hub")
REPO = "hf.co/some/model"
OPTIONS = ("--n-ctx", "64", "--n-seq-max", "2", "--ollama", "--allow-pull", "--allow-delete")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallHub]:
    folder = tmp_path_factory.mktemp("hub")
    f16 = tiny_model(folder / "one.gguf").read_bytes()
    other = tiny_model(folder / "other.gguf", type_name="q8_0").read_bytes()
    files = {"m-F16.gguf": f16, "m-Q8_0.gguf": other, "mmproj-m.gguf": b"GGUF"}
    with small_hub({"some/model": files}) as hub:
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    for place in ("registry.ollama.ai/library/stories/latest", "registry.ollama.ai/library/stories/15m"):
        put_model(home / "ollama", place, lp.demo_model_path().read_bytes())
    return home


@pytest.fixture(scope="module")
def server(hub: SmallHub, home: Path) -> Iterator[PoolServer]:
    variables = hub.variables(home) | {"OLLAMA_MODELS": str(home / "ollama")}
    log = home / "log"
    with pool_server("ollama:", "--models", "hf:", *OPTIONS, log=log, **variables) as server:
        yield server


def pulled(server: PoolServer, name: str) -> dict[str, Any]:
    answer = server.client.post("/api/pull", json={"model": name})
    assert answer.status_code == 200, answer.text
    last = json.loads(answer.text.splitlines()[-1])
    assert isinstance(last, dict)
    return last


def chat(server: PoolServer, name: str) -> int:
    asked = {"model": name, "prompt": "Once", "stream": False, "raw": True, "options": {"num_predict": 2}}
    return server.client.post("/api/generate", json=asked).status_code


def listed(server: PoolServer) -> list[str]:
    return [entry["name"] for entry in server.client.get("/api/tags").json()["models"]]


def delete(server: PoolServer, name: str) -> tuple[int, str]:
    answer = server.client.request("DELETE", "/api/delete", json={"model": name})
    return answer.status_code, answer.text


def test_what_ollama_has_downloaded_is_listed_and_loaded_by_its_names(server: PoolServer) -> None:
    assert {"stories:latest", "stories:15m"} <= set(listed(server))
    assert chat(server, "stories") == chat(server, "stories:latest") == chat(server, "stories:15m") == 200
    assert len(server.pids("stories")) == 1
    status, text = delete(server, "stories")
    assert status == 403 and "ollama rm" in text


def test_a_pulled_model_is_served_until_it_is_deleted(server: PoolServer, home: Path) -> None:
    name = f"{REPO}:Q8_0"
    assert chat(server, name) == 404
    assert pulled(server, name) == {"status": "success"}
    assert name in listed(server)
    assert chat(server, name) == 200
    assert pulled(server, name) == {"status": "success"}  # is here
    server.process.send_signal(1)  # SIGHUP: the cache is read again, and its process stays
    assert chat(server, name) == 200
    assert len(server.pids(name)) == 1
    assert delete(server, name)[0] == 200
    wait_until(lambda: name not in listed(server))
    assert chat(server, name) == delete(server, name)[0] == 404
    assert not list((home / "hub").rglob("m-Q8_0.gguf"))
    assert pulled(server, name) == {"status": "success"}
    assert chat(server, name) == 200
    delete(server, name)


def test_a_pulled_model_has_the_name_that_was_asked_for(server: PoolServer) -> None:
    assert pulled(server, f"{REPO}:f16") == {"status": "success"}
    assert f"{REPO}:F16" in listed(server)
    assert chat(server, f"{REPO}:f16") == chat(server, f"{REPO}:F16") == 200
    assert pulled(server, "hf.co/some/model/m-F16.gguf") == {"status": "success"}  # is served by other names
    assert chat(server, "hf.co/some/model/m-F16.gguf") == chat(server, f"{REPO}:f16") == 200
    assert listed(server).count(f"{REPO}:F16") == 1
    delete(server, f"{REPO}:F16")


def test_what_cannot_be_pulled_changes_nothing(server: PoolServer) -> None:
    before = listed(server)
    assert "there is no such repository" in pulled(server, "hf.co/no/such")["error"]
    assert server.client.post("/api/pull", json={"model": "llama3.2"}).status_code == 400
    assert server.client.post("/api/pull", json={}).status_code == 400
    assert listed(server) == before


def test_without_the_options_clients_add_and_delete_nothing(tmp_path: Path, home: Path) -> None:
    shutil.copy(lp.demo_model_path(), tmp_path / "a.gguf")
    with pool_server(tmp_path, "--ollama", log=tmp_path / "log", HF_HOME=str(tmp_path)) as server:
        answer = server.client.post("/api/pull", json={"model": f"{REPO}:F16"})
        assert answer.status_code == 403 and "--allow-pull" in answer.text
        assert delete(server, "a")[0] == 403


def test_sources_are_named_in_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    with pytest.raises(UsageError, match="OLLAMA_MODELS"):
        entries_of(["ollama:"])
    with pytest.raises(UsageError, match="names no model on the hub"):
        entries_of(["hf:owner"])
    with pytest.raises(UsageError, match="ollama: or hf:"):
        entries_of([str(tmp_path / "missing")])
    assert entries_of(["hf:owner/repo:Q4_K_M"]) == [ModelEntry("owner/repo:Q4_K_M", "hf:owner/repo:Q4_K_M")]
