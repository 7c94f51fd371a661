"""MCP servers for tests: one made with the official package, and ones that do what they should not.

Run as a program: ``python mcp_servers.py KIND [FOLDER]``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROGRAM = str(Path(__file__).resolve())
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def entry(kind: str, *arguments: str, **env: str) -> dict[str, Any]:
    """The entry of a file of servers."""
    path = os.pathsep.join(sys.path)  # children do not see the variable of this process
    return {
        "command": sys.executable,
        "args": [PROGRAM, kind, *arguments],
        "env": {"PYTHONPATH": path, **env},
    }


def write_file(path: Path, servers: Mapping[str, Any]) -> Path:
    """A file of servers."""
    path.write_text(json.dumps({"mcpServers": dict(servers)}))
    return path


def good(folder: Path, **http: Any) -> None:
    """Tools that work, fail, wait and are large. What happens is told by files in a folder."""
    import anyio.to_thread
    from mcp.server.mcpserver import MCPServer
    from mcp.types import ImageContent, TextContent, ToolAnnotations

    server = MCPServer("good")
    (folder / f"started-{os.getpid()}").touch()

    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)

    def environment() -> str:
        """The names of the variables."""
        return " ".join(sorted(os.environ))

    def fail() -> str:
        """Fails."""
        raise ValueError("no luck")

    def large(n: int) -> str:
        """So many characters."""
        return "x" * n

    def picture() -> Any:
        """A text and an image."""
        return [
            TextContent(type="text", text="A dot:"),
            ImageContent(type="image", data=PNG, mime_type="image/png"),
        ]

    async def wait() -> str:
        """Waits until it is cancelled."""
        (folder / "waiting").touch()
        try:
            await anyio.sleep_forever()
        finally:
            (folder / "cancelled").touch()
        return ""

    def die() -> str:
        """Ends the server."""
        os._exit(3)

    async def gate() -> str:
        """Waits until somebody writes into the pipe."""
        return await anyio.to_thread.run_sync((folder / "gate").read_text)

    server.tool(annotations=ToolAnnotations(read_only_hint=True))(add)
    server.tool(structured_output=False)(picture)
    for function in (environment, fail, large, wait, gate, die):
        server.tool()(function)
    server.run(**(http or {"transport": "stdio"}))


def bad(kind: str, folder: Path) -> None:
    """Speaks the protocol by hand, up to where it goes wrong."""
    if kind == "deaf":  # it ends by force only, and so does what it has started
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = os.fork()
        (folder / f"pid-{os.getpid()}").touch()
        if child == 0:
            while True:
                signal.pause()
    elif kind == "hanging":
        (folder / f"pid-{os.getpid()}").touch()
    elif kind == "garbage":
        while True:
            sys.stdout.write("no JSON\n")
    elif kind == "silent":
        signal.pause()
    elif kind == "endless":
        while True:
            sys.stdout.write("x" * 2**16)
    sys.stdout.write("a banner\n")
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        method = message["method"]
        result: dict[str, Any] | None = None
        if method == "initialize":
            version = message["params"]["protocolVersion"]
            info = {"name": kind, "version": "1"}
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        elif method == "tools/list":
            result = {"tools": _tools(kind)}
            if kind == "pages":
                result["nextCursor"] = "more"
        elif method == "tools/call" and kind == "hanging":
            signal.pause()
        elif method == "tools/call" and kind == "flood":
            note = {"jsonrpc": "2.0", "method": "notifications/message",
                    "params": {"level": "info", "data": "x" * 2**16}}  # fmt: skip
            text = json.dumps(note) + "\n"
            while True:
                sys.stdout.write(text)
        elif method == "tools/call" and kind == "refusing":
            _send({"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32000, "message": "not today"}})
            continue
        elif method == "tools/call":
            result = {"content": [{"type": "text", "text": "fine"}]}
            if kind == "seeing":
                result["content"].append({"type": "image", "data": PNG, "mimeType": "image/png"})
        if result is None:
            _send({"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": "unknown"}})
        else:
            _send({"jsonrpc": "2.0", "id": message["id"], "result": result})
    if kind == "deaf":
        while True:
            signal.pause()


def _tools(kind: str) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    names = [f"tool_{i}" for i in range(10_000)] if kind == "many" else ["act"]
    if kind == "twice":
        return [{"name": "act", "description": text, "inputSchema": schema} for text in ("first", "second")]
    return [{"name": name, "inputSchema": schema} for name in names]


def _send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()
    if sys.argv[1] == "good":
        good(folder)
    elif sys.argv[1] == "http":
        good(folder, transport="streamable-http", host="127.0.0.1", port=int(sys.argv[3]))
    else:
        bad(sys.argv[1], folder)
