"""The architecture page, the recipes of CONTRIBUTING.md and the guides name files, things and options that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamapipe.cli import _parser

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"`([^`\n]+)`")
IDENTIFIER = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?:\(\))?(?:=[\w\"]*)?")
SUFFIXES = (".py", ".h", ".hpp", ".cpp", ".md", ".json", ".in")
OPTION = re.compile(r"(?<!\S)--[a-z][\w-]*")
# Options of other programs that the pages name: of builders, containers, Dynamo, benchmarks.
OTHERS = set(
    "--apply_chat_template --backend --batch_size --build-arg --config-settings --cpus --discovery-backend --format "
    "--hidden-import --http-host --isolation --served-model-name --tokenizer-dir --use_cache --workload".split()
)
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


def test_options_exist() -> None:
    """Pages for those who come from other programs name options of those; ``test_coming_from`` has them."""
    commands = [action.choices for action in _parser()._actions if isinstance(action.choices, dict)]
    options = {
        name for parsers in commands for parser in parsers.values() for name in parser._option_string_actions
    }
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md"]
    named: dict[str, str] = {}
    for page in pages:
        if page.parent.name != "coming-from":
            code = CODE.findall(page.read_text(encoding="utf-8"))
            named |= {option: page.name for text in code if text[0] == "-" for option in OPTION.findall(text)}
    assert len(named) > 50
    assert {option: page for option, page in named.items() if option not in options | OTHERS} == {}
    assert named.keys() >= OTHERS
