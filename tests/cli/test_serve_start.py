"""How ``llamapipe serve`` starts: the port, the chat template, and what it shows."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.chat_families import WEATHER
from support.chat_templates import template
from support.control import wait_until
from support.gguf_models import tiny_model
from support.media_models import idefics3_projector, model_with_tile_tokens
from support.ollama_store import put_model
from support.run_script import environment, heed_ctrl_c
from support.scripted_model import scripted_model
from support.server_process import COMMAND, ServerProcess

pytest.importorskip("uvicorn")


def refused(*arguments: str | Path, env: dict[str, str] | None = None) -> str:
    """What a server says that does not start."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (1, 2) and done.stdout == "" and "Traceback" not in done.stderr
    return done.stderr


def started(*arguments: str | Path) -> tuple[str, str]:
    """What a server says on stdout and stderr until it is there."""
    with subprocess.Popen(
        [*COMMAND, "--port", "0", "--n-ctx", "64", *map(str, arguments)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None and server.stderr is not None
        lines: list[str] = []
        for line in server.stdout:
            lines.append(line)
            if "Ctrl-C" in line:
                break
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=120)
    assert server.returncode == 0, errors
    return "".join(lines), errors


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


def environment_without(folder: Path, package: str) -> dict[str, str]:
    """An environment in which a package cannot be imported, as where it is not installed."""
    folder.mkdir(exist_ok=True)
    (folder / f"{package}.py").write_text(
        f"raise ModuleNotFoundError(\"No module named '{package}'\", name='{package}')\n"
    )
    env = environment()
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), env.get("PYTHONPATH"))))}


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        ("jinja2", "server", ()),
        ("llguidance", "server", ()),
        ("msgspec", "server", ()),
        ("starlette", "server", ()),
        ("uvicorn", "server", ()),
        ("httptools", "server", ()),
        ("prometheus_client", "server", ()),
        ("zmq", "kv-events", ("--kv-events", "tcp://127.0.0.1:5999")),
        ("mcp", "mcp", ("--mcp", "MCP")),
        ("mcp", "mcp", ("--mcp-url", "a.example")),
        ("huggingface_hub", "hub", ("-m", "hf:owner/name")),
        ("huggingface_hub", "hub", ("--models", "FILE", "--ollama", "--allow-pull")),
        ("huggingface_hub", "hub", ("--models", "HUB")),
        ("PIL", "media", ("-m", "TEXT", "--mmproj", "MMPROJ")),
        ("PIL", "media", ("-m", "TEXT", "--mmproj", "MMPROJ", "--workers", "1")),
        ("PIL", "media", ("--models", "IMAGES")),
    ],
)
def test_what_an_option_needs_is_asked_for_at_the_start(
    tmp_path: Path, package: str, extra: str, arguments: tuple[str, ...]
) -> None:
    files = {
        "TEXT": "text.gguf",
        "MMPROJ": "other.gguf",
        "FILE": "a.toml",
        "HUB": "b.toml",
        "IMAGES": "c.toml",
        "MCP": "mcp.json",
    }
    files = {name: str(tmp_path / file) for name, file in files.items()}
    Path(files["MCP"]).write_text('{"mcpServers": {}}')
    if {"MMPROJ", "IMAGES"} & set(arguments):
        model_with_tile_tokens(Path(files["TEXT"]))
        idefics3_projector(Path(files["MMPROJ"]))
    tiny_model(tmp_path / "tiny.gguf")
    (tmp_path / "a.toml").write_text('[models.a]\nfile = "tiny.gguf"\n')
    (tmp_path / "b.toml").write_text('[models.a]\nfile = "hf:owner/name"\n')
    (tmp_path / "c.toml").write_text(f'[models.a]\nfile = "{files["TEXT"]}"\nmmproj = "{files["MMPROJ"]}"\n')
    env = environment_without(tmp_path / "without", package)
    said = refused("--port", "0", *(files.get(argument, argument) for argument in arguments), env=env)
    assert f"{package}, which is not installed: pip install 'llamapipe[{extra}]'" in said.replace('"', "'")


def test_a_missing_file_of_a_models_file_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(tmp_path / "tiny.gguf")
    (tmp_path / "a.toml").write_text(
        '[models.a]\nfile = "tiny.gguf"\n[models.b]\nfile = "tyni.gguf"\n[models.c]\nfile = "~/tiny.gguf"\n'
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    with ServerProcess("--models", "a.toml", cwd=tmp_path) as server:
        assert "--models: the file of b does not exist: tyni.gguf; requests for it get 503" in server.log()
        assert "the file of a " not in server.log()
        assert "the file of c " not in server.log()
        answer = httpx.post(f"{server.url}/v1/completions", json={"model": "b", "prompt": "x"}, timeout=120)
        assert answer.status_code == 503 and "tyni.gguf" in answer.json()["error"]["message"]


def test_a_projector_that_was_found_and_no_pillow(tmp_path: Path) -> None:
    """The server starts, says so, and refuses images with a reason."""
    model_with_tile_tokens(tmp_path / "text.gguf")
    idefics3_projector(tmp_path / "mmproj.gguf")
    env = environment_without(tmp_path / "without", "PIL")
    with ServerProcess("-m", "text.gguf", "-c", "512", cwd=tmp_path, env=env) as server:
        parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 400
        assert "pip install 'llamapipe[media]'" in answer.json()["error"]["message"]
        wait_until(lambda: "requests with images will be refused" in server.log())
        assert "Traceback" not in server.log()


@pytest.mark.parametrize("workers", [(), ("--workers", "1")])
def test_a_port_in_use(busy_port: int, workers: tuple[str, ...]) -> None:
    said = refused("--port", str(busy_port), *workers)
    assert said == f"llamapipe: 127.0.0.1:{busy_port} is in use; choose another port with --port\n"


INTERRUPTED = """\
import os, signal, sys

def interrupt(event, arguments):
    if event == "open" and str(arguments[0]).endswith("demo.gguf"):
        os.kill(os.getpid(), signal.{signal})

sys.addaudithook(interrupt)
from llamapipe_command import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("words", "number", "status", "said"),
    [
        (("serve", "--port", "0"), signal.SIGINT, 0, ""),
        (("serve", "--port", "0"), signal.SIGTERM, 0, ""),
        (("generate", "Once"), signal.SIGINT, 130, "llamapipe: interrupted\n"),
    ],
)
def test_a_signal_while_a_model_loads(
    words: tuple[str, ...], number: signal.Signals, status: int, said: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(signal=number.name), *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        preexec_fn=heed_ctrl_c,
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "", said)


def test_ctrl_c_while_workers_load() -> None:
    with subprocess.Popen(
        [*COMMAND, "--port", "0", "--workers", "1"],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stderr is not None
        assert "worker 0 starts" in server.stderr.readline()
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 0


def test_ollamas_port_in_use(busy_port: int) -> None:
    error = refused("--port", "0", "--ollama", str(busy_port))
    assert f"127.0.0.1:{busy_port} is in use; is Ollama running?" in error
    assert error.rstrip().endswith("choose another port with --ollama")


def test_ollamas_port_is_no_port_of_workers() -> None:
    error = refused("--workers", "1", "--ollama", "11434")
    assert "use --ollama --port 11434" in error
    assert "a port is from 0 to 65535" in refused("--ollama", "65536")


def test_ollamas_api_on_two_ports(tmp_path: Path) -> None:
    with ServerProcess("--n-ctx", "64", "--ollama", "0", cwd=tmp_path) as server:
        (line,) = [line for line in server.lines if "OLLAMA_HOST=" in line]
        other = line.strip().rpartition("=")[2]
        assert other != server.url
        for url in (server.url, other):
            assert httpx.get(url).text == "Ollama is running"
            assert httpx.get(f"{url}/api/tags").json()["models"][0]["name"] == "demo:latest"
            assert httpx.get(f"{url}/api/tags", headers={"host": "evil.example"}).status_code == 403


@pytest.mark.parametrize("options", [(), ("--ollama",)])
def test_variables_of_other_servers_are_named(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deployment that moves here would run without its key, or with another model."""
    for name in ("VLLM_API_KEY", "LLAMA_ARG_MODEL", "OLLAMA_KEEP_ALIVE", "LLAMA_ARG_CTX_SIZE"):
        monkeypatch.setenv(name, "a")
    with ServerProcess("--n-ctx", "64", *options, cwd=tmp_path) as server:
        server.end()
        said = server.log()
    names = "LLAMA_ARG_CTX_SIZE, LLAMA_ARG_MODEL" + (", OLLAMA_KEEP_ALIVE" if options else "")
    assert f"llamapipe: these variables have no effect here: {names}; give options" in said
    assert "VLLM_API_KEY is set, and no API key is required: this server reads LLAMAPIPE_API_KEYS, or" in said
    monkeypatch.setenv("LLAMAPIPE_API_KEYS", "secret")
    with ServerProcess("--n-ctx", "64", cwd=tmp_path) as server:
        server.end()
        assert "VLLM_API_KEY" not in server.log()


@pytest.mark.parametrize("workers", [(), ("--workers", "1")])
def test_a_model_of_ollama(workers: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    put_model(tmp_path, "hf.co/owner/repo/Q8_0", tiny_model(tmp_path / "tiny.gguf").read_bytes())
    name = "hf.co/owner/repo:Q8_0"
    with ServerProcess("-m", f"ollama:{name}", "--n-ctx", "64", "--ollama", *workers, cwd=tmp_path) as server:
        assert f"llamapipe serves {name} at " in server.lines[0]
        assert httpx.get(f"{server.url}/api/tags").json()["models"][0]["name"] == name


def test_a_host_that_is_none() -> None:
    assert "--host 999.1.1.1 is not a valid address: " in refused("--host", "999.1.1.1")
    assert "--host 192.0.2.1 is not an address of this machine" in refused("--host", "192.0.2.1")


@pytest.mark.parametrize("workers", [(), ("--workers", "1")])
@pytest.mark.parametrize("source", ["{% for", "{{ raise_exception('no') }}"])
def test_a_broken_template_is_refused(source: str, workers: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "bad.j"
    file.write_text(source)
    said = refused("--port", "0", "--chat-template", file, *workers)
    assert "--chat-template: " in said and "usage: llamapipe serve" in said
    assert f"there is no file {tmp_path}" in refused("--chat-template", tmp_path)


@pytest.mark.parametrize("workers", [(), ("--workers", "1")])
def test_a_model_without_a_template(workers: tuple[str, ...], tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny.gguf")
    shown, errors = started("-m", model, "-a", "little", *workers)
    assert 'client.completions.create(model="little"' in shown and "client.chat" not in shown
    assert "tiny.gguf has no chat template: chat requests will be refused with status 400" in errors
    (tmp_path / "good.j").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    shown, errors = started("-m", model, "--chat-template", tmp_path / "good.j", *workers)
    assert "client.chat.completions.create(" in shown and 'model="tiny"' in shown
    assert "no chat template" not in errors


@pytest.mark.parametrize(("mode", "reason"), [("lenient", "tool_calls"), ("strict", "stop")])
def test_calls_as_plain_json(mode: str, reason: str, tmp_path: Path) -> None:
    said = json.dumps({"name": "get_weather", "arguments": {"city": "Paris"}})
    model = scripted_model(tmp_path / "said.gguf", said, (), template("Qwen-Qwen2.5-7B-Instruct").text)
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
    body = {"messages": [{"role": "user", "content": "Weather in Paris?"}], "tools": [tool]}
    options = ("-m", str(model), "--n-ctx", "4096", "--tool-calls", mode)
    with ServerProcess(*options, cwd=tmp_path) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={"model": "said", **body}, timeout=120)
    assert answer.json()["choices"][0]["finish_reason"] == reason
