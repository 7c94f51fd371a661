"""The server's page in a browser: Chromium, and a page on which nothing may fail."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window. Skips the test if there is none."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here; on Debian ci/setup_chromium_debian.sh installs it")
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def page_at(browser: Browser, url: str) -> Iterator[Page]:
    """A page of this address. After the test, no script of it may have failed, and no error been logged."""
    page = browser.new_page(viewport={"width": 1100, "height": 760})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(url)
    yield page
    page.close()
    assert not problems
