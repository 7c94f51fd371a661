"""``llamapipe serve`` in a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import TracebackType

from support.control import PATIENCE_S
from support.run_script import environment

COMMAND = [sys.executable, "-c", "import sys; from llamapipe_command import main; sys.exit(main())", "serve"]


class ServerProcess:
    """A server on a free port; ``url`` is known when it answers. ``arguments``: of the command, after ``serve``."""

    def __init__(self, *arguments: str, cwd: Path, env: dict[str, str] | None = None) -> None:
        self.errors: deque[str] = deque(maxlen=50)
        self._process = subprocess.Popen(
            [*COMMAND, "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=env or environment(),
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._reader = Thread(target=self.errors.extend, args=(self._process.stderr,), daemon=True)
        self._reader.start()
        self.lines: list[str] = []
        for line in self._process.stdout:
            self.lines.append(line)
            if "Ctrl-C" in line:
                break
        found = re.search(r"http://\S+:\d+", "".join(self.lines))
        if found is None:
            self.kill()
            raise AssertionError(f"{self.lines}\n{''.join(self.errors)}")
        self.url = found[0]

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def end(self) -> None:
        """Ends it with SIGTERM and waits, as a restart of the service does. ``kill`` closes its pipes."""
        self._process.terminate()
        self._process.wait(timeout=300)

    def kill(self) -> None:
        """Ends it at once, as a crash does. A second call does nothing."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()


@contextmanager
def supervisor(
    *arguments: str, says: str, log: Path, env: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``llamapipe serve`` with processes of its own, on a free port: the process, and its URL.

    ``says``: in its first line. Its standard error goes into ``log``. SIGTERM ends it, and it ends the others.
    """
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [*COMMAND, "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=log.parent,
            env=env or environment(),
        ) as process,
    ):
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert says in first, log.read_text()
            yield process, first.split(" at ")[1].split()[0]
        finally:
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(PATIENCE_S)
            finally:
                process.kill()
