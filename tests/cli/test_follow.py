"""``llamapipe batch --follow``: the progress of a server's batch, and of a job of another process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from support.control import Gate, Worker, wait_until

import llamapipe as lp
from llamapipe.cli import _follow, main
from llamapipe.jobs.results import open_output
from llamapipe.server import ServerSettings, serve

URL: Any = "/v1/chat/completions"


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """What was written to standard error so far; each look writes a line."""
    monkeypatch.setattr(_follow, "_EVERY_S", 0.001)
    monkeypatch.setattr(_follow, "_EVERY_S_IN_LOGS", 0.0)
    text = ""

    def now() -> str:
        nonlocal text
        text += capsys.readouterr().err
        return text

    return now


def test_a_batch_of_a_server(demo: lp.Model, tmp_path: Path, shown: Callable[[], str]) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    bodies: list[dict[str, Any]] = [body, body, {**body, "temperature": -1}]
    settings = ServerSettings(model_names=("demo",), store=tmp_path / "answers.db")
    with (
        lp.Engine(demo, n_ctx=512) as engine,
        serve(engine, settings=settings) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):

        def begun(bodies: list[dict[str, Any]]) -> str:
            lines = [{"custom_id": f"{i}", "url": URL, "body": body} for i, body in enumerate(bodies)]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            file = client.files.create(file=text.encode(), purpose="batch")
            return client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h").id

        with Gate(engine) as gate:
            batch = begun(bodies)
            gate.wait()
            following = Worker(main, ["batch", "--follow", batch, "--url", server.url])
            wait_until(lambda: "in_progress: " in shown())
        assert following.result() == 1
        assert "completed: 3 of 3 requests, 1 failed\n" in shown()
        for file in client.files.list(purpose="batch_output"):
            assert f"{server.url}/v1/files/{file.id}/content\n" in shown()
        assert main(["batch", "--follow", begun(bodies[:2]), "--url", server.url]) == 0
        assert main(["batch", "--follow", begun([{"model": 5, "stream": True}]), "--url", server.url]) == 1
        assert "line 1: stream is on" in shown()
        assert main(["batch", "--follow", "batch_none", "--url", server.url]) == 1
        assert "Batch with id 'batch_none' not found" in shown()


def test_a_job_of_another_process(tmp_path: Path, shown: Callable[[], str]) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n' * 3)
    command = ["batch", "--follow", str(source), "-o", str(output)]
    assert main(command) == 1
    assert "0 of 3 records; no process writes" in shown()
    with open_output(output) as results:
        results.begin(1)
        following = Worker(main, command)
        wait_until(lambda: "0 of 3 records\n" in shown())
        results.write(0, 5, {"index": 0, "text": "a"})
        wait_until(lambda: "1 of 3 records\n" in shown())
    assert following.result() == 1
    with open_output(output) as results:
        results.begin(1)
        for i in (1, 2):
            results.write(i, 5, {"index": i, "text": "a"})
    assert main(command) == 0
    table = tmp_path / "out.csv"
    table.touch()
    assert main(["batch", "--follow", str(source), "-o", str(table)]) == 0


def test_a_job_that_has_ended(tmp_path: Path, shown: Callable[[], str]) -> None:
    """Blank lines are not records, and a record that failed is told as the job tells it."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n\n  \n{"prompt": "b"}\n\n')
    with open_output(output) as results:
        results.begin(1)
        for i in range(2):
            results.write(i, 5, {"index": i, "text": "a"})
    command = ["batch", "--follow", str(source), "-o", str(output)]
    assert main(command) == 0
    assert "2 of 2 records; no process writes" in shown()
    with open_output(output, overwrite=True) as results:
        results.begin(1)
        results.write(0, 5, {"index": 0, "error": {"type": "ValueError", "message": "no"}})
        results.write(1, 5, {"id": "batch_req_1", "response": {"status_code": 400}})
    assert main(command) == 1
    assert "2 of 2 records, 2 failed; no process writes" in shown()


@pytest.mark.parametrize(
    "arguments", [["--follow"], ["--follow", "in.jsonl"], [], ["in.jsonl"], ["-o", "out.jsonl"]]
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", *arguments]) == 2
    assert (
        "needs" in (told := capsys.readouterr().err)
        or "missing" in told
        or "is not the id of a batch" in told
    )
