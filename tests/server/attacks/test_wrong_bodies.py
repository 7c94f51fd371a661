"""Errors about bodies, as clients read them: with the request's field, and in its words, not in Python's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.bert_model import bert_model
from support.served import http_client

import llamapipe as lp

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
PYTHON = re.compile(
    r"\bNone\b|\bNoneType\b|\bTrue\b|\bFalse\b|\b\w+\(…|\w=\w|template_args\b|\bids contains|SamplingParams"
)
LONG = "word " * 5000


def turns(content: Any, role: Any = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


# What is wrong, and the field of the request.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    *(
        (path, body, field)
        for path in (CHAT, f"{CHAT}/input_tokens", "/tokenize", "/apply-template")
        for body, field in (
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "user"}]}, "messages.0"),
            ({"messages": [*turns("a")["messages"], {"content": "a"}]}, "messages.1"),
            (turns("a", "usr"), "messages.0"),
            (turns("a", 5), "messages.0"),
            (turns("a", None), "messages.0"),
            (turns([None]), "messages.0.content.0"),
            (turns([5]), "messages.0.content.0"),
            (turns(5), "messages.0"),
            (turns([{}]), "messages.0.content.0"),
            (turns([{"type": "text", "text": None}]), "messages.0.content.0"),
            (turns([{"type": "video"}]), "messages.0.content.0"),
            (turns([IMAGE]), "messages.0.content.0"),
            ({**turns("a"), "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        )
    ),
    (CHAT, turns([{"type": "text", "text": "a"}, SOUND]), "messages.0.content.1"),
    (CHAT, turns(LONG), "messages"),
    (CHAT, {**turns("a"), "continue_final_message": True}, "continue_final_message"),
    (CHAT, {**turns("a"), "tools": [{}]}, "tools"),
    (CHAT, {**turns("a"), "tools": [{"type": "custom", "custom": {"name": "x", "format": {}}}]},
     "tools.0.custom.format.type"),
    (CHAT, {**turns("a"), "tool_choice": {}}, "tool_choice.type"),
    (CHAT, {**turns("a"), "speculate": "x"}, "speculate"),
    (CHAT, {**turns("a"), "cache_salt": ""}, "cache_salt"),
    (RESPONSES, {"input": LONG}, "input"),
    (RESPONSES, {"input": [{}]}, "input.0.role"),
    (RESPONSES, {"input": [{"role": "user", "content": [{}]}]}, "input.0.content.0.type"),
    (RESPONSES, {"input": "a", "tools": [{"type": "function"}]}, "tools.0.name"),
    (RESPONSES, {"input": "a", "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ("/v1/completions", {"prompt": [99999]}, "prompt"),
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("/detokenize", {"tokens": [99999]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/v1/embeddings", {"input": [99999]}, "input"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
]  # fmt: skip
# Formats without a field for the name: the text has it.
NAMED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/messages", {"messages": [], "max_tokens": 1}, "messages is empty"),
    (
        "/v1/messages",
        {**turns([{"type": "image", "source": {}}]), "max_tokens": 1},
        "messages.0.content.0: an image",
    ),
    ("/v1/messages", {**turns([{"type": "document"}]), "max_tokens": 1}, "messages.0.content.0: a document"),
    ("/v1/messages", {**turns(LONG), "max_tokens": 1}, "prompt is too long"),
    ("/v1/messages", {**turns("a", None), "max_tokens": 1}, "messages.0: the role is null"),
    ("/api/chat", {"messages": [{"content": "a"}]}, "messages[0] has no role"),
    (
        "/api/chat",
        {"messages": [{"role": "user", "content": "a", "images": ["AAAA"]}]},
        "messages.0.images.0 is an image",
    ),
    ("/api/generate", {"prompt": "a", "images": ["AAAA"]}, "images.0 is an image"),
    ("/api/generate", {"prompt": "a", "context": [99999]}, "context contains the token id 99999"),
]


@pytest.fixture(scope="module")
def client(demo: lp.Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    file, _ = bert_model(tmp_path_factory.mktemp("models") / "bert.gguf")
    with (
        lp.Engine(demo, n_ctx=256, n_seq_max=2) as engine,
        lp.Embedder(file) as embedder,
        http_client(engine, embedder=embedder, ollama=True, model_names=("demo",)) as client,
    ):
        yield client


@pytest.mark.parametrize(("path", "body", "field"), WRONG)
def test_the_field_is_named(client: httpx.Client, path: str, body: dict[str, Any], field: str) -> None:
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field), error
    assert PYTHON.search(error["message"]) is None, error["message"]


@pytest.mark.parametrize(("path", "body", "begin"), NAMED)
def test_the_text_names_the_field(client: httpx.Client, path: str, body: dict[str, Any], begin: str) -> None:
    answer = client.post(path, json={"model": "demo", **body})
    error = answer.json()["error"]
    text: str = error["message"] if isinstance(error, dict) else error
    assert answer.status_code == 400 and text.startswith(begin), text
    assert PYTHON.search(text) is None, text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, turns([IMAGE])),
        (f"{CHAT}/input_tokens", turns([SOUND])),
        (RESPONSES, {"input": [{"role": "user", "content": [{**IMAGE, "type": "input_image"}]}]}),
        ("/api/chat", {"model": "demo", "messages": [{"role": "user", "content": "a", "images": ["AAAA"]}]}),
    ],
)
def test_images_without_a_projector_name_the_operators_flag(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    assert "start with --mmproj FILE" in client.post(path, json=body).text


@pytest.mark.parametrize("body", [b"", b" \n"])
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/tokenize", "/v1/messages"])
def test_an_empty_body_is_called_so(client: httpx.Client, path: str, body: bytes) -> None:
    answer = client.post(path, content=body)
    message = "the body is empty; send a JSON object, such as {}"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


@pytest.mark.parametrize(("path", "field"), [(CHAT, "temperature"), ("/completion", "lora[0].scale")])
def test_a_number_that_is_too_large_is_named(client: httpx.Client, path: str, field: str) -> None:
    text = b'{"prompt": "a", "lora": [{"id": 0, "scale": 1e400}]}'
    text = b'{"messages": [], "temperature": 1e400}' if path == CHAT else text
    error = client.post(path, content=text).json()["error"]
    assert (error["param"], error["message"]) == (field, f"{field}: Number out of range")


def test_the_index_is_that_of_the_request(demo: lp.Model) -> None:
    """The operator's system prompt comes first and counts as no message."""
    bad = {"messages": [*turns("a")["messages"], {"role": "user"}]}
    with lp.Engine(demo, n_ctx=256, n_seq_max=1) as engine, http_client(engine, system="Be brief.") as client:
        for path in (CHAT, f"{CHAT}/input_tokens", "/apply-template"):
            error = client.post(path, json=bad).json()["error"]
            assert (error["param"], error["message"]) == ("messages.1", "messages[1] has no content"), path
