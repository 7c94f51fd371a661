"""Answers in the background: what clients see of them, who computes them, and what is left after a kill."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.control import PATIENCE_S, Gate, wait_until
from support.fleet_servers import pool_server, worker_server
from support.run_script import command, environment
from support.served import openai_client

import llamapipe as lp
from llamapipe.server import ServerSettings, serve
from llamapipe.server.store import presence, runs

NAMES: Any = {"model_names": ("demo",)}
OPTIONS: Any = {"model": "demo", "input": "A story about a fox.", "max_output_tokens": 12, "temperature": 0}
LATER: Any = {**OPTIONS, "background": True}
MISSING = "resp_00000000000000000000000000000000"


@pytest.fixture(scope="module")
def engine(demo: lp.Model) -> Iterator[lp.Engine]:
    with lp.Engine(demo, n_ctx=2048, n_seq_max=4) as engine:
        yield engine


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "answers.db"


@contextmanager
def served(engine: lp.Engine, file: Path, key: str = "none", **more: Any) -> Iterator[openai.OpenAI]:
    with openai_client(engine, api_key=key, **{**NAMES, "store": file, **more}) as client:
        yield client


def ended(client: openai.OpenAI, answer_id: str) -> Any:
    """The answer, when it has ended."""
    answer: Any = None

    def has_ended() -> bool:
        nonlocal answer
        answer = client.responses.retrieve(answer_id)
        return answer.status not in ("queued", "in_progress")

    wait_until(has_ended)
    return answer


def rows(file: Path, statement: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(file)) as connection:
        return connection.execute(statement).fetchall()


# ---- what clients see
def test_an_answer_in_the_background_is_the_answer(engine: lp.Engine, file: Path) -> None:
    with served(engine, file) as client:
        expected = client.responses.create(**OPTIONS)
        with Gate(engine) as gate:
            answer = client.responses.create(**LATER, metadata={"a": "b"})
            assert (answer.status, answer.background, answer.output, answer.usage) == (
                "queued",
                True,
                [],
                None,
            )
            gate.wait()
            now = client.responses.retrieve(answer.id)
            assert (now.status, now.output) == ("in_progress", [])
        done = ended(client, answer.id)
        assert (done.status, done.output_text) == (expected.status, expected.output_text)
        assert (done.usage, done.created_at, done.metadata) == (expected.usage, answer.created_at, {"a": "b"})
        again = client.responses.create(**{**OPTIONS, "input": "And then?"}, previous_response_id=done.id)
        assert len(client.responses.input_items.list(again.id).data) == 3


def test_the_input_of_an_answer_keeps_its_ids(engine: lp.Engine, file: Path) -> None:
    with served(engine, file) as client, Gate(engine) as gate:
        answer = client.responses.create(**LATER)
        gate.wait()
        before = client.responses.input_items.list(answer.id).data
        gate.open()
        ended(client, answer.id)
        assert client.responses.input_items.list(answer.id).data == before


def test_a_stream_can_be_followed_again(engine: lp.Engine, file: Path) -> None:
    """The client hangs up, and asks for what it has not seen; then for all of it."""
    with served(engine, file) as client:
        with client.responses.create(**LATER, stream=True) as stream:
            first = [next(iter(stream)) for _ in range(5)]
        opening: Any = first[0]
        rest = list(client.responses.retrieve(opening.response.id, stream=True, starting_after=4))
        events: list[Any] = [*first, *rest]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
        assert kinds.count("response.created") == 1 and kinds[-1] == "response.incomplete"
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == events[-1].response.output_text == client.responses.create(**OPTIONS).output_text
        assert [event.to_dict() for event in client.responses.retrieve(opening.response.id, stream=True)] == [
            event.to_dict() for event in events
        ]
        last = len(events) - 1
        assert list(client.responses.retrieve(opening.response.id, stream=True, starting_after=last)) == []
        assert events[-1].response == client.responses.retrieve(opening.response.id)
        with pytest.raises(openai.BadRequestError, match=f"its events go to {last}") as caught:
            list(client.responses.retrieve(opening.response.id, stream=True, starting_after=last + 1))
        assert caught.value.param == "starting_after"


def test_openais_helper_takes_the_stream(engine: lp.Engine, file: Path) -> None:
    with served(engine, file) as client:
        with client.responses.stream(**{**LATER, "max_output_tokens": 3000}) as stream:
            final = stream.get_final_response()
        assert final.output_text == client.responses.retrieve(final.id).output_text
        with client.responses.stream(response_id=final.id, starting_after=3) as again:
            assert again.get_final_response().output_text == final.output_text


def test_what_has_no_stream_cannot_be_followed(engine: lp.Engine, file: Path) -> None:
    with served(engine, file) as client:
        for answer in (client.responses.create(**LATER), client.responses.create(**OPTIONS)):
            with pytest.raises(openai.BadRequestError, match="no stream"):
                client.responses.retrieve(answer.id, stream=True)
        for query in ("starting_after=1", "stream=true&starting_after=-1", "stream=true&starting_after=x"):
            with pytest.raises(openai.BadRequestError) as caught:
                client.get(f"/responses/{answer.id}?{query}", cast_to=object)
            assert caught.value.param == "starting_after"


def test_a_background_answer_needs_a_store(engine: lp.Engine, file: Path) -> None:
    with (
        serve(engine, settings=ServerSettings(**NAMES)) as server,
        httpx.Client(base_url=f"{server.url}/v1") as http,
    ):
        refused = http.post("responses", json=LATER)
        assert refused.status_code == 400 and "llamapipe serve --store FILE" in refused.text
        assert http.post(f"responses/{MISSING}/cancel").status_code == 404
    with served(engine, file) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**LATER, store=False)
        assert caught.value.param == "store"


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("tools", [{"type": "function"}]), ("model", "no such"), ("input", [])],
)
def test_wrong_fields_are_refused_at_once(engine: lp.Engine, file: Path, field: str, value: Any) -> None:
    with served(engine, file) as client:
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
            client.responses.create(**{**LATER, field: value})
        assert rows(file, "SELECT (SELECT count(*) FROM answers), (SELECT count(*) FROM runs)") == [(0, 0)]


def test_what_is_found_later_is_the_answers_error(engine: lp.Engine, file: Path) -> None:
    with served(engine, file) as client:
        long = {**LATER, "input": "a story " * 4000}
        for streams in (False, True):
            reply: Any = client.responses.create(**long, stream=streams)
            answer_id = next(iter(reply)).response.id if streams else reply.id
            done = ended(client, answer_id)
            assert (done.status, done.error.code) == ("failed", "context_length_exceeded")
        last: Any = list(client.responses.retrieve(answer_id, stream=True))[-1]
        assert (last.type, last.response.error.code) == ("response.failed", "context_length_exceeded")


def test_a_background_answer_can_be_cancelled(engine: lp.Engine, file: Path) -> None:
    """Before it begins and while it runs; its stream ends. It cannot be after its end, or if a client waits for it."""
    with served(engine, file) as client, Gate(engine) as gate:
        stream: Any = client.responses.create(**{**LATER, "max_output_tokens": 1500}, stream=True)
        running = next(iter(stream)).response.id
        gate.wait()
        waiting = [client.responses.create(**LATER).id for _ in range(3)]
        for answer_id in (running, *waiting):
            assert client.responses.cancel(answer_id).status == "cancelled"
            assert client.responses.retrieve(answer_id).status == "cancelled"
            assert client.responses.cancel(answer_id).status == "cancelled"
        assert [event.type for event in stream][-1] != "response.completed"
        gate.open()
        wait_until(lambda: engine.stats().n_active == 0)
        done = client.responses.create(**OPTIONS)
        with pytest.raises(openai.BadRequestError, match="background: true"):
            client.responses.cancel(done.id)
        finished = ended(client, client.responses.create(**LATER).id)
        assert client.responses.cancel(finished.id) == finished
        with pytest.raises(openai.NotFoundError):
            client.responses.cancel(MISSING)
    assert rows(file, "SELECT count(*) FROM runs") == [(0,)]


def test_a_deleted_one_is_computed_no_longer(engine: lp.Engine, file: Path) -> None:
    with served(engine, file) as client, Gate(engine) as gate:
        answer = client.responses.create(**{**LATER, "max_output_tokens": 1500})
        gate.wait()
        client.responses.delete(answer.id)
        gate.open()
        wait_until(lambda: engine.stats().n_active == 0)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)
    assert rows(file, "SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM items)") == [(0, 0)]


def test_what_has_not_ended_cannot_be_continued(engine: lp.Engine, file: Path) -> None:
    with served(engine, file) as client, Gate(engine) as gate:
        answer = client.responses.create(**LATER)
        gate.wait()
        with pytest.raises(openai.BadRequestError, match="not ended") as caught:
            client.responses.create(**OPTIONS, previous_response_id=answer.id)
        assert caught.value.param == "previous_response_id"


def test_in_a_conversation(engine: lp.Engine, file: Path) -> None:
    """Its items come when it ends, after those that were added meanwhile."""
    with served(engine, file) as client:
        conversation = client.conversations.create().id
        with Gate(engine) as gate:
            answer = client.responses.create(**LATER, conversation=conversation)
            gate.wait()
            meanwhile: Any = [{"role": "user", "content": "meanwhile"}]
            client.conversations.items.create(conversation, items=meanwhile)
        done = ended(client, answer.id)
        items: list[Any] = list(client.conversations.items.list(conversation, order="asc"))
        assert [item.content[0].text for item in items] == ["meanwhile", LATER["input"], done.output_text]
        seen: list[Any] = list(client.responses.input_items.list(answer.id))
        assert [item.content[0].text for item in seen] == [LATER["input"]]


# ---- keys and limits
def test_each_key_has_its_own(engine: lp.Engine, file: Path) -> None:
    with (
        served(engine, file, "mine", api_keys=("mine", "other"), max_background=2) as client,
        Gate(engine) as gate,
    ):
        other = client.with_options(api_key="other")
        stream: Any = client.responses.create(**LATER, stream=True)
        answer_id = next(iter(stream)).response.id
        gate.wait()
        uses: list[Any] = [other.responses.cancel, other.responses.retrieve, other.responses.delete]
        uses.append(lambda answer_id: other.responses.retrieve(answer_id, stream=True))
        for use in uses:
            with pytest.raises(openai.NotFoundError):
                use(answer_id)
        client.responses.create(**LATER)
        with pytest.raises(openai.RateLimitError, match="--max-background"):
            client.responses.create(**LATER)
        theirs = other.responses.create(**LATER)
        for key, ids in (("mine", 2), ("other", 1)):
            jobs = httpx.get(
                str(client.base_url.join("/jobs")), headers={"Authorization": f"Bearer {key}"}
            ).json()
            assert (len(jobs["answers"]), jobs["batches"], jobs["is_stored"]) == (ids, [], True)
        assert httpx.get(str(client.base_url.join("/jobs"))).status_code == 401
        gate.open()
        assert ended(other, theirs.id).output_text == ended(client, answer_id).output_text


def test_what_waits_leaves_room_for_answers(engine: lp.Engine, file: Path) -> None:
    """The store is 1 MiB; what waits may have a sixteenth of it, of one key."""
    with served(engine, file, store_bytes=2**20) as client, Gate(engine) as gate:
        client.responses.create(**LATER)
        gate.wait()
        with pytest.raises(openai.APIStatusError, match="may have 65536 bytes") as caught:
            client.responses.create(**{**LATER, "input": "a" * 70_000})
        assert caught.value.status_code == 413
        with pytest.raises(openai.RateLimitError, match="--store-bytes"):
            client.responses.create(**{**LATER, "input": "a" * 65_420})
        for _ in range(3):
            client.responses.create(**LATER, prompt_cache_key="a" * 15_000)
        for i in range(100):  # it is full
            items: Any = [{"role": "user", "content": f"{i % 10}" * 20_000}]
            client.conversations.create(items=items)
        assert rows(file, "SELECT count(*) FROM runs JOIN answers USING (id)") == [(4,)]
        gate.open()
        wait_until(lambda: rows(file, "SELECT count(*) FROM runs") == [(0,)])


def test_a_key_that_is_gone(engine: lp.Engine, file: Path) -> None:
    with Gate(engine) as gate, served(engine, file, "mine", api_keys=("mine",)) as client:
        answer = client.responses.create(**LATER)
        gate.wait()
    with served(engine, file, "other", api_keys=("other",)):
        wait_until(lambda: rows(file, "SELECT count(*) FROM runs") == [(0,)])
    (body,) = rows(file, f"SELECT body FROM answers WHERE id = '{answer.id}'")[0]
    assert json.loads(body)["error"]["code"] == "invalid_api_key"


# ---- servers that end
def test_a_server_that_ends_leaves_it_to_the_next(engine: lp.Engine, file: Path) -> None:
    """It does not wait for the answer, and the attempt does not count. Who follows the stream is told."""
    with Gate(engine) as gate, httpx.Client(timeout=PATIENCE_S) as http:
        server = serve(engine, settings=ServerSettings(**NAMES, store=file))
        path = f"{server.url}/v1/responses"
        with http.stream("POST", path, json={**LATER, "stream": True}) as stream:
            gate.wait()
            assert http.post(path, json=LATER).json()["status"] == "queued"
            server.close()
            told = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
        assert json.loads(told[-1])["error"]["code"] == "shutting_down"
        answer_id = json.loads(told[0])["response"]["id"]
        assert rows(file, "SELECT worker, n_attempts FROM runs") == [(None, 0)] * 2
        assert list(file.parent.glob("*-at-*")) == []
    with closing(sqlite3.connect(file)) as connection, connection:  # then the clock was put back
        connection.execute("UPDATE runs SET not_before = not_before + 86400")
    with served(engine, file) as client:
        done = ended(client, answer_id)
        assert done.output_text == client.responses.create(**OPTIONS).output_text
        wait_until(lambda: rows(file, "SELECT count(*) FROM runs") == [(0,)])
        events: list[Any] = list(client.responses.retrieve(answer_id, stream=True))
        numbers = [event.sequence_number for event in events]
        assert numbers == sorted(set(numbers))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == done.output_text


def test_two_servers_compute_each_once(demo: lp.Model, engine: lp.Engine, file: Path) -> None:
    with (
        lp.Engine(demo, n_ctx=2048, n_seq_max=4) as second,
        served(engine, file) as client,
        served(second, file) as other,
    ):
        before = engine.stats().n_completion_tokens + second.stats().n_completion_tokens
        ids = [(client, other)[i % 2].responses.create(**LATER, extra_body={"seed": i}).id for i in range(16)]
        done = [ended(client, answer_id) for answer_id in ids]
        assert {answer.status for answer in done} == {"incomplete"}
        after = engine.stats().n_completion_tokens + second.stats().n_completion_tokens
        assert after - before == sum(answer.usage.output_tokens for answer in done)


STAGES = ("add", "claim", "add_events", "finish", "end")
# Ends itself, as kill -9 does, at the beginning or at the end of a transaction.
PROGRAM = """
import os, signal, sys
import llamapipe as lp
from llamapipe.server import ServerSettings, serve
from llamapipe.server.store.runs import Runs
from llamapipe.server.store.answers import Store
file, stage, at_end = sys.argv[1], sys.argv[2], sys.argv[3] == "end"
owner, name = (Store, "_finish") if stage == "finish" else (Runs, stage)
real = getattr(owner, name)
def killed(*arguments):
    if at_end:
        real(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, name, killed)
with lp.Engine(lp.demo_model_path(), n_ctx=512) as engine:
    with serve(engine, settings=ServerSettings(model_names=("demo",), store=file)) as server:
        say(server.url)
        input()
"""


@pytest.mark.parametrize("at", ["begin", "end"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_at_every_stage(engine: lp.Engine, file: Path, stage: str, at: str) -> None:
    """The next server computes what its client was told of, once, and nothing else is there."""
    with subprocess.Popen(
        command(PROGRAM, file, stage, at),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        events: list[str] = []
        body = {**LATER, "stream": True}
        with pytest.raises(httpx.TransportError):  # noqa: SIM117
            with httpx.stream("POST", f"{url}/v1/responses", json=body, timeout=PATIENCE_S) as stream:
                events.extend(stream.iter_lines())
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    with served(engine, file) as client:
        expected = client.responses.create(**OPTIONS).output_text
        wait_until(lambda: rows(file, "SELECT count(*) FROM runs") == [(0,)])
        stored_rows = rows(file, "SELECT id, body FROM answers")
        stored = [answer_id for answer_id, body in stored_rows if json.loads(body)["background"]]
        if stage == "add":  # the client was told of nothing, and there is nothing
            assert stored == []
            return
        (answer_id,) = stored
        assert all(answer_id in line for line in events if '"response.created"' in line)
        done = client.responses.retrieve(answer_id)
        assert (done.status, done.output_text) == ("incomplete", expected)
        assert len(client.responses.input_items.list(answer_id).data) == 1
        assert rows(file, "SELECT count(*) FROM items WHERE is_output") == [(2,)]
        last: Any = list(client.responses.retrieve(answer_id, stream=True))[-1]
        assert last.response.output_text == expected
    assert list(file.parent.glob("*-at-*")) == []


def test_an_answer_that_ends_servers_fails(engine: lp.Engine, file: Path) -> None:
    with Gate(engine) as gate, served(engine, file) as client:
        answer = client.responses.create(**LATER)
        gate.wait()
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(f"UPDATE runs SET n_attempts = {runs.MOST_ATTEMPTS}, worker = 'dead'")
    with served(engine, file) as client:
        done = ended(client, answer.id)
        assert done.status == "failed" and "ended 5 times" in done.error.message


def test_a_disk_that_fails(engine: lp.Engine, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be stored is not promised; what was promised is computed when the disk takes it."""
    monkeypatch.setattr("llamapipe.server.store.database._BUSY_S", 0.01)
    monkeypatch.setattr("llamapipe.server._background._LATER_S", 1)
    with served(engine, file) as client, Gate(engine) as gate:
        answer = client.responses.create(**LATER)
        gate.wait()
        with closing(sqlite3.connect(file, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            with pytest.raises(openai.InternalServerError) as caught:
                client.responses.create(**LATER)
            assert caught.value.status_code == 507
            gate.open()  # and the answer cannot be stored, nor given back
            wait_until(lambda: engine.stats().n_active == engine.stats().n_queued == 0)
            connection.execute("ROLLBACK")
        assert ended(client, answer.id).status == "incomplete"
        assert rows(file, "SELECT count(*) FROM answers") == [(1,)]


def test_the_sign_of_a_process_that_has_ended_goes(tmp_path: Path) -> None:
    """Whatever characters the name of the file has."""
    file = tmp_path / "a[1]*.db"
    left = tmp_path / f"{file.name}-at-1-0"
    left.touch()
    there, other = presence.Presence(file), presence.Presence(file)
    there.sign_in()
    other.sign_in()
    assert not left.exists() and len(list(tmp_path.iterdir())) == 2
    assert other.find_ended([there.name, "1-0"]) == ["1-0"]
    there.sign_out()
    assert other.find_ended([there.name]) == [there.name]
    other.sign_out()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_is_told_once(
    engine: lp.Engine, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And what waits is computed when it does."""
    monkeypatch.setattr("llamapipe.server._background._POLL_S", 0.01)
    sign_in, n_tries = presence.Presence.sign_in, 0

    def fails_at_first(self: presence.Presence) -> None:
        nonlocal n_tries
        n_tries += 1
        if n_tries < 5:
            raise OSError("No space left on device")
        sign_in(self)

    monkeypatch.setattr(presence.Presence, "sign_in", fails_at_first)
    with served(engine, file) as client:
        assert ended(client, client.responses.create(**LATER).id).status == "incomplete"
    told = [record.message for record in caplog.records if "No space left" in record.message]
    assert len(told) == 1 and "nothing is computed in the background" in told[0]


# ---- several processes
# A text that is not complete before 1,500 tokens.
LONG: Any = {
    **LATER,
    "max_output_tokens": 1500,
    "text": {
        "format": {"type": "json_schema", "name": "long", "schema": {"type": "string", "minLength": 20_000}}
    },
    "stream": True,
}


def interrupted(server: Any, file: Path, body: dict[str, Any], computes: Callable[[str], int]) -> str:
    """The id of an answer whose second attempt has begun, because the process that computed it was killed.

    ``computes``: the number of that process, by the name in the run. An answer that ends before the kill does not
    count.
    """
    while True:
        answer_id = begun(server, body)
        if workers := rows(file, "SELECT worker FROM runs"):
            os.kill(computes(workers[0][0]), signal.SIGKILL)
            wait_until(lambda: rows(file, "SELECT n_attempts FROM runs") in ([], [(2,)]))
            if rows(file, "SELECT n_attempts FROM runs"):
                return answer_id


def begun(server: Any, body: dict[str, Any]) -> str:
    """The id of an answer that has text."""
    with server.client.stream("POST", "/v1/responses", json=body) as stream:
        lines = stream.iter_lines()
        data = next(line for line in lines if line.startswith("data: "))
        next(line for line in lines if "output_text.delta" in line)
    return str(json.loads(data.removeprefix("data: "))["response"]["id"])


def check_same(server: Any, answer_id: str, body: dict[str, Any]) -> None:
    """The answer ends, as one that a client waits for."""
    answer: dict[str, Any] = {}

    def has_ended() -> bool:
        answer.update(server.client.get(f"/v1/responses/{answer_id}").json())
        return answer["status"] not in ("queued", "in_progress")

    wait_until(has_ended)
    once = server.client.post("/v1/responses", json={**body, "stream": False, "background": False})
    assert answer["output"][0]["content"] == once.json()["output"][0]["content"], answer


def test_a_worker_that_is_killed(tmp_path: Path, file: Path) -> None:
    """The other one, or the next, computes the answer."""
    with worker_server(2, "--store", str(file), "--n-ctx", "2048", log=tmp_path / "log") as server:
        answer_id = interrupted(server, file, LONG, lambda worker: int(worker.partition("-")[0]))
        check_same(server, answer_id, LONG)


def test_a_model_that_is_killed_and_its_server(tmp_path: Path, file: Path) -> None:
    """The front process asks the model's next process, and what it leaves is the next front's."""
    models = tmp_path / "models.toml"
    models.write_text(f'[models.a]\nfile = "{lp.demo_model_path()}"\n')
    keys = tmp_path / "keys"
    keys.write_text("mine\nother\n")
    options = ["--store", str(file), "--api-key-file", str(keys), "--n-ctx", "2048"]
    body = {**LONG, "model": "a"}
    headers = {"authorization": "Bearer mine"}
    with pool_server(models, *options, log=tmp_path / "log") as server:
        server.client.headers.update(headers)
        answer_id = interrupted(server, file, body, lambda _: server.pids("a")[-1])
        server.process.kill()
        server.process.wait()
    with pool_server(models, *options, log=tmp_path / "log2") as server:
        server.client.headers.update(headers)
        check_same(server, answer_id, body)
        path = f"/v1/responses/{answer_id}"
        assert server.client.get(path, headers={"authorization": "Bearer other"}).status_code == 404
        assert server.client.post(f"{path}/cancel").json()["status"] == "incomplete"
