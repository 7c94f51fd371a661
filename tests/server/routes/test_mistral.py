"""Mistral's route for filling in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.gguf_models import infilling_model
from support.served import http_client

import llamapipe as lp
from llamapipe.server import serve

PATH = "/v1/fim/completions"
BODY: dict[str, Any] = {
    "model": "codestral-latest",
    "prompt": "Once upon",
    "suffix": "the end",
    "max_tokens": 8,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Engine]:
    with lp.Engine(infilling_model(tmp_path_factory.mktemp("fim") / "fim.gguf"), n_ctx=512) as engine:
        yield engine
        engine.check_integrity()


@pytest.fixture(scope="module")
def client(engine: lp.Engine) -> Iterator[httpx.Client]:
    with http_client(engine, model_names=("codestral-latest",)) as client:
        yield client


def test_an_answer_is_the_engines(client: httpx.Client, engine: lp.Engine) -> None:
    prompt = engine.model.tokenize_fim("Once upon", "the end")
    expected = engine.generate(prompt, lp.SamplingParams(max_tokens=8, temperature=0))
    answer = client.post(PATH, json={**BODY, "random_seed": 4, "stop": ["zzz"], "min_tokens": 2}).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == expected.text
    assert choice["finish_reason"] == "length"
    assert (answer["object"], answer["model"]) == ("chat.completion", "codestral-latest")
    assert answer["usage"]["completion_tokens"] == 8


def test_a_stream_joins_to_the_same_answer(client: httpx.Client) -> None:
    whole = client.post(PATH, json=BODY).json()
    with client.stream("POST", PATH, json={**BODY, "stream": True}) as stream:
        lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 8


def test_without_a_suffix_the_text_continues(client: httpx.Client) -> None:
    response = client.post(PATH, json={name: value for name, value in BODY.items() if name != "suffix"})
    assert response.status_code == 200


def test_a_long_prompt_is_cut(client: httpx.Client) -> None:
    answer = client.post(PATH, json={**BODY, "prompt": "A fox ran.\n" * 10_000}).json()
    assert answer["usage"]["prompt_tokens"] < 512


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"), ({"prompt": ["a"]}, "prompt"), ({"suffix": 3}, "suffix"), ({"n": 2}, "n"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -5}, "max_tokens"), ({"random_seed": "a"}, "random_seed"),
        ({"random_seed": 1, "seed": 1}, "random_seed"), ({"temperature": "hot"}, "temperature"),
        ({"model": "other"}, "model"), ({"typo": 1}, "typo"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(
    client: httpx.Client, change: dict[str, Any], param: str | None, stream: bool
) -> None:
    raw = json.dumps({**BODY, "stream": stream, **change})
    response = client.post(PATH, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == (404 if "model" in change else 400)
    assert response.json()["error"]["param"] == param


def test_a_model_that_cannot(demo: lp.Model) -> None:
    with lp.Engine(demo, n_ctx=256) as engine, serve(engine) as server:
        response = httpx.post(f"{server.url}{PATH}", json={"prompt": "a"}, timeout=60)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_fields_of_mistrals_chats(client: httpx.Client) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Once upon"}], "max_tokens": 8}

    def content(**more: Any) -> str:
        answer = client.post("/v1/chat/completions", json={**body, **more}).json()
        text: str = answer["choices"][0]["message"]["content"]
        return text

    assert content(random_seed=4, safe_prompt=False) == content(seed=4)
    for change in ({"random_seed": 1, "seed": 1}, {"safe_prompt": True}, {"tool_choice": "any"}):
        error = client.post("/v1/chat/completions", json={**body, **change}).json()["error"]
        assert error["param"] in change
    assert error["message"] == "tool_choice asks for a call, but there are no tools"
