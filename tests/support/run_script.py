"""Runs Python programs in processes of their own and talks with them over pipes; who waits, waits for a line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import llamapipe

LIMIT_S = 120.0  # a program that takes longer is killed, and its test fails

# A shell that runs us in the background lets its children ignore SIGINT; a terminal does not.
_PREAMBLE = """\
import signal as _signal, sys
_signal.signal(_signal.SIGINT, _signal.default_int_handler)
def say(*what):
    print(*what, flush=True)
"""


def command(program: str, *arguments: object, flags: tuple[str, ...] = ()) -> list[str]:
    """The command line that runs ``program``, which has ``say`` to print a line, with ``arguments`` in ``sys.argv``."""
    return [sys.executable, "-X", "faulthandler", *flags, "-c", _PREAMBLE + program, *map(str, arguments)]


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours, with the package that is tested found first wherever the program runs, then ``support``."""
    folders = (Path(llamapipe.__file__).parent.parent, Path(__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), **(changes or {})}


def free_port() -> int:
    """A port of the loopback that nobody uses now, for programs that cannot choose one themselves."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def heed_ctrl_c() -> None:
    """For ``preexec_fn``: a shell that runs the tests in the background has its children ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def without_size_warning(stderr: str) -> str:
    """Drops the warning that ``n_ctx`` exceeds the training context: tests do that on purpose, on tiny models."""
    lines = stderr.splitlines(keepends=True)
    return "".join(line for line in lines if "but the model was trained with" not in line)


def run_script(
    program: str,
    *arguments: object,
    flags: tuple[str, ...] = (),
    exit_code: int = 0,
    env: Mapping[str, str] | None = None,
) -> str:
    """What the program wrote to stdout. Fails for another exit code, anything on stderr, and after ``LIMIT_S``."""
    out, err = run_script_with_errors(program, *arguments, flags=flags, exit_code=exit_code, env=env)
    assert not err, err
    return out


def run_script_with_errors(
    program: str,
    *arguments: object,
    flags: tuple[str, ...] = (),
    exit_code: int = 0,
    env: Mapping[str, str] | None = None,
) -> tuple[str, str]:
    """What the program wrote to stdout and to stderr. Fails for another exit code, and after ``LIMIT_S``."""
    done = subprocess.run(
        command(program, *arguments, flags=flags),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=environment(env),
    )
    assert done.returncode == exit_code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout, without_size_warning(done.stderr)


class Script:
    """A running program; use with ``with``: it is killed if it has not ended by then, or after ``LIMIT_S``."""

    def __init__(self, program: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            command(program, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self._watchdog = threading.Timer(LIMIT_S, self._process.kill)
        self._watchdog.start()

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._watchdog.cancel()
        self._watchdog.join()
        self._process.communicate()

    def expect(self, line: str) -> None:
        """Reads the next line of the program, which must be this one."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if answer != line + "\n":
            out, err = self._process.communicate(timeout=LIMIT_S) if not answer else ("", "")
            raise AssertionError(f"expected {line!r}, not {answer + out!r}\n{err}")

    def tell(self, line: str) -> None:
        """Writes a line to the program's standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; Ctrl-C is SIGINT."""
        self._process.send_signal(number)

    def end(self, exit_code: int = 0) -> tuple[str, str]:
        """Waits for the program's end; what it wrote since the last line that was read, and to stderr."""
        out, err = self._process.communicate(timeout=LIMIT_S)
        assert self._process.returncode == exit_code, f"exit code {self._process.returncode}\n{out}\n{err}"
        return out, without_size_warning(err)
