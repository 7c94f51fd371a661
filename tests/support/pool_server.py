"""``llamapipe serve --models`` as a process of its own."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from support.control import PATIENCE_S, wait_until
from support.run_script import environment
from support.server_process import supervisor

LONG = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}


class PoolServer:
    """A running front process."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self._log = log
        self.client = httpx.Client(base_url=url, timeout=PATIENCE_S)

    def ask(self, model: str, **more: Any) -> httpx.Response:
        """One short request."""
        return self.client.post("/v1/completions", json={"model": model, **SHORT, **more})

    def states(self) -> dict[str, str]:
        """The models' states, by their first names."""
        found = self.client.get("/v1/models").json()["data"]
        return {one["id"]: one["status"]["value"] for one in found if "root" not in one}

    def loaded(self) -> list[str]:
        """The models that are loaded."""
        return sorted(name for name, state in self.states().items() if state == "loaded")

    def wait_for(self, **states: str) -> None:
        """Returns when the models have these states."""
        wait_until(lambda: {name: self.states()[name] for name in states} == states)

    def log(self) -> str:
        """What it has said."""
        return self._log.read_text()

    def pids(self, model: str) -> list[int]:
        """The processes that were started for a model."""
        return [int(n) for n in re.findall(rf"\b{model} loads in process (\d+)", self.log())]

    def metric(self, name: str) -> float:
        """One value of the metrics; 0 if there is none."""
        lines = self.client.get("/metrics").text.splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name} ")), 0.0)


@contextmanager
def pool_server(models: Path | str, *options: str, log: Path, **variables: str) -> Iterator[PoolServer]:
    """A server of these models. Its standard error goes into ``log``. ``variables``: of its environment.

    Streams have no signs of life, unless ``options`` ask for them: a test waits for their first token.
    """
    env = environment(variables)
    with supervisor("--models", str(models), "--ping", "60", *options, says=" at http", log=log, env=env) as (
        process,
        url,
    ):
        server = PoolServer(process, url, log)
        with server.client:
            yield server
