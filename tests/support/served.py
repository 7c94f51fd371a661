"""Servers for the tests that others wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import llamapipe as lp
from llamapipe.server import ServerSettings, serve
from support.bert_model import bert_model
from support.chat_templates import template
from support.gguf_models import infilling_model
from support.scripted_model import terse_model

TOOLS_TEMPLATE = "Qwen-Qwen3-0.6B"


@contextmanager
def demo_server(folder: Path, *names: str) -> Iterator[str]:
    """The URL of a server whose model knows tools and can fill in, and of an encoder, under these names."""
    path = infilling_model(folder / "demo.gguf")
    with (
        lp.Model(path, chat_template=template(TOOLS_TEMPLATE).text) as model,
        lp.Engine(model, n_ctx=4096, n_seq_max=8) as engine,
        lp.Embedder(bert_model(folder / "bert.gguf", n_ctx=512)[0]) as embedder,
        serve(
            engine,
            settings=ServerSettings(model_names=names, embedding_names=("text-embedding-3-small",)),
            embedder=embedder,
        ) as server,
    ):
        yield server.url
        engine.check_integrity()


@contextmanager
def ollama_server(folder: Path) -> Iterator[str]:
    """The same with Ollama's API: the models ``gemma4`` and ``bert``."""
    settings = ServerSettings(model_names=("gemma4",), embedding_names=("bert",), ollama=True)
    with (
        lp.Model(infilling_model(folder / "demo.gguf"), chat_template=template(TOOLS_TEMPLATE).text) as model,
        lp.Engine(model, n_ctx=4096, n_seq_max=8) as engine,
        lp.Embedder(bert_model(folder / "bert.gguf", n_ctx=512)[0]) as embedder,
        serve(engine, settings=settings, embedder=embedder) as server,
    ):
        yield server.url
        engine.check_integrity()


@contextmanager
def terse_server(folder: Path) -> Iterator[str]:
    """The URL of a server whose model, ``terse`` or ``other``, gives short values where JSON is forced."""
    path = terse_model(folder / "terse.gguf", template(TOOLS_TEMPLATE).text)
    settings = ServerSettings(model_names=("terse", "other"), ollama=True)
    with (
        lp.Engine(path, n_ctx=8192, n_seq_max=4) as engine,
        lp.Embedder(bert_model(folder / "bert.gguf", n_ctx=512)[0]) as embedder,
        serve(engine, settings=settings, embedder=embedder) as server,
    ):
        yield server.url
        engine.check_integrity()
