"""Sphinx's configuration: `nox -s docs` builds these pages as HTML. The Markdown is written for GitHub, too.

So it holds no directives, except for the reference. Two things are done here instead, when a page is read:

- **Navigation.** The links of `index.md` become tables of contents, one for each heading.
- **Pages outside this folder.** Those in `OUTSIDE` are read in place of a page that links to them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
if find_spec("llamapipe") is None:
    sys.path.insert(
        0, str(ROOT)
    )  # the reference imports the package; it needs neither the native module nor a model

import llamapipe  # noqa: E402

OUTSIDE = {
    "architecture": "design/architecture.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
}
PAGE_OF = {ROOT / name: DOCS / f"{page}.md" for page, name in OUTSIDE.items()}
PAGE_OF[ROOT / "README.md"] = DOCS / "index.md"
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<path>[^()\s#:]+)(?P<anchor>#[^()\s]*)?\)")
INTERNAL = re.compile(r"_engine\.|engine\.(frontend|delivery|sampling)\.|native_pipeline")
CODE_BLOCK = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)

project = "llamapipe"
author = "the llamapipe authors"
project_copyright = author
release = version = llamapipe.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "index"
source_suffix = {".md": "markdown"}
nitpicky = True
# Names of the standard library, of numpy and of type variables: no inventory of theirs is read, which needs a network.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!llamapipe\.).*"),
    (r"py:class", r"llamapipe\.\w+\.T"),
]  # not ours; type variables
show_warning_types = True

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
myst_linkify_fuzzy_links = False

autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

# `sphinx -b linkcheck` checks links to other hosts as well; `nox -s docs` checks those between pages only.
linkcheck_anchors = False
linkcheck_timeout = 10

html_theme = "furo"
html_title = f"llamapipe {version}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
html_theme_options = {"navigation_with_keys": True}


def _targets(text: str, folder: Path) -> Iterator[Path]:
    """The Markdown pages that a text links to, in order."""
    for link in LINK.finditer(CODE_BLOCK.sub("", text)):
        path = (folder / link["path"]).resolve()
        path = PAGE_OF.get(path, path)
        if path.suffix == ".md" and path.is_file() and DOCS in path.parents:
            yield path


def _toctree(pages: Sequence[Path], page: Path, caption: str = "") -> str:
    """A hidden table of contents of pages: the navigation at the side."""
    names = dict.fromkeys(path.relative_to(DOCS).with_suffix("").as_posix() for path in pages)
    names.pop(page.relative_to(DOCS).with_suffix("").as_posix(), None)
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *(f"/{name}" for name in names), "```", ""])


def _moved(text: str, old: Path, page: Path) -> str:
    """A text whose links lead to the same files from another page."""

    def replaced(link: re.Match[str]) -> str:
        target = (old / link["path"]).resolve()
        target = PAGE_OF.get(target, target)
        path = os.path.relpath(target, page.parent)
        if target.suffix == ".md" and DOCS not in target.parents:
            return f"{link['text']}(path:{path})"  # the file itself
        return f"{link['text']}({path}{link['anchor'] or ''})"

    parts = CODE_BLOCK.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(replaced, part) for part in parts)


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Changes a page's text before it is parsed."""
    page = DOCS / f"{docname}.md"
    folder = page.parent
    if docname in OUTSIDE:
        outside = ROOT / OUTSIDE[docname]
        app.env.note_dependency(str(outside))
        source[0], folder = outside.read_text(encoding="utf-8"), outside.parent
    text = _moved(source[0], folder, page)
    if docname == "index":
        for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
            text += _toctree(list(_targets(part, folder)), page, caption=part.partition("\n")[0])
    source[0] = text


def _docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Makes links of the pages that a docstring names."""
    lines[:] = [re.sub(r"``docs/([\w./-]+)\.md``", r":doc:`/\1`", line) for line in lines]


def _signature(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str, result: str
) -> tuple[str, str] | None:
    """Leaves out the arguments of classes that the package makes itself: their types are not public."""
    return ("", "") if what == "class" and INTERNAL.search(signature or "") else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("autodoc-process-signature", _signature)
    return {"parallel_read_safe": True}
