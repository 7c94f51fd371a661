"""The prefix cache on a disk that is read-only or slow: a mounted one, and one whose writes wait for a pipe."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.run_script import LIMIT_S, command, environment

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mounts, and preloads a library")
SUPPORT = Path(__file__).resolve().parents[2] / "support"
ASK = """
import os, subprocess, sys
from pathlib import Path
import llamapipe as lp
from llamapipe._engine.runtime import loop
from support.control import wait_until
folder = sys.argv[1]
def ask(engine, i, n=2):
    tokens = [5 + (i * 7 + k * (i + 1)) % 200 for k in range(150)]
    return engine.generate(tokens, lp.SamplingParams(max_tokens=n, temperature=0, ignore_eos=True))
def engine():
    return lp.Engine(lp.demo_model_path(), n_ctx=512, n_threads=1, cache_dir=folder)
"""
MOUNTED = (
    ASK
    + """
def mount(*options):
    subprocess.run(["mount", *options, folder], check=True)
def cached(*prompts):
    with engine() as made:
        say(*(ask(made, i).n_cached_tokens for i in prompts))
mount("-t", "tmpfs", "none")
os.chmod(folder, 0o700)
cached(0)
mount("-o", "remount,ro")
cached(0, 1, 0)
cached(1)
mount("-o", "remount,rw")
cached(1)
cached(1)
mount("-t", "tmpfs", "-o", "ro,mode=700", "none")
cached(0, 0)
"""
)


@pytest.fixture(scope="module")
def own_mounts() -> list[str]:
    """What runs a program with mounts of its own."""
    unshare = ["unshare", "--mount", "--map-root-user"]
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    tried = subprocess.run(
        [*unshare, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"programs may not mount here: {tried.stderr.decode().strip()}")
    return unshare


def test_a_disk_that_is_read_only(own_mounts: list[str], tmp_path: Path) -> None:
    """What it has is used, the rest is computed; it is told once by each engine, also by one that begins there."""
    done = subprocess.run(
        [*own_mounts, *command(MOUNTED, tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0", "149 0 149", "0", "0", "149", "0 149"], done.stderr
    warnings = [line for line in done.stderr.splitlines() if "are not written" in line]
    assert len(warnings) == 3 and all("Read-only file system" in line for line in warnings), done.stderr


SLOW = (
    ASK
    + """
loop.REST_S = 0.01
gate = os.open(os.environ["GATE"], os.O_RDWR)
files = lambda suffix: len(list(Path(folder).glob("*/*" + suffix)))
with engine() as made:
    ask(made, 0)
    wait_until(lambda: files(".part"))  # it is written while there is no work
    n_tokens = sum(len(ask(made, i, 20).token_ids) for i in range(1, 9))
    say(n_tokens, made.stats().n_disk_writes, files(".kv"))
    os.write(gate, b"." * 10_000)
    wait_until(lambda: made.stats().n_disk_writes)
    say(files(".kv") > 0)
"""
)
HANGING = (
    ASK
    + """
loop.CLOSE_S = 0.1
gate = os.open(os.environ["GATE"], os.O_RDWR)
with engine() as made:
    say(len(ask(made, 0).token_ids))
say("closed")
"""
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What makes a disk slow."""
    compiler = shutil.which("cc")
    if compiler is None or "san.so" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("needs a C compiler, and to be preloaded alone")
    path = tmp_path_factory.mktemp("gated") / "gated_disk.so"
    source = SUPPORT / "gated_disk.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", path, source, "-ldl"], check=True)
    return path


def gated(program: str, folder: Path, library: Path) -> list[str]:
    """What a program says whose writes to the folder wait."""
    gate = folder.parent / "gate"
    os.mkfifo(gate)
    changes = {"LD_PRELOAD": str(library), "GATED_FOLDER": str(folder), "GATE": str(gate)}
    done = subprocess.run(
        command(program, folder),
        env=environment(changes),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_nobody_waits_for_a_write(library: Path, tmp_path: Path) -> None:
    assert gated(SLOW, tmp_path / "cache", library) == ["160 0 0", "True"]


def test_a_write_that_hangs_keeps_no_engine_open(library: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert gated(HANGING, folder, library) == ["2", "closed"]
    assert list(folder.glob("*/*.kv")) == []
