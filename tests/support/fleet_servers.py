"""``llamapipe serve --models`` and ``--workers`` as processes of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from support.control import PATIENCE_S, wait_until
from support.run_script import environment
from support.server_process import ServerProcess

N_LONG = 1500
LONG = {"prompt": "Once upon a time", "max_tokens": N_LONG, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}


class _Server(ServerProcess):
    """A running process with others below it, which it ends with itself, and a client of it."""

    def __init__(self, *arguments: str, log: Path, env: dict[str, str] | None = None, **headers: str) -> None:
        super().__init__(*arguments, cwd=log.parent, env=env, log=log)
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S, headers=headers)

    def __exit__(self, *_: object) -> None:
        self.client.close()
        try:
            self.end()
        finally:
            self.kill()

    def values(self) -> dict[str, float]:
        """The metrics."""
        text = self.client.get("/metrics").text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}


# ---- several models
class PoolServer(_Server):
    """A running front process."""

    def ask(self, model: str, **more: Any) -> httpx.Response:
        """One short request."""
        return self.client.post("/v1/completions", json={"model": model, **SHORT, **more})

    def states(self) -> dict[str, str]:
        """The models' states, by their first names."""
        models = self.client.get("/v1/models").json()["data"]
        return {model["id"]: model["status"]["value"] for model in models if "root" not in model}

    def loaded(self) -> list[str]:
        """The models that are loaded."""
        return sorted(name for name, state in self.states().items() if state == "loaded")

    def wait_for(self, **states: str) -> None:
        """Returns when the models have these states."""
        wait_until(lambda: {name: self.states()[name] for name in states} == states)

    def pids(self, model: str) -> list[int]:
        """The processes that were started for a model."""
        return [int(n) for n in re.findall(rf"\b{model} loads in process (\d+)", self.log())]

    def metric(self, name: str) -> float:
        """One value of the metrics; 0 if there is none."""
        return self.values().get(name, 0.0)


def pool_server(models: Path | str, *options: str, log: Path, **variables: str) -> PoolServer:
    """A server of these models. ``variables``: of its environment.

    Streams have no signs of life, unless ``options`` ask for them: a test waits for their first token.
    """
    return PoolServer("--models", str(models), "--ping", "60", *options, log=log, env=environment(variables))


# ---- several workers
class WorkerState(NamedTuple):
    """A worker, as the metrics tell."""

    number: int
    pid: int
    state: str
    n_open: int


class WorkerServer(_Server):
    """A running supervisor with its workers."""

    def workers(self, state: str = "ready") -> list[WorkerState]:
        """The workers in a state."""
        workers = []
        for name, value in self.values().items():
            if name.startswith("llamapipe_worker_connections{"):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', name))
                workers.append(
                    WorkerState(int(labels["worker"]), int(labels["pid"]), labels["state"], int(value))
                )
        return sorted(worker for worker in workers if worker.state == state)

    def pids(self) -> list[int]:
        """The numbers of the processes that are ready."""
        return [worker.pid for worker in self.workers()]


def worker_server(n: int, *options: str, log: Path) -> WorkerServer:
    """A server with ``n`` workers and the bundled model, ready."""
    # Each request opens a connection. (A client takes long to make: it reads certificates.)
    return WorkerServer("--workers", str(n), *options, log=log, connection="close")


def has_ended(pid: int) -> bool:
    """Whether a process is no more; one that its parent has not waited for counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for_end(pids: list[int]) -> None:
    """Returns when none of these processes runs."""
    wait_until(lambda: all(has_ended(pid) for pid in pids))


class LongStream:
    """A stream of 1,500 tokens, whose first event has arrived. ``worker``: the number of the one that serves it."""

    def __init__(self, server: WorkerServer) -> None:
        self._context = server.client.stream("POST", "/v1/completions", json=LONG)
        self._answer = self._context.__enter__()
        assert self._answer.status_code == 200
        self.worker = int(self._answer.headers["x-llamapipe-worker"])
        self._lines = self._answer.iter_lines()
        next(self._lines)

    def finishes(self) -> bool:
        """Reads the rest: whether it came to its end."""
        last = ""
        try:
            for line in self._lines:
                last = line or last
        except httpx.TransportError:
            return False
        finally:
            self._context.__exit__(None, None, None)
        return last == "data: [DONE]"
