"""What the tests of guesses share."""

from __future__ import annotations

import pytest


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is guessed is taken: times do not decide."""
    from support.eager_gate import EagerGate

    monkeypatch.setattr("llamapipe.engine.Gate", EagerGate)
