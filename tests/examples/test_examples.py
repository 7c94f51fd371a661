"""The programs in examples/ run as they stand, say in their first lines what they show, and pass strict type checks."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import programs

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(EXAMPLES.glob("*.py"))
NEEDS = {
    "fastapi_stream": ("fastapi", "httpx"),
    "pandas_column": ("pandas",),
    "extraction": ("llguidance",),
    "scoring_a_list": ("tqdm",),
    "concurrent_summaries": ("tqdm",),
}


def require(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; `nox -s examples` installs it")


def run(arguments: list[str], folder: Path) -> str:
    root = str(EXAMPLES.parent) if (EXAMPLES.parent / "llamapipe" / "native" / "lib").is_dir() else ""
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_are_thirteen() -> None:
    assert len([*PROGRAMS, *EXAMPLES.glob("*.ipynb")]) == 13


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_runs_and_says_what_it_shows(program: Path, tmp_path: Path) -> None:
    assert ast.get_docstring(ast.parse(program.read_text(encoding="utf-8")))
    require(*NEEDS.get(program.stem, ()))
    assert run([str(program)], tmp_path).strip()


def test_the_notebook_runs(tmp_path: Path) -> None:
    require("nbclient", "ipykernel", "tqdm")
    copy = shutil.copy(EXAMPLES / "notebook.ipynb", tmp_path / "notebook.ipynb")
    code = (
        "import nbformat, sys; from nbclient import NotebookClient\n"
        "book = nbformat.read(sys.argv[1], 4); NotebookClient(book, timeout=200).execute()\n"
        "nbformat.write(book, sys.argv[1])"
    )
    run(["-c", code, str(copy)], tmp_path)
    outputs = json.dumps([cell.get("outputs") for cell in json.loads(Path(copy).read_text())["cells"]])
    assert "<Engine" in outputs and "Completion(" in outputs and "10/10" in outputs


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_programs_pass_strict_types(checker: str, tmp_path: Path) -> None:
    """Those in examples/ and those of the pages, in one run of the checker."""
    require(checker, "fastapi")
    # pandas ships no types, and lm-evaluation-harness is not installed for this
    checked = [program for program in PROGRAMS if program.stem != "pandas_column"]
    checked += [program.save(tmp_path) for program in programs() if not program.uses_harness]
    assert len({path.stem for path in checked}) == len(checked) >= 20
    names = [str(path) for path in checked]
    options = ["--strict", "--no-incremental"] if checker == "mypy" else ["--pythonpath", sys.executable]
    run(["-m", checker, *options, *names], tmp_path)
