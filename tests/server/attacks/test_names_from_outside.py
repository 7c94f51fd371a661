"""Files whose names are no text, or have characters that end a line: every route tells them, escaped."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import httpx
import pytest
from support.control import PATIENCE_S
from support.fleet_servers import pool_server

import llamapipe as lp
from llamapipe._messages import readable
from llamapipe.server import ServerSettings, serve

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="its file names are UTF-8")
NAMES = {
    b"bad\xff": "bad\\xff",
    b"half\xf0\x9f\x98": "half\\xf0\\x9f\\x98",
    b"a\nb": "a\\nb",
    b"a\r\x1b[31mb": "a\\r\\x1b[31mb",
    b"a\"b'c\\d": "a\"b'c\\d",
    "\N{LINE SEPARATOR}\N{GRINNING FACE}é".encode(): "\\u2028\N{GRINNING FACE}é",
    b"l" * 250: "l" * 250,
}


@pytest.mark.parametrize(("name", "shown"), NAMES.items(), ids=range(len(NAMES)))
def test_readable(name: bytes, shown: str) -> None:
    assert readable(os.fsdecode(name)) == shown == readable(shown)


def test_half_a_character_is_escaped() -> None:
    assert readable("a\ud83d") == "a\\ud83d"


def test_of_several_models(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for name in (b"good", *NAMES):
        (folder / os.fsdecode(name + b".gguf")).symlink_to(lp.demo_model_path())
    with pool_server(folder, "--ollama", "--ping", "0.05", log=tmp_path / "log") as server:
        client = server.client
        names = {model["id"] for model in client.get("/v1/models").json()["data"]}
        assert names == {"good", *NAMES.values()}
        for shown in ("good", "bad\\xff", "a\\nb"):
            body = {"model": shown, "prompt": "Once", "max_tokens": 2, "stream": True}
            answer = client.post("/v1/completions", json=body, timeout=PATIENCE_S)
            assert answer.status_code == 200
            assert all(line[:6] in ("", "data: ", ": load", ": ping") for line in answer.text.split("\n"))
            assert client.get(f"/v1/models/{shown}").status_code == 200
        for path in ("/v1/models", "/metrics", "/api/tags", "/api/ps", "/health", "/openapi.json"):
            assert client.get(path, timeout=PATIENCE_S).status_code == 200, path
        assert 'model="bad\\\\xff"' in client.get("/metrics").text
        assert client.post("/api/show", json={"model": "bad\\xff"}, timeout=PATIENCE_S).status_code == 200
        assert client.post("/v1/completions", json={"model": "no", "prompt": "a"}).status_code == 404


def test_of_one_model(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"bad\xff.gguf")
    file.symlink_to(lp.demo_model_path())
    settings = ServerSettings(ollama=True, embedding_names=("\udcff",))
    assert settings.embedding_names == ("\\xff",)
    with (
        lp.Engine(file, n_ctx=64) as engine,
        serve(engine, settings=settings) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        assert engine.model.name == "bad\\xff"
        for path in ("/v1/models", "/metrics", "/api/tags", "/api/ps", "/model_info", "/openapi.json"):
            assert client.get(path).status_code == 200, path
        assert client.post("/api/show", json={"model": "bad\\xff"}).status_code == 200
        with pytest.raises(ValueError, match="must have no control characters"):
            engine.model.load_adapter("x.gguf", name="bad\udcff")
