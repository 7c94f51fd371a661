"""Tries an installed llamapipe from end to end: run ``python native_build/wheels/smoke.py`` with its Python.

It runs wherever a wheel does, and needs nothing else. It tries `doctor`, the demo, four concurrent requests and, if the
extra ``server`` is installed, a server that streams an answer and drains. The last lines are the text of the four
requests, which is the same for every Python, and whether there is a GIL. ``--brief`` omits the demo, for devices on
which it takes minutes; ``--device NAME`` requires a device of that backend.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from importlib.util import find_spec
from typing import IO

COMMAND = (sys.executable, "-c", "import sys; from llamapipe_command import main; sys.exit(main())")
# Imports of `llamapipe serve`. Without one of them, the command names the missing extra, and the server is not tried.
SERVER = ("starlette", "uvicorn", "httptools", "msgspec", "prometheus_client", "jinja2", "llguidance")
PATIENCE_S = 300.0
PROMPT = "Once upon a time"


class SmokeError(Exception):
    """A fault of the installed package."""


def run(*arguments: str, statuses: Sequence[int] = (0,)) -> str:
    """Run ``llamapipe ARGUMENTS`` and return its output. Raises SmokeError if it fails or prints nothing."""
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, check=False, timeout=2 * PATIENCE_S)
    output = done.stdout.decode("utf-8", "replace")
    if done.returncode not in statuses or not output:
        lines = (output + done.stderr.decode("utf-8", "replace")).strip().splitlines()
        last = "\n".join(lines[-15:])
        raise SmokeError(f"llamapipe {' '.join(arguments)} ended with {done.returncode}:\n{last}")
    return output


def check_doctor(devices: Sequence[str]) -> None:
    """Check that `doctor` reports no problem, and a device of each requested backend. Raises SmokeError."""
    report = json.loads(run("doctor", "--json", statuses=(0, 1)))
    if wrong := [finding for finding in report["findings"] if not finding["ok"]]:
        raise SmokeError(f"doctor finds problems: {json.dumps(wrong, indent=1)}")
    backends = {str(device["backend"]).lower() for device in report["devices"]}
    if missing := set(devices) - backends:
        raise SmokeError(
            f"no device for {', '.join(sorted(missing))}, only for {', '.join(sorted(backends))}; "
            "on Debian, ci/setup_vulkan_debian.sh and GGML_VK_VISIBLE_DEVICES=0 set up a software device for Vulkan"
        )


def text_of_four() -> str:
    """Return the text of four equal, concurrent requests. Raises SmokeError if their texts differ."""
    import llamapipe as lp

    params = lp.SamplingParams(max_tokens=24, temperature=0)
    with lp.Model.demo() as model, lp.Engine(model, n_threads=1) as engine:
        texts = {done.text for done in engine.generate([PROMPT] * 4, params)}
    if len(texts) != 1:
        raise SmokeError(f"equal requests have different texts: {texts}")
    return texts.pop()


def check_server(expected: str) -> None:
    """Check that a server streams the same text, and ends with status 0 when it is told to. Raises SmokeError."""
    flags = 0
    if sys.platform == "win32":
        flags = subprocess.CREATE_NEW_PROCESS_GROUP
    command = [*COMMAND, "serve", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, creationflags=flags)
    assert server.stdout is not None and server.stderr is not None
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    errors: list[bytes] = []

    def read(pipe: IO[bytes]) -> None:
        for line in pipe:
            lines.put(line.decode("utf-8", "replace"))
        lines.put(None)

    readers = [
        threading.Thread(target=read, args=(server.stdout,)),
        threading.Thread(target=errors.extend, args=(server.stderr,)),
    ]
    for reader in readers:
        reader.start()
    problem = ""
    try:
        text = _streamed(_url(lines))
        if text != expected:
            raise SmokeError(f"the server streams {text!r} instead of {expected!r}")
        if _ask_to_end(server) and (status := server.wait(PATIENCE_S)) != 0:
            raise SmokeError(f"the server ended with status {status}")
    except (SmokeError, OSError, queue.Empty, subprocess.TimeoutExpired) as error:
        problem = str(error) or type(error).__name__
    finally:
        server.kill()
        server.wait()
        for reader in readers:
            reader.join()
        server.stdout.close()
        server.stderr.close()
    if problem:
        raise SmokeError(f"{problem}\n{b''.join(errors[-15:]).decode('utf-8', 'replace')}")


def _ask_to_end(server: subprocess.Popen[bytes]) -> bool:
    """Send the signal that drains a server; return False if that is not possible, as without a console under Wine."""
    if sys.platform != "win32":
        server.terminate()
        return True
    try:
        server.send_signal(signal.CTRL_BREAK_EVENT)
    except OSError as error:
        print(f"the server was not told to end: {error}")
        return False
    return True


def _url(lines: queue.SimpleQueue[str | None]) -> str:
    """Return the address that a server prints when it is ready."""
    while (line := lines.get(timeout=PATIENCE_S)) is not None:
        if match := re.search(r"http://\S+:\d+", line):
            return match[0]
    raise SmokeError("llamapipe serve ended before it answered")


def _streamed(url: str) -> str:
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    text = ""
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        for line in answer:
            data = line.decode("utf-8").removeprefix("data:").strip()
            if data == "[DONE]":
                return text
            if data.startswith("{"):
                text += "".join(choice["text"] for choice in json.loads(data)["choices"])
    raise SmokeError("the stream ended without [DONE]")


def main() -> int:
    """Try everything. At the first failure, print it and return 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--brief", action="store_true", help="without the demo")
    parser.add_argument(
        "--device", action="append", default=[], metavar="NAME", help="a backend, in lower case"
    )
    args = parser.parse_args()
    os.environ["PYTHONUTF8"] = "1"
    try:
        check_doctor(args.device)
        if not args.brief:
            run("demo")
        text = text_of_four()
        if missing := [name for name in SERVER if find_spec(name) is None]:
            print(f"server: not tried without {', '.join(missing)}")
        else:
            check_server(text)
            print("server: streamed an answer")
    except SmokeError as error:
        print(error)
        return 1
    print(ascii(text))
    print("GIL:", getattr(sys, "_is_gil_enabled", lambda: True)())
    return 0


if __name__ == "__main__":
    sys.exit(main())
