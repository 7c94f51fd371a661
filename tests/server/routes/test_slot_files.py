"""``--slot-save-path``: conversations in files, as llama-server's clients save and restore them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from zlib import crc32

import httpx
import pytest
from support.forgeries import forgeries
from support.gguf_models import tiny_architecture

import llamapipe as lp
from llamapipe import cache_file

pytest.importorskip("starlette")

from llamapipe.server import ServerSettings, serve

STORY = "Once upon a time, in a small village by the sea, there lived a fisherman who could not swim. " * 4
MARKS = ((0, 5), (0, 10**30), (0, -(10**30)), (-1, -1), (10**6, -1))
ASKED: dict[str, Any] = {"prompt": STORY, "n_predict": 8, "temperature": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slots").mkdir()
    return tmp_path / "slots"


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    with NewServer(folder) as server:
        yield server


class NewServer:
    """A server with an engine of its own."""

    def __init__(self, folder: Path, *keys: str, **options: Any) -> None:
        limits = {name: options.pop(name) for name in ("slot_transfer", "max_body_bytes") if name in options}
        self._engine = lp.Engine(
            lp.demo_model_path(), **{"n_ctx": 512, "n_seq_max": 2, "n_threads": 1, **options}
        )
        settings = ServerSettings(slot_save_path=folder, api_keys=keys, strict=True, **limits)
        self._server = serve(self._engine, settings=settings)

    def __enter__(self) -> str:
        url: str = self._server.__enter__().url
        return url

    def __exit__(self, *error: Any) -> None:
        self._server.__exit__(*error)
        self._engine.check_integrity()
        self._engine.close()


def act(
    url: str, slot: int | str, action: str, name: str | None = None, key: str = "", status: int = 200
) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = None if name is None else {"filename": name}
    answer = httpx.post(f"{url}/slots/{slot}?action={action}", json=body, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def ask(url: str, key: str = "", **more: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = httpx.post(f"{url}/completion", json={**ASKED, **more}, headers=headers, timeout=60)
    return answer.raise_for_status().json()


def test_a_conversation_goes_on_in_another_server(folder: Path, url: str) -> None:
    """As llama-server's clients do it, by a slot's number; a chat needs no number."""
    assert [ask(url, **slot)["id_slot"] for slot in ({}, {"id_slot": -1}, {"id_slot": "a"})] == [0, 0, "a"]
    told = ask(url, id_slot=3)
    assert told["id_slot"] == 3
    saved = act(url, 3, "save", "story.bin")
    path = folder / "story.bin"
    assert saved["n_written"] == path.stat().st_size > 1000 and path.stat().st_mode & 0o777 == 0o600
    assert (saved["id_slot"], saved["filename"]) == (3, "story.bin") and saved["timings"]["save_ms"] > 0
    (listed,) = httpx.get(f"{url}/slots/files").json()["data"]
    assert listed["filename"] == "story.bin" and listed["n_bytes"] == saved["n_written"]
    with NewServer(folder, n_seq_max=3) as other:
        assert ask(other)["timings"]["cache_n"] == 0
        act(other, 0, "erase")
        restored = act(other, 7, "restore", "story.bin")
        assert restored["n_restored"] == saved["n_saved"] and restored["n_read"] == saved["n_written"]
        again = ask(other, id_slot=7)
        assert again["content"] == told["content"] and again["timings"]["cache_n"] > 60
        assert act(other, 7, "erase")["n_erased"] > 60
        assert ask(other)["timings"]["cache_n"] == 0
    assert httpx.delete(f"{url}/slots/files/story.bin").json() == {"filename": "story.bin", "deleted": True}
    assert not path.exists()


def test_a_chat_is_slot_0(url: str, folder: Path) -> None:
    """Of any API; the last one counts."""
    messages = [{"role": "user", "content": STORY}]
    body: dict[str, Any] = {"messages": messages, "max_tokens": 4, "temperature": 0}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
    saved = act(url, 0, "save", "chat")
    with NewServer(folder) as other:
        act(other, 0, "restore", "chat")
        answer = httpx.post(f"{other}/v1/messages", json={**body, "model": "demo"}, timeout=60).json()
        assert answer["usage"]["cache_read_input_tokens"] > 60
    assert saved["n_saved"] > 60


def test_states_of_hybrids(folder: Path, tmp_path: Path) -> None:
    """A whole sequence has the state of its end, and those on the way."""
    path = tiny_architecture(tmp_path / "model.gguf", "qwen3.5-0.8b")
    tokens = [20 + i * 7 % 150 for i in range(150)]
    with lp.Model(path) as model:
        told = []
        for action in ("save", "restore"):
            with (
                lp.Engine(model, n_ctx=256, n_threads=1, cache_bytes=2**26) as engine,
                serve(engine, settings=ServerSettings(slot_save_path=folder)) as server,
            ):
                if action == "restore":
                    act(server.url, 0, "restore", "hybrid")
                told.append(ask(server.url, prompt=tokens))
                if action == "save":
                    act(server.url, 0, "save", "hybrid")
        assert told[0]["content"] == told[1]["content"] and told[1]["timings"]["cache_n"] >= 146


def test_keys_have_their_own(folder: Path) -> None:
    with NewServer(folder, "first", "second") as url:
        ask(url, "first")
        act(url, 0, "save", "mine", "first")
        act(url, 0, "save", "mine", "second", status=400)
        act(url, 0, "restore", "mine", "second", status=404)
        headers = {"Authorization": "Bearer second"}
        assert httpx.get(f"{url}/slots/files", headers=headers).json()["data"] == []
        assert httpx.delete(f"{url}/slots/files/mine", headers=headers).status_code == 404
        (own,) = (path.parent for path in folder.glob("*/mine"))
        ask(url, "second")
        act(url, 0, "save", "other", "second")
        (theirs,) = (path for path in folder.iterdir() if path != own)
        (own / "mine").rename(theirs / "mine")  # whoever can do that can do more
        assert "another API key" in act(url, 0, "restore", "mine", "second", status=400)["error"]["message"]


@pytest.mark.parametrize(
    "name", ["", "../x", "a/b", "/etc/passwd", ".hidden", "a\0b", "x" * 300, "ä", "a b", None]
)
def test_names_that_are_refused(url: str, folder: Path, name: str | None) -> None:
    ask(url)
    for action in ("save", "restore"):
        act(url, 0, action, name, status=400)
    assert list(folder.iterdir()) == []


def test_files_that_are_no_conversations(url: str, folder: Path, tmp_path: Path) -> None:
    ask(url)
    act(url, 0, "save", "good")
    content = (folder / "good").read_bytes()
    act(url, 0, "restore", "missing", status=404)
    for i, damaged in enumerate((b"", b"x" * 100, content[:-1], content[:50] + b"?" + content[51:])):
        (folder / f"bad{i}").write_bytes(damaged)
        (folder / f"bad{i}").chmod(0o600)
        act(url, 0, "restore", f"bad{i}", status=400)
    (folder / "link").symlink_to(folder / "good")
    os.mkfifo(folder / "pipe")
    (folder / "dir").mkdir()
    for name in ("pipe", "dir", "link"):
        act(url, 0, "restore", name, status=400)
    with NewServer(folder, n_ctx=64) as small:
        assert "n_ctx" in act(small, 0, "restore", "good", status=400)["error"]["message"]
    with NewServer(folder, type_k="f32") as other:
        act(other, 0, "restore", "good", status=400)
    assert ask(url)["timings"]["cache_n"] > 60  # nothing was lost


def test_a_slot_may_have_a_name(url: str, folder: Path) -> None:
    ask(url, id_slot="research-1")
    ask(url, id_slot="other", prompt="Something else, of which little is known.")
    assert act(url, "research-1", "save", "research")["id_slot"] == "research-1"
    act(url, "research-2", "save", "x", status=400)  # nothing is there
    with NewServer(folder) as other:
        act(other, "again", "restore", "research")
        assert ask(other)["timings"]["cache_n"] > 60
        assert act(other, "again", "erase")["n_erased"] > 60
    for name in ("-x", "a b", "x" * 65, "ä", "", -2, 10**9, 10**30):
        assert httpx.post(f"{url}/completion", json={**ASKED, "id_slot": name}).status_code == 400


class TestTransfer:
    @pytest.fixture
    def content(self, url: str, folder: Path) -> bytes:
        ask(url)
        act(url, 0, "save", "story")
        return (folder / "story").read_bytes()

    def test_a_conversation_moves_to_another_server(self, content: bytes, tmp_path: Path) -> None:
        """Also to one with other keys: there it is the uploader's."""
        for place in ("one", "two"):
            (tmp_path / place).mkdir()
        with NewServer(tmp_path / "one", "mine", "other", slot_transfer=True) as first:
            assert put(first, "story", content, key="mine").json()["n_tokens"] > 60
            assert act(first, 0, "restore", "story", key="mine")["n_restored"] > 60
            assert ask(first, key="mine")["timings"]["cache_n"] > 60
            assert ask(first, key="other")["timings"]["cache_n"] == 0
            got = httpx.get(f"{first}/slots/files/story", headers={"Authorization": "Bearer mine"})
            assert got.headers["content-type"] == "application/octet-stream" and len(got.content) > 1000
            missing = httpx.get(f"{first}/slots/files/story", headers={"Authorization": "Bearer other"})
            assert missing.status_code == 404
        with NewServer(tmp_path / "two", slot_transfer=True) as second:
            assert put(second, "again", got.content).status_code == 200
            act(second, 0, "restore", "again")
            assert ask(second)["timings"]["cache_n"] > 60
        assert (tmp_path / "two" / "again").read_bytes() == content

    def test_forgeries_are_refused(self, content: bytes, tmp_path: Path) -> None:
        """With right checksums, too. Nothing is written, and the server serves on."""
        start = cache_file._START
        magic, n_head, _, n_snapshot = start.unpack_from(content)
        head, snapshot = content[start.size : start.size + n_head], content[start.size + n_head :]
        bad = [b"", b"x" * 100, content[:-1], content + b"x", content[:50] + b"?" + content[51:]]
        bad += [
            start.pack(magic, n_head, crc32(head), len(forged)) + head + forged
            for forged in forgeries(snapshot)
        ]
        heads = [b"[]", b"{}", b"[" * 100_000, head.replace(b"null", b"[1, 2]", 1)]
        assert head.count(b"[]]") == 1  # no marks
        heads += [head.replace(b"[]]", f"[[{at}, {mark}]]]".encode()) for at, mark in MARKS]
        for salt in (b"[1, 2]", b"[" * 500 + b"]" * 500):  # engines look into keys by recursion
            heads += [head.replace(b"null", b"[null, " + salt + b", null]", 1)]
        heads += [head.replace(b"null", b"[]", 1)]
        bad += [
            start.pack(magic, len(forged), crc32(forged), n_snapshot) + forged + snapshot for forged in heads
        ]
        (tmp_path / "there").mkdir()
        with NewServer(tmp_path / "there", slot_transfer=True) as server:
            for i, wrong in enumerate(bad):
                answer = put(server, f"bad{i}", wrong)
                assert answer.status_code == 400, (i, answer.text)
            assert list((tmp_path / "there").iterdir()) == []
            for name in ("../up", ".hidden", "a/b", ""):
                assert put(server, name, content).status_code == 400
            twice = [("file", ("a", content)), ("file", ("b", content))]
            assert "twice" in httpx.post(f"{server}/slots/files", files=twice, timeout=60).text
            assert put(server, "good", content).status_code == 200
            assert ask(server)["timings"]["cache_n"] == 0

    def test_transfers_have_limits(self, content: bytes, url: str, folder: Path, tmp_path: Path) -> None:
        assert put(url, "story", content).status_code == 403
        assert httpx.get(f"{url}/slots/files/story").status_code == 403
        with NewServer(folder, slot_transfer=True, max_body_bytes=len(content)) as small:
            assert put(small, "more", content).status_code == 413
            assert httpx.get(f"{small}/slots/files/story").content == content
            (folder / "link").symlink_to(folder / "story")
            os.mkfifo(folder / "pipe")
            (folder / "dir").mkdir()
            for name in ("link", "pipe", "dir"):
                assert httpx.get(f"{small}/slots/files/{name}").status_code == 400
        with NewServer(folder, slot_transfer=True, n_ctx=64) as short:
            assert "n_ctx" in put(short, "more", content).json()["error"]["message"]


def put(url: str, name: str, content: bytes, key: str = "") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{url}/slots/files", files={"file": (name, content)}, headers=headers, timeout=60)


@pytest.mark.parametrize("options", [{"cache_bytes": 0}, {"prefix_cache": "exact"}, {"prefix_cache": False}])
def test_what_would_not_be_used_is_not_restored(url: str, folder: Path, options: dict[str, Any]) -> None:
    ask(url, id_slot=3)
    act(url, 3, "save", "story.bin")
    with NewServer(folder, **options) as other:
        error = act(other, 3, "restore", "story.bin", status=400)["error"]
    assert error["message"].endswith("need an engine with prefix_cache=True and cache_bytes above 0")


def test_a_list_while_files_are_deleted(url: str, folder: Path) -> None:
    ask(url, id_slot=3)
    act(url, 3, "save", "story.bin")
    (folder / "gone").symlink_to("nowhere")
    # The list goes through the names in order, and so does who deletes: somewhere they meet.
    names = sorted(f"f{i}" for i in range(200))

    def delete() -> None:
        for name in names:
            (folder / name).unlink()

    with ThreadPoolExecutor(1) as threads:
        for _ in range(60):
            for name in names:
                (folder / name).touch()
            deleting = threads.submit(delete)
            while not deleting.done():
                assert httpx.get(f"{url}/slots/files").status_code == 200
    assert [entry["filename"] for entry in httpx.get(f"{url}/slots/files").json()["data"]] == ["story.bin"]


def test_wrong_requests_are_refused(url: str) -> None:
    assert act(url, 0, "save", "x", status=400)["error"]["param"] == "id"  # nothing is there
    for path in ("0?action=no", "0", "x+y?action=erase", "-1?action=erase", f"{'9' * 30}?action=erase"):
        assert httpx.post(f"{url}/slots/{path}").status_code == 400, path
    bodies: tuple[Any, ...] = ([], {"file": "x"}, {"filename": 3})
    for body in bodies:
        assert httpx.post(f"{url}/slots/0?action=save", json=body).status_code == 400
    assert act(url, 5, "erase")["n_erased"] == 0


def test_slot_files_are_off_by_default() -> None:
    with lp.Engine(lp.demo_model_path(), n_ctx=256) as engine, serve(engine) as server:
        error = act(server.url, 0, "save", "x", status=403)["error"]
        assert "--slot-save-path" in error["message"]
        answer = httpx.post(f"{server.url}/completion", json={"prompt": "a", "n_predict": 1, "id_slot": 3})
        assert answer.headers["x-llamapipe-unused"] == "id_slot" and answer.json()["id_slot"] == -1
