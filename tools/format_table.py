"""Write the table of formats in docs/structured.md from those that the library enforces.

    python tools/format_table.py

A test fails if the page says something else than the code.
"""

from __future__ import annotations

import sys
from pathlib import Path

from page_sections import cell, with_section

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after an installed llamapipe

from llamapipe.structured.formats import FORMATS

PAGE = Path(__file__).parent.parent / "docs" / "structured.md"
BEGIN, END = "<!-- formats: python tools/format_table.py -->\n", "<!-- end of formats -->\n"


def with_table(text: str) -> str:
    """The page with the table as the code says it."""
    return with_section(text, BEGIN, END, _table())


def _table() -> str:
    lines = ["| `format` | allows what this defines | and also |", "|---|---|---|"]
    rows: dict[tuple[str, str], list[str]] = {}
    for name, known in FORMATS.items():
        rows.setdefault((known.source, known.also), []).append(f"`{name}`")
    lines += [
        f"| {', '.join(names)} | {cell(source)} | {cell(also)} |" for (source, also), names in rows.items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
