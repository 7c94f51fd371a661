"""The API reference has every public name; `nox -s docs` checks the pages that Sphinx makes of it."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

import llamapipe
import llamapipe.compat
import llamapipe.ray
import llamapipe.server

ROOT = Path(__file__).parents[2]
DIRECTIVE = re.compile(r"^\.\. (?:py:|auto)(?:class|function|module|data|exception):: ([\w.]+)", re.MULTILINE)
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
DESCRIBED = [name for page in PAGES for name in DIRECTIVE.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    "package", [llamapipe, llamapipe.compat, llamapipe.ray, llamapipe.server], ids=lambda m: m.__name__
)
def test_every_public_name_is_on_a_page(package: ModuleType) -> None:
    assert not {f"{package.__name__}.{name}" for name in package.__all__} - set(DESCRIBED)


def test_no_name_is_there_twice() -> None:
    assert len(DESCRIBED) == len(set(DESCRIBED)) > 40


def test_every_page_of_the_reference_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert not [page.name for page in PAGES if f"(reference/{page.name})" not in index]
