"""Replace a generated part of a page. Use it in a tool that writes a table into the documentation."""

from __future__ import annotations


def with_section(text: str, begin: str, end: str, section: str) -> str:
    """The page's text with ``section`` between two lines. Raises ValueError if the page lacks one of them."""
    before, opening, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not opening or not closed:
        raise ValueError(f"the page must have the lines {begin.strip()} and {end.strip()}")
    return f"{before}{begin}{section}{end}{after}"


def cell(text: str) -> str:
    """A text as a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", "\\n")
