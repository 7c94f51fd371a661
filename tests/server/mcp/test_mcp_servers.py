"""MCP servers of a file: what it may hold, how they start, answer, fail and end."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.control import PATIENCE_S, wait_until
from support.fleet_servers import has_ended
from support.mcp_agent import http_server
from support.mcp_servers import PNG, entry, write_file

from llamapipe.server.mcp import _stdio, servers
from llamapipe.server.mcp.file import HttpServer, StdioServer, entries_of
from llamapipe.server.mcp.servers import Image, LocalServers, McpError, Result

Use = Callable[[LocalServers], Awaitable[Any]]


def used(folder: Path, servers: dict[str, Any], use: Use, *limits_s: float) -> Any:
    """What ``use`` returns for these servers, which are closed."""

    async def run() -> Any:
        entries = entries_of(write_file(folder / "mcp.json", servers))
        with closing(LocalServers(entries, *(limits_s or (PATIENCE_S,)))) as local:
            return await use(local)

    return asyncio.run(run())


def called(folder: Path, kind: str) -> Any:
    return used(folder, {kind: entry(kind, str(folder))}, lambda local: local.call(kind, "act", {}))


def test_a_file_lists_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_TOKEN", "secret")
    monkeypatch.delenv("TEST_NONE", raising=False)
    path = write_file(
        tmp_path / "mcp.json",
        {
            "one": {"command": "run", "args": ["${TEST_NONE:-x}"], "env": {"A": "b"}, "alwaysAllow": ["add"]},
            "two": {"type": "http", "url": "https://a.example/mcp", "headers": {"X": "Bearer ${TEST_TOKEN}"}},
            "off": {"command": "run", "disabled": True},
        },
    )
    assert entries_of(path) == {
        "one": StdioServer("one", "run", ("x",), {"A": "b"}),
        "two": HttpServer("two", "https://a.example/mcp", {"X": "Bearer secret"}),
    }
    assert "secret" not in repr(entries_of(path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "mcpServers"),
        ('{"servers": {}}', "mcpServers"),
        (json.dumps({"mcpServers": {"a": []}}), "'a': it must be an object"),
        (json.dumps({"mcpServers": {"a b": {"command": "x"}}}), "a label may have"),
        (json.dumps({"mcpServers": {"a": {}}}), "command must be a text"),
        (json.dumps({"mcpServers": {"a": {"command": 1}}}), "command must be a text"),
        (json.dumps({"mcpServers": {"a": {"command": "x", "args": "y"}}}), "args must be a list"),
        (json.dumps({"mcpServers": {"a": {"command": "x", "env": {"A": 1}}}}), "env must be an object"),
        (json.dumps({"mcpServers": {"a": {"command": "x", "comand": "y"}}}), "did you mean command"),
        (json.dumps({"mcpServers": {"a": {"command": "x", "headers": {}}}}), "unknown key 'headers'"),
        (json.dumps({"mcpServers": {"a": {"command": "x\0"}}}), "NUL"),
        (json.dumps({"mcpServers": {"a": {"command": "${TEST_NONE}"}}}), "no variable TEST_NONE"),
        (json.dumps({"mcpServers": {"a": {"url": "file:///etc/passwd"}}}), "url must be"),
        (json.dumps({"mcpServers": {"a": {"url": "http://a", "type": "sse"}}}), "streamable HTTP"),
        (json.dumps({"mcpServers": {"a": {"url": "http://a", "type": "ws"}}}), "type is 'ws'"),
        (
            json.dumps({"mcpServers": {"a": {"command": "x", "cwd": "~no.such.user/"}}}),
            "cwd is '~no.such.user/'",
        ),
        (
            json.dumps({"mcpServers": {"a": {"command": "x", "env": {"A=B": "c"}}}}),
            "not the name of a variable",
        ),
        (json.dumps({"mcpServers": {"a": {"command": "x", "disabled": "yes"}}}), "disabled is 'yes'"),
        (json.dumps({"mcpServers": {"a": {"command": "x", "args": ["\ud800"]}}}), "surrogates not allowed"),
        (json.dumps({"mcpServers": {"a": {"url": "http://a:99999/"}}}), "Port out of range"),
        (json.dumps({"mcpServers": {"a": {"url": "http://a/ b"}}}), "url has"),
        (json.dumps({"mcpServers": {"a": {"url": "http://a", "headers": {"x y": "z"}}}}), "the header 'x y'"),
        (json.dumps({"mcpServers": {"a": {"url": "http://a", "headers": {"x": "\r\n"}}}}), "the header 'x'"),
        ("x" * (2**20 + 1), "more than 1048576 bytes"),
    ],
)
def test_a_wrong_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str) -> None:
    monkeypatch.delenv("TEST_NONE", raising=False)
    path = tmp_path / "mcp.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem):
        entries_of(path)


def test_tools_of_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAPIPE_API_KEYS", "secret")

    async def use(local: LocalServers) -> Any:
        tools = {tool.name: tool for tool in await local.tools("good")}
        results = await asyncio.gather(
            local.call("good", "add", {"a": 2, "b": 3}),
            local.call("good", "fail", {}),
            local.call("good", "picture", {}),
            local.call("good", "environment", {}),
        )
        with pytest.raises(KeyError):
            await local.call("other", "add", {})
        return tools, results

    tools, (added, failed, picture, names) = used(
        tmp_path, {"good": entry("good", str(tmp_path), A="b")}, use
    )
    assert tools["add"].description == "Adds two numbers."
    assert set(tools["add"].input_schema["properties"]) == {"a", "b"}
    assert (tools["add"].is_read_only, tools["fail"].is_read_only) == (True, False)
    assert added == Result(["5"], False)
    assert failed.is_error and failed.parts
    assert picture == Result(["A dot:", Image("image/png", PNG)], False)
    assert "A" in names.parts[0].split() and "PATH" in names.parts[0].split()
    assert "LLAMAPIPE_API_KEYS" not in names.parts[0]


def test_one_process_for_all_calls_and_another_after_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(local: LocalServers) -> Any:
        local.start()
        for i in range(3):
            await local.call("good", "add", {"a": i, "b": 1})
        first = started()
        with pytest.raises(McpError, match="the MCP server 'good' ended"):
            await local.call("good", "die", {})
        again = await local.call("good", "add", {"a": 1, "b": 1})
        return first, again

    def started() -> list[str]:
        return sorted(path.name for path in tmp_path.glob("started-*"))

    first, again = used(tmp_path, {"good": entry("good", str(tmp_path))}, use)
    assert len(first) == 1 and len(started()) == 2
    assert again == Result(["2"], False)


def test_a_call_that_nobody_waits_for_is_cancelled(tmp_path: Path) -> None:
    async def use(local: LocalServers) -> Any:
        call = asyncio.ensure_future(local.call("good", "wait", {}))
        await asyncio.to_thread(wait_until, (tmp_path / "waiting").exists)
        call.cancel()
        await asyncio.wait({call})
        await asyncio.to_thread(wait_until, (tmp_path / "cancelled").exists)
        return call.cancelled(), await local.call("good", "add", {"a": 1, "b": 1})

    cancelled, again = used(tmp_path, {"good": entry("good", str(tmp_path))}, use)
    assert cancelled and again == Result(["2"], False)
    assert len(list(tmp_path.glob("started-*"))) == 1


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        ({"command": "/nowhere/at-all"}, "there is no command '/nowhere/at-all'"),
        ({"command": sys.executable, "args": ["-c", "import sys; sys.exit(3)"]}, "did not start: ended"),
        (entry("garbage"), "not MCP messages"),
        (entry("endless"), f"a message of more than {_stdio._MOST_LINE} bytes"),
    ],
    ids=["no command", "ends", "garbage", "endless"],
)
def test_a_server_that_does_not_start(tmp_path: Path, server: dict[str, Any], problem: str) -> None:
    with pytest.raises(McpError, match=problem):
        used(tmp_path, {"it": server}, lambda local: local.tools("it"))


def test_a_server_that_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(McpError, match=r"did not start within 0\.5 seconds"):
        used(tmp_path, {"it": entry("silent")}, lambda local: local.tools("it"), PATIENCE_S, 0.5)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [("many", "lists over 1024 tools"), ("pages", "in over 64 pages")],
)
def test_a_server_with_too_many_tools(tmp_path: Path, kind: str, problem: str) -> None:
    with pytest.raises(McpError, match=problem):
        used(tmp_path, {kind: entry(kind)}, lambda local: local.tools(kind))


def test_a_name_that_is_listed_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tool,) = used(tmp_path, {"twice": entry("twice")}, lambda local: local.tools("twice"))
    assert tool.description == "first"
    assert "the MCP server 'twice' lists two tools called 'act'" in caplog.text


def test_an_error_of_a_server_is_not_its_end(tmp_path: Path) -> None:
    """The code is that with which the package tells that a connection ended."""

    async def use(local: LocalServers) -> Any:
        for _ in range(2):
            with pytest.raises(McpError, match=r"^not today$") as caught:
                await local.call("refusing", "act", {})
        return caught.value.code

    with_log = used(tmp_path, {"refusing": entry("refusing")}, use)
    assert with_log == -32000


def test_a_server_that_floods(tmp_path: Path) -> None:
    with pytest.raises(McpError, match="bytes that nobody asked for"):
        called(tmp_path, "flood")


def test_a_server_that_hangs_is_replaced(tmp_path: Path) -> None:
    async def use(local: LocalServers) -> Any:
        await local.tools("hanging")
        for n in (1, 2):
            with pytest.raises(McpError, match="did not answer within 1 seconds") as caught:
                await local.call("hanging", "act", {})
            assert caught.value.code == servers.TIMED_OUT
            assert len(list(tmp_path.glob("pid-*"))) == n

    used(tmp_path, {"hanging": entry("hanging", str(tmp_path))}, use, 1, PATIENCE_S)


def test_the_end_ends_what_children_have_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stdio, "_GRACE_S", 0.1)
    assert called(tmp_path, "deaf") == Result(["fine"], False)
    pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    assert len(pids) == 2
    wait_until(lambda: all(map(has_ended, pids)))


def test_nothing_is_asked_after_the_end(tmp_path: Path) -> None:
    async def use(local: LocalServers) -> None:
        local.close()
        local.close()
        with pytest.raises(McpError, match="shutting down"):
            await local.tools("good")

    used(tmp_path, {"good": entry("good", str(tmp_path))}, use)
    assert not list(tmp_path.glob("started-*"))


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with http_server(tmp_path) as address:
        yield address


def test_tools_at_an_address(tmp_path: Path, address: str) -> None:
    async def use(local: LocalServers) -> Any:
        assert local.labels == {"far": address}
        names = [tool.name for tool in await local.tools("far")]
        call = asyncio.ensure_future(local.call("far", "wait", {}))
        await asyncio.to_thread(wait_until, (tmp_path / "waiting").exists)
        call.cancel()
        await asyncio.to_thread(wait_until, (tmp_path / "cancelled").exists)
        return names, await local.call("far", "add", {"a": 1, "b": 2})

    names, added = used(tmp_path, {"far": {"url": address}}, use)
    assert names[0] == "add" and added == Result(["3"], False)


def test_an_address_where_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(McpError, match="the MCP server 'far' did not start"):
        used(tmp_path, {"far": {"url": "http://127.0.0.1:9/mcp"}}, lambda local: local.tools("far"))


def test_the_package_is_needed_only_where_a_server_starts() -> None:
    program = "import sys; import llamapipe.server.mcp.servers; assert 'mcp' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_without_the_package_an_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(McpError, match=r"pip install 'llamapipe\[mcp\]'"):
        used(tmp_path, {"good": entry("good", str(tmp_path))}, lambda local: local.tools("good"))
