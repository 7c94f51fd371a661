"""Adapters over HTTP: a LoRA has a model's name in every API, and llama-server's number."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.adapters import make_adapter, make_control_vector
from support.control import PATIENCE_S, wait_until
from support.served import http_client

import llamapipe as lp
from llamapipe.server import ServerSettings

PROMPT = "Once upon a time"
SAMPLED: dict[str, Any] = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    model = lp.demo_model_path()
    return [make_adapter(folder / f"{n}.gguf", model, seed=i, strength=0.3) for i, n in enumerate("ab")]


@pytest.fixture(scope="module")
def engine(files: list[Path]) -> Iterator[lp.Engine]:
    with lp.Model.demo() as model:
        for file in files:
            model.load_adapter(file)
        with lp.Engine(model, n_ctx=512, n_threads=1) as engine:
            yield engine
            engine.check_integrity()


@pytest.fixture(scope="module")
def client(engine: lp.Engine) -> Iterator[httpx.Client]:
    with http_client(engine, model_names=("demo",)) as client:
        yield client


def text(engine: lp.Engine, adapter: Any, **more: Any) -> str:
    return engine.generate(PROMPT, lp.SamplingParams(adapter=adapter, **SAMPLED, **more)).text


def test_adapters_are_listed_as_models_with_their_parent(client: httpx.Client) -> None:
    entries = {entry["id"]: entry for entry in client.get("/v1/models").json()["data"]}
    assert list(entries) == ["demo", "a", "b"]
    assert "parent" not in entries["demo"]
    assert entries["a"]["root"] == entries["a"]["parent"] == "demo"
    assert client.get("/v1/models/b").json() == entries["b"]
    assert client.delete("/v1/models/b").status_code == 403
    listed = client.get("/lora-adapters").json()
    assert listed == [{"id": i, "name": n, "path": f"{n}.gguf", "scale": 0.0} for i, n in enumerate("ab")]


@pytest.mark.parametrize("name", ["demo", "a", "b"])
def test_completions_use_the_adapter_of_their_model(
    client: httpx.Client, engine: lp.Engine, name: str
) -> None:
    expected = text(engine, None if name == "demo" else name)
    answer = client.post("/v1/completions", json={"model": name, "prompt": PROMPT, **SAMPLED}).json()
    assert (answer["model"], answer["choices"][0]["text"]) == (name, expected)
    body = {"model": name, "prompt": PROMPT, "stream": True, "echo": True, "logprobs": 0, **SAMPLED}
    lines = client.post("/v1/completions", json=body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == PROMPT + expected


def test_the_adapters_change_the_text(engine: lp.Engine) -> None:
    assert len({text(engine, adapter) for adapter in (None, "a", "b", {"a": 0.5})}) == 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
def test_conversations_use_the_adapter_of_their_model(
    client: httpx.Client, engine: lp.Engine, path: str, body: dict[str, Any]
) -> None:
    limit = "max_output_tokens" if "input" in body else "max_tokens"
    for name in ("a", "demo", "b"):
        params = lp.SamplingParams(adapter=None if name == "demo" else name, **SAMPLED)
        expected = engine.chat("Hi", params).content
        answer = client.post(path, json={"model": name, **body, limit: 12, "temperature": 0}).json()
        assert answer["model"] == name
        assert json.dumps(expected) in json.dumps(answer)


def test_llama_servers_field(client: httpx.Client, engine: lp.Engine) -> None:
    def content(**more: Any) -> str:
        body = {"prompt": PROMPT, "n_predict": 12, "temperature": 0, **more}
        return str(client.post("/completion", json=body).json()["content"])

    scaled = {"id": 0, "scale": 0.5}
    assert content() == content(lora=[]) == text(engine, None)
    assert content(lora=[scaled]) == text(engine, {"a": 0.5})
    assert content(lora=[scaled, {"id": 1}]) == text(engine, {"a": 0.5, "b": 1.0})
    assert content(lora=[{"id": "b"}]) == content(model="b") == text(engine, "b")
    listed = client.get("/lora-adapters").json()
    assert content(lora=[{**entry, "scale": 0.5} for entry in listed]) == text(engine, {"a": 0.5, "b": 0.5})


def test_llama_servers_field_of_openais_routes(client: httpx.Client, engine: lp.Engine) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    for lora, adapter in (([{"id": 0, "scale": 0.5}], {"a": 0.5}), ([{"id": "b"}], "b"), ([], None)):
        said = client.post("/v1/completions", json={**body, "lora": lora}).json()["choices"][0]["text"]
        assert said == text(engine, adapter)
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40, "temperature": 0}
    answers = [
        client.post("/v1/chat/completions", json={**chat, **more}).json()["choices"][0]["message"]
        for more in ({"model": "a"}, {"lora": [{"id": 0}]}, {})
    ]
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lora": [{"id": 2}]}, "there is no adapter 2; GET /lora-adapters lists 2"),
        ({"lora": [{"id": 0}, {"id": 0}]}, "names the adapter 0 twice"),
        ({"lora": [{"id": 0}], "model": "a"}, "lora chooses others"),
        (
            {"lora": [{"id": 0, "scale": 1e9}]},
            "lora: the scale of 0 is 1000000000.0; it must be from -1000 to",
        ),
        ({"lora": [{"id": 0, "sclae": 0.5}]}, "sclae"),
        ({"lora": [{"id": "c"}]}, "there is no adapter 'c'; GET /lora-adapters lists 2"),
    ],
)
def test_wrong_choices_are_refused(client: httpx.Client, more: dict[str, Any], message: str) -> None:
    answer = client.post("/completion", json={"prompt": PROMPT, "n_predict": 2, **more})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"] and error["param"].startswith("lora")


def test_a_control_vector_is_a_model_too(tmp_path: Path, client: httpx.Client, engine: lp.Engine) -> None:
    file = make_control_vector(tmp_path / "calm.gguf", engine.model.n_embd, range(1, 4), strength=30.0)
    with engine.model.load_control_vector(file) as vector:
        assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == [
            "demo",
            "a",
            "b",
            "calm",
        ]
        assert len(client.get("/lora-adapters").json()) == 2
        answer = client.post("/v1/completions", json={"model": "calm", "prompt": PROMPT, **SAMPLED}).json()
        assert answer["choices"][0]["text"] == text(engine, vector) != text(engine, None)


def test_an_activated_lora_shares_the_models_cells(
    tmp_path: Path, client: httpx.Client, engine: lp.Engine
) -> None:
    model = engine.model
    shared = model.tokenize(
        PROMPT + " there was a little girl named Lily, who had a red ball and a small dog. " * 2
    )
    invocations = [model.tokenize(text, add_special=False) for text in ("\nMood:", "\nTitle:")]
    files = [
        make_adapter(
            tmp_path / f"{n}.gguf", lp.demo_model_path(), seed=i, strength=0.3, invocation=invocations[i]
        )
        for i, n in enumerate(("mood", "title"))
    ]
    with model.load_adapter(files[0]), model.load_adapter(files[1]):
        listed = client.get("/lora-adapters").json()
        assert [entry.get("alora_invocation_string") for entry in listed] == [
            None,
            None,
            "\nMood:",
            "\nTitle:",
        ]
        assert (
            listed[2]["alora_invocation_tokens"] == invocations[0]
            and "alora_invocation_tokens" not in listed[0]
        )

        def complete(name: str, more: list[int]) -> tuple[str, int]:
            body = {"model": name, "prompt": [*shared, *more], **SAMPLED}
            answer = client.post("/v1/completions", json=body).json()
            assert answer["model"] == name
            return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        base = complete("demo", [*invocations[0]])[0]
        for i, name in enumerate(("mood", "title")):
            said, n_cached = complete(name, invocations[i])
            assert n_cached == len(shared)
            prompt = [*shared, *invocations[i]]
            assert said == engine.generate(prompt, lp.SamplingParams(adapter=name, **SAMPLED)).text != base
        assert complete("mood", [])[0] == complete("demo", [])[0]
        body = {"prompt": PROMPT, "n_predict": 2, "lora": [{"id": 2}, {"id": 3}]}
        answer = client.post("/completion", json=body)
        assert answer.status_code == 400 and "several activated LoRAs" in answer.json()["error"]["message"]


def test_a_scale_with_which_numbers_overflow_is_the_clients_error(tmp_path: Path) -> None:
    file = make_adapter(tmp_path / "huge.gguf", lp.demo_model_path(), strength=1e18)
    with (
        lp.Model.demo() as model,
        model.load_adapter(file),
        lp.Engine(model, n_ctx=256) as engine,
        http_client(engine, model_names=("demo",)) as client,
    ):
        bodies: dict[str, dict[str, Any]] = {
            "/completion": {"prompt": PROMPT, "n_predict": 2},
            "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2},
        }
        for path, body in bodies.items():
            answer = client.post(path, json={**body, "lora": [{"id": 0, "scale": 1000}]})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "lora"), path
            assert error["message"].startswith("lora: with the scale 1000, the model")


def test_ollamas_api_has_adapters_as_models(engine: lp.Engine) -> None:
    with http_client(engine, model_names=("demo",), ollama=True, allow_pull=True) as client:
        tags = {model["name"]: model for model in client.get("/api/tags").json()["models"]}
        assert list(tags) == ["demo:latest", "a:latest", "b:latest"]
        assert tags["a:latest"]["details"]["parent_model"] == "demo:latest"
        assert len({model["digest"] for model in tags.values()}) == 3
        assert {len(model["digest"]) for model in tags.values()} == {64}
        assert [model["name"] for model in client.get("/api/ps").json()["models"]] == list(tags)
        assert client.post("/api/show", json={"model": "a"}).status_code == 200
        options = {"num_predict": 12, "temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0}
        for name, adapter in (("a", "a"), ("b:latest", "b"), ("demo", None)):
            body = {"model": name, "prompt": PROMPT, "raw": True, "stream": False, "options": options}
            answer = client.post("/api/generate", json=body).json()
            assert (answer["model"], answer["response"]) == (name, text(engine, adapter))
            body = {**body, "messages": [{"role": "user", "content": "Hi"}]}
            del body["prompt"], body["raw"]
            answer = client.post("/api/chat", json=body).json()
            expected = engine.chat("Hi", lp.SamplingParams(adapter=adapter, **SAMPLED)).content
            assert answer["message"]["content"] == expected
        for name, adapter in (("a:latest", "a"), ("demo:latest", None)):
            body = {"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
            answer = client.post("/v1/completions", json=body).json()
            assert answer["choices"][0]["text"] == text(engine, adapter)
        copied = client.post("/api/copy", json={"source": "a", "destination": "c"})
        assert copied.status_code == 400 and "adapter, which has one name" in copied.json()["error"]


def test_clients_load_and_unload(tmp_path: Path, engine: lp.Engine) -> None:
    folder = tmp_path / "loras"
    folder.mkdir()
    make_adapter(folder / "c.gguf", lp.demo_model_path(), seed=7, strength=0.3)
    make_adapter(tmp_path / "d.gguf", lp.demo_model_path(), seed=8)
    (folder / "link.gguf").symlink_to(tmp_path / "d.gguf")
    (folder / "bad.gguf").write_bytes(b"GGUF")
    (folder / "loop.gguf").symlink_to(folder / "loop.gguf")
    with http_client(engine, model_names=("demo",), lora_path=folder) as client:

        def load(name: str, path: object, **more: object) -> httpx.Response:
            return client.post(
                "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more}
            )

        def unload(name: str) -> httpx.Response:
            return client.post("/v1/unload_lora_adapter", json={"lora_name": name})

        done = load("c", "c.gguf")
        assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'c' added successfully.")
        body = {"model": "c", "prompt": PROMPT, **SAMPLED}
        completion = client.post("/v1/completions", json=body).json()
        assert completion["choices"][0]["text"] == text(engine, "c") != text(engine, None)
        wrong = (
            (load("c", "c.gguf"), 400, "name of another"),
            (load("demo", "c.gguf"), 400, "name of another"),
            (load("e", tmp_path / "d.gguf"), 403, "not in the folder"),
            (load("e", "../d.gguf"), 403, "not in the folder"),
            (load("e", "link.gguf"), 403, "not in the folder"),
            (load("e", "c.gguf/\0"), 403, "not in the folder"),
            (load("e", "no.gguf"), 404, "does not exist"),
            (load("e", "a" * 5000), 400, "File name too long"),
            (load("e", "a" * 300), 400, "File name too long"),
            (load("e", "a/" * 5000), 400, "File name too long"),
            (load("e", "c.gguf/a"), 404, "Not a directory"),
            (load("e", "loop.gguf"), 403, "not in the folder"),
            (load("e", "bad.gguf"), 400, "bad.gguf"),
            (load("", "c.gguf"), 400, "has 0 characters"),
            (load("e", "c.gguf", load_inplace=True), 400, "unload it first"),
            (unload("a"), 403, "was loaded when the server started"),
            (unload("e"), 404, "loaded by clients: 'c'"),
        )
        for answer, status, message in wrong:
            assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True), (
                answer.text
            )
        assert unload("c").text == "Success: LoRA adapter 'c' removed successfully."
        assert client.post("/v1/completions", json=body).status_code == 404
        assert load("c", folder / "c.gguf").status_code == 200
        assert unload("c").status_code == 200
    assert [adapter.name for adapter in engine.adapters] == ["a", "b"]


def test_a_load_that_ends_after_its_request_can_be_undone(
    tmp_path: Path, engine: lp.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_adapter(tmp_path / "c.gguf", lp.demo_model_path(), seed=7)
    load_adapter, may_load = engine.model.load_adapter, threading.Event()

    def load_later(path: Path, name: str) -> lp.Adapter:
        may_load.wait(PATIENCE_S)
        return load_adapter(path, name)

    monkeypatch.setattr(engine.model, "load_adapter", load_later)
    with http_client(engine, model_names=("demo",), lora_path=tmp_path, timeout_s=0.2) as client:

        def unload() -> httpx.Response:
            return client.post("/v1/unload_lora_adapter", json={"lora_name": "c"})

        body = {"lora_name": "c", "lora_path": "c.gguf"}
        assert client.post("/v1/load_lora_adapter", json=body).status_code == 504
        assert unload().status_code == 404
        may_load.set()
        wait_until(lambda: engine.adapters[2:])
        wait_until(lambda: unload().status_code == 200)
    assert [adapter.name for adapter in engine.adapters] == ["a", "b"]


def test_the_limit_holds_for_loads_at_the_same_time(tmp_path: Path, engine: lp.Engine) -> None:
    make_adapter(tmp_path / "c.gguf", lp.demo_model_path(), seed=7)
    with (
        http_client(engine, model_names=("demo",), lora_path=tmp_path) as client,
        ThreadPoolExecutor(16) as threads,
    ):

        def load(i: int) -> int:
            body = {"lora_name": f"c{i}", "lora_path": "c.gguf"}
            return client.post("/v1/load_lora_adapter", json=body).status_code

        statuses = list(threads.map(load, range(80)))
        assert (statuses.count(200), statuses.count(400)) == (64, 16)
        for i in range(80):
            client.post("/v1/unload_lora_adapter", json={"lora_name": f"c{i}"})
    assert [adapter.name for adapter in engine.adapters] == ["a", "b"]


def test_clients_may_not_load_unless_the_operator_says_so(client: httpx.Client) -> None:
    for path, more in (("load", {"lora_path": "a.gguf"}), ("unload", {})):
        answer = client.post(f"/v1/{path}_lora_adapter", json={"lora_name": "a", **more})
        assert answer.status_code == 403 and "--lora-path DIR" in answer.json()["error"]["message"]
    with pytest.raises(ValueError, match="is not a folder"):
        ServerSettings(lora_path="no such folder")


def test_an_unknown_model(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"model": "c", "prompt": PROMPT})
    assert answer.status_code == 404
    assert "there is 'demo', 'a', 'b'" in answer.json()["error"]["message"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llamapipe", "generate", "--max-tokens", "12", "--temperature", "0"]
    return subprocess.run([*command, *arguments, PROMPT], capture_output=True, text=True, check=False)


def test_a_command_applies_adapters(tmp_path: Path, engine: lp.Engine, files: list[Path]) -> None:
    process = run("--lora", f"x={files[0]}", "--lora", f"y={files[1]}")
    assert process.stdout.strip() == text(engine, {"a": 1.0, "b": 1.0}).strip()
    vector = make_control_vector(tmp_path / "v.gguf", engine.model.n_embd, range(1, 4), strength=30.0)
    with engine.model.load_control_vector(vector):
        expected = text(engine, {"a": 1.0, "v": 1.0})
    process = run("--lora", f"x={files[0]}", "--control-vector", f"v={vector}")
    assert process.stdout.strip() == expected.strip() != text(engine, "a").strip()
    for arguments, message in (
        (["--lora", "x"], "must be NAME=FILE"),
        (["--lora", f"x={files[0]}", "--lora", f"x={files[1]}"], "already has an adapter 'x'"),
        (["--lora", f"x={lp.demo_model_path()}"], "it is a model"),
    ):
        wrong = run(*arguments)
        assert wrong.returncode != 0
        assert message in wrong.stderr
