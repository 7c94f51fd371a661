"""A server whose model calls MCP tools with certainty: what it says in each turn is scripted."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
from agents.clients import TEMPLATE, said

import llamapipe as lp
from llamapipe.server import ServerSettings, serve
from llamapipe.server._tools import tools_of
from llamapipe.server.requests.items import messages_of
from support.control import PATIENCE_S, wait_until
from support.mcp_servers import PROGRAM, entry, write_file
from support.run_script import free_port
from support.scripted_model import turns_model

Call = tuple[str, Mapping[str, Any]]
GOOD: Any = {"type": "mcp", "server_label": "good", "require_approval": "never"}
OPTIONS: Any = {"model": "turns", "input": "Go.", "temperature": 0, "store": False}
KINDS = ("good", "garbage", "many", "twice", "refusing")


def turns_file(folder: Path, calls: Sequence[Call]) -> Path:
    """A model that calls up to three tools, one a turn, and then says that it is done."""
    texts = said(calls)
    padding = [texts[-2]] * (3 - len(calls))
    return turns_model(folder / "turns.gguf", [*texts[:-1], *padding, texts[-1]], TEMPLATE.read_text())


class Agent:
    """A server with such a model, and the MCP servers of ``KINDS``. ``client``: OpenAI's, for it."""

    def __init__(
        self, folder: Path, calls: Sequence[Call], cache_bytes: int | None = None, **settings: Any
    ) -> None:
        self.folder = folder
        file = write_file(folder / "mcp.json", {kind: entry(kind, str(folder)) for kind in KINDS})
        options: dict[str, Any] = {"model_names": ("turns",), "mcp": file, "mcp_timeout_s": PATIENCE_S}
        self.engine = lp.Engine(turns_file(folder, calls), n_ctx=16384, n_seq_max=2, cache_bytes=cache_bytes)
        self.server = serve(self.engine, settings=ServerSettings(**{**options, **settings}))
        self.client: Any = openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server.close()
        self.engine.check_integrity()
        self.engine.close()

    @staticmethod
    def messages_of(items: Sequence[Any]) -> list[dict[str, Any]]:
        """The conversation that the model gets for an input."""
        return messages_of(None, items, tools_of(None, None, is_flat=True))


@contextmanager
def http_server(folder: Path) -> Iterator[str]:
    """The address of a server over HTTP with the tools of ``good``."""
    port = free_port()

    def listens() -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0

    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, PROGRAM, "http", str(folder), str(port)], stdout=log, stderr=log
        ) as process,
    ):
        try:
            wait_until(listens)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.terminate()
