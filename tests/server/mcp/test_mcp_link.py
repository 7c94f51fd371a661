"""MCP servers of ``llamapipe serve`` where other processes compute: with ``--models``, with ``--workers``."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.control import PATIENCE_S, wait_until
from support.fleet_servers import has_ended, pool_server, worker_server
from support.mcp_agent import GOOD, OPTIONS, turns_file
from support.mcp_servers import PNG, entry, write_file

from llamapipe.server.mcp.file import entries_of
from llamapipe.server.mcp.link import LinkedServers, listening
from llamapipe.server.mcp.servers import CLOSED, Image, LocalServers, McpError, Result

LIMITS = ("--n-ctx", "8192", "--mcp-timeout", f"{PATIENCE_S:g}")


@contextmanager
def linked(folder: Path, *kinds: str) -> Iterator[tuple[LinkedServers, LocalServers]]:
    file = write_file(folder / "mcp.json", {kind: entry(kind, str(folder)) for kind in kinds})
    with closing(LocalServers(entries_of(file), PATIENCE_S)) as servers, listening(servers) as path:
        assert path.parent.stat().st_mode & 0o077 == 0
        yield LinkedServers(path), servers


def test_another_process_has_the_same_servers(tmp_path: Path) -> None:
    async def use(link: LinkedServers, servers: LocalServers) -> Any:
        assert link.labels == servers.labels == {"good": None, "refusing": None}
        assert await link.tools("good") == await servers.tools("good")
        with pytest.raises(McpError, match=r"^not today$") as caught:
            await link.call("refusing", "act", {})
        assert caught.value.code == -32000
        call = asyncio.ensure_future(link.call("good", "wait", {}))
        await asyncio.to_thread(wait_until, (tmp_path / "waiting").exists)
        call.cancel()
        await asyncio.to_thread(wait_until, (tmp_path / "cancelled").exists)
        return await asyncio.gather(
            link.call("good", "add", {"a": 1, "b": 2}), link.call("good", "picture", {})
        )

    with linked(tmp_path, "good", "refusing") as (link, servers):
        added, picture = asyncio.run(use(link, servers))
    assert added == Result(["3"], False)
    assert picture == Result(["A dot:", Image("image/png", PNG)], False)
    assert len(list(tmp_path.glob("started-*"))) == 1
    with pytest.raises(McpError, match="cannot be reached") as caught:
        asyncio.run(link.tools("good"))
    assert caught.value.code == CLOSED


def answers(url: str, n: int) -> list[Any]:
    """Answers on connections of their own, which workers share."""
    responses = []
    for _ in range(n):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
            responses.append(client.responses.create(**OPTIONS, tools=[GOOD]))
    return responses


def check(responses: list[Any]) -> None:
    for response in responses:
        calls = [item for item in response.output if item.type == "mcp_call"]
        assert [(call.name, call.output) for call in calls] == [("add", "5")]
        assert response.output_text.endswith("DONE.")


def files(tmp_path: Path) -> tuple[Path, Path]:
    folder = tmp_path / "models"
    folder.mkdir()
    turns_file(folder, [("add", {"a": 2, "b": 3})])
    return folder, write_file(tmp_path / "mcp.json", {"good": entry("good", str(tmp_path))})


def started(tmp_path: Path) -> list[int]:
    return [int(path.name.removeprefix("started-")) for path in tmp_path.glob("started-*")]


def test_models_behind_the_front(tmp_path: Path) -> None:
    """The model is ended and loaded again; the servers stay."""
    folder, file = files(tmp_path)
    with pool_server(folder, "--mcp", str(file), *LIMITS, log=tmp_path / "log") as server:
        assert httpx.get(f"{server.url}/mcp").json() == {"servers": [{"server_label": "good"}]}
        check(answers(server.url, 1))
        assert httpx.post(f"{server.url}/models/unload", json={"model": "turns"}).status_code == 200
        server.wait_for(turns="unloaded")
        check(answers(server.url, 1))
        (pid,) = started(tmp_path)
        assert not has_ended(pid)
    wait_until(lambda: has_ended(pid))


def test_tools_that_were_called_are_not_called_again(tmp_path: Path) -> None:
    """The model's process is killed while a tool runs. Other requests would be sent to the next one."""
    folder = tmp_path / "models"
    folder.mkdir()
    turns_file(folder, [("wait", {})])
    file = write_file(tmp_path / "mcp.json", {"good": entry("good", str(tmp_path))})
    with (
        pool_server(folder, "--mcp", str(file), *LIMITS, log=tmp_path / "log") as server,
        ThreadPoolExecutor() as threads,
    ):
        asked = threads.submit(
            httpx.post, f"{server.url}/v1/responses", json={**OPTIONS, "tools": [GOOD]}, timeout=PATIENCE_S
        )
        wait_until((tmp_path / "waiting").exists)
        (tmp_path / "waiting").unlink()
        os.kill(server.pids("turns")[0], signal.SIGKILL)
        answer = asked.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_ended")
        wait_until((tmp_path / "cancelled").exists)
        assert not (tmp_path / "waiting").exists() and len(server.pids("turns")) == 1


def test_workers_share_the_servers(tmp_path: Path) -> None:
    folder, file = files(tmp_path)
    options = ("-m", str(folder / "turns.gguf"), "--alias", "turns", *LIMITS, "--mcp", str(file))
    with worker_server(2, *options, log=tmp_path / "log") as server:
        check(answers(server.url, 4))
        (pid,) = started(tmp_path)
    wait_until(lambda: has_ended(pid))


@pytest.mark.parametrize("how", ["--models", "--workers"])
def test_a_server_that_ends_waits_for_no_tool(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    turns_file(folder, [("wait", {})])
    file = write_file(tmp_path / "mcp.json", {"good": entry("good", str(tmp_path))})
    options = (*LIMITS, "--mcp", str(file))
    log = tmp_path / "log"
    model = ("-m", str(folder / "turns.gguf"), "--alias", "turns")
    running: Any = (
        pool_server(folder, *options, log=log)
        if how == "--models"
        else worker_server(1, *model, *options, log=log)
    )
    with running as server, ThreadPoolExecutor(1) as pool:
        asked: Any = {**OPTIONS, "tools": [GOOD]}
        answer = pool.submit(httpx.post, f"{server.url}/v1/responses", json=asked, timeout=PATIENCE_S)
        wait_until((tmp_path / "waiting").exists)
        server.process.send_signal(signal.SIGTERM)
        assert answer.result().json()["error"]["code"] == "shutting_down"
        assert server.process.wait(PATIENCE_S) == 0
    assert (tmp_path / "cancelled").exists()
