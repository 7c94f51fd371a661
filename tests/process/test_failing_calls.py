"""Allocations of native code and starts of threads that fail, each in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.run_script import environment

SUPPORT = Path(__file__).resolve().parents[1] / "support"
# Of a phase; calls are drawn at random where it has more. `nox -s fuzz`: 400.
N_CHILDREN = int(os.environ.get("LLAMAPIPE_FAILING_CALLS", "30"))
ERRORS = (
    "BackendError",
    "DecodeError",
    "InvalidRequestError",
    "MemoryError",
    "ModelLoadError",
    "RuntimeError",
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The preloaded library."""
    compiler = shutil.which("cc")
    if not sys.platform.startswith("linux") or compiler is None:
        pytest.skip("needs Linux with glibc and a C compiler")
    path = tmp_path_factory.mktemp("failing") / "failing_calls.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", path, SUPPORT / "failing_calls.c", "-ldl"], check=True
    )
    return path


def sweep(library: Path, kind: str, phase: str) -> list[str]:
    """What became of the children."""
    if "san.so" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the sanitizer replaces malloc itself")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SUPPORT / "failing_calls.py"), kind, phase, str(N_CHILDREN)],
        capture_output=True,
        text=True,
        check=True,
        timeout=190 + 2 * N_CHILDREN,
        env=environment({"LD_PRELOAD": str(library), "GGML_NO_BACKTRACE": "1"}),
    )
    return [line.partition(" ")[2] for line in done.stdout.splitlines()[1:]]


@pytest.mark.timeout(240 + 2 * N_CHILDREN)
@pytest.mark.parametrize(
    ("phase", "n_deaths"),
    # While a context is created, ggml frees a graph's memory before it allocates it anew: 2 of 400 calls are fatal.
    [("load", 0), ("make", 2), ("first", 0), ("generate", 0)],
)
def test_memory_runs_out_at_any_allocation(library: Path, phase: str, n_deaths: int) -> None:
    """The call gets a clear error, and the next one works; the engine has to be made anew at most."""
    outcomes = sweep(library, "malloc", phase)
    assert len(outcomes) == N_CHILDREN
    wrong = [outcome for outcome in outcomes if outcome.partition(":")[0] not in (*ERRORS, "completed")]
    assert sum(outcome.startswith("died") for outcome in wrong) == len(wrong) <= n_deaths, wrong[:3]
    # Some allocations are of llama.cpp's log or tried again; most must count.
    assert sum(outcome == "completed" for outcome in outcomes) < N_CHILDREN / 4


def test_no_thread_can_be_started(library: Path) -> None:
    outcomes = sweep(library, "thread", "make")
    assert len(outcomes) == 2, outcomes
    assert "its 2 compute threads could not be started; give a smaller n_threads" in outcomes[0]
    assert outcomes[1].startswith("RuntimeError: can't start new thread")
