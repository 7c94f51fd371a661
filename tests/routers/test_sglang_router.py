"""Two ``llamapipe serve`` behind sglang-router: ``nox -s routers``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.control import PATIENCE_S
from support.run_script import free_port
from support.server_process import ServerProcess

pytest.importorskip("sglang_router", reason="sglang-router is not installed: nox -s routers")
pytestmark = pytest.mark.routers

MODEL = "story"
WORKER = ("--alias", MODEL, "--n-seq-max", "8", "--n-ctx", "512", "--n-threads", "1")
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 12}
PATH = "/v1/completions"


@contextmanager
def router(workers: list[ServerProcess], folder: Path, policy: str) -> Iterator[str]:
    """The URL of a router over these servers, once it forwards requests."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "sglang_router.launch_router",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--policy", policy, "--worker-urls", *(worker.url for worker in workers)]
    command += ["--prometheus-port", str(free_port()), "--health-check-interval-secs", "1"]
    with (
        (folder / "router.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = monotonic() + PATIENCE_S
            while not _forwards(url, len(workers)):
                assert process.poll() is None and monotonic() < deadline, (folder / "router.log").read_text()
            yield url
        finally:
            process.kill()


def _forwards(url: str, n_workers: int) -> bool:
    try:
        response = httpx.get(f"{url}/workers", timeout=PATIENCE_S)
    except httpx.TransportError:
        return False
    return (
        response.status_code == 200 and sum(w["is_healthy"] for w in response.json()["workers"]) == n_workers
    )


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    with ServerProcess(*WORKER, cwd=tmp_path) as first, ServerProcess(*WORKER, cwd=tmp_path) as second:
        yield [first, second]


def n_answered(worker: ServerProcess) -> int:
    """Completions that a server has answered."""
    text = httpx.get(f"{worker.url}/metrics", timeout=PATIENCE_S).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    wanted = {"path": PATH, "status": "200"}
    return int(sum(s.value for s in samples if s.name == "llamapipe_requests_total" and s.labels == wanted))


def ask(url: str, n: int, **more: Any) -> httpx.Response:
    return httpx.post(f"{url}{PATH}", json={**GREEDY, "prompt": f"Story {n}:", **more}, timeout=PATIENCE_S)


def streamed(url: str, n: int) -> str:
    """A streamed answer's text; it must end with [DONE]."""
    body = {**GREEDY, "prompt": f"Story {n}:", "stream": True}
    with httpx.stream("POST", f"{url}{PATH}", json=body, timeout=PATIENCE_S) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def test_requests_are_shared_equally_and_answers_are_the_same(
    workers: list[ServerProcess], tmp_path: Path
) -> None:
    direct = [ask(workers[0].url, n).json()["choices"][0]["text"] for n in range(20)]
    before = [n_answered(worker) for worker in workers]
    with router(workers, tmp_path, "round_robin") as url, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: ask(url, n), range(20)))
        assert [answer.json()["choices"][0]["text"] for answer in answers] == direct
        assert list(pool.map(lambda n: streamed(url, n), range(20))) == direct
    after = [n_answered(worker) for worker in workers]
    assert [now - then for now, then in zip(after, before, strict=True)] == [20, 20]


def test_a_killed_worker_is_replaced_by_the_other(workers: list[ServerProcess], tmp_path: Path) -> None:
    """Requests that run when it is killed are answered by the other one, and so are all later ones."""
    with router(workers, tmp_path, "round_robin") as url, ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ask, url, n, max_tokens=400, ignore_eos=True) for n in range(8)]
        deadline = monotonic() + PATIENCE_S
        while not all(_runs(worker) for worker in workers):
            assert monotonic() < deadline
        workers[1].kill()
        assert [future.result().status_code for future in running] == [200] * 8
        before = n_answered(workers[0])
        assert [answer.status_code for answer in pool.map(lambda n: ask(url, n), range(20))] == [200] * 20
        assert n_answered(workers[0]) - before == 20


def _runs(worker: ServerProcess) -> bool:
    text = httpx.get(f"{worker.url}/metrics", timeout=PATIENCE_S).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return any(sample.name == "vllm:num_requests_running" and sample.value > 0 for sample in samples)
