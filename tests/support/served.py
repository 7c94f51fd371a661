"""Servers with a client each, and servers for the tests that others wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

import llamapipe as lp
from llamapipe.server import ServerSettings, serve
from support.bert_model import bert_model
from support.chat_templates import template
from support.control import PATIENCE_S
from support.gguf_models import infilling_model
from support.scripted_model import terse_model

if TYPE_CHECKING:
    import openai

TOOLS_TEMPLATE = "Qwen-Qwen3-0.6B"


@contextmanager
def http_client(
    engine: lp.Engine | None,
    *,
    embedder: lp.Embedder | None = None,
    timeout: float = PATIENCE_S,
    **settings: Any,
) -> Iterator[httpx.Client]:
    """Yield a client of a server with these settings; both end with the block."""
    with (
        serve(engine, settings=ServerSettings(**settings), embedder=embedder) as server,
        httpx.Client(base_url=server.url, timeout=timeout) as client,
    ):
        yield client


@contextmanager
def openai_client(
    engine: lp.Engine | None,
    *,
    embedder: lp.Embedder | None = None,
    api_key: str = "none",
    **settings: Any,
) -> Iterator[openai.OpenAI]:
    """Do the same with OpenAI's client, without retries."""
    import openai

    with (
        serve(engine, settings=ServerSettings(**settings), embedder=embedder) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=api_key, max_retries=0) as client,
    ):
        yield client


def refused(client: httpx.Client, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """Return the error in the answer to a request."""
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def post_json(url: str, path: str, body: dict[str, Any]) -> Any:
    """Return the answer of the model ``m``, with the status if it is an error. Loads no certificates, which is slow."""
    answer = httpx.post(url + path, json={"model": "m", **body}, verify=False, timeout=PATIENCE_S)
    return answer.json() | ({} if answer.is_success else {"status": answer.status_code})


@contextmanager
def _with_encoder(path: Path, n_ctx: int = 4096, **settings: Any) -> Iterator[str]:
    """Yield the URL of a server of a model, which gets a template with tools, and of a small BERT."""
    with (
        lp.Model(path, chat_template=template(TOOLS_TEMPLATE).text) as model,
        lp.Engine(model, n_ctx=n_ctx, n_seq_max=8) as engine,
        lp.Embedder(bert_model(path.with_name("bert.gguf"), n_ctx=512)[0]) as embedder,
        serve(engine, settings=ServerSettings(**settings), embedder=embedder) as server,
    ):
        yield server.url
        engine.check_integrity()


def demo_server(folder: Path, *names: str) -> AbstractContextManager[str]:
    """Serve a model under these names that knows tools and can fill in the middle, and an encoder. Yields the URL."""
    path = infilling_model(folder / "demo.gguf")
    return _with_encoder(path, model_names=names, embedding_names=("text-embedding-3-small",))


def ollama_server(folder: Path) -> AbstractContextManager[str]:
    """Do the same with Ollama's API and the models ``gemma4`` and ``bert``."""
    path = infilling_model(folder / "demo.gguf")
    return _with_encoder(path, model_names=("gemma4",), embedding_names=("bert",), ollama=True)


def terse_server(folder: Path) -> AbstractContextManager[str]:
    """Serve a model, ``terse`` or ``other``, that gives short values where JSON is forced. Yields the URL."""
    path = terse_model(folder / "terse.gguf")
    return _with_encoder(path, n_ctx=8192, model_names=("terse", "other"), ollama=True)
