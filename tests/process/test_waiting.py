"""What a test says that waited for something which did not come."""

from __future__ import annotations

import pytest
from support.control import wait_until


def test_a_wait_in_vain_names_the_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.control.PATIENCE_S", 0.0)
    items: list[int] = []
    with pytest.raises(AssertionError, match=r"for wait_until\(lambda: len\(items\) == 3\); it was False"):
        wait_until(lambda: len(items) == 3)
    with pytest.raises(AssertionError, match=r"for <method-wrapper .*; it was 0"):
        wait_until(items.__len__)
