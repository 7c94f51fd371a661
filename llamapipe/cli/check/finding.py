"""One line of what the doctor prints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The result of one check. `fix`: what to do if it is not `ok`, or could be better."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
