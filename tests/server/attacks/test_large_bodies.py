"""Large bodies: while one is decoded and refused, the event loop serves the others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from support.bert_model import bert_model
from support.loop_hold import longest_hold_s

import llamapipe as lp
from llamapipe.server import ServerSettings, app

MANY = 15_000_000  # bytes
TURN = {"role": "user", "content": "Hi"}
PART = {"type": "text", "text": "a"}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [PART] * 80_000}
CLAUDE = {"model": "demo", "max_tokens": 1}


@pytest.fixture(scope="module")
def application(demo: lp.Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starlette]:
    folder = tmp_path_factory.mktemp("models")
    file, _ = bert_model(folder / "bert.gguf")
    settings = ServerSettings(model_names=("demo",), store=folder / "answers.db")
    with lp.Engine(demo, n_ctx=256, n_seq_max=2) as engine, lp.Embedder(file) as embedder:
        application = app(engine, settings, embedder=embedder)
        yield application
        application.state.llamapipe.release()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 1480}] * 9999}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "é\n" * (MANY // 8)}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [TURN] * (MANY // 40)}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PART] * 80_000}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [PART] * 80_000}]}),
        ("/v1/conversations", {"items": [{"role": "user", "content": [PART] * 80_000}]}),
        ("/v1/conversations", {"items": [{"role": "user", "content": "a" * 1480}] * 9999}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [PART] * 80_000}], **CLAUDE}),
        ("/v1/messages", {"messages": [TURN], "system": [PART] * 80_000, **CLAUDE}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [RESULT]}], **CLAUDE}),
        ("/v1/chat/completions", {"messages": [TURN], "metadata": {"x": [1] * (MANY // 3)}}),
        ("/v1/completions", {"prompt": "a" * MANY}),
        ("/v1/completions", {"prompt": [12345] * (MANY // 7)}),
        ("/v1/completions", {"prompt": [5, *["a b " * 1000] * 3000], "truncate_prompt_tokens": 1}),
        ("/tokenize", {"content": "a" * MANY}),
        ("/tokenize", {"content": "\U0001f600" * 200_000}),
        ("/detokenize", {"tokens": [12345] * (MANY // 7)}),
        ("/v1/embeddings", {"input": [[10**6]] * 250_000}),
        ("/v1/embeddings", {"input": ["a"] * 9_999}),
        ("/embedding", {"content": ["a"] * 9_999}),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 250_000}),
        ("/score", {"text_1": "a", "text_2": ["b"] * 250_000}),
        ("/score", {"text_1": ["a"] * 4_999, "text_2": ["b"] * 4_999}),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),  # not the text of a large body
)
def test_the_loop_is_not_held(application: Starlette, path: str, body: dict[str, Any]) -> None:
    answer, longest_s = asyncio.run(longest_hold_s(application, path, json.dumps(body).encode()))
    assert answer.status_code in (200, 400)
    # 0.01 s here, 0.1 s for the 9999 messages; before, up to 0.4 s
    assert longest_s < 0.14, (
        f"the loop was held for {longest_s:.2f} s: move loops, size_of included, into in_thread"
    )
