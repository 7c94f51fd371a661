"""A program that PyInstaller packs into one file, with the package's own hook: ``nox -s pyinstaller``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytest.importorskip("PyInstaller", reason="needs PyInstaller, which nox -s pyinstaller installs")

PROGRAM = """
import sys

import llamapipe as lp
from llamapipe.cli import main

if __name__ == "__main__":
    if len(sys.argv) > 1:
        raise SystemExit(main(sys.argv[1:]))
    greedy = lp.SamplingParams(max_tokens=8, temperature=0)
    answer = lp.SamplingParams(max_tokens=32, json_schema={"type": "boolean"})
    with lp.Model.demo() as model, lp.Engine(model, n_threads=1) as engine:
        print(engine.generate("Once upon a time", greedy).text)
        print(engine.chat([{"role": "user", "content": "Hi"}], answer).content)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packed program, alone in its folder."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "PyInstaller", "--onefile", "--log-level", "WARN", "program.py"]
    subprocess.run(command, cwd=folder, check=True, timeout=1200)
    return (folder / "dist" / "program").rename(folder / "alone")


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Neither Python nor the package can be found outside the file.
    environment = {"PATH": "/nonexistent", "HOME": str(program.parent)}
    return subprocess.run(
        [program, *arguments],
        cwd=program.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )


@pytest.mark.timeout(1500)
def test_a_text_and_json_by_a_schema(program: Path) -> None:
    done = run(program)
    assert done.returncode == 0, done.stderr
    text, answer = done.stdout.rsplit("\n", 2)[:2]
    assert text.strip()
    assert isinstance(json.loads(answer), bool)


@pytest.mark.timeout(1500)
def test_a_server(program: Path) -> None:
    command = [str(program), "serve", "--port", "0", "--n-threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if "http://" in line)
            address = next(word for word in line.split() if word.startswith("http://")).rstrip(".,;")
            body = {"model": "demo", "prompt": "Once", "max_tokens": 4}
            answer = httpx.post(f"{address.rstrip('/')}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200 and answer.json()["choices"][0]["text"]
            assert "llamapipe" in httpx.get(address, timeout=60).text  # the page
        finally:
            # PyInstaller's loader passes the signal to the program.
            os.kill(process.pid, signal.SIGTERM)
            process.stdout.read()  # type: ignore[union-attr]
    assert process.returncode in (0, -signal.SIGTERM)


@pytest.mark.timeout(1500)
def test_what_needs_an_interpreter_says_so(program: Path) -> None:
    done = run(program, "doctor")
    assert done.returncode == 1
    assert "was packed with its interpreter" in done.stderr and "Traceback" not in done.stderr
