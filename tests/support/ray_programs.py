"""Programs on a Ray of their own: a small one on loopback, whose processes end with the program."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from support.control import wait_until
from support.run_script import environment

PATIENCE_S = 240.0
PROC = Path("/proc")
_STARTED = 19  # the field of /proc/PID/stat after the name that tells when the process started
# No reports of its use, and no cluster: then Ray listens on loopback only, on any system.
ALONE = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Logical CPUs: the filter of a job that is resumed is an actor, too, and so are the parts of Ray Serve.
START = """
import logging, os, sys
import ray
import llamapipe as lp
import llamapipe.ray as lr
def start(num_cpus=6):
    ray.init(num_cpus=num_cpus, object_store_memory=200 * 2**20, include_dashboard=False,
             logging_level="error", log_to_driver=False)
"""


class RayProgram:
    """A running program, with what it wrote so far; use with ``with``, which ends it and all it started."""

    def __init__(self, folder: Path, text: str, *arguments: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"log-{time.monotonic_ns()}"
        env = environment({**ALONE, "RAY_DATA_DISABLE_PROGRESS_BARS": "1"})
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", START + text, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
            )

    def __enter__(self) -> RayProgram:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()

    @property
    def output(self) -> str:
        """What it wrote."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, what: str) -> None:
        """Waits until the program has written this, and fails if it ends before."""
        self.wait_until(lambda: what in self.output)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Waits until this holds, and fails, with what the program wrote, if it ends before."""

        def holds() -> object:
            value = condition()
            assert value or self.alive(), f"the program ended\n{self.output}"
            return value

        try:
            wait_until(holds, every_s=0.05, within_s=PATIENCE_S)
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.output}") from None

    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def tell(self, line: str) -> None:
        """Writes a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def end(self) -> str:
        """Waits for its end, which must be a good one; what it wrote."""
        self._process.wait(timeout=PATIENCE_S)
        assert self._process.returncode == 0, f"exit code {self._process.returncode}\n{self.output}"
        return self.output

    def workers(self, title: str | re.Pattern[str]) -> list[Process]:
        """Its Ray workers whose titles have this in them."""
        return [process for process in self._started() if re.search(title, process.title())]

    def kill(self) -> None:
        """Kills the program with SIGKILL, and waits until all that it started has ended, too."""
        started = self._started()
        self._process.kill()
        self._process.wait()

        def have_ended() -> bool:
            left = [process for process in started if process.is_alive()]
            for process in left:
                process.kill()
            return not left

        wait_until(have_ended, every_s=0.05, within_s=PATIENCE_S)

    def _started(self) -> list[Process]:
        """All processes that it started and that run; none once it has ended."""
        if self._process.poll() is not None:
            return []
        parents = {
            int(entry.name): _stat(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit()
        }
        pids, new = set[int](), {self._process.pid}
        while new:
            new = {pid for pid, stat in parents.items() if stat and int(stat[1]) in new} - pids
            pids |= new
        return [Process(pid, parents[pid][_STARTED]) for pid in sorted(pids)]


class Process(NamedTuple):
    """A process that a program started. Its number may be another's by now; the time when it started is its own."""

    pid: int
    started: str

    def title(self) -> str:
        """Its command line."""
        try:
            return (PROC / str(self.pid) / "cmdline").read_bytes().decode("utf-8", "replace")
        except OSError:
            return ""

    def is_alive(self) -> bool:
        """Whether it runs."""
        stat = _stat(self.pid)
        return bool(stat) and stat[_STARTED] == self.started and stat[0] != "Z"

    def kill(self) -> None:
        """Kills it with SIGKILL, if it runs."""
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                if self.is_alive():
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name; the first is the state."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
