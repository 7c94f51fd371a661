"""Check the HTML that `nox -s docs` made: local links and pictures lead somewhere, and every public name has its place.

    python tools/check_site.py FOLDER

Needs the package that the pages describe. Exit status 1 if something is missing.
"""

from __future__ import annotations

import inspect
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import llamapipe

MADE_BY_SPHINX = ("genindex.html", "search.html", "py-modindex.html")
INTERNAL = {("Model", "adopt"), ("Model", "handle"), ("Model", "release")}  # for the package's other modules


class Page(HTMLParser):
    """The ids of a page, and what it links to or shows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes ids and targets."""
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name in ("href", "src", "data") and value:
                self.targets.add(value)


def broken_targets(folder: Path, pages: dict[Path, Page]) -> list[str]:
    """The local targets that lead nowhere."""
    broken = []
    for file, page in pages.items():
        for target in sorted(page.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            path = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            missing = not path.exists()
            anchor = unquote(parts.fragment)
            if not missing and anchor and path in pages:
                missing = anchor not in pages[path].ids
            if missing:
                broken.append(f"{file.relative_to(folder)}: {target}")
    return broken


def public_names() -> list[str]:
    """The package's public names, and those of the public methods and properties of its classes."""
    names = []
    for name in llamapipe.__all__:
        value = getattr(llamapipe, name)
        names.append(f"llamapipe.{name}")
        if not inspect.isclass(value):
            continue
        for member, attribute in inspect.getmembers(value):
            function = attribute.fget if isinstance(attribute, property) else attribute
            ours = str(getattr(function, "__module__", "")).startswith("llamapipe") and inspect.isroutine(
                function
            )
            if ours and not member.startswith("_") and (name, member) not in INTERNAL:
                names.append(f"llamapipe.{name}.{member}")
    return names


def main(folder: Path) -> int:
    """Prints what is missing; the exit status."""
    folder = folder.resolve()
    pages = {file: Page(file.read_text(encoding="utf-8")) for file in sorted(folder.rglob("*.html"))}
    broken = broken_targets(folder, pages)
    ids = {name for file, page in pages.items() if file.name not in MADE_BY_SPHINX for name in page.ids}
    names = public_names()
    missing = [name for name in names if name not in ids and f"module-{name}" not in ids]
    odd = [
        file.name
        for file in pages
        if file.parent.name == "reference"
        and re.search(r"<blockquote|problematic", file.read_text(encoding="utf-8"))
    ]
    for text in broken:
        print("leads nowhere:", text)
    for text in odd:
        print("holds an indented paragraph, code without '::', or markup that was not understood:", text)
    for text in missing:
        print("not in the reference:", text)
    print(f"{len(pages)} pages, {len(names)} public names")
    return int(bool(broken or odd or missing or not pages))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
