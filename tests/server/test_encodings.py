"""What the server does for the encodings of bodies, which most requests do not have."""

from __future__ import annotations

import sys

import pytest

from llamapipe.server._body import accepted_encodings, encodings_of


class Finder:
    """Sees every package that Python looks for."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        self.names.append(name)


def test_requests_look_for_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python looks for a missing one again each time; the first request has done so."""
    accepted_encodings()
    finder = Finder()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert encodings_of([]) == [] and encodings_of([b"gzip"]) == ["gzip"]
    assert finder.names == []
