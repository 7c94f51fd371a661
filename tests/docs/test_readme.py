"""The documentation's programs run as they stand, and the README begins with the project's commands."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import PAGES, ROOT, Program, programs
from support.ray_programs import ALONE

import llamapipe as lp

README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_SCREEN = 20  # lines
PROGRAMS = programs()


def test_the_two_commands_are_on_the_first_screen() -> None:
    first = re.search(r"```sh\n(.*?)```", README, re.DOTALL)
    assert first is not None
    assert README.count("\n", 0, first.start()) < FIRST_SCREEN
    commands = [line.partition("#")[0].strip() for line in first[1].splitlines()]
    assert commands == ["pip install . && llamapipe demo", "pip install nox && nox -s tests"]


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 1200


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            program,
            id=program.name,
            marks=[pytest.mark.lm_eval] * program.uses_harness + [pytest.mark.ray] * program.uses_ray,
        )
        for program in PROGRAMS
    ],
)
def test_programs_run_as_they_stand(program: Program, tmp_path: Path) -> None:
    folder = tmp_path
    if program.uses_harness:
        if not list(importlib.metadata.distributions(name="lm_eval")):
            pytest.skip("lm-evaluation-harness is not installed; `nox -s lm_eval` installs it")
        folder = ROOT  # its tasks are in a clone
    if program.uses_ray and not list(importlib.metadata.distributions(name="ray")):
        pytest.skip("Ray is not installed; `nox -s ray` installs it")
    # Others' packages have warnings, and messages, of their own.
    is_ours = not program.uses_harness and not program.uses_ray
    done = subprocess.run(
        [
            sys.executable,
            *(("-W", "default") if program.uses_ray else ("-W", "error")),
            str(program.save(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env={
            **os.environ,
            **(ALONE if program.uses_ray else {}),
            "PYTHONPATH": str(Path(lp.__file__).parent.parent),
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (is_ours and done.stderr)
    assert done.stdout


def test_every_python_block_is_run() -> None:
    n_blocks = sum(page.read_text(encoding="utf-8").count("```python") for page in PAGES)
    assert len(PROGRAMS) == n_blocks
    assert README.count("```python") >= 1
    assert (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8").count("```python") >= 8
