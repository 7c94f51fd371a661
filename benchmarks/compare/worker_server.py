"""llama-server over loopback, asked by a client that does as little as it can: it looks for the end of each answer.

All requests go out at once on connections made before (the server closes them after a stream). The server's own figures
say how many tokens there were.
"""

from __future__ import annotations

import atexit
import json
import re
import selectors
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

sys.path.append(str(Path(__file__).resolve().parents[1]))

from local_server import running
from worker import Measured, Run, serve
from workload import SCHEMA, Work


def start(path: Path, work: Work, arguments: list[str]) -> Run:
    """The server ends with this process: it is told when standard input ends."""
    mode, program = arguments
    n_slots = 1 if mode == "one-slot" else work.n
    command = [
        program, "-m", path, "-np", n_slots, "-c", n_slots * work.n_ctx, "-t", work.n_threads, "-tb", work.n_threads,
        "-b", 2048, "-ub", 512, "--cache-ram", 0, "--log-disable", "-no-kvu", "-ngl", "all",
        *([] if work.n_shared else ["--no-cache-prompt"]),
        *(["-bs"] if mode == "backend-sampling" else []),
    ]  # fmt: skip
    stack = ExitStack()
    atexit.register(stack.close)
    port = stack.enter_context(running(*command)).port
    streaming = mode in ("streaming", "one-slot")

    def run(prompts: list[list[int]]) -> Measured:
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(work.n)]
        for connection in connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        requests = [_request(prompt, work, streaming) for prompt in prompts]
        selector = selectors.DefaultSelector()
        read: dict[int, bytearray] = {}
        firsts: list[float] = []
        began = perf_counter()
        for connection, request in zip(connections, requests, strict=True):
            connection.sendall(request)
            read[connection.fileno()] = bytearray()
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                text = read[key.fd]
                was = len(text)
                came = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                text += came
                if streaming and b"data:" in text[:2000] and b"data:" not in text[: min(was, 2000)]:
                    firsts.append(perf_counter() - began)
                if not came or _complete(text, streaming):
                    selector.unregister(key.fileobj)
        seconds = perf_counter() - began
        for connection in connections:
            connection.close()
        n_tokens = sum(_n_tokens(text) for text in read.values())
        return Measured(seconds, n_tokens, firsts)

    return run


def _request(prompt: list[int], work: Work, streaming: bool) -> bytes:
    options = {
        "prompt": prompt, "n_predict": work.n_generate, "temperature": 0, "ignore_eos": not work.schema,
        "cache_prompt": bool(work.n_shared), "stream": streaming, "samplers": [],
    }  # fmt: skip
    body = json.dumps({**options, "json_schema": SCHEMA} if work.schema else options).encode()
    head = (
        "POST /completion HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join((*head, "", "")).encode() + body


def _complete(text: bytearray, streaming: bool) -> bool:
    if streaming:
        return text.endswith(b"\r\n0\r\n\r\n")
    head, separator, body = text.partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head, re.IGNORECASE)
    return bool(separator) and length is not None and len(body) >= int(length.group(1))


def _n_tokens(text: bytearray) -> int:
    counts = re.findall(rb'"tokens_predicted":(\d+)', text)
    if not counts:
        raise RuntimeError(f"llama-server said {bytes(text[:500])!r}")
    return int(counts[-1])


serve(start)
