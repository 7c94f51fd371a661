"""A thousand images in a prompt, bombs, damaged images: the process stays, its memory is bounded, others go on."""

from __future__ import annotations

import base64
import io
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.control import PATIENCE_S
from support.media_models import gemma3_projector, model_with_tile_tokens, png
from support.server_process import ServerProcess

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
    status = Path(f"/proc/{server.pid}/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def ask(server: ServerProcess, images: list[bytes], **more: Any) -> httpx.Response:
    urls = (f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images)
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": "What is this?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)


class Reader:
    """A client that reads one text after the other, until the block ends."""

    def __init__(self, server: ServerProcess) -> None:
        self.n_tokens: list[int] = []
        self._url = f"{server.url}/v1/completions"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 32, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=PATIENCE_S) as client:
            while not self._ended.is_set():
                with client.stream("POST", self._url, json=body) as answer:
                    lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
                self.n_tokens.append(sum(len(json.loads(line[6:])["choices"]) for line in lines))

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def test_a_thousand_images_in_a_prompt(server: ServerProcess) -> None:
    before = peak_bytes(server)
    with Reader(server) as reader:
        many = [png(16, 16, seed) for seed in range(1000)]
        answer = ask(server, many)
        assert answer.status_code == 400
        assert "n_ctx is 4096: give fewer or smaller ones" in answer.json()["error"]["message"]
        answer = ask(server, many[:100])
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] > 2000
        assert ask(server, [*map(png, [100] * 1000, [80] * 1000, range(1000))]).status_code == 413
    assert len(reader.n_tokens) > 1 and min(reader.n_tokens) > 24
    assert peak_bytes(server) - before < BOUND_BYTES


def test_bombs(server: ServerProcess) -> None:
    from PIL import Image

    file = io.BytesIO()
    Image.new("1", (5700, 5700)).save(file, "PNG")
    bomb = file.getvalue()
    assert len(bomb) < 5000
    before = peak_bytes(server)
    with Reader(server) as reader:
        answer = ask(server, [bomb + bytes([i % 256, i // 256]) for i in range(1000)])
        assert answer.status_code == 400
        assert "pixels; a conversation may have 268435456" in answer.json()["error"]["message"]
    assert len(reader.n_tokens) > 1 and min(reader.n_tokens) > 24
    assert peak_bytes(server) - before < BOUND_BYTES


def test_damaged_images(server: ServerProcess) -> None:
    whole = png(64, 64)
    statuses = set()
    with Reader(server) as reader:
        for seed in range(150):
            chance = random.Random(seed)
            data = bytearray(whole)
            for _ in range(chance.randint(1, 4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            if chance.random() < 0.3:
                del data[chance.randrange(len(data)) :]
            statuses.add(ask(server, [bytes(data)]).status_code)
    assert statuses <= {200, 400} and 400 in statuses
    assert len(reader.n_tokens) > 1 and min(reader.n_tokens) > 24
    assert ask(server, [whole]).status_code == 200
