"""Stored answers and conversations through OpenAI's own client: ids, chains, pages, keys, servers without a store."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.conversations import Conversation, Message
from openai.types.responses import Response, ResponseFunctionToolCall
from support.control import PATIENCE_S, Gate, wait_until
from support.fleet_servers import pool_server, worker_server
from support.served import http_client, openai_client

import llamapipe as lp
from llamapipe.server import ServerSettings, app, serve
from llamapipe.server.requests.kept import NOT_STORED
from llamapipe.server.store import database

OPTIONS: Any = {"model": "demo", "max_output_tokens": 12, "temperature": 0}
MISSING = "resp_00000000000000000000000000000000"
NAMES: Any = {"model_names": ("demo",)}


@pytest.fixture(scope="module")
def engine(demo: lp.Model) -> Iterator[lp.Engine]:
    with lp.Engine(demo, n_ctx=2048, n_seq_max=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "answers.db"


@pytest.fixture(scope="module")
def client(engine: lp.Engine, file: Path) -> Iterator[openai.OpenAI]:
    with openai_client(engine, api_key="mine", **NAMES, api_keys=("mine", "other"), store=file) as client:
        yield client


@pytest.fixture(scope="module")
def other(client: openai.OpenAI) -> Iterator[openai.OpenAI]:
    with client.with_options(api_key="other") as other:
        yield other


def rows(file: Path, statement: str) -> list[tuple[Any, ...]]:
    """What another program sees in the file."""
    with closing(sqlite3.connect(file)) as connection:
        return connection.execute(statement).fetchall()


def test_an_answer_is_found_again(client: openai.OpenAI) -> None:
    answer = client.responses.create(**OPTIONS, input="Hello", metadata={"who": "me"})
    retrieved = client.responses.retrieve(answer.id)
    assert answer.store and retrieved.to_dict() == answer.to_dict()
    assert retrieved.metadata == {"who": "me"}
    Response.model_validate(json.loads(retrieved.model_dump_json()))
    client.responses.delete(answer.id)
    for use in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{answer.id}' not found"):
            use(answer.id)


def test_a_chain_is_the_whole_conversation(client: openai.OpenAI, engine: lp.Engine) -> None:
    """The instructions of earlier answers are not part of it."""
    messages: list[dict[str, Any]] = []
    previous = None
    for text in ("Hello", "A story about a fox.", "And then?"):
        answer = client.responses.create(
            **OPTIONS, input=text, instructions=f"Be brief about {text}", previous_response_id=previous
        )
        messages.append({"role": "user", "content": text})
        conversation = [{"role": "system", "content": f"Be brief about {text}"}, *messages]
        expected = engine.chat(conversation, lp.SamplingParams(temperature=0, max_tokens=12))
        assert answer.usage is not None
        assert (answer.output_text, answer.usage.input_tokens) == (expected.content, expected.n_prompt_tokens)
        assert answer.previous_response_id == previous
        messages.append({"role": "assistant", "content": answer.output_text})
        previous = answer.id
    counted = client.responses.input_tokens.count(model="demo", input="More", previous_response_id=previous)
    tokens = engine.model.tokenize_chat([*messages, {"role": "user", "content": "More"}])
    assert counted.input_tokens == len(tokens)
    assert previous is not None
    listed = [item.to_dict() for item in client.responses.input_items.list(previous, order="asc", limit=2)]
    texts = ["".join(part["text"] for part in item["content"]) for item in listed]  # type: ignore[attr-defined]
    assert texts == [message["content"] for message in messages[:-1]]


def test_a_branch_of_a_chain(client: openai.OpenAI) -> None:
    first = client.responses.create(**OPTIONS, input="Hello")
    ways = [
        client.responses.create(**OPTIONS, input=text, previous_response_id=first.id) for text in ("a", "b")
    ]
    for way, text in zip(ways, ("a", "b"), strict=True):
        items = client.responses.input_items.list(way.id).data
        assert [item.to_dict()["content"] for item in items][0] == [{"type": "input_text", "text": text}]  # noqa: RUF015
        assert len(items) == 3


def test_a_chain_that_lost_a_part_says_so(client: openai.OpenAI) -> None:
    first = client.responses.create(**OPTIONS, input="Hello")
    second = client.responses.create(**OPTIONS, input="And?", previous_response_id=first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match=first.id) as caught:
        client.responses.create(**OPTIONS, input="And?", previous_response_id=second.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    assert client.responses.retrieve(second.id).id == second.id


def test_only_what_is_to_be_stored_is(client: openai.OpenAI) -> None:
    first = client.responses.create(**OPTIONS, input="Hello")
    second = client.responses.create(**OPTIONS, input="And?", previous_response_id=first.id, store=False)
    assert (first.store, second.store) == (True, False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_an_id_of_a_request_may_come_twice(client: openai.OpenAI) -> None:
    ids = {
        client.responses.create(**OPTIONS, input="Hello", extra_headers={"x-request-id": "one"}).id
        for _ in range(2)
    }
    assert len(ids) == 2


def test_a_stream_is_stored_when_it_ends(client: openai.OpenAI) -> None:
    with client.responses.stream(**OPTIONS, input="Hello") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] in ("response.completed", "response.incomplete")
    retrieved = client.responses.retrieve(final.id)
    assert retrieved.output_text == final.output_text
    assert retrieved.status == final.status


def test_a_reference_stands_for_an_item(client: openai.OpenAI, engine: lp.Engine) -> None:
    """As the AI SDK sends what it knows to be stored."""
    first = client.responses.create(**OPTIONS, input="Hello")
    items: Any = [
        {"role": "user", "content": "Hello"},
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "And?"},
    ]
    answer = client.responses.create(**OPTIONS, input=items)
    expected = engine.chat(
        [items[0], {"role": "assistant", "content": first.output_text}, items[2]],
        lp.SamplingParams(temperature=0, max_tokens=12),
    )
    assert answer.output_text == expected.content
    with pytest.raises(openai.NotFoundError, match="Item with id 'msg_none' not found"):
        client.responses.create(**OPTIONS, input=[{"type": "item_reference", "id": "msg_none"}])
    with pytest.raises(openai.NotFoundError) as caught:
        client.conversations.create(items=[{"type": "item_reference", "id": "msg_none"}])
    assert caught.value.param == "items"


def test_items_in_pages(client: openai.OpenAI) -> None:
    texts = [f"text {i}" for i in range(7)]
    conversation = client.conversations.create(items=[{"role": "user", "content": text} for text in texts])
    for order in ("asc", "desc"):
        items: list[Any] = list(client.conversations.items.list(conversation.id, order=order, limit=3))
        expected = texts if order == "asc" else texts[::-1]
        assert [item.content[0].text for item in items] == expected
    page: Any = client.conversations.items.list(conversation.id, limit=2, order="asc")
    assert (page.has_more, page.first_id, page.last_id) == (True, page.data[0].id, page.data[1].id)
    assert client.conversations.items.list(conversation.id, limit=7).has_more is False


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=-1", "limit"),
        ("limit=9999999999999999999999", "limit"),
        ("limit=0000000019999999999999999999", "limit"),
        ("limit=00000000101", "limit"),
        ("limit=%C2%B2", "limit"),
        ("order=up", "order"),
        ("include=nothing", "include"),
        ("before=x", "before"),
        ("page=2", "page"),
    ],
)
def test_wrong_pages_are_refused(client: openai.OpenAI, query: str, field: str) -> None:
    conversation = client.conversations.create()
    with pytest.raises(openai.BadRequestError) as caught:
        client.get(f"/conversations/{conversation.id}/items?{query}", cast_to=object)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("stream=banana", "stream"),
        ("stream=", "stream"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("starting_after=1", "starting_after"),
        ("streem=true", "streem"),
    ],
)
def test_wrong_queries_for_an_answer_are_refused(client: openai.OpenAI, query: str, field: str) -> None:
    answer = client.responses.create(**OPTIONS, input="Hello")
    with pytest.raises(openai.BadRequestError) as caught:
        client.get(f"/responses/{answer.id}?{query}", cast_to=object)
    assert (caught.value.param, "stream: true" in str(caught.value)) == (field, False)


def test_a_page_after_an_item_that_is_not_there(client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    with pytest.raises(openai.NotFoundError, match="Item with id 'x' not found") as caught:
        client.conversations.items.list(conversation.id, after="x")
    assert caught.value.param == "after"
    with pytest.raises(openai.NotFoundError, match="Conversation with id 'conv_1' not found") as caught:
        client.conversations.items.list("conv_1", after="x")
    assert caught.value.param is None


def test_a_conversation_keeps_its_items(client: openai.OpenAI, engine: lp.Engine) -> None:
    conversation = client.conversations.create(
        metadata={"a": "b"}, items=[{"role": "user", "content": "Hello"}]
    )
    Conversation.model_validate(json.loads(conversation.model_dump_json()), strict=True)
    assert client.conversations.retrieve(conversation.id) == conversation
    assert client.conversations.update(conversation.id, metadata={"c": "d"}).metadata == {"c": "d"}
    added = client.conversations.items.create(
        conversation.id, items=[{"role": "assistant", "content": "Hi."}]
    )
    Message.model_validate(json.loads(added.data[0].model_dump_json()))
    answer = client.responses.create(**OPTIONS, input="A story.", conversation=conversation.id)
    assert answer.conversation is not None and answer.conversation.id == conversation.id
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "A story."},
    ]
    expected = engine.chat(messages, lp.SamplingParams(temperature=0, max_tokens=12))
    assert answer.output_text == expected.content
    items: list[Any] = list(client.conversations.items.list(conversation.id, order="asc"))
    assert [item.content[0].text for item in items] == ["Hello", "Hi.", "A story.", expected.content]
    inputs = client.responses.input_items.list(answer.id, order="asc")
    assert [item.id for item in inputs.data] == [item.id for item in items[:3]]
    assert client.conversations.items.retrieve(items[0].id, conversation_id=conversation.id).id == items[0].id
    assert (
        client.conversations.items.delete(items[0].id, conversation_id=conversation.id).id == conversation.id
    )
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(items[0].id, conversation_id=conversation.id)
    again = client.responses.create(**OPTIONS, input="More.", conversation={"id": conversation.id})
    assert again.usage is not None and answer.usage is not None
    assert len(list(client.conversations.items.list(conversation.id))) == 5
    client.responses.delete(again.id)
    assert len(list(client.conversations.items.list(conversation.id))) == 5
    assert client.conversations.delete(conversation.id).deleted
    for use in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError, match=f"Conversation with id '{conversation.id}' not found"):
            use(conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_calls_of_tools_in_a_conversation(client: openai.OpenAI) -> None:
    """What agents keep: calls, their results and reasoning come back as they went in."""
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "The weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Look."}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "Sun."},
    ]
    conversation = client.conversations.create(items=items)
    listed = [item.to_dict() for item in client.conversations.items.list(conversation.id, order="asc")]
    for item, sent in zip(listed, items, strict=True):
        assert sent.items() <= item.items()
        assert item["status"] == "completed" and item["id"]
    call = client.conversations.items.list(conversation.id, order="asc").data[2]
    assert isinstance(call, ResponseFunctionToolCall) and call.name == "weather"
    assert client.responses.create(**OPTIONS, input="And now?", conversation=conversation.id).output_text


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("conversations", {"items": [{"type": "no such", "id": "a"}]}, "items.0.type"),
        ("conversations", {"items": [{"role": "user", "content": 5}]}, "items.0.content"),
        ("conversations", {"items": [{"role": "user", "content": "a", "status": []}]}, "items.0.status"),
        ("conversations", {"metadata": {"a" * 65: "b"}}, "metadata"),
        ("conversations", {"metadata": {"a": "b" * 513}}, "metadata"),
        ("conversations", {"metadata": {f"a{i}": "b" for i in range(17)}}, "metadata"),
        ("responses", {**OPTIONS, "input": "a", "metadata": {"a": "b" * 513}}, "metadata"),
        ("responses", {**OPTIONS, "input": "a", "metadata": {"a": 1}}, "metadata"),
        ("responses", {**OPTIONS, "input": "a", "metadata": {"a": {}}, "background": True}, "metadata"),
        ("conversations/conv_1/items", {"items": []}, "items"),
        ("responses", {**OPTIONS, "input": "a", "conversation": {"no": "id"}}, "conversation"),
        ("responses", {**OPTIONS, "input": "a", "conversation": {"id": "conv_1", "x": 1}}, "conversation"),
        (
            "responses",
            {**OPTIONS, "input": "a", "conversation": "conv_1", "previous_response_id": MISSING},
            "conversation",
        ),
        ("responses", {**OPTIONS, "input": "a", "conversation": "conv_1", "store": False}, "store"),
        ("responses", {**OPTIONS, "input": "a", "previous_response_id": MISSING}, "previous_response_id"),
    ],
)
def test_wrong_fields_are_named(client: openai.OpenAI, path: str, body: Any, field: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post(f"/{path}", body=body, cast_to=object)
    assert caught.value.param == field


def test_a_chain_has_limits(demo: lp.Model, tmp_path: Path) -> None:
    with (
        lp.Engine(demo, n_ctx=512) as engine,
        openai_client(engine, **NAMES, store=tmp_path / "a.db", max_messages=4) as client,
    ):
        first = client.responses.create(**OPTIONS, input="Hello")
        second = client.responses.create(**OPTIONS, input="And?", previous_response_id=first.id)
        with pytest.raises(openai.BadRequestError, match=r"there are 4 items of .* takes 4 in all"):
            client.responses.create(**OPTIONS, input="And?", previous_response_id=second.id)


def test_keys_are_separate(client: openai.OpenAI, other: openai.OpenAI) -> None:
    answer = client.responses.create(**OPTIONS, input="Hello")
    conversation = client.conversations.create(items=[{"role": "user", "content": "Hello"}])
    item = client.conversations.items.list(conversation.id).data[0].id
    assert item is not None
    uses: list[Any] = [
        lambda: other.responses.retrieve(answer.id),
        lambda: other.responses.delete(answer.id),
        lambda: other.responses.input_items.list(answer.id),
        lambda: other.conversations.retrieve(conversation.id),
        lambda: other.conversations.update(conversation.id, metadata={}),
        lambda: other.conversations.delete(conversation.id),
        lambda: other.conversations.items.list(conversation.id),
        lambda: other.conversations.items.create(conversation.id, items=[{"role": "user", "content": "a"}]),
        lambda: other.conversations.items.retrieve(item, conversation_id=conversation.id),
        lambda: other.conversations.items.delete(item, conversation_id=conversation.id),
        lambda: other.responses.create(**OPTIONS, input="a", conversation=conversation.id),
        lambda: other.responses.create(**OPTIONS, input=[{"type": "item_reference", "id": item}]),
    ]
    for use in uses:
        with pytest.raises(openai.NotFoundError):
            use()
    with pytest.raises(openai.BadRequestError) as caught:
        other.responses.create(**OPTIONS, input="a", previous_response_id=answer.id)
    assert caught.value.code == "previous_response_not_found"
    own = other.conversations.create(items=[{"type": "message", "id": item, "role": "user", "content": "a"}])  # type: ignore[list-item]
    assert other.conversations.items.list(own.id).data[0].id == item  # ids of others do not show
    assert client.conversations.items.retrieve(item, conversation_id=conversation.id).id == item


def test_one_key_with_a_thousand_conversations(client: openai.OpenAI, other: openai.OpenAI) -> None:
    """Another one lists, reads and deletes its own meanwhile."""
    base = str(client.base_url)

    async def run() -> None:
        async with httpx.AsyncClient(base_url=base, timeout=PATIENCE_S) as http:
            many, few = ({"authorization": f"Bearer {key}"} for key in ("mine", "other"))
            gate = asyncio.Semaphore(50)
            body = {"items": [{"role": "user", "content": "Hello"}]}

            async def create() -> str:
                async with gate:
                    answer = await http.post("conversations", json=body, headers=many)
                return str(answer.json()["id"])

            creating = [asyncio.ensure_future(create()) for _ in range(1000)]
            for _ in range(20):
                conversation_id = (await http.post("conversations", json=body, headers=few)).json()["id"]
                path = f"conversations/{conversation_id}"
                listed = await http.get(f"{path}/items", headers=few)
                assert [item["content"][0]["text"] for item in listed.json()["data"]] == ["Hello"]
                assert (await http.delete(path, headers=few)).json()["deleted"]
                assert (await http.get(path, headers=few)).status_code == 404
            ids = await asyncio.gather(*creating)
            assert len(set(ids)) == 1000
            for other_id in (ids[0], ids[-1]):
                assert (await http.get(f"conversations/{other_id}", headers=few)).status_code == 404
                assert (await http.get(f"conversations/{other_id}", headers=many)).status_code == 200

    asyncio.run(run())


# ---- without a store
def test_without_a_store_nothing_is_stored(engine: lp.Engine) -> None:
    with http_client(engine, **NAMES) as http:
        response = http.post("/v1/responses", json={**OPTIONS, "input": "Hello", "store": True})
        assert (response.headers["x-llamapipe-unused"], response.json()["store"]) == ("store", False)
        silent = http.post("/v1/responses", json={**OPTIONS, "input": "Hello"})
        assert "x-llamapipe-unused" not in silent.headers
        paths = [
            f"/v1/responses/{response.json()['id']}",
            "/v1/conversations/conv_1",
            "/v1/conversations/conv_1/items",
        ]
        answers = [http.get(path) for path in paths] + [http.delete(path) for path in paths[:2]]
        answers.append(http.post("/v1/conversations", json={}))
        assert [answer.status_code for answer in answers] == [404] * 6
        for field in ("previous_response_id", "conversation"):
            answers.append(http.post("/v1/responses", json={**OPTIONS, "input": "a", field: "x"}))
            assert (answers[-1].status_code, answers[-1].json()["error"]["param"]) == (400, field)
        assert all("llamapipe serve --store FILE" in answer.text for answer in answers)


def test_strict_refuses_what_is_not_stored(engine: lp.Engine) -> None:
    with http_client(engine, **NAMES, strict=True) as http:
        answer = http.post("/v1/responses", json={**OPTIONS, "input": "Hello", "store": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "store")


# ---- answers that fail, a client that hangs up, a disk that fails
def test_an_answer_that_fails_is_not_in_the_conversation(demo: lp.Model, tmp_path: Path) -> None:
    """The engine is closed between two steps of a stream."""
    file = tmp_path / "answers.db"
    with (
        lp.Engine(demo, n_ctx=512) as engine,
        openai_client(engine, **NAMES, store=file) as client,
    ):
        conversation = client.conversations.create().id
        closing_it = threading.Thread(target=engine.close, kwargs={"drain": False})
        with Gate(engine) as gate:
            stream = client.responses.create(**OPTIONS, input="Hello", conversation=conversation, stream=True)
            gate.wait()
            closing_it.start()
            wait_until(lambda: engine.closed)
        events = list(stream)
        closing_it.join()
    assert events[-1].type == "response.failed"
    stored = rows(file, "SELECT answers.body, is_listed FROM answers JOIN items ON answer = answers.id")
    assert [(json.loads(body)["status"], is_listed) for body, is_listed in stored] == [("failed", 0)]


def test_a_client_that_hangs_up_leaves_nothing(engine: lp.Engine, tmp_path: Path) -> None:
    """It takes one event of the stream, never another one, and hangs up."""
    file = tmp_path / "answers.db"
    application = app(engine, ServerSettings(**NAMES, store=file))
    received = b""

    async def run() -> None:
        nonlocal received
        body = json.dumps(
            {**OPTIONS, "input": "Hello", "stream": True, "conversation": conversation}
        ).encode()
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
                 "path": "/v1/responses", "raw_path": b"/v1/responses", "root_path": "", "query_string": b"",
                 "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
                 "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http"}  # fmt: skip
        parts = [{"type": "http.request", "body": body, "more_body": False}]
        began = asyncio.Event()

        async def receive() -> Any:
            if parts:
                return parts.pop()
            await began.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal received
            if message["type"] == "http.response.body" and message.get("body"):
                received += message["body"]
                began.set()
                await asyncio.Event().wait()

        await asyncio.wait_for(application(scope, receive, send), PATIENCE_S)

    async def create() -> str:
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return str((await http.post("/v1/conversations", json={})).json()["id"])

    conversation = asyncio.run(create())
    asyncio.run(run())
    application.state.llamapipe.release()
    assert b"response.created" in received and b'"store":true' in received
    assert rows(file, "SELECT (SELECT count(*) FROM answers), (SELECT count(*) FROM items)") == [(0, 0)]


def test_others_do_not_wait_for_a_slow_disk(
    engine: lp.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another program holds the file, an answer waits for it; what stores nothing does not."""
    monkeypatch.setattr(database, "_BUSY_S", PATIENCE_S)
    monkeypatch.setattr(database, "_WAIT_S", PATIENCE_S)
    file = tmp_path / "answers.db"
    with (
        serve(engine, settings=ServerSettings(**NAMES, store=file)) as server,
        closing(sqlite3.connect(file, isolation_level=None)) as connection,
    ):

        async def run() -> None:
            async with httpx.AsyncClient(base_url=f"{server.url}/v1", timeout=PATIENCE_S) as http:
                connection.execute("BEGIN IMMEDIATE")
                body = {**OPTIONS, "input": "Hello"}
                async with http.stream("POST", "responses", json={**body, "stream": True}) as stream:
                    lines = stream.aiter_lines()
                    async for line in lines:
                        if line == "event: response.output_item.done":  # all that comes before it is stored
                            break
                    for _ in range(5):
                        answer = await http.post("responses", json={**body, "store": False})
                        assert answer.status_code == 200
                        assert (await http.get(f"responses/{MISSING}")).status_code == 404  # nor do reads
                    connection.execute("ROLLBACK")
                    rest = [line async for line in lines if line.startswith("data: ")]
                last = json.loads(rest[-1].removeprefix("data: "))["response"]
                assert last["store"] is True
                assert (await http.get(f"responses/{last['id']}")).json() == last

        asyncio.run(run())


def test_an_answer_that_cannot_be_stored_is_sent(
    engine: lp.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database, "_BUSY_S", 0.01)
    file = tmp_path / "answers.db"
    with (
        openai_client(engine, **NAMES, store=file) as client,
        closing(sqlite3.connect(file, isolation_level=None)) as connection,
    ):
        connection.execute("BEGIN IMMEDIATE")
        raw = client.responses.with_raw_response.create(**OPTIONS, input="Hello")
        answer = raw.parse()
        assert "database is locked" in raw.headers[NOT_STORED.decode()]
        assert (answer.store, bool(answer.output_text)) == (False, True)
        with client.responses.stream(**OPTIONS, input="Hello") as stream:
            events = list(stream)
        assert (events[0].response.store, events[-1].response.store) == (True, False)  # type: ignore[union-attr]
        with pytest.raises(openai.InternalServerError, match="database is locked") as caught:
            client.conversations.create()
        assert caught.value.status_code == 507
        connection.execute("ROLLBACK")
        assert client.responses.create(**OPTIONS, input="Hello").store
    assert [record.message for record in caplog.records if "database is locked" in record.message]


# ---- several processes
def test_workers_share_the_file(tmp_path: Path) -> None:
    store = tmp_path / "answers.db"
    with worker_server(2, "--store", str(store), "--n-ctx", "512", log=tmp_path / "log") as server:
        seen = set()
        previous = None
        ids = []
        for i in range(8):  # every request has a connection of its own, and workers take turns
            body = {**OPTIONS, "input": f"Say {i}", "previous_response_id": previous, "max_output_tokens": 3}
            answer = server.client.post("/v1/responses", json=body)
            assert answer.status_code == 200, answer.text
            seen.add(answer.headers["x-llamapipe-worker"])
            previous = answer.json()["id"]
            ids.append(previous)
            responses = [server.client.get(f"/v1/responses/{previous}") for _ in range(2)]
            seen |= {response.headers["x-llamapipe-worker"] for response in responses}
            assert [response.json() for response in responses] == [answer.json()] * 2
    assert len(seen) == 2
    assert sorted(rows(store, "SELECT id FROM answers")) == sorted((answer_id,) for answer_id in ids)


def test_several_models_share_the_file(tmp_path: Path) -> None:
    """The front process answers what needs no model: none is loaded for it."""
    models = tmp_path / "models.toml"
    models.write_text("".join(f'[models.{name}]\nfile = "{lp.demo_model_path()}"\n' for name in ("a", "b")))
    keys = tmp_path / "keys"
    keys.write_text("mine\nother\n")
    options = ["--store", str(tmp_path / "answers.db"), "--api-key-file", str(keys), "--n-ctx", "512"]
    own_header, other = ({"authorization": f"Bearer {key}"} for key in ("mine", "other"))
    with pool_server(models, *options, log=tmp_path / "log") as server:
        server.client.headers.update(own_header)
        conversation = server.client.post("/v1/conversations", json={}).json()["id"]
        assert server.loaded() == []
        body = {**OPTIONS, "input": "Hello", "conversation": conversation}
        answers = [server.client.post("/v1/responses", json={**body, "model": name}).json() for name in "ab"]
        assert [answer["model"] for answer in answers] == ["a", "b"]
        chained = {**OPTIONS, "model": "b", "input": "And?", "previous_response_id": answers[0]["id"]}
        assert server.client.post("/v1/responses", json=chained).status_code == 200
        assert server.client.post("/v1/responses", json=chained, headers=other).status_code == 400
        items = server.client.get(f"/v1/conversations/{conversation}/items").json()["data"]
        assert len(items) == 4
        for answer in answers:
            path = f"/v1/responses/{answer['id']}"
            assert server.client.get(path).json() == answer
            assert server.client.get(path, headers=other).status_code == 404
            assert server.client.get(path, headers={**other, "x-llamapipe-owner": ""}).status_code == 404
        assert server.client.delete(f"/v1/conversations/{conversation}").json()["deleted"]
        assert server.client.get(f"/v1/responses/{answers[0]['id']}").status_code == 404
