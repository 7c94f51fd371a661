"""``llamapipe serve`` in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TypeVar

from support.run_script import environment

COMMAND = [sys.executable, "-c", "import sys; from llamapipe_command import main; sys.exit(main())", "serve"]
Server = TypeVar("Server", bound="ServerProcess")


class ServerProcess:
    """A server on a free port; ``url`` is known when it answers.

    ``arguments``: the command's arguments after ``serve``. ``lines``: its output up to then. ``log``: the file for its
    standard error, a temporary one by default.
    """

    def __init__(
        self, *arguments: str, cwd: Path, env: dict[str, str] | None = None, log: Path | None = None
    ) -> None:
        self._log = NamedTemporaryFile("w") if log is None else log.open("w")  # noqa: SIM115  (kill closes it)
        self.process = subprocess.Popen(
            [*COMMAND, "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=cwd,
            env=env or environment(),
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line)
            if "Ctrl-C" in line:
                break
        url = re.search(r"http://\S+:\d+", "".join(self.lines))
        if url is None:
            message = f"{self.lines}\n{self.log()}"
            self.kill()
            raise AssertionError(message)
        self.url = url[0]

    def __enter__(self: Server) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def log(self) -> str:
        """Return what it has written to standard error."""
        return Path(self._log.name).read_text()

    def end(self) -> None:
        """End it with SIGTERM and wait, as a restart of the service does. ``kill`` closes its pipes."""
        self.process.terminate()
        self.process.wait(timeout=300)

    def kill(self) -> None:
        """End it immediately, as a crash does. A second call does nothing."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
