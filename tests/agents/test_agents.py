"""Programs of clients that nobody here wrote, each in an environment of its own, against ``llamapipe serve``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from support.bert_model import bert_model
from support.mcp_servers import write_file
from support.scripted_model import turns_model
from support.server_process import ServerProcess

from agents.clients import CLIENTS, QUIET, ROWS, TEMPLATE, Client, said
from agents.recorder import Exchange, Recorder

FOLDER = os.environ.get("AGENTS_FOLDER")
MODEL = os.environ.get("AGENTS_MODEL_FILE")
HERE = Path(__file__).resolve().parent
INSTALL_S = 900.0
pytestmark = [
    pytest.mark.agents,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (FOLDER and MODEL), reason="installs what it tests: nox -s agents"),
]
Serve = Callable[[Client], Recorder]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Starts the server that a client needs: one with the real model for most, one with a scripted model for others."""
    folder = tmp_path_factory.mktemp("models")
    running: dict[str, Recorder] = {}
    with ExitStack() as stack:

        def start(client: Client) -> Recorder:
            key = client.name if client.calls else "chat"
            if key not in running:
                if client.calls:
                    path = folder / f"{client.name}.gguf"
                    model = turns_model(path, said(client.calls), TEMPLATE.read_text())
                    options = ["-m", str(model), "--n-ctx", "131072", "--n-seq-max", "2"]
                else:
                    encoder, _ = bert_model(folder / "bert.gguf", n_ctx=512)
                    options = ["-m", str(MODEL), "--n-ctx", "8192", "--n-seq-max", "4"]
                    options += ["--embeddings", str(encoder), "--embeddings-alias", "embedder"]
                options += ["--ollama", "--store", str(folder / f"{key}.db")]
                if client.servers:
                    options += ["--mcp", str(_mcp_file(folder / f"{key}.json", client))]
                server = stack.enter_context(ServerProcess(*options, "--alias", "chat", cwd=folder))
                running[key] = stack.enter_context(Recorder(server.url))
            return running[key]

        yield start


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_does_its_work(
    client: Client, serve: Serve, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rows = request.config.stash[ROWS]
    row = len(rows)
    rows.append((client.name, client.version, "**not installed**", "", ""))
    try:
        command, environment = _install(client)
    except pytest.skip.Exception as reason:
        rows[row] = (client.name, client.version, "skipped", "", str(reason))
        raise
    recorder = serve(client)
    recorder.take()
    environment |= {
        "AGENT_URL": recorder.url,
        "AGENT_MODEL": "chat",
        "HOME": str(tmp_path),
        **{f"XDG_{what}_HOME": str(tmp_path / what.lower()) for what in ("CACHE", "CONFIG", "DATA", "STATE")},
    }
    begun = time.monotonic()
    code, output = _run(command, environment, tmp_path, client.timeout_s)
    seconds = f"{time.monotonic() - begun:.0f}"
    exchanges = recorder.take()
    told = [line.removeprefix("did: ") for line in output.splitlines() if line.startswith("did: ")]
    passed = code == 0 and bool(told)
    did = told[-1] if passed else _refusals(exchanges)
    rows[row] = (client.name, client.version, "passed" if passed else "**failed**", seconds, did)
    log = Path(str(FOLDER)) / "logs" / f"{client.program}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"exit code {code}\n{output}\n{_shown(exchanges)}\n")
    if not passed:
        text = f"exit code {code}\n{output[-4000:]}\n{did}\nthe whole output, and all requests: {log}"
        pytest.fail(text, pytrace=False)


def _install(client: Client) -> tuple[list[str], dict[str, str]]:
    """The command that runs the client's program and its environment; installs the client first, unless it is there."""
    environment = {**_plain(), **QUIET}
    program = HERE / "programs" / client.program
    if client.kind == "java":
        if shutil.which("java") is None:
            pytest.skip("java is missing here; on Debian: apt-get install openjdk-17-jdk-headless")
        return ["java", "-XX:TieredStopAtLevel=1", str(program)], environment
    assert FOLDER is not None
    folder = Path(FOLDER) / client.program.partition(".")[0]
    stamp = folder / "installed"
    wanted = "\n".join((*client.packages, sys.version))
    if client.kind == "npm" and shutil.which("npm") is None:
        pytest.skip("npm is missing here; on Debian: apt-get install npm")
    if not stamp.is_file() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if client.kind == "pip":
            _must(["uv", "venv", "--quiet", "--python", sys.executable, str(folder / "venv")])
            python = str(folder / "venv" / "bin" / "python")
            _must(["uv", "pip", "install", "--quiet", "--python", python, *client.packages])
        else:
            quiet = ["--no-audit", "--no-fund", "--no-update-notifier", "--loglevel", "error"]
            _must(["npm", "--prefix", str(folder), "install", *quiet, *client.packages])
        stamp.write_text(wanted)
    if client.kind == "pip":
        return [str(folder / "venv" / "bin" / "python"), str(program)], environment
    environment["AGENT_BIN"] = str(folder / "node_modules" / ".bin")
    if client.program.endswith(".py"):
        return [sys.executable, str(program)], environment
    # Node looks for packages beside the program.
    return ["node", "--no-warnings", str(shutil.copy(program, folder))], environment


def _mcp_file(path: Path, client: Client) -> Path:
    """A file of the client's MCP servers, which are installed."""
    assert FOLDER is not None
    home = Path(FOLDER) / client.program.partition(".")[0]
    servers = {
        label: {"command": str(home / command), "args": arguments, "cwd": str(path.parent)}
        for label, (command, *arguments) in client.servers.items()
    }
    return write_file(path, servers)


def _plain() -> dict[str, str]:
    """This environment without what pytest, nox and coverage put into it."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PYTEST", "VIRTUAL_ENV", "LLAMAPIPE", "OPENAI", "ANTHROPIC"))
    }


def _must(command: list[str]) -> None:
    code, output = _run(command, _plain(), Path.cwd(), INSTALL_S)
    if code:
        pytest.fail(f"{' '.join(command)}: {output[-3000:]}", pytrace=False)


def _run(command: list[str], environment: dict[str, str], cwd: Path, limit_s: float) -> tuple[int, str]:
    """Runs a program with all its children, which end with it; its exit code, and what it wrote."""
    with subprocess.Popen(
        command,
        env=environment,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        late = ""
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            late = f"\n(killed after {limit_s:.0f} s)"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if late:
            output, _ = process.communicate()
        return process.returncode, output + late


def _refusals(exchanges: list[Exchange]) -> str:
    """The first refusal that a client got, in a line."""
    for exchange in exchanges:
        if exchange.status >= 400:
            answer = exchange.answer[:200].decode("utf-8", "replace")
            return f"{exchange.method} {exchange.path} {exchange.status}: {answer}"
    return f"{len(exchanges)} requests, none refused"


def _shown(exchanges: list[Exchange]) -> str:
    """All requests with what was sent and answered, cut where it is long."""
    lines = []
    for exchange in exchanges:
        lines += ["", f"{exchange.method} {exchange.path} -> {exchange.status}", json.dumps(exchange.headers)]
        lines += [text[:4000].decode("utf-8", "replace") for text in (exchange.body, exchange.answer)]
    return "\n".join(lines)
