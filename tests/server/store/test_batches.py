"""Files and batches through OpenAI's own client: results, limits, keys, and what is left after a kill."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.bert_model import bert_model
from support.control import PATIENCE_S, Gate, Worker, wait_until
from support.fleet_servers import pool_server, worker_server
from support.gguf_models import encoder_decoder_model
from support.inside import inbox_of
from support.run_script import command, environment
from support.served import http_client, openai_client

import llamapipe as lp
from llamapipe.server import ServerSettings, serve
from llamapipe.server.store import files

CHAT: Any = "/v1/chat/completions"
RESPONSES: Any = "/v1/responses"
NAMES: Any = {"model_names": ("demo",)}
ENDED = ("completed", "failed", "cancelled", "expired")


@pytest.fixture(scope="module")
def engine(demo: lp.Model) -> Iterator[lp.Engine]:
    with lp.Engine(demo, n_ctx=512, n_seq_max=4) as engine:
        yield engine


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "answers.db"


@contextmanager
def served(engine: lp.Engine, store: Path, key: str = "none", **more: Any) -> Iterator[openai.OpenAI]:
    with openai_client(engine, api_key=key, **{**NAMES, "store": store, **more}) as client:
        yield client


def rows(store: Path, statement: str) -> list[tuple[Any, ...]]:
    """What another program sees in the file of batches."""
    with closing(sqlite3.connect(f"{store}-files")) as connection:
        return connection.execute(statement).fetchall()


def change(store: Path, statement: str) -> None:
    with closing(sqlite3.connect(f"{store}-files")) as connection, connection:
        connection.execute(statement)


def chat(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "demo", "messages": messages, "max_tokens": 6, "temperature": 0, **more}


def lines_of(bodies: Sequence[dict[str, Any]], url: str = CHAT) -> str:
    """A file of requests, whose names are r0, r1, …"""
    requests = [
        {"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)
    ]
    return "".join(json.dumps(request) + "\n" for request in requests)


def begun(client: openai.OpenAI, text: str, endpoint: Any = CHAT, **more: Any) -> Any:
    file = client.files.create(file=("requests.jsonl", text.encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    batch: Any = None

    def has_ended() -> bool:
        nonlocal batch
        batch = client.batches.retrieve(batch_id)
        return batch.status in ENDED

    wait_until(has_ended)
    return batch


def counts_of(client: openai.OpenAI, batch: Any) -> Any:
    """How many requests of a batch have results now."""
    return client.batches.retrieve(batch.id).request_counts


def results_of(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """The lines of a file of results, by the names of the requests; each is there once."""
    if file_id is None:
        return {}
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    results = {line["custom_id"]: line for line in lines}
    assert len(results) == len(lines)
    return results


# ---- results
def test_a_batch_has_the_answers_of_its_requests(engine: lp.Engine, store: Path) -> None:
    """In the order of the lines; what is refused has its error in the other file."""
    bodies = [chat(f"Story {i}") for i in range(12)]
    bodies[3]["model"] = "no such"
    bodies[7]["temperature"] = -1
    with served(engine, store) as client:
        batch = begun(client, lines_of(bodies).replace("\n", "\n\n"), metadata={"a": "b"})
        assert (batch.status, batch.metadata, batch.endpoint) == ("validating", {"a": "b"}, CHAT)
        done = ended(client, batch.id)
        assert done.status == "completed" and done.errors is None
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (
            12,
            10,
            2,
        )
        assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
        assert done.expires_at == done.created_at + 86_400
        good, bad = (results_of(client, file) for file in (done.output_file_id, done.error_file_id))
        assert list(good) == [f"r{i}" for i in range(12) if i not in (3, 7)]
        assert {name: line["response"]["status_code"] for name, line in bad.items()} == {"r3": 404, "r7": 400}
        assert bad["r7"]["response"]["body"]["error"]["param"] == "temperature"
        for i in (0, 11):
            line = good[f"r{i}"]
            assert (line["error"], line["response"]["status_code"]) == (None, 200)
            once = client.chat.completions.create(**bodies[i])
            assert (
                line["response"]["body"]["choices"][0]["message"]["content"]
                == once.choices[0].message.content
            )
        file = client.files.retrieve(done.output_file_id)
        assert file.purpose == "batch_output" and file.bytes == len(client.files.content(file.id).content)
        assert client.batches.retrieve(done.id) == done == client.batches.cancel(done.id)
    assert rows(store, "SELECT DISTINCT worker FROM batches") == [(None,)]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"model": "demo", "prompt": "Once", "max_tokens": 4, "temperature": 0}),
        (RESPONSES, {"model": "demo", "input": "Hello", "max_output_tokens": 4, "temperature": 0}),
    ],
)
def test_other_endpoints_are_answered(
    engine: lp.Engine, store: Path, endpoint: str, body: dict[str, Any]
) -> None:
    with served(engine, store) as client:
        done = ended(client, begun(client, lines_of([body] * 3, endpoint), endpoint).id)
        answers = [line["response"]["body"] for line in results_of(client, done.output_file_id).values()]
        assert len(answers) == 3 and {answer["model"] for answer in answers} == {"demo"}
        if endpoint == RESPONSES:  # they are stored, as those of clients
            assert {client.responses.retrieve(answer["id"]).id for answer in answers} == {
                answer["id"] for answer in answers
            }


def test_embeddings_are_those_of_the_route(store: Path, tmp_path: Path) -> None:
    file, _ = bert_model(tmp_path / "bert.gguf")
    with (
        lp.Model(file) as model,
        lp.Embedder(model) as embedder,
        openai_client(None, embedder=embedder, embedding_names=("bert",), store=store) as client,
    ):
        body = {"model": "bert", "input": ["hello", "world"]}
        done = ended(client, begun(client, lines_of([body] * 2, "/v1/embeddings"), "/v1/embeddings").id)
        answer = results_of(client, done.output_file_id)["r1"]["response"]["body"]
        once = client.embeddings.create(**body, encoding_format="float")  # type: ignore[arg-type]
        assert [entry["embedding"] for entry in answer["data"]] == [entry.embedding for entry in once.data]


def test_a_byte_order_mark_belongs_to_no_line(engine: lp.Engine, store: Path) -> None:
    with served(engine, store) as client:
        done = ended(client, begun(client, "\ufeff" + lines_of([chat("a"), chat("b")])).id)
        assert (done.status, list(results_of(client, done.output_file_id))) == ("completed", ["r0", "r1"])
        done = ended(client, begun(client, lines_of([chat("a")]) + "\ufeff" + lines_of([chat("b")])).id)
        assert done.errors.data[0].line == 2


LINE: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": CHAT, "body": chat("Hello")}


@pytest.mark.parametrize(
    ("lines", "code", "line"),
    [
        (["not JSON"], "invalid_json_line", 1),
        ([LINE, '{"custom_id": "b", "body": ' + "[" * 100_000], "invalid_json_line", 2),
        ([LINE, [1]], "invalid_request", 2),
        ([{**LINE, "custom_id": 5}], "invalid_request", 1),
        ([{**LINE, "custom_id": ""}], "invalid_request", 1),
        ([{**LINE, "custom_id": "a" * 513}], "invalid_request", 1),
        ([LINE, {**LINE, "custom_id": "b"}, LINE], "duplicate_custom_id", 3),
        ([{**LINE, "method": "GET"}], "invalid_method", 1),
        ([{**LINE, "url": "/v1/completions"}], "mismatched_url", 1),
        ([{**LINE, "body": chat("a", stream=True)}], "invalid_request", 1),
        ([{**LINE, "body": "text"}], "invalid_request", 1),
        ([{"custom_id": "a", "url": CHAT}], "invalid_request", 1),
        ([], "empty_file", None),
        ([LINE] * 300, "duplicate_custom_id", 2),
    ],
)
def test_files_that_are_no_requests(
    engine: lp.Engine, store: Path, lines: list[Any], code: str, line: int | None
) -> None:
    """The batch fails before a request is made, and says which lines are wrong; 100 of them are told."""
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    with served(engine, store) as client:
        done = ended(client, begun(client, text).id)
        assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
        first = done.errors.data[0]
        assert (first.code, first.line) == (code, line)
        assert len(done.errors.data) <= 100


def test_too_many_requests(engine: lp.Engine, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamapipe.server._batches.MOST_REQUESTS", 3)
    with served(engine, store) as client:
        done = ended(client, begun(client, lines_of([chat("a")] * 4)).id)
        assert (done.status, done.errors.data[0].code) == ("failed", "too_many_requests")


# ---- what clients may ask for
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1w"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
def test_wrong_fields_are_named(engine: lp.Engine, store: Path, fields: dict[str, Any], field: str) -> None:
    with served(engine, store) as client:
        file = client.files.create(file=b"{}", purpose="batch")
        options: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **fields}
        with pytest.raises(openai.BadRequestError) as caught:
            client.batches.create(**options)
        assert caught.value.param == field


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"purpose": (None, "batch")}, "file"),
        ({"file": ("a", b"x"), "purpose": (None, "fine-tune")}, "purpose"),
        ({"file": ("a", b"x")}, "purpose"),
        ({"file": ("a", b"x"), "purpose": (None, "batch"), "more": (None, "1")}, "more"),
        (
            {"file": ("a", b"x"), "purpose": (None, "batch"), "expires_after[seconds]": (None, "5")},
            "expires_after.seconds",
        ),
    ],
)
def test_wrong_uploads_are_refused(engine: lp.Engine, store: Path, form: Any, field: str) -> None:
    with served(engine, store) as client:
        answer = httpx.post(f"{client.base_url}files", files=form)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert client.files.list().data == []


def test_files_are_listed_read_and_deleted(engine: lp.Engine, store: Path) -> None:
    with served(engine, store) as client:
        after: Any = {"anchor": "created_at", "seconds": 3600}
        files = [
            client.files.create(
                file=(f"{i}.jsonl", bytes([i]) * 700_000), purpose="batch", expires_after=after
            )
            for i in range(3)
        ]
        assert [(file.filename, file.bytes, file.status) for file in files] == [
            (f"{i}.jsonl", 700_000, "processed") for i in range(3)
        ]
        assert files[0].expires_at == files[0].created_at + 3600
        assert client.files.content(files[2].id).content == bytes([2]) * 700_000
        listed = [file.id for file in client.files.list(limit=2)]
        assert listed == [file.id for file in reversed(files)]
        assert [file.id for file in client.files.list(limit=1, order="asc")] == listed[::-1]
        assert client.files.list(purpose="batch_output").data == []
        page: Any = client.files.list(limit=2)
        assert (page.has_more, page.last_id) == (True, files[1].id)
        assert client.files.delete(files[1].id).deleted
        for use in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError, match=f"File with id '{files[1].id}' not found"):
                use(files[1].id)
        for query in ("limit=0", "limit=10001", "limit=00000000199999999999999999999", "order=up", "page=1"):
            with pytest.raises(openai.BadRequestError):
                client.get(f"/files?{query}", cast_to=object)
        with pytest.raises(openai.NotFoundError):
            client.files.list(after="file-none")
    change(store, "UPDATE files SET expires_at = 1")
    with served(engine, store) as client:
        assert client.files.list().data == []
        assert rows(store, "SELECT (SELECT count(*) FROM files), (SELECT count(*) FROM parts)") == [(0, 0)]


def test_a_clock_that_was_ahead(engine: lp.Engine, store: Path) -> None:
    """What was made then does not stay until that time."""
    with served(engine, store) as client:
        file = client.files.create(file=b"a", purpose="batch")
    change(
        store, "UPDATE files SET created_at = created_at + 1000000000, expires_at = expires_at + 1000000000"
    )
    with served(engine, store) as client:
        retrieved: Any = client.files.retrieve(file.id)
        assert (
            retrieved.expires_at - retrieved.created_at,
            retrieved.created_at - file.created_at < 1000,
        ) == (
            30 * 86_400,
            True,
        )


def test_a_file_that_a_batch_reads_stays(engine: lp.Engine, store: Path) -> None:
    with served(engine, store) as client, Gate(engine) as gate:
        batch = begun(client, lines_of([chat("a")]))
        gate.wait()
        with pytest.raises(openai.BadRequestError, match="cancel the batch first"):
            client.files.delete(batch.input_file_id)
        gate.open()
        ended(client, batch.id)
        assert client.files.delete(batch.input_file_id).deleted
        assert client.batches.retrieve(batch.id).status == "completed"


def test_batches_in_pages(engine: lp.Engine, store: Path) -> None:
    with served(engine, store) as client:
        file = client.files.create(file=b"{}", purpose="batch").id
        batch_ids = [
            client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h").id
            for _ in range(5)
        ]
        assert [batch.id for batch in client.batches.list(limit=2)] == batch_ids[::-1]
        with pytest.raises(openai.BadRequestError):
            client.batches.list(limit=101)


def test_each_key_has_its_own(engine: lp.Engine, store: Path) -> None:
    """And an equal part of the space."""
    limits = {"api_keys": ("mine", "other"), "files_bytes": 2**20}
    with served(engine, store, "mine", **limits) as client:
        other = client.with_options(api_key="other")
        batch = ended(client, begun(client, lines_of([chat("a")])).id)
        uses: list[Any] = [
            lambda: other.files.retrieve(batch.input_file_id),
            lambda: other.files.content(batch.output_file_id),
            lambda: other.files.delete(batch.output_file_id),
            lambda: other.files.list(after=batch.input_file_id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.batches.list(after=batch.id),
            lambda: other.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            ),
        ]
        for use in uses:
            with pytest.raises(openai.NotFoundError):
                use()
        assert other.files.list().data == [] and other.batches.list().data == []
        retrying = client.with_options(max_retries=2)  # not what another attempt does not change
        with pytest.raises(
            openai.RateLimitError, match=r"exceeded your current quota.*--files-bytes"
        ) as over:
            retrying.files.create(file=b"a" * (2**19 - 500), purpose="batch")
        assert over.value.code == "insufficient_quota" and "retry-after" not in over.value.response.headers
        assert over.value.response.request.headers["x-stainless-retry-count"] == "0"
        with pytest.raises(openai.APIStatusError, match="--files-bytes") as caught:
            client.files.create(file=b"a" * 2**19, purpose="batch")
        assert caught.value.status_code == 413
        assert other.files.create(file=b"a" * (2**19 - 1000), purpose="batch").bytes == 2**19 - 1000


def test_results_that_do_not_fit(engine: lp.Engine, store: Path) -> None:
    """The batch fails, with the results that do."""
    with served(engine, store, files_bytes=2**20) as client:
        client.files.create(file=b"a" * 1_030_000, purpose="batch")
        done = ended(client, begun(client, lines_of([chat("a")] * 40)).id)
        assert (done.status, done.errors.data[0].code) == ("failed", "files_full")
        results = results_of(client, done.output_file_id)
        assert 0 < len(results) == done.request_counts.completed < 40
        assert sum(file.bytes for file in client.files.list()) <= 2**20


def test_too_many_batches(engine: lp.Engine, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_WAITING", 2)
    with served(engine, store) as client, Gate(engine) as gate:
        batches = [begun(client, lines_of([chat("a")])) for _ in range(2)]
        gate.wait()
        with pytest.raises(openai.RateLimitError, match="2 batches have not ended"):
            begun(client, lines_of([chat("a")]))
        gate.open()
        assert {ended(client, batch.id).status for batch in batches} == {"completed"}


def test_batches_that_ended_are_kept_up_to_a_number(
    engine: lp.Engine, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_KEPT", 2)
    with served(engine, store, "mine", api_keys=("mine", "other")) as client:
        other = client.with_options(api_key="other")
        theirs = ended(other, begun(other, "").id)
        batch_ids = [ended(client, begun(client, "").id).id for _ in range(4)]
        assert [batch.id for batch in client.batches.list()] == batch_ids[:0:-1]
        assert other.batches.retrieve(theirs.id).status == "failed"


def test_a_file_that_cannot_be_used(engine: lp.Engine, store: Path) -> None:
    """The server does not start, and says so: as for the file of answers, which it closes."""
    file = Path(f"{store}-files")
    file.touch(mode=0o600)
    file.chmod(0o644)
    with pytest.raises(PermissionError, match=r"answers\.db-files cannot hold"):
        serve(engine, settings=ServerSettings(**NAMES, store=store))
    file.chmod(0o600)
    file.write_bytes(b"Dear diary, " * 1000)
    with pytest.raises(OSError, match="not a database"):
        serve(engine, settings=ServerSettings(**NAMES, store=store))
    assert not [thread for thread in threading.enumerate() if thread.name == "llamapipe-store"]


def test_without_a_store(engine: lp.Engine) -> None:
    with http_client(engine, **NAMES) as http:
        answers = [
            http.get(f"/v1/{path}")
            for path in ("files", "files/a", "files/a/content", "batches", "batches/a")
        ]
        body = {"input_file_id": "a", "endpoint": CHAT, "completion_window": "24h"}
        answers += [
            http.post("/v1/batches", json=body),
            http.post("/v1/batches/a/cancel"),
            http.delete("/v1/files/a"),
        ]
        answers.append(http.post("/v1/files", files={"file": b"a"}))
        assert {answer.status_code for answer in answers} == {404}
        assert all("llamapipe serve --store FILE" in answer.text for answer in answers)


# ---- while it is computed
def test_a_cancelled_batch_keeps_its_results(engine: lp.Engine, store: Path) -> None:
    """The second request never ends by itself in this test: the gate is closed."""
    bodies = [chat("a", max_tokens=1), *(chat("b", max_tokens=400) for _ in range(6))]
    with served(engine, store) as client, Gate(engine) as gate:
        batch = begun(client, lines_of(bodies))
        gate.wait()
        while counts_of(client, batch).completed == 0:
            gate.step()
        now = client.batches.cancel(batch.id)
        assert now.status in ("cancelling", "cancelled")
        done = ended(client, batch.id)
        assert done.status == "cancelled" and done.cancelling_at <= done.cancelled_at
        assert list(results_of(client, done.output_file_id)) == ["r0"]
        gate.open()
        wait_until(lambda: engine.stats().n_active == 0)
        assert client.batches.cancel(batch.id) == done


def test_clients_do_not_wait_for_a_batch(demo: lp.Model, store: Path) -> None:
    """With one slot, and a request of a batch in it: a client's request takes its place."""
    with lp.Engine(demo, n_ctx=512, n_seq_max=1) as engine, served(engine, store) as client:
        with Gate(engine) as gate:
            batch = begun(client, lines_of([chat("A story.", max_tokens=400, ignore_eos=True)] * 3))
            gate.wait()
            asking = Worker(lambda: client.chat.completions.create(**chat("Hello")))
            wait_until(lambda: inbox_of(engine).qsize() > 0)
        assert asking.result().choices[0].message.content
        assert counts_of(client, batch).completed == 0
        assert ended(client, batch.id).request_counts.completed == 3


def test_a_server_that_ends_leaves_it_to_the_next(engine: lp.Engine, store: Path) -> None:
    with Gate(engine) as gate:
        with served(engine, store) as client:
            batch = begun(client, lines_of([chat(f"{i}") for i in range(9)]))
            gate.wait()
        assert rows(store, "SELECT worker, n_attempts, status FROM batches") == [(None, 0, "in_progress")]
    change(store, "UPDATE batches SET not_before = not_before + 86400")  # then the clock was put back
    with served(engine, store) as client:
        done = ended(client, batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", 9)
        assert len(results_of(client, done.output_file_id)) == 9


def test_a_batch_that_expires(engine: lp.Engine, store: Path) -> None:
    """The requests without a result say so; the others keep theirs."""
    bodies = [chat("a", max_tokens=1), *(chat("b", max_tokens=400) for _ in range(250))]
    with Gate(engine) as gate, served(engine, store) as client:
        batch = begun(client, lines_of(bodies))
        gate.wait()
        while counts_of(client, batch).completed == 0:
            gate.step()
    change(store, "UPDATE batches SET expires_at = 1")
    with served(engine, store) as client:
        done = ended(client, batch.id)
        counts = done.request_counts
        assert (done.status, counts.completed, counts.failed) == ("expired", 1, 250)
        assert list(results_of(client, done.output_file_id)) == ["r0"]
        bad = results_of(client, done.error_file_id)
        assert {line["error"]["code"] for line in bad.values()} == {"batch_expired"} and len(bad) == 250


def test_a_batch_that_ends_servers_fails(engine: lp.Engine, store: Path) -> None:
    with Gate(engine) as gate, served(engine, store) as client:
        batch = begun(client, lines_of([chat("a")]))
        gate.wait()
    change(store, f"UPDATE batches SET n_attempts = {files.MOST_ATTEMPTS}, worker = 'dead'")
    with served(engine, store) as client:
        done = ended(client, batch.id)
        assert done.status == "failed" and "ended 5 times" in done.errors.data[0].message


def test_a_key_that_is_gone(engine: lp.Engine, store: Path) -> None:
    with Gate(engine) as gate, served(engine, store, "mine", api_keys=("mine",)) as client:
        begun(client, lines_of([chat("a")]))
        gate.wait()
    with served(engine, store, "other", api_keys=("other",)):
        wait_until(lambda: rows(store, "SELECT status FROM batches") == [("failed",)])


def test_a_disk_that_fails(engine: lp.Engine, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload is refused; a batch waits until the disk takes its results."""
    monkeypatch.setattr("llamapipe.server.store.database._BUSY_S", 0.01)
    monkeypatch.setattr("llamapipe.server._batches.MOST_LATER_S", 0)
    with served(engine, store) as client, Gate(engine) as gate:
        batch = begun(client, lines_of([chat("a")] * 3))
        gate.wait()
        with closing(sqlite3.connect(f"{store}-files", isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            with pytest.raises(openai.InternalServerError) as caught:
                client.files.create(file=b"a", purpose="batch")
            assert caught.value.status_code == 507
            gate.open()
            wait_until(lambda: engine.stats().n_active == engine.stats().n_queued == 0)
            assert counts_of(client, batch).completed == 0
            connection.execute("ROLLBACK")
        done = ended(client, batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", 3)


# Ends itself, as kill -9 does, at the beginning or at the end of a transaction.
PROGRAM = """
import os, signal, sys
import llamapipe as lp
from llamapipe.server import ServerSettings, serve
from llamapipe.server.store.files import Files
store, stage, at_end, n = sys.argv[1], sys.argv[2], sys.argv[3] == "end", int(sys.argv[4])
real = getattr(Files, stage)
def killed(*arguments):
    global n
    n -= 1
    if n > 0:
        return real(*arguments)
    if at_end:
        real(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(Files, stage, killed)
with lp.Engine(lp.demo_model_path(), n_ctx=512, n_seq_max=2) as engine:
    with serve(engine, settings=ServerSettings(model_names=("demo",), store=store)) as server:
        say(server.url)
        input()
"""


@pytest.mark.parametrize("at", ["begin", "end"])
@pytest.mark.parametrize(
    ("stage", "n"),
    [("add_file", 1), ("add_batch", 1), ("claim", 1), ("begin", 1), ("add_results", 3), ("end", 1)],
)
def test_a_kill_at_every_stage(engine: lp.Engine, store: Path, stage: str, n: int, at: str) -> None:
    """The next server computes what is left: every request has one result, every answer is stored once."""
    body = {"model": "demo", "input": "Hello", "max_output_tokens": 3, "temperature": 0}
    with subprocess.Popen(
        command(PROGRAM, store, stage, at, n),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        told = None
        try:
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                told = begun(client, lines_of([body] * 6, RESPONSES), RESPONSES)
        except openai.APIConnectionError:
            pass
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    with served(engine, store) as client:
        batches = client.batches.list().data
        if stage in ("add_file", "add_batch"):  # the client was told of nothing, and there is nothing
            assert (told, batches, len(client.files.list().data)) == (None, [], int(stage == "add_batch"))
            return
        (batch,) = batches
        done = ended(client, batch.id)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 6, 0)
        results = results_of(client, done.output_file_id)
        ids = {line["response"]["body"]["id"] for line in results.values()}
        assert len(results) == len(ids) == 6
        with closing(sqlite3.connect(store)) as connection:
            assert {row[0] for row in connection.execute("SELECT id FROM answers")} == ids


# ---- several processes
LONG = [chat(f"Story {i}", max_tokens=100, ignore_eos=True) for i in range(30)]


def some_done(store: Path) -> str | None:
    """Who computes the batch, when it has results; None: it has ended."""
    wait_until(lambda: rows(store, "SELECT n_completed FROM batches")[0][0] > 0)
    worker: str | None = rows(store, "SELECT worker FROM batches")[0][0]
    return worker


def test_a_worker_that_is_killed(tmp_path: Path, store: Path) -> None:
    with (
        worker_server(2, "--store", str(store), "--n-ctx", "512", log=tmp_path / "log") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        model = client.models.list().data[0].id
        batch = begun(client, lines_of([{**body, "model": model} for body in LONG]))
        worker = some_done(store)
        if worker is not None:  # else it has ended already
            os.kill(int(worker.partition("-")[0]), signal.SIGKILL)
        done = ended(client, batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", len(LONG))
        assert len(results_of(client, done.output_file_id)) == len(LONG)


def test_a_model_that_cannot_be_loaded(tmp_path: Path, store: Path) -> None:
    """Its requests fail, and hold up no others."""
    models = tmp_path / "models.toml"
    head = encoder_decoder_model(tmp_path / "broken.gguf")
    models.write_text(f'[models.broken]\nfile = "{head}"\n[models.a]\nfile = "{lp.demo_model_path()}"\n')
    bodies = [chat("a", model=name) for name in ("broken", "a")]
    with (
        pool_server(models, "--store", str(store), "--n-ctx", "512", log=tmp_path / "log") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        done = ended(client, begun(client, lines_of(bodies)).id)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 1, 1)
        (bad,) = results_of(client, done.error_file_id).values()
        assert bad["response"]["body"]["error"]["code"] == "model_load_failed"


def test_several_models_and_a_server_that_is_killed(tmp_path: Path, store: Path) -> None:
    """A batch may ask several models. What the front process leaves is the next one's."""
    models = tmp_path / "models.toml"
    models.write_text("".join(f'[models.{name}]\nfile = "{lp.demo_model_path()}"\n' for name in ("a", "b")))
    options = ["--store", str(store), "--n-ctx", "512"]
    bodies = [{**body, "model": "ab"[i % 2]} for i, body in enumerate(LONG)]
    with pool_server(models, *options, log=tmp_path / "log") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            batch = begun(client, lines_of(bodies))
            some_done(store)
            os.kill(server.pids("a")[-1], signal.SIGKILL)
        server.process.kill()
        server.process.wait()
    with (
        pool_server(models, *options, log=tmp_path / "log2") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        done = ended(client, batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", len(LONG))
        results = results_of(client, done.output_file_id)
        assert [line["response"]["body"]["model"] for line in results.values()] == list("ab" * 15)
