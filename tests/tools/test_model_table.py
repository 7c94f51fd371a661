"""The page "Which models" says what engines do with each kind of model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_says_what_engines_do() -> None:
    command = [sys.executable, str(ROOT / "tools" / "model_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
