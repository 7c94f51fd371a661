"""A thousand images in a prompt, bombs, damaged files: the process stays, its memory is bounded, others go on."""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.control import PATIENCE_S, wait_until
from support.hostile_media import jpeg_of_scans
from support.media_models import gemma3_projector, model_with_tile_tokens, png, ultravox_projector
from support.media_mutants import mutant, wav
from support.server_process import ServerProcess

N_MUTANTS = int(os.environ.get("LLAMAPIPE_MEDIA_MUTANTS", "200"))  # `nox -s fuzz`: 5,000
BOUND_BYTES = 2**30  # that hostile requests may add


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("hostile")
    model_with_tile_tokens(folder / "text.gguf")
    gemma3_projector(folder / "mmproj.gguf")
    with ServerProcess(
        "-m", "text.gguf", "-c", "4096", "-np", "2", "--cache-bytes", "0", cwd=folder
    ) as server:
        yield server


def peak_bytes(server: ServerProcess) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    """One for all requests: each makes a TLS context, which takes longer than most answers here."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        yield http


def ask(http: httpx.Client, images: list[bytes], **more: Any) -> httpx.Response:
    urls = (f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images)
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": "What is this?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}
    return http.post("/v1/chat/completions", json=body)


class Reader:
    """A client that reads one text after the other, until the block ends."""

    def __init__(self, server: ServerProcess) -> None:
        self.n_tokens: list[int] = []
        self._url = f"{server.url}/v1/completions"
        self._ended = threading.Event()
        self._has_read = threading.Condition()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 32, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=PATIENCE_S) as client:
            while not self._ended.is_set():
                with client.stream("POST", self._url, json=body) as answer:
                    lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
                n = sum(len(json.loads(line[6:])["choices"]) for line in lines)
                with self._has_read:
                    self.n_tokens.append(n)
                    self._has_read.notify_all()

    def read_one_more(self) -> None:
        """Waits for the end of a text that is read now, and of one before it."""
        with self._has_read:
            n = max(len(self.n_tokens) + 1, 2)
            assert self._has_read.wait_for(lambda: len(self.n_tokens) >= n, PATIENCE_S)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def test_a_thousand_images_in_a_prompt(server: ServerProcess, http: httpx.Client) -> None:
    before = peak_bytes(server)
    with Reader(server) as reader:
        many = [png(16, 16, seed) for seed in range(1000)]
        answer = ask(http, many)
        assert answer.status_code == 400
        assert "n_ctx is 4096: give fewer or smaller ones" in answer.json()["error"]["message"]
        answer = ask(http, many[:100])
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] > 2000
        assert ask(http, [*map(png, [100] * 1000, [80] * 1000, range(1000))]).status_code == 413
    assert len(reader.n_tokens) > 1 and min(reader.n_tokens) > 24
    assert peak_bytes(server) - before < BOUND_BYTES


def test_bombs(server: ServerProcess, http: httpx.Client) -> None:
    from PIL import Image

    file = io.BytesIO()
    Image.new("1", (5700, 5700)).save(file, "PNG")
    bomb = file.getvalue()
    assert len(bomb) < 5000
    before = peak_bytes(server)
    with Reader(server) as reader:
        answer = ask(http, [bomb + bytes([i % 256, i // 256]) for i in range(1000)])
        assert answer.status_code == 400
        assert "pixels; a conversation may have 268435456" in answer.json()["error"]["message"]
    assert len(reader.n_tokens) > 1 and min(reader.n_tokens) > 24
    assert peak_bytes(server) - before < BOUND_BYTES


def refused_or_read(answer: httpx.Response) -> str:
    """What became of a damaged file; nothing else may."""
    if answer.status_code == 200:
        return "read"
    assert answer.status_code == 400, (answer.status_code, answer.text)
    assert len(answer.json()["error"]["message"]) > 20
    return "refused"


def campaign(server: ServerProcess, kind: str, send: Callable[[int, bytes], httpx.Response]) -> None:
    """Sends the damaged files of a kind with four clients; others are served, and the memory is bounded."""
    numbers = [i for i in range(N_MUTANTS) if mutant(i)[0].startswith("sound") is (kind == "sound")]
    before = peak_bytes(server)
    with Reader(server) as reader, ThreadPoolExecutor(4) as clients:
        outcomes = Counter(
            clients.map(lambda number: refused_or_read(send(number, mutant(number)[1])), numbers)
        )
        reader.read_one_more()
    more = peak_bytes(server) - before
    sys.stdout.write(
        f"{kind}: {dict(outcomes)}, {len(reader.n_tokens)} texts beside, peak +{more >> 20} MiB\n"
    )
    assert outcomes["read"] > len(numbers) / 20 < outcomes["refused"]
    assert len(reader.n_tokens) > 1 and min(reader.n_tokens) > 24
    assert more < BOUND_BYTES


@pytest.mark.timeout(300 + N_MUTANTS // 4)
def test_damaged_images(server: ServerProcess, http: httpx.Client) -> None:
    campaign(server, "image", lambda _, data: ask(http, [data]))
    assert ask(http, [png(64, 64)]).status_code == 200


@pytest.mark.timeout(300 + N_MUTANTS // 4)
def test_damaged_sounds(tmp_path: Path) -> None:
    model_with_tile_tokens(tmp_path / "text.gguf")
    ultravox_projector(tmp_path / "mmproj.gguf")
    options = ("-m", "text.gguf", "-c", "1024", "-np", "3", "--cache-bytes", "0")
    with (
        ServerProcess(*options, cwd=tmp_path) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
    ):

        def send(number: int, data: bytes) -> httpx.Response:
            if number % 2:
                fields = {"model": "text", "max_tokens": "1"}
                url = "/v1/audio/transcriptions"
                return http.post(url, data=fields, files={"file": ("a.wav", data)})
            part = {"data": base64.b64encode(data).decode(), "format": "wav"}
            content = [
                {"type": "input_audio", "input_audio": part},
                {"type": "text", "text": "What is said?"},
            ]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            return http.post("/v1/chat/completions", json=body)

        campaign(server, "sound", send)
        assert send(0, wav()).status_code == send(1, wav()).status_code == 200


def test_a_timeout_counts_decoding(tmp_path: Path) -> None:
    """Images that take seconds are answered 504 in time, and what they had begun keeps nobody out afterwards."""
    model_with_tile_tokens(tmp_path / "text.gguf")
    gemma3_projector(tmp_path / "mmproj.gguf")
    large = [jpeg_of_scans(15, 5792, 5792) + bytes([i]) for i in range(8)]
    with (
        ServerProcess("-m", "text.gguf", "-c", "1024", "--timeout", "0.2", cwd=tmp_path) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
        ThreadPoolExecutor(4) as clients,
    ):
        answers = list(clients.map(lambda _: ask(http, large), range(4)))
        assert [answer.status_code for answer in answers] == [504] * 4
        assert "within the timeout of 0.2 s" in answers[0].json()["error"]["message"]
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        wait_until(lambda: http.post("/v1/chat/completions", json=body).status_code == 200)
        wait_until(lambda: ask(http, [jpeg_of_scans(9000)]).status_code == 400)
