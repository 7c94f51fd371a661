"""``serve --cache-dir``: a conversation goes on after the server was killed."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from support.control import wait_until
from support.server_process import ServerProcess

import llamapipe as lp

pytest.importorskip("starlette")

STORY = "Once upon a time, in a small village by the sea, there lived a fisherman who could not swim. " * 4


def test_a_chat_goes_on_after_kill_9(tmp_path: Path) -> None:
    """Each key finds its own."""
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    folder = tmp_path / "cache"
    arguments = (
        "--model",
        str(lp.demo_model_path()),
        "-c",
        "512",
        "--cache-dir",
        str(folder),
        "--api-key-file",
        str(keys),
    )

    def ask(server: ServerProcess, key: str) -> tuple[str, int]:
        done = httpx.post(
            f"{server.url}/v1/completions",
            json={"prompt": STORY, "max_tokens": 8, "temperature": 0},
            headers={"Authorization": f"Bearer {key}"},
            timeout=120,
        )
        answer = done.raise_for_status().json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with ServerProcess(*arguments, cwd=tmp_path) as server:
        text, n_cached = ask(server, "first")
        assert n_cached == 0
        wait_until(lambda: [*folder.glob("*/*.kv")])
    with ServerProcess(*arguments, cwd=tmp_path) as server:
        assert ask(server, "second") == (text, 0)
        again, n_cached = ask(server, "first")
        assert again == text and n_cached > 60
        metrics = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer first"}).text
        assert "llamapipe_disk_reads_total 1.0" in metrics
        httpx.post(
            f"{server.url}/reset_prefix_cache", headers={"Authorization": "Bearer first"}
        ).raise_for_status()
    with ServerProcess(*arguments, cwd=tmp_path) as server:
        assert ask(server, "first") == (text, 0)
