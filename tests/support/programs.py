"""The Python programs of the project's pages: every block marked ``python``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


class Program(NamedTuple):
    """One block. ``line``: of its page, where its first line is."""

    page: str
    line: int
    code: str

    @property
    def name(self) -> str:
        """The page and the line."""
        return f"{self.page}:{self.line}"

    @property
    def uses_harness(self) -> bool:
        """Whether it needs lm-evaluation-harness."""
        return "import lm_eval" in self.code

    @property
    def uses_ray(self) -> bool:
        """Whether it needs Ray."""
        return "import llamapipe.ray" in self.code

    def save(self, folder: Path) -> Path:
        """Writes the program into a folder, under a name that is a module's and tells the block."""
        path = folder / f"{re.sub(r'[^0-9A-Za-z]', '_', self.page)}_{self.line}.py"
        path.write_text(self.code, encoding="utf-8")
        return path


def programs() -> list[Program]:
    """Every Python block of every page."""
    blocks: list[Program] = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, block.start()) + 2
            blocks.append(Program(page.relative_to(ROOT).as_posix(), line, block[1]))
    return blocks
