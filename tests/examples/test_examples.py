"""The programs in examples/ run as they stand, say in their first lines what they show, and pass strict type checks."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from support.programs import programs

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(EXAMPLES.glob("*.py"))
NEEDS = {
    "concurrent_summaries": ("tqdm",),
    "dspy_engine": ("dspy",),
    "extraction": ("llguidance", "pydantic"),
    "fastapi_stream": ("fastapi", "httpx"),
    "instructor_objects": ("instructor", "httpx2"),
    "langchain_model": ("langchain_core",),
    "llama_index_llm": ("llama_index",),
    "lm_eval_task": ("lm_eval",),
    "otel_spans": ("opentelemetry.sdk",),
    "pandas_column": ("pandas",),
    "scoring_a_list": ("tqdm",),
}
# Their packages are large: `nox -s integrations`.
LARGE = {"dspy_engine", "llama_index_llm", "lm_eval_task"}
BATCHED = r"answers, (?P<tokens>\d+) tokens in (?P<steps>\d+) steps"
# What is true of a program's output.
SAYS = {
    "dspy_engine": r"(?s)one answer: \w+\n.*16 examples.* (?P<tokens>\d+) tokens in (?P<steps>\d+) steps",
    "extraction": r"200 texts, 200 objects in [\d.]+ s, such as Sighting\(animal='\w+', is_hungry=(True|False)\)",
    "fan_out_timeouts": r"(?s)timeout .*length   200 tokens",
    "fastapi_stream": r"4, 5, 6",
    "instructor_objects": r"(The \w+ was \w+\. Sighting\(animal='\w+', is_hungry=\w+\)\n){6}",
    "langchain_model": rf"(?s)A cow says moo.*streamed the same: True\n8 {BATCHED}",
    "llama_index_llm": rf"(?s)index: '.+'\n' 4, 5, 6.*streamed the same: True\n8 {BATCHED}",
    "lm_eval_task": r"'acc,none': 1.0",
    "otel_spans": r"(request [0-3] > text_completion demo: \d+ \+ 8 tokens, prefill, first_token\n){8}",
    "pandas_column": r"Monday, Tuesday, +Wednesday, Thursday",
}


def marked(path: Path) -> ParameterSet:
    marks = [pytest.mark.integrations] if path.stem in LARGE else []
    return pytest.param(path, marks=[*marks, pytest.mark.lm_eval] if path.stem == "lm_eval_task" else marks)


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


def test_there_are_twenty_examples() -> None:
    assert len([*PROGRAMS, *EXAMPLES.glob("*.ipynb")]) == 20


@pytest.mark.parametrize("program", [marked(path) for path in PROGRAMS], ids=lambda path: path.stem)
def test_a_program_runs_and_says_what_it_shows(program: Path, tmp_path: Path) -> None:
    assert ast.get_docstring(ast.parse(program.read_text(encoding="utf-8")))
    require(*NEEDS.get(program.stem, ()))
    output = run([str(program)], tmp_path)
    assert output.strip()
    if program.stem in SAYS:
        match = re.search(SAYS[program.stem], output)
        assert match, output
        counts = match.groupdict()
        if "steps" in counts:  # requests shared steps
            assert 2 * int(counts["steps"]) < int(counts["tokens"]), output


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
    assert "interrupted: 0 requests left" in outputs and "4, 5, 6" in outputs


def check_types(checker: str, checked: list[Path], folder: Path) -> None:
    options = ["--strict", "--no-incremental"] if checker == "mypy" else ["--pythonpath", sys.executable]
    run(["-m", checker, *options, *map(str, checked)], folder)


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_programs_pass_strict_types(checker: str, tmp_path: Path) -> None:
    """Those in examples/ and those of the pages, in one run of the checker."""
    require(checker, "fastapi", "instructor", "langchain_core")
    # pandas ships no types, and large packages are not installed for this
    checked = [program for program in PROGRAMS if program.stem not in LARGE | {"pandas_column"}]
    checked += [
        program.save(tmp_path) for program in programs() if not (program.uses_harness or program.uses_ray)
    ]
    assert len({path.stem for path in checked}) == len(checked) >= 20
    check_types(checker, checked, tmp_path)


@pytest.mark.integrations
@pytest.mark.parametrize(
    ("checker", "program"),
    [("mypy", "llama_index_llm"), ("pyright", "llama_index_llm"), ("pyright", "dspy_engine")],
)
def test_programs_with_large_packages_pass_strict_types(checker: str, program: str, tmp_path: Path) -> None:
    """Where the packages have types: DSPy has none for mypy, lm-evaluation-harness hides those of its calls."""
    require(checker, *NEEDS[program])
    check_types(checker, [EXAMPLES / f"{program}.py"], tmp_path)
