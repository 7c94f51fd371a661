"""The architecture page and the recipes of CONTRIBUTING.md name files and things that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"`([^`\n]+)`")
IDENTIFIER = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?:\(\))?(?:=[\w\"]*)?")
SUFFIXES = (".py", ".h", ".hpp", ".cpp", ".md", ".json", ".in")
COMMANDS = ("nox ", "python ", "llamapipe ", "pip ", "-")


def recipes() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.partition("\n## Recipes\n")[2].partition("\n## ")[0]


def architecture() -> str:
    return (ROOT / "design" / "architecture.md").read_text(encoding="utf-8")


def words() -> set[str]:
    """Every identifier of the sources: the package, its tests, tools and benchmarks."""
    identifiers: set[str] = set()
    for folder in ("llamapipe", "tests", "tools", "benchmarks"):
        for suffix in ("py", "h", "hpp", "cpp"):
            for path in (ROOT / folder).rglob(f"*.{suffix}"):
                if path != Path(__file__):
                    identifiers |= set(re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8")))
    return identifiers


def is_path(name: str) -> bool:
    return "/" in name or name.endswith(SUFFIXES)


def paths(text: str) -> Iterator[str]:
    """What is named as a file or a folder. Names in a table are relative to the folder in the table's head."""
    folder = ""
    for line in text.splitlines():
        if not line.startswith("|"):
            folder = ""
        elif not folder and (head := re.match(r"\| file of `([\w/]+)` \|", line)):
            folder = f"{head[1]}/"
        for name in CODE.findall(line):
            if is_path(name) and not name.startswith(COMMANDS):
                yield folder + name if folder and "/" not in name else name


@pytest.mark.parametrize("text", [architecture(), recipes()], ids=["architecture", "recipes"])
def test_files_exist(text: str) -> None:
    named = set(paths(text))
    assert len(named) > 5
    assert not {name for name in named if not (ROOT / name.partition("::")[0]).exists()}


@pytest.mark.parametrize("text", [architecture(), recipes()], ids=["architecture", "recipes"])
def test_names_exist(text: str) -> None:
    known = words()
    named = {name for name in CODE.findall(text) if not is_path(name) and not name.startswith(COMMANDS)}
    identifiers = {match[1] for name in named if (match := IDENTIFIER.fullmatch(name))}
    assert len(identifiers) > 5
    assert not identifiers - known
