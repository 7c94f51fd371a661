"""``llamapipe serve --models`` with real models: the budget, a crash, loads beside streams, the price of the front.

    python benchmarks/bench_several_models.py SMALL.gguf LARGE.gguf EMBED.gguf
    python benchmarks/bench_several_models.py SMALL.gguf LARGE.gguf EMBED.gguf --only through --rounds 7

- ``mixed``: clients ask all three models in random order, under a budget in which two have room. The memory of all
  model processes is sampled. Halfway one process is killed, which may cost the requests that it has.
- ``yields``: a stream of the large model while the small one loads, in tokens per second, against before and after.
- ``through``: streams of the large model through the front process, and from a server that has only this model, in
  turns; and the processor time of the front process for a stream, which says more on a busy machine.

It takes some minutes. Raises AssertionError where a request is not answered or the budget is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from bench_server import over_http
from local_server import SERVE, cpu_seconds, running

from llamapipe.cli._models_file import read_facts
from llamapipe.fleet.catalog import ModelEntry
from llamapipe.host.memory import resident_bytes

COMMON = {"n_ctx": 2048, "n_seq_max": 4}
SLOTS = 32  # of a model whose streams are compared
SAMPLE_S = 0.05
NAMES = ("small", "large", "embed")
STORY = "Once upon a time there was a fox who lived in a wood with many friends. "


class Front:
    """A running server of several models; ``log`` is its standard error, ``pid`` its front process."""

    def __init__(self, url: str, log: Path, pid: int) -> None:
        self.url = url
        self.pid = pid
        self.client = httpx.Client(base_url=url, timeout=60)
        self.port = int(url.rsplit(":", 1)[1])
        self._log = log

    def pids(self, name: str = r"\w+") -> list[int]:
        """The processes that were started for a model, or for all."""
        return [int(n) for n in re.findall(rf"\b{name} loads in process (\d+)", self._log.read_text())]

    def states(self) -> dict[str, str]:
        """The state of each model."""
        there = self.client.get("/v1/models").json()["data"]
        return {model["id"]: model["status"]["value"] for model in there}

    def wait_for(self, name: str, state: str) -> None:
        """Returns when a model has a state."""
        while self.states()[name] != state:
            time.sleep(0.1)  # asking takes time from what is measured


@contextmanager
def front(files: dict[str, Path], memory: int | None, **options: int) -> Iterator[Front]:
    """A server of these models."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "models.toml")
        listed.write_text("".join(f"[models.{name}]\nfile = {str(path)!r}\n" for name, path in files.items()))
        log = Path(folder, "log")
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        command = [*SERVE, "--models", str(listed), "--port", "0", *arguments]
        if memory is not None:
            command += ["--memory", str(memory)]
        # As an installed package: without bytecode, compiling the sources is a third of a small model's load.
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(Path(folder, "bytecode"))}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with log.open("w") as errors:
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
        try:
            assert child.stdout is not None
            first = child.stdout.readline()
            assert " at http" in first, log.read_text()
            yield Front(first.split(" at ")[1].split()[0], log, child.pid)
        finally:
            child.terminate()
            child.wait()


class Sampler:
    """Samples the memory of processes from another thread, until the end of its ``with`` block."""

    def __init__(self, server: Front) -> None:
        self.peak = 0
        self._server = server
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.peak = max(self.peak, sum(resident_bytes(pid) for pid in self._server.pids()))

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def mixed(files: dict[str, Path], n_requests: int, n_clients: int) -> None:
    """Random requests of several clients for all models."""
    needs = {name: read_facts(COMMON, ModelEntry(name, str(path))).n_bytes for name, path in files.items()}
    budget = sum(sorted(needs.values())[-2:])
    print(
        f"needs {', '.join(f'{name} {n >> 20} MiB' for name, n in needs.items())}; budget {budget >> 20} MiB"
    )
    outcomes: Counter[str] = Counter()
    done = threading.Semaphore(0)
    waits: list[float] = []

    def client(seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=server.url, timeout=600) as http:
            for _ in range(n_requests // n_clients):
                name = rng.choice(NAMES)
                began = time.perf_counter()
                outcomes[f"{name} {ask(http, name, rng)}"] += 1
                waits.append(time.perf_counter() - began)
                done.release()

    def ask(http: httpx.Client, name: str, rng: random.Random) -> str:
        if name == "embed":
            answer = http.post("/v1/embeddings", json={"model": name, "input": [STORY] * rng.randint(1, 8)})
            return str(answer.status_code)
        text = STORY * rng.randint(1, 20)
        body: dict[str, Any] = {"model": name, "max_tokens": rng.randint(1, 24), "stream": rng.random() < 0.5}
        if rng.random() < 0.5:
            answer = http.post("/v1/completions", json={**body, "prompt": text})
        else:
            answer = http.post(
                "/v1/chat/completions", json={**body, "messages": [{"role": "user", "content": text}]}
            )
        if not body["stream"] or answer.status_code != 200:
            return str(answer.status_code)
        last = [line for line in answer.text.splitlines() if line.startswith("data: ")][-1]
        return "200" if last == "data: [DONE]" else f"stream ended: {json.loads(last[6:])['error']['code']}"

    with front(files, budget, **COMMON) as server, Sampler(server) as memory:
        began = time.perf_counter()
        with ThreadPoolExecutor(n_clients) as threads:
            clients = [threads.submit(client, seed) for seed in range(n_clients)]
            for _ in range(n_requests // 2):
                done.acquire()
            while server.states()["large"] != "loaded":
                time.sleep(0.01)
            os.kill(server.pids("large")[-1], signal.SIGKILL)
            for running in clients:
                running.result()
        seconds = time.perf_counter() - began
        n_loads = len(server.pids())
    print(f"{sum(outcomes.values())} requests of {n_clients} clients in {seconds:.0f} s, {n_loads} loads")
    print(
        f"longest {max(waits):.1f} s, median {statistics.median(waits):.2f} s; memory at most {memory.peak >> 20} MiB"
    )
    for what, n in sorted(outcomes.items()):
        print(f"  {what}: {n}")
    assert all(what.endswith(" 200") or what.startswith("large") for what in outcomes), (
        "a request was not answered"
    )
    assert memory.peak <= budget, "the budget was exceeded"


def yields(files: dict[str, Path], rounds: int) -> None:
    """A stream while another model loads."""
    with front(files, None, **COMMON) as server:
        body = {
            "model": "large",
            "prompt": STORY,
            "max_tokens": 1900,
            "ignore_eos": True,
            "stream": True,
            "temperature": 1.5,
            "repeat_penalty": 1.5,
        }
        arrived: list[float] = []
        ended = threading.Event()

        def read() -> None:
            with httpx.Client(base_url=server.url, timeout=600) as http:
                while not ended.is_set():
                    with http.stream("POST", "/v1/completions", json=body) as answer:
                        for line in answer.iter_lines():
                            if line:
                                arrived.append(time.perf_counter())
                            if ended.is_set():
                                return

        def rate(began: float, end: float) -> float:
            return sum(began <= at < end for at in list(arrived)) / (end - began)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            server.wait_for("large", "loaded")
            while len(arrived) < 20:
                time.sleep(0.05)
            ratios, seconds = [], []
            for _ in range(rounds):
                times = [time.perf_counter()]
                time.sleep(3)
                times.append(time.perf_counter())
                server.client.post("/models/load", json={"model": "small"}).raise_for_status()
                server.wait_for("small", "loaded")
                times.append(time.perf_counter())
                time.sleep(3)
                times.append(time.perf_counter())
                alone = (rate(times[0], times[1]) + rate(times[2], times[3])) / 2
                ratios.append(rate(times[1], times[2]) / alone)
                seconds.append(times[2] - times[1])
                server.client.post("/models/unload", json={"model": "small"}).raise_for_status()
                server.wait_for("small", "unloaded")
        finally:
            ended.set()
            thread.join()
    ratio_texts = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(
        f"while a model loads ({statistics.median(seconds):.1f} s), a stream has "
        f"{statistics.median(ratios):.2f} of its speed ({ratio_texts})"
    )


def through(files: dict[str, Path], rounds: int, streams: list[int], n_tokens: int) -> None:
    """The same streams with and without the front process."""
    rng = random.Random(1)
    path = files["large"]
    options = {"n_ctx": 256, "n_seq_max": SLOTS}
    command = [*SERVE, "-m", path, "--alias", "large", "--n-ctx", 256, "--n-seq-max", SLOTS]
    with front({"large": path}, None, **options) as server, running(*command) as direct:
        sides = {
            "direct": over_http(direct.port, n_tokens, "large"),
            "front": over_http(server.port, n_tokens, "large"),
        }
        for n in streams:
            rates: dict[str, list[float]] = {name: [] for name in sides}
            firsts: dict[str, list[float]] = {name: [] for name in sides}
            costs = []
            for i in range(rounds + 1):
                prompts = [[rng.randint(1000, 20_000) for _ in range(16)] for _ in range(n)]
                for name in sorted(sides, reverse=bool(i % 2)):
                    before = cpu_seconds(server.pid)
                    result = sides[name](prompts)
                    if i and name == "front":
                        costs.append((cpu_seconds(server.pid) - before) / n)
                    if i:  # the first one warms up
                        rates[name].append(result.rate)
                        firsts[name].append(result.first_s)
            ratio = statistics.median(a / b for a, b in zip(rates["front"], rates["direct"], strict=True))
            later_ms = 1e3 * statistics.median(
                a - b for a, b in zip(firsts["front"], firsts["direct"], strict=True)
            )
            print(
                f"{n:>3} streams: {statistics.median(rates['front']):.1f} tokens/s, {ratio:.3f} of direct; "
                f"first token {later_ms:+.1f} ms; the front computes {1e3 * statistics.mean(costs):.2f} ms a stream"
            )


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("small", type=Path)
    parser.add_argument("large", type=Path)
    parser.add_argument("embed", type=Path)
    parser.add_argument("--only", choices=("mixed", "yields", "through"))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    files = {name: getattr(args, name).absolute() for name in NAMES}
    if args.only in (None, "mixed"):
        mixed(files, args.requests, args.clients)
    if args.only in (None, "yields"):
        yields(files, args.rounds)
    if args.only in (None, "through"):
        through(files, args.rounds, args.streams, args.tokens)


if __name__ == "__main__":
    main()
