"""Models that Ollama has downloaded, in a store made by hand: names, damage, and what a Modelfile sets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.ollama_store import put_model
from support.run_script import environment, run_script
from support.served import http_client
from support.server_process import ServerProcess

import llamapipe as lp
from llamapipe import ollama_models
from llamapipe.cli import main
from llamapipe.cli._models_file import entries_of
from llamapipe.cli.pull import reference_of
from llamapipe.errors import ModelLoadError
from llamapipe.hub import parse
from llamapipe.ollama_models import display_name, find_stored, names_of, short_names, stored_models
from llamapipe.server import ServerSettings, serve

LIBRARY = "registry.ollama.ai/library"
PARAMETERS: dict[str, Any] = {"temperature": 0, "num_predict": 4, "stop": ["zebra", "yak"], "num_ctx": 4096}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store, where Ollama's programs and ours look for one."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.fixture
def demo_store(store: Path) -> Path:
    data = lp.demo_model_path().read_bytes()
    put_model(store, f"{LIBRARY}/demo/latest", data, license="MIT")
    put_model(store, f"{LIBRARY}/demo/1b", data)
    put_model(store, f"{LIBRARY}/mario/latest", data, system="You are Mario.", params=json.dumps(PARAMETERS))
    return store


def test_names(store: Path) -> None:
    places = ("library/a/latest", "library/a/1b-q4_K_M", "someone/b/latest")
    for i, place in enumerate(places):
        put_model(store, f"registry.ollama.ai/{place}", b"GGUF%d" % i)
    put_model(store, "hf.co/owner/repo-GGUF/Q4_K_M", b"GGUF3")
    names = [stored.name for stored in stored_models()]
    assert names == ["a:1b-q4_K_M", "a:latest", "hf.co/owner/repo-GGUF:Q4_K_M", "someone/b:latest"]
    for name in (*names, "a", "someone/b", "registry.ollama.ai/library/a:latest", "library/a"):
        assert find_stored(name).path.read_bytes().startswith(b"GGUF")
    assert find_stored("a").name == "a:latest"
    manifest = store / "manifests" / "registry.ollama.ai" / "library" / "a" / "latest"
    assert find_stored("a").digest == sha256(manifest.read_bytes()).hexdigest()


def test_names_that_cannot_be_asked_for(demo_store: Path) -> None:
    """A list, an error or a model's name would take them to a terminal, or into JSON."""
    data = lp.demo_model_path().read_bytes()
    for name in ("a\x1b[31m", "a\nb", os.fsdecode(b"a\xff"), "a b"):
        put_model(demo_store, f"{LIBRARY}/{name}/latest", data)
    assert {stored.name for stored in stored_models()} == {"demo:latest", "demo:1b", "mario:latest"}
    with pytest.raises(ModelLoadError, match="too long"):
        lp.Model(f"ollama:{'a' * 5000}")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_pipe_in_the_store(demo_store: Path) -> None:
    os.mkfifo(demo_store / "manifests" / LIBRARY / "demo" / "pipe")
    with pytest.raises(ModelLoadError, match="not a file"):
        find_stored("demo:pipe")


@pytest.mark.parametrize(
    "name",
    ["", "..", "../a", "a/../b", "/etc/passwd", "a:", ":b", "a b", "a/b/c/d", "a:b:c", "a\0", "-a", "é"],
)
def test_what_is_no_name(demo_store: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not the name of an Ollama model"):
        find_stored(name)


def test_a_name_that_is_not_there(demo_store: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no model 'demi': there is 'demo:1b', .*OLLAMA_MODELS"):
        find_stored("demi")


def test_an_empty_store(store: Path) -> None:
    assert stored_models() == []
    with pytest.raises(ModelLoadError, match="there are no models in"):
        find_stored("demo")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is damaged"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"layers": 3}', "is damaged"),
        ('{"layers": [3]}', "is damaged"),
        ('{"layers": [{"mediaType": "application/vnd.ollama.image.model"}]}', "is damaged"),
        (
            '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../x"}]}',
            "is damaged",
        ),
        ("[" * 100_000, "is damaged"),
        ('{"layers": []}', "has no GGUF file"),
        (" " * (2**20 + 1), "cannot be read"),
    ],
    ids=lambda value: value[:40],
)
def test_damaged_manifests(demo_store: Path, text: str, reason: str) -> None:
    (demo_store / "manifests" / LIBRARY / "demo" / "latest").write_text(text)
    with pytest.raises(ModelLoadError, match=reason):
        find_stored("demo")
    assert [stored.name for stored in stored_models()] == ["demo:1b", "mario:latest"]


def test_models_that_cannot_be_loaded(store: Path) -> None:
    put_model(store, f"{LIBRARY}/tuned/latest", b"GGUF", adapter="GGUF")
    with pytest.raises(ModelLoadError, match="has an adapter"):
        find_stored("tuned")
    put_model(store, f"{LIBRARY}/half/latest", b"GGUF half")
    for blob in (store / "blobs").iterdir():
        if blob.read_bytes() == b"GGUF half":
            blob.rename(blob.with_name(blob.name + "-partial"))
    with pytest.raises(ModelLoadError, match="is missing; pull the model again"):
        find_stored("half")
    assert stored_models() == []


def test_a_list_of_all_models_says_which_are_left_out(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clients get 404 for them, as for a name that nobody knows."""
    put_model(store, f"{LIBRARY}/demo/latest", b"GGUF")
    put_model(store, f"{LIBRARY}/tuned/latest", b"GGUF", adapter="GGUF")
    put_model(store, f"{LIBRARY}/cloud/latest", None)
    assert [entry.name for entry in entries_of(["ollama:"])] == ["demo"]
    cloud, tuned = capsys.readouterr().err.splitlines()
    left_out = "llamapipe: --models: left out: "
    assert (
        cloud
        == f"{left_out}cloud:latest of Ollama has no GGUF file: it runs elsewhere, or is in another format"
    )
    assert (
        tuned.startswith(f"{left_out}tuned:latest of Ollama has an adapter") and "--lora NAME=FILE" in tuned
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_store_of_another_user(demo_store: Path) -> None:
    (demo_store / "manifests").chmod(0)
    try:
        with pytest.raises(ModelLoadError, match="cannot be read: run this as its user"):
            find_stored("demo")
        assert stored_models() == []
    finally:
        (demo_store / "manifests").chmod(0o700)


def test_the_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    service = tmp_path / "service"
    monkeypatch.setattr(ollama_models, "_SERVICE", service)
    own = tmp_path / ".ollama" / "models"
    assert ollama_models.folders() == [own, service]
    put_model(service, f"{LIBRARY}/a/latest", b"GGUF service")
    put_model(service, f"{LIBRARY}/b/latest", b"GGUF service")
    put_model(own, f"{LIBRARY}/a/latest", b"GGUF own")
    assert find_stored("a").path.read_bytes() == b"GGUF own"
    assert find_stored("b").path.read_bytes() == b"GGUF service"
    assert [stored.path.read_bytes() for stored in stored_models()] == [b"GGUF own", b"GGUF service"]


def test_a_model_by_its_name(demo_store: Path) -> None:
    files = {path: path.read_bytes() for path in demo_store.rglob("*") if path.is_file()}
    with lp.Model("ollama:demo") as model, lp.Engine(model, n_ctx=64, n_seq_max=1) as engine:
        assert model.name == "demo"
        assert model.path.parent == demo_store / "blobs"
        assert engine.chat("Hi", lp.SamplingParams(max_tokens=2)).content
    with lp.Model("ollama:demo:1b", vocab_only=True) as model:
        assert model.name == "demo:1b"
    with lp.Model(model.path, vocab_only=True) as by_path:
        assert (by_path.name, display_name(lp.demo_model_path())) == ("demo:1b", "demo")
    assert [stored.name for stored in names_of(model.path)] == ["demo:1b", "demo:latest", "mario:latest"]
    assert files == {path: path.read_bytes() for path in demo_store.rglob("*") if path.is_file()}
    with pytest.raises(ModelLoadError, match="no model 'other'"):
        lp.Model("ollama:other")
    with pytest.raises(ValueError, match="is not the name"):
        lp.Model("ollama:../demo")


def test_a_modelfile_holds_for_its_name(demo_store: Path) -> None:
    with (
        lp.Engine("ollama:mario", n_ctx=128, n_seq_max=1) as engine,
        http_client(engine, model_names=("mario", "demo"), ollama=True) as client,
    ):
        asked: dict[str, Any] = {
            "messages": [{"role": "user", "content": "Hi"}],
            "stream": False,
            "options": {"seed": 1},
        }

        def ask(name: str, **more: Any) -> dict[str, Any]:
            answer = client.post("/api/chat", json={"model": name, **asked, **more})
            assert "x-llamapipe-unused" not in answer.headers
            result: dict[str, Any] = answer.json()
            return result

        mario, demo = ask("mario"), ask("demo", options={"num_predict": 6})
        system = [{"role": "system", "content": "You are Mario."}, *asked["messages"]]
        same = ask("demo", messages=system, options={"temperature": 0, "num_predict": 4})
        assert mario["message"] == same["message"]
        assert mario["eval_count"] == 4 and mario["prompt_eval_count"] == same["prompt_eval_count"]
        assert demo["prompt_eval_count"] < mario["prompt_eval_count"]
        assert ask("mario", options={"num_predict": 2})["eval_count"] == 2
        other = [{"role": "system", "content": "Hm."}, *asked["messages"]]
        assert ask("mario", messages=other)["prompt_eval_count"] < mario["prompt_eval_count"]
        text = client.post("/api/generate", json={"model": "mario", "prompt": "Hi", "stream": False}).json()
        assert text["response"] == mario["message"]["content"]

        shown = client.post("/api/show", json={"model": "mario"}).json()
        assert shown["system"] == "You are Mario."
        assert set(shown["parameters"].splitlines()) == {
            "temperature 0", "num_predict 4", 'stop "zebra"', 'stop "yak"', "num_ctx 4096",
        }  # fmt: skip
        assert client.post("/api/show", json={"model": "demo"}).json()["license"] == "MIT"
        digests = {model["name"]: model["digest"] for model in client.get("/api/tags").json()["models"]}
        assert digests == {f"{name}:latest": find_stored(name).digest for name in ("mario", "demo")}


@pytest.mark.parametrize(
    "params",
    [
        "{",
        "[]",
        '{"temperature": "hot"}',
        '{"temperature": -3}',
        '{"temperature": NaN}',
        '{"stop": ""}',
        "\xff",
    ],
)
def test_damaged_parameters_are_left_out(demo_store: Path, params: str) -> None:
    place = f"{LIBRARY}/odd/latest"
    put_model(demo_store, place, lp.demo_model_path().read_bytes(), params=params)
    with (
        lp.Engine("ollama:odd", n_ctx=64, n_seq_max=1) as engine,
        serve(engine, settings=ServerSettings(ollama=True)) as server,
    ):
        body = {"model": "odd", "prompt": "Hi", "stream": False, "options": {"num_predict": 2}}
        assert httpx.post(f"{server.url}/api/generate", json=body, timeout=60).json()["eval_count"] == 2


def test_commands(demo_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    sizes = {record["model"]: record["size_bytes"] for record in records if record["model"].startswith("oll")}
    size = lp.demo_model_path().stat().st_size
    assert sizes == dict.fromkeys(("ollama:demo:1b", "ollama:demo:latest", "ollama:mario:latest"), size)
    assert main(["generate", "-m", "ollama:demo", "-n", "2", "Once"]) == 0
    capsys.readouterr()
    for name, reason in (
        ("ollama:nobody", "no model 'nobody'"),
        ("ollama:", "is not the name"),
        ("mario", "write ollama:mario"),
    ):
        assert main(["generate", "-m", name, "Once"]) in (1, 2)
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "system"),
    [
        (["run", "mario"], "You are Mario."),
        (["chat", "-m", "ollama:mario"], "You are Mario."),
        (["run", "mario", "--system", "Be brief."], "Be brief."),
        (["run", "demo"], None),
    ],
)
def test_a_conversation_has_the_system_message_of_the_modelfile(
    demo_store: Path, tmp_path: Path, arguments: list[str], system: str | None
) -> None:
    pytest.importorskip("jinja2")
    saved = tmp_path / "saved.json"
    subprocess.run(
        [sys.executable, "-m", "llamapipe", *arguments, "-n", "2"],
        input=f"Hi\n/save {saved}\n".encode(),
        env=environment({"OLLAMA_MODELS": str(demo_store)}),
        capture_output=True,
        timeout=120,
        check=True,
    )
    first = json.loads(saved.read_text())[0]
    assert first == (
        {"role": "user", "content": "Hi"} if system is None else {"role": "system", "content": system}
    )


@pytest.mark.parametrize("name", ["mario", "mario:latest", "ollama:mario"])
def test_what_ollama_downloaded_is_not_ours_to_delete(
    demo_store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(demo_store))
    assert main(["rm", name]) == 2
    assert f"{name} belongs to Ollama: use ollama pull or ollama rm" in capsys.readouterr().err


def test_an_address_of_the_hub_is_not_ollamas(store: Path) -> None:
    """Ollama keeps what it downloaded from there under the address."""
    put_model(store, "hf.co/owner/repo-GGUF/Q4_K_M", b"GGUF")
    assert "hf.co/owner/repo-GGUF:Q4_K_M" in short_names()
    assert reference_of("hf.co/owner/repo-GGUF:Q4_K_M") == parse("hf:owner/repo-GGUF:Q4_K_M")


def test_an_answer_has_the_parameters_of_the_modelfile(demo_store: Path) -> None:
    pytest.importorskip("jinja2")
    with lp.Model(lp.demo_model_path()) as model:
        for options, n in (((), PARAMETERS["num_predict"]), (("-n", "9"), 9)):
            command = [sys.executable, "-m", "llamapipe", "run", "mario", "Tell a story", *options]
            env = environment({"OLLAMA_MODELS": str(demo_store)})
            said = subprocess.run(command, env=env, capture_output=True, timeout=120, check=True).stdout
            assert abs(len(model.tokenize(said.decode().strip(), add_special=False)) - n) <= 1, said


def test_parameters_as_sampling_options(store: Path) -> None:
    set_here = {
        "temperature": -1,
        "top_k": 12.0,
        "top_p": 7,
        "stop": ["a", ""],
        "num_predict": 5,
        "num_ctx": 99,
    }
    put_model(
        store, f"{LIBRARY}/a/latest", b"GGUF", params=json.dumps(set_here | {"seed": "x", "min_p": None})
    )
    values = find_stored("a").sampling
    assert values == {"temperature": 0, "top_k": 12, "top_p": 1, "stop": ["a"], "max_tokens": 5}
    assert lp.SamplingParams(**values).top_k == 12


@pytest.mark.parametrize("options", [(), ("--temp", "0.25", "--system", "Be very brief, and kind.")])
def test_a_server_has_the_settings_of_the_modelfile(
    demo_store: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """In every API, unless the command line says otherwise."""
    sizes = {}
    for name in ("demo", "mario"):
        with ServerProcess("-m", f"ollama:{name}", "--n-ctx", "256", *options, cwd=tmp_path) as server:
            params = httpx.get(f"{server.url}/props").json()["default_generation_settings"]["params"]
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
            sizes[name] = answer["usage"]["prompt_tokens"]
    assert params["temperature"] == (0.25 if options else PARAMETERS["temperature"])
    assert (sizes["mario"] > sizes["demo"]) == (not options)


def test_doctor_and_serve(demo_store: Path) -> None:
    env = {"OLLAMA_MODELS": str(demo_store)}
    script = "import sys; from llamapipe.cli import main; sys.exit(main(sys.argv[1:]))"
    said = json.loads(run_script(script, "doctor", "-m", "ollama:demo", "--json", env=env))
    assert said["model"]["command"].startswith("llamapipe serve -m ollama:demo")
