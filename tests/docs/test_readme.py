"""The documentation's programs run as they stand, and the README begins with the project's commands."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import llamapipe as lp

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
FIRST_SCREEN = 20  # lines


def programs() -> list[object]:
    """Every Python block of every page, named by the page and the block's first line."""
    found: list[object] = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, block.start()) + 2
            found.append(pytest.param(block[1], id=f"{page.relative_to(ROOT).as_posix()}:{line}"))
    return found


PROGRAMS = programs()


def test_the_two_commands_are_on_the_first_screen() -> None:
    first = re.search(r"```sh\n(.*?)```", README, re.DOTALL)
    assert first is not None
    assert README.count("\n", 0, first.start()) < FIRST_SCREEN
    commands = [line.partition("#")[0].strip() for line in first[1].splitlines()]
    assert commands == ["pip install . && llamapipe demo", "pip install nox && nox -s tests"]


def test_the_readme_is_short() -> None:
    assert README.count("\n") <= 180


@pytest.mark.parametrize("code", PROGRAMS)
def test_programs_run_as_they_stand(code: str, tmp_path: Path) -> None:
    folder = tmp_path
    harness = "import lm_eval" in code
    if harness:
        if not list(importlib.metadata.distributions(name="lm_eval")):
            pytest.skip("lm-evaluation-harness is not installed; `nox -s lm_eval` installs it")
        folder = ROOT  # its tasks are in a clone
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(tmp_path / "example.py")],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(lp.__file__).parent.parent)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert harness or not done.stderr  # the harness writes its own messages there
    assert done.stdout


def test_every_python_block_is_run() -> None:
    n_blocks = sum(page.read_text(encoding="utf-8").count("```python") for page in PAGES)
    assert len(PROGRAMS) == n_blocks
    assert README.count("```python") >= 5
