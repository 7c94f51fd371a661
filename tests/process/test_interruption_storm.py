"""Calls that are interrupted at random instants: nothing hangs, nothing is left, and others get the right texts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.run_script import environment

PROGRAM = Path(__file__).resolve().parent.parent / "support" / "interruption_storm.py"


@pytest.mark.native
@pytest.mark.skipif(sys.platform == "win32", reason="needs timers that send signals")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="event loops survive Ctrl-C from Python 3.11 on")
def test_a_storm_of_interruptions(tmp_path: Path) -> None:
    """``nox -s storm`` makes a longer one."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM, "3000", "1"],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= 3000
