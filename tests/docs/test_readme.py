"""The README: its commands are the project's, and its Python runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import llamapipe as lp

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_two_commands_stand_at_the_top() -> None:
    first = re.search(r"```sh\n(.*?)```", README, re.DOTALL)
    assert first is not None
    assert first.start() < 40
    commands = [line.partition("#")[0].strip() for line in first[1].splitlines()]
    assert commands == ["pip install . && llamapipe demo", "pip install nox && nox -s tests"]


@pytest.mark.parametrize("code", BLOCKS)
def test_python_runs_as_it_stands(code: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", "example.py"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(lp.__file__).parent.parent)},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_there_is_python_to_run() -> None:
    assert len(BLOCKS) == README.count("```python") >= 5
