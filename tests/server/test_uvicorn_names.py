"""Names in uvicorn that the server relies on and that uvicorn does not document.

``Connection`` is a subclass of uvicorn's protocol: between llhttp's callbacks and the answer there is no public place
for limits. If a release renames something, ``Connection`` may go on without limits, so this test names what is missing.
The tests of attacks and streams show that all of it still works together.
"""

from __future__ import annotations

import ast
import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

import llamapipe

PACKAGE = Path(llamapipe.__file__).parent
CONNECTIONS, WORKER = "server/connections.py", "fleet/worker.py"
RUN = "server/run.py"
NAMES = {
    "protocol": {
        "_unset_keepalive_if_required", "client", "cycle", "flow", "headers", "loop", "on_body", "on_header",
        "on_headers_complete", "on_message_begin", "on_message_complete", "on_response_complete", "on_url", "parser",
        "scope", "shutdown", "timeout_keep_alive", "timeout_keep_alive_handler", "timeout_keep_alive_task", "transport",
        "url",
    },
    "flow": {"pause_reading", "resume_reading", "write_paused"},
    "cycle": {
        "chunked_encoding", "disconnected", "expected_content_length", "keep_alive", "message_event", "more_body",
        "response_complete", "response_started", "send", "transport",
    },
    "server": {
        "config", "force_exit", "handle_exit", "lifespan", "run", "server_state", "should_exit", "shutdown", "startup",
    },
    "state": {"connections", "default_headers"},
    "config": {"encoded_headers"},
    "lifespan": {"state"},
}  # fmt: skip
# Where each object's names are used: a file, a class in it or None for all, and the expressions that mean the object.
USES: dict[str, list[tuple[str, str | None, tuple[str, ...]]]] = {
    "protocol": [(CONNECTIONS, "Connection", ("self", "super()")), (WORKER, None, ("connection",))],
    "flow": [(CONNECTIONS, None, ("flow", "self.flow")), (CONNECTIONS, "_Flow", ("self", "super()"))],
    "cycle": [
        (CONNECTIONS, None, ("cycle", "self.cycle")),
        (CONNECTIONS, "_OldCycle", ("self", "super()")),
        (WORKER, None, ("cycle",)),
    ],
    "server": [(WORKER, "WorkerServer", ("self", "super()")), (RUN, "HttpServer", ("self", "super()"))],
    "state": [(WORKER, "WorkerServer", ("self.server_state",))],
    "config": [(WORKER, "WorkerServer", ("self.config",))],
    "lifespan": [(WORKER, "WorkerServer", ("self.lifespan",))],
}


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """Each object as uvicorn makes it, while a request is answered."""
    by_name: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        by_name["cycle"] = send.__self__
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def answer_one() -> None:
        config = uvicorn.Config(app, lifespan="off", log_config=None, ws="none")
        server, state = uvicorn.Server(config), ServerState()
        config.load()
        server.lifespan = config.lifespan_class(config)

        def protocol() -> HttpToolsProtocol:
            connection = HttpToolsProtocol(config, state, {}, asyncio.get_running_loop())
            by_name.update(protocol=connection, config=config, server=server, state=state)
            return connection

        ours, theirs = socket.socketpair()
        transport, connection = await asyncio.get_running_loop().connect_accepted_socket(protocol, theirs)
        with ours:
            reader, writer = await asyncio.open_connection(sock=ours)
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 204")
            by_name.update(flow=connection.flow, lifespan=server.lifespan)
            writer.close()
        transport.close()

    asyncio.run(answer_one())
    return by_name


def used(path: str, class_name: str | None, expressions: tuple[str, ...]) -> set[str]:
    """Attributes of the expressions, and, of ``self``, methods that may replace uvicorn's."""
    tree: ast.AST = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
    if class_name is not None:
        (tree,) = (
            node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == class_name
        )
    nodes = list(ast.walk(tree))
    names = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in expressions
    }
    if "self" in expressions:
        names |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    return names


@pytest.mark.parametrize("name", NAMES)
def test_names_exist_in_this_version(objects: dict[str, Any], name: str) -> None:
    missing = {member for member in NAMES[name] if not hasattr(objects[name], member)}
    assert not missing, f"uvicorn {uvicorn.__version__} has no {', '.join(sorted(missing))}"


@pytest.mark.parametrize("name", NAMES)
def test_all_names_that_are_used_are_listed(objects: dict[str, Any], name: str) -> None:
    """Without those of Python's own classes."""
    named = {member for use in USES[name] for member in used(*use)}
    standard = {*dir(asyncio.Protocol), *dir(asyncio.BufferedProtocol)}
    assert {member for member in named if hasattr(objects[name], member)} - standard == NAMES[name]
