"""What tests of memory share: the plain loop of a module's ``model``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.plain import PlainLoop, plain_loop

import llamapipe as lp


@pytest.fixture(scope="module")
def plain(model: lp.Model) -> Iterator[PlainLoop]:
    """The same tokens without an engine."""
    with plain_loop(model) as loop:
        yield loop
