"""Runs NVIDIA Dynamo's frontend and our workers as processes, on loopback and without etcd."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import httpx

from support.control import PATIENCE_S
from support.run_script import environment, free_port

PLANES = ("--discovery-backend", "file", "--event-plane", "zmq")


class DynamoProcess:
    """One process of Dynamo; its output goes to a file in the folder."""

    def __init__(self, folder: Path, name: str, *command: str) -> None:
        self.log = folder / f"{name}.log"
        variables = {
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
            "HOME": str(folder),
            "XDG_CACHE_HOME": str(folder),
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command, *PLANES],
                cwd=folder,
                env={**environment(), **variables},
                stdout=log,
                stderr=log,
            )

    def signal(self, number: signal.Signals) -> int:
        """Sends a signal and returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Cluster:
    """A frontend at ``url`` and workers, which ``start`` adds; their logs stay in the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "discovery").mkdir()
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._frontend = DynamoProcess(
            folder,
            "frontend",
            *("dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)),
            *("--migration-limit", "3"),
        )
        self.workers: list[DynamoProcess] = []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self.workers, self._frontend):
            process.close()

    def start(self, n: int, *arguments: str) -> None:
        """Adds ``n`` workers and waits until the frontend knows them."""
        for _ in range(n):
            name = f"worker-{len(self.workers)}"
            command = ("llamapipe.dynamo", "--served-model-name", "story", "--n-threads", "1", *arguments)
            self.workers.append(DynamoProcess(self._folder, name, *command))
        deadline = monotonic() + PATIENCE_S
        while not self._knows(len(self.workers)):
            assert all(worker.process.poll() is None for worker in self.workers), "a worker ended"
            assert monotonic() < deadline, "the frontend does not find the workers"

    def _knows(self, n: int) -> bool:
        try:
            health = httpx.get(f"{self.url}/health", timeout=PATIENCE_S).json()
            models = httpx.get(f"{self.url}/v1/models", timeout=PATIENCE_S).json()
        except httpx.TransportError:
            return False
        instances = [
            instance for instance in health.get("instances", ()) if instance["endpoint"] == "generate"
        ]
        return len(instances) == n and any(model["id"] == "story" for model in models["data"])

    def complete(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """The answer to a request that is not streamed."""
        return httpx.post(f"{self.url}{path}", json={"model": "story", **body}, timeout=PATIENCE_S)
