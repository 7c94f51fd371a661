"""The table at the end: each client, what it did, and how long that took."""

from __future__ import annotations

from typing import Any

import pytest

from agents.clients import ROWS


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = terminalreporter.config.stash[ROWS]
    if not rows:
        return
    terminalreporter.section("clients")
    terminalreporter.write_line("| client | version | result | seconds | what it did |")
    terminalreporter.write_line("|---|---|---|---|---|")
    for name, version, result, seconds, did in rows:
        terminalreporter.write_line(f"| {name} | {version} | {result} | {seconds} | {did} |")
