"""A server under large texts and conversations: what a dozen at once cost it, and the stream of another client.

    python benchmarks/attack_texts.py [--model FILE] [--usual]

Starts ``llamapipe serve`` on the loopback address, once with the usual limits and once with limits that let everything
in. Sends 12 texts of 15 MB to ``/tokenize``, then 12 conversations of 100,000 messages, all at once, and prints the
answers, how far the server's memory rose, and the longest gap in a stream meanwhile. Linux only.
"""

from __future__ import annotations

import argparse
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from local_server import SERVE, running

import llamapipe as lp

N_AT_ONCE = 12
WORDS = "The quick brown fox jumps over the lazy dog. "
OPEN = ["--max-text-characters", str(2**25), "--max-messages", "1000000", "--max-bodies-bytes", str(2**30)]
BODIES = {
    "/tokenize": {"content": WORDS * (15_000_000 // len(WORDS))},
    "/v1/chat/completions": {
        "messages": [{"role": ("user", "assistant")[i % 2], "content": "Hi"} for i in range(100_001)],
        "max_tokens": 1,
    },
}


def memory(pid: int, field: str = "VmRSS") -> float:
    """Of a process, in MB; ``VmHWM`` is the most that it had."""
    match = re.search(rf"{field}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) * 1024 / 1e6


def post(port: int, path: str, body: bytes) -> str:
    """The status of the answer."""
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=300) as answer:
            while answer.read(2**20):
                pass
            return str(answer.status)
    except urllib.error.HTTPError as e:
        return str(e.code)
    except OSError as e:
        return type(e).__name__


class Stream(threading.Thread):
    """Streams short completions again and again, and notes the longest gap between two events."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self.longest_s = 0.0
        self.stopped = False

    def run(self) -> None:
        """Until ``stopped``."""
        body = {"prompt": "Once", "max_tokens": 200, "stream": True, "ignore_eos": True, "temperature": 0}
        url = f"http://127.0.0.1:{self._port}/v1/completions"
        asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        last_s = time.perf_counter()
        while not self.stopped:
            with urllib.request.urlopen(asked, timeout=300) as answer:
                for line in answer:
                    if line.strip():
                        now_s = time.perf_counter()
                        self.longest_s, last_s = max(self.longest_s, now_s - last_s), now_s


def measure(model: str, name: str, *options: str) -> None:
    """Prints a row for each attack on a new server."""
    for path, content in BODIES.items():
        with running(*SERVE, "-m", model, *options) as (port, pid), ThreadPoolExecutor(N_AT_ONCE) as pool:
            post(
                port,
                "/v1/chat/completions",
                json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode(),
            )
            body = json.dumps(content).encode()
            before = memory(pid)
            stream = Stream(port)
            stream.start()
            time.sleep(2)
            usual_s, stream.longest_s = stream.longest_s, 0.0
            began_s = time.perf_counter()
            answers = Counter(pool.map(post, [port] * N_AT_ONCE, [path] * N_AT_ONCE, [body] * N_AT_ONCE))
            took_s = time.perf_counter() - began_s
            time.sleep(2)  # freed memory is returned a second later
            stream.stopped = True
            stream.join()
            told = ", ".join(f"{n} x {status}" for status, n in answers.items())
            print(
                f"| {name} | {path} | {told} | {took_s:.1f} s | +{memory(pid, 'VmHWM') - before:.0f} MB | "
                f"+{memory(pid) - before:.0f} MB | {usual_s * 1e3:.0f} ms | {stream.longest_s * 1e3:.0f} ms |",
                flush=True,
            )


def main() -> None:
    """Measures, with the limits as they are and without."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(lp.demo_model_path()))
    parser.add_argument("--usual", action="store_true", help="only with the usual limits")
    arguments = parser.parse_args()
    model: str = arguments.model
    print(
        "| limits | route | answers | took | memory at most | afterwards | longest gap before | meanwhile |"
    )
    print("|---|---|---|---|---|---|---|---|")
    measure(model, "usual")
    if not arguments.usual:
        measure(model, "open", *OPEN)


if __name__ == "__main__":
    main()
