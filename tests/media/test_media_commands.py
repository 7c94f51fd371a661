"""Images in ``llamapipe generate`` and in batch jobs; what the rows of a stranger may read."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.media_models import idefics3_projector, model_with_tile_tokens, png
from support.run_script import environment

import llamapipe as lp

PARAMS = lp.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
PNG = png(200, 120)
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its projector, and an image."""
    folder = tmp_path_factory.mktemp("commands")
    model_with_tile_tokens(folder / "text.gguf")
    idefics3_projector(folder / "mmproj.gguf")
    (folder / "a.png").write_bytes(PNG)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[lp.Engine]:
    with (
        lp.Model(folder / "text.gguf", mmproj=folder / "mmproj.gguf") as model,
        lp.Engine(model, n_ctx=512, n_seq_max=2) as engine,
    ):
        yield engine


def run(*arguments: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "llamapipe", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done


def conversation(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]}


def of_path(path: object) -> dict[str, Any]:
    return conversation({"type": "image", "image": path})


def test_generate_asks_about_images(engine: lp.Engine, folder: Path) -> None:
    command: tuple[str | Path, ...] = (
        "generate",
        "-m",
        folder / "text.gguf",
        "--mmproj",
        folder / "mmproj.gguf",
    )
    command += (
        "-c",
        "512",
        "--temperature",
        "0",
        "--max-tokens",
        "4",
        "--ignore-eos",
        "--image",
        folder / "a.png",
    )
    expected = engine.chat(of_path(folder / "a.png")["messages"], PARAMS)
    streamed = run(*command, "--stats", "What is this?")
    assert streamed.stdout.strip() == expected.content.strip()
    assert streamed.stderr.startswith(f"{expected.n_prompt_tokens} prompt tokens, 4 generated")
    lines = run(
        *command, "--image", folder / "a.png", "--json", "What is this?", "And why?"
    ).stdout.splitlines()
    first, second = map(json.loads, lines)
    assert first["prompt"] == "What is this?" and second["n_completion_tokens"] == 4
    assert first["n_prompt_tokens"] > expected.n_prompt_tokens + 20  # two images
    assert "nowhere.png cannot be read" in run(*command, "--image", "nowhere.png", "Why?", status=1).stderr
    assert "has no projector" in run("generate", "--image", folder / "a.png", "Why?", status=1).stderr


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, and others outside it."""
    outside = tmp_path_factory.mktemp("jobs")
    folder = outside / "job"
    (folder / "deep").mkdir(parents=True)
    for path in (outside / "secret.png", folder / "a.png", folder / "deep" / "b.png"):
        path.write_bytes(PNG)
    (folder / "link.png").symlink_to(outside / "secret.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    (folder / "out").symlink_to(outside)
    (folder / "inner.png").symlink_to(folder / "a.png")
    os.mkfifo(folder / "pipe.png")
    return folder


HOSTILE = (
    "../secret.png", "link.png", "loop.png", "out/secret.png", "out", "deep", "deep/../../secret.png", "pipe.png",
    "none.png", "", "/etc/hostname", "/dev/zero", "a.png\0", "x" * 5000, "~/a.png", "file:///etc/hostname",
)  # fmt: skip


def test_rows_name_files_of_their_folder_only(engine: lp.Engine, job: Path) -> None:
    good = ["a.png", "deep/b.png", "inner.png", str(job / "a.png"), "deep/../a.png", URL]
    rows = [of_path(path) for path in [*good, *HOSTILE, str(job.parent / "secret.png")]]
    rows.append(conversation({"type": "image_url", "image_url": {"url": URL}}))
    rows.append(conversation({"type": "image_url", "image_url": {"url": "file:a.png"}}))
    rows.append(conversation({"type": []}))
    (job / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    results = list(lp.run_batch(job / "in.jsonl", engine, PARAMS))
    failed = [i for i, result in enumerate(results) if "error" in result]
    assert failed == [*range(len(good), len(good) + len(HOSTILE) + 1), len(rows) - 2, len(rows) - 1]
    assert len({results[i]["text"] for i in (*range(len(good)), len(rows) - 3)}) == 1
    for i in failed[:-2]:
        assert "is not a file in" in results[i]["error"]["message"]
        assert str(job.parent / "secret.png") not in results[i]["error"]["message"] or i == failed[-3]
    engine.check_integrity()


def test_rows_of_a_program_name_no_files_unless_told(engine: lp.Engine, job: Path) -> None:
    rows = [of_path("a.png"), of_path(str(job / "a.png")), of_path(URL), of_path(PNG), of_path(job / "a.png")]
    results = list(lp.run_batch(rows, engine, PARAMS))
    assert ["error" in result for result in results] == [True, True, False, False, False]
    assert "none are read here: give a data URL, or media_path" in results[0]["error"]["message"]
    results = list(lp.run_batch(rows, engine, PARAMS, media_path=job))
    assert not any("error" in result for result in results)


def test_the_command_takes_a_folder_of_images(folder: Path, job: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(of_path("a.png")))
    out = tmp_path / "out.jsonl"
    command: tuple[str | Path, ...] = (
        "batch",
        tmp_path / "in.jsonl",
        "-o",
        out,
        "-m",
        folder / "text.gguf",
        "--mmproj",
    )
    command += (folder / "mmproj.gguf", "-c", "512", "-n", "4", "--overwrite")
    run(*command, status=1)
    assert "is not a file in" in json.loads(out.read_text())["error"]["message"]
    run(*command, "--media-path", job)
    assert json.loads(out.read_text())["n_prompt_tokens"] > 20
    assert "there is no folder" in run(*command, "--media-path", job / "a.png", status=2).stderr
