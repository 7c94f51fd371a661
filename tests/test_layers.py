"""Imports go one way, the scheduler is pure, and every module is described."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ["native", "llama", "pipeline", "engine", "cli"]  # each may import those before it
MODULES = sorted(ROOT.glob("llamapipe/**/*.py"))


def imported(path: Path) -> set[str]:
    """Every module a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    layer = path.relative_to(ROOT / "llamapipe").parts[0]
    if layer not in LAYERS:
        return
    later = LAYERS[LAYERS.index(layer) + 1 :]
    wrong = {
        name
        for name in imported(path)
        if name.split(".")[:1] == ["llamapipe"] and name.split(".")[1:2] and name.split(".")[1] in later
    }
    assert not wrong


@pytest.mark.parametrize("name", ["scheduler", "slots", "request"])
def test_policy_is_pure(name: str) -> None:
    names = imported(ROOT / "llamapipe" / "engine" / f"{name}.py")
    assert not {
        n
        for n in names
        if n in ("threading", "asyncio") or n.startswith(("llamapipe.llama", "llamapipe.pipeline"))
    }


def test_errors_import_nothing_of_ours() -> None:
    assert imported(ROOT / "llamapipe" / "errors.py") == set()


def test_every_module_is_described() -> None:
    described = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    paths = [p for folder in ("llamapipe", "native_build", "tools") for p in ROOT.glob(f"{folder}/**/*.py")]
    missing = [str(p.relative_to(ROOT)) for p in paths if f"`{p.relative_to(ROOT)}`" not in described]
    assert not missing
