"""Links between the project's pages lead somewhere: files, headings, and paths named in the text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("design/*.md")),
    *sorted(ROOT.glob("benchmarks/**/*.md")),
    ROOT / "third_party" / "README.md",
]
NOTEBOOK = (
    ROOT / "benchmarks" / "notebook"
)  # tells what was true then: its links hold, its paths may be of the past
FOLDERS = ("benchmarks", "ci", "design", "docs", "llamapipe", "native_build", "tests", "third_party", "tools")
BUILT = ("llamapipe/native/lib", "third_party/llama.cpp")  # there after a build, or if the user puts it there

LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NAMED_PATH = re.compile(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./*-]*[\w*]")


def prose(page: Path) -> str:
    """A page's text without its code blocks."""
    return CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))


def anchor_of(heading: str) -> str:
    """The anchor GitHub gives to a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """All anchors of a page; a repeated heading gets a number."""
    seen: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.*)$", prose(page), re.MULTILINE):
        anchor, n = anchor_of(heading), 0
        while (name := f"{anchor}-{n}" if n else anchor) in seen:
            n += 1
        seen.add(name)
    return seen


def names(pages: list[Path]) -> list[str]:
    """Their paths, for messages."""
    return [page.relative_to(ROOT).as_posix() for page in pages]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_relative_links_lead_to_files_and_headings(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target}: there is no such file"
        if anchor:
            assert anchor in anchors(file), f"{target}: the page has no such heading"


READERS = [page for page in PAGES if NOTEBOOK not in page.parents]


@pytest.mark.parametrize("page", READERS, ids=names(READERS))
def test_paths_named_in_the_text_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in sorted(set(NAMED_PATH.findall(text))):
        if not name.startswith(BUILT):
            assert list(ROOT.glob(name)), f"{name}: there is no such file"


def test_pages_named_in_the_package_exist() -> None:
    sources = [
        *ROOT.glob("llamapipe/**/*.py"),
        *ROOT.glob("llamapipe/native/src/*.[ch]pp"),
        ROOT / "pyproject.toml",
    ]
    ours = re.compile(r"(?<![\w/.-])(?:docs|design)/[\w./-]+\.md")
    named = {name for source in sources for name in ours.findall(source.read_text(encoding="utf-8"))}
    named -= {"docs/autoparser.md", "docs/format.md"}  # of llama.cpp, and of harmony
    assert named and not {name for name in named if not (ROOT / name).exists()}


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_table_has_a_head(page: Path) -> None:
    """A blank line would end a table, and show its other rows as text."""
    for table in re.findall(r"(?:^\|.*\n)+", prose(page), re.MULTILINE):
        assert re.match(r".*\n\|[-:| ]+\n", table), table.splitlines()[0]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_tests_named_in_the_text_exist(page: Path) -> None:
    for path, name in set(
        re.findall(r"(tests/[\w/]+\.py)::(?:\w+::)?(\w+)", page.read_text(encoding="utf-8"))
    ):
        assert re.search(rf"\bdef {name}\(", (ROOT / path).read_text(encoding="utf-8")), f"{path}::{name}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    known, new = set[Path](), {ROOT / "README.md"}
    while new:
        known |= new
        targets = {
            (page.parent / target.partition("#")[0]).resolve()
            for page in new
            for target in LINK.findall(prose(page))
        }
        new = {file for file in targets if file.suffix == ".md" and file.exists()} - known
    pages = {page for page in PAGES if {ROOT / "docs", ROOT / "design"} & {*page.parents}}
    # The site shows a page from outside its folder in place of these, which only link to it.
    places = {
        page for page in pages - known if page.stat().st_size < 150 and len(LINK.findall(prose(page))) == 1
    }
    assert not names(sorted(pages - known - places))
