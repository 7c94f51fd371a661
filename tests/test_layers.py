"""Imports go downwards, the scheduler is pure, and packages say what they are for."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Set
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "design" / "architecture.md").read_text(encoding="utf-8")
TABLE = re.compile(r"^\| (?:package|file of `([\w/]+)`) \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)


def rows(folder: str, table: str) -> dict[str, int]:
    """What the first column of a table names, as modules, each with its row from the top."""
    return {
        f"{folder}/{name}".strip("/").removesuffix(".py").replace("/", "."): row
        for row, line in enumerate(table.splitlines())
        for name in re.findall(r"`([\w/.]+)`", line.split("|")[1])
    }


# By the package whose files a table has; and the table of all packages.
TABLES = {folder.replace("/", "."): rows(folder, table) for folder, table in TABLE.findall(PAGE)}
PACKAGES = TABLES.pop("")
# A table that is written otherwise would only be checked less.
assert set(TABLES) == {
    "llamapipe._engine.calls",
    "llamapipe._engine.policy",
    "llamapipe._engine.runtime",
    "llamapipe.fleet",
    "llamapipe.server",
}
POLICY = "llamapipe._engine.policy"
IMPURE = {"threading", "asyncio", "queue", "concurrent", "multiprocessing", "cffi", "ctypes", "numpy", "time"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.glob("llamapipe/**/*.py"))}


@cache
def imported(name: str, only_at_run_time: bool = False) -> frozenset[str]:
    """Every module that a module of ours imports, wherever in its text; with or without those for types only."""
    names: set[str] = set()
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    if only_at_run_time:
        for block in ast.walk(tree):
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
                block.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name} has a relative import: write the whole name"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {member if member in MODULES else node.module for member in members}
    return frozenset(names)


def place(name: str, table: Collection[str]) -> str | None:
    """The entry of a table that a module belongs to: the longest name fits. None for a module of another package."""
    file = "llamapipe.__init__" if name == "llamapipe" else name
    return max((entry for entry in table if f"{file}.".startswith(f"{entry}.")), key=len, default=None)


def ours(names: Set[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] == "llamapipe"}


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_downwards(name: str) -> None:
    """Between packages strictly; inside the packages whose files have a table, also within a row."""
    others = ours(imported(name))
    package = place(name, PACKAGES)
    assert package is not None, f"{name} has no row in the table of packages"
    rooms = {room for other in others if (room := place(other, PACKAGES)) is not None and room != package}
    wrong = {room for room in rooms if PACKAGES[room] <= PACKAGES[package]}
    for table in TABLES.values():
        here = place(name, table)
        files = {file for other in others if (file := place(other, table)) is not None}
        wrong |= {file for file in files if here is not None and table[file] < table[here]}
    assert not wrong, f"{name} must not import {', '.join(sorted(wrong))}: see design/architecture.md"


@pytest.mark.parametrize("package", TABLES)
def test_every_file_of_a_package_with_a_table_has_a_row(package: str) -> None:
    files = {name for name in MODULES if name.startswith(f"{package}.")}
    assert files and not {name for name in files if place(name, TABLES[package]) is None}


def test_the_page_names_what_is_beside_the_rooms_of_the_engine() -> None:
    beside = {path.name for path in (ROOT / "llamapipe" / "_engine").glob("*.py")} - {"__init__.py"}
    assert not {name for name in beside if f"`llamapipe/_engine/{name}`" not in PAGE}


# What callers hold; everything else asks these, by their public methods.
CORE = (
    "llamapipe._engine",
    "llamapipe._sync",
    "llamapipe.engine",
    "llamapipe.streams",
    "llamapipe.embedding",
)


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith(CORE)])
def test_only_the_core_knows_the_inside_of_an_engine(name: str) -> None:
    assert not {other for other in imported(name) if other.startswith("llamapipe._engine")}
    private = re.compile(r"\b\w*(?:engine|embedder|owner)\._(?!_)\w+")
    uses = private.findall(MODULES[name].read_text(encoding="utf-8"))
    assert not uses, f"{uses}: Engine and Embedder have public methods for programs around them"


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES.values()}), ids=lambda f: f.name)
def test_a_package_says_what_it_is_for(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert text.count(".") >= 2, f"{folder.name}/__init__.py must say in a few sentences what lives there"


def circle(names: Collection[str], only_at_run_time: bool = False) -> dict[str, set[str]]:
    """The modules that import themselves by a detour, each with what leads it back."""
    needs = {name: ours(imported(name, only_at_run_time)) & set(names) - {name} for name in names}
    while True:
        needed = set().union(*needs.values())
        kept = {name: those & needs.keys() for name, those in needs.items() if those and name in needed}
        if kept == needs:
            return kept
        needs = kept


@pytest.mark.parametrize("inside", ["_engine", "server", "fleet", ""])
def test_no_module_imports_itself_by_a_detour(inside: str) -> None:
    """Inside these packages not even for types; everywhere else at least not at run time."""
    package = f"llamapipe.{inside}".rstrip(".")
    names = [name for name in MODULES if f"{name}.".startswith(f"{package}.")]
    cycle = circle(names, only_at_run_time=not inside)
    assert not cycle, "\n".join(f"{name} -> {', '.join(sorted(those))}" for name, those in cycle.items())


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("llamapipe.server.routes.")])
def test_a_route_knows_no_other_routes(name: str) -> None:
    """What several of them need is in ``llamapipe/server/requests``."""
    assert not {other for other in imported(name) if other.startswith("llamapipe.server.routes.")}


@pytest.mark.parametrize("name", ["state", "gate", "requests.limits"])
def test_what_requests_share_knows_no_route(name: str) -> None:
    known, new = set[str](), {f"llamapipe.server.{name}"}
    while new:
        known |= new
        new = {n for name in new & MODULES.keys() for n in imported(name) if ".server." in n} - known
    assert "llamapipe.server.endpoint" not in known


# Modules there have the names of commands, and of llama-cpp-python's modules.
NAMED_BY_OTHERS = ("llamapipe.cli", "llamapipe.compat")


def test_modules_that_only_their_package_imports_begin_with_an_underscore() -> None:
    users: dict[str, set[str]] = {name: set() for name in MODULES}
    for name in MODULES:
        for other in imported(name) & MODULES.keys():
            users[other].add(name)
    inner = {
        name
        for name, path in MODULES.items()
        if name.count(".") > 1 and "._" not in name and not path.stem.startswith("__")
    }
    packages = {name: name.rpartition(".")[0] for name in inner}
    assert not {
        name
        for name, package in packages.items()
        if package not in NAMED_BY_OTHERS
        and all(f"{user}.".startswith(f"{package}.") for user in users[name])
    }


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith(CORE)])
def test_what_begins_with_an_underscore_belongs_to_its_package(name: str) -> None:
    """Others import what a package calls public. The core is one package in this sense."""
    foreign = set[str]()
    for other in imported(name) & MODULES.keys():
        private = re.search(r"\._(?!_)", other)
        owner = other[: private.start()] if private else "llamapipe"
        if owner != "llamapipe" and not f"{name}.".startswith(f"{owner}."):
            foreign.add(other)
    assert not foreign, f"{', '.join(sorted(foreign))}: a name without underscore says that others use it"


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith(POLICY)])
def test_policy_is_pure(name: str) -> None:
    """Neither a module of it nor what it imports knows threads, clocks or native code."""
    known, new = set[str](), {name}
    while new:
        known |= new
        new = {n for name in new if name in MODULES for n in imported(name)} - known
    assert {n for n in ours(known) if not n.startswith(POLICY)} <= {"llamapipe.errors"}
    assert not {n.split(".")[0] for n in known} & IMPURE


def test_fakes_need_nothing_native() -> None:
    tree = ast.parse((ROOT / "tests" / "support" / "fakes.py").read_text(encoding="utf-8"))
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {n for n in names if n and n.startswith("llamapipe")} == {
        "llamapipe.errors",
        "llamapipe._engine.policy.core",
        "llamapipe._engine.policy.scoring",
    }


INSIDE = ROOT / "tests" / "support" / "inside.py"
# Also within the programs that tests run, which are strings; ``_native`` is a module's name, too.
PRIVATE = re.compile(
    r"\b(?!self\b)\w+\]?\)?\._(?:engine_thread|queue|pipeline|executor|scheduler|micro_batches|request|children"
    r"|wakers|(?<!llamapipe\.native\._)native)\b"
)


@pytest.mark.parametrize("path", sorted((ROOT / "tests").glob("**/*.py")), ids=lambda path: path.stem)
def test_only_one_file_of_the_tests_knows_the_inside_of_an_engine(path: Path) -> None:
    uses = {match[0] for match in PRIVATE.finditer(path.read_text(encoding="utf-8"))}
    assert path == INSIDE or not uses, f"{uses}: ask a function of tests/support/inside.py"


# Tests of more than a part of the package, and what they share.
SUITES = {
    *("agents", "benchmarks", "build", "clients", "docs", "examples", "process", "real_models"),
    *("routers", "soak", "support", "tools"),
}
# ``tests`` is on the path: `import ray` must not find a folder of ours.
OTHER_NAMES = {
    "_engine": "engine",
    "dynamo": "dynamo_worker",
    "lm_eval": "lm_eval_harness",
    "ray": "ray_cluster",
}


def test_folders_of_tests_have_the_names_of_what_they_test() -> None:
    assert not list((ROOT / "tests" / "engine").glob("*.py")), "its folders say which one a test belongs to"
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").glob("*/**/*.py")}
    tested = {name.split(".")[1] for name in MODULES if "." in name}
    assert {folder.parts[0] for folder in folders} - SUITES <= {OTHER_NAMES.get(n, n) for n in tested}
