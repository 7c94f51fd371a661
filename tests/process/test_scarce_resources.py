"""Limits of memory, descriptors and disks, and time that jumps: a clear error, and nobody else is hurt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.run_script import Script, command, environment, run_script, run_script_with_errors

linux_only = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc, or needs /dev/full"
)

_HEAD = """
import resource, sys
import llamapipe as lp
from llamapipe.errors import LlamapipeError
PARAMS = lp.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
model = lp.Model.demo()
engine = lp.Engine(model, n_ctx=128, n_seq_max=2, n_threads=1)
expected = engine.generate("abc", PARAMS).token_ids
"""


@linux_only
def test_address_space_runs_out() -> None:
    """At 50 limits: a model and an engine are made, or refused; the engine that was there works on."""
    program = f"""{_HEAD}
import ctypes, gc

def attempt():
    with lp.Model(lp.demo_model_path(), use_mmap=False) as other, lp.Engine(other, n_ctx=1024, n_threads=1) as new:
        assert new.generate("abc", PARAMS).token_ids == expected

results = set()
for n_mb in range(int(sys.argv[1]), 132, 2):
    say(n_mb)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    n_now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (n_now + n_mb * 10**6, resource.RLIM_INFINITY))
    try:
        attempt()
        results.add("made")
    except (LlamapipeError, MemoryError, RuntimeError) as error:
        assert type(error) is not RuntimeError or "can't start new thread" in str(error), error
        results.add(type(error).__name__)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    assert engine.generate("abc", PARAMS).token_ids == expected
attempt()
assert "BackendError" in results or int(sys.argv[1]) > 32, results
say("done")
"""
    first, n_ended = 32, 0
    while first < 132:
        done = subprocess.run(
            command(program, first), env=environment(), text=True, capture_output=True, check=False
        )
        limits = done.stdout.split()
        if done.returncode == 0:
            assert limits[-1] == "done"
            break
        # glibc ends the process when a new thread gets no memory for its own data, and nothing can prevent that.
        assert "cannot allocate memory for thread-local data" in done.stderr, done.stderr
        n_ended += 1
        first = int(limits[-1]) + 2
    assert n_ended <= 2, f"of 50 limits, the process ended at {n_ended}"


GROUPS = Path("/sys/fs/cgroup/memory")  # version 1, or:
UNIFIED = Path("/sys/fs/cgroup")


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of this test that may have 400 MB."""
    root = GROUPS if GROUPS.is_dir() else UNIFIED
    group = root / f"llamapipe-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.max" if root is UNIFIED else "memory.limit_in_bytes")).write_text("400000000")
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"control groups of memory cannot be made here: {error}")
    yield group
    group.rmdir()


@linux_only
def test_a_control_group_with_little_memory(small_group: Path) -> None:
    """A context that cannot fit is refused before the kernel ends the process; the engine that was there works on."""
    program = f"""{_HEAD}
from pathlib import Path
(Path(sys.argv[1]) / "cgroup.procs").write_text("0")
for n_ctx in (200_000, 2_000_000):
    try:
        lp.Engine(model, n_ctx=n_ctx, n_seq_max=8).close()
        say("made")
    except LlamapipeError as error:
        assert "0.4 GiB" in str(error), error
    assert engine.generate("abc", PARAMS).token_ids == expected
engine.close()
model.close()
say("done")
"""
    assert run_script(program, str(small_group)) == "done\n"


@linux_only
def test_no_descriptors_are_left() -> None:
    program = f"""{_HEAD}
import os
used = len(os.listdir("/proc/self/fd"))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for n_more in range(-1, 12):
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + n_more, hard))
    try:
        with lp.Model.demo() as other, lp.Engine(other, n_ctx=64) as new:
            new.generate("abc", PARAMS)
    except (LlamapipeError, OSError) as error:
        assert "open files" in str(error) or "Too many" in str(error) or "descriptor" in str(error), error
    assert engine.generate("abc", PARAMS).token_ids == expected
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
with lp.Model.demo() as other, lp.Engine(other, n_ctx=64) as new:
    new.generate("abc", PARAMS)
say("done")
"""
    assert run_script(program) == "done\n"


def test_a_server_without_descriptors_answers_when_some_are_free_again() -> None:
    program = f"""{_HEAD}
import json, os, socket
from llamapipe.server import serve

HEAD = b"POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\nContent-Length: "

def request():
    body = b'{{"prompt": "abc", "max_tokens": 2}}'
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(HEAD + b"%d\\r\\n\\r\\n" % len(body) + body)
        return client.makefile("rb").read().split(b" ")[1]

with serve(engine) as server:
    assert request() == b"200"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    client = socket.create_connection(("127.0.0.1", server.port))  # is open before the limit
    waiting = [socket.socket() for _ in range(4)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(fd) for fd in os.listdir("/proc/self/fd")) + 1, hard))
    for each in waiting:
        each.connect(("127.0.0.1", server.port))
    client.sendall(b"GET /health HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
    assert b"200" in client.recv(1000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert request() == b"200"
    for each in [client, *waiting]:
        each.close()
say("done")
"""
    out, _ = run_script_with_errors(
        program, flags=("-W", "ignore")
    )  # asyncio reports what it could not accept
    assert out.endswith("done\n")


@linux_only
def test_a_full_disk(tmp_path: Path) -> None:
    program = f"""{_HEAD}
import os
engine.trace.start()
engine.generate("abc", PARAMS)
engine.trace.stop()
for name in ("full.json", "full.svg"):
    os.symlink("/dev/full", os.path.join(sys.argv[1], name))
    try:
        engine.trace.save(os.path.join(sys.argv[1], name))
    except OSError as error:
        assert "No space" in str(error), error
    else:
        raise AssertionError(name)
assert engine.generate("abc", PARAMS).token_ids == expected
say("done")
"""
    assert run_script(program, tmp_path) == "done\n"


_STOPPED = f"""{_HEAD}
import threading, time
stream = engine.stream("abc", lp.SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
tokens = list(next(stream).token_ids)
with engine.start("abc", PARAMS) as generation:
    generation.next()
    say("stop me")
    sys.stdin.readline()
    for delta in stream:
        tokens += delta.token_ids
    assert len(tokens) == 100 and tokens[:8] == list(expected), tokens
    generation.next()
time.time = lambda: 0.0  # a clock that was set back
assert engine.generate("abc", PARAMS, timeout=60).token_ids == expected
say("done")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGSTOP")
def test_a_process_that_is_stopped_and_continued() -> None:
    with Script(_STOPPED) as script:
        script.expect("stop me")
        script.send(signal.SIGSTOP)
        script.send(signal.SIGCONT)
        script.tell("go on")
        script.expect("done")
