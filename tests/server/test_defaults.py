"""The sampling that an operator has set, for requests that say nothing, in every API."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.served import http_client

import llamapipe as lp
from llamapipe.server import ServerSettings

HELLO = [{"role": "user", "content": "Once upon a time"}]
N = 16
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": N}),
    ("/completion", {"prompt": "Once upon a time", "n_predict": N}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": N}),
    ("/v1/responses", {"input": "Once upon a time", "max_output_tokens": N}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": N}),
    ("/api/chat", {"model": "m", "messages": HELLO, "stream": False, "options": {"num_predict": N}}),
    ("/api/generate", {"model": "m", "prompt": "Hi", "stream": False, "options": {"num_predict": N}}),
]


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if "choices" in body:
        choice = body["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    if "output" in body:
        return str(body["output"][0]["content"][0]["text"])
    if isinstance(body.get("content"), list):
        return str(body["content"][0]["text"])
    return str(body.get("content") or body.get("response") or body["message"]["content"])


@pytest.mark.parametrize(("path", "body"), ROUTES, ids=[path for path, _ in ROUTES])
def test_a_default_holds_where_a_request_says_nothing(
    demo: lp.Model, path: str, body: dict[str, Any]
) -> None:
    with (
        lp.Engine(demo, n_ctx=512, n_seq_max=4) as engine,
        http_client(
            engine, model_names=("m",), ollama=True, sampling={"temperature": 0, "repeat_penalty": 1.0}
        ) as client,
    ):
        body = {"model": "m", **body}
        texts = {text_of(client.post(path, json=body)) for _ in range(4)}
        assert len(texts) == 1
        warm: dict[str, Any] = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        if "options" in body:
            body = body | {"options": body["options"] | warm}
        else:
            body = body | (warm if path != "/v1/responses" else {"temperature": 2.0, "top_p": 1.0})
        assert {text_of(client.post(path, json=body)) for _ in range(4)} - texts, (
            "the request's own value wins"
        )


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"max_tokens": 3}, "sampling: 'max_tokens' cannot be set for all requests"),
        ({"temperatur": 3}, "sampling: 'temperatur' cannot be set"),
        ({"temperature": -3}, "sampling: temperature is -3"),
        ({"top_k": 1.5}, "sampling: top_k"),
    ],
)
def test_wrong_defaults_are_refused(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ServerSettings(sampling=sampling)
