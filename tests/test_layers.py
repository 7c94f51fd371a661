"""Imports go one way, the scheduler is pure, and every module is described."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What each part of the package may import of the others; a part is a folder, or a module beside them.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "text": {"errors"},
    "native": {"errors"},
    "llama": {"native", "errors"},
    "pipeline": {"llama", "native", "errors"},
    "structured": {"llama", "native", "errors"},
    "engine": {"pipeline", "structured", "llama", "native", "text", "errors"},
    "cli": {"engine", "pipeline", "llama", "native", "text", "errors", "__init__"},
    "lm_eval": {"engine", "llama", "errors"},
    "__init__": {"engine", "pipeline", "llama", "errors"},
    "__main__": {"cli"},
}
PURE = (
    "llamapipe.engine.scheduler",
    "llamapipe.engine.slots",
    "llamapipe.engine.request",
    "llamapipe.engine.family",
    "llamapipe.engine.planner",
    "llamapipe.engine.running",
    "llamapipe.engine.step_plan",
    "llamapipe.pipeline.token_score",
)
IMPURE = {"threading", "asyncio", "queue", "concurrent", "multiprocessing", "cffi", "ctypes", "numpy", "time"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.glob("llamapipe/**/*.py"))}


def imported(name: str) -> set[str]:
    """Every module that a module of ours imports, wherever in its text."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name} has a relative import: write the whole name"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {member if member in MODULES else node.module for member in members}
    return names


def part_of(name: str) -> str:
    """``llamapipe.engine.slots`` belongs to ``engine``."""
    return name.split(".")[1] if "." in name else "__init__"


def ours(names: set[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] == "llamapipe"}


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_one_way(name: str) -> None:
    mine = part_of(name)
    wrong = {n for n in ours(imported(name)) if part_of(n) not in ALLOWED[mine] | {mine}}
    assert not wrong, f"llamapipe/{mine} may import {', '.join(sorted(ALLOWED[mine])) or 'nothing of ours'}"


def test_no_module_imports_itself_by_a_detour() -> None:
    waiting = {name: ours(imported(name)) for name in MODULES}
    while free := {name for name, needs in waiting.items() if not needs & waiting.keys() - {name}}:
        waiting = {name: needs for name, needs in waiting.items() if name not in free}
    assert not waiting


@pytest.mark.parametrize("name", PURE)
def test_policy_is_pure(name: str) -> None:
    """Neither it nor what it imports knows threads, clocks or native code."""
    known, new = set[str](), {name}
    while new:
        known |= new
        new = {n for one in new if one in MODULES for n in imported(one)} - known
    assert ours(known) <= {*PURE, "llamapipe.errors"}
    assert not {n.split(".")[0] for n in known} & IMPURE


def test_fakes_need_nothing_native() -> None:
    tree = ast.parse((ROOT / "tests" / "fakes.py").read_text(encoding="utf-8"))
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {n for n in names if n and n.startswith("llamapipe")} == {
        "llamapipe.errors",
        "llamapipe.pipeline.token_score",
    }


def test_every_module_is_described_in_a_sentence() -> None:
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    described = dict(re.findall(r"^- `([^`]+)`: (.+)$", text, re.MULTILINE))
    assert len(described) == len(re.findall(r"^- ", text, re.MULTILINE))
    folders = ("llamapipe", "native_build", "tools")
    paths = [p for folder in folders for p in ROOT.glob(f"{folder}/**/*.py")]
    paths += (ROOT / "llamapipe" / "native" / "src").iterdir()
    names = {p.relative_to(ROOT).as_posix() for p in paths}
    assert sorted(described) == sorted(names)
    for name, sentence in described.items():
        assert sentence.endswith("."), name
